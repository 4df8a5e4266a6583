"""From configuration to a sandbox."""

from posttrain_core.config import SandboxConfig
from posttrain_core.sandbox.embedded import EmbeddedSandbox
from posttrain_core.sandbox.protocol import Sandbox
from posttrain_core.sandbox.unisolated import UnisolatedSandbox


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """The backend that `config` names. Raises SandboxUnavailable where it cannot work here."""
    if config.type == "embedded":
        return EmbeddedSandbox(config.workers)
    return UnisolatedSandbox(config.workers)
