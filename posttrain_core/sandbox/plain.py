"""Plain values: what may leave a sandbox, and its one spelling as text.

A plain value is None, bool, int, float (finite), str, list, tuple (spelt as an array) or dict with str keys, of
*exactly* these types: an int subclass or an object that calls itself equal to everything is not plain. Both sides
use this module; the host trusts only `parse_plain`, which accepts nothing but what `spell_plain` would have written.
"""

import json
import math
from typing import Any

MAX_DEPTH = 32
MAX_INT_BITS = 4096
MAX_CHARS = 16384

_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":")).encode


class NotPlain(ValueError):
    """The value is not plain, or larger than the caps; the message says which."""


def spell_plain(value: Any) -> str:
    """Canonical JSON (ASCII, sorted keys, no blanks) of a plain value. Raises NotPlain."""
    text = _encode(_copy_plain(value, MAX_DEPTH, [MAX_CHARS]))
    if len(text) > MAX_CHARS:
        raise NotPlain(f"longer than {MAX_CHARS} characters")
    return text


def parse_plain(text: str) -> Any:
    """The value that `text` spells. Raises NotPlain unless `text` is exactly what `spell_plain` gives for it."""
    if len(text) > MAX_CHARS:
        raise NotPlain(f"longer than {MAX_CHARS} characters")
    try:
        value = json.loads(text)
        canonical = spell_plain(value)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"not canonical JSON: {error}") from error
    if canonical != text:
        raise NotPlain("not canonical JSON")
    return value


def _copy_plain(value: Any, depth: int, budget: list[int]) -> Any:
    """A copy made of builtin containers only; `budget` counts nodes, so shared references cannot blow it up."""
    budget[0] -= 1
    if depth < 0 or budget[0] < 0:
        raise NotPlain(f"nested deeper than {MAX_DEPTH}" if depth < 0 else f"more than {MAX_CHARS} parts")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        if value.bit_length() > MAX_INT_BITS:
            raise NotPlain(f"an integer of more than {MAX_INT_BITS} bits")
        return value
    if kind is float:
        if not math.isfinite(value):
            raise NotPlain("a float that is not finite")
        return value
    if kind is list or kind is tuple:
        return [_copy_plain(item, depth - 1, budget) for item in value]
    if kind is dict:
        if any(type(key) is not str for key in value):
            raise NotPlain("a dict with a key that is not a str")
        return {key: _copy_plain(item, depth - 1, budget) for key, item in value.items()}
    raise NotPlain(f"a value of type {kind.__name__[:80]}")
