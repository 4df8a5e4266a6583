"""Stages off the happy path: faults of the sandbox, problems that repeat, a model folder that is gone."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows import pipeline
from flows.scratch import scratch_folder
from posttrain_core.config import KlConfig, MismatchConfig, NumpyLearnerConfig, RunConfig
from posttrain_core.errors import ConfigError, LearnerFault, PolicyMismatch, RunConflict, SandboxFault
from posttrain_core.inspect import tables
from posttrain_core.inspect.catalogue import open_run
from posttrain_core.layout import Scope
from posttrain_core.learner.numpy_learner import NumpyLearner
from posttrain_core.records import CaseReturn, ExecutionStatus, Purpose, Sample
from posttrain_core.sampling.protocol import Completion, Sampler
from posttrain_core.sandbox.protocol import Limits, ProgramRequest, ProgramResult
from posttrain_core.stages.execute import CANARY
from posttrain_core.stages.plan import plan_rows
from posttrain_core.stages.session import LearnerSession
from tasks.runner import ThreadRunner
from tests.crash.test_kills import scripted


class FaultySandbox:
    """Meets a fault on the programs it is told to, and on the canary when it is broken as a whole."""

    isolation = "none"

    def __init__(self, crashing: str = "", broken: bool = False) -> None:
        self.crashing, self.broken = crashing, broken

    def run_programs(self, requests: Sequence[ProgramRequest], limits: Limits) -> list[ProgramResult]:
        return [self._run(request) for request in requests]

    def _run(self, request: ProgramRequest) -> ProgramResult:
        if self.broken or request.source == self.crashing:
            return ProgramResult(ExecutionStatus.INFRA, (), "", "", "none", "the sandbox went away")
        returns = tuple(CaseReturn(str(number), True, "2") for number in range(len(request.inputs)))
        return ProgramResult(ExecutionStatus.OK, returns, "", "", "none")

    def close(self) -> None:
        return


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[pipeline.Services, ThreadRunner]]:
    config = scripted(
        tmp_path, iterations=1, prefect={"retries": 0}, sampler={"type": "scripted", "responses": ["x", "y"]}
    )
    with (
        scratch_folder() as scratch,
        pipeline.open_services(config, scratch) as services,
        ThreadRunner(config.prefect) as runner,
    ):
        services.sandbox.close()
        pipeline.begin(services, runner)
        yield services, runner


def test_a_program_that_breaks_the_sandbox_is_scored_zero(opened: tuple[pipeline.Services, ThreadRunner]) -> None:
    services, runner = opened
    services.sandbox = FaultySandbox(crashing="y")
    pipeline.iterate(services, runner, 0)
    run = open_run(services.run.config.store, "r")
    texts = tables.read(run, "rollouts", ["text"])["text"].to_pylist()
    verdicts = tables.read(run, "verdicts", ["outcome", "reward", "flags"]).to_pylist()
    assert {"x", "y"} == set(texts)
    for text, verdict in zip(texts, verdicts, strict=True):
        assert verdict["outcome"] == "scored"
        assert (verdict["flags"] == ["crashes_sandbox"]) == (text == "y")
        assert text == "x" or verdict["reward"] == 0.0


def test_a_broken_sandbox_commits_nothing_and_a_mended_one_goes_on(
    opened: tuple[pipeline.Services, ThreadRunner],
) -> None:
    services, runner = opened
    services.sandbox = FaultySandbox(broken=True)
    with pytest.raises(SandboxFault, match="only adds 1"):
        pipeline.iterate(services, runner, 0)
    services.sandbox = FaultySandbox()
    pipeline.iterate(services, runner, 0)
    run = open_run(services.run.config.store, "r")
    assert set(tables.read(run, "executions", ["status"])["status"].to_pylist()) == {"ok"}
    assert CANARY.inputs == ("[1]",)


class ShiftedSampler:
    """Reports each log-probability 0.5 too low."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def sample(self, requests: Sequence[Any], on_done: Any = None) -> list[Completion]:
        completions = self._sampler.sample(requests)
        return [replace(made, logprobs=tuple(value - 0.5 for value in made.logprobs)) for made in completions]


def set_algorithm(services: pipeline.Services, **changes: Any) -> None:
    run = services.run
    run.config = run.config.model_copy(update={"algorithm": run.config.algorithm.model_copy(update=changes)})
    learner = RememberingLearner(NumpyLearnerConfig(), run.config.algorithm.mismatch)
    services.session = LearnerSession(run, learner)


class RememberingLearner(NumpyLearner):
    """Has a reference policy under which every token has log-probability -1; its first update fails when told so."""

    fails = False

    def __init__(self, config: NumpyLearnerConfig, limits: MismatchConfig) -> None:
        super().__init__(config, limits)
        self.num_references = 0
        self.learned: list[tuple[Sample, ...]] = []

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        self.num_references += 1
        return [tuple(-float(bit) for bit in sample.loss_mask) for sample in samples]

    def update(self, samples: Sequence[Sample], seed: int) -> Mapping[str, float]:
        self.learned.append(tuple(samples))
        if self.fails:
            self.fails = False
            raise LearnerFault("the first time it fails")
        return super().update(samples, seed)


def test_a_mismatch_commits_no_update_until_its_limit_is_raised(
    opened: tuple[pipeline.Services, ThreadRunner],
) -> None:
    services, runner = opened
    services.sandbox = FaultySandbox()
    services.sampler = ShiftedSampler(services.sampler)
    set_algorithm(services)
    with pytest.raises(PolicyMismatch, match=r"logprob_difference_mean is 0\.5"):
        pipeline.iterate(services, runner, 0)
    assert services.run.find(Scope(0), "update") is None
    set_algorithm(services, mismatch=MismatchConfig(max_mean_difference=0.6))
    pipeline.iterate(services, runner, 0)
    assert services.run.manifest(Scope(0), "update").metrics["logprob_difference_max"] == pytest.approx(0.5)


def test_the_references_values_are_made_once_and_stored(opened: tuple[pipeline.Services, ThreadRunner]) -> None:
    services, runner = opened
    services.sandbox = FaultySandbox()
    set_algorithm(services, kl=KlConfig())
    learner = services.session.learner
    assert isinstance(learner, RememberingLearner)
    learner.fails = True
    with pytest.raises(LearnerFault):
        pipeline.iterate(services, runner, 0)
    pipeline.iterate(services, runner, 0)
    services.session.forget()
    services.session.bring_to(1)
    first, again, replayed = learner.learned
    assert first == again == replayed
    assert learner.num_references == 1
    assert all(sample.reference_logprobs == tuple(-float(bit) for bit in sample.loss_mask) for sample in first)


def test_problems_that_come_twice_get_other_seeds(opened: tuple[pipeline.Services, ThreadRunner]) -> None:
    run = opened[0].run
    many = run.config.plan.model_copy(update={"problems_per_iteration": 1500})
    run.config = run.config.model_copy(update={"plan": many})
    rows = list(plan_rows(run, Scope(0)))
    assert len({row.problem_id for row in rows}) < 1500
    assert len({row.seed for row in rows}) == len(rows)


def test_more_held_out_problems_than_there_are_is_an_error(opened: tuple[pipeline.Services, ThreadRunner]) -> None:
    run = opened[0].run
    run.config = run.config.model_copy(update={"eval": run.config.eval.model_copy(update={"num_problems": 5000})})
    with pytest.raises(ConfigError, match=r"eval.num_problems is 5000"):
        list(plan_rows(run, Scope(0, Purpose.EVAL)))


def test_changed_verifiers_stop_the_next_iteration(tmp_path: Path) -> None:
    config = scripted(tmp_path, iterations=2, eval={"every": 5, "num_problems": 2})
    with scratch_folder() as scratch, ThreadRunner(config.prefect) as runner:
        with pipeline.open_services(config, scratch) as services:
            pipeline.begin(services, runner)
            pipeline.iterate(services, runner, 0)
            services.run.__dict__["verdict_set"] = "upgraded"
            with pytest.raises(RunConflict, match="judged by verifiers"):
                pipeline.iterate(services, runner, 1)


def test_a_started_run_needs_its_model_folder_no_more(tmp_path: Path) -> None:
    from posttrain_core.learner.tiny import make_tiny_llama

    model = tmp_path / "model"
    make_tiny_llama(model, 0, hidden_size=16, num_layers=1, num_heads=2, context_length=64)
    (model / "optimizer.pt").write_bytes(b"not part of a policy")
    (model / ".hidden.json").write_bytes(b"{}")
    engines = {"sampler": {"type": "inprocess"}, "learner": {"type": "deepspeed"}, "model": {"path": str(model)}}
    config: RunConfig = scripted(tmp_path / "store", iterations=0, **engines)
    for _ in range(2):
        with scratch_folder() as scratch, ThreadRunner(config.prefect) as runner:
            with pipeline.open_services(config, scratch) as services:
                policy = pipeline.begin(services, runner)
        shutil.rmtree(model, ignore_errors=True)
    names = {Path(ref.key).name for ref in policy.objects}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"optimizer.pt", ".hidden.json"}
