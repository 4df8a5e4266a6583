"""A cgroup per zygote, where this process may make one: memory and number of processes of an execution as a whole.

Version 2 needs a parent folder that hands the memory and pids controllers down (root, or a delegated subtree);
version 1 needs write access to both hierarchies. Elsewhere the limits per process have to do.
Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import itertools
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain_core.sandbox.protocol import Limits

OWN_PROCESSES = 2  # zygote and init
OWN_MEMORY_MIB = 48  # what those hold, and what the kernel holds for dying namespaces
ABANDONED_SECONDS = 120
_PREFIX = "posttrain-"
_numbers = itertools.count()


@dataclass(frozen=True)
class Cgroup:
    """One slot: its folder in each hierarchy (the same one twice in version 2)."""

    version: int
    memory: Path
    pids: Path

    @property
    def folders(self) -> list[Path]:
        return list(dict.fromkeys((self.memory, self.pids)))

    def limit(self, limits: Limits) -> None:
        """Set the limits of the next execution. Raises OSError."""
        num_bytes = str((limits.memory_mib + OWN_MEMORY_MIB) << 20)
        (self.pids / "pids.max").write_text(str(limits.num_processes + OWN_PROCESSES))
        if self.version == 2:
            (self.memory / "memory.max").write_text(num_bytes)
            return
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        current = int((self.memory / names[0]).read_text())
        for name in names if int(num_bytes) < current else reversed(names):  # memsw is never below memory
            if (self.memory / name).exists():
                (self.memory / name).write_text(num_bytes)

    def events(self) -> tuple[int, int]:
        """How often so far the kernel killed for memory, and refused a process."""
        file = "memory.events" if self.version == 2 else "memory.oom_control"
        return _field(self.memory / file, "oom_kill"), _field(self.pids / "pids.events", "max")

    def remove(self) -> None:
        remove_folders(self.folders)


def remove_folders(folders: list[Path]) -> None:
    """rmdir, tried for a second: a cgroup is busy until the kernel has buried its last process."""
    for folder in folders:
        for _ in range(50):
            try:
                folder.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.02)
            else:
                break


def remove_abandoned(parent: Path) -> None:
    """Remove slots whose makers were killed before they could: those that are empty long after they were made."""
    for folder in parent.glob(_PREFIX + "*"):
        with suppress(OSError):  # in use, or not ours to remove
            if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                folder.rmdir()


def make_cgroup() -> Cgroup | None:
    """A new slot, or None where cgroups cannot be used."""
    name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
    for version, memory, pids in _parents():
        cgroup = Cgroup(version, memory / name, pids / name)
        for folder in cgroup.folders:
            remove_abandoned(folder.parent)
        try:
            for folder in cgroup.folders:
                folder.mkdir()
            cgroup.limit(Limits())
            cgroup.events()
            if (cgroup.memory / "memory.swap.max").exists():
                (cgroup.memory / "memory.swap.max").write_text("0")
            return cgroup
        except (OSError, ValueError):
            cgroup.remove()
    return None


def _parents() -> list[tuple[int, Path, Path]]:
    """Folders in which a slot could be made, best first."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    own = {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}
    root = Path("/sys/fs/cgroup")
    found = []
    if "memory" in own and "pids" in own:
        found.append((1, root / "memory" / own["memory"], root / "pids" / own["pids"]))
    if "" in own and (root / "cgroup.controllers").exists():
        folder = root / own[""]
        found.append((2, folder.parent if own[""] else folder, folder.parent if own[""] else folder))
    return found


def _field(path: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name)
