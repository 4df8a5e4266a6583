"""The in-process sampler against plain forward passes of the same model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from posttrain_core.config import InProcessSamplerConfig, RepetitionConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.records import FinishReason, Message
from posttrain_core.sampling import Completion, SampleRequest
from posttrain_core.sampling.inprocess import InProcessSampler

END_IDS = (2, 3)


def loaded(folder: Path, max_batch_size: int = 128) -> InProcessSampler:
    sampler = InProcessSampler(InProcessSamplerConfig(device="cpu", num_threads=1, max_batch_size=max_batch_size))
    sampler.load_policy(0, folder)
    return sampler


def other_architecture(folder: Path, name: str, **options: int) -> Path:
    """Makes the policy in `folder` one of another architecture, with the same tokenizer."""
    sizes = {"vocab_size": 47, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}
    set_seed(0)
    config = AutoConfig.for_model(name, **sizes, eos_token_id=2, **options)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def mixed_requests(sampler: InProcessSampler) -> list[SampleRequest]:
    """Prompts of several lengths, each asked for several times, with several limits and temperatures."""
    prompts = [sampler.encode([Message("user", text)]) for text in ("1+1", "a long question", "f")]
    return [
        SampleRequest(
            prompts[index % 3], index, max_new_tokens=3 + index % 9, temperature=(0.0, 0.7, 1.0, 1.6)[index % 4]
        )
        for index in range(24)
    ]


def reference_logprobs(folder: Path, request: SampleRequest, completion: Completion) -> list[float]:
    """Log-probabilities of the response by one forward pass without a cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*request.prompt_ids, *completion.response_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / (request.temperature or 1.0), dim=-1)
    return logprobs.gather(1, torch.tensor(completion.response_ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("max_batch_size", [1, 5, 128])
def test_logprobs_equal_those_of_a_full_forward_pass(tiny_llama: Callable[..., Path], max_batch_size: int) -> None:
    folder = tiny_llama(0)
    sampler = loaded(folder, max_batch_size=max_batch_size)
    requests = mixed_requests(sampler)
    completions = sampler.sample(requests)
    assert {len(completion.response_ids) for completion in completions} >= {3, 11}
    for request, completion in zip(requests, completions, strict=True):
        assert completion.logprobs == pytest.approx(reference_logprobs(folder, request, completion), abs=2e-5)


def test_long_responses_outgrow_the_first_allocation(tiny_llama: Callable[..., Path]) -> None:
    folder = tiny_llama(0)
    sampler = loaded(folder)
    prompt_ids = sampler.encode([Message("user", "1+1")])
    requests = [SampleRequest(prompt_ids, seed, max_new_tokens=150, temperature=0.2) for seed in range(64)]
    completions = sampler.sample(requests)
    lengths = [len(completion.response_ids) for completion in completions]
    assert max(lengths) == 150 > min(lengths)
    longest = lengths.index(max(lengths))
    expected = reference_logprobs(folder, requests[longest], completions[longest])
    assert completions[longest].logprobs == pytest.approx(expected, abs=5e-5)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"num_attention_heads": 4}),
        ("gemma2", {**HEADS, "head_dim": 8, "sliding_window": 6}),
        ("mixtral", {**HEADS, "num_local_experts": 4}),  # stored under other names than it computes with
    ],
)
def test_other_architectures_are_sampled_and_swapped_the_same_way(
    tiny_llama: Callable[..., Path], tmp_path: Path, name: str, options: dict[str, int]
) -> None:
    folder = other_architecture(tiny_llama(0), name, **options)
    sampler = loaded(folder)
    requests = mixed_requests(sampler)
    completions = sampler.sample(requests)
    for request, completion in zip(requests, completions, strict=True):
        assert completion.logprobs == pytest.approx(reference_logprobs(folder, request, completion), abs=2e-5)
    sampler.load_policy(1, shutil.copytree(folder, tmp_path / "copy"))
    assert sampler.sample(requests) == completions


def test_recurrent_architecture_is_refused(tiny_llama: Callable[..., Path]) -> None:
    folder = other_architecture(tiny_llama(0), "mamba", state_size=4)
    with pytest.raises(SamplerUnavailable, match="recurrent state"):
        loaded(folder)


def test_batch_size_does_not_change_tokens(tiny_llama: Callable[..., Path]) -> None:
    folder = tiny_llama(0)
    small, large = loaded(folder, max_batch_size=1), loaded(folder, max_batch_size=128)
    requests = mixed_requests(small)
    assert [c.response_ids for c in small.sample(requests)] == [c.response_ids for c in large.sample(requests)]


def test_every_end_token_stops_and_is_part_of_the_response(tiny_llama: Callable[..., Path]) -> None:
    sampler = loaded(tiny_llama(1))
    prompt_ids = sampler.encode([Message("user", "1+1")])
    completions = sampler.sample([SampleRequest(prompt_ids, seed, 40, 2.0) for seed in range(64)])
    last = {c.response_ids[-1] for c in completions if c.finish_reason is FinishReason.STOP}
    assert last == set(END_IDS)
    for completion in completions:
        assert not set(END_IDS) & set(completion.response_ids[:-1])
        assert (completion.finish_reason is FinishReason.STOP) == (completion.response_ids[-1] in END_IDS)


def test_rows_that_a_rule_ends_leave_the_others_as_they_are(tiny_llama: Callable[..., Path]) -> None:
    sampler = loaded(tiny_llama(0))
    prompt_ids = sampler.encode([Message("user", "1+1")])
    requests = [SampleRequest(prompt_ids, seed, 60, 0.05) for seed in range(16)]
    rule = RepetitionConfig(num_tokens=12, max_period=6)
    ruled = [replace(request, repetition=rule if index % 2 else None) for index, request in enumerate(requests)]
    found, whole = sampler.sample(ruled), sampler.sample(requests)
    assert FinishReason.REPETITION in {completion.finish_reason for completion in found[1::2]}
    for short, long in zip(found, whole, strict=True):
        assert short.response_ids == long.response_ids[: len(short.response_ids)]
        assert short.logprobs == pytest.approx(long.logprobs[: len(short.logprobs)], abs=2e-5)
        assert short.finish_reason in (long.finish_reason, FinishReason.REPETITION)
    assert found[0::2] == [
        replace(each, logprobs=short.logprobs) for each, short in zip(whole[::2], found[::2], strict=True)
    ]


def test_samples_follow_the_distribution(tiny_llama: Callable[..., Path]) -> None:
    sampler = loaded(tiny_llama(0))
    prompt_ids = sampler.encode([Message("user", "f")])
    completions = sampler.sample([SampleRequest(prompt_ids, seed, 1, 1.5) for seed in range(4000)])
    probability = {c.response_ids[0]: torch.tensor(c.logprobs[0]).exp().item() for c in completions}
    token, expected = max(probability.items(), key=lambda item: item[1])
    seen = sum(c.response_ids[0] == token for c in completions) / len(completions)
    assert abs(seen - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5


@pytest.mark.parametrize("tied", [True, False])
def test_swapped_weights_equal_a_freshly_loaded_model(tiny_llama: Callable[..., Path], tied: bool) -> None:
    first, second = tiny_llama(0, tied=tied), tiny_llama(1, tied=tied)
    swapped, fresh = loaded(first), loaded(second)
    requests = mixed_requests(swapped)
    before = swapped.sample(requests)
    swapped.load_policy(1, second)
    assert swapped.sample(requests) == fresh.sample(requests)
    swapped.load_policy(0, first)
    assert swapped.sample(requests) == before != fresh.sample(requests)


def test_tied_weights_may_be_stored_under_either_name_or_both(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    first, second = tiny_llama(0), tiny_llama(1)
    sampler, fresh = loaded(first), loaded(second)
    requests = mixed_requests(sampler)
    weights = load_file(second / "model.safetensors")
    embedding = weights.pop("model.embed_tokens.weight")
    save_file(weights | {"lm_head.weight": embedding}, tmp_path / "model.safetensors")
    sampler.load_policy(1, tmp_path)
    assert sampler.sample(requests) == fresh.sample(requests)


def test_policy_of_another_shape_is_named_and_the_held_one_stays(tiny_llama: Callable[..., Path]) -> None:
    sampler = loaded(tiny_llama(0))
    requests = mixed_requests(sampler)
    before = sampler.sample(requests)
    with pytest.raises(SamplerUnavailable, match=r"model\.embed_tokens\.weight: shape \(47, 48\)"):
        sampler.load_policy(1, tiny_llama(0, hidden_size=48))
    assert sampler.sample(requests) == before


def test_policy_that_lacks_a_tensor_is_named(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_llama(0)
    sampler = loaded(folder)
    weights = load_file(folder / "model.safetensors")
    weights["other.weight"] = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(SamplerUnavailable, match=r"other\.weight: not in the model; model\.norm\.weight: missing"):
        sampler.load_policy(1, tmp_path)


def test_first_policy_that_lacks_a_tensor_is_refused_too(tiny_llama: Callable[..., Path]) -> None:
    folder = tiny_llama(0)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SamplerUnavailable, match=r"model\.norm\.weight"):
        loaded(folder)


def test_truncated_weights_are_refused(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_llama(0)
    sampler = loaded(folder)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(SamplerUnavailable, match="version 1 cannot be loaded"):
        sampler.load_policy(1, tmp_path)


def test_encode_uses_the_chat_template_with_generation_prompt(tiny_llama: Callable[..., Path]) -> None:
    folder = tiny_llama(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = loaded(folder).encode([Message("user", "1+1")])
    assert tokenizer.decode(list(ids)) == "<bos>user:1+1\nassistant:"


def test_encode_without_a_template_writes_plain_lines(tiny_llama: Callable[..., Path]) -> None:
    sampler = loaded(tiny_llama(0, chat_template=None))
    assert sampler.decode(sampler.encode([Message("user", "1+1")])) == "user: 1+1\nassistant:"


def test_decode_drops_special_tokens(tiny_llama: Callable[..., Path]) -> None:
    sampler = loaded(tiny_llama(0))
    assert sampler.decode((1, *sampler.encode([Message("user", "x")]), *END_IDS, 0)) == "user:x\nassistant:"


def test_tool_calls_reach_the_template(tiny_llama: Callable[..., Path]) -> None:
    template = "{% for m in messages %}{{ m['tool_calls'][0]['name'] }}{% endfor %}"
    sampler = loaded(tiny_llama(0, chat_template=template))
    message = Message("assistant", "", tool_calls=json.dumps([{"name": "lookup"}]))
    assert sampler.decode(sampler.encode([message])) == "lookup"
