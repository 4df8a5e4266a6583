"""README.md of what is exported: a dataset card and a model card, from what the manifests say."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import yaml

from posttrain_core.config import RunConfig
from posttrain_core.inspect.catalogue import Run
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest
from posttrain_core.records import PASS_REWARD, Purpose
from posttrain_core.stages.context import semantic_settings

if TYPE_CHECKING:
    from posttrain_core.care.export import SplitCounts

_MEANINGS = {
    "iteration": "training iteration; in held_out the policy version that is evaluated",
    "rollout_id": "unique within the run",
    "group_id": "the rollouts of one problem in one iteration share it",
    "problem_id": "unique over all domains",
    "domain": "kind of problem",
    "purpose": "train or eval",
    "sample_index": "number of the rollout within its group",
    "seed": "of the sampler for this rollout",
    "policy_version": "the policy that made it",
    "messages": "prompt and response as chat messages",
    "prompt_ids": "token ids of the prompt",
    "response_ids": "token ids of the response",
    "sampler_logprobs": "log-probability of each response token when it was sampled",
    "loss_mask": "1 for each response token that the policy emitted",
    "finish_reason": "why the response ended",
    "num_prompt_tokens": "length of prompt_ids",
    "num_response_tokens": "length of response_ids",
    "text": "the last response turn",
    "reason": "why it is not scored, where it is not",
    "outcome": "scored, truncated, infra_failed or unscorable",
    "reward": "finite; 0.0 unless scored",
    "flags": "what the verifier remarked",
    "evidence": "JSON: what the verdict rests on",
    "breakdown": "JSON: parts of the reward by name",
    "execution_status": "how the execution of the work product ended",
}


def dataset_card(run: Run, counts: Mapping[str, "SplitCounts"], schema: pa.Schema) -> str:
    head = {
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": f"data/{split}/*.parquet"} for split in counts],
            }
        ],
        "tags": ["reinforcement-learning", "rollouts", "posttrain"],
    }
    lines = [
        f"# Rollouts of run {run.name}",
        "",
        "Every rollout of a reinforcement-learning run with its verdict: one row is one attempt at one problem.",
        f"The split `train` is what the policy learned from{_of(counts, 'train')}; `held_out` are evaluations on "
        f"problems that are never trained on{_of(counts, 'held_out')}.",
        "",
        "```python",
        "from datasets import load_dataset",
        'rollouts = load_dataset("path/to/this/folder", split="train")',
        "```",
        "",
        "## Counts",
        "",
        f"Judged are rollouts whose outcome is scored or truncated; one passes from reward {PASS_REWARD:g} on.",
        "",
        *_table(("split", "domain", "rollouts", "judged", "mean reward", "pass rate"), _count_rows(counts)),
        "",
        "## Features",
        "",
        *_table(("column", "type", "meaning"), [(f.name, f"`{f.type}`", _MEANINGS.get(f.name, "")) for f in schema]),
        "",
        *_made(run),
    ]
    return _front_matter(head) + "\n".join(lines) + "\n"


def model_card(run: Run, version: int, policy: Manifest) -> str:
    """`policy` is the publish manifest of the version."""
    is_transformers = any(ref.key.endswith("/config.json") for ref in policy.objects)
    head: dict[str, Any] = {"tags": ["reinforcement-learning", "posttrain"]}
    if is_transformers:
        head = {"library_name": "transformers", "pipeline_tag": "text-generation"} | head
    started = Path(run.config.model.path).name or "a starting policy"
    lines = [
        f"# {run.name}, policy version {version}",
        "",
        f"Made by posttrain from {started}"
        + (f" in {version} iterations of reinforcement learning." if version else ", before any iteration."),
        "",
        "## Results",
        "",
        *_results(run, version),
        "",
        "## Lineage",
        "",
        *_table(("manifest", "sha256"), _chain(run, version, policy)),
        "",
        *_table(("file", "bytes", "sha256"), [(_name(ref.key), ref.num_bytes, ref.digest) for ref in policy.objects]),
        "",
        *_made(run),
    ]
    return _front_matter(head) + "\n".join(lines) + "\n"


def _results(run: Run, version: int) -> list[str]:
    rows: list[tuple[object, ...]] = []
    held_out = Scope(version, Purpose.EVAL)
    if "verify" in run.committed.get(held_out, ()):
        metrics = run.manifests([held_out], "verify")[held_out].metrics
        rows.append(("held-out problems", _number(metrics, "reward_mean"), _number(metrics, "pass_rate")))
    last = Scope(version - 1)
    if "verify" in run.committed.get(last, ()):
        metrics = run.manifests([last], "verify")[last].metrics
        name = f"training problems of iteration {version - 1} (under version {version - 1})"
        rows.append((name, _number(metrics, "reward_mean"), _number(metrics, "pass_rate")))
    if not rows:
        return ["This version was not evaluated."]
    return _table(("on", "mean reward", "pass rate"), rows)


def _chain(run: Run, version: int, policy: Manifest) -> list[tuple[str, str]]:
    """Back to the version before: each names the digest of the one above it in its fingerprint."""
    rows = [("publish", policy.digest)]
    scope = Scope(version - 1)
    for stage in ("update", "verify", "execute", "generate", "plan"):
        if stage in run.committed.get(scope, ()):
            rows.append((f"{stage} of iteration {version - 1}", run.manifests([scope], stage)[scope].digest))
    return rows


def _made(run: Run) -> list[str]:
    """Semantic settings only: operational ones are about places and machines."""
    record = run.record
    settings = semantic_settings(RunConfig.model_validate(record["config"]))
    lines = ["## How it was made", "", f"posttrain {record['code_version']}, run started {record['created']}."]
    if origin := record.get("fork"):
        lines.append(
            f"The run was forked from run {origin['parent']} at iteration {origin['at']}: what came before was made "
            "with the settings of that run."
        )
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    return [*lines, "", "```yaml", *text.rstrip().splitlines(), "```"]


def _count_rows(counts: Mapping[str, "SplitCounts"]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for split, found in counts.items():
        for domain in sorted(found.rows):
            judged = found.judged[domain]
            reward = f"{found.reward[domain] / judged:.4f}" if judged else ""
            passed = f"{found.passed[domain] / judged:.4f}" if judged else ""
            rows.append((split, domain, found.rows[domain], judged, reward, passed))
    return rows


def _of(counts: Mapping[str, "SplitCounts"], split: str) -> str:
    if split not in counts:
        return " (none here)"
    numbers = counts[split].scopes
    what = "iterations" if split == "train" else "versions"
    return f" ({len(numbers)} {what}, {numbers[0]} to {numbers[-1]})"


def _table(columns: tuple[str, ...], rows: list[Any]) -> list[str]:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def _front_matter(head: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(head), sort_keys=False)}---\n\n"


def _number(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4f}" if name in metrics else ""


def _name(key: str) -> str:
    return key.rpartition("/")[2]
