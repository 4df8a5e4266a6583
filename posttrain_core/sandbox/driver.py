"""What runs inside the sandbox, in the candidate's own process: call the program, report plain returns.

The candidate can reach everything here; nothing here is trusted. A report is a frame: 4 bytes of length (big
endian), then the JSON array [case id, ok, canonical value or error]. The host accepts one frame for each case id.
"""

import json
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

from posttrain_core.sandbox.plain import NotPlain, spell_plain

MAX_ERROR_CHARS = 200


def run_program(payload: bytes, result_fd: int) -> int:
    """Run the request (`source`, `entry`, `inputs` as JSON) and write a frame per case; the exit code is returned."""
    request = json.loads(payload)
    try:
        call = _load(request["source"], request["entry"])
    except BaseException as error:  # a program may raise anything, SystemExit included
        print(_describe(error), file=sys.stderr)
        return 1
    for case_id, text in enumerate(request["inputs"]):
        ok, value = _call(call, json.loads(text))
        frame = json.dumps([str(case_id), ok, value]).encode("ascii")
        _write_all(result_fd, struct.pack(">I", len(frame)) + frame)
    return 0


def _load(source: str, entry: str) -> Callable[..., Any]:
    if not entry:
        expression = compile(source.strip(), "<program>", "eval")
        return lambda x: eval(expression, {"x": x})
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "<program>", "exec"), namespace)
    call: Callable[..., Any] | None = namespace.get(entry)
    if callable(call):
        return call
    raise NameError(f"the program does not define the function {entry}")


def _call(call: Callable[..., Any], arguments: list[Any]) -> tuple[bool, str]:
    try:
        return True, spell_plain(call(*arguments))
    except NotPlain as error:
        return False, f"NotPlain: returned {error}"
    except BaseException as error:
        return False, _describe(error)


def _describe(error: BaseException) -> str:
    """Type and text, cut. The text is the candidate's code once more: its __str__ may raise or never end."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"[:MAX_ERROR_CHARS]
    except BaseException:
        return name[:MAX_ERROR_CHARS]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
