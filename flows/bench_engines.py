"""`posttrain bench --engines`: the vLLM sampler against the in-process one, and what keeping engines warm is worth.

Both samplers hold the same policy and answer the same requests, one after the other in one run of the command. Rates
and swaps are medians of several repetitions, of rates one more that does not count; the start is measured once.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from flows.bench import tree_resident_bytes
from posttrain_core.config import RunConfig
from posttrain_core.domains.registry import make_domain
from posttrain_core.learner.starting import starting_policy
from posttrain_core.records import Split
from posttrain_core.sampling.factory import make_sampler
from posttrain_core.sampling.protocol import Probe, Sampler, SampleRequest

CONCURRENCY = (1, 16, 64)
REPETITIONS = 3


@dataclass(frozen=True)
class SamplerSpeed:
    """One sampler. Tokens are generated ones; `resident_mib` is the growth of all processes together."""

    sampler: str
    start_seconds: float  # from nothing to a loaded policy
    swap_seconds: float  # to another policy version, proof included
    tokens_per_second: dict[int, float]  # by concurrent requests
    resident_mib: float


@dataclass(frozen=True)
class Engines:
    samplers: list[SamplerSpeed]
    ratios: dict[int, float]  # vLLM to in-process tokens per second, by concurrent requests

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def compare(config: RunConfig, scratch: Path, max_new_tokens: int, note: Callable[[str], None]) -> Engines:
    """Measures the two samplers on the configuration's model and the prompts of its first domain."""
    policies = two_versions(starting_policy(config, scratch / "made"), scratch / "other")
    probes: tuple[tuple[Probe, ...], tuple[Probe, ...]] = ((), ())
    speeds = []
    for engine in ("inprocess", "vllm"):
        given = config.sampler.model_dump() if config.sampler.type == engine else {"type": engine}
        settings = RunConfig.model_validate(config.model_dump() | {"sampler": given})
        note(f"{engine}: starting")
        before = tree_resident_bytes(os.getpid())
        with _closing(make_sampler(settings, scratch / engine)) as sampler:
            start = _seconds(partial(sampler.load_policy, 0, policies[0], probes[0]))
            requests = _requests(settings, sampler, max_new_tokens)
            note(f"{engine}: {max(CONCURRENCY)} requests at most, {max_new_tokens} tokens each")
            rates = {number: _tokens_per_second(sampler, requests[:number]) for number in CONCURRENCY}
            resident = tree_resident_bytes(os.getpid()) - before
            if engine == "inprocess":
                probes = (_probes(sampler, requests), ())
                sampler.load_policy(1, policies[1])
                probes = (probes[0], _probes(sampler, requests))
                sampler.load_policy(0, policies[0])
            note(f"{engine}: swapping")
            swaps = [_swap(sampler, number, policies, probes) for number in range(1, 2 * REPETITIONS + 1)]
        speeds.append(SamplerSpeed(engine, start, median(swaps), rates, resident / 2**20))
    slow, fast = (speed.tokens_per_second for speed in speeds)
    return Engines(speeds, {number: fast[number] / slow[number] for number in CONCURRENCY})


def two_versions(folder: Path, other: Path) -> tuple[Path, Path]:
    """The policy and a copy whose weights are all a little larger."""
    from safetensors.torch import load_file, save_file

    other.mkdir(parents=True)
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, other / path.name)
        elif path.is_file():
            shutil.copyfile(path, other / path.name)
    return folder, other


def _requests(config: RunConfig, sampler: Sampler, max_new_tokens: int) -> list[SampleRequest]:
    name, settings = next(iter(config.domains.items()))
    domain = make_domain(name, settings)
    numbers = [index % domain.num_problems(Split.TRAIN) for index in range(max(CONCURRENCY))]
    prompts = [sampler.encode(domain.problem(Split.TRAIN, number).prompt) for number in numbers]
    room = min(max_new_tokens, sampler.context_length - max(map(len, prompts)))
    return [SampleRequest(prompt, seed, room, 1.0) for seed, prompt in enumerate(prompts)]


def _tokens_per_second(sampler: Sampler, requests: Sequence[SampleRequest]) -> float:
    rates = []
    for repetition in range(REPETITIONS + 1):
        asked = [replace(request, seed=1000 * repetition + request.seed) for request in requests]
        started = time.perf_counter()
        tokens = sum(len(completion.response_ids) for completion in sampler.sample(asked))
        rates.append(tokens / (time.perf_counter() - started))
    return median(rates[1:])


def _swap(
    sampler: Sampler, number: int, policies: tuple[Path, Path], probes: tuple[tuple[Probe, ...], tuple[Probe, ...]]
) -> float:
    return _seconds(partial(sampler.load_policy, number, policies[number % 2], probes[number % 2]))


def _probes(sampler: Sampler, requests: Sequence[SampleRequest]) -> tuple[Probe, ...]:
    """Two completions with their log-probabilities, as the publish stage puts down for a version."""
    chosen = [replace(request, max_new_tokens=16) for request in requests[:2]]
    return tuple(
        Probe(request.prompt_ids, completion.response_ids, completion.logprobs)
        for request, completion in zip(chosen, sampler.sample(chosen), strict=True)
    )


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _closing(sampler: Sampler) -> Iterator[Sampler]:
    try:
        yield sampler
    finally:
        sampler.close()
