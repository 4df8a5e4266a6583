"""Samplers serve the policy for generation: token ids in, token ids and log-probabilities out."""

from posttrain_core.sampling.protocol import Completion, Sampler, SampleRequest

__all__ = ["Completion", "SampleRequest", "Sampler"]
