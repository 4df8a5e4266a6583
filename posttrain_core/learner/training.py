"""The two kinds of training, as loops over planned steps: `reinforce` from rewards, `imitate` from demonstrations."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from posttrain_core.config import AdvantageConfig, DeepSpeedLearnerConfig, ImportanceConfig, MismatchConfig, SftConfig
from posttrain_core.errors import LearnerFault
from posttrain_core.learner import losses, mismatch
from posttrain_core.learner.batching import Block, Row, Step, padding_share, plan_steps, token_weights
from posttrain_core.learner.collate import Batch, collate
from posttrain_core.learner.model import Rank
from posttrain_core.learner.presets import Algorithm
from posttrain_core.learner.samples import Floats, SampleArrays, from_demonstrations

Forward = Callable[[Batch], Tensor]
Progress = Callable[[int, int], None]  # steps done, steps in all


class Engine(Protocol):
    """What takes the steps. `backward` sums over calls and ranks, `step` returns the gradient norm before clipping."""

    rank: Rank
    num_steps: int
    longest_shared_row: int

    def forward(self, batch: Batch) -> Tensor: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self, learning_rate: float, weight_decay: float) -> float: ...


SUPERVISED = Algorithm(
    advantage=AdvantageConfig(),
    policy_loss="plain",
    clip_low=None,
    clip_high=None,
    normalizer="token_mean",
    normalizer_constant=None,
    importance=ImportanceConfig(type="none"),
    mismatch=MismatchConfig(),
    kl=None,
    entropy_coefficient=0.0,
    overlong_buffer=0,
)


def reinforce(
    engine: Engine,
    samples: SampleArrays,
    algorithm: Algorithm,
    config: DeepSpeedLearnerConfig,
    max_new_tokens: int,
    seed: int,
    progress: Progress,
) -> Mapping[str, float]:
    """One iteration's update; returns its metrics. Raises PolicyMismatch, on all ranks, before the first step."""
    if algorithm.kl is not None and not len(samples.reference_logprobs):
        raise LearnerFault("algorithm.kl is set, and the samples have no reference log-probabilities")
    steps = plan_steps(
        samples,
        config.steps_per_iteration,
        config.epochs,
        engine.rank.world_size,
        config.tokens_per_micro_batch,
        engine.longest_shared_row,
        seed,
    )
    constant = algorithm.normalizer_constant or max_new_tokens
    # With a single step the proximal policy is the one that the step itself starts from: no pass of its own.
    prox = _recomputed(engine, engine.forward, samples, config) if len(steps) > 1 else None
    measured = _checked(samples, prox, algorithm) if prox is not None else {}
    totals = Totals(engine.rank)
    grad_norms = []
    for number, step in enumerate(steps, start=1):
        seen = torch.zeros(len(samples.tokens), device=engine.rank.device)
        for batch in _collated(engine.rank, samples, step, algorithm, constant):
            _accumulate(engine, batch, prox, algorithm, totals, seen)
        if prox is None:
            measured = _checked(samples, _over_ranks(seen, engine.rank), algorithm)
        learning_rate = config.learning_rate * min(1.0, (engine.num_steps + 1) / max(1, config.warmup_steps))
        grad_norms.append(engine.step(learning_rate, config.weight_decay))
        progress(number, len(steps))
    means = totals.metrics(len(steps))
    if algorithm.kl is None:
        del means["kl"]
    return {
        **means,
        **measured,
        "grad_norm": float(np.mean(grad_norms)),
        "learning_rate": learning_rate,
        "num_steps": float(engine.num_steps),
        "padding_share": padding_share(steps),
    }


def logprobs(engine: Engine, forward: Forward, samples: SampleArrays, config: DeepSpeedLearnerConfig) -> Floats:
    """Log-probabilities of the samples' tokens by some forward pass, 0.0 where nothing is learned, on all ranks."""
    values: Floats = _recomputed(engine, forward, samples, config).double().cpu().numpy()
    return values


def imitate(
    engine: Engine,
    samples: SampleArrays,
    sft: SftConfig,
    tokens_per_micro_batch: int,
    seed: int,
    progress: Progress,
) -> Mapping[str, float]:
    """Cross-entropy on the learned tokens: the plain policy loss with every advantage 1, averaged over tokens."""
    steps = plan_steps(
        samples,
        math.ceil(len(samples) / sft.batch_size),
        sft.epochs,
        engine.rank.world_size,
        tokens_per_micro_batch,
        engine.longest_shared_row,
        seed,
    )
    losses_by_step = []
    for number, step in enumerate(steps):
        totals = Totals(engine.rank)
        for batch in _collated(engine.rank, samples, step, SUPERVISED, 1):
            _accumulate(engine, batch, None, SUPERVISED, totals, None)
        learning_rate = _warmup_cosine(number, len(steps), sft)
        engine.step(learning_rate, sft.weight_decay)
        losses_by_step.append(totals.metrics(1)["loss"])
        progress(number + 1, len(steps))
    last = losses_by_step[-max(1, len(losses_by_step) // 10) :]
    return {
        "loss": float(np.mean(last)),
        "first_loss": losses_by_step[0],
        "learning_rate": sft.learning_rate,
        "num_steps": float(len(steps)),
        "tokens": float(samples.loss_mask.sum() * sft.epochs),
        "padding_share": padding_share(steps),
    }


@torch.no_grad()
def score(engine: Engine, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float) -> list[float]:
    """Log-probabilities of a response's tokens under the held policy."""
    samples = from_demonstrations([prompt_ids], [response_ids])
    samples = replace(samples, temperature=np.array([temperature]))
    batch = collate(samples, [Row((Block((0,), len(samples.tokens) - 1),))], np.ones(1))
    distribution = engine.forward(batch)
    values: list[float] = losses.token_logprobs(distribution, _tensor(batch.target, distribution)).tolist()
    return values


class Totals:
    """Sums over the learned tokens of an iteration, kept as tensors so that no micro-batch waits for a number."""

    NAMES = ("loss", "tokens", "kl", "entropy", "clipped")

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._sums = torch.zeros(len(self.NAMES), dtype=torch.float64, device=rank.device)

    def add(self, loss: Tensor, kl: Tensor, entropy: Tensor, clipped: Tensor) -> None:
        count = torch.tensor(float(len(kl)), dtype=torch.float64, device=self._rank.device)
        self._sums += torch.stack([loss.double(), count, *(column.double().sum() for column in (kl, entropy, clipped))])

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Means over all tokens of all ranks."""
        sums = dict(zip(self.NAMES, _over_ranks(self._sums, self._rank).tolist(), strict=True))
        tokens = sums["tokens"]
        return {
            "loss": sums["loss"] / num_steps,
            "tokens": tokens,
            "kl": sums["kl"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "clip_fraction": sums["clipped"] / tokens,
        }


def _checked(samples: SampleArrays, learner_logprobs: Tensor, algorithm: Algorithm) -> dict[str, float]:
    """What sampler and learner differ by. Raises PolicyMismatch; all ranks have the same numbers."""
    learned = samples.loss_mask == 1
    measured = mismatch.measure(samples.sampler_logprobs[learned], learner_logprobs.double().cpu().numpy()[learned])
    mismatch.check(measured, algorithm.mismatch)
    return measured


def _over_ranks(values: Tensor, rank: Rank) -> Tensor:
    """The sum over all ranks, in place."""
    if rank.world_size > 1:
        dist.all_reduce(values)
    return values


def _collated(
    rank: Rank, samples: SampleArrays, step: Step, algorithm: Algorithm, constant: int
) -> Iterator[Batch | None]:
    """This rank's micro-batches of a step; None where it has nothing left but the others have."""
    chosen = list(step.samples)
    weights = np.zeros(len(samples))
    lengths = [samples.num_learned_tokens(sample) for sample in chosen]
    weights[chosen] = token_weights(algorithm.normalizer, lengths, constant)
    for rows in step.ranks[rank.number]:
        yield collate(samples, rows, weights) if rows else None


@torch.no_grad()
def _recomputed(engine: Engine, forward: Forward, samples: SampleArrays, config: DeepSpeedLearnerConfig) -> Tensor:
    """Log-probabilities of all learned tokens under the held weights, by their place among the samples' tokens."""
    (step,) = plan_steps(
        samples, 1, 1, engine.rank.world_size, config.tokens_per_micro_batch, engine.longest_shared_row, seed=0
    )
    values = torch.zeros(len(samples.tokens), device=engine.rank.device)
    for batch in _collated(engine.rank, samples, step, SUPERVISED, 1):
        # A rank without a batch still takes part in the pass (ZeRO 3 gathers weights in it).
        distribution = forward(batch or IDLE)
        if batch is not None:
            values[_tensor(batch.index, values)] = losses.token_logprobs(
                distribution, _tensor(batch.target, distribution)
            )
    return _over_ranks(values, engine.rank)


def _accumulate(
    engine: Engine,
    batch: Batch | None,
    prox_logprobs: Tensor | None,
    algorithm: Algorithm,
    totals: Totals,
    seen: Tensor | None,
) -> None:
    """Forward and backward of one micro-batch; its loss is weighted for the whole step. `seen` takes the learner's
    log-probabilities, by their place among the samples' tokens."""
    if batch is None:
        engine.backward(engine.forward(IDLE).sum() * 0.0)
        return
    distribution = engine.forward(batch)
    learner = losses.token_logprobs(distribution, _tensor(batch.target, distribution))
    sampler, advantage, weight = (
        _tensor(column, learner).to(learner.dtype) for column in (batch.sampler_logprobs, batch.advantage, batch.weight)
    )
    index = _tensor(batch.index, learner)
    if seen is not None:
        seen[index] = learner.detach()
    prox = learner.detach() if prox_logprobs is None else prox_logprobs[index]
    value, clipped = losses.policy_loss(
        algorithm, learner, prox, advantage, _tensor(batch.sequence, learner), batch.num_sequences
    )
    value = value * losses.importance_weight(prox, sampler, algorithm.importance)
    with torch.set_grad_enabled(algorithm.entropy_coefficient > 0):
        entropy = losses.entropy(distribution)
    if algorithm.entropy_coefficient > 0:
        value = value - algorithm.entropy_coefficient * entropy
    divergence = torch.zeros_like(prox)
    if algorithm.kl is not None:
        assert batch.reference_logprobs is not None
        divergence = losses.kl(learner, _tensor(batch.reference_logprobs, learner).to(learner.dtype), algorithm.kl)
        value = value + algorithm.kl.coefficient * divergence
    loss = (value * weight).sum()
    engine.backward(loss)
    totals.add(loss.detach(), divergence.detach(), entropy.detach(), clipped)


def _tensor(array: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def _warmup_cosine(number: int, num_steps: int, sft: SftConfig) -> float:
    """Linear from 0 over the warm-up, then a half cosine to 0 (Loshchilov and Hutter, arXiv 1608.03983)."""
    if number < sft.warmup_steps:
        return sft.learning_rate * (number + 1) / sft.warmup_steps
    share = (number - sft.warmup_steps) / max(1, num_steps - sft.warmup_steps)
    return sft.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


def _idle() -> Batch:
    """Two tokens of weight 0: what a rank computes while only others have work."""
    zeros, ones = np.zeros(1, dtype=np.int64), np.ones(1)
    pair = np.zeros((1, 2), dtype=np.int64)
    return Batch(pair, pair, None, zeros, zeros, zeros, zeros, ones * 0, None, ones * 0, ones, ones * 0, zeros, 1)


IDLE = _idle()
