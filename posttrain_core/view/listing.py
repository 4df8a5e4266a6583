"""The list of rollouts: filters as they stand in an address, and the rows of a page."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from posttrain_core.errors import ConfigError
from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.query import pick, sql
from posttrain_core.records import Outcome, Purpose

PAGE = 50  # rows
ORDERS = {
    "planned": ("as planned", "iteration, purpose desc, rollout_id"),
    "lowest": ("lowest reward", "reward nulls last, iteration desc, rollout_id"),
    "highest": ("highest reward", "reward desc nulls last, iteration desc, rollout_id"),
    "longest": ("longest", "num_response_tokens desc, rollout_id"),
    "shortest": ("shortest", "num_response_tokens, rollout_id"),
}
COLUMNS = (
    "rollout_id",
    "iteration",
    "purpose",
    "domain",
    "problem_id",
    "outcome",
    "reward",
    "num_response_tokens",
    "execution_status",
    "flags",
    "text",
)


@dataclass(frozen=True)
class Filters:
    """None and "" admit everything. `order` is a key of ORDERS."""

    purpose: str = ""
    iteration: int | None = None
    domain: str = ""
    problem: str = ""
    outcome: str = ""
    low: float | None = None
    high: float | None = None
    text: str = ""
    order: str = "planned"

    @property
    def given(self) -> dict[str, Any]:
        """As an address has them."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @property
    def condition(self) -> tuple[str, list[Any]]:
        """As SQL, with its parameters."""
        parts: dict[str, Any] = {
            "iteration = ?": self.iteration,
            "purpose = ?": self.purpose or None,
            "domain = ?": self.domain or None,
            "problem_id = ?": self.problem or None,
            "outcome = ?": self.outcome or None,
            "reward >= ?": self.low,
            "reward <= ?": self.high,
            "contains(lower(text), lower(?))": self.text or None,
        }
        given = {part: value for part, value in parts.items() if value is not None}
        return " and ".join(given), list(given.values())


def parse_filters(query: Mapping[str, str]) -> Filters:
    """ConfigError names the field that is wrong."""
    found = {name: value for name in Filters.__dataclass_fields__ if (value := query.get(name, "").strip())}
    for name, kind in (("iteration", int), ("low", float), ("high", float)):
        if name in found:
            found[name] = _number(name, found[name], kind)  # type: ignore[assignment]
    for name, known in (("purpose", Purpose), ("outcome", Outcome), ("order", ORDERS)):
        if found.get(name, next(iter(known))) not in list(known):
            raise ConfigError(f"{name} {found[name]!r}: it is one of {', '.join(known)}")
    return replace(Filters(), **found)  # type: ignore[arg-type]


def count(run: Run, filters: Filters) -> int:
    where, parameters = filters.condition
    found = sql(run, f"select count(*) as num from rollouts {'where' if where else ''} {where}", parameters)
    return int(found["num"][0].as_py())


def page(run: Run, filters: Filters, start: int) -> list[dict[str, Any]]:
    """At most PAGE rows from place `start` on."""
    where, parameters = filters.condition
    found = pick(run, COLUMNS, where, parameters, ORDERS[filters.order][1], PAGE, start)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def place_of(run: Run, rollout_id: str, filters: Filters) -> int:
    """Where a rollout stands among those of its own iteration, as planned."""
    query = "select count(*) as num from rollouts where iteration = ? and purpose = ? and rollout_id < ?"
    return int(sql(run, query, [filters.iteration, filters.purpose, rollout_id])["num"][0].as_py())


def neighbours(run: Run, filters: Filters, place: int) -> tuple[str, str]:
    """The ids before and after a place of the list; "" at its ends."""
    where, parameters = filters.condition
    first = max(0, place - 1)
    query = f"select rollout_id from rollouts {'where' if where else ''} {where} order by {ORDERS[filters.order][1]}"
    ids = sql(run, f"{query} limit {place + 2 - first} offset {first}", parameters)["rollout_id"].to_pylist()
    here = place - first
    return ids[here - 1] if here else "", ids[here + 1] if len(ids) > here + 1 else ""


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r}: it is a number") from None
