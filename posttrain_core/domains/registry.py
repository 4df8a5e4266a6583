"""From configuration to a domain: one line per kind of domain."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from posttrain_core.config import DomainConfig
from posttrain_core.domains.protocol import Domain

_DOMAINS = {
    "program": "posttrain_core.domains.program:ProgramDomain",
    "reasoning_gym": "posttrain_core.domains.reasoning_gym:ReasoningGymDomain",
}


def make_domain(name: str, config: DomainConfig) -> Domain:
    """The domain that `config.type` names, under the name it has in the run. Its module is imported here."""
    module, _, attribute = _DOMAINS[config.type].partition(":")
    make = cast(Callable[[str, DomainConfig], Domain], getattr(import_module(module), attribute))
    return make(name, config)
