"""Rollouts that had finished when a process ended are not made again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows import pipeline
from flows.scratch import scratch_folder
from posttrain_core.config import RunConfig, ScriptedSamplerConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.layout import Scope
from posttrain_core.manifest import read_table
from posttrain_core.records import FinishReason, Outcome, Rollout
from posttrain_core.sampling.protocol import Completion, OnDone, SampleRequest
from posttrain_core.sampling.scripted import ScriptedSampler
from posttrain_core.stages.context import Run
from posttrain_core.stages.generate import generate_shard
from posttrain_core.stages.plan import plan
from tasks.runner import ThreadRunner
from tests.crash.test_kills import scripted


class EndingSampler(ScriptedSampler):
    """Tells of each completion as it ends, and breaks after so many."""

    def __init__(self, config: ScriptedSamplerConfig, breaks_after: int, mark: str) -> None:
        super().__init__(config)
        self.breaks_after, self.mark = breaks_after, mark
        self.asked = 0

    def sample(self, requests: Sequence[SampleRequest], on_done: OnDone | None = None) -> list[Completion]:
        assert on_done is not None
        self.asked = len(requests)
        ids = tuple(self.mark.encode())
        done = [Completion(ids, (0.0,) * len(ids), FinishReason.STOP)] * len(requests)
        for index in reversed(range(len(requests))):  # they end in any order
            if len(requests) - index > self.breaks_after:
                raise SamplerUnavailable("the server died")
            on_done(index, done[index])
        return done


@contextmanager
def planned(config: RunConfig) -> Iterator[Run]:
    """A run whose first iteration is planned."""
    with (
        scratch_folder() as scratch,
        pipeline.open_services(config, scratch) as services,
        ThreadRunner(config.prefect) as runner,
    ):
        pipeline.begin(services, runner)
        plan(services.run, Scope(0))
        yield services.run


@pytest.mark.parametrize("loses_a_part", [False, True])
def test_finished_rollouts_survive_a_broken_sampler(tmp_path: Path, loses_a_part: bool) -> None:
    settings: dict[str, Any] = {"problems_per_iteration": 4, "group_size": 4, "rollouts_per_shard": 16}
    config = scripted(tmp_path, plan=settings, iterations=1)
    assert config.sampler.type == "scripted"
    with planned(config) as run:
        scope = Scope(0)
        first, second = (EndingSampler(config.sampler, *how) for how in ((5, "first"), (100, "second")))
        with pytest.raises(SamplerUnavailable):
            generate_shard(run, scope, 0, first)
        parts = list(tmp_path.glob("runs/r/journal/**/*.parquet"))
        assert parts
        if loses_a_part:
            parts[0].unlink()
        rollouts = read_table(run.store, generate_shard(run, scope, 0, second), Rollout)
    assert second.asked == (16 if loses_a_part else 11)
    texts = [rollout.text for rollout in rollouts]
    assert texts.count("first") == (0 if loses_a_part else 5)
    assert texts[-1] == ("second" if loses_a_part else "first")
    assert len({rollout.rollout_id for rollout in rollouts}) == len(rollouts) == 16
    assert not list(tmp_path.glob("runs/r/journal/**/*.parquet"))


def test_a_rollout_that_repeats_itself_is_truncated(tmp_path: Path) -> None:
    class RepeatingSampler(ScriptedSampler):
        def sample(self, requests: Sequence[SampleRequest], on_done: OnDone | None = None) -> list[Completion]:
            assert {request.repetition for request in requests} == {config.plan.repetition}
            assert {request.stop for request in requests} == {("###",)}
            assert {request.max_new_tokens for request in requests} == {7}
            ids = tuple(b"ha" * 3)
            return [Completion(ids, (0.0,) * len(ids), FinishReason.REPETITION)] * len(requests)

    domains = {"program": {"type": "program", "stop": ["###"], "max_new_tokens": 7}}
    config = scripted(tmp_path, domains=domains, iterations=1)
    assert config.sampler.type == "scripted"
    with planned(config) as run:
        table = generate_shard(run, Scope(0), 0, RepeatingSampler(config.sampler))
        rollouts = read_table(run.store, table, Rollout)
    assert {rollout.outcome for rollout in rollouts} == {Outcome.TRUNCATED}
    assert all("repeated itself" in rollout.reason for rollout in rollouts)
