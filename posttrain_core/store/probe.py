"""A probe of exactly the operations that commits rest on: some servers accept a condition and ignore it."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from posttrain_core.errors import StoreError
from posttrain_core.store.protocol import ObjectStore


def check_conditional_writes(store: ObjectStore, num_writers: int = 1) -> None:
    """Write, read, conditional writes alone and by several writers at once. StoreError says which did not hold."""
    prefix = f"probe/{uuid.uuid4().hex}"
    keys = [f"{prefix}/{name}" for name in ("plain", "absent", "match", "race")]
    plain, absent, match, race = keys
    try:
        store.put(plain, b"1")
        _expect(store.get(plain) == b"1", "what was written is not what is read")
        _expect(store.put_if_absent(absent, b"1"), "a first conditional write was refused")
        _expect(not store.put_if_absent(absent, b"2"), "put-if-absent overwrote an object")
        first = store.put_if_match(match, b"1", None)
        second = store.put_if_match(match, b"2", first)
        _expect(first is not None and second is not None, "put-if-match refused a matching write")
        _expect(store.put_if_match(match, b"3", first) is None, "put-if-match overwrote a newer object")
        with ThreadPoolExecutor(num_writers) as pool:
            won = list(pool.map(lambda writer: store.put_if_absent(race, b"%d" % writer), range(num_writers)))
        _expect(won.count(True) == 1, f"{won.count(True)} of {num_writers} writers of one object were told they won")
        _expect(store.get(race) == b"%d" % won.index(True), "the winner's object is not the one that is there")
    finally:
        with suppress(StoreError):
            for key in keys:
                store.delete(key)
        _remove_empty(store, prefix)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StoreError(
            f"conditional writes do not work in this store: {otherwise}. Commits rest on them: use another store, "
            "or one without object versioning"
        )


def _remove_empty(store: ObjectStore, prefix: str) -> None:
    folder = store.local_path(prefix)
    with suppress(OSError):
        for path in (folder, folder.parent) if folder is not None else ():
            path.rmdir()
