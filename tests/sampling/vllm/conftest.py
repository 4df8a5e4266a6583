"""Real vLLM servers with tiny policies, of which one is shared by all tests that leave it running; and fake ones."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain_core.config import VllmLaunchConfig, VllmSamplerConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.sampling.protocol import Completion, Probe, SampleRequest
from posttrain_core.sampling.vllm.process import interpreter, vllm_version
from posttrain_core.sampling.vllm.sampler import VllmSampler
from posttrain_core.sampling.vllm.server import OwnServer, servers
from tests.sampling.vllm.fake_server import FakeServer

HIDDEN_SIZE = 128  # 4 heads of 32: vLLM's attention on CPU has no smaller ones
Make = Callable[..., VllmSampler]


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of vLLM's environment. Where there is none, tests are skipped, but fail in CI."""
    try:
        python = interpreter(VllmLaunchConfig())
        vllm_version(python)
    except SamplerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    return python


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """The one loop that servers are used from: `loop.run(server.bring_to(...))`."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def policies(tiny_llama: Callable[..., Path]) -> list[Path]:
    """Three policies of one architecture, tied embeddings, with different weights."""
    return [tiny_llama(seed, hidden_size=HIDDEN_SIZE) for seed in range(3)]


@pytest.fixture(scope="session")
def server(loop: asyncio.Runner, policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """A running server for policies like those of `policies`; what it holds changes from test to test."""
    (own,) = servers(VllmSamplerConfig(), "float32", tmp_path_factory.mktemp("vllm"))
    assert isinstance(own, OwnServer)
    try:
        loop.run(own.bring_to(0, policies[0], [probe(policies[0])]))
        yield own
    finally:
        loop.run(own.close())


def token_logprobs(folder: Path, token_ids: Sequence[int]) -> list[float]:
    """By transformers, in float32: of each token after the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0].double(), dim=-1)
    return [float(logprobs[place, token]) for place, token in enumerate(token_ids[1:])]


def random_tokens(seed: int, number: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(4, 40, (number,), generator=generator).tolist()
    return tokens


def probe(folder: Path, prompt_length: int = 12, response_length: int = 20) -> Probe:
    tokens = random_tokens(0, prompt_length + response_length)
    return Probe(
        tuple(tokens[:prompt_length]),
        tuple(tokens[prompt_length:]),
        tuple(token_logprobs(folder, tokens)[prompt_length - 1 :]),
    )


@pytest.fixture(scope="session")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama(0)


@pytest.fixture
def make(tmp_path: Path, folder: Path) -> Iterator[Make]:
    """A sampler over fake servers, with policy version 0 or another."""
    made: list[VllmSampler] = []

    def make_sampler(*servers: FakeServer, version: int = 0, note: Any = None, **options: Any) -> VllmSampler:
        sampler = VllmSampler(VllmSamplerConfig(**options), "float32", tmp_path, servers, note)
        made.append(sampler)
        sampler.load_policy(version, folder)
        return sampler

    yield make_sampler
    for sampler in made:
        sampler.close()


def requests(count: int = 12, max_new_tokens: int = 12, **options: Any) -> list[SampleRequest]:
    """In groups of three that share a prompt."""
    return [SampleRequest((5, 6 + index // 3), index, max_new_tokens, 1.0, **options) for index in range(count)]


def expected(make: Make, asked: list[SampleRequest], version: int = 0) -> list[Completion]:
    return make(FakeServer(), version=version).sample(asked)
