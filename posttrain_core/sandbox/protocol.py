"""The sandbox protocol: run one hostile program on given inputs, and say what was observed."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from posttrain_core.errors import ConfigError
from posttrain_core.records import CaseReturn, ExecutionStatus

MAX_LIMIT = 1_000_000


@dataclass(frozen=True)
class Limits:
    """Per execution. All of the program's cases share one execution. Raises ConfigError on absurd values."""

    wall_seconds: float = 4.0
    cpu_seconds: float = 2.0
    memory_mib: int = 256
    num_processes: int = 16
    output_kib: int = 64  # stdout and stderr each; the returns channel has the same cap
    disk_mib: int = 16
    num_files: int = 64  # open descriptors

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value <= MAX_LIMIT:  # also refuses NaN
                raise ConfigError(f"sandbox limit {name} is {value!r}: it must be above 0 and at most {MAX_LIMIT}")

    def whole_numbers(self) -> dict[str, int]:
        """By name, rounded up: what the kernel's interfaces take."""
        return {name: math.ceil(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class ProgramRequest:
    """Python source that defines `entry` (a function of one or more positional arguments), and its inputs.

    `source` is either a module that defines `entry`, or (entry == "") one expression in the variable `x`.
    `inputs` is one JSON array of positional arguments per case; case ids are "0", "1", ...
    """

    source: str
    entry: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class ProgramResult:
    """What was observed. One `CaseReturn` per case that reported; a missing case is a case that did not pass.

    Values are plain (see plain.py): exactly None, bool, int, finite float, str, list, tuple (as an array) or dict with
    str keys. OK means that every case returned one; when a case raised or returned something else, the status is
    RUNTIME_ERROR and the other cases keep their returns. POLICY and INFRA results hold no returns.
    """

    status: ExecutionStatus
    returns: tuple[CaseReturn, ...]
    stdout: str
    stderr: str
    isolation: str
    reason: str = ""


class Sandbox(Protocol):
    """Implementations are safe to call from several threads; each request gets processes of its own.

    `run_programs` returns one result per request, in order. It raises SandboxUnavailable when it cannot isolate at
    all; a fault that concerns one request is that request's result with status INFRA.
    """

    isolation: str

    def run_programs(self, requests: Sequence[ProgramRequest], limits: Limits) -> list[ProgramResult]: ...

    def close(self) -> None: ...
