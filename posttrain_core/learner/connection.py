"""The line between a learner's parent and its ranks: JSON messages on a socket that both ends notice the end of.

A rank that its parent started has inherited one end of a pair. A rank on another machine connects to a `Listener` over
TCP and proves itself with a token from a file: who may read that file may command the learner, and a host that cannot
read it does not share the parent's file system, which is found out here. No torch.
"""

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from posttrain_core.errors import LearnerFault

TOKEN_FILE = "token"
HELLO_BYTES = 4096  # at most
HELLO_SECONDS = 10.0
LOOPBACK = "127.0.0.1"
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a machine that lost its power is missed


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Raises OSError when the other end is gone."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Waits for the next message. Raises EOFError or OSError when the other end is gone."""
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message


class Listener:
    """Where ranks on other hosts report. `address` is what they are told; the token lies in `folder`."""

    def __init__(self, folder: Path, hosts: list[str]) -> None:
        self._token = secrets.token_hex(32)
        self._folder = folder
        with os.fdopen(os.open(folder / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._token)
        here = all(is_this_machine(host) for host in hosts)
        address = LOOPBACK if here else _address_seen_from(hosts)
        self._socket = socket.create_server((LOOPBACK if here else "", 0))
        self.address = (address, self._socket.getsockname()[1])
        self.refused = ""  # why the last one was turned away

    def accept(self, seconds: float) -> tuple[dict[str, Any], Connection] | None:
        """What the next rank says of itself (rank, host, pid), and its line; None when none came in time."""
        self._socket.settimeout(seconds)
        try:
            line, address = self._socket.accept()
        except TimeoutError:
            return None
        with line:
            try:
                hello = _read_hello(line)
                known = hmac.compare_digest(str(hello.get("token")), self._token)
            except (OSError, ValueError, AttributeError):
                return None
            if not known:
                self.refused = f"{hello.get('host', address[0])} {hello.get('problem', 'sent a wrong token')}"
                return None
            line.settimeout(None)
            _keep_alive(line)
            return hello, Connection(line.detach())

    def close(self) -> None:
        self._socket.close()
        (self._folder / TOKEN_FILE).unlink(missing_ok=True)


def connect(address: tuple[str, int], folder: Path, rank: int) -> Connection:
    """The rank's end. Raises LearnerFault, which the parent is told too, where `folder` is not the parent's."""
    hello: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        hello["token"] = (folder / TOKEN_FILE).read_text()
    except OSError as error:
        hello["problem"] = f"cannot read {folder / TOKEN_FILE} ({error.strerror}): all hosts must mount this folder"
    with socket.create_connection(address, timeout=HELLO_SECONDS) as line:
        line.sendall(json.dumps(hello).encode() + b"\n")
        if "problem" in hello:
            raise LearnerFault(f"{hello['host']} {hello['problem']}")
        line.settimeout(None)
        _keep_alive(line)
        return Connection(line.detach())


def is_this_machine(host: str) -> bool:
    return host in ("localhost", LOOPBACK, socket.gethostname())


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _address_seen_from(hosts: list[str]) -> str:
    """This machine's address on the way to the first other host; nothing is sent to find out."""
    host = next(host for host in hosts if not is_this_machine(host))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise LearnerFault(f"learner.hostfile: host {host!r} cannot be reached: {error}") from error
        address: str = probe.getsockname()[0]
    return address


def _read_hello(line: socket.socket) -> dict[str, Any]:
    """One line of JSON, however slowly it comes."""
    deadline, data = time.monotonic() + HELLO_SECONDS, b""
    while not data.endswith(b"\n") and len(data) < HELLO_BYTES:
        line.settimeout(max(0.01, deadline - time.monotonic()))
        more = line.recv(HELLO_BYTES - len(data))
        if not more:
            break
        data += more
    hello: dict[str, Any] = json.loads(data)
    return hello


def _keep_alive(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        with suppress(AttributeError):  # systems name these differently
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
