"""`posttrain bench`: where the time of an iteration goes, measured on a run of its own in a temporary store."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from posttrain_core.inspect.catalogue import open_run
from posttrain_core.inspect.timeline import Interval, covered, intervals

STAGES = ("plan", "generate", "execute", "verify", "update", "publish")
_PAGE = resource.getpagesize()


@dataclass(frozen=True)
class StageTime:
    """Seconds of an iteration (mean over the measured ones) in which the stage was computing."""

    stage: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Bench:
    """Means over the measured iterations; `outside_share` is wall time in which none of the six stages computed."""

    num_iterations: int
    cold_seconds: float  # from the start of the services to the first published policy
    iteration_seconds: float
    stages: list[StageTime]
    outside_seconds: float
    outside_share: float
    rollouts_per_second: float
    generated_tokens_per_second: float  # while generating
    learned_samples_per_iteration: float
    machine_seconds_per_sample: float
    cost_per_thousand_samples: float
    peak_memory_mib: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def measure(store: str, run: str, began: float, warmup: int, price_per_hour: float, peak_memory_mib: float) -> Bench:
    """From the telemetry of a finished run that began at the time `began` (as time.time gives it). The first `warmup`
    iterations and the last one are left out: an iteration lasts until the next one's plan begins, so whatever lies
    between two iterations counts."""
    train = [interval for interval in intervals(open_run(store, run)) if interval.purpose == "train"]
    plans = {i.iteration: i.started for i in train if i.stage == "plan"}
    first, last = warmup, max(plans)
    if last <= first:
        raise ValueError(f"{len(plans)} iterations are too few to measure with {warmup} of them as warm-up")
    chosen = [i for i in train if first <= i.iteration < last and i.stage in STAGES]
    wall, num = plans[last] - plans[first], last - first
    seconds = {stage: covered(i for i in chosen if i.stage == stage) for stage in STAGES}
    outside = wall - covered(chosen)
    samples = _total(chosen, "update", "samples")
    return Bench(
        num_iterations=num,
        cold_seconds=max(i.ended for i in train if i.iteration == 0 and i.stage == "publish") - began,
        iteration_seconds=wall / num,
        stages=[StageTime(stage, seconds[stage] / num, seconds[stage] / wall) for stage in STAGES],
        outside_seconds=outside / num,
        outside_share=outside / wall,
        rollouts_per_second=_total(chosen, "generate", "rollouts") / wall,
        generated_tokens_per_second=_total(chosen, "generate", "tokens") / (seconds["generate"] or 1.0),
        learned_samples_per_iteration=samples / num,
        machine_seconds_per_sample=wall / samples if samples else 0.0,
        cost_per_thousand_samples=1000 * wall / samples * price_per_hour / 3600 if samples else 0.0,
        peak_memory_mib=peak_memory_mib,
    )


def _total(chosen: list[Interval], stage: str, fact: str) -> float:
    return float(sum(interval.facts.get(fact, 0) for interval in chosen if interval.stage == stage))


class PeakMemory:
    """Highest resident memory of this process and its descendants together, sampled; shared pages count each time."""

    mib: float = 0.0


@contextmanager
def peak_memory(every_seconds: float = 0.25) -> Iterator[PeakMemory]:
    peak, stop = PeakMemory(), threading.Event()

    def sample() -> None:
        while not stop.wait(every_seconds):
            peak.mib = max(peak.mib, tree_resident_bytes(os.getpid()) / 2**20)

    thread = threading.Thread(target=sample, name="peak-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def tree_resident_bytes(root: int) -> int:
    """Resident memory of a process and its descendants, from /proc."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                resident[int(entry.name)] = int((entry / "statm").read_text().split()[1]) * _PAGE
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        total += resident.get(pid, 0)
        todo += children.get(pid, [])
    return total


def idle_cpu_share(seconds: float = 1.0) -> float:
    """Share of the machine's CPU time that was idle: a busy machine makes the numbers worthless."""

    def read() -> tuple[int, int]:
        fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return fields[3], sum(fields)

    idle, total = read()
    time.sleep(seconds)
    later_idle, later_total = read()
    return (later_idle - idle) / max(1, later_total - total)
