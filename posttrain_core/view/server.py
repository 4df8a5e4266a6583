"""The server of the pages: on this machine's loopback, or on other addresses with a token."""

import secrets
import socket
from collections.abc import Callable

import uvicorn

from posttrain_core.errors import ConfigError
from posttrain_core.store import ObjectStore
from posttrain_core.view.app import create_app
from posttrain_core.view.guard import LOOPBACK


def serve(store: ObjectStore, host: str, port: int, started: Callable[[str], None]) -> None:
    """Until interrupted. `started` is told the address, with its token where there is one: it is said nowhere else."""
    token = "" if host in LOOPBACK else secrets.token_urlsafe(24)
    listening = _listen(host, port)
    config = uvicorn.Config(create_app(store, token), access_log=False, log_level="warning", lifespan="off")
    with listening:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listening.getsockname()[1]}/"
        started(f"{address}?token={token}" if token else address)
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    """ConfigError when the address is taken or is none of this machine's."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, number)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()  # who reads the address may connect at once
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port") from error
    return found
