"""The local store: races of processes, killed writers, full and broken disks, what is on disk when a write returns."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain_core.errors import ObjectNotFound, StoreError, StoreFull
from posttrain_core.store.local import LocalStore

REPOSITORY = Path(__file__).parents[2]


def start(code: str, *arguments: object, wrap: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*wrap, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


RACER = """
import sys
from pathlib import Path
from posttrain_core.store.local import LocalStore
store, who = LocalStore(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
print(*(int(store.put_if_absent(f"race/{turn}", f"{who} {turn}".encode())) for turn in range(200)))
"""


def test_a_race_of_processes_has_one_winner(tmp_path: Path) -> None:
    racers = [start(RACER, tmp_path, who) for who in range(4)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    wins = [racer.communicate(timeout=60)[0].split() for racer in racers]
    store = LocalStore(tmp_path)
    for turn in range(200):
        (winner,) = (who for who in range(4) if wins[who][turn] == "1")
        assert store.get(f"race/{turn}") == f"{winner} {turn}".encode()


KILLED = """
import os, signal, sys
from pathlib import Path
from posttrain_core.store import local
moment, root = sys.argv[1:]
def die(*arguments, **settings): os.kill(os.getpid(), signal.SIGKILL)
real = local._write
def half(path, data, durable):
    real(path, data[:1000], durable)
    die()
if moment == "writing": local._write = half
if moment == "before link": os.link = die
if moment == "after link": Path.unlink = die
local.LocalStore(Path(root)).put_if_absent("folder/key", b"x" * 2000)
"""


@pytest.mark.parametrize(("moment", "there"), [("writing", False), ("before link", False), ("after link", True)])
def test_a_killed_writer_leaves_a_whole_object_or_none(moment: str, there: bool, tmp_path: Path) -> None:
    killed = start(KILLED, moment, tmp_path)
    output = killed.communicate(timeout=60)[0]
    assert killed.returncode == -signal.SIGKILL, output
    assert len(list(tmp_path.glob(".store/*.tmp"))) == 1
    store = LocalStore(tmp_path)
    assert [info.key for info in store.list("")] == ["folder/key"] * there
    if there:
        assert store.get("folder/key") == b"x" * 2000
    else:
        with pytest.raises(ObjectNotFound):
            store.get("folder/key")
    assert store.put_if_absent("folder/key", b"again") is not there
    store.put("other", b"")
    assert not list(tmp_path.glob(".store/*.tmp")), "the next writer tidies up"


def test_temp_files_of_living_writers_are_left_alone(tmp_path: Path) -> None:
    first, second, third = (LocalStore(tmp_path) for _ in range(3))
    first.put("a", b"")
    unfinished = tmp_path / ".store" / "unfinished.tmp"
    unfinished.write_bytes(b"half")
    second.put("b", b"")
    assert unfinished.exists()
    del first, second
    third.put("c", b"")
    assert not unfinished.exists()


def test_its_own_folder_is_out_of_reach(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/.store/b", b"only the one at the top is private")
    store.put(".store2", b"")
    assert [info.key for info in store.list("")] == [".store2", "a/.store/b"]
    assert list(store.list(".store/")) == []
    for call in (store.get, store.stat, store.delete):
        with pytest.raises(StoreError, match=r"keeps '.store' to itself"):
            call(".store/writers")


def test_listing_walks_only_where_the_prefix_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for key in ("runs/r/plan/i=1/s", "runs/r/plan/i=2/s", "runs/r/rollouts/i=1/s", "runs/r2/plan/i=1/s"):
        store.put(key, b"")
    walked: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: walked.append(str(path)) or scandir(path))
    assert len(list(store.list("runs/r/plan/i=2/"))) == 1
    assert walked == [str(tmp_path / "runs/r/plan/i=2")]
    walked.clear()
    next(iter(store.list("runs/r/")))
    assert walked == [str(tmp_path / where) for where in ("runs/r", "runs/r/plan", "runs/r/plan/i=1")]
    walked.clear()
    assert len(list(store.list("runs/r2"))) == 1
    assert str(tmp_path / "runs/r") not in walked


def test_what_a_write_returned_for_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contents before the name, the name before the answer, and every new folder's name as well."""
    events: list[str] = []
    fsync, link, replace = os.fsync, os.link, os.replace

    def record_fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink()}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "link", lambda a, b: events.append(f"name {b}") or link(a, b))
    monkeypatch.setattr(os, "replace", lambda a, b: events.append(f"name {b}") or replace(a, b))
    root = tmp_path / "new" / "root"
    (tmp_path / "file").write_bytes(b"x")
    for number, write in enumerate(("put_if_absent", "put", "put_file")):
        events.clear()
        key = f"a{number}/b/c"
        store = LocalStore(root)
        getattr(store, write)(key, tmp_path / "file" if write == "put_file" else b"x")
        named = events.index(f"name {root / key}")
        assert any(event.endswith(".tmp") for event in events[:named]), events
        assert events[named + 1] == f"fsync {root / key}".rpartition("/")[0]
        folders = [f"fsync {root / f'a{number}'}", f"fsync {root}"]
        assert set(folders) <= set(events), events
        if number == 0:
            assert {f"fsync {tmp_path}", f"fsync {tmp_path / 'new'}"} <= set(events)


def test_the_loser_of_a_race_returns_when_the_winner_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalStore(tmp_path).put_if_absent("a/b", b"x")
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or fsync(fd))
    assert not LocalStore(tmp_path).put_if_absent("a/b", b"y")
    assert {str(tmp_path), str(tmp_path / "a")} <= set(synced)


FULL = """
import sys
from pathlib import Path
from posttrain_core.errors import StoreFull
from posttrain_core.store.local import LocalStore
root = Path(sys.argv[1])
store = LocalStore(root)
store.put("ballast", b"b" * 600_000)
source = Path(sys.argv[2])
source.write_bytes(b"f" * 700_000)
writes = {
    "put": lambda key: store.put(key, b"n" * 700_000),
    "put_volatile": lambda key: store.put_volatile(key, b"n" * 700_000),
    "put_if_absent": lambda key: store.put_if_absent(key, b"n" * 700_000),
    "put_if_match": lambda key: store.put_if_match(key, b"n" * 700_000, None),
    "put_file": lambda key: store.put_file(key, source),
}
for name, write in writes.items():
    try:
        write(f"new/{name}")
    except StoreFull as error:
        assert f"new/{name}" in str(error) and "no space left" in str(error), error
    else:
        raise SystemExit(f"{name} found room")
    assert [info.key for info in store.list("")] == ["ballast"], name
    assert not list(root.glob(".store/*.tmp")), name
    store.put("fits/" + name, b"s")
    store.delete("fits/" + name)
try:
    store.put("ballast", b"n" * 700_000)
except StoreFull:
    assert store.get("ballast") == b"b" * 600_000
store.delete("ballast")
for name, write in writes.items():
    write(f"new/{name}")
    assert store.stat(f"new/{name}").num_bytes == 700_000
    store.delete(f"new/{name}")
print("fine")
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one: a file system of 1 MB that only this test's process sees."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1M tmpfs "{disk}" && exec "$@"'
    process = start(FULL, disk / "store", tmp_path / "file", wrap=("unshare", "-Urm", "sh", "-c", mount, "sh"))
    output = process.communicate(timeout=60)[0]
    assert output == "fine\n"


def test_other_faults_name_the_key_and_the_operation(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("file", b"x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StoreError, match="cannot read 'loop'") as read:
        store.get("loop")
    with pytest.raises(StoreError, match="cannot write 'file/below'") as write:
        store.put("file/below", b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="cannot write 'folder'"):
        store.put("folder", b"x")
    for caught in (read, write):
        assert not isinstance(caught.value, ObjectNotFound | StoreFull)
        assert isinstance(caught.value.__cause__, OSError)
    assert store.get("file") == b"x"
