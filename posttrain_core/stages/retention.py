"""Retention: old checkpoints and policy versions go, tombstone first; never what a resume needs.

Version 0 stays (it is the reference policy and where a replay can always start), as do the newest `keep_last` of each
and the multiples of `keep_every`. What a fork needs is retired like the rest, but its objects stay: the fork leaves a
note and then looks for tombstones, retention leaves a tombstone and then looks for notes, so one sees the other. The
same holds for what an alias points at, with the alias as the note. What an attempt left behind that no manifest came to
name goes once the manifest is there: not sooner, for until then an earlier attempt may still commit.
"""

import json
import re
from collections.abc import Sequence

from posttrain_core import layout
from posttrain_core.layout import Scope
from posttrain_core.manifest import ObjectRef
from posttrain_core.registry import reached
from posttrain_core.stages.context import Run
from posttrain_core.store.protocol import ObjectStore

_KINDS = {"checkpoints": layout.checkpoint, "policies": layout.policy}  # folder of the run -> its keys
_ATTEMPT = re.compile(r"=(\d+)/attempt=[^/]+/")
_HELD = re.compile(r"/(checkpoints|policies)/\w+=(\d+)/")


class Retention:
    """Remembers what is kept, so that an iteration costs a look at the newest version only."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._gone = {kind: retired(run.store, run.name, kind) for kind in _KINDS}
        self._kept: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        self._seen = 0
        for kind in _KINDS:  # a process before this one may have been killed at its deletes
            self._sweep(kind, f"{layout.run_prefix(run.name)}{kind}/")

    def apply(self, version: int) -> None:
        """Retire what policy version `version`, just published, made superfluous."""
        self._tidy("policies", version)
        self._tidy("checkpoints", version - 1)
        if self._seen == 0:
            self._tidy("policies", 0)
        for iteration in range(self._seen, version):
            self._note("policies", iteration + 1)
            if self.run.manifest(Scope(iteration), "update").notes.get("checkpoint"):
                self._note("checkpoints", iteration)
        self._seen = max(self._seen, version)
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
        self._gone[kind].add(number)
        self._tidy(kind, number)

    def _tidy(self, kind: str, number: int) -> None:
        self._sweep(kind, _KINDS[kind](self.run.name, number, "").rpartition("attempt=")[0])

    def _sweep(self, kind: str, prefix: str) -> None:
        """Below `prefix`, delete the retired and the attempts that lost to the one that the manifest names."""
        found: dict[int, dict[str, list[str]]] = {}  # number -> attempt's prefix -> keys
        for info in self.run.store.list(prefix):
            if match := _ATTEMPT.search(info.key):
                attempts = found.setdefault(int(match[1]), {})
                attempts.setdefault(info.key[: match.end()], []).append(info.key)
        gone = self._gone[kind]
        if gone & found.keys():
            gone = gone - held_by_forks(self.run.store, self.run.name)[kind]
            gone -= held_by_aliases(self.run.store, self.run.name)[kind].keys()
        for number, attempts in found.items():
            if number not in gone:
                named = self._named(kind, number) if len(attempts) > 1 else ""
                if not named:
                    continue
                attempts.pop(named, None)
            self.run.lease.check()
            for key in (key for keys in attempts.values() for key in keys):
                self.run.store.delete(key)

    def _named(self, kind: str, number: int) -> str:
        """The prefix of the attempt that counts; empty as long as there is none."""
        if kind == "policies":
            policy = self.run.find_policy(number)
            return str(policy.notes["prefix"]) if policy else ""
        update = self.run.find(Scope(number), "update")
        return str(update.notes.get("checkpoint", "")) if update else ""

    def _objects(self, kind: str, number: int) -> Sequence[ObjectRef]:
        if kind == "policies":
            return self.run.policy(number).objects
        return self.run.manifest(Scope(number), "update").named("/checkpoints/")


def held_by_forks(store: ObjectStore, run: str) -> dict[str, set[int]]:
    """The checkpoints and policy versions of which a fork's note says that it needs them."""
    held: dict[str, set[int]] = {kind: set() for kind in _KINDS}
    for info in list(store.list(layout.forks(run))):
        for key in json.loads(store.get(info.key))["objects"]:
            if match := _HELD.search(key):
                held[match[1]].add(int(match[2]))
    return held


def held_by_aliases(store: ObjectStore, run: str) -> dict[str, dict[int, set[str]]]:
    """The policy versions whose objects an alias reaches, with the keys of these. Of a run's own and its forks'."""
    held: dict[str, dict[int, set[str]]] = {kind: {} for kind in _KINDS}
    for key in reached(store):
        if key.startswith(layout.run_prefix(run)) and (match := _HELD.search(key)):
            held[match[1]].setdefault(int(match[2]), set()).add(key)
    return held


def unavailable(store: ObjectStore, run: str, kind: str) -> set[int]:
    """The retired checkpoints or policies of a run, but for those that an alias has kept."""
    dead = retired(store, run, kind)
    held = held_by_aliases(store, run)[kind] if dead else {}
    return {number for number in dead if number not in held or not all(map(store.stat, held[number]))}


def retired(store: ObjectStore, run: str, kind: str) -> set[int]:
    """The checkpoints or policies of a run that have a tombstone."""
    prefix = layout.retired(run, kind, 0).rpartition("/")[0] + "/"
    return {int(info.key.rpartition("/")[2].removesuffix(".json")) for info in store.list(prefix)}
