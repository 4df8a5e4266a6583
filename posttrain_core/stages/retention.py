"""Retention: old checkpoints and policy versions go, tombstone first; never what a resume needs.

Version 0 stays (it is the reference policy and where a replay can always start), as do the newest `keep_last` of each
and the multiples of `keep_every`.
"""

import json
from collections.abc import Sequence

from posttrain_core import layout
from posttrain_core.layout import Scope
from posttrain_core.manifest import ObjectRef
from posttrain_core.stages.context import Run


class Retention:
    """Remembers what is kept, so that an iteration costs a look at the newest version only."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._gone = {kind: _retired(run, kind) for kind in ("checkpoints", "policies")}
        self._kept: dict[str, list[int]] = {"checkpoints": [], "policies": []}
        self._seen = 0
        for kind, numbers in self._gone.items():
            if numbers:  # only the newest can have been interrupted between its tombstone and its deletes
                self._bury(kind, max(numbers))

    def apply(self, version: int) -> None:
        """Retire what policy version `version`, just published, made superfluous."""
        for iteration in range(self._seen, version):
            self._note("policies", iteration + 1)
            if self.run.manifest(Scope(iteration), "update").notes.get("checkpoint"):
                self._note("checkpoints", iteration)
        self._seen = version
        settings = self.run.config.checkpoint
        for kind, numbers in self._kept.items():
            for number in numbers[: -settings.keep_last]:
                if settings.keep_every == 0 or number % settings.keep_every:
                    self._remove(kind, number)
            self._kept[kind] = numbers[-settings.keep_last :]

    def _note(self, kind: str, number: int) -> None:
        if number not in self._gone[kind]:
            self._kept[kind].append(number)

    def _remove(self, kind: str, number: int) -> None:
        keys = [ref.key for ref in self._objects(kind, number)]
        tombstone = json.dumps({"kind": kind, "number": number, "objects": keys}).encode()
        self.run.lease.check()
        self.run.store.put_if_absent(layout.retired(self.run.name, kind, number), tombstone)
        self._bury(kind, number)

    def _bury(self, kind: str, number: int) -> None:
        """Delete what a tombstone names; its keys are read from the manifest, which carries a checksum."""
        for ref in self._objects(kind, number):
            self.run.store.delete(ref.key)

    def _objects(self, kind: str, number: int) -> Sequence[ObjectRef]:
        if kind == "policies":
            return self.run.policy(number).objects
        return self.run.manifest(Scope(number), "update").named("/checkpoints/")


def _retired(run: Run, kind: str) -> set[int]:
    prefix = layout.retired(run.name, kind, 0).rpartition("/")[0] + "/"
    return {int(info.key.rpartition("/")[2].removesuffix(".json")) for info in run.store.list(prefix)}
