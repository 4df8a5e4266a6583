"""`posttrain bench`."""

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from flows.cli.config_file import load_config
from flows.cli.run import Overrides, WithPrefect, execute
from posttrain_core.config import RunConfig, VllmSamplerConfig

if TYPE_CHECKING:
    from flows.bench import Bench
    from flows.bench_engines import Engines

ENGINE_TOKENS = 64  # of each request when samplers are compared
_EXAMPLE = Path(__file__).parents[2] / "examples" / "bench.yaml"


def bench(
    config_file: Annotated[Path | None, typer.Argument(help="YAML file. Default: examples/bench.yaml.")] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations measured.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Iterations before them.")] = 2,
    price: Annotated[float, typer.Option(min=0, help="Price of the machine per hour, in any currency.")] = 0.0,
    overrides: Overrides = None,
    engines: Annotated[bool, typer.Option("--engines", help="Compare vLLM with the in-process sampler first.")] = False,
    queries: Annotated[
        bool, typer.Option("--queries", help="Measure queries over a million rollouts instead.")
    ] = False,
    prefect: WithPrefect = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure where the time of an iteration goes, in a temporary store."""
    from flows import bench as measuring

    console = Console(stderr=True)
    idle = measuring.idle_cpu_share()
    if idle < 0.9:
        console.print(f"This machine is busy ({1 - idle:.0%} of its CPU time): the numbers will be off", style="yellow")
    if queries:
        from flows.cli.bench_queries import bench_queries

        bench_queries(console, as_json)
        return
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        config = _config(config_file, overrides or [], Path(folder), warmup + iterations + 1)
        compared = None
        if engines:
            config = config.model_copy(update={"sampler": _vllm(config)})
            compared = _engines(config, Path(folder) / "engines", console)
        with measuring.peak_memory() as peak:
            began = time.time()
            execute(config, prefect, console)
        result = measuring.measure(config.store, config.run, began, warmup, price, peak.mib)
    if as_json:
        record = result.as_json() | ({"engines": compared.as_json()} if compared else {})
        typer.echo(json.dumps(record, indent=1))
        return
    if compared:
        Console().print(_engines_table(compared))
    Console().print(_table(result, price))


def _config(path: Path | None, overrides: list[str], folder: Path, iterations: int) -> RunConfig:
    """The file's settings in a temporary store, without evaluations in between."""
    if path is None and not any(override.startswith("model.path=") for override in overrides):
        from posttrain_core.learner.tiny import make_tiny_llama

        make_tiny_llama(folder / "model", seed=0, hidden_size=256, num_layers=6, num_heads=8)
        overrides = [*overrides, f"model.path={folder / 'model'}"]
    forced = [f"store={folder / 'store'}", "run=bench", f"iterations={iterations}", f"eval.every={iterations + 1}"]
    return load_config(path or _EXAMPLE, [*overrides, *forced])


def _vllm(config: RunConfig) -> VllmSamplerConfig:
    return config.sampler if isinstance(config.sampler, VllmSamplerConfig) else VllmSamplerConfig()


def _engines(config: RunConfig, scratch: Path, console: Console) -> "Engines":
    from flows import bench_engines

    scratch.mkdir()
    return bench_engines.compare(config, scratch, ENGINE_TOKENS, console.print)


def _engines_table(engines: "Engines") -> Table:
    table = Table(
        "", *(speed.sampler for speed in engines.samplers), "ratio", title="Samplers, same policy and requests"
    )
    for number, ratio in engines.ratios.items():
        rates = [f"{speed.tokens_per_second[number]:.0f} tokens/s" for speed in engines.samplers]
        table.add_row(f"{number} at once", *rates, f"{ratio:.2f}")
    table.add_row("start", *(f"{speed.start_seconds:.1f} s" for speed in engines.samplers))
    table.add_row("weight swap", *(f"{speed.swap_seconds:.2f} s" for speed in engines.samplers))
    table.add_row("memory", *(f"{speed.resident_mib:.0f} MiB" for speed in engines.samplers))
    return table


def _table(result: "Bench", price: float) -> Table:
    title = f"One iteration, mean of {result.num_iterations}: {result.iteration_seconds:.2f} s"
    table = Table(title=title, show_header=False)
    for stage in result.stages:
        table.add_row(stage.stage, f"{stage.seconds:.3f} s", f"{stage.share:.1%}")
    table.add_row("outside the stages", f"{result.outside_seconds:.3f} s", f"{result.outside_share:.1%}")
    table.add_section()
    table.add_row("rollouts/s", f"{result.rollouts_per_second:.1f}", "whole iterations")
    table.add_row("tokens/s", f"{result.generated_tokens_per_second:.0f}", "while generating")
    table.add_row("learned samples", f"{result.learned_samples_per_iteration:.0f}", "an iteration")
    table.add_row("machine time", f"{result.machine_seconds_per_sample * 1000:.2f} ms", "a learned sample")
    if price:
        table.add_row("cost", f"{result.cost_per_thousand_samples:.4f}", "a thousand learned samples")
    table.add_row("cold iteration", f"{result.cold_seconds:.1f} s", "from nothing to the first published policy")
    table.add_row("peak memory", f"{result.peak_memory_mib:.0f} MiB", "all processes; shared pages count each time")
    return table
