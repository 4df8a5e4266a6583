"""export: rollouts of a run for others. A Hugging Face style dataset (Parquet and a card), or chat examples as JSONL.

Both read what verified iterations name, each object checked against its digest.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain_core.care.cards import dataset_card
from posttrain_core.care.targets import new_file, new_folder
from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.layout import Scope
from posttrain_core.manifest import ObjectRef, read_object
from posttrain_core.records import PASS_REWARD, Outcome, Purpose
from posttrain_core.schema import arrow_schema, from_parquet

SPLITS = {"train": Purpose.TRAIN, "held_out": Purpose.EVAL}  # name in the dataset
_JUDGED = (Outcome.SCORED, Outcome.TRUNCATED)
_FROM_VERDICTS = ("outcome", "reward", "flags", "evidence")

Progress = Callable[[int, int], None]


@dataclass
class SplitCounts:
    """Of one split, by domain."""

    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    judged: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    passed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    scopes: list[int] = field(default_factory=list)

    def add(self, scope: Scope, table: pa.Table) -> None:
        if scope.iteration not in self.scopes:
            self.scopes.append(scope.iteration)
        for row in table.select(["domain", "outcome", "reward"]).to_pylist():
            domain = row["domain"]
            self.rows[domain] += 1
            if row["outcome"] in _JUDGED:
                self.judged[domain] += 1
                self.passed[domain] += row["reward"] >= PASS_REWARD
                self.reward[domain] += row["reward"]


def export_dataset(run: Run, target: Path, progress: Progress = lambda done, total: None) -> dict[str, SplitCounts]:
    """Write the folder: `data/<split>/*.parquet`, a file for each iteration or evaluated version, and README.md.
    ConfigError when it exists or nothing was verified yet."""
    scopes = [(split, scope) for split, purpose in SPLITS.items() for scope in run.scopes(purpose, "verify")]
    if not scopes:
        raise ConfigError(f"run {run.name!r} has no verified iteration yet: there is nothing to export")
    counts = {split: SplitCounts() for split, _ in scopes}
    with new_folder(target) as folder:
        for done, (split, scope) in enumerate(scopes):
            name = "iteration" if scope.purpose is Purpose.TRAIN else "version"
            path = folder / "data" / split / f"{name}-{scope.iteration:05d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            with pq.ParquetWriter(path, export_schema(), compression="zstd") as writer:
                for table in rollout_tables(run, scope):
                    writer.write_table(table)
                    counts[split].add(scope, table)
            progress(done + 1, len(scopes))
        (folder / "README.md").write_text(dataset_card(run, counts, export_schema()), encoding="utf-8")
    return counts


def export_schema() -> pa.Schema:
    """The columns of `rollouts`, with those of their verdicts and executions. Maps are JSON: not every reader of
    Parquet has a type for them."""
    rollouts, verdicts = arrow_schema("rollouts"), arrow_schema("verdicts")
    fields = [pa.field("iteration", pa.int64(), nullable=False)]
    fields += [item for item in rollouts if item.name not in _FROM_VERDICTS]
    fields += [verdicts.field(name) for name in _FROM_VERDICTS]
    fields.append(pa.field("breakdown", pa.string(), nullable=False))
    return pa.schema([*fields, pa.field("execution_status", pa.string(), nullable=False)])


def rollout_tables(run: Run, scope: Scope) -> Iterator[pa.Table]:
    """The shards of a verified iteration or evaluation. ObjectCorrupt names one that is not as committed."""
    stages = ("generate", "execute", "verify")
    shards = [_tables(run.manifests([scope], stage)[scope].objects) for stage in stages]
    for refs in zip(*shards, strict=True):
        rollouts, executions, verdicts = (from_parquet(read_object(run.store, ref), ref.key)[0] for ref in refs)
        columns: dict[str, Any] = {name: rollouts[name] for name in rollouts.column_names}
        columns |= {name: verdicts[name] for name in _FROM_VERDICTS}
        columns["breakdown"] = pa.array([json.dumps(dict(value)) for value in verdicts["breakdown"].to_pylist()])
        columns["execution_status"] = executions["status"]
        columns["iteration"] = pa.repeat(pa.scalar(scope.iteration, pa.int64()), rollouts.num_rows)
        schema = export_schema()
        yield pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _tables(refs: tuple[ObjectRef, ...]) -> list[ObjectRef]:
    return [ref for ref in refs if ref.num_rows >= 0]


def export_sft(
    run: Run,
    target: Path,
    min_reward: float = PASS_REWARD,
    best_of_group: bool = False,
    domain: str = "",
    progress: Progress = lambda done, total: None,
) -> int:
    """Write one JSON object a line for each scored training rollout with at least that reward: `messages` (role,
    content, tool calls where there are any), `rollout_id`, `domain`, `reward`. Returns the number of lines.

    `best_of_group` keeps one of each group: the best, of equals the shortest. Held-out rollouts are never exported.
    ConfigError when the file exists or no rollout is good enough.
    """
    num, highest, scopes = 0, float("-inf"), run.scopes(Purpose.TRAIN, "verify")
    with new_file(target) as path:
        with path.open("w", encoding="utf-8") as file:
            for done, scope in enumerate(scopes):
                for table in rollout_tables(run, scope):
                    rows = [row for row in _scored(table) if not domain or row["domain"] == domain]
                    highest = max([highest, *(row["reward"] for row in rows)])
                    good = [row for row in rows if row["reward"] >= min_reward]
                    for row in _best(good) if best_of_group else good:
                        file.write(json.dumps(_example(row), ensure_ascii=False) + "\n")
                        num += 1
                progress(done + 1, len(scopes))
        if num == 0:
            found = f"the highest reward is {highest:g}" if highest > float("-inf") else "there is no scored one"
            of = f" of domain {domain!r}" if domain else ""
            raise ConfigError(f"no training rollout{of} of run {run.name!r} has a reward of {min_reward:g}: {found}")
    return num


def _scored(table: pa.Table) -> list[dict[str, Any]]:
    names = ["rollout_id", "group_id", "domain", "outcome", "reward", "num_response_tokens", "messages"]
    rows: list[dict[str, Any]] = table.select(names).to_pylist()
    return [row for row in rows if row["outcome"] == Outcome.SCORED]


def _best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        held = best.setdefault(row["group_id"], row)
        if (-row["reward"], row["num_response_tokens"]) < (-held["reward"], held["num_response_tokens"]):
            best[row["group_id"]] = row
    return list(best.values())


def _example(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [_message(message) for message in row["messages"]],
        **{name: row[name] for name in ("rollout_id", "domain", "reward")},
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    found = {"role": message["role"], "content": message["content"]}
    if message["tool_calls"]:
        found["tool_calls"] = json.loads(message["tool_calls"])
    return found | {name: message[name] for name in ("tool_call_id", "images") if message[name]}
