"""What every store promises, whatever it is made of."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrain_core.errors import ObjectNotFound, StoreError
from posttrain_core.store import ObjectStore
from posttrain_core.store.s3 import S3Store

ODD_KEYS = (
    "a b/c",
    "é/ü",
    "e\u0301",
    "日本/語",
    "🙂",
    "a+b&c=d%20",
    "quote'\"",
    "#?;",
    "iteration=00001/shard=0000",
    "..a/b..",
    " a /b ",
    "a%2Fb\\c*",
    "<&>",
    "\u202eabc\u2028",
)
REFUSED_KEYS = ("", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/..", "./a", "a/.", "a\0b", "\ud800")


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_come_back_as_they_were(store: ObjectStore, key: str) -> None:
    store.put(key, key.encode())
    assert store.get(key) == key.encode()
    assert [info.key for info in store.list("")] == [key]
    store.delete(key)
    assert store.stat(key) is None


def test_control_characters_come_back_as_they_were(racing_store: ObjectStore) -> None:
    """Not for moto, whose web framework does not let them through."""
    racing_store.put("a\nb\t\x01/\x7f", b"x")
    assert [info.key for info in racing_store.list("a\n")] == ["a\nb\t\x01/\x7f"]
    assert racing_store.get("a\nb\t\x01/\x7f") == b"x"


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_keys_that_could_leave_the_store_are_refused(store: ObjectStore, key: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    for call in (
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.put(key, b"x"),
        lambda: store.put_volatile(key, b"x"),
        lambda: store.put_file(key, path),
        lambda: store.put_if_absent(key, b"x"),
        lambda: store.put_if_match(key, b"x", "etag"),
        lambda: store.stat(key),
        lambda: store.delete(key),
    ):
        with pytest.raises(StoreError, match="not a store key"):
            call()
    assert list(store.list("")) == []


@pytest.mark.parametrize("prefix", ["../", "..", "a/../", "/", "a//", "/a"])
def test_prefixes_that_could_leave_the_store_are_refused(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(StoreError, match="not a store key"):
        list(store.list(prefix))


def test_absent_objects(store: ObjectStore, tmp_path: Path) -> None:
    store.put("folder/object", b"x")
    for key in ("absent", "folder", "folder/object/below"):
        assert store.stat(key) is None
        store.delete(key)
        with pytest.raises(ObjectNotFound, match=key):
            store.get(key)
        with pytest.raises(ObjectNotFound, match=key):
            store.get_range(key, -1, 1)
        with pytest.raises(ObjectNotFound, match=key):
            store.get_file(key, tmp_path / "file")
    assert store.get("folder/object") == b"x"


@pytest.mark.parametrize(
    ("start", "length"),
    [(0, 10), (0, 3), (3, 4), (7, 100), (10, 1), (50, 2), (-4, 4), (-4, 2), (-4, 100), (-50, 3), (-50, 100), (2, 0)],
)
def test_ranges(store: ObjectStore, start: int, length: int) -> None:
    data = b"0123456789"
    store.put("whole", data)
    first = max(0, len(data) + start) if start < 0 else start
    assert store.get_range("whole", start, length) == data[first : first + length]
    store.put("empty", b"")
    assert store.get_range("empty", start, length) == b""


def test_an_empty_object_exists(store: ObjectStore) -> None:
    assert store.put_if_absent("empty", b"")
    info = store.stat("empty")
    assert info is not None
    assert info.num_bytes == 0
    assert store.get("empty") == b""


def test_put_replaces(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"three")
    store.put("key", b"one")
    store.put_volatile("key", b"two")
    assert store.get("key") == b"two"
    store.put_file("key", tmp_path / "file")
    assert store.get("key") == b"three"
    assert (tmp_path / "file").read_bytes() == b"three"


def test_large_files_travel_whole(store: ObjectStore, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 20 + b"end"  # more than one part of a multipart upload
    (tmp_path / "up").write_bytes(data)
    store.put_file("folder/large", tmp_path / "up")
    store.get_file("folder/large", tmp_path / "down")
    digest = hashlib.sha256(data).hexdigest()
    assert hashlib.sha256((tmp_path / "down").read_bytes()).hexdigest() == digest
    assert store.get_range("folder/large", -3, 3) == b"end"
    info = store.stat("folder/large")
    assert info is not None
    assert info.num_bytes == len(data)


def test_a_missing_local_file_is_not_a_missing_object(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"'key'.*No such file") as caught:
        store.put_file("key", tmp_path / "absent")
    assert not isinstance(caught.value, ObjectNotFound)
    assert store.stat("key") is None


def test_put_if_absent_keeps_the_first(store: ObjectStore) -> None:
    assert store.put_if_absent("key", b"first") is True
    assert store.put_if_absent("key", b"second") is False
    assert store.put_if_absent("key", b"first") is False
    assert store.get("key") == b"first"
    store.delete("key")
    assert store.put_if_absent("key", b"second") is True


def test_put_if_match(store: ObjectStore) -> None:
    assert store.put_if_match("key", b"x", "0" * 32) is None
    assert store.stat("key") is None
    first = store.put_if_match("key", b"first", None)
    assert first is not None
    assert store.put_if_match("key", b"other", None) is None
    info = store.stat("key")
    assert info is not None
    assert info.etag == first
    second = store.put_if_match("key", b"second", first)
    assert second not in (None, first)
    assert store.put_if_match("key", b"third", first) is None
    assert store.get("key") == b"second"


def test_listing_has_one_order_and_one_meaning_of_prefix(store: ObjectStore) -> None:
    # "-" and "." sort before "/", "0" after it: a walk by path components would give another order
    keys = ["a/b/c", "a/b-d", "a/b.e", "a/b0", "a/b/c2/d", "a.b", "a-b/c", "ab", "é", "z/y", "日/本", "Z"]
    for number, key in enumerate(keys):
        store.put(key, b"x" * number)
    for prefix in (
        "",
        "a",
        "a/",
        "a/b",
        "a/b/",
        "a/b/c",
        "a/b/c/",
        "ab",
        "z/",
        "é",
        "none",
        "none/",
        "a/none/x",
        "日/",
    ):
        expected = sorted(key for key in keys if key.startswith(prefix))
        found = list(store.list(prefix))
        assert [info.key for info in found] == expected, prefix
        assert [info.num_bytes for info in found] == [keys.index(key) for key in expected]


def test_listing_has_no_end_at_a_page(store: ObjectStore) -> None:
    keys = [f"many/{number:05d}" for number in range(1005)]
    if isinstance(store, S3Store):
        store._client.meta.events.register(  # so that a thousand uploads are not needed for a second page
            "provide-client-params.s3.ListObjectsV2", lambda params, **_: params | {"MaxKeys": 7}
        )
        keys = keys[:30]
    for key in keys:
        store.put_volatile(key, b"")
    assert [info.key for info in store.list("many/")] == keys


def test_a_race_of_threads_has_one_winner(racing_store: ObjectStore) -> None:
    store = racing_store
    with ThreadPoolExecutor(8) as pool:
        for turn in range(30):
            wins = list(pool.map(store.put_if_absent, [f"race/{turn}"] * 8, [b"%d" % who for who in range(8)]))
            assert sorted(wins) == [False] * 7 + [True]
            assert store.get(f"race/{turn}") == b"%d" % wins.index(True)


def test_a_race_of_swaps_has_one_winner(racing_store: ObjectStore) -> None:
    store = racing_store
    with ThreadPoolExecutor(8) as pool:
        etag = None
        for turn in range(30):
            data = [b"%d %d" % (turn, who) for who in range(8)]
            etags = list(pool.map(store.put_if_match, ["key"] * 8, data, [etag] * 8))
            (winner,) = (who for who, new in enumerate(etags) if new)
            assert store.get("key") == data[winner]
            etag = etags[winner]
