"""Text that a model wrote, made safe for a terminal: what would not be seen as itself is shown by its escape."""

import unicodedata
from collections.abc import Iterable

# Controls (ANSI sequences begin with one), formats (bidirectional marks, zero-width characters, tags), surrogates,
# private use, unassigned, and the separators that some terminals break lines at.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str, keep: str = "") -> str:
    """`text` with every such character as \\xNN, \\uNNNN or \\UNNNNNNNN, except those in `keep`."""
    return "".join(
        char if char in keep or unicodedata.category(char) not in _HIDDEN else _escape(char) for char in text
    )


def quoted(text: str) -> list[str]:
    """Lines with a bar in front, so that no line of a model's looks like one of ours."""
    return [f"  | {visible(line, keep=chr(9))}" for line in text.split("\n")] if text else ["  | (empty)"]


def section(title: str, lines: Iterable[str]) -> list[str]:
    return [title, *lines, ""]


def _escape(char: str) -> str:
    code = ord(char)
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    if short:
        return short
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
