"""The reward curve, in a terminal (plotext) and as a PNG (matplotlib). Both need the extra `plots`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain_core.errors import ConfigError
from posttrain_core.inspect.evaluation import Evaluation
from posttrain_core.inspect.report import Report

# Colour-blind safe (Okabe and Ito); the first is training, the second all held-out problems.
_COLOURS = ("#9a9a9a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_CONTINUOUS = "braille"  # the marker of what is known for every iteration
_SMOOTHED_OVER = 5  # iterations, when there are enough of them


def terminal(report: Report, width: int = 80, height: int = 20, colour: bool = True) -> str:
    """Training reward by iteration and held-out pass rate by policy version, as lines of text."""
    with _needs("plotext"):
        import plotext
    figure = plotext.figure
    figure.clear()
    figure.theme("simple")
    figure.plot_size(width, height)
    points, last = list(_lines(report)), 1
    for values, label, marker in points:
        signal = figure.signal([x for x, _ in values], [y for _, y in values], marker=marker)
        signal.label(label)
        if marker == _CONTINUOUS:
            signal.lines()
        figure.draw(signal)
        last = max(last, int(values[-1][0]))
    figure.ruler("x").ticks(list(range(0, last + 1, max(1, -(-last // 8)))))
    figure.title(f"run {report.run}")
    figure.label("policy version", "x")
    return str(figure.build().string(colorless=not colour))


def png(report: Report, path: Path) -> None:
    """The same, with 95 % intervals and a line for each domain where there are several."""
    with _needs("matplotlib"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, report)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def smoothed(values: list[float]) -> list[float]:
    """Centred moving mean; shorter at the ends."""
    half = _SMOOTHED_OVER // 2
    windows = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _lines(report: Report) -> Iterator[tuple[list[tuple[float, float]], str, str]]:
    rewards = [(row["iteration"], row["reward_mean"]) for row in report.iterations if "reward_mean" in row]
    if rewards:
        yield rewards, "training reward", _CONTINUOUS
    held_out = [(float(row.version), row.pass_rate) for row in report.evaluations if row.domain == ""]
    if held_out:
        yield held_out, "held-out pass rate", "●"


def _draw(axes: Any, report: Report) -> None:
    rows = [row for row in report.iterations if "reward_mean" in row]
    steps, rewards = [row["iteration"] for row in rows], [row["reward_mean"] for row in rows]
    if len(rows) > 2 * _SMOOTHED_OVER:
        axes.plot(steps, rewards, color=_COLOURS[0], alpha=0.35, linewidth=1)
        axes.plot(steps, smoothed(rewards), color=_COLOURS[0], linewidth=2, label="training reward (moving mean)")
    elif rows:
        axes.plot(steps, rewards, color=_COLOURS[0], linewidth=1.5, marker=".", label="training reward")
    for number, domain in enumerate(report.domains):
        found = [row for row in report.evaluations if row.domain == domain]
        _draw_held_out(axes, found, _COLOURS[1 + number % (len(_COLOURS) - 1)], offset=0.06 * number)
    low = min([0.0, *rewards])
    axes.set(xlabel="policy version", ylabel="reward, pass rate", ylim=(low - 0.02, max([1.0, *rewards]) + 0.02))
    axes.set_title(f"run {report.run}", loc="left", fontweight="bold")
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_held_out(axes: Any, found: list[Evaluation], colour: str, offset: float) -> None:
    main = found[0].domain == ""
    axes.errorbar(
        [row.version + offset for row in found],
        [row.pass_rate for row in found],
        yerr=[[row.pass_rate - row.low for row in found], [row.high - row.pass_rate for row in found]],
        color=colour,
        linewidth=2.2 if main else 1.3,
        linestyle="-" if main else "--",
        marker="o",
        markersize=6 if main else 4,
        capsize=3,
        elinewidth=1,
        label=f"held-out pass rate{'' if main else f', {found[0].domain}'}" + (" (95 % interval)" if main else ""),
    )


@contextmanager
def _needs(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"drawing needs {package}: {sys.executable} -m pip install 'posttrain[plots]'") from error
