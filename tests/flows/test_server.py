"""The local Prefect server: started once, shared, stopped by its last user, gone with a killed one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flows.server import (
    LocalServer,
    PrefectServerUnavailable,
    configured_api_url,
    healthy,
    local_server,
    prefect_environment,
    process_start_time,
)

USER = """
import sys
from pathlib import Path
from flows.server import LocalServer, local_server

with local_server(Path(sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def no_prefect_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for the module: migrating a new database is most of the first start."""
    return tmp_path_factory.mktemp("prefect")


def start_user(home: Path) -> "subprocess.Popen[str]":
    """Another command that uses the server until it reads a line or is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(home)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def url_of(user: "subprocess.Popen[str]") -> str:
    assert user.stdout is not None
    return user.stdout.readline().strip()


def eventually(condition: Callable[[], bool], timeout_seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def server_pids(home: Path) -> list[int]:
    """Live processes whose command line names this home's state file."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(home / "server.json").encode() in path.read_bytes() and process_start_time(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def server_pid(home: Path) -> int:
    """The only server of this home. Popen returns before the kernel shows the new command line, so wait for it."""
    assert eventually(lambda: bool(server_pids(home)))
    (pid,) = server_pids(home)
    return pid


def test_server_is_started_shared_and_stopped_by_its_last_user(home: Path) -> None:
    users = [start_user(home), start_user(home)]  # both at once, on a home without a database
    first, second = (url_of(user) for user in users)
    assert first == second
    assert first.startswith("http://127.0.0.1:")
    with local_server(home) as url:
        assert url == first
        for user in users:
            user.communicate("done\n")
            assert user.returncode == 0
        assert healthy(url)
        assert server_pid(home)
        assert (home / "prefect.db").exists()
    assert not healthy(url)
    assert server_pids(home) == []


def test_killed_owner_leaves_no_server(home: Path) -> None:
    owner = start_user(home)
    assert url_of(owner)
    assert server_pid(home)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert eventually(lambda: server_pids(home) == [])


def test_owner_killed_while_the_server_starts_leaves_none(home: Path) -> None:
    owner = start_user(home)
    assert server_pid(home)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert eventually(lambda: server_pids(home) == [])


def test_killed_server_is_reported_with_its_log_and_replaced(home: Path) -> None:
    with closing(LocalServer(home)) as server:
        server.begin()
        url = server.api_url
        os.kill(server_pid(home), signal.SIGKILL)
        with pytest.raises(PrefectServerUnavailable, match=r"ended before it was healthy.*server\.log"):
            server.wait_ready()
    with closing(LocalServer(home)) as again:
        again.begin()
        assert again.api_url != url
        assert server_pid(home)
    assert server_pids(home) == []


def test_setting_the_environment_between_begin_and_ready_still_waits(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(LocalServer(home)) as server:
        server.begin()
        for name, value in prefect_environment(home, server.api_url).items():
            monkeypatch.setenv(name, value)
        assert healthy(server.wait_ready())


def test_url_of_the_environment_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    with local_server(tmp_path / "home") as url:
        assert url == "http://prefect.example:4200/api"
    assert not (tmp_path / "home").exists()
    assert "PREFECT_HOME" not in prefect_environment(tmp_path / "home", url)


def test_url_of_the_active_profile_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles.toml").write_text(
        'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://team.example/api"\n[profiles.own]\n'
    )
    with local_server(tmp_path / "home") as url:
        assert url == "http://team.example/api"
    monkeypatch.setenv("PREFECT_PROFILE", "own")
    assert configured_api_url() is None


def test_own_server_gets_its_own_home_quiet_settings_and_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    environment = prefect_environment(tmp_path, "http://127.0.0.1:1234/api")
    assert environment["PREFECT_HOME"] == str(tmp_path)
    assert environment["NO_PROXY"] == "example.org,127.0.0.1"
    assert environment["DO_NOT_TRACK"] == "1"
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(PrefectServerUnavailable, match=r"file/home.*PREFECT_API_URL"),
        local_server(tmp_path / "file/home"),
    ):
        pass
