"""Decoding of one batch with a causal LM: prompts computed once each, one token a step, finished rows leave.

B rows (requests), U distinct prompts, P longest prompt, L cached positions, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain_core.records import FinishReason
from posttrain_core.sampling.kv_cache import RowCache
from posttrain_core.sampling.protocol import Completion, SampleRequest
from posttrain_core.sampling.stopping import Decode, Ending


def uniforms(request: SampleRequest) -> np.ndarray:
    """The request's own random numbers in [0, 1), one a token position: Philox keyed by its seed."""
    return np.random.Generator(np.random.Philox(key=request.seed)).random(request.max_new_tokens)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] and their log-probabilities [B] from logits [B, V], by inversion of the cumulative distribution.

    Rows of temperature 0 are greedy, with the log-probability at temperature 1. `uniform` [B] is float64.
    """
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None], dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    # Below the total, so that the token found has a probability above zero whatever the rounding.
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


class Decoder:
    """Calls the model with the arguments that its architecture takes."""

    def __init__(self, model: Any, end_ids: frozenset[int], pad_id: int, decode: Decode) -> None:
        self.model = model
        self.end_ids = end_ids
        self.pad_id = pad_id
        self._decode_tokens = decode
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # depends on the architecture
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    @torch.inference_mode()
    def decode(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """One completion per request, in order. Each must leave room in the context for its `max_new_tokens`."""
        endings = [Ending(request, self.end_ids, self._decode_tokens) for request in requests]
        batch = _Batch(requests, endings, self.model.device, self.pad_id)
        logits = self._forward(batch, batch.prompt_ids, batch.prompt_positions, batch.prompt_mask)[batch.rows]
        while True:
            tokens = batch.take(logits)
            if not batch.live:
                return batch.completions()
            logits = self._forward(batch, tokens[:, None], batch.positions[:, None], batch.mask)

    def _forward(
        self, batch: "_Batch", ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, self._cache_name: batch.cache}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        logits: torch.Tensor = self.model(**arguments, use_cache=True).logits
        return logits[:, -1]


class _Batch:
    """The rows still being decoded. Row r of every tensor belongs to request `live[r]`."""

    def __init__(
        self, requests: Sequence[SampleRequest], endings: Sequence[Ending], device: torch.device, pad_id: int
    ) -> None:
        self._endings = endings
        self._device = device
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._reasons: list[FinishReason | None] = [None] * len(requests)
        self.live = list(range(len(requests)))
        self._step = 0

        index: dict[tuple[int, ...], int] = {}
        self.rows = self._tensor([index.setdefault(request.prompt_ids, len(index)) for request in requests])
        longest = max(map(len, index))
        padding = [longest - len(prompt) for prompt in index]
        self.prompt_ids = self._tensor([[pad_id] * pad + list(ids) for pad, ids in zip(padding, index, strict=True)])
        # Without padding there is nothing to mask, and attention takes its faster path.
        columns = torch.arange(longest, device=device)
        pads = self._tensor(padding)[:, None]
        self.prompt_mask = (columns >= pads).long() if any(padding) else None
        self.prompt_positions = (columns - pads).clamp(min=0)
        self.positions = self._tensor([len(request.prompt_ids) for request in requests]) - 1

        longest_answer = max(request.max_new_tokens for request in requests)
        self.cache = RowCache(self.rows, longest_answer)
        self._full_mask = None
        if self.prompt_mask is not None:
            answer_mask = self.prompt_mask.new_ones(len(requests), longest_answer)
            self._full_mask = torch.cat([self.prompt_mask[self.rows], answer_mask], dim=1)
        self._temperatures = torch.tensor([request.temperature for request in requests], device=device)
        self._uniforms = torch.zeros(len(requests), longest_answer, dtype=torch.float64)
        for row, request in enumerate(requests):
            self._uniforms[row, : request.max_new_tokens] = torch.from_numpy(uniforms(request))
        self._uniforms = self._uniforms.to(device)

    @property
    def mask(self) -> torch.Tensor | None:
        """Attention mask [B, L] of the next forward pass; none when no prompt was padded."""
        if self._full_mask is None:
            return None
        return self._full_mask[:, : self.prompt_ids.shape[1] + self._step]

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws a token for each row from logits [B, V]; returns the tokens of those that go on, now the batch."""
        tokens, logprobs = draw(logits, self._temperatures, self._uniforms[:, self._step])
        self._step += 1
        going = []
        for row, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
            request = self.live[row]
            self._tokens[request].append(token)
            self._logprobs[request].append(logprob)
            reason = self._endings[request].add(token)
            if reason is None:
                going.append(row)
            self._reasons[request] = reason
        if len(going) < len(self.live):
            tokens = self._keep(going, tokens)
        self.positions += 1
        return tokens

    def completions(self) -> list[Completion]:
        return [
            Completion(tuple(ids), tuple(logprobs), reason)
            for ids, logprobs, reason in zip(self._tokens, self._logprobs, self._reasons, strict=True)
            if reason is not None  # which they all have by now
        ]

    def _keep(self, going: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """The rows `going` become the batch: those beyond its new end move into the holes before it."""
        size = len(going)
        order = list(range(size))
        holes = sorted(set(order) - set(going))
        movers = [row for row in going if row >= size]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.live = [self.live[row] for row in order]
        selected = self._tensor(order)
        self.positions = self.positions[selected]
        self._temperatures = self._temperatures[selected]
        self._uniforms = self._uniforms[selected]
        if self._full_mask is not None:
            self._full_mask = self._full_mask[selected]
        if movers:
            self.cache.fill(self._tensor(holes), self._tensor(movers))
        return tokens[selected]

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
