"""The local Prefect server: started by the first command that needs one, shared by the next, gone with the last.

    <home>/prefect.db, server.log      what the server keeps
    <home>/server.json                 pid, start time and port of the server that runs
    <home>/users.lock                  shared lock of every user; see `server_process.py`

Nothing here imports Prefect: its settings are read from the environment at import, so set that first.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from posttrain_core.errors import PosttrainError

HOST = "127.0.0.1"
START_TIMEOUT_SECONDS = 180.0
STOP_TIMEOUT_SECONDS = 10.0
LOG_TAIL_CHARACTERS = 2000

# Everything in Prefect 3.9 that would call out by itself: SDK analytics (amplitude), the server's heartbeat to
# sens-o-matic, the UI's V2 page and banners. Values that the user has set win.
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Read and written in batches, a task run costs the server 10 ms of CPU instead of 20, and a stop loses none of them.
BATCHES = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
}
SERVER_SETTINGS = {
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
}


class PrefectServerUnavailable(PosttrainError):
    """No local Prefect server can be had. The pipeline does not need one: run it without Prefect."""

    exit_code = 10


def configured_api_url() -> str | None:
    """PREFECT_API_URL of the environment or of the active Prefect profile; None where neither sets it."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active"))
    url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return str(url) if url else None


def prefect_environment(home: Path, api_url: str) -> dict[str, str]:
    """What a process sets before it imports Prefect, so that it talks to `api_url` and to nothing else."""
    environment = {name: os.environ.get(name, value) for name, value in QUIET.items()}
    environment["PREFECT_API_URL"] = api_url
    if api_url != configured_api_url():  # ours: independent of the user's profiles, and never through a proxy
        environment["PREFECT_HOME"] = str(home.absolute())
        # A server on this machine answers or is gone; the default waits a minute for each call before it gives up.
        environment["PREFECT_CLIENT_MAX_RETRIES"] = os.environ.get("PREFECT_CLIENT_MAX_RETRIES", "2")
        environment["NO_PROXY"] = environment["no_proxy"] = ",".join(
            filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), HOST])
        )
    return environment


@contextmanager
def local_server(home: Path) -> Iterator[str]:
    """The API URL of a Prefect server: the configured one, or a local one that stays healthy for the block."""
    server = LocalServer(home)
    try:
        server.begin()
        yield server.wait_ready()
    finally:
        server.close()


@dataclass(frozen=True)
class ServerState:
    """Identity of a running server: a pid may be used again, together with its start time it is unique until reboot."""

    pid: int
    start_time: int  # clock ticks since boot
    port: int

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self.port}/api"

    def alive(self) -> bool:
        return process_start_time(self.pid) == self.start_time


def process_start_time(pid: int) -> int | None:
    """From /proc; None when the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class LocalServer:
    """One use of the server: `begin` (returns at once), `wait_ready`, `close`. Close in any case."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.log_path = self.home / "server.log"
        self._state_path = self.home / "server.json"
        self._users_path = self.home / "users.lock"
        self._users: IO[str] | None = None
        self._configured = configured_api_url()  # now: setting PREFECT_API_URL for ours later must not look like it
        self._state: ServerState | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def api_url(self) -> str:
        """Known from `begin` on, so that the environment can be set while the server still starts."""
        if self._configured is not None:
            return self._configured
        if self._state is None:
            raise PrefectServerUnavailable("the local Prefect server was not begun: call begin() first")
        return self._state.api_url

    def begin(self) -> None:
        """Joins the server of this home, or starts one in the background. Nothing happens where a URL is configured."""
        if self._configured is not None:
            return
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self._users = self._users_path.open("a+")
            fcntl.flock(self._users, fcntl.LOCK_SH)
            with (self.home / "start.lock").open("a") as start_lock:
                fcntl.flock(start_lock, fcntl.LOCK_EX)
                self._state = self._running() or self._start()
        except OSError as error:
            self.close()
            raise PrefectServerUnavailable(
                f"cannot start a local Prefect server in {self.home}: {error}; "
                "make the folder writable, or set PREFECT_API_URL to a server of yours"
            ) from error

    def wait_ready(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> str:
        """The API URL, once the server is healthy. Raises PrefectServerUnavailable when it ends or takes too long."""
        url = self.api_url
        if self._state is None:
            return url
        deadline = time.monotonic() + timeout_seconds
        while not healthy(url):
            if not self._state.alive():
                raise PrefectServerUnavailable(self._complaint("ended before it was healthy"))
            if time.monotonic() > deadline:
                raise PrefectServerUnavailable(self._complaint(f"is not healthy after {timeout_seconds:.0f} s"))
            time.sleep(0.1)
        return url

    def close(self) -> None:
        """Gives the server up; the last user stops it and waits until it is gone."""
        if self._users is None:
            return
        with self._users as users, suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._state is not None:
                self._stop(self._state)
        if self._process is not None and self._process.poll() is None:
            self._process.returncode = 0  # others use it: it is not ours to wait for any more
        self._users = self._state = self._process = None

    def _running(self) -> ServerState | None:
        try:
            state = ServerState(**json.loads(self._state_path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return state if state.alive() else None

    def _start(self) -> ServerState:
        # Bound here and handed over: the port is known at once, and nobody else can take it in between.
        with socket.socket() as listener, self.log_path.open("wb") as log:
            listener.bind((HOST, 0))
            port = listener.getsockname()[1]
            script = Path(__file__).with_name("server_process.py")
            self._process = subprocess.Popen(
                [sys.executable, "-P", script, str(listener.fileno()), self._users_path, self._state_path],
                cwd=self.home,
                env=self._server_environment(port),
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the command, which still has states to report
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        start_time = process_start_time(self._process.pid)
        if start_time is None:
            raise OSError(f"the server process ended at once, see {self.log_path}")
        state = ServerState(self._process.pid, start_time, port)
        temporary = self._state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(state)))
        temporary.replace(self._state_path)
        return state

    def _server_environment(self, port: int) -> dict[str, str]:
        """The user's environment without their Prefect settings, which describe another server."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return {
            **inherited,
            **QUIET,
            **BATCHES,
            **SERVER_SETTINGS,
            "PREFECT_HOME": str(self.home),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{self.home}/prefect.db",
            "PREFECT_SERVER_API_HOST": HOST,
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port}/api",
        }

    def _stop(self, state: ServerState) -> None:
        self._state_path.unlink(missing_ok=True)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                if state.alive():
                    os.kill(state.pid, number)
            deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
            while state.alive() and time.monotonic() < deadline:
                time.sleep(0.05)

    def _complaint(self, what: str) -> str:
        with suppress(OSError):
            tail = self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip()
            return f"the local Prefect server {what}; the end of {self.log_path}:\n{tail}"
        return f"the local Prefect server {what}; {self.log_path} cannot be read"


def healthy(api_url: str) -> bool:
    """Whether the server answers its health check."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{api_url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
