"""The journal of a shard that is still being generated: finished rollouts are put down while others go on.

A shard of long rollouts takes long. When the process is killed, those that had finished are in the journal, and the
next process takes them from there instead of making them again. Parts are tables outside the table prefixes; once the
shard is committed they are deleted (by `posttrain gc` where the process died in between).
"""

import threading
from types import TracebackType

from posttrain_core import layout
from posttrain_core.layout import Scope
from posttrain_core.manifest import Fingerprint, commit_table, find_table, read_table
from posttrain_core.records import Rollout
from posttrain_core.stages.context import Run, new_attempt

FLUSH_SECONDS = 5.0


class Journal:
    """Use as a context manager: what was added is written every few seconds by a thread of its own, and at the end of
    a block that failed. `finished` holds the rollouts that an earlier process put down."""

    def __init__(self, run: Run, scope: Scope, shard: int, expected: Fingerprint) -> None:
        self._run, self._scope, self._expected = run, scope, expected
        self._pending: list[Rollout] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None
        self._prefix = layout.journal(run.name, scope, shard)
        self._keys = [info.key for info in run.store.list(self._prefix)]
        self.finished = self._read()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        if self._writer is not None:
            self._writer.join()
        if kind is not None:
            self._flush()

    def add(self, rollout: Rollout) -> None:
        """Returns at once; from any thread."""
        with self._lock:
            self._pending.append(rollout)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="journal", daemon=True)
                self._writer.start()

    def clear(self) -> None:
        """The shard is committed: its table holds all that the journal held."""
        for key in self._keys:
            self._run.store.delete(key)
        self._keys = []

    def _read(self) -> dict[str, Rollout]:
        """By id; of two that a slow former process made, the first one counts."""
        found: dict[str, Rollout] = {}
        for key in self._keys:
            ref = find_table(self._run.store, key, self._expected)
            for rollout in read_table(self._run.store, ref, Rollout) if ref else ():
                found.setdefault(rollout.rollout_id, rollout)
        return found

    def _write(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._flush()

    def _flush(self) -> None:
        """What fails here is noted and tried again with the next ones: a store that is really gone fails the commit."""
        with self._lock:
            rollouts, self._pending = self._pending, []
        if not rollouts:
            return
        key = f"{self._prefix}{len(self._keys):04d}.{new_attempt()}.parquet"
        try:
            self._keys.append(commit_table(self._run.store, key, "rollouts", rollouts, self._expected).key)
        except Exception as error:
            with self._lock:
                self._pending = rollouts + self._pending
            self._run.progress.note(f"{self._scope}: {len(rollouts)} finished rollouts are not journalled: {error}")
