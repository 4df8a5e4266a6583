"""The process that holds reasoning-gym: makes problems and scores answers. Started by `reasoning_gym.Scorer` only.

Plain JSON lines over pipes, one reply per request, in order:

    {"generator": ..., "options": {...}, "size": N}    first line; reply {"ready": true} or {"unknown": [names]} or
                                                       {"refused": "why"}
    {"do": "items"}                                    reply {"items": [[question, answer], ...]} (N of them)
    {"do": "score", "index": i, "answer": text, "seconds": s}
                                                       reply {"score": x, "reference": r} or {"raised": "why"}
                                                       or {"timeout": true} or {"died": true}

This process only supervises; a forked child does the work, because a scorer that hangs in C code can be stopped by
nothing but a kill. The child is killed when its time is over, and replaced. Both end with the process that started
them: this one polls for the end of its input and for its parent,
the child is bound to this one by a parent-death signal.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn

PR_SET_PDEATHSIG = 1
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
    try:
        return create_dataset(name, **{"seed": 0, **request["options"], "size": request["size"]}), {}
    except Exception as error:  # the generator's own checks of its options: any type
        return None, {"refused": f"{type(error).__name__}: {error}"}


def _serve(dataset: Any, requests: BinaryIO, replies: BinaryIO) -> NoReturn:
    """The child's life. It leaves by os._exit: nothing of the parent's is to be flushed or cleaned up here."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        for line in requests:
            _send(replies, _answer(dataset, json.loads(line)))
    finally:
        os._exit(0)


def _answer(dataset: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    if request["do"] == "items":
        items = [dataset[index] for index in range(len(dataset))]
        return {"items": [[item["question"], item["answer"]] for item in items]}
    item = dataset[request["index"]]
    try:
        return {"score": float(dataset.score_answer(request["answer"], item)), "reference": item["answer"]}
    except Exception as error:  # whatever the package's scorer throws at a strange answer
        return {"raised": f"{type(error).__name__}: {error}"[:MAX_REASON]}


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
