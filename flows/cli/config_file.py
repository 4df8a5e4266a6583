"""From a YAML file and `--set a.b=c` to a RunConfig, or to one message that names everything that is wrong.

Relative paths in it (model.path, store) are relative to the folder in which the command runs, not to the file.
"""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flows.cli.settings import kind_of, section_at, sections_in, suggestion
from posttrain_core.config import RunConfig, Section
from posttrain_core.errors import ConfigError
from posttrain_core.learner.presets import resolve


def load_config(path: Path | None, overrides: Sequence[str] = (), base: RunConfig | None = None) -> RunConfig:
    """The settings of `base` (none by default), of the file over them, of the overrides (`a.b=c`) over those.

    Raises ConfigError: with the line for YAML that cannot be read; else for each wrong setting its path, what was
    given, what is allowed, and for an unknown one the nearest that is known.
    """
    data = base.model_dump(mode="json") if base is not None else {}
    if path is not None:
        data |= _read(path)
    for override in overrides:
        _apply(data, override)
    _complete_types(data)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        problems = [_problem(dict(problem), data) for problem in error.errors()]
        count = "one setting is" if len(problems) == 1 else f"{len(problems)} settings are"
        source = f"{path}: " if path is not None else ""
        raise ConfigError(f"{source}{count} wrong\n  " + "\n  ".join(problems)) from error
    resolve(config.algorithm)  # refuses settings without effect
    return config


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML's own rule is that the last one counts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; `posttrain init {path}` writes a new one") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_where(error)} cannot be read as YAML: {_cause(error)}") from error
    return _mapping(data, str(path))


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one value in place."""
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"--set {override!r}: it must look like plan.group_size=16")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value cannot be read as YAML: {_cause(error)}") from error
    for depth, key in enumerate(path[:-1]):
        inner = data.get(key)
        data[key] = _mapping(inner, ".".join(path[: depth + 1]))
        data = data[key]
    data[path[-1]] = value


def _mapping(value: Any, where: str) -> dict[str, Any]:
    """A copy of a mapping; an empty one for nothing."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}: a mapping of settings is expected there")
    return dict(value)


def _complete_types(data: dict[str, Any]) -> None:
    """A section whose `type` is not given is of the default type."""
    for name, info in RunConfig.model_fields.items():
        default, given = info.default, data.get(name)
        if isinstance(default, Section) and "type" in type(default).model_fields and isinstance(given, dict):
            data[name] = {"type": getattr(default, "type", None)} | given


def _problem(problem: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """One line about one error of pydantic's."""
    path = _path(problem["loc"], data)
    name, kind, context = ".".join(path), problem["type"], problem.get("ctx", {})
    section = section_at(path, data) if path else None
    if kind == "extra_forbidden" and section is not None:
        return f"{name}: there is no such setting; {suggestion(path[-1], section)}"
    if kind == "missing":
        return f"{name}: missing{_described(section, path)}"
    if kind == "union_tag_not_found":
        return f"{name}.type: missing; choose one of {_choices(path)}"
    if kind == "union_tag_invalid":
        return f"{name}.type is {context['tag']!r}; allowed: {context['expected_tags']}"
    if kind == "value_error" or not path:
        return str(problem["msg"]).removeprefix("Value error, ")
    if kind == "literal_error":
        allowed = context["expected"]
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        allowed = "a mapping of settings"
    else:
        allowed = str(problem["msg"]).partition(", unable")[0].removeprefix("Input should be ")
    return f"{name} is {problem['input']!r}; allowed: {allowed[0].lower()}{allowed[1:]}"


def _path(place: Sequence[str | int], data: Any) -> tuple[str, ...]:
    """Where the error is in the data: pydantic's place without the tags that it puts after a choice by `type`."""
    path: list[str] = []
    for depth, name in enumerate(place):
        is_mapping = isinstance(data, Mapping)
        if is_mapping and name not in data and name == data.get("type") and depth < len(place) - 1:
            continue
        path.append(str(name))
        data = data.get(name) if is_mapping else None
    return tuple(path)


def _described(section: type[Section] | None, path: tuple[str, ...]) -> str:
    info = section.model_fields.get(path[-1]) if section is not None else None
    return f"; it is needed: {info.description}" if info is not None and info.description else ""


def _choices(path: tuple[str, ...]) -> str:
    info = RunConfig.model_fields[path[0]]
    return ", ".join(kind_of(section) for section in sections_in(info.annotation))


def _where(error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _cause(error: yaml.YAMLError) -> str:
    return str(error.problem if isinstance(error, yaml.MarkedYAMLError) and error.problem else error)
