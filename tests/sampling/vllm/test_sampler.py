"""VllmSampler on a real vLLM server with a tiny policy, against forward passes of transformers."""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain_core.config import InProcessSamplerConfig, RepetitionConfig, VllmSamplerConfig
from posttrain_core.records import FinishReason, Message
from posttrain_core.sampling import Completion, SampleRequest
from posttrain_core.sampling.inprocess import InProcessSampler
from posttrain_core.sampling.vllm.sampler import VllmSampler
from posttrain_core.sampling.vllm.server import OwnServer, servers
from tests.sampling.test_inprocess_sampler import reference_logprobs
from tests.sampling.vllm.conftest import probe
from tests.sampling.vllm.test_server import member

pytestmark = pytest.mark.xdist_group("vllm")
END_IDS = (2, 3)
Running = tuple[VllmSampler, OwnServer]


@pytest.fixture(scope="module")
def running(vllm_python: Path, policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A sampler and its one server, with version 0 of `policies`."""
    scratch = tmp_path_factory.mktemp("sampler")
    config = VllmSamplerConfig(stall_seconds=120)
    (own,) = servers(config, "float32", scratch)
    assert isinstance(own, OwnServer)
    sampler = VllmSampler(config, "float32", scratch, [own])
    try:
        sampler.load_policy(0, policies[0], [probe(policies[0])])
        yield sampler, own
    finally:
        sampler.close()


@pytest.fixture
def sampler(running: Running, policies: list[Path]) -> VllmSampler:
    running[0].load_policy(0, policies[0], [probe(policies[0])])
    return running[0]


def asked(sampler: VllmSampler, temperature: float, count: int = 16, **options: object) -> list[SampleRequest]:
    """Four prompts, each asked for several times, with seeds of up to 63 bits."""
    prompts = [sampler.encode([Message("user", text)]) for text in ("1+1", "a long question", "f", "x*2")]
    return [
        SampleRequest(prompts[index % 4], (2**63 - 1) // (index + 1), 8 + index, temperature, **options)  # type: ignore[arg-type]
        for index in range(count)
    ]


def assert_reference(folder: Path, requests: Sequence[SampleRequest], completions: Sequence[Completion]) -> None:
    for request, completion in zip(requests, completions, strict=True):
        assert completion.logprobs == pytest.approx(reference_logprobs(folder, request, completion), abs=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    sampler: VllmSampler, policies: list[Path], temperature: float
) -> None:
    requests = asked(sampler, temperature)
    completions = sampler.sample(requests)
    assert_reference(policies[0], requests, completions)
    assert max(len(completion.response_ids) for completion in completions) > 8  # events of several tokens


def test_greedy_equals_transformers(sampler: VllmSampler, policies: list[Path]) -> None:
    inprocess = InProcessSampler(InProcessSamplerConfig(device="cpu", num_threads=1))
    inprocess.load_policy(0, policies[0])
    requests = asked(sampler, 0.0)
    found, expected = sampler.sample(requests), inprocess.sample(requests)
    assert [each.response_ids for each in found] == [each.response_ids for each in expected]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in expected]


def test_seed_decides_the_tokens_alone_and_among_others(sampler: VllmSampler) -> None:
    requests = asked(sampler, 1.0)
    together = [each.response_ids for each in sampler.sample(requests)]
    assert [sampler.sample([request])[0].response_ids for request in requests[:4]] == together[:4]
    assert [each.response_ids for each in sampler.sample(requests[::-1])] == together[::-1]
    assert len(set(together)) > 4


def test_every_end_token_stops_and_is_part_of_the_response(sampler: VllmSampler, policies: list[Path]) -> None:
    prompt_ids = sampler.encode([Message("user", "1+1")])
    requests = [SampleRequest(prompt_ids, seed, 60, 2.0) for seed in range(48)]
    completions = sampler.sample(requests)
    stopped = [each for each in completions if each.finish_reason is FinishReason.STOP]
    assert {each.response_ids[-1] for each in stopped} == set(END_IDS)
    for completion in completions:
        assert not set(END_IDS) & set(completion.response_ids[:-1])
        assert (completion.finish_reason is FinishReason.STOP) == (completion.response_ids[-1] in END_IDS)
    assert_reference(policies[0], requests, completions)


def test_stop_strings_cut_what_would_have_gone_on(sampler: VllmSampler) -> None:
    requests = asked(sampler, 1.0)
    whole = sampler.sample(requests)
    text = sampler.decode(whole[-1].response_ids)
    stop = text[3:5]
    cut = sampler.sample(asked(sampler, 1.0, stop=(stop,)))
    assert cut[-1].finish_reason is FinishReason.STOP_RULE
    for short, long in zip(cut, whole, strict=True):
        kept = len(short.response_ids)
        assert short.response_ids == long.response_ids[:kept]
        assert short.logprobs == pytest.approx(long.logprobs[:kept], abs=1e-3)
        assert (stop in sampler.decode(long.response_ids)) == (short.finish_reason is FinishReason.STOP_RULE)
        assert stop not in sampler.decode(short.response_ids[:-1])


def test_repetition_is_cut(sampler: VllmSampler) -> None:
    prompt_ids = sampler.encode([Message("user", "1+1")])
    rule = RepetitionConfig(num_tokens=4, max_period=2)
    requests = [SampleRequest(prompt_ids, seed, 100, 0.3) for seed in range(32)]
    whole = sampler.sample(requests)
    found = sampler.sample([replace(request, repetition=rule) for request in requests])
    assert FinishReason.REPETITION in {each.finish_reason for each in found}
    for short, long in zip(found, whole, strict=True):
        assert short.response_ids == long.response_ids[: len(short.response_ids)]
        assert len(short.logprobs) == len(short.response_ids)
        assert short.finish_reason in (long.finish_reason, FinishReason.REPETITION)


def test_new_version_is_sampled_from(sampler: VllmSampler, policies: list[Path]) -> None:
    sampler.load_policy(1, policies[1], [probe(policies[1])])
    requests = asked(sampler, 1.0)
    assert_reference(policies[1], requests, sampler.sample(requests))


def test_killed_engine_is_replaced_and_every_request_answered_once(
    sampler: VllmSampler, running: Running, policies: list[Path]
) -> None:
    requests = [SampleRequest(each.prompt_ids, seed, 60, 1.0) for seed, each in enumerate(asked(sampler, 1.0, 32))]
    expected = [each.response_ids for each in sampler.sample(requests)]
    pid = running[1].pid
    assert pid is not None
    told = Counter[int]()

    def on_done(index: int, completion: Completion) -> None:
        if not told:
            os.kill(member(pid, "EngineCore"), signal.SIGKILL)
        told[index] += 1

    completions = sampler.sample(requests, on_done)
    assert running[1].pid not in (None, pid)
    assert [each.response_ids for each in completions] == expected
    assert told == Counter(range(32))
    assert_reference(policies[0], requests, completions)
