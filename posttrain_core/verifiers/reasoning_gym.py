"""reasoning-gym's generators and scorers, kept in a process of their own (`gym_worker`): importing them here would cost
more than a second, a scorer may hang in C code, and some generators depend on the hash seed, which is fixed there.
"""

import contextlib
import difflib
import json
import math
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from posttrain_core.errors import ConfigError, VerifierFault
from posttrain_core.records import Outcome, Rollout, Verdict

START_SECONDS = 120.0
GRACE_SECONDS = 30.0  # the worker enforces the limits itself; beyond this it is the worker that hangs
FULL_SCORE = 1.0


def package_version() -> str:
    try:
        return version("reasoning-gym")
    except PackageNotFoundError as error:
        raise ConfigError("a reasoning_gym domain needs the package: pip install 'posttrain[reasoning]'") from error


class Scorer:
    """One generator with its options. Safe to call from several threads (one call at a time); started at first use."""

    def __init__(self, generator: str, options: Mapping[str, Any], size: int, seconds: float) -> None:
        self._opening = {"generator": generator, "options": dict(options), "size": size}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def items(self) -> list[tuple[str, Any]]:
        """(question, reference answer or None) of every item."""
        return [(question, answer) for question, answer in self._ask({"do": "items"})["items"]]

    def score(self, index: int, answer: str) -> Mapping[str, Any]:
        """The worker's reply, see `gym_worker`; returns in bounded time."""
        return self._ask({"do": "score", "index": index, "answer": answer, "seconds": self._seconds}, self._seconds)

    def close(self) -> None:
        """Stop the worker; the next call starts another."""
        with self._lock:
            if self._worker:
                self._worker.stop()
            self._worker = None

    def _ask(self, request: Mapping[str, Any], seconds: float = math.inf) -> Mapping[str, Any]:
        with self._lock:
            self._worker = self._worker or _Worker(self._opening)
            try:
                return self._worker.ask(request, seconds + GRACE_SECONDS)
            except VerifierFault:
                self._worker.stop()
                self._worker = None
                raise


class _Worker:
    """A live worker process. Stopped by `stop`, by garbage collection, and by the end of this process."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        package_version()
        command = [sys.executable, "-m", "posttrain_core.verifiers.gym_worker", str(os.getpid())]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self.stop = weakref.finalize(self, _stop, self._process)
        _refuse_bad_options(opening, self.ask(opening, START_SECONDS))

    def ask(self, request: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        """Raises VerifierFault when there is no reply in time."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            wait = None if math.isinf(seconds) else seconds
            line = stdout.readline() if select.select([stdout], [], [], wait)[0] else b""
        except OSError:
            line = b""
        if not line:
            raise VerifierFault(f"the reasoning-gym worker ended or hangs ({request}); it will be started again")
        reply: Mapping[str, Any] = json.loads(line)
        return reply


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """The end of its input ends the worker and its child; a kill if not."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _refuse_bad_options(opening: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
    name = opening["generator"]
    if "unknown" in reply:
        near = difflib.get_close_matches(name, reply["unknown"], n=3, cutoff=0.4) or reply["unknown"][:3]
        raise ConfigError(f"generator: reasoning-gym has no {name!r}; the nearest are {', '.join(near)}")
    if "refused" in reply:
        raise ConfigError(f"options: reasoning-gym's {name!r} refused {opening['options']}: {reply['refused']}")


def verify(rollout: Rollout, scorer: Scorer, index: int, answer: str, reference: Any, min_score: float) -> Verdict:
    """The package's own score of `answer`, as reward. A score below `min_score` is reward 0.

    Raises VerifierFault for a score outside [0, 1] and where the installed package makes another problem than the
    stored one; a scorer that raises on the answer is the answer's fault, unless it raises on the reference too.
    """
    if not answer:
        return _verdict(rollout, 0.0, {"reason": "the answer is empty or too long"}, ("invalid",))
    reply = scorer.score(index, answer)
    if "score" in reply:
        score = _checked(reply, index, reference)
        return _verdict(rollout, score if score >= min_score else 0.0, {"score": score}, breakdown={"score": score})
    if "raised" in reply and isinstance(reference, str) and "raised" in scorer.score(index, reference):
        evidence = {"reason": f"the scorer raises on its own reference answer: {reply['raised']}"}
        return _verdict(rollout, 0.0, evidence, outcome=Outcome.UNSCORABLE)
    flag = next(iter(reply))
    return _verdict(rollout, 0.0, {"reason": f"the scorer: {flag} {reply[flag]}"}, (f"scorer_{flag}",))


def _checked(reply: Mapping[str, Any], index: int, reference: Any) -> float:
    if reply["reference"] != reference:
        raise VerifierFault(
            f"item {index}: the stored reference answer is {reference!r}, the installed reasoning-gym "
            f"{package_version()} makes {reply['reference']!r}; install the version the run was started with"
        )
    score = float(reply["score"])
    if not (math.isfinite(score) and 0.0 <= score <= FULL_SCORE):
        raise VerifierFault(f"item {index}: reasoning-gym's scorer returned {score}, which is not in [0, 1]")
    return score


def _verdict(
    rollout: Rollout,
    reward: float,
    evidence: Mapping[str, Any],
    flags: tuple[str, ...] = (),
    breakdown: Mapping[str, float] | None = None,
    outcome: Outcome = Outcome.SCORED,
) -> Verdict:
    return Verdict(rollout.rollout_id, outcome, reward, breakdown or {}, json.dumps(evidence, sort_keys=True), flags)
