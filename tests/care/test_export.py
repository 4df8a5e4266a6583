"""What is exported is what was committed, whole, and in the shape that others expect."""

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml

from posttrain_core.care.export import export_dataset, export_schema, export_sft
from posttrain_core.care.export_policy import export_policy
from posttrain_core.care.fork import fork
from posttrain_core.errors import ConfigError, ObjectCorrupt, StoreError
from posttrain_core.inspect import Run, open_run, tables
from posttrain_core.records import Purpose
from posttrain_core.store import ObjectStore


@pytest.fixture(scope="module")
def run(finished_run: Path) -> Run:
    return open_run(str(finished_run), "r")


def front_matter(readme: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(readme.read_text().split("---\n")[1])
    return found


def test_dataset_has_every_rollout_with_its_verdict(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "made" / "data set"
    seen: list[tuple[int, int]] = []
    counts = export_dataset(run, target, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (7, 7)
    columns = ["rollout_id", "iteration", "domain", "text", "outcome", "reward", "execution_status", "prompt_ids"]
    for split, purpose in (("train", "train"), ("held_out", "eval")):
        (files,) = [
            entry["path"]
            for entry in front_matter(target / "README.md")["configs"][0]["data_files"]
            if entry["split"] == split
        ]
        paths = sorted(target.glob(files))
        assert all(pq.read_schema(path).equals(export_schema()) for path in paths)
        found = ds.dataset(paths).to_table(columns=columns).to_pylist()
        expected = tables.read(run, "rollouts", columns, ds.field("purpose") == purpose).to_pylist()
        assert sorted(found, key=str) == sorted(expected, key=str)
        assert sum(counts[split].rows.values()) == len(expected) > 0
    assert not list(tmp_path.glob("made/.*")), "no temporary folder is left"


def test_card_tells_counts_features_and_settings(run: Run, tmp_path: Path) -> None:
    counts = export_dataset(run, tmp_path / "d")
    card = (tmp_path / "d/README.md").read_text()
    train = counts["train"]
    for domain in ("program", "logic"):
        rate = train.passed[domain] / train.judged[domain]
        assert f"| train | {domain} | {train.rows[domain]} | {train.judged[domain]} |" in card
        assert f"{rate:.4f} |" in card
    assert all(f"| {name} | `" in card for name in export_schema().names)
    assert "| seed | `int64` | of the sampler" in card
    assert "generator: syllogism" in card
    assert run.store.url not in card, "where the store lies is nobody else's business"


def test_breakdown_is_json(run: Run, tmp_path: Path) -> None:
    export_dataset(run, tmp_path / "d")
    table = pq.read_table(tmp_path / "d/data/train/iteration-00000.parquet")
    breakdowns = [json.loads(text) for text in table["breakdown"].to_pylist()]
    assert any("cases" in breakdown for breakdown in breakdowns)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_sft_examples(run: Run, tmp_path: Path) -> None:
    num = export_sft(run, tmp_path / "good.jsonl")
    rows = lines(tmp_path / "good.jsonl")
    where = (ds.field("purpose") == "train") & (ds.field("outcome") == "scored") & (ds.field("reward") >= 1.0)
    good = tables.read(run, "rollouts", ["rollout_id", "group_id", "text"], where).to_pylist()
    assert num == len(rows)
    assert {row["rollout_id"] for row in rows} == {row["rollout_id"] for row in good}
    texts = {row["rollout_id"]: row["text"] for row in good}
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["messages"][1] == {"role": "assistant", "content": texts[row["rollout_id"]]}
        assert row["reward"] >= 1.0


def test_best_of_group_and_domain(run: Run, tmp_path: Path) -> None:
    export_sft(run, tmp_path / "all.jsonl", min_reward=0.0, domain="program")
    export_sft(run, tmp_path / "best.jsonl", min_reward=0.0, domain="program", best_of_group=True)
    every, best = lines(tmp_path / "all.jsonl"), lines(tmp_path / "best.jsonl")
    assert {row["domain"] for row in every} == {"program"}
    groups: dict[str, list[float]] = {}
    for row in every:
        groups.setdefault(row["rollout_id"].rpartition(".")[0], []).append(row["reward"])
    assert {row["rollout_id"].rpartition(".")[0]: row["reward"] for row in best} == {
        group: max(rewards) for group, rewards in groups.items()
    }
    with pytest.raises(
        ConfigError, match=r"no training rollout of domain 'program' .* reward of 7: the highest reward"
    ):
        export_sft(run, tmp_path / "none.jsonl", min_reward=7.0, domain="program")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "best.jsonl"]


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("there", "file", "dangling"):
        with pytest.raises(ConfigError, match="exists and is not overwritten"):
            export_dataset(run, tmp_path / name)
        with pytest.raises(ConfigError, match="exists and is not overwritten"):
            export_sft(run, tmp_path / name)
        with pytest.raises(ConfigError, match="exists and is not overwritten"):
            export_policy(run, tmp_path / name)
    with pytest.raises(StoreError, match="cannot write"):
        export_sft(run, tmp_path / "file" / "x.jsonl")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("own_store", ["memory", "s3"], indirect=True)
def test_policy_folder(own_store: ObjectStore, tmp_path: Path) -> None:
    run = Run(own_store, "r")
    done = export_policy(run, tmp_path / "newest")
    assert (done.version, done.num_files) == (4, 1)
    key = next(info.key for info in own_store.list("runs/r/policies/version=00004/"))
    assert (tmp_path / "newest/model.safetensors").read_bytes() == own_store.get(key)
    card = (tmp_path / "newest/README.md").read_text()
    for scope_stage in ("publish", "update of iteration 3", "plan of iteration 3"):
        assert f"| {scope_stage} | " in card
    publish = run.manifests([run.scopes(Purpose.TRAIN, "publish")[-1]], "publish")
    assert next(iter(publish.values())).digest in card
    assert export_policy(run, tmp_path / "first", 0).version == 0
    for version, why in ((2, "was retired"), (9, "was not published")):
        with pytest.raises(ConfigError, match=f"version {version} of run 'r' {why}.*; there are 0, 4"):
            export_policy(run, tmp_path / "no", version)


def test_damage_leaves_nothing_behind(own_store: ObjectStore, tmp_path: Path) -> None:
    table = "runs/r/verdicts"
    weights = next(info.key for info in own_store.list("runs/r/policies/version=00004/"))
    own_store.put(weights, b"damaged")
    key = next(info.key for info in own_store.list(table) if "iteration=00003" in info.key)
    own_store.put(key, own_store.get(key)[:-1] + b"x")
    run = Run(own_store, "r")
    with pytest.raises(ObjectCorrupt, match="policies/version=00004"):
        export_policy(run, tmp_path / "policy")
    with pytest.raises(ObjectCorrupt, match="iteration=00003"):
        export_dataset(run, tmp_path / "dataset")
    with pytest.raises(ObjectCorrupt, match="iteration=00003"):
        export_sft(run, tmp_path / "x.jsonl")
    assert list(tmp_path.glob("*")) == list(tmp_path.glob(".*")) == []


def test_a_fork_exports_what_it_shares(own_store: ObjectStore, tmp_path: Path) -> None:
    fork(own_store, "r", 4, Run(own_store, "r").config.model_copy(update={"run": "f"}))
    forked = Run(own_store, "f")
    export_policy(forked, tmp_path / "policy")
    counts = export_dataset(forked, tmp_path / "dataset")
    assert sum(counts["train"].rows.values()) == 4 * 24
    assert "forked from run r at iteration 4" in (tmp_path / "policy/README.md").read_text()
