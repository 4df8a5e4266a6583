"""What a run came to: its curve, its held-out pass rates, the comparison of first and last version, its time."""

from dataclasses import asdict, dataclass
from typing import Any

from posttrain_core.inspect.catalogue import Run
from posttrain_core.inspect.evaluation import Comparison, Evaluation, compare, evaluations
from posttrain_core.inspect.metrics import held_out_passes, iteration_metrics
from posttrain_core.inspect.timeline import Timing, intervals, timing


@dataclass(frozen=True)
class Report:
    """`iterations` as `metrics.iteration_metrics`; `comparisons` is empty with fewer than two evaluated versions."""

    run: str
    iterations: list[dict[str, float]]
    evaluations: list[Evaluation]
    comparisons: list[Comparison]
    timing: Timing

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def domains(self) -> list[str]:
        """ "" (all domains) first; nothing else where there is one domain."""
        return list(dict.fromkeys(row.domain for row in self.evaluations))


def report(run: Run) -> Report:
    passes = held_out_passes(run)
    versions = run.evaluations
    comparisons = compare(passes, versions[0], versions[-1]) if len(versions) > 1 else []
    return Report(run.name, iteration_metrics(run), evaluations(passes), comparisons, timing(intervals(run)))


def comparison_line(row: Comparison) -> str:
    """One sentence, as "held-out pass rate 0.31 -> 0.58: +0.27 [+0.15, +0.39] ..."."""
    where = f" ({row.domain})" if row.domain else ""
    return (
        f"held-out pass rate{where} {row.before:.3f} -> {row.after:.3f}: {row.difference:+.3f} "
        f"[{row.low:+.3f}, {row.high:+.3f}] at 95 %, versions {row.before_version} and {row.after_version}, "
        f"paired over {row.num_problems} problems"
    )


def timing_line(found: Timing) -> str:
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.stages.items())
    processes = "one process" if found.num_processes == 1 else f"{found.num_processes} processes"
    return f"{found.total:.1f} s in {processes}; seconds by stage, which overlap: {stages}"
