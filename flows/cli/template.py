"""`posttrain init`: a commented configuration, made from the fields of RunConfig."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flows.cli.settings import is_named, kind_of, sections_in
from posttrain_core.config import RunConfig, Section
from posttrain_core.errors import ConfigError

_HEAD = """\
# Configuration of a training run. Set model.path, then: posttrain run {file}
# Every other setting has its default here; what is left out keeps it. Relative paths start at the current folder.
# A setting marked (fixed) cannot be changed when a run is resumed; the others can, with --set.
"""


def init(file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("posttrain.yaml")) -> None:
    """Write a commented configuration file."""
    try:
        with file.open("x", encoding="utf-8") as output:
            output.write(template(str(file)))
    except FileExistsError:
        raise ConfigError(f"{file} exists and is not overwritten; name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    typer.echo(f"wrote {file}; set model.path in it, then: posttrain run {file}")


def template(file: str) -> str:
    """YAML text that is valid once model.path is set."""
    lines = [_HEAD.format(file=file)]
    for name, info in RunConfig.model_fields.items():
        lines += [*_field(name, info), ""]
    return "\n".join(lines)


def _field(name: str, info: FieldInfo) -> Iterator[str]:
    """One setting with the comment above it; what is absent by default is commented out."""
    if info.description:
        yield f"# {info.description}{_allowed(info)}{' (fixed)' if _is_fixed(info) else ''}"
    sections = sections_in(info.annotation)
    if not sections:
        yield f"{name}: {_yaml(info.default)}"
    elif is_named(info):
        example = sections[0]
        yield f"{name}:"
        yield f"  {kind_of(example)}:"
        yield from _indented(_section(example), "    ")
    elif info.default is None:
        yield f"# {name}:"
        yield from (f"# {line}" for line in _indented(_section(sections[0]), "  "))
    else:
        yield f"{name}:"
        yield from _indented(_section(type(info.default)), "  ")


def _section(section: type[Section]) -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield from _field(name, info)


def _indented(lines: Iterator[str], indent: str) -> Iterator[str]:
    return (indent + line for line in lines)


def _allowed(info: FieldInfo) -> str:
    kinds = [kind_of(section) for section in sections_in(info.annotation)]
    values = kinds if len(kinds) > 1 else _literals(info.annotation)
    return f" One of {', '.join(map(str, values))}." if len(values) > 1 else ""


def _literals(annotation: Any) -> list[Any]:
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def _is_fixed(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and extra.get("semantic") is True and not sections_in(info.annotation)


def _yaml(value: Any) -> str:
    if value is PydanticUndefined:
        return "null"
    if isinstance(value, str) and (not value or "\n" in value):
        return json.dumps(value)  # double-quoted, on one line
    text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()
