"""`posttrain doctor`: what this machine and this store offer. What can be tried is tried."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from flows.cli.options import DEFAULT_STORE, AsJson, Store
from flows.cli.output import print_json
from posttrain_core.config import VllmLaunchConfig
from posttrain_core.errors import PosttrainError, SamplerUnavailable
from posttrain_core.sampling.vllm.process import interpreter, vllm_version
from posttrain_core.store import open_store
from posttrain_core.store.probe import check_conditional_writes

_NUM_WRITERS = 8
_GIB = 1 << 30
_MIN_FREE_GIB = 0.5


class Condition(StrEnum):
    OK = "ok"
    ABSENT = "absent"  # optional, and not there
    BROKEN = "broken"  # required, and not there or not working


@dataclass(frozen=True)
class Finding:
    name: str
    condition: Condition
    detail: str
    facts: dict[str, Any] = field(default_factory=dict)


def doctor(store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Check the store, the sandbox and what is installed. Exit code 1 when something required is broken."""
    found = list(findings(store))
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        for finding in found:
            typer.echo(f"{finding.condition:7} {finding.name:13} {finding.detail}")
    if any(finding.condition is Condition.BROKEN for finding in found):
        raise typer.Exit(1)


def findings(store_url: str) -> Iterator[Finding]:
    yield _checked("store", lambda: _store(store_url))
    yield _checked("disk", lambda: _disk(store_url))
    yield _checked("sandbox", _sandbox)
    yield _package("torch", required=True, detail=_torch)
    yield _package("transformers", required=True)
    yield _package("deepspeed", required=True)
    yield _gpu()
    yield _vllm()
    yield _package("prefect", required=False, detail=_prefect)
    for name in ("reasoning-gym", "matplotlib", "plotext"):
        yield _package(name, required=False)


def _store(url: str) -> Finding:
    store = open_store(url)
    check_conditional_writes(store, _NUM_WRITERS)
    detail = f"{store.url}: writable, conditional writes work with {_NUM_WRITERS} writers at once"
    return Finding("store", Condition.OK, detail)


def _disk(url: str) -> Finding:
    places = {"temporary files": Path(tempfile.gettempdir())}
    local = open_store(url).local_path("runs")
    if local is not None:
        places["store"] = next(folder for folder in (local, *local.parents) if folder.exists())
    free = {name: shutil.disk_usage(path).free / _GIB for name, path in places.items()}
    short = [name for name, gib in free.items() if gib < _MIN_FREE_GIB]
    detail = ", ".join(f"{gib:.1f} GiB free for {name}" for name, gib in free.items())
    if short:
        return Finding("disk", Condition.BROKEN, f"{detail}; at least {_MIN_FREE_GIB} GiB is needed", dict(free))
    return Finding("disk", Condition.OK, detail, dict(free))


def _sandbox() -> Finding:
    from posttrain_core.sandbox.features import probe

    facts = probe()
    if not facts["label"]:
        return Finding("sandbox", Condition.BROKEN, str(facts["problem"]), facts)
    return Finding("sandbox", Condition.OK, f"model-written code runs in {facts['label']}", facts)


def _torch() -> str:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"{devices} CUDA device(s), {torch.get_num_threads()} CPU threads"


def _gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("gpu", Condition.ABSENT, "torch is not installed")
    if not torch.cuda.is_available():
        return Finding("gpu", Condition.ABSENT, "none that torch can use; the CPU will do for small models")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("gpu", Condition.OK, ", ".join(names))


def _vllm() -> Finding:
    try:
        python = interpreter(VllmLaunchConfig())
        found = vllm_version(python)
    except SamplerUnavailable as error:
        return Finding("vllm", Condition.ABSENT, f"{error} (not needed for the in-process sampler)")
    return Finding("vllm", Condition.OK, f"{found} in {python.parents[1]}", {"python": str(python), "version": found})


def _prefect() -> str:
    api_url = os.environ.get("PREFECT_API_URL")
    return f"server at {api_url}" if api_url else "no PREFECT_API_URL: a local server is started for a run"


def _package(name: str, required: bool, detail: Callable[[], str] | None = None) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        condition = Condition.BROKEN if required else Condition.ABSENT
        return Finding(name, condition, "not installed: pip install 'posttrain[all]'")
    more = f", {detail()}" if detail is not None else ""
    return Finding(name, Condition.OK, f"{found}{more}", {"version": found})


def _checked(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except PosttrainError as error:
        return Finding(name, Condition.BROKEN, str(error))
