"""One rollout as text: what it was asked, what it answered, what the sandbox saw, what the verifier decided."""

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, TypeVar

from posttrain_core import layout
from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.rows import Rows
from posttrain_core.inspect.tables import RAW_ROLLOUTS, STAGE_OF_TABLE
from posttrain_core.inspect.text import quoted, section, visible
from posttrain_core.manifest import find_manifest, read_object
from posttrain_core.records import CaseReturn, Execution, PlanRow, Purpose, Rollout, Sample, Verdict
from posttrain_core.schema import TABLES, from_table, parse_problem

R = TypeVar("R")

_PARTS = re.compile(r"([ie])(\d{5,})\.")
_PURPOSES = {"i": Purpose.TRAIN, "e": Purpose.EVAL}


def show(run: Run, rollout_id: str, tokens: bool = True) -> str:
    """Everything the run holds about a rollout. Parts whose stage is not committed yet are said to be missing."""
    rollout = find(run, rollout_id, Rollout)
    if rollout is None:
        raise ConfigError(_unknown(run, rollout_id))
    lines = section(f"rollout {rollout_id}", _head(run, rollout, find(run, rollout_id, PlanRow)))
    for message in rollout.messages:
        lines += section(f"[{visible(message.role)}]", _message(message.content, message.tool_calls))
    lines += section("execution", _execution(find(run, rollout_id, Execution)))
    lines += section("verdict", _verdict(find(run, rollout_id, Verdict)))
    lines += section("learned from", _sample(find(run, rollout_id, Sample)))
    if tokens:
        lines += section("response tokens", _tokens(rollout, token_texts(run, rollout.response_ids)))
    return "\n".join(lines).rstrip("\n")


def rollout_record(run: Run, rollout_id: str) -> dict[str, Any]:
    """The same as JSON: the row of each table, or null where its stage is not committed."""
    found = {name: _rows(run, rollout_id, name).to_pylist() for name in STAGE_OF_TABLE}
    if not found["rollouts"]:
        raise ConfigError(_unknown(run, rollout_id))
    return {name: rows[0] if rows else None for name, rows in found.items()}


def find(run: Run, rollout_id: str, record: type[R]) -> R | None:
    """The row of a rollout in the table of `record`, in whichever iteration or evaluation it is."""
    name = next(name for name, kind in TABLES.items() if kind is record)
    rows = from_table(record, _rows(run, rollout_id, name).to_table())
    return rows[0] if rows else None


def _rows(run: Run, rollout_id: str, name: str) -> Rows:
    rows = run.rows(RAW_ROLLOUTS if name == "rollouts" else name, rollout_id=rollout_id)
    if match := _PARTS.match(rollout_id):  # the id says where: nothing else needs to be opened
        return rows.where(iteration=int(match[2]), purpose=_PURPOSES[match[1]])
    return rows


def _head(run: Run, rollout: Rollout, plan: PlanRow | None) -> Iterator[str]:
    yield f"  run {run.name}, {rollout.purpose}, domain {rollout.domain}, policy version {rollout.policy_version}"
    yield f"  problem {rollout.problem_id}, group {rollout.group_id}"
    yield f"  sample {rollout.sample_index}, seed {rollout.seed}"
    budget = f" of at most {plan.max_new_tokens}, temperature {plan.temperature}" if plan else ""
    yield f"  {rollout.num_prompt_tokens} prompt tokens, {rollout.num_response_tokens} response tokens{budget}"
    reason = f" ({visible(rollout.reason)})" if rollout.reason else ""
    yield f"  finished by {rollout.finish_reason}, {rollout.outcome}{reason}"
    if plan is not None:
        problem = parse_problem(plan.problem)
        for label, value in (("sandbox sees", problem.payload), ("expected", problem.hidden)):
            if value:
                yield f"  {label}: {visible(json.dumps(dict(value), ensure_ascii=False))}"


def _message(content: str, tool_calls: str) -> Iterator[str]:
    yield from quoted(content)
    for call in json.loads(tool_calls) if tool_calls else ():
        yield f"  tool call: {visible(json.dumps(call, ensure_ascii=False))}"


def _execution(execution: Execution | None) -> Iterator[str]:
    if execution is None:
        yield "  not committed yet"
        return
    reason = f" ({visible(execution.reason)})" if execution.reason else ""
    yield f"  {execution.status}{reason}, isolation: {visible(execution.isolation)}"
    yield from (_case(case) for case in execution.returns)
    for name, text in (("stdout", execution.stdout), ("stderr", execution.stderr)):
        if text:
            yield f"  {name}"
            yield from quoted(text.removesuffix("\n"))


def _case(case: CaseReturn) -> str:
    found = f"returned {visible(case.value)}" if case.ok else f"failed: {visible(case.error)}"
    return f"  case {visible(case.case_id)} {found}"


def _verdict(verdict: Verdict | None) -> Iterator[str]:
    if verdict is None:
        yield "  not committed yet"
        return
    flags = f", flags: {', '.join(map(visible, verdict.flags))}" if verdict.flags else ""
    yield f"  {verdict.outcome}, reward {verdict.reward:g}{flags}"
    yield from (f"  breakdown {visible(name)}: {value:g}" for name, value in verdict.breakdown.items())
    evidence: dict[str, Any] = json.loads(verdict.evidence)
    yield from (f"  evidence {visible(name)}: {_json(value)}" for name, value in evidence.items() if value != "")


def _sample(sample: Sample | None) -> Iterator[str]:
    yield "  no" if sample is None else f"  yes, reward {sample.reward:g}, advantage {sample.advantage:+.4f}"


def _tokens(rollout: Rollout, texts: list[str]) -> Iterator[str]:
    yield "  place      id   log-prob  learned from  text"
    rows = zip(rollout.response_ids, rollout.sampler_logprobs, rollout.loss_mask, texts, strict=True)
    for place, (token, logprob, mask, text) in enumerate(rows):
        yield f"  {place:5d} {token:7d} {logprob:10.4f}  {'yes' if mask else 'no':12}  {visible(text)}".rstrip()


def token_texts(run: Run, ids: tuple[int, ...]) -> list[str]:
    """By the tokenizer that lies with policy version 0; empty texts where there is none, or no package to read it."""
    policy = find_manifest(run.store, layout.start_manifest(run.name, "publish"))
    files = policy.named("/tokenizer.json") if policy is not None else []
    try:
        from tokenizers import Tokenizer
    except ImportError:
        files = []
    if not files:
        return [""] * len(ids)
    tokenizer = Tokenizer.from_str(read_object(run.store, files[0]).decode())
    return [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def _json(value: Any) -> str:
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _unknown(run: Run, rollout_id: str) -> str:
    ids = run.rollouts("rollout_id").to_table()["rollout_id"].to_pylist()
    nearest = get_close_matches(rollout_id, ids, n=3, cutoff=0.5)
    hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
    return f"run {run.name!r} has no rollout {rollout_id!r} ({len(ids)} rollouts are committed){hint}"
