"""What a flow run shows in the Prefect UI: how to look at the run, a table and a line of bars after each iteration, the
curve as a picture at the end."""

import base64
import os
import shlex
import tempfile
from pathlib import Path
from urllib.parse import quote

from prefect.artifacts import create_image_artifact, create_markdown_artifact

from posttrain_core.errors import ConfigError
from posttrain_core.inspect import catalogue, charts
from posttrain_core.inspect.report import report
from posttrain_core.layout import Scope
from posttrain_core.stages.context import Run

VIEW_URL = "POSTTRAIN_VIEW_URL"  # the address of a viewer that everybody who reads the UI can reach

_BARS = "▁▂▃▄▅▆▇█"
_WINDOW = 40  # iterations in the sparkline


def view_artifact(run: Run) -> None:
    """Where this run can be looked at."""
    create_markdown_artifact(f"**{run.name}**: {view_line(run)}\n", key=artifact_key(run.name, "view"))


def view_line(run: Run) -> str:
    """The command that shows the run; a link before it where `VIEW_URL` says where a viewer is."""
    command = f"`posttrain view {shlex.quote(run.store.url)}`"
    base = os.environ.get(VIEW_URL, "").strip().rstrip("/")
    return f"[open in the viewer]({base}/runs/{quote(run.name, safe='')}), or {command}" if base else command


def iteration_artifact(run: Run, iteration: int) -> None:
    """A markdown table of one iteration's numbers."""
    create_markdown_artifact(iteration_markdown(run, iteration), key=artifact_key(run.name, "iteration"))


def curve_artifact(run: Run) -> None:
    """The reward curve as a picture inside its own link; nothing where the plotting library is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curve.png"
        try:
            charts.png(report(catalogue.Run(run.store, run.name)), path)
        except ConfigError:
            return
        picture = base64.b64encode(path.read_bytes()).decode()
    create_image_artifact(f"data:image/png;base64,{picture}", artifact_key(run.name, "curve"), "Reward by iteration")


def iteration_markdown(run: Run, iteration: int) -> str:
    """Counts and metrics of an iteration, with the rewards up to it as a line of bars."""
    first = max(0, iteration + 1 - _WINDOW)
    verdicts = [run.manifest(Scope(number), "verify").metrics for number in range(first, iteration + 1)]
    rewards = [metrics.get("reward_mean", 0.0) for metrics in verdicts]
    numbers = {**verdicts[-1], **run.manifest(Scope(iteration), "update").metrics}
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in numbers.items())
    head = f"**{run.name}, iteration {iteration}**\n\nReward: `{sparkline(rewards)}`\n\nLook at it: {view_line(run)}"
    return f"{head}\n\n| metric | value |\n|---|---|\n{rows}\n"


def sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((value - low) / step)] for value in values)


def artifact_key(run: str, kind: str) -> str:
    """Prefect allows lower-case letters, digits and dashes."""
    name = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in run.lower())
    return f"{name}-{kind}"
