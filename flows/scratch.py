"""A temporary folder of this process, and the removal of those that killed processes left behind."""

import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.server import process_start_time


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Empty, gone after the block. Its name says whose it is, so that the next process can clean up after a kill."""
    remove_abandoned(Path(tempfile.gettempdir()))
    pid = os.getpid()
    with tempfile.TemporaryDirectory(prefix=f"{_of_this_host()}{pid}-{process_start_time(pid)}-") as folder:
        yield Path(folder)


def remove_abandoned(parent: Path) -> None:
    """The folders of processes of this host that no longer run: others may share `parent`, but not the pids."""
    ours = _of_this_host()
    for folder in parent.glob(f"{ours}*"):
        match = re.match(r"(\d+)-(\d+)-", folder.name.removeprefix(ours))
        if match and process_start_time(int(match[1])) != int(match[2]):
            shutil.rmtree(folder, ignore_errors=True)


def _of_this_host() -> str:
    """How the names of this host's folders begin. A digest, for it is short and has no dashes."""
    return f"posttrain-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]}-"
