"""From evidence to a result: the status, and the returns that may be believed.

The order is that of proof: what the kernel or we did to the execution comes before what the program did.
"""

import json
import math
import re
import signal
import struct

from posttrain_core.records import CaseReturn, ExecutionStatus
from posttrain_core.sandbox.launch import Kill, Observed
from posttrain_core.sandbox.plain import NotPlain, parse_plain
from posttrain_core.sandbox.protocol import Limits, ProgramResult

MAX_ERROR_CHARS = 200
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]+")


class BadFrames(ValueError):
    """The results channel holds something that the driver does not write."""


def classify(observed: Observed, num_cases: int, limits: Limits, isolation: str) -> ProgramResult:
    """The result of one execution of `num_cases` cases under `limits`."""
    status, reason = _status(observed, limits)
    try:
        returns = parse_frames(observed.results, num_cases, torn=status is not ExecutionStatus.OK)
    except BadFrames as error:
        returns = ()
        if status in (ExecutionStatus.OK, ExecutionStatus.RUNTIME_ERROR):
            status, reason = ExecutionStatus.POLICY, f"results channel: {error}"
    if status is ExecutionStatus.OK:
        status, reason = _complete(returns, num_cases)
    if status in (ExecutionStatus.RUNTIME_ERROR, ExecutionStatus.TIME_LIMIT):
        status, reason = _resource_behind(observed, limits) or (status, reason)
    if status is ExecutionStatus.INFRA:
        returns = ()
    stdout, stderr = (_stable(data.decode(errors="replace")) for data in (observed.stdout, observed.stderr))
    return ProgramResult(status, returns, stdout, stderr, isolation, reason)


def _stable(text: str) -> str:
    """Text without object addresses, which differ from one execution of a program to the next."""
    return _ADDRESS.sub("0x", text)


def _status(observed: Observed, limits: Limits) -> tuple[ExecutionStatus, str]:
    """From what ended the execution."""
    evidence, exit_code = observed.evidence, observed.evidence.get("exit")
    if "error" in evidence:
        return ExecutionStatus.INFRA, f"the sandbox could not be set up: {evidence['error']}"
    if observed.num_memory_kills or evidence.get("memory_full"):
        return ExecutionStatus.MEMORY_LIMIT, f"more than {limits.memory_mib} MiB"
    if observed.kill in (Kill.OUTPUT, Kill.RESULTS):
        what = "stdout or stderr" if observed.kill is Kill.OUTPUT else "returns"
        return ExecutionStatus.OUTPUT_LIMIT, f"more than {limits.output_kib} KiB of {what}"
    if observed.kill is Kill.WALL:
        return ExecutionStatus.TIME_LIMIT, f"still running after {limits.wall_seconds} s"
    if exit_code is None:
        return ExecutionStatus.INFRA, "the sandbox ended without a report"
    if exit_code == -signal.SIGSYS:
        return ExecutionStatus.POLICY, "a system call of a foreign architecture"
    if exit_code < 0 and evidence["cpu"] >= limits.cpu_seconds:
        return ExecutionStatus.TIME_LIMIT, f"more than {limits.cpu_seconds} s of processor time"
    if exit_code:
        how = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
        return ExecutionStatus.RUNTIME_ERROR, f"the program ended with {how}"
    return ExecutionStatus.OK, ""


def _complete(returns: tuple[CaseReturn, ...], num_cases: int) -> tuple[ExecutionStatus, str]:
    failed = next((case for case in returns if not case.ok), None)
    if failed:
        return ExecutionStatus.RUNTIME_ERROR, f"case {failed.case_id}: {failed.error}"
    if len(returns) < num_cases:
        return ExecutionStatus.RUNTIME_ERROR, f"{num_cases - len(returns)} of {num_cases} cases did not report"
    return ExecutionStatus.OK, ""


def _resource_behind(observed: Observed, limits: Limits) -> tuple[ExecutionStatus, str] | None:
    """A failure whose cause is a limit that the program ran into and survived."""
    evidence = observed.evidence
    if observed.num_refused_processes or evidence.get("processes_full"):
        return ExecutionStatus.PROCESS_LIMIT, f"more than {limits.num_processes} processes"
    if evidence.get("disk_full"):
        return ExecutionStatus.DISK_LIMIT, f"more than {limits.disk_mib} MiB or {64 * limits.disk_mib} files"
    if evidence.get("peak_kib", 0) >= 0.9 * 1024 * limits.memory_mib:
        return ExecutionStatus.MEMORY_LIMIT, f"close to {limits.memory_mib} MiB when it failed"
    return None


def parse_frames(data: bytes, num_cases: int, torn: bool) -> tuple[CaseReturn, ...]:
    """The frames, ordered by case. Raises BadFrames; a cut last frame is ignored where `torn` (the writer was
    killed)."""
    found: dict[int, CaseReturn] = {}
    position = 0
    while position < len(data):
        end = position + 4 + (struct.unpack_from(">I", data, position)[0] if len(data) - position >= 4 else math.inf)
        if end > len(data):
            if torn:
                break
            raise BadFrames("a frame is cut")
        case = _parse_frame(data[position + 4 : int(end)])
        number = int(case.case_id)
        if number >= num_cases or number in found:
            raise BadFrames(f"case {number} is not expected" + (" again" if number in found else ""))
        found[number] = case
        position = int(end)
    return tuple(found[number] for number in sorted(found))


def _parse_frame(frame: bytes) -> CaseReturn:
    try:
        parts = json.loads(frame.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise BadFrames("a frame is not JSON") from error
    if type(parts) is not list or [type(part) for part in parts] != [str, bool, str]:
        raise BadFrames("a frame is not [case id, ok, text]")
    case_id, ok, text = parts
    if not (case_id.isascii() and case_id.isdigit() and len(case_id) <= 6 and str(int(case_id)) == case_id):
        raise BadFrames("a case id is not a number")
    if not ok:
        return CaseReturn(case_id, False, error=_stable(text.encode(errors="replace").decode())[:MAX_ERROR_CHARS])
    try:
        parse_plain(text)
    except NotPlain as error:
        raise BadFrames(f"the value of case {case_id} is {error}"[:MAX_ERROR_CHARS]) from error
    return CaseReturn(case_id, True, value=text)
