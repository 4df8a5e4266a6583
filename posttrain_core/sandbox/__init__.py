"""Where work products run: a protocol, and the backends that keep it."""

from posttrain_core.sandbox.protocol import Limits, ProgramRequest, ProgramResult, Sandbox

__all__ = ["Limits", "ProgramRequest", "ProgramResult", "Sandbox"]
