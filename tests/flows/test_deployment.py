"""`prefect.yaml` deploys both flows to a real local server; the CLI and Prefect start them; a worker executes them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.server import local_server, prefect_environment
from posttrain_core.inspect.catalogue import open_run
from tests.crash.test_kills import scripted

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a client of a server with both flows deployed."""
    home = tmp_path_factory.mktemp("prefect")
    with local_server(home) as url:
        environment = {**os.environ, **prefect_environment(home, url)}
        call(environment, BIN / "prefect", "--no-prompt", "work-pool", "create", "posttrain", "--type", "process")
        call(environment, BIN / "prefect", "--no-prompt", "deploy", "--all")
        yield environment


def call(environment: dict[str, str], *command: str | Path) -> str:
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_both_ways_to_start_a_deployment(tmp_path: Path, environment: dict[str, str]) -> None:
    config = scripted(tmp_path, iterations=2)
    config_file = tmp_path / "config.yaml"
    config_file.write_text(config.model_dump_json())  # JSON is YAML
    call(environment, BIN / "posttrain", "run", str(config_file), "--deployment", "train/default")
    work(environment)
    assert open_run(str(tmp_path), "r").policy_versions == [0, 1, 2]

    longer = f"config={config.model_copy(update={'iterations': 3}).model_dump_json()}"
    call(
        environment,
        BIN / "prefect",
        "deployment",
        "run",
        "iterate/default",
        "--param",
        longer,
        "--param",
        "iteration=2",
    )
    work(environment)
    assert open_run(str(tmp_path), "r").policy_versions == [0, 1, 2, 3]


def test_parameters_are_checked_and_schedules_paused(environment: dict[str, str]) -> None:
    deployment = json.loads(
        call(environment, BIN / "prefect", "deployment", "inspect", "train/default", "--output", "json")
    )
    schema = deployment["parameter_openapi_schema"]
    assert "group_size" in schema["definitions"]["PlanConfig"]["properties"]
    assert [schedule["active"] for schedule in deployment["schedules"]] == [False]


def work(environment: dict[str, str]) -> None:
    """Execute what is scheduled."""
    call(environment, BIN / "prefect", "worker", "start", "--pool", "posttrain", "--run-once", "--limit", "1")
