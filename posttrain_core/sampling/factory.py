"""From configuration to a sampler. Heavy libraries are imported only for the sampler that needs them."""

from posttrain_core.config import RunConfig
from posttrain_core.sampling.protocol import Sampler


def make_sampler(config: RunConfig) -> Sampler:
    """The sampler that `config.sampler` names, without a policy yet: call `load_policy` next."""
    if config.sampler.type == "scripted":
        from posttrain_core.sampling.scripted import ScriptedSampler

        return ScriptedSampler(config.sampler)
    from posttrain_core.sampling.inprocess import InProcessSampler

    return InProcessSampler(config.sampler, dtype=config.model.dtype)
