"""Plain processes: the same driver and the same limits per process, and no protection."""

import logging
import warnings

from posttrain_core.sandbox.embedded import ZygotePool

_WARNING = (
    "sandbox.type is unisolated: model-written code runs with YOUR rights. It can read and change your files and use "
    "the network. This is for policies you trust; set sandbox.type: embedded for anything else."
)
_log = logging.getLogger(__name__)


class UnisolatedSandboxWarning(UserWarning):
    """Model-written code runs without isolation."""


class UnisolatedSandbox(ZygotePool):
    """Runs programs as this user (protocol: `Sandbox`). Each execution still has processes of its own."""

    def __init__(self, workers: int = 2) -> None:
        _log.warning(_WARNING)
        warnings.warn(_WARNING, UnisolatedSandboxWarning, stacklevel=2)
        super().__init__(("unisolated",), workers)
