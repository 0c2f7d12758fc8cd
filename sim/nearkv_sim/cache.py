"""Where built devices are kept, and how several processes share them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_folder(*parts: str) -> Path:
    """A folder of the cache, made if need be: under `NEARKV_CACHE`, else under the user's cache folder."""
    root = os.environ.get("NEARKV_CACHE") or platformdirs.user_cache_dir("nearkv")
    folder = Path(root).expanduser().joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest(parts: Iterable[str | bytes]) -> str:
    """Sixteen hexadecimal digits that stand for `parts`, in their order."""
    state = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; other processes and threads wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def filled_whole(folder: Path) -> Iterator[Path]:
    """A folder to work in, which becomes `folder` when the block ends well and is gone when it does not."""
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        yield work
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
