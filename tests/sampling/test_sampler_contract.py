"""What every sampler promises, checked on all implementations; that for vLLM with a fake server."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from posttrain_core.config import (
    InProcessSamplerConfig,
    ProgramDomainConfig,
    RepetitionConfig,
    RunConfig,
    ScriptedSamplerConfig,
    VllmSamplerConfig,
)
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.records import FinishReason, Message
from posttrain_core.sampling import Sampler, SampleRequest
from posttrain_core.sampling.factory import make_sampler
from posttrain_core.sampling.vllm.sampler import VllmSampler
from tests.sampling.vllm.fake_server import FakeServer

PROMPT = (Message("system", "be brief"), Message("user", "f(2)=4"))


def scripted_policy(folder: Path, logits: list[float]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"logits": np.array(logits, dtype=np.float64)}, folder / "model.safetensors")
    return folder


@pytest.fixture(params=["inprocess", "scripted", "vllm"])
def sampler(request: pytest.FixtureRequest, tmp_path: Path, tiny_llama: Callable[..., Path]) -> Iterator[Sampler]:
    if request.param == "vllm":
        vllm = VllmSampler(VllmSamplerConfig(), "float32", tmp_path, [FakeServer()])
        vllm.load_policy(0, tiny_llama(0))
        yield vllm
        vllm.close()
        return
    engine: ScriptedSamplerConfig | InProcessSamplerConfig
    if request.param == "scripted":
        engine = ScriptedSamplerConfig()
        folder = scripted_policy(tmp_path / "policy", [0.5, 0.0, 0.2, -0.3, -0.1])
        learner = {"type": "numpy"}
    else:
        engine = InProcessSamplerConfig(device="cpu", num_threads=1)
        folder = tiny_llama(0)
        learner = {"type": "deepspeed"}
    config = RunConfig.model_validate(
        {"sampler": engine, "learner": learner, "domains": {"program": ProgramDomainConfig()}, "model": {"path": "m"}}
    )
    made = make_sampler(config, tmp_path)
    made.load_policy(0, folder)
    yield made
    made.close()


def requests_for(sampler: Sampler, count: int = 12, temperature: float = 1.0) -> list[SampleRequest]:
    prompt_ids = sampler.encode(PROMPT)
    return [SampleRequest(prompt_ids, 900 + index, 8, temperature) for index in range(count)]


def test_same_call_gives_same_completions_bit_for_bit(sampler: Sampler) -> None:
    requests = requests_for(sampler)
    assert sampler.sample(requests) == sampler.sample(requests)


def test_calls_from_several_threads_do_not_mix(sampler: Sampler) -> None:
    batches = [requests_for(sampler)[start : start + 3] for start in range(0, 12, 3)]
    expected = [sampler.sample(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(sampler.sample, batches)) == expected


def test_seeds_make_completions_differ(sampler: Sampler) -> None:
    assert len({completion.response_ids for completion in sampler.sample(requests_for(sampler))}) > 1


def test_neighbours_do_not_change_tokens(sampler: Sampler) -> None:
    requests = requests_for(sampler)
    together = [completion.response_ids for completion in sampler.sample(requests)]
    alone = [sampler.sample([request])[0].response_ids for request in requests]
    backwards = [completion.response_ids for completion in sampler.sample(requests[::-1])]
    assert alone == together == backwards[::-1]


def test_each_token_has_a_logprob_and_limits_hold(sampler: Sampler) -> None:
    for completion in sampler.sample(requests_for(sampler)):
        assert 1 <= len(completion.response_ids) <= 8
        assert len(completion.logprobs) == len(completion.response_ids)
        assert all(logprob <= 0.0 for logprob in completion.logprobs)


def test_greedy_ignores_the_seed(sampler: Sampler) -> None:
    completions = sampler.sample(requests_for(sampler, temperature=0.0))
    assert len(set(completions)) == 1


def test_longer_limit_continues_the_same_response(sampler: Sampler) -> None:
    requests = requests_for(sampler)
    short = sampler.sample([replace(request, max_new_tokens=2) for request in requests])
    for cut, whole in zip(short, sampler.sample(requests), strict=True):
        assert cut.response_ids == whole.response_ids[:2]
        assert cut.logprobs == pytest.approx(whole.logprobs[:2], abs=1e-5)
        if len(whole.response_ids) > 2:
            assert cut.finish_reason is FinishReason.LENGTH


def test_prompt_that_fills_the_context_is_refused(sampler: Sampler) -> None:
    prompt_ids = (5,) * sampler.context_length
    good = requests_for(sampler, count=1)[0]
    refused, answered = sampler.sample([replace(good, prompt_ids=prompt_ids), good])
    assert refused.finish_reason is FinishReason.REFUSED
    assert refused.response_ids == refused.logprobs == ()
    assert answered == sampler.sample([good])[0]


def test_response_ends_where_the_context_does(sampler: Sampler) -> None:
    room = 2
    request = SampleRequest((5,) * (sampler.context_length - room), seed=1, max_new_tokens=50, temperature=0.0)
    completion = sampler.sample([request])[0]
    assert 1 <= len(completion.response_ids) <= room
    if completion.finish_reason is not FinishReason.STOP:
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.response_ids) == room


def test_stop_strings_end_a_completion_with_the_token_that_completes_one(sampler: Sampler) -> None:
    whole = sampler.sample(requests_for(sampler))
    stop = next(text for each in whole if (text := sampler.decode(each.response_ids)[:2]))
    cut = sampler.sample([replace(request, stop=("no such text", stop)) for request in requests_for(sampler)])
    for short, long in zip(cut, whole, strict=True):
        assert short.response_ids == long.response_ids[: len(short.response_ids)]
        assert len(short.logprobs) == len(short.response_ids)
        found = stop in sampler.decode(long.response_ids)
        assert short.finish_reason is (FinishReason.STOP_RULE if found else long.finish_reason)
        assert stop in sampler.decode(short.response_ids) or short.response_ids == long.response_ids
        assert stop not in sampler.decode(short.response_ids[:-1])
    assert FinishReason.STOP_RULE in {each.finish_reason for each in cut}


def test_rules_that_never_hold_change_nothing(sampler: Sampler) -> None:
    rule = RepetitionConfig(num_tokens=8, max_period=1)
    ruled = [replace(request, stop=("no such text",), repetition=rule) for request in requests_for(sampler)]
    assert sampler.sample(ruled) == sampler.sample(requests_for(sampler))


def test_decode_of_a_prompt_shows_its_text(sampler: Sampler) -> None:
    assert "be brief" in sampler.decode(sampler.encode(PROMPT))


def test_missing_policy_folder_is_named_and_the_held_policy_stays(sampler: Sampler, tmp_path: Path) -> None:
    requests = requests_for(sampler)
    before = sampler.sample(requests)
    with pytest.raises(SamplerUnavailable, match=r"version 7.*nowhere"):
        sampler.load_policy(7, tmp_path / "nowhere")
    assert sampler.sample(requests) == before


def test_nothing_works_before_a_policy_is_loaded(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"sampler": {"type": "scripted"}, "learner": {"type": "numpy"}, "domains": {"program": {"type": "program"}}}
    )
    with pytest.raises(SamplerUnavailable, match="load_policy"):
        make_sampler(config, tmp_path).sample([SampleRequest((1,), seed=0, max_new_tokens=1, temperature=1.0)])


def test_scripted_answers_follow_their_probabilities(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "sampler": {"type": "scripted", "responses": ["yes", "no"]},
            "learner": {"type": "numpy"},
            "domains": {"program": {"type": "program"}},
        }
    )
    sampler = make_sampler(config, tmp_path)
    sampler.load_policy(0, scripted_policy(tmp_path, [np.log(0.75), np.log(0.25)]))
    requests = [SampleRequest((1,), seed=seed, max_new_tokens=9, temperature=1.0) for seed in range(2000)]
    completions = sampler.sample(requests)
    yes = [completion for completion in completions if completion.response_ids == (256, *b"yes")]
    assert abs(len(yes) / 2000 - 0.75) < 0.04  # 4 standard errors
    assert yes[0].logprobs == pytest.approx((np.log(0.75), 0.0, 0.0, 0.0))
    assert yes[0].finish_reason is FinishReason.STOP
    assert sampler.decode(yes[0].response_ids) == "yes"


def test_scripted_answer_that_repeats_itself_is_cut(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "sampler": {"type": "scripted", "responses": ["ababababab"]},
            "learner": {"type": "numpy"},
            "domains": {"program": {"type": "program"}},
        }
    )
    sampler = make_sampler(config, tmp_path)
    sampler.load_policy(0, scripted_policy(tmp_path, [0.0]))
    rule = RepetitionConfig(num_tokens=6, max_period=2)
    (cut,) = sampler.sample([SampleRequest((1,), 0, 20, 1.0, repetition=rule)])
    assert (sampler.decode(cut.response_ids), cut.finish_reason) == ("ababab", FinishReason.REPETITION)


def test_scripted_policy_of_another_length_is_refused(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"sampler": {"type": "scripted"}, "learner": {"type": "numpy"}, "domains": {"program": {"type": "program"}}}
    )
    with pytest.raises(SamplerUnavailable, match=r"\(3,\).*5 answers"):
        make_sampler(config, tmp_path).load_policy(0, scripted_policy(tmp_path, [0.0, 0.0, 0.0]))
