"""A large made-up run, for measuring how fast runs are looked at: tables and manifests as the stages commit them,
columns filled at once instead of row by row.

    python -m flows.synthetic_run STORE --iterations 100 --rollouts 10000

Rewards rise with the iterations; everything is a function of the seed. No policies, checkpoints, samples or telemetry.
"""

import argparse
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain_core import layout
from posttrain_core.config import RunConfig
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, ObjectRef, code_version, commit_manifest
from posttrain_core.records import ExecutionStatus, FinishReason, Outcome, Purpose
from posttrain_core.schema import arrow_schema, to_parquet
from posttrain_core.stages.context import open_run
from posttrain_core.store import ObjectStore, open_store

DOMAINS = ("arithmetic", "logic", "program", "strings")
_STAGES = {"plan": "plan", "rollouts": "generate", "executions": "execute", "verdicts": "verify"}
_VERDICT_SET = "synthetic"
_NUM_PROMPT_TOKENS = 24
_NUM_PROBLEMS = 20_000  # of each domain
_Columns = dict[str, Any]  # by name: a column in anything that pa.array takes


@dataclass(frozen=True)
class Size:
    """`rollouts` of an iteration; every `eval_every` versions are evaluated on `eval_rollouts`."""

    iterations: int = 100
    rollouts: int = 10_000
    group_size: int = 8
    rollouts_per_shard: int = 1000
    eval_every: int = 10
    eval_rollouts: int = 2000
    mean_tokens: int = 32  # of a response
    seed: int = 0

    @property
    def num_rollouts(self) -> int:
        """Of the whole run, evaluations not counted."""
        return self.iterations * self.rollouts


def write_run(url: str, name: str, size: Size, num_processes: int = 0) -> None:
    """Write the run with so many processes; 0 is one for each core. Manifests that are there already stay."""
    config = RunConfig.model_validate(
        {
            "run": name,
            "store": url,
            "seed": size.seed,
            "iterations": size.iterations,
            "domains": {domain: {"type": "program"} for domain in DOMAINS},
            "sampler": {"type": "scripted"},
            "learner": {"type": "numpy"},
            "plan": {
                "problems_per_iteration": size.rollouts // size.group_size,
                "group_size": size.group_size,
                "rollouts_per_shard": size.rollouts_per_shard,
            },
            "eval": {"every": size.eval_every, "num_problems": size.eval_rollouts // 4, "samples_per_problem": 4},
        }
    )
    store = open_store(url)
    open_run(store, config)
    evaluated = sorted({*range(0, size.iterations + 1, size.eval_every), size.iterations})
    scopes = [Scope(iteration) for iteration in range(size.iterations)]
    scopes += [Scope(version, Purpose.EVAL) for version in evaluated]
    _commit(store, layout.start_manifest(name, "publish"), "publish", -1, [], {})
    write = partial(_write_scope, url, name, size)
    if num_processes == 1:
        for scope in scopes:
            write(scope)
        return
    with ProcessPoolExecutor(num_processes or os.cpu_count(), get_context("spawn")) as pool:
        for _ in pool.map(write, scopes):
            pass


def _write_scope(url: str, name: str, size: Size, scope: Scope) -> None:
    store = open_store(url)
    columns = _columns(size, scope)
    num = size.rollouts if scope.purpose is Purpose.TRAIN else size.eval_rollouts
    for table, stage in _STAGES.items():
        whole = _table(table, columns)
        refs = [
            _put(store, _key(name, table, scope, shard), whole.slice(start, size.rollouts_per_shard))
            for shard, start in enumerate(range(0, num, size.rollouts_per_shard))
        ]
        metrics = _summary(columns) if stage == "verify" else {}
        _commit(store, layout.manifest(name, scope, stage), stage, scope.iteration, refs, metrics)
    if scope.purpose is Purpose.TRAIN:
        loss = {"loss": 1 / (1 + scope.iteration), "entropy": 2 / (1 + scope.iteration / 10)}
        _commit(store, layout.manifest(name, scope, "update"), "update", scope.iteration, [], loss)
        _commit(store, layout.manifest(name, scope, "publish"), "publish", scope.iteration, [], {})


def _key(name: str, table: str, scope: Scope, shard: int) -> str:
    if table == "verdicts":
        return layout.verdicts(name, _VERDICT_SET, scope, shard)
    return layout.table(name, table, scope, shard)


def _put(store: ObjectStore, key: str, table: pa.Table) -> ObjectRef:
    data = to_parquet(table, {"synthetic": True})
    store.put_volatile(key, data)
    return ObjectRef(key, hashlib.sha256(data).hexdigest(), len(data), table.num_rows)


def _commit(
    store: ObjectStore, key: str, stage: str, iteration: int, refs: Sequence[ObjectRef], metrics: dict[str, float]
) -> None:
    manifest = Manifest(stage, iteration, {"synthetic": True}, tuple(refs), metrics, code_version=code_version())
    commit_manifest(store, key, manifest, lambda: None)


def _table(name: str, columns: _Columns) -> pa.Table:
    schema = arrow_schema(name)
    prefixed = [columns.get(f"{name}.{field.name}", columns.get(field.name)) for field in schema]
    arrays = [pa.array(column, field.type) for column, field in zip(prefixed, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _columns(size: Size, scope: Scope) -> _Columns:
    """The columns of all tables; those of one name have one content, unless the table's name is in front."""
    train = scope.purpose is Purpose.TRAIN
    num, group_size = (size.rollouts, size.group_size) if train else (size.eval_rollouts, 4)
    random = np.random.default_rng([size.seed, scope.iteration, int(train)])
    groups = np.arange(num) // group_size
    domains = [DOMAINS[place] for place in groups * len(DOMAINS) // (groups[-1] + 1)]  # one after the other, as planned
    items = (groups + scope.iteration * len(groups) // group_size * train) % _NUM_PROBLEMS
    problems = [f"{domain}/{item:05d}" for domain, item in zip(domains, items.tolist(), strict=True)]
    label = "i" if train else "e"
    group_ids = [f"{label}{scope.iteration:05d}.p{group:04d}" for group in groups.tolist()]
    ids = [f"{group}.r{place % group_size:02d}" for place, group in enumerate(group_ids)]
    truncated = random.random(num) < 0.02
    rewards = np.where(truncated, 0.0, _rewards(random, items, scope.iteration / max(1, size.iterations)))
    lengths = random.integers(size.mean_tokens // 2, size.mean_tokens * 3 // 2 + 1, num)
    texts = [f"max({a}*x+{b}, {c})" for a, b, c in random.integers(0, 100, (num, 3)).tolist()]
    prompts = [f"0:{item % 7} 1:{item % 11} 4:{item % 13}" for item in items.tolist()]
    outcomes = np.where(truncated, str(Outcome.TRUNCATED), str(Outcome.SCORED)).tolist()
    return {
        "rollout_id": ids,
        "group_id": group_ids,
        "problem_id": problems,
        "domain": domains,
        "purpose": [str(scope.purpose)] * num,
        "sample_index": np.arange(num) % group_size,
        "seed": random.integers(0, 2**62, num),
        "policy_version": np.full(num, scope.iteration),
        "max_new_tokens": np.full(num, size.mean_tokens * 2),
        "temperature": np.full(num, 1.0),
        "stop": [[]] * num,
        "problem": list(map(_problem, problems, domains, prompts)),
        "messages": [_messages(prompt, text) for prompt, text in zip(prompts, texts, strict=True)],
        "prompt_ids": _lists(random.integers(0, 32_000, num * _NUM_PROMPT_TOKENS), [_NUM_PROMPT_TOKENS] * num),
        "response_ids": _lists(random.integers(0, 32_000, lengths.sum()), lengths),
        "sampler_logprobs": _lists(-random.exponential(0.5, lengths.sum()).astype(np.float32), lengths),
        "loss_mask": _lists(np.ones(lengths.sum(), np.int8), lengths),
        "finish_reason": np.where(truncated, str(FinishReason.LENGTH), str(FinishReason.STOP)).tolist(),
        "num_prompt_tokens": np.full(num, _NUM_PROMPT_TOKENS),
        "num_response_tokens": lengths,
        "text": texts,
        "outcome": outcomes,
        "reason": [""] * num,
        "status": [str(ExecutionStatus.OK)] * num,
        "returns": [_returns(value) for value in random.integers(0, 1000, (num, 4)).tolist()],
        "stdout": [""] * num,
        "stderr": [""] * num,
        "isolation": ["namespaces"] * num,
        "reward": rewards,
        "breakdown": [[("cases", reward)] for reward in rewards.tolist()],
        "evidence": [json.dumps({"passed": reward * 4, "of": 4}) for reward in rewards.tolist()],
        "flags": [["invalid"] if flag else [] for flag in (random.random(num) < 0.01).tolist()],
    }


def _rewards(random: np.random.Generator, items: np.ndarray, progress: float) -> np.ndarray:
    """0, 1/4 .. 1: how many of four cases pass; problems differ in how hard they are."""
    hardness = (items * 2654435761 % 1000) / 1000
    chance = np.clip(0.15 + 0.7 * progress + 0.3 * (0.5 - hardness), 0.02, 0.98)
    return random.binomial(4, chance) / 4


def _lists(values: np.ndarray, lengths: Sequence[int] | np.ndarray) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _messages(prompt: str, text: str) -> list[dict[str, Any]]:
    empty = {"tool_calls": "", "tool_call_id": "", "images": []}
    return [{"role": "user", "content": prompt} | empty, {"role": "assistant", "content": text} | empty]


def _returns(values: list[int]) -> list[dict[str, Any]]:
    return [{"case_id": str(place), "ok": True, "value": str(value), "error": ""} for place, value in enumerate(values)]


def _problem(problem: str, domain: str, prompt: str) -> str:
    message = {"role": "user", "content": prompt, "tool_calls": "", "tool_call_id": "", "images": []}
    record = {"id": problem, "domain": domain, "split": "train", "prompt": [message], "payload": {}, "hidden": {}}
    return json.dumps(record, sort_keys=True)


def _summary(columns: _Columns) -> dict[str, float]:
    """As `stages.verify` sums up."""
    counts = {str(outcome): float(columns["outcome"].count(str(outcome))) for outcome in Outcome}
    rewards = columns["reward"]
    return counts | {"reward_mean": float(rewards.mean()), "pass_rate": float((rewards >= 1).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--run", default="synthetic")
    for name, value in itertools.chain(vars(Size()).items()):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = vars(parser.parse_args())
    write_run(given.pop("store"), given.pop("run"), Size(**given))


if __name__ == "__main__":
    main()
