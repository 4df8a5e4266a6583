"""The in-process sampler: any local Hugging Face causal LM, served by transformers in this process.

For small models and tests. The same call again gives the same tokens and log-probabilities bit for bit on a CPU
with a fixed number of threads; a request's random numbers never depend on its neighbours.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as transformers_logging

from posttrain_core.config import InProcessSamplerConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.records import FinishReason, Message
from posttrain_core.sampling.decoding import Decoder
from posttrain_core.sampling.protocol import Completion, OnDone, Probe, SampleRequest
from posttrain_core.sampling.tokenizer import PolicyTokenizer
from posttrain_core.sampling.weights import copy_weights, mismatches, read_weights, shapes, summary

NOT_LOADED = "the sampler holds no policy: call load_policy first"


class InProcessSampler:
    """A `Sampler` on one device. `dtype` names the precision of the weights ("float32", "bfloat16").

    The first `load_policy` builds model and tokenizer; later ones replace the weights only: all versions of a
    run share architecture and tokenizer.
    """

    def __init__(self, config: InProcessSamplerConfig, dtype: str = "float32") -> None:
        if config.num_threads > 0:
            torch.set_num_threads(config.num_threads)
        self._device = _device(config.device)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._max_batch_size = config.max_batch_size
        self._lock = threading.Lock()
        self._held: tuple[int, Path] | None = None
        self._model: Any = None
        self._tokenizer: PolicyTokenizer | None = None
        self._decoder: Decoder | None = None
        self._stored_shapes: dict[str, tuple[int, ...]] = {}

    @property
    def context_length(self) -> int:
        return self._tokenized().context_length

    def load_policy(self, version: int, folder: Path, probes: Sequence[Probe] = ()) -> None:
        """Raises SamplerUnavailable where the folder cannot be read or does not fit; the held policy stays."""
        with self._lock:
            if self._held == (version, folder):
                return
            try:
                if self._decoder is None:
                    self._build(folder)
                else:
                    self._swap(version, folder)
            except SamplerUnavailable:
                raise
            except Exception as error:  # transformers raises nearly every type
                raise SamplerUnavailable(
                    f"policy version {version} cannot be loaded from {folder}: {error}; "
                    "the folder must hold config, tokenizer and safetensors of a causal LM"
                ) from error
            self._held = (version, folder)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._tokenized().encode(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenized().decode(token_ids)

    def sample(self, requests: Sequence[SampleRequest], on_done: OnDone | None = None) -> list[Completion]:
        """`max_new_tokens` is clipped to the context; a prompt that leaves no room is refused, with no tokens."""
        with self._lock:
            decoder = self._loaded()
            completions = [Completion((), (), FinishReason.REFUSED)] * len(requests)
            fitting = self._fitting(requests)
            # Equal prompts become neighbours, equal lengths too: little padding, and each prompt is computed once.
            order = sorted(fitting, key=lambda index: (len(requests[index].prompt_ids), requests[index].prompt_ids))
            for start in range(0, len(order), self._max_batch_size):
                indices = order[start : start + self._max_batch_size]
                for index, completion in zip(indices, decoder.decode([fitting[i] for i in indices]), strict=True):
                    completions[index] = completion
        return completions

    def release(self) -> None:
        return

    def close(self) -> None:
        with self._lock:
            self._held = self._model = self._tokenizer = self._decoder = None

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise SamplerUnavailable(NOT_LOADED)
        return self._decoder

    def _tokenized(self) -> PolicyTokenizer:
        if self._tokenizer is None:
            raise SamplerUnavailable(NOT_LOADED)
        return self._tokenizer

    def _fitting(self, requests: Sequence[SampleRequest]) -> dict[int, SampleRequest]:
        """Requests by index, clipped to the context; without those whose prompt leaves no room."""
        context_length, fitting = self.context_length, {}
        for index, request in enumerate(requests):
            room = min(request.max_new_tokens, context_length - len(request.prompt_ids))
            if room > 0 and request.prompt_ids:
                fitting[index] = replace(request, max_new_tokens=room)
        return fitting

    def _build(self, folder: Path) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        tokenizer = PolicyTokenizer(folder)
        built: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=self._dtype, output_loading_info=True
        )
        model, report = built
        if problems := sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]})):
            raise ValueError(f"tensors are missing or have another shape ({summary(problems)})")
        if any(DynamicCache(config=model.config).is_linear):
            raise ValueError("its layers keep a recurrent state; only attention with a key/value cache is supported")
        model.to(self._device).eval().requires_grad_(False)
        self._stored_shapes = shapes(read_weights(folder))
        self._tokenizer, self._model = tokenizer, model
        self._decoder = Decoder(model, tokenizer.end_ids, tokenizer.pad_id, tokenizer.decode)

    def _swap(self, version: int, folder: Path) -> None:
        weights = read_weights(folder)
        problems = mismatches(self._model, weights)
        if not problems:
            copy_weights(self._model, weights)
        elif shapes(weights) == self._stored_shapes:
            self._build(folder)  # an architecture stored under other names than it computes with, such as fused experts
        else:
            raise SamplerUnavailable(
                f"policy version {version} in {folder} does not fit the model that is held ({summary(problems)}); "
                "all versions of a run share one architecture: start a new run for another model"
            )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
