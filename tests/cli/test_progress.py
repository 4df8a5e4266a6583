"""Progress on the terminal."""

import io

from rich.console import Console

from flows.cli.progress import TerminalProgress


def test_notes_are_printed_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=200)
    with TerminalProgress(console) as progress:
        progress.note("HTTP 500: [/tmp/log] [red] broke")
    assert "HTTP 500: [/tmp/log] [red] broke" in console.file.getvalue()  # type: ignore[attr-defined]
