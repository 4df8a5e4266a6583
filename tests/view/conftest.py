"""A server of pages, a browser, and a run in which everything that a model can write is hostile."""

import hashlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp

from posttrain_core import layout
from posttrain_core.config import RunConfig
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, ObjectRef, code_version, commit_manifest
from posttrain_core.records import (
    CaseReturn,
    Execution,
    ExecutionStatus,
    FinishReason,
    Message,
    Outcome,
    PlanRow,
    Problem,
    Purpose,
    Rollout,
    Sample,
    Split,
    Verdict,
)
from posttrain_core.schema import problem_json, to_parquet, to_table
from posttrain_core.stages.context import open_run
from posttrain_core.store import ObjectStore, open_store
from posttrain_core.view.app import create_app
from tests.view.browser import Page, browser, missing

PIXEL = (  # a PNG of one pixel
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HOSTILE = (
    "\n<script>window.ran = 1; fetch('https://example.com/')</script></div></main>"
    "<img src='https://example.com/x.png' onerror='window.ran = 2'>\"'`><svg onload=window.ran=3>"
    "{{ 7*7 }}{% raw %}&lt;&amp;\x1b[31mred\x1b[0m\u202egnp.exe\u2066\u200b\u2028\x00\x07\r\n\t"
    "שלום \ud7fb\ue000\U000e0041"
    "<a href='javascript:window.ran=4'>x</a><style>body{display:none}</style><!--"
)
TOKENS = ["<script>window.ran=5</script>", "\x1b[2J", "\u202e", "\n", "plain", " space", "</span>"]


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Where Chromium is not installed, only CI insists on it."""
    if why := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The address of an application, served in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="session")
def finished(finished_run: Path) -> Iterator[str]:
    with served(create_app(open_store(str(finished_run)))) as address:
        yield address


@pytest.fixture(scope="session")
def hostile_store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    store = open_store(str(tmp_path_factory.mktemp("hostile")))
    write_hostile_run(store)
    return store


@pytest.fixture(scope="session")
def hostile(hostile_store: ObjectStore) -> Iterator[str]:
    with served(create_app(hostile_store)) as address:
        yield address


def write_hostile_run(store: ObjectStore) -> None:
    """Run "h": one iteration, one group of two rollouts with several turns, tool calls and images."""
    from tokenizers import Tokenizer, models

    sections: dict[str, Any] = {"domains": {"program": {"type": "program"}}, "sampler": {"type": "scripted"}}
    config = RunConfig.model_validate(sections | {"run": "h", "store": store.url, "learner": {"type": "numpy"}})
    open_run(store, config)
    vocabulary = {text: number for number, text in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="plain"))
    data = tokenizer.to_str().encode()
    key = f"{layout.policy('h', 0, 'a')}tokenizer.json"
    store.put_volatile(key, data)
    policy = ObjectRef(key, hashlib.sha256(data).hexdigest(), len(data))
    _commit(store, layout.start_manifest("h", "publish"), "publish", [policy])
    for stage, rows in _hostile_rows().items():
        _commit_rows(store, Scope(0), stage, rows)


def _hostile_rows() -> dict[str, list[Any]]:
    """By stage: the rows of its table."""
    problem = Problem("program/<b>", "program", Split.TRAIN, (Message("user", HOSTILE),), {}, {"answer": HOSTILE})
    place = {"group_id": "i00000.p0000", "problem_id": problem.id, "domain": "program", "purpose": Purpose.TRAIN}
    plan = PlanRow("i00000.p0000.r00", sample_index=0, seed=1, policy_version=0, max_new_tokens=9, temperature=1.0,
                   stop=(), problem=problem_json(problem), **place)  # fmt: skip
    call = json.dumps([{"id": "c", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}])
    messages = (
        Message("user", HOSTILE, images=(PIXEL, "https://example.com/spy.png")),
        Message("assistant", "", tool_calls=call),
        Message("tool", HOSTILE, tool_call_id="c"),
        Message("assistant", HOSTILE),
    )
    num = len(TOKENS)
    logprobs = tuple(-0.1 - 0.9 * place for place in range(num))
    mask = (1,) * (num - 1) + (0,)
    rollout = Rollout("i00000.p0000.r00", sample_index=0, seed=1, policy_version=0, messages=messages, prompt_ids=(4,),
                      response_ids=tuple(range(num)), sampler_logprobs=logprobs, loss_mask=mask,
                      finish_reason=FinishReason.STOP, num_prompt_tokens=1, num_response_tokens=num, text=HOSTILE,
                      outcome=Outcome.SCORED, reason=HOSTILE, **place)  # fmt: skip
    execution = Execution(
        rollout.rollout_id, ExecutionStatus.OK, (CaseReturn("0", True, HOSTILE),), HOSTILE, HOSTILE, "namespaces"
    )
    evidence = json.dumps({"said": HOSTILE, HOSTILE: [HOSTILE]})
    verdict = Verdict(rollout.rollout_id, Outcome.SCORED, 0.5, {"cases": 0.5, HOSTILE: 0.5}, evidence, (HOSTILE,))
    sample = Sample(rollout.rollout_id, rollout.group_id, "program", 0, (4, *rollout.response_ids), (0, *mask),
                    (0.0, *logprobs), 0.5, 0.25, 1.0)  # fmt: skip
    rows: dict[str, list[Any]] = {
        "plan": [plan],
        "generate": [rollout],
        "execute": [execution],
        "verify": [verdict],
        "update": [sample],
    }
    other = {"rollout_id": "i00000.p0000.r01"}
    for stage, found in rows.items():
        again: dict[str, Any] = other | ({"sample_index": 1} if stage in ("plan", "generate") else {})
        found.append(replace(found[0], **again))
    return rows


_TABLES = {
    "plan": "plan",
    "generate": "rollouts",
    "execute": "executions",
    "verify": "verdicts",
    "update": "samples",
}


def _commit_rows(store: ObjectStore, scope: Scope, stage: str, rows: Sequence[Any]) -> None:
    table = _TABLES[stage]
    key = layout.verdicts("h", "set", scope, 0) if stage == "verify" else layout.table("h", table, scope, 0)
    data = to_parquet(to_table(table, rows), {})
    store.put_volatile(key, data)
    ref = ObjectRef(key, hashlib.sha256(data).hexdigest(), len(data), len(rows))
    metrics = {"reward_mean": 0.5, "pass_rate": 0.0} if stage == "verify" else {}
    _commit(store, layout.manifest("h", scope, stage), stage, [ref], metrics)


def _commit(
    store: ObjectStore, key: str, stage: str, refs: list[ObjectRef], metrics: dict[str, float] | None = None
) -> None:
    manifest = Manifest(stage, 0, {"made": "up"}, tuple(refs), metrics or {}, code_version=code_version())
    commit_manifest(store, key, manifest, lambda: None)
