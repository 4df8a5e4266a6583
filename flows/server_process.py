"""The local Prefect server's process: serves on a socket it is given, lives as long as somebody uses it.

    python -P server_process.py SOCKET_FD USERS_LOCK STATE_FILE

Every command that uses the server holds a shared lock on USERS_LOCK; the kernel drops it however the command ends.
Whoever gets the exclusive lock knows that nobody is left: this process waits for it in a thread, and goes.
"""

import fcntl
import os
import socket
import sys
import threading
from pathlib import Path

NICENESS = 10  # what it writes down can wait; the stages on the same cores cannot


def watch_users(users_lock: Path, state_file: Path) -> None:
    """Ends this process when its last user is gone. SQLite survives that, so there is nothing to wind down."""
    with users_lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state_file.unlink(missing_ok=True)
        os._exit(0)


def main(socket_fd: int, users_lock: Path, state_file: Path) -> None:
    threading.Thread(target=watch_users, args=(users_lock, state_file), daemon=True).start()
    os.nice(NICENESS)
    import uvicorn
    from prefect.server.api import collections
    from prefect.server.api.server import create_app

    # The UI's catalogue of workers is looked up on GitHub; without an address Prefect shows the copy it brings along.
    collections.KNOWN_VIEWS.update(dict.fromkeys(collections.KNOWN_VIEWS, ""))
    config = uvicorn.Config(create_app(final=True), log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=socket_fd)])


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
