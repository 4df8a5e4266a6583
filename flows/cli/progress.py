"""Progress on the terminal: one bar for the iterations, one line for each piece of work in progress."""

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class TerminalProgress:
    """Bars on a terminal; elsewhere a line for each finished iteration. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._bars: dict[str, TaskID] = {}
        self._rich = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "TerminalProgress":
        self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rich.stop()

    def begin(self, label: str) -> None:
        with self._lock:
            if label not in self._bars:
                self._bars[label] = self._rich.add_task(label, total=None, count="")

    def end(self, label: str) -> None:
        with self._lock:
            if label in self._bars:
                self._rich.remove_task(self._bars.pop(label))

    def advance(self, label: str, done: int, total: int) -> None:
        self.begin(label)
        self._rich.update(self._bars[label], completed=done, total=total, count=f"{done}/{total}")

    def note(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(f"[dim]{elapsed:6.1f} s[/dim]  {escape(text)}", highlight=False)
