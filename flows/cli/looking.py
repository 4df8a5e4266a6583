"""Commands that look at runs: status, show, rollouts, sql, diff, report. They need neither Prefect nor torch."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.options import DEFAULT_STORE, AsJson, InRun, RunName, Store
from flows.cli.output import print_json, print_json_lines, print_read, print_table
from posttrain_core.errors import ConfigError
from posttrain_core.inspect import list_runs, open_run
from posttrain_core.inspect.status import Status
from posttrain_core.records import Outcome, Purpose
from posttrain_core.store import open_store

_COLUMNS = (
    "rollout_id",
    "domain",
    "outcome",
    "reward",
    "num_response_tokens",
    "execution_status",
    "flags",
    "text",
)


class SortKey(StrEnum):
    ROLLOUT = "rollout_id"
    REWARD = "reward"
    TOKENS = "num_response_tokens"
    ITERATION = "iteration"


def status(run: RunName = "", store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Show the runs of a store, or how far one run is and what comes next."""
    from posttrain_core.inspect.status import status as status_of

    if run:
        found = status_of(open_run(store, run))
        print_json(found.as_json()) if as_json else _print_status(found)
        return
    runs = [status_of(known) for known in list_runs(open_store(store))]
    if as_json:
        print_json([found.as_json() for found in runs])
    elif runs:
        _print_statuses(runs)
    else:
        typer.echo(f"no runs in {open_store(store).url}; `posttrain run` starts one, --store names another store")


def show(
    rollout: Annotated[str, typer.Argument(help="Id of the rollout, as i00004.p0007.r02.")],
    run: InRun = "",
    store: Store = DEFAULT_STORE,
    tokens: Annotated[bool, typer.Option(help="Also list the response's tokens.")] = True,
    as_json: AsJson = False,
) -> None:
    """Show one rollout: prompt, turns, execution, verdict and tokens."""
    from posttrain_core.inspect.show import rollout_record
    from posttrain_core.inspect.show import show as text_of

    opened = open_run(store, run)
    print_json(rollout_record(opened, rollout)) if as_json else typer.echo(text_of(opened, rollout, tokens))
    print_read(opened)


def rollouts(
    run: InRun = "",
    store: Store = DEFAULT_STORE,
    domain: Annotated[str, typer.Option(help="Only this domain.")] = "",
    purpose: Annotated[Purpose | None, typer.Option(help="Only those made for this.")] = None,
    iteration: Annotated[int | None, typer.Option(help="Only this iteration, or evaluated version.")] = None,
    outcome: Annotated[Outcome | None, typer.Option(help="Only this outcome.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards from here on.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only rewards up to here.")] = None,
    flag: Annotated[list[str] | None, typer.Option(help="Only with this flag. Repeatable.")] = None,
    sort: Annotated[SortKey, typer.Option(help="Order.")] = SortKey.ROLLOUT,
    descending: Annotated[bool, typer.Option("--descending", help="Largest first.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Rows at most; 0 is all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print every column, one JSON object a line.")] = False,
) -> None:
    """List rollouts with their verdicts."""
    from posttrain_core.inspect.query import pick
    from posttrain_core.inspect.tables import views

    conditions: dict[str, Any] = {
        "domain = ?": domain or None,
        "purpose = ?": purpose,
        "iteration = ?": iteration,
        "outcome = ?": outcome,
        "reward >= ?": min_reward,
        "reward <= ?": max_reward,
    }
    given = [(text, value) for text, value in conditions.items() if value is not None]
    given += [("list_contains(flags, ?)", name) for name in flag or ()]
    where = " and ".join(text for text, _ in given)
    order = f"{sort} {'desc' if descending else 'asc'} nulls last, purpose desc, rollout_id"
    columns = views()["rollouts"].schema.names if as_json else _COLUMNS
    opened = open_run(store, run)
    _print_rows(pick(opened, columns, where, [value for _, value in given], order, limit), as_json)
    print_read(opened)


def sql(
    query: Annotated[str, typer.Argument(help='As "select iteration, avg(reward) from rollouts group by all".')],
    run: InRun = "",
    store: Store = DEFAULT_STORE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Query a run with SQL (DuckDB).

    Tables: rollouts (with verdicts), executions, verdicts, samples, plan, iterations, evaluations, telemetry.
    """
    opened = open_run(store, run)
    _print_rows(opened.sql(query), as_json)
    print_read(opened)


def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="Run, or RUN@VERSION.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The other one: gains are from A to B.")],
    store: Store = DEFAULT_STORE,
    limit: Annotated[int, typer.Option(min=0, help="Gains and losses shown at most.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Compare two policies on the held-out problems that both were evaluated on.

    Without a version: the last one that both runs have evaluated.
    """
    from posttrain_core.inspect.diff import diff as diff_of

    (name_a, version_a), (name_b, version_b) = map(_run_and_version, (run_a, run_b))
    a, b = open_run(store, name_a), open_run(store, name_b)
    found = diff_of(a, b, version_a, version_b)
    if as_json:
        print_json(found.as_json())
    else:
        from flows.cli.reporting import print_diff

        print_diff(found, limit)
    print_read(a, b)


def _run_and_version(text: str) -> tuple[str, int | None]:
    name, at, version = text.partition("@")
    if at and not version.isdecimal():
        raise ConfigError(f"{text!r}: after the @ comes a policy version, as in {name}@40")
    return name, int(version) if at else None


def report(
    run: RunName = "",
    store: Store = DEFAULT_STORE,
    png: Annotated[Path | None, typer.Option(help="Also write the chart to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run came to: reward curve, held-out pass rate before and after, time."""
    from posttrain_core.inspect import charts
    from posttrain_core.inspect.report import report as report_of

    found = report_of(open_run(store, run))
    if png is not None:
        if png.suffix != ".png":
            raise ConfigError(f"--png {png}: the name must end in .png")
        charts.png(found, png)
    if as_json:
        print_json(found.as_json())
        return
    from flows.cli.reporting import print_report

    print_report(found)
    if png is not None:
        typer.echo(f"chart: {png}")


def _print_rows(found: Any, as_json: bool) -> None:
    rows = found.to_pylist(maps_as_pydicts="strict")
    if as_json:
        print_json_lines(rows)
    else:
        print_table(found.column_names, [list(row.values()) for row in rows])


def _print_statuses(runs: list[Status]) -> None:
    print_table(
        ("run", "state", "version", "of", "reward", "held-out", "created"),
        [
            (
                found.run,
                found.state,
                found.policy_version,
                found.num_iterations,
                found.metrics.get("reward_mean"),
                found.held_out_pass_rate,
                found.created,
            )
            for found in runs
        ],
    )


def _print_status(found: Status) -> None:
    typer.echo(f"run {found.run} in {found.store}: {found.state}, started {found.created}")
    typer.echo(f"  policy version {found.policy_version} of {found.num_iterations}")
    if found.metrics:
        numbers = (f"{name} {value:.4g}" for name, value in found.metrics.items() if name != "iteration")
        typer.echo(f"  iteration {found.metrics['iteration']:.0f}: {', '.join(numbers)}")
    if found.held_out_pass_rate is not None:
        typer.echo(f"  held-out pass rate of version {found.evaluated[-1]}: {found.held_out_pass_rate:.3f}")
    if found.stage:
        done = f" ({', '.join(found.done)} done)" if found.done else ""
        typer.echo(f"  next: {found.scope}, {found.stage}{done}")
    if found.holder is not None:
        doubt = "" if found.holder.alive else ", if it still lives"
        typer.echo(f"  held by process {found.holder.pid} on {found.holder.host} since {found.holder.since}{doubt}")
    elif found.stage:
        typer.echo(f"  go on with: posttrain resume {found.run} --store {found.store}")
