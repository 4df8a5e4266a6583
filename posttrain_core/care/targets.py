"""Local folders and files that appear whole or not at all, and never over others."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain_core.errors import ConfigError, StoreError


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends well. ConfigError when it exists."""
    with _new(target) as temporary:
        temporary.mkdir()
        yield temporary
        temporary.rename(target)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """As `new_folder`, for a file."""
    with _new(target) as temporary:
        yield temporary
        os.link(temporary, target)  # unlike a rename it refuses to overwrite


@contextmanager
def _new(target: Path) -> Iterator[Path]:
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists and is not overwritten: choose another name (--to), or remove it")
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error}; nothing was left half written") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
