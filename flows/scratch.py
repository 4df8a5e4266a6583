"""A temporary folder of this process, and the removal of those that killed processes left behind."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.server import process_start_time

_NAME = re.compile(r"posttrain-(\d+)-(\d+)-")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Empty, gone after the block. Its name says whose it is, so that the next process can clean up after a kill."""
    remove_abandoned(Path(tempfile.gettempdir()))
    pid = os.getpid()
    with tempfile.TemporaryDirectory(prefix=f"posttrain-{pid}-{process_start_time(pid)}-") as folder:
        yield Path(folder)


def remove_abandoned(parent: Path) -> None:
    """The folders of processes that no longer run, as far as they are ours to remove."""
    for folder in parent.glob("posttrain-*-*-*"):
        match = _NAME.match(folder.name)
        if match and process_start_time(int(match[1])) != int(match[2]):
            shutil.rmtree(folder, ignore_errors=True)
