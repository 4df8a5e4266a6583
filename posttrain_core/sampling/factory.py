"""From configuration to a sampler. Heavy libraries are imported only for the sampler that needs them."""

from collections.abc import Callable
from pathlib import Path

from posttrain_core.config import RunConfig
from posttrain_core.sampling.protocol import Sampler


def make_sampler(config: RunConfig, scratch: Path, note: Callable[[str], None] | None = None) -> Sampler:
    """The sampler that `config.sampler` names, without a policy yet: call `load_policy` next.

    `scratch` is a folder that is kept as long as the sampler lives; it works below scratch/sampler.
    `note` is told, in one line each and perhaps from another thread, what a user should know.
    """
    if config.sampler.type == "scripted":
        from posttrain_core.sampling.scripted import ScriptedSampler

        return ScriptedSampler(config.sampler)
    if config.sampler.type == "vllm":
        from posttrain_core.sampling.vllm.sampler import VllmSampler

        return VllmSampler(config.sampler, config.model.dtype, scratch / "sampler", note=note)
    from posttrain_core.sampling.inprocess import InProcessSampler

    return InProcessSampler(config.sampler, dtype=config.model.dtype)
