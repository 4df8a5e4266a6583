"""The files of a cgroup: what is written and read, on a folder that stands in for the kernel's."""

import os
import time
from pathlib import Path

from posttrain_core.sandbox import Limits
from posttrain_core.sandbox.cgroups import ABANDONED_SECONDS, OWN_MEMORY_MIB, Cgroup, remove_abandoned


def test_version_2_limits_and_events(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n")
    (tmp_path / "pids.events").write_text("max 5\n")
    cgroup = Cgroup(2, tmp_path, tmp_path)
    cgroup.limit(Limits(memory_mib=100, num_processes=8))
    assert (tmp_path / "memory.max").read_text() == str((100 + OWN_MEMORY_MIB) * 2**20)
    assert (tmp_path / "pids.max").read_text() == "10"
    assert cgroup.events() == (3, 5)
    assert cgroup.folders == [tmp_path]


def test_abandoned_slots_are_removed_and_others_kept(tmp_path: Path) -> None:
    for name in ("posttrain-1-0", "posttrain-2-0", "posttrain-3-0", "another"):
        (tmp_path / name).mkdir()
    (tmp_path / "posttrain-2-0" / "process").touch()  # rmdir fails, as on a cgroup in use
    old = time.time() - ABANDONED_SECONDS - 1
    for name in ("posttrain-1-0", "posttrain-2-0", "another"):
        os.utime(tmp_path / name, (old, old))
    remove_abandoned(tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["another", "posttrain-2-0", "posttrain-3-0"]
