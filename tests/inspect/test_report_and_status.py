"""Reports, charts, timelines and status of a run at every point of its life."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain_core.inspect import Run, charts, open_run
from posttrain_core.inspect.report import comparison_line, report, timing_line
from posttrain_core.inspect.status import status
from posttrain_core.inspect.timeline import Interval, covered, intervals, timing


def test_report_compares_the_first_version_with_the_last(run: Run) -> None:
    found = report(run)
    assert [row["iteration"] for row in found.iterations] == [0, 1, 2, 3]
    assert found.domains == ["", "logic", "program"]
    whole = found.comparisons[0]
    assert (whole.before_version, whole.after_version, whole.num_problems) == (0, 4, 6)
    rates = {row.version: row.pass_rate for row in found.evaluations if row.domain == ""}
    assert whole.difference == pytest.approx(rates[4] - rates[0])
    assert f"{whole.difference:+.3f}" in comparison_line(whole)
    assert json.loads(json.dumps(found.as_json()))["comparisons"][0]["domain"] == ""


def test_timing_is_of_this_run(run: Run) -> None:
    found = timing(intervals(run))
    assert set(found.stages) == {"plan", "generate", "execute", "verify", "update", "publish"}
    assert found.num_processes == 1
    assert max(found.stages.values()) < found.total < 120
    assert f"{found.total:.1f} s in one process" in timing_line(found)


def test_time_between_two_starts_does_not_count() -> None:
    def at(process: str, stage: str, started: float, ended: float) -> Interval:
        return Interval(0, "train", stage, 0, "host", process, started, ended, {})

    parts = [at("a", "plan", 0, 1), at("a", "execute", 1, 4), at("a", "execute", 2, 5), at("b", "execute", 100, 102)]
    found = timing(parts)
    assert (found.total, found.num_processes) == (7, 2)
    assert found.stages == {"plan": 1, "execute": 6}
    assert covered([]) == 0


def test_terminal_chart(run: Run) -> None:
    found = report(run)
    lines = charts.terminal(found, width=72, height=16, colour=False).splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 72
    text = "\n".join(lines)
    for part in ("run r", "training reward", "held-out pass rate", "policy version", "●"):
        assert part in text
    assert "\x1b" not in text
    assert "\x1b" in charts.terminal(found, colour=True)
    nothing = replace(found, iterations=[], evaluations=[], comparisons=[])
    assert "run r" in charts.terminal(nothing, colour=False)


def test_png(run: Run, tmp_path: Path) -> None:
    from matplotlib.image import imread

    found = report(run)
    charts.png(found, tmp_path / "new" / "curve.png")
    image = imread(tmp_path / "new" / "curve.png")
    assert image.shape[:2] == (750, 1350)
    blank = replace(found, iterations=[], evaluations=[], comparisons=[])
    charts.png(blank, tmp_path / "blank.png")
    assert (imread(tmp_path / "blank.png") != image).any()
    long = replace(found, iterations=[{"iteration": k, "reward_mean": k / 20} for k in range(20)])
    charts.png(long, tmp_path / "long.png")
    assert (imread(tmp_path / "long.png") != image).any()


def test_smoothing_keeps_a_straight_line_straight() -> None:
    assert charts.smoothed([0, 1, 2, 3, 4, 5, 6]) == [1, 1.5, 2, 3, 4, 4.5, 5]


def test_status_walks_back_through_the_run(own_store: Path) -> None:
    """Take away manifests from the end: each time the run says what it has to do again."""
    found = status(open_run(str(own_store), "r"))
    assert (found.state, found.policy_version, found.num_iterations) == ("complete", 4, 4)
    assert found.evaluated == [0, 2, 4]
    assert found.metrics["iteration"] == 3
    assert {"reward_mean", "loss"} <= set(found.metrics)
    expected = [
        ("eval/manifests/iteration=00004", "verify", "eval 4", 4),
        ("eval/manifests/iteration=00004", "plan", "eval 4", 4),
        ("manifests/iteration=00003", "publish", "iteration 3", 3),
        ("manifests/iteration=00003", "update", "iteration 3", 3),
        ("manifests/iteration=00002", "publish", "iteration 2", 2),
        ("eval/manifests/iteration=00002", "verify", "eval 2", 2),
        ("manifests/iteration=00001", "publish", "iteration 1", 1),
        ("manifests/iteration=00000", "publish", "iteration 0", 0),
        ("eval/manifests/iteration=00000", "verify", "eval 0", 0),
        ("manifests/start", "publish", "start", -1),
    ]
    for folder, stage, scope, version in expected:
        (own_store / "runs/r" / folder / f"{stage}.json").unlink()
        found = status(open_run(str(own_store), "r"))
        assert (found.state, found.scope, found.stage, found.policy_version) == ("stopped", scope, stage, version)


def test_a_stop_rule_ends_the_run(own_store: Path) -> None:
    for path in own_store.glob("runs/r/manifests/iteration=0000[23]/*.json"):
        path.unlink()
    record = own_store / "runs/r/run.json"
    settings = json.loads(record.read_text())
    settings["config"]["stop"]["eval_pass_rate"] = 1e-9
    record.write_text(json.dumps(settings))
    run = open_run(str(own_store), "r")
    reached = report(run).evaluations[3].pass_rate > 0
    assert run.policy_versions[-1] == 2
    assert status(run).state == ("complete" if reached else "stopped")


def test_the_holder_is_told_while_it_lives(own_store: Path) -> None:
    lease = own_store / "runs/r/lease.json"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def held_by(host: str, pid: int) -> None:
        lease.write_text(json.dumps({"host": host, "pid": pid, "nonce": "n", "beat": 0, "since": "2030-01-01"}))

    held_by(socket.gethostname(), os.getpid())
    found = status(open_run(str(own_store), "r"))
    assert found.holder is not None
    assert (found.state, found.holder.pid, found.holder.alive) == ("running", os.getpid(), True)
    held_by(socket.gethostname(), ended.pid)
    assert status(open_run(str(own_store), "r")).holder is None
    held_by("another-host", os.getpid())
    found = status(open_run(str(own_store), "r"))
    assert found.holder is not None
    assert (found.state, found.holder.alive) == ("held", None)
