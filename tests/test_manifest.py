"""Commits: found again by fingerprint, refused by field, adopted by the loser of a race, never read when damaged."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_core.errors import ObjectCorrupt, ObjectNotFound, RunConflict
from posttrain_core.manifest import (
    Manifest,
    ObjectRef,
    check_fingerprint,
    commit_folder,
    commit_manifest,
    commit_table,
    fetch_folder,
    find_manifest,
    find_table,
    fingerprint,
    parse_manifest,
    read_table,
)
from posttrain_core.records import Outcome, Verdict
from posttrain_core.schema import SCHEMA_VERSION
from posttrain_core.store.local import LocalStore
from posttrain_core.store.memory import MemoryStore

KEY = "runs/r/manifests/iteration=00000/verify.json"
TABLE = "runs/r/verdicts/set=a/iteration=00000/shard=0000.parquet"
ROWS = [Verdict(f"r{number}", Outcome.SCORED, number / 2, {"cases": 0.5}) for number in range(3)]
PRINT = fingerprint({"plan": "abc"}, {"seed": 3, "plan": {"group_size": 4, "domains": {"program": {"weight": 1.0}}}})
REF = ObjectRef(TABLE, "d" * 64, 100, 3)
VOLATILE = ObjectRef("runs/r/checkpoints/iteration=00000/attempt=abc/state.bin", "e" * 64, 7, semantic=False)
MANIFEST = Manifest("verify", 0, PRINT, (REF, VOLATILE), {"reward_mean": 0.5}, {"prefix": "attempt=abc"}, "1.0")


def free() -> None:
    """The lease is held."""


class SneakyStore(MemoryStore):
    """Another writer comes first, just before the conditional write."""

    def __init__(self, other: bytes) -> None:
        super().__init__()
        self.other = other

    def put_if_absent(self, key: str, data: bytes) -> bool:
        super().put_if_absent(key, self.other)
        return super().put_if_absent(key, data)


def stored(manifest: Manifest = MANIFEST) -> bytes:
    store = MemoryStore()
    commit_manifest(store, KEY, manifest, free)
    return store.get(KEY)


def stored_table(**settings: Any) -> bytes:
    store = MemoryStore()
    commit_table(store, TABLE, "verdicts", ROWS, {**PRINT, **settings})
    return store.get(TABLE)


# --- manifests ---


def test_a_manifest_comes_back_as_it_was() -> None:
    store = MemoryStore()
    assert find_manifest(store, KEY) is None
    assert commit_manifest(store, KEY, MANIFEST, free) == MANIFEST
    assert find_manifest(store, KEY, PRINT) == MANIFEST
    assert json.loads(store.get(KEY))["digest"] == MANIFEST.digest


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names
manifests = st.builds(
    Manifest,
    stage=names,
    iteration=st.integers(-1, 10**6),
    fingerprint=st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=4),
    objects=st.lists(st.builds(ObjectRef, names, names, st.integers(0, 2**60)), max_size=3).map(tuple),
    metrics=st.dictionaries(names, st.floats(allow_nan=False), max_size=3),
    notes=st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=3),
    code_version=names,
)


@settings(max_examples=100, deadline=None)
@given(manifests)
def test_any_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    found = parse_manifest(stored(manifest), KEY)
    assert found == manifest
    assert found.digest == manifest.digest
    assert stored(found) == stored(manifest)


def test_every_flipped_bit_of_a_manifest_is_noticed_or_harmless() -> None:
    data, harmless = stored(), 0
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            try:
                found = parse_manifest(bytes(damaged), KEY)
            except ObjectCorrupt:
                continue
            assert found == MANIFEST, (place, bit)
            harmless += 1
    assert harmless < 20  # such as the letter case of an escape


def test_every_truncation_of_a_manifest_is_noticed() -> None:
    data = stored()
    for length in range(len(data)):
        with pytest.raises(ObjectCorrupt, match=KEY):
            parse_manifest(data[:length], KEY)
    for other in (b"[]", b"3", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000):
        with pytest.raises(ObjectCorrupt, match=KEY):
            parse_manifest(other, KEY)


def test_a_damaged_manifest_is_never_overwritten() -> None:
    store = MemoryStore()
    store.put(KEY, stored()[:-20])
    with pytest.raises(ObjectCorrupt, match=KEY):
        find_manifest(store, KEY, PRINT)
    with pytest.raises(ObjectCorrupt, match=KEY):
        commit_manifest(store, KEY, MANIFEST, free)
    assert store.get(KEY) == stored()[:-20]


def test_the_digest_is_blind_to_attempts_and_notes_only() -> None:
    attempts = ObjectRef(VOLATILE.key.replace("abc", "xyz"), "f" * 64, 8, semantic=False)
    elsewhere = dataclasses.replace(REF, key=REF.key.replace("runs/r/", "runs/other/"))
    same = [
        dataclasses.replace(MANIFEST, notes={"prefix": "attempt=xyz"}),
        dataclasses.replace(MANIFEST, code_version="2.0"),
        dataclasses.replace(MANIFEST, objects=(elsewhere, attempts)),
        dataclasses.replace(MANIFEST, objects=(REF,)),
    ]
    assert {manifest.digest for manifest in same} == {MANIFEST.digest}
    other = [
        dataclasses.replace(MANIFEST, stage="execute"),
        dataclasses.replace(MANIFEST, iteration=1),
        dataclasses.replace(MANIFEST, metrics={"reward_mean": 0.25}),
        dataclasses.replace(MANIFEST, fingerprint={**PRINT, "config.seed": 4}),
        dataclasses.replace(MANIFEST, objects=(dataclasses.replace(REF, digest="c" * 64), VOLATILE)),
        dataclasses.replace(MANIFEST, objects=(REF, REF)),
        dataclasses.replace(MANIFEST, objects=()),
    ]
    assert len({manifest.digest for manifest in (MANIFEST, *other)}) == len(other) + 1


def test_the_loser_of_a_race_adopts_the_winners_manifest() -> None:
    winner = dataclasses.replace(MANIFEST, notes={"prefix": "attempt=xyz"})
    store = SneakyStore(stored(winner))
    assert commit_manifest(store, KEY, MANIFEST, free) == winner
    assert store.get(KEY) == stored(winner)


def test_a_winner_with_other_settings_is_not_adopted() -> None:
    store = SneakyStore(stored(dataclasses.replace(MANIFEST, fingerprint={**PRINT, "config.seed": 4})))
    with pytest.raises(RunConflict, match=r"config\.seed: was 4, is 3"):
        commit_manifest(store, KEY, MANIFEST, free)


def test_without_the_lease_nothing_is_committed() -> None:
    def lost() -> None:
        raise RunConflict("taken over")

    store = MemoryStore()
    with pytest.raises(RunConflict, match="taken over"):
        commit_manifest(store, KEY, MANIFEST, lost)
    assert store.stat(KEY) is None


# --- fingerprints ---


def test_a_fingerprint_is_flat_and_names_every_path() -> None:
    assert PRINT == {
        "schema": SCHEMA_VERSION,
        "input.plan": "abc",
        "config.seed": 3,
        "config.plan.group_size": 4,
        "config.plan.domains.program.weight": 1.0,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.seed": 4}, "config.seed: was 3, is 4"),
        ({"config.plan.group_size": 8}, "config.plan.group_size: was 4, is 8"),
        ({"input.plan": "xyz"}, "input.plan: was 'abc', is 'xyz'"),
        ({"schema": 99}, f"schema: was {SCHEMA_VERSION}, is 99"),
        ({"config.new": [1, 2]}, "config.new: was None, is [1, 2]"),
    ],
)
def test_a_difference_is_refused_by_field_with_both_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RunConflict) as caught:
        check_fingerprint(KEY, PRINT, {**PRINT, **change})
    assert message in str(caught.value)
    assert KEY in str(caught.value)
    assert "--set run=" in str(caught.value)


def test_equal_values_of_other_types_do_not_differ() -> None:
    check_fingerprint(KEY, json.loads(json.dumps({"a": [1, 2], "b": {}})), {"a": (1, 2), "b": {}})


# --- tables ---


def test_a_table_is_found_by_its_fingerprint() -> None:
    store = MemoryStore()
    assert find_table(store, TABLE, PRINT) is None
    ref = commit_table(store, TABLE, "verdicts", ROWS, PRINT)
    assert find_table(store, TABLE, PRINT) == ref
    assert ref == ObjectRef(TABLE, hashlib.sha256(store.get(TABLE)).hexdigest(), len(store.get(TABLE)), 3)
    assert read_table(store, ref, Verdict) == ROWS
    with pytest.raises(RunConflict, match=r"config\.seed: was 3, is 4"):
        find_table(store, TABLE, {**PRINT, "config.seed": 4})


def test_the_loser_of_a_race_adopts_the_winners_table() -> None:
    store = SneakyStore(stored_table())
    ref = commit_table(store, TABLE, "verdicts", ROWS[:1], PRINT)
    assert ref.num_rows == 3
    assert store.get(TABLE) == stored_table()
    with pytest.raises(RunConflict, match=r"config\.seed"):
        commit_table(SneakyStore(stored_table(**{"config.seed": 4})), TABLE, "verdicts", ROWS, PRINT)


def test_a_table_of_sound_bytes_that_the_manifest_does_not_name_is_damage() -> None:
    store = MemoryStore()
    ref = commit_table(store, TABLE, "verdicts", ROWS, PRINT)
    other = stored_table(**{"config.seed": 4})
    store.put(TABLE, other)
    with pytest.raises(ObjectCorrupt, match=TABLE):
        read_table(store, ref, Verdict)
    assert store.get(TABLE) == other


# --- folders ---


@pytest.fixture(params=["local", "memory"])
def folder_store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore | MemoryStore:
    return LocalStore(tmp_path / "store") if request.param == "local" else MemoryStore()


PREFIX = "runs/r/policies/version=00001/attempt=abc/"


def commit_files(store: LocalStore | MemoryStore, tmp_path: Path) -> list[ObjectRef]:
    (tmp_path / "made" / "deep").mkdir(parents=True)
    (tmp_path / "made" / "a.json").write_bytes(b"{}")
    (tmp_path / "made" / "deep" / "b.bin").write_bytes(b"weights")
    return commit_folder(store, PREFIX, tmp_path / "made", semantic=True)


def test_a_folder_comes_back_as_it_was(folder_store: LocalStore | MemoryStore, tmp_path: Path) -> None:
    refs = commit_files(folder_store, tmp_path)
    assert [ref.key for ref in refs] == [PREFIX + "a.json", PREFIX + "deep/b.bin"]
    folder = fetch_folder(folder_store, refs, PREFIX, tmp_path / "cache")
    assert (folder / "deep" / "b.bin").read_bytes() == b"weights"
    assert not list(folder.rglob("*.part"))


def test_a_damaged_or_missing_file_of_a_folder_is_named(folder_store: LocalStore | MemoryStore, tmp_path: Path) -> None:
    refs = commit_files(folder_store, tmp_path)
    for damaged in (b"weighty", b"weight", b"weights!", b""):
        folder_store.put(PREFIX + "deep/b.bin", damaged)
        with pytest.raises(ObjectCorrupt, match=r"attempt=abc/deep/b\.bin"):
            fetch_folder(folder_store, refs, PREFIX, tmp_path / "cache")
        assert folder_store.get(PREFIX + "deep/b.bin") == damaged
    folder_store.delete(PREFIX + "deep/b.bin")
    with pytest.raises(ObjectNotFound, match=r"attempt=abc/deep/b\.bin"):
        fetch_folder(folder_store, refs, PREFIX, tmp_path / "other cache")


def test_a_damaged_copy_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    store = MemoryStore()
    refs = commit_files(store, tmp_path)
    folder = fetch_folder(store, refs, PREFIX, tmp_path / "cache")
    (folder / "deep" / "b.bin").write_bytes(b"weig")  # such as an earlier version of this code may have left
    assert (fetch_folder(store, refs, PREFIX, tmp_path / "cache") / "deep" / "b.bin").read_bytes() == b"weights"
