"""Rows as an aligned table or as JSON lines; nothing that a model wrote reaches the terminal unescaped."""

import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import typer

from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.text import visible

_GAP = "  "
_MIN_WIDTH = 8  # a column is not made narrower than this to fit the terminal


def print_json(value: Any) -> None:
    typer.echo(json.dumps(plain(value), indent=1))


def print_json_lines(rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        typer.echo(json.dumps(plain(row)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Cut to the width of the terminal, if it is one."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table(columns, rows, width):
        typer.echo(line)


def print_read(*runs: Run) -> None:
    """On standard error: what looking at the runs has read of their stores."""
    num_bytes = sum(run.store.num_bytes for run in runs)
    num_requests = sum(run.store.num_requests for run in runs)
    typer.echo(f"read {_size(num_bytes)} in {num_requests} requests", err=True)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes < 1 << 20 else f"{num_bytes / (1 << 20):.1f} MiB"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], width: int | None = None) -> list[str]:
    """Lines of at most `width` characters; numbers are right-aligned, the widest columns are cut first."""
    if not columns:
        return []
    rows = [list(row) for row in rows]
    cells = [list(columns), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    while width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width and max(widths) > _MIN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    right = [_all_numbers(row[place] for row in rows) for place in range(len(columns))]
    return [_GAP.join(map(_fit, row, widths, right)).rstrip() for row in cells]


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str | int):
        return visible(str(value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return visible(json.dumps(plain(value), ensure_ascii=False))


def plain(value: Any) -> Any:
    """As JSON has it: decimals are numbers, dates are text, what is not a finite number is null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, str | int) else str(value)


def _fit(text: str, width: int, right: bool) -> str:
    text = text if len(text) <= width else text[: width - 1] + "…"
    return text.rjust(width) if right else text.ljust(width)


def _all_numbers(values: Iterable[Any]) -> bool:
    return all(
        value is None or (isinstance(value, int | float | Decimal) and not isinstance(value, bool)) for value in values
    )
