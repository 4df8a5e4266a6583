"""Charts as Plotly takes them, in JSON. Colours of the page (text, grid, background) are the page's own."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from posttrain_core.inspect.catalogue import STAGES
from posttrain_core.inspect.evaluation import Evaluation
from posttrain_core.view.summaries import Bar, MeanReward, PassRates, Schedule
from posttrain_core.view.text import address, label

# After Okabe and Ito: told apart by colour-blind people, on light and on dark paper; lines differ in dashes too.
_COLOURS = ("#1784cc", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_GREY = "#8a8a8a"
_DASHES = ("solid", "dash", "dot", "dashdot")
_SAME = 1e-3  # a share of its value by which a metric may change and still be drawn as constant
_FEW = 10  # steps that each have a tick
_MARKERS = ("circle", "square", "diamond", "triangle-up")
_ORDER = ("sft", "start", *STAGES)

LEARNER = {  # what the numbers of an iteration say; others come after these under their own names
    "logprob_difference_mean": "sampler and learner differ: mean |Δ log-prob|",
    "logprob_difference_max": "sampler and learner differ: largest |Δ log-prob|",
    "sampler_kl": "KL of sampler and learner",
    "ess_share": "effective share of samples",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens": "tokens learned from",
}
_ELSEWHERE = {"reward_mean", "num_steps"}


@dataclass(frozen=True)
class Figure:
    """`summary` says in words what is to be seen. `links[row][column]`: where a cell of a heat map leads."""

    title: str
    summary: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    links: list[list[str]] | None = None


def reward_figure(rows: list[MeanReward]) -> Figure:
    domains = sorted({row.domain for row in rows})
    data: list[dict[str, Any]] = []
    for number, domain in enumerate(domains):
        found = [row for row in rows if row.domain == domain]
        steps = [row.iteration for row in found]
        text = [f"{label(domain)}, iteration {row.iteration}: {_interval(row)}" for row in found]
        data += _band(steps, [row.low for row in found], [row.high for row in found], _colour(number), domain)
        data.append(_line(number, domain, steps, [row.mean for row in found], text))
    last = [f"{row.domain} {row.mean:.3f}" for row in _last_of_each(rows)]
    summary = f"Mean reward by iteration; last: {', '.join(last)}." if last else "No iteration is verified yet."
    return Figure(
        "Training reward by iteration",
        summary,
        data,
        _axes("iteration", "mean reward", {row.iteration for row in rows}),
    )


def held_out_figure(rows: list[Evaluation]) -> Figure:
    domains = sorted({row.domain for row in rows})
    data: list[dict[str, Any]] = []
    for number, domain in enumerate(domains):
        found = [row for row in rows if row.domain == domain]
        steps = [row.version for row in found]
        name = domain or "all domains"
        text = [
            f"{label(name)}, version {row.version}: {row.pass_rate:.3f} [{row.low:.3f}, {row.high:.3f}], "
            f"{row.num_rollouts} rollouts of {row.num_problems} problems"
            for row in found
        ]
        place = number - 1 if len(domains) > 1 else number  # a domain has one colour in both charts
        data += _band(steps, [row.low for row in found], [row.high for row in found], _colour(place), name)
        data.append(_line(place, name, steps, [row.pass_rate for row in found], text))
    last = [f"{row.domain or 'all domains'} {row.pass_rate:.3f}" for row in rows if row.version == rows[-1].version]
    summary = f"Held-out pass rate by policy version; last: {', '.join(last)}." if last else "Nothing is evaluated yet."
    layout = _axes("policy version", "pass rate", {row.version for row in rows})
    layout["yaxis"] |= {"range": [-0.02, 1.02]}
    return Figure("Held-out pass rate by policy version", summary, data, layout)


def heat_map(run: str, found: PassRates, purpose: str) -> Figure:
    steps = [str(iteration) for iteration in found.iterations]
    word = "iteration" if purpose == "train" else "version"
    text = [
        [
            "" if cell is None else f"{label(problem)}<br>{word} {step}: {cell[0]:.0%} of {cell[1]} passed"
            for step, cell in zip(steps, row, strict=True)
        ]
        for problem, row in zip(found.problems, found.cells, strict=True)
    ]
    data = {
        "type": "heatmap",
        "x": steps,
        "y": list(range(len(found.problems))),
        "z": [[None if cell is None else cell[0] for cell in row] for row in found.cells],
        "text": text,
        "hoverinfo": "text",
        "hoverongaps": False,
        "colorscale": "Cividis",
        "zmin": 0,
        "zmax": 1,
        "xgap": 1,
        "ygap": 1,
        "colorbar": {
            "title": {"text": "pass rate", "side": "right"},
            "thickness": 10,
            "outlinewidth": 0,
            "tickformat": ".0%",
            "lenmode": "pixels",
            "len": 190,
            "y": 1,
            "yanchor": "top",
        },
    }
    layout = _axes("iteration" if purpose == "train" else "policy version", "")
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False, "automargin": True}
    names = [label(_short(problem)) for problem in found.problems]
    layout["yaxis"] |= {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names}
    layout["height"] = 130 + 16 * max(8, len(found.problems))
    links = [
        [
            address("runs", run, "rollouts", purpose=purpose, iteration=step, problem=problem)
            for step in found.iterations
        ]
        for problem in found.problems
    ]
    summary = f"{len(found.problems)} problems in {len(steps)} {word}s." if steps else "Nothing is judged yet."
    return Figure(
        f"{'Training' if purpose == 'train' else 'Held-out'} problems", summary, [data] if steps else [], layout, links
    )


def timeline_figure(found: Schedule) -> Figure:
    names = sorted({bar.interval.stage for bar in found.bars if bar.interval is not None}, key=_stage_place)
    data = [_bars("idle", found.idle, _GREY, "/")] if found.bars else []
    for name in reversed(names):
        bars = [bar for bar in found.bars if bar.interval is not None and bar.interval.stage == name]
        data.append(_bars(name, bars, _colour(_stage_place(name)), ""))
    layout = _axes("seconds", "")
    layout |= {"barmode": "overlay", "showlegend": False, "height": 110 + 34 * (len(names) + 1), "bargap": 0.25}
    layout["yaxis"] |= {"type": "category", "automargin": True, "showgrid": False}
    layout["xaxis"] |= {"range": [0, max(found.seconds, 1e-3)]}
    layout["shapes"] = [
        {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 1, "dash": "dot"}}
        for at, _ in found.stops
    ]
    layout["annotations"] = [
        {"x": at, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "text": f"stopped {_time(cut)}"}
        for at, cut in found.stops
    ]
    idle = sum(bar.seconds for bar in found.idle)
    summary = f"{_time(found.seconds)} of work, {_time(idle)} of it idle." if found.bars else "No telemetry."
    return Figure("Stage timeline", summary, data, layout)


def time_figure(found: Schedule) -> Figure:
    shares = found.shares() if found.bars else {}
    names = sorted(shares, key=_stage_place, reverse=True)
    total = found.seconds or 1.0
    data = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": [shares[name] for name in names],
        "text": [f"{_time(shares[name])} ({shares[name] / total:.0%})" for name in names],
        "textposition": "outside",
        "cliponaxis": False,
        "hoverinfo": "skip",
        "marker": {
            "color": [_GREY if name == "idle" else _colour(_stage_place(name)) for name in names],
            "pattern": {"shape": ["/" if name == "idle" else "" for name in names]},
        },
    }
    layout = _axes("seconds", "") | {"height": 110 + 30 * max(1, len(names)), "showlegend": False}
    layout["xaxis"] |= {"range": [0, 1.35 * max([*shares.values(), 1e-3])]}  # room for the words
    layout["yaxis"] |= {"type": "category", "automargin": True, "showgrid": False}
    parts = [f"{name} {_time(shares[name])}" for name in reversed(names)]
    summary = f"Of {_time(total)}: {', '.join(parts)}. Stages overlap." if names else "No telemetry."
    return Figure("Where the time went", summary, [data] if names else [], layout)


def metric_figures(series: dict[str, list[tuple[int, float]]]) -> list[Figure]:
    names = [name for name in LEARNER if name in series]
    names += [name for name in series if name not in LEARNER and name not in _ELSEWHERE]
    return [_metric(LEARNER.get(name, name.replace("_", " ")), series[name]) for name in names]


def _metric(title: str, points: list[tuple[int, float]]) -> Figure:
    steps, values = [step for step, _ in points], [value for _, value in points]
    text = [f"iteration {step}: {value:.6g}" for step, value in points]
    line = _line(0, title, steps, values, text)
    layout = _axes("iteration", "", steps) | {"height": 190, "showlegend": False}
    layout["yaxis"] |= {"exponentformat": "e", "minexponent": 4, "nticks": 5, "automargin": True}
    if max(values) - min(values) <= _SAME * abs(values[-1]):  # else its noise would fill the chart
        layout["yaxis"] |= {"range": sorted([0, 2 * values[-1]]) if values[-1] else [-1, 1]}
    return Figure(label(title), f"last: {values[-1]:.4g}", [line], layout)


def _line(number: int, name: str, x: list[int], y: list[float], text: list[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 60 else "lines",
        "name": label(name),
        "x": x,
        "y": y,
        "text": text,
        "hoverinfo": "text",
        "line": {"color": _colour(number), "width": 2, "dash": _DASHES[number % len(_DASHES)]},
        "marker": {"size": 6, "symbol": _MARKERS[number % len(_MARKERS)]},
    }


def _band(
    x: list[int], low: list[float | None], high: list[float | None], colour: str, name: str
) -> list[dict[str, Any]]:
    """A closed shape around the steps that have an interval."""
    known = [(step, a, b) for step, a, b in zip(x, low, high, strict=True) if a is not None and b is not None]
    if len(known) < 2:
        return []
    steps = [step for step, _, _ in known]
    shape = {
        "type": "scatter",
        "mode": "lines",
        "name": f"{label(name)}, 95 % interval",
        "x": steps + steps[::-1],
        "y": [a for _, a, _ in known] + [b for _, _, b in known][::-1],
        "fill": "toself",
        "fillcolor": _faint(colour),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return [shape]


def _bars(name: str, bars: list[Bar], colour: str, pattern: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [name] * len(bars),
        "base": [bar.start for bar in bars],
        "x": [bar.seconds for bar in bars],
        "hovertext": [_describe(bar) for bar in bars],
        "hoverinfo": "text",
        "marker": {
            "color": colour,
            "opacity": [0.55 if bar.interval and bar.interval.purpose != "train" else 1.0 for bar in bars],
            "pattern": {"shape": pattern},
            "line": {"width": 0},
        },
    }


def _describe(bar: Bar) -> str:
    each = bar.interval
    if each is None:
        return f"nothing was computed: {_time(bar.seconds)}"
    scope = f"{'iteration' if each.purpose == 'train' else label(each.purpose)} {each.iteration}"
    return f"{label(each.stage)}, {scope}, shard {each.shard}<br>{_time(bar.seconds)} on {label(each.host)}"


def _axes(x: str, y: str, steps: Collection[int] = ()) -> dict[str, Any]:
    """`steps`: the iterations or versions along x, which have nothing between them."""
    few = {"tick0": 0, "dtick": 1} if steps and max(steps) - min(steps) < _FEW else {}
    return {
        "xaxis": {"title": {"text": x}, "zeroline": False} | few,
        "yaxis": {"title": {"text": y}, "zeroline": False},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"l": 48, "r": 12, "t": 28, "b": 44},
        "hovermode": "closest",
        "height": 320,
        "uirevision": "keep",
    }


def _interval(row: MeanReward) -> str:
    interval = "" if row.low is None else f" [{row.low:.3f}, {row.high:.3f}]"
    return f"{row.mean:.3f}{interval}, {row.num_groups} groups"


def _last_of_each(rows: list[MeanReward]) -> list[MeanReward]:
    return list({row.domain: row for row in rows}.values())


def _stage_place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _colour(number: int) -> str:
    """Of a domain or stage; -1 is what is about all of them, or none."""
    return _GREY if number < 0 else _COLOURS[number % len(_COLOURS)]


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:11]}…{text[-12:]}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
