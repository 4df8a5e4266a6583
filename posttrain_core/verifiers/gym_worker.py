"""The process that holds reasoning-gym: makes problems and scores answers. Started by `reasoning_gym.Scorer` only.

Plain JSON lines over pipes, one reply per request, in order:

    {"generator": ..., "options": {...}, "size": N}    first line; reply {"ready": true} or {"unknown": [names]} or
                                                       {"evaluates": "what"} or {"refused": "why"}
    {"do": "items"}                                    reply {"items": [[question, answer, content], ...]} (N of them)
    {"do": "score", "index": i, "answers": [text, ...], "seconds": s}
                                                       reply {"scores": [{"score": x} or {"raised": "why"}, ...],
                                                       "reference": r} or {"timeout": true} or {"died": true}

`content` is the item's metadata as text, without what only names or rates the item; null where it has no stable text.

This process only supervises; a forked child does the work, because a scorer that hangs in C code can be stopped by
nothing but a kill. The child is killed when its time is over, and replaced. Both end with the process that started
them: this one polls for the end of its input and for its parent, the child is bound to this one by a parent-death
signal. The child has no network where the kernel lets an ordinary user give it up, writes no file, starts no process,
and evaluates no text while it scores: `gym_scan` refuses the scorers that are seen to, an audit hook stops the others.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

from posttrain_core.verifiers.gym_scan import code_evaluation

PR_SET_PDEATHSIG = 1
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NOT_CONTENT = {"source_dataset", "source_index", "source_idx", "difficulty", "style"}  # name, rating, wording
MEMORY_BYTES = 4 << 30
POLL_SECONDS = 0.5
MAX_REASON = 300


class Child:
    """A forked process that answers requests about one dataset; `ask` waits for it and never longer than asked."""

    def __init__(self, dataset: Any) -> None:
        requests_out, requests_in = os.pipe()
        replies_out, replies_in = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(requests_in)
            os.close(replies_out)
            _serve(dataset, os.fdopen(requests_out, "rb"), os.fdopen(replies_in, "wb"))
        os.close(requests_out)
        os.close(replies_in)
        self._requests = os.fdopen(requests_in, "wb")
        self._replies = os.fdopen(replies_out, "rb")

    def ask(self, line: bytes, seconds: float, parent: int) -> bytes | None:
        """The reply; b"" when the child died, None when its time is over. Exits when the parent has gone."""
        try:
            self._requests.write(line)
            self._requests.flush()
        except BrokenPipeError:
            return b""
        while seconds > 0:
            ready, _, _ = select.select([self._replies], [], [], min(POLL_SECONDS, seconds))
            if ready:
                return self._replies.readline()
            if os.getppid() != parent:
                self.kill()
                sys.exit(0)
            seconds -= POLL_SECONDS
        return None

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._replies.close()
        try:
            self._requests.close()
        except BrokenPipeError:
            return


def main(requests: BinaryIO, replies: BinaryIO, parent: int) -> None:
    dataset, problem = _open(json.loads(requests.readline()))
    _send(replies, problem or {"ready": True})
    if problem:
        return
    child = Child(dataset)
    while line := _next_line(requests, parent):
        request = json.loads(line)
        reply = child.ask(line, request.get("seconds", float("inf")), parent)
        if reply:
            replies.write(reply)
            replies.flush()
            continue
        child.kill()
        child = Child(dataset)
        _send(replies, {"timeout": True} if reply is None else {"died": True})
    child.kill()


def _next_line(requests: BinaryIO, parent: int) -> bytes:
    """b"" at the end of the input, and when the parent has gone while others still hold the pipe open."""
    while not select.select([requests], [], [], POLL_SECONDS)[0]:
        if os.getppid() != parent:
            return b""
    return requests.readline()


def _open(request: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    from reasoning_gym.factory import DATASETS, create_dataset

    name = request["generator"]
    if name not in DATASETS:
        return None, {"unknown": sorted(DATASETS)}
    if found := code_evaluation(DATASETS[name][0]):
        return None, {"evaluates": found}
    try:
        return create_dataset(name, **{"seed": 0, **request["options"], "size": request["size"]}), {}
    except Exception as error:  # the generator's own checks of its options: any type
        return None, {"refused": f"{type(error).__name__}: {error}"}


def _serve(dataset: Any, requests: BinaryIO, replies: BinaryIO) -> NoReturn:
    """The child's life. It leaves by os._exit: nothing of the parent's is to be flushed or cleaned up here."""
    _confine()
    guard = _Guard()
    sys.addaudithook(guard)
    try:
        for line in requests:
            _send(replies, _answer(dataset, json.loads(line), guard))
    finally:
        os._exit(0)


def _confine() -> None:
    """The time is not limited here but by the parent. A new network namespace is empty: not even a loopback is up."""
    library = ctypes.CDLL(None)
    if library.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        library.unshare(CLONE_NEWNET)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after unshare, which may clear it
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


class _Guard:
    """An audit hook: no text is run as code while `scoring`. Modules are, from their files, as they are imported."""

    scoring = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not (self.scoring and event == "exec"):
            return
        name = arguments[0].co_filename
        if not name.startswith(("/", "<frozen ")):
            raise PermissionError("a scorer may not evaluate code")


def _answer(dataset: Any, request: Mapping[str, Any], guard: _Guard) -> dict[str, Any]:
    if request["do"] == "items":
        items = [dataset[index] for index in range(len(dataset))]
        return {"items": [[item["question"], item["answer"], _content(item["metadata"])] for item in items]}
    item = dataset[request["index"]]
    guard.scoring = True
    try:
        return {"scores": _scores(dataset, item, request["answers"]), "reference": item["answer"]}
    finally:
        guard.scoring = False


def _scores(dataset: Any, item: Mapping[str, Any], answers: Sequence[str]) -> list[dict[str, Any]]:
    replies: list[dict[str, Any]] = []
    for answer in answers:
        try:
            replies.append({"score": float(dataset.score_answer(answer, item))})
        except Exception as error:  # whatever the package's scorer throws at a strange answer
            replies.append({"raised": f"{type(error).__name__}: {error}"[:MAX_REASON]})
    return replies


def _content(metadata: Mapping[str, Any]) -> str | None:
    content = {name: value for name, value in metadata.items() if name not in NOT_CONTENT}
    try:
        text = json.dumps(content, sort_keys=True, default=str)
    except (TypeError, ValueError):  # keys of several types, a cycle
        return None
    return None if not content or " at 0x" in text else text


def _send(replies: BinaryIO, reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply, default=str).encode() + b"\n")
    replies.flush()


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes, unbuffered on the reading side, and leave nothing on stdout for a chatty scorer to spoil."""
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return requests, replies


if __name__ == "__main__":
    main(*_claim_pipes(), parent=int(sys.argv[1]))
