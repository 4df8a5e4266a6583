"""`posttrain view` as a process: its address, its token, its end."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def viewing(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the first line that it said."""
    command = [sys.executable, "-m", "flows.cli.main", "view", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_loopback_needs_no_token_and_ctrl_c_stops_it(finished_run: Path) -> None:
    with viewing(str(finished_run), "--port", "0") as (process, line):
        match = re.fullmatch(r"(http://127\.0\.0\.1:\d+/)   \(Ctrl-C stops\)\n", line)
        assert match, line
        assert "complete" in httpx.get(f"{match[1]}runs/r", trust_env=False).text
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert "Traceback" not in output
        port = match[1].rpartition(":")[2].strip("/")
    with viewing(str(finished_run), "--host", "127.0.0.2", "--port", port) as (process, line):
        match = re.match(rf"(http://127\.0\.0\.2:{port}/)\?token=([\w-]{{32}}) ", line)
        assert match, line
        assert httpx.get(match[1], trust_env=False).status_code == 401
        assert httpx.get(match[0].strip(), trust_env=False).status_code == 303
        with viewing(str(finished_run), "--host", "127.0.0.2", "--port", port) as (second, refused):
            assert "cannot listen on 127.0.0.2" in refused
            assert second.wait(60) == 2
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert match[2] not in rest
