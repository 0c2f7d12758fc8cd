"""What pages of studies are made with: blocks between comments, and figures that say what they show."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearkv.errors import ArgumentError
from nearkv.pages import replace_block


def check(folder: Path, page: str, *, figures: bool = True) -> None:
    """ArgumentError where a page, or its figures, could not be written in the end."""
    if not (folder / page).is_file():
        raise ArgumentError(f"{folder} has no {page}; --write takes the folder of the documentation: docs")
    if not figures:
        return
    if not (folder / "figures").is_dir():
        raise ArgumentError(f"there is no folder {folder / 'figures'} for the figures")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ArgumentError("figures need matplotlib; pip install 'nearkv[sweep]'") from error


def filled(text: str, blocks: Mapping[str, str], command: str, *, where: Path) -> str:
    """A page with its blocks, by name.

    Raises
    ------
    NearkvError : the page has no place for one of them.
    """
    for name, content in blocks.items():
        text = replace_block(text, name, command, content, where=where)
    return text


def digest(data: Any) -> str:
    """A short name for plain data, which figures carry: that of what they show."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def png(drawing: Any, data: Any) -> bytes:
    """A figure as PNG that carries the digest of what it shows."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=100, metadata={"Description": digest(data)})
    return buffer.getvalue()
