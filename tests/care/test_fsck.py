"""Every kind of damage is found and named; a whole run is clean."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from posttrain_core.care.fork import fork
from posttrain_core.care.fsck import Checked, check_run
from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.manifest import parse_manifest
from posttrain_core.schema import SCHEMA_VERSION, from_parquet, to_parquet
from posttrain_core.store import ObjectStore
from tests.care.stores import rewrite

STORES = pytest.mark.parametrize("own_store", ["memory", "local", "s3"], indirect=True)
TABLE = "runs/r/rollouts/iteration=00001/shard=0000.parquet"
SECOND = "runs/r/rollouts/iteration=00001/shard=0001.parquet"
MANIFEST = "runs/r/manifests/iteration=00001/generate.json"


def said(store: ObjectStore, run: str = "r") -> list[str]:
    return [str(finding) for finding in check_run(store, run).findings]


def put(store: ObjectStore, key: str, data: bytes) -> None:
    store.delete(key)
    store.put(key, data)


def flip(store: ObjectStore, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    put(store, key, bytes(data))


def policy_file(store: ObjectStore, kind: str = "policies/version=00004") -> str:
    return next(info.key for info in store.list(f"runs/r/{kind}/") if info.key.endswith("model.safetensors"))


def resealed(store: ObjectStore, key: str, change: Callable[[Any], Any]) -> None:
    """The table with other rows, as a program that knows the format would write it."""
    table, fingerprint = from_parquet(store.get(key), key)
    put(store, key, to_parquet(change(table), fingerprint))


def reference_again(store: ObjectStore, manifest: str, key: str) -> None:
    """Make the manifest name what is at the key now, and fit its checksum."""
    from hashlib import sha256

    data, record = store.get(key), json.loads(store.get(manifest))
    for item in record["objects"]:
        if item["key"] == key:
            rows = from_parquet(data, key)[0].num_rows
            item |= {"digest": sha256(data).hexdigest(), "num_bytes": len(data), "num_rows": rows}
    rewrite(store, manifest, {"objects": record["objects"]})


@STORES
def test_a_whole_run_is_clean(own_store: ObjectStore) -> None:
    seen: list[tuple[int, int]] = []
    found = check_run(own_store, "r", lambda done, total: seen.append((done, total)))
    assert found.findings == []
    assert (found.num_leftovers, found.leftover_bytes) == (0, 0)
    assert found.num_rows == 4 * (4 * 24 + 24) + 3 * 4 * 24 - _not_learned(own_store)
    assert sorted(seen) == [(number, found.num_objects) for number in range(1, found.num_objects + 1)]


def _not_learned(store: ObjectStore) -> int:
    updates = [info.key for info in store.list("runs/r/manifests/") if info.key.endswith("update.json")]
    rows = [parse_manifest(store.get(key), key).named("/samples/")[0].num_rows for key in updates]
    return 24 * len(rows) - sum(rows)


@STORES
def test_damage_is_found_in_every_store(own_store: ObjectStore) -> None:
    weights, checkpoint = policy_file(own_store), policy_file(own_store, "checkpoints/iteration=00003")
    flip(own_store, weights)
    own_store.delete(checkpoint)
    flip(own_store, TABLE)
    table, gone, policy = sorted(said(own_store), key=lambda line: (line.startswith("runs/r/p"), "gone" in line))
    assert f"{TABLE}: its" in table
    assert "its own seal does not fit either: it is damaged" in table
    assert f"{checkpoint}: it is gone, but a manifest names it" in gone
    assert f"{weights}: its" in policy
    assert "its manifest says" in policy


def test_swapped_tables(own_store: ObjectStore) -> None:
    first, second = own_store.get(TABLE), own_store.get(SECOND)
    put(own_store, TABLE, second)
    put(own_store, SECOND, first)
    assert said(own_store) == [
        f"{TABLE}: it holds the bytes of {SECOND}: objects were swapped or copied over. Put it back from a copy.",
        f"{SECOND}: it holds the bytes of {TABLE}: objects were swapped or copied over. Put it back from a copy.",
    ]


def test_dropped_rows_with_a_seal_that_fits(own_store: ObjectStore) -> None:
    rows = from_parquet(own_store.get(TABLE), TABLE)[0].num_rows
    resealed(own_store, TABLE, lambda table: table.slice(1))
    (line,) = said(own_store)
    assert f"it was written anew, with {rows - 1} rows in place of {rows}" in line


def test_dropped_rows_with_a_manifest_that_fits(own_store: ObjectStore) -> None:
    resealed(own_store, TABLE, lambda table: table.slice(1))
    reference_again(own_store, MANIFEST, TABLE)
    lines = said(own_store)
    assert any(line.startswith(f"{TABLE}: it has 11 rollouts; its plan") for line in lines)
    assert any("iteration=00001/execute.json: it was made from another generate" in line for line in lines)
    assert any("executions/iteration=00001/shard=0000.parquet: it was made from another rollouts" in x for x in lines)


def test_reordered_rows_with_a_manifest_that_fits(own_store: ObjectStore) -> None:
    resealed(own_store, TABLE, lambda table: table.take([1, 0, *range(2, table.num_rows)]))
    reference_again(own_store, MANIFEST, TABLE)
    assert any("row 0 is of rollout i00001.p0000.r01; its plan" in line for line in said(own_store))


def test_forged_rewards(own_store: ObjectStore) -> None:
    """All the way up to the manifest of the verdicts: the counts and what was made from them tell."""
    key = next(info.key for info in own_store.list("runs/r/verdicts/") if "iteration=00001" in info.key)
    rewards = [1.0] * from_parquet(own_store.get(key), key)[0].num_rows

    def forge(table: Any) -> Any:
        place = table.column_names.index("reward")
        return table.set_column(place, table.schema.field("reward"), [rewards])

    resealed(own_store, key, forge)
    reference_again(own_store, "runs/r/manifests/iteration=00001/verify.json", key)
    lines = said(own_store)
    assert any("verify.json: its metric reward_mean is" in line for line in lines)
    assert any("update.json: it was made from another verify" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"notes": {"edited": 1}}, "its contents do not match its own checksum"),
        ({"stage": "verify"}, "its contents do not match its own checksum"),
    ],
)
def test_an_edited_manifest(own_store: ObjectStore, change: dict[str, Any], words: str) -> None:
    record = json.loads(own_store.get(MANIFEST)) | change
    put(own_store, MANIFEST, json.dumps(record).encode())
    (line,) = said(own_store)
    assert line.startswith(f"{MANIFEST}: this manifest cannot be used")
    assert words in line
    put(own_store, MANIFEST, b"\x00 not json")
    assert "it is not a manifest" in said(own_store)[0]


def test_an_edited_manifest_whose_checksum_fits(own_store: ObjectStore) -> None:
    update = "runs/r/manifests/iteration=00001/update.json"
    edited = json.loads(own_store.get(update))["fingerprint"] | {"config.learner.learning_rate": 9.0}
    rewrite(own_store, update, {"fingerprint": edited})
    lines = said(own_store)
    assert any(f"{update}: it was made with learner.learning_rate 9.0; run.json says 2.0" in line for line in lines)
    assert any("iteration=00001/publish.json: it was made from another update" in line for line in lines)


def test_manifests_that_are_gone_or_moved(own_store: ObjectStore) -> None:
    own_store.delete(MANIFEST)
    put(own_store, MANIFEST.replace("00001", "00002"), own_store.get(MANIFEST.replace("00001", "00000")))
    own_store.delete("runs/r/manifests/start/publish.json")
    lines = said(own_store)
    assert any(line.startswith(f"{MANIFEST}: this manifest is gone, though there are later ones") for line in lines)
    assert any("start/publish.json: this manifest is gone" in line for line in lines)
    assert any("it is the manifest of generate, iteration 0" in line for line in lines)


def test_other_schema(own_store: ObjectStore) -> None:
    edited = json.loads(own_store.get(MANIFEST))["fingerprint"] | {"schema": SCHEMA_VERSION - 1}
    rewrite(own_store, MANIFEST, {"fingerprint": edited})
    assert any(f"made with schema version {SCHEMA_VERSION - 1}; this program reads" in line for line in said(own_store))


def test_columns_of_another_table(own_store: ObjectStore) -> None:
    resealed(own_store, TABLE, lambda table: table.drop_columns(["text"]))
    reference_again(own_store, MANIFEST, TABLE)
    assert any("its columns are not those of this table: text" in line for line in said(own_store))


def test_run_record_and_marks(own_store: ObjectStore) -> None:
    own_store.put("runs/r/retired/policies/00004.json", b"{}")
    own_store.put("runs/r/forks/x.json", b"{")
    own_store.put("runs/r/run.json", b"{}")
    lines = said(own_store)
    assert any("policy version 4 is marked as retired, but the run needs it" in line for line in lines)
    assert any("forks/x.json: this note about a fork cannot be read" in line for line in lines)
    assert any("run.json: it is not the record of a run" in line for line in lines)
    own_store.delete("runs/r/run.json")
    assert any("run.json: it is gone" in line for line in said(own_store))
    with pytest.raises(ConfigError, match="no run 'other'"):
        check_run(own_store, "other")


def test_leftovers_are_counted_and_are_no_fault(own_store: ObjectStore) -> None:
    own_store.put("runs/r/policies/version=00005/attempt=dead/model.safetensors", b"1234")
    own_store.put("runs/r/journal/iteration=00004/shard=0000/0000.x.parquet", b"12")
    own_store.put("runs/r/telemetry/iteration=00004/plan.0000.x.json", b"1")
    found: Checked = check_run(own_store, "r")
    assert (found.findings, found.num_leftovers, found.leftover_bytes) == ([], 2, 6)


def test_a_fork_tells_of_damage_in_its_parent(own_store: ObjectStore) -> None:
    config = Run(own_store, "r").config.model_copy(update={"run": "f"})
    fork(own_store, "r", 4, config)
    assert said(own_store, "f") == said(own_store, "r") == []
    own_store.delete(TABLE)
    (line,) = said(own_store, "f")
    assert "It lies with run 'r', from which this one was forked" in line
