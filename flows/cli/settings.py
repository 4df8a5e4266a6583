"""The settings of `RunConfig` by their paths: what there is, and what is allowed."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic.fields import FieldInfo

from posttrain_core.config import RunConfig, Section

NAME = "NAME"  # stands for the names that a user gives, as of domains


def sections_in(annotation: Any) -> list[type[Section]]:
    """The sections that a field's type mentions: several where `type` chooses one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def is_named(info: FieldInfo) -> bool:
    """Whether the field maps names to sections."""
    return getattr(info.annotation, "__origin__", None) is dict and bool(sections_in(info.annotation))


def kind_of(section: type[Section]) -> str:
    """What `type` has to be to choose this section; "" where there is no choice."""
    info = section.model_fields.get("type")
    return str(get_args(info.annotation)[0]) if info and get_args(info.annotation) else ""


def chosen(info: FieldInfo, value: Any) -> type[Section] | None:
    """The section that a value for the field is meant to be."""
    sections = sections_in(info.annotation)
    kind = value.get("type") if isinstance(value, Mapping) else None
    return next((section for section in sections if kind_of(section) == kind), sections[0] if sections else None)


def section_at(path: tuple[str, ...], data: Any) -> type[Section] | None:
    """The section that holds the last name of a path into the data of a configuration; None where it is no section."""
    section: type[Section] | None = RunConfig
    names = list(path[:-1])
    while names and section is not None:
        name = names.pop(0)
        info = section.model_fields.get(name)
        if info is None:
            return None
        data = data.get(name) if isinstance(data, Mapping) else None
        if is_named(info):
            if not names:
                return None
            given = names.pop(0)
            data = data.get(given) if isinstance(data, Mapping) else None
        section = chosen(info, data)
    return section


def all_paths(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every setting's path, as plan.group_size."""
    for name, info in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for inner in sections_in(info.annotation):
            yield from all_paths(inner, f"{path}.{NAME}." if is_named(info) else f"{path}.")


def suggestion(name: str, section: type[Section]) -> str:
    """What may have been meant by an unknown name: a setting of the section, or one elsewhere."""
    nearest = get_close_matches(name, section.model_fields, n=1)
    if nearest:
        return f"did you mean {nearest[0]}?"
    elsewhere = [path for path in dict.fromkeys(all_paths()) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"allowed: {', '.join(section.model_fields)}"
