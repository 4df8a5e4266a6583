"""reasoning-gym's generators and scorers, kept in a process of their own (`gym_worker`): importing them here would cost
more than a second, a scorer may hang in C code, and some generators depend on the hash seed, which is fixed there.
"""

import contextlib
import difflib
import json
import math
import os
import re
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from posttrain_core.errors import ConfigError, VerifierFault
from posttrain_core.records import Outcome, Rollout, Verdict

START_SECONDS = 120.0
GRACE_SECONDS = 30.0  # the worker enforces the limits itself; beyond this it is the worker that hangs
FULL_SCORE = 1.0
TOLERANCE = 1e-6  # of a scorer that adds up shares
_NOT_FINITE = re.compile(r"(?<![a-z])(nan|inf|infinity)(?=[ij]?(?![a-z]))", re.IGNORECASE)
_UNANSWERED = ("timeout", "died")


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

    def items(self) -> list[tuple[str, Any, str | None]]:
        """(question, reference answer or None, content or None) of every item; see `gym_worker` for the content."""
        return [(question, answer, content) for question, answer, content in self._ask({"do": "items"})["items"]]

    def score(self, index: int, answer: str) -> Mapping[str, Any]:
        """The score or fault of one answer, with the reference: see `gym_worker`; returns in bounded time."""
        reply = self.scores(index, [answer])
        return {**reply["scores"][0], "reference": reply["reference"]} if "scores" in reply else reply

    def scores(self, index: int, answers: Sequence[str]) -> Mapping[str, Any]:
        """The worker's reply to several answers to one item, in the time that each may take, together."""
        seconds = self._seconds * len(answers)
        return self._ask({"do": "score", "index": index, "answers": answers, "seconds": seconds}, seconds)

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
        command = [sys.executable, "-P", "-s", "-m", "posttrain_core.verifiers.gym_worker", str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            cwd="/",
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


def _environment() -> dict[str, str]:
    """No credentials: of this process's own only where programs and modules are. (`-I` would ignore the hash seed.)"""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


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
    if "evaluates" in reply:
        raise ConfigError(
            f"generator: {name!r} is refused: {reply['evaluates']}, so its scorer may run code that is hidden in an "
            "answer; choose another generator"
        )
    if "refused" in reply:
        raise ConfigError(f"options: reasoning-gym's {name!r} refused {opening['options']}: {reply['refused']}")


def verify(rollout: Rollout, scorer: Scorer, index: int, answer: str, reference: Any, min_score: float) -> Verdict:
    """The package's own score of `answer`, as reward. A score below `min_score` is reward 0.

    What a scorer does wrong is the answer's fault, unless it does so with the reference too. A scorer that raises on
    the reference makes the rollout unscorable; one that cannot score it in time is taken for an overloaded machine.
    Raises VerifierFault where the reference's score is not in [0, 1] either, and where the installed package makes
    another problem than the stored one.
    """
    if not answer:
        return _verdict(rollout, 0.0, {"reason": "the answer is empty or too long"}, ("invalid",))
    if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(reference)):
        return _verdict(rollout, 0.0, {"reason": "the answer is not a finite number"}, ("not_finite",))
    reply = scorer.score(index, answer)
    if any(flag in reply for flag in _UNANSWERED):
        reply = scorer.score(index, answer)  # by another process: the worker has replaced the first
    if "score" not in reply:
        return _unscored(rollout, scorer, index, reference, reply)
    if reply["reference"] != reference:
        raise VerifierFault(
            f"item {index}: the stored reference answer is {reference!r}, the installed reasoning-gym "
            f"{package_version()} makes {reply['reference']!r}; install the version the run was started with"
        )
    score = _in_unit_interval(reply["score"])
    if score is None:
        return _out_of_range(rollout, scorer, index, reference, reply["score"])
    return _verdict(rollout, score if score >= min_score else 0.0, {"score": score}, breakdown={"score": score})


def _unscored(rollout: Rollout, scorer: Scorer, index: int, reference: Any, reply: Mapping[str, Any]) -> Verdict:
    flag = next(flag for flag in (*_UNANSWERED, "raised") if flag in reply)
    own = scorer.score(index, reference) if isinstance(reference, str) else {}
    if flag == "raised" and "raised" in own:
        evidence = {"reason": f"the scorer raises on its own reference answer: {own['raised']}"}
        return _verdict(rollout, 0.0, evidence, outcome=Outcome.UNSCORABLE)
    if flag in _UNANSWERED and any(flag in own for flag in _UNANSWERED):
        evidence = {"reason": "the scorer does not score its own reference answer in time"}
        return _verdict(rollout, 0.0, evidence, outcome=Outcome.INFRA_FAILED)
    return _verdict(rollout, 0.0, {"reason": f"the scorer: {flag} {reply[flag]}"}, (f"scorer_{flag}",))


def _out_of_range(rollout: Rollout, scorer: Scorer, index: int, reference: Any, score: float) -> Verdict:
    own = scorer.score(index, reference) if isinstance(reference, str) else {}
    if "score" in own and _in_unit_interval(own["score"]) is None:
        raise VerifierFault(
            f"item {index}: reasoning-gym's scorer returned {own['score']} for its own reference answer, which is not "
            "in [0, 1]; choose another generator"
        )
    reason = f"the scorer returned {score}, which is not in [0, 1]"
    return _verdict(rollout, 0.0, {"reason": reason}, ("scorer_fault",))


def _in_unit_interval(score: float) -> float | None:
    """The score, with what rounding put above 1 or below 0 taken off; None when that is not all."""
    inside = -TOLERANCE <= score <= FULL_SCORE + TOLERANCE  # never for nan
    return min(max(score, 0.0), FULL_SCORE) if inside else None


def _verdict(
    rollout: Rollout,
    reward: float,
    evidence: Mapping[str, Any],
    flags: tuple[str, ...] = (),
    breakdown: Mapping[str, float] | None = None,
    outcome: Outcome = Outcome.SCORED,
) -> Verdict:
    return Verdict(rollout.rollout_id, outcome, reward, breakdown or {}, json.dumps(evidence, sort_keys=True), flags)
