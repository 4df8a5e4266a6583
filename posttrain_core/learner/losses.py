"""The pieces of a policy-gradient loss: pure functions of tensors, one idea each.

Legend: M response tokens of a micro-batch, flat (no padding), S sequences. `sequence_M` says which of the S
sequences a token belongs to. Log-probabilities are natural. *prox* is the policy at the start of the iteration (the
proximal policy, detached), *sampler* the one recorded at generation. Every loss is a value per token; the weights of
`batching.token_weights` turn it into the scalar of a whole optimizer step.
"""

import torch
from torch import Tensor

from posttrain_core.config import ImportanceConfig, KlConfig
from posttrain_core.learner.presets import Algorithm


def log_distribution(logits_MV: Tensor, temperature_M: Tensor) -> Tensor:
    """Log-probabilities of every word under logits / temperature (M x V)."""
    return torch.log_softmax(logits_MV.float() / temperature_M.unsqueeze(1), dim=1)


def token_logprobs(log_distribution_MV: Tensor, targets_M: Tensor) -> Tensor:
    return log_distribution_MV.gather(1, targets_M.unsqueeze(1)).squeeze(1)


def entropy(log_distribution_MV: Tensor) -> Tensor:
    """Entropy of each token's distribution in nats (M)."""
    return -(log_distribution_MV.exp() * log_distribution_MV).sum(dim=1)


def token_ratio(learner_M: Tensor, prox_M: Tensor) -> Tensor:
    """pi / pi_prox of each token (PPO, arXiv 1707.06347)."""
    return torch.exp(learner_M - prox_M)


def sequence_ratio(learner_M: Tensor, prox_M: Tensor, sequence_M: Tensor, num_sequences: int) -> Tensor:
    """GSPO (arXiv 2507.18071, eq. 7): the geometric mean of a sequence's token ratios, given to each of its tokens."""
    totals = torch.zeros(num_sequences, dtype=learner_M.dtype, device=learner_M.device)
    lengths = totals.index_add(0, sequence_M, torch.ones_like(learner_M)).clamp(min=1)
    means = totals.index_add(0, sequence_M, learner_M - prox_M) / lengths
    return torch.exp(means)[sequence_M]


def clip_loss(ratio_M: Tensor, advantage_M: Tensor, low: float | None, high: float | None) -> Tensor:
    """PPO's pessimistic bound (arXiv 1707.06347, eq. 7); a larger `high` is DAPO's clip-higher (arXiv 2503.14476)."""
    return -torch.minimum(ratio_M * advantage_M, _clipped(ratio_M, low, high) * advantage_M)


def detached_clip_loss(
    ratio_M: Tensor, learner_M: Tensor, advantage_M: Tensor, low: float | None, high: float | None
) -> Tensor:
    """CISPO (arXiv 2506.13585, eq. 4): the clipped ratio is a weight, so every token keeps a gradient."""
    return -_clipped(ratio_M, low, high).detach() * advantage_M * learner_M


def plain_loss(learner_M: Tensor, advantage_M: Tensor) -> Tensor:
    """REINFORCE (Williams 1992) and, with leave-one-out advantages, RLOO (arXiv 2402.14740): no ratio, no clipping."""
    return -advantage_M * learner_M


def clipped_tokens(ratio_M: Tensor, advantage_M: Tensor, low: float | None, high: float | None) -> Tensor:
    """1.0 where the bound is active: the ratio has already moved too far in the direction of the advantage."""
    above = ratio_M > 1 + high if high is not None else torch.zeros_like(ratio_M, dtype=torch.bool)
    below = ratio_M < 1 - low if low is not None else torch.zeros_like(ratio_M, dtype=torch.bool)
    return ((above & (advantage_M > 0)) | (below & (advantage_M < 0))).to(ratio_M.dtype)


def importance_weight(prox_M: Tensor, sampler_M: Tensor, config: ImportanceConfig) -> Tensor:
    """Correction for sampling from another engine or an older version, detached (M).

    truncated: min(ratio, limit) (truncated importance sampling, Ionides 2008). masked: the ratio, but 0 outside
    [1 / limit, limit] (IcePop, arXiv 2510.18855). none: 1.
    """
    ratio = torch.exp(prox_M - sampler_M).detach()
    if config.type == "none":
        return torch.ones_like(ratio)
    if config.type == "truncated":
        return ratio.clamp(max=config.limit)
    return torch.where((ratio >= 1 / config.limit) & (ratio <= config.limit), ratio, torch.zeros_like(ratio))


def kl(learner_M: Tensor, reference_M: Tensor, config: KlConfig) -> Tensor:
    """Estimate of KL(learner || reference) per token (Schulman, "Approximating KL divergence", 2020).

    k1 = log pi - log ref; k2 = k1^2 / 2; k3 = exp(-k1) - 1 + k1. As a loss, k1 has an expected gradient of zero, so
    here its gradient is the score-function one, k1 * grad log pi.
    """
    k1 = learner_M - reference_M
    if config.estimator == "k1":
        return k1.detach() * torch.exp(learner_M - learner_M.detach())
    if config.estimator == "k2":
        return k1.square() / 2
    return torch.exp(-k1) - 1 + k1


def policy_loss(
    algorithm: Algorithm,
    learner_M: Tensor,
    prox_M: Tensor,
    advantage_M: Tensor,
    sequence_M: Tensor,
    num_sequences: int,
) -> tuple[Tensor, Tensor]:
    """The algorithm's loss per token, and 1.0 where its bound is active (M and M)."""
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.policy_loss == "plain":
        return plain_loss(learner_M, advantage_M), torch.zeros_like(prox_M)
    if algorithm.policy_loss == "sequence_clip":
        ratio = sequence_ratio(learner_M, prox_M, sequence_M, num_sequences)
    else:
        ratio = token_ratio(learner_M, prox_M)
    clipped = clipped_tokens(ratio.detach(), advantage_M, low, high)
    if algorithm.policy_loss == "detached_clip":
        return detached_clip_loss(ratio, learner_M, advantage_M, low, high), clipped
    return clip_loss(ratio, advantage_M, low, high), clipped


def _clipped(ratio_M: Tensor, low: float | None, high: float | None) -> Tensor:
    return ratio_M.clamp(min=None if low is None else 1 - low, max=None if high is None else 1 + high)
