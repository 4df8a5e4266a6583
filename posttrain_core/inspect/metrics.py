"""Numbers of a run: per iteration from its manifests, per held-out problem from its verdicts."""

import pyarrow as pa
import pyarrow.compute as pc

from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.evaluation import Passes
from posttrain_core.records import PASS_REWARD, Outcome, Purpose

_JUDGED = [str(Outcome.SCORED), str(Outcome.TRUNCATED)]


def iteration_metrics(run: Run) -> list[dict[str, float]]:
    """Per verified iteration: its number, the metrics of its verdicts (counts by outcome, reward_mean, pass_rate) and,
    once it has been updated, of its update (loss, ...)."""
    rows: dict[int, dict[str, float]] = {}
    for stage in ("verify", "update"):
        for scope, manifest in run.manifests(run.scopes(Purpose.TRAIN, stage), stage).items():
            rows.setdefault(scope.iteration, {"iteration": scope.iteration}).update(manifest.metrics)
    return [rows[iteration] for iteration in sorted(rows)]


def held_out_passes(run: Run) -> list[Passes]:
    """Per evaluated version and held-out problem."""
    columns = ("iteration", "domain", "problem_id", "outcome", "reward")
    rows = run.rollouts(*columns, purpose=Purpose.EVAL, iteration=run.evaluations).to_table()
    judged = pc.is_in(rows["outcome"], pa.array(_JUDGED))
    passed = pc.and_(judged, pc.greater_equal(rows["reward"], PASS_REWARD))
    keys = ["iteration", "domain", "problem_id"]
    counts = (
        rows.select(keys)
        .append_column("judged", pc.cast(judged, pa.int64()))
        .append_column("passed", pc.cast(passed, pa.int64()))
        .group_by(keys)
        .aggregate([("judged", "sum"), ("passed", "sum")])
        .sort_by([(key, "ascending") for key in keys])
    )
    return [Passes(*row) for row in zip(*(counts[name].to_pylist() for name in counts.column_names), strict=True)]
