"""What the environment says of nearkv under vLLM: processes that vLLM starts inherit it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nearkv.codec import DTYPES

REFERENCE = "reference"
"""In place of a device: rows in host memory, attention by `nearkv.reference`."""
_OFF = ("", "off")
_SWITCH = {"": False, "0": False, "1": True}


@dataclass(frozen=True)
class Settings:
    """Where rows live, and whether results are checked.

    Members
    -------
    place : NEARKV_VLLM: what `nearkv.open` takes ("model", "rtl:card", "unix:PATH"), or "reference".
    check : NEARKV_VLLM_CHECK: "1" to hold every call on the device against the reference.
    dtype : NEARKV_VLLM_DTYPE: "fp16" or "bf16", the type of rows and queries; None for the model's own, and
        fp16 for models of float32.
    replays : NEARKV_VLLM_REPLAYS: folder for files of unequal calls.
    """

    place: str
    check: bool = False
    dtype: str | None = None
    replays: Path = Path("replays")

    def __post_init__(self) -> None:
        if self.check and self.place == REFERENCE:
            raise ValueError("NEARKV_VLLM_CHECK=1 needs a device: NEARKV_VLLM is reference already")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """The settings; None where NEARKV_VLLM is not set, empty, or "off".

        Raises
        ------
        ValueError : for a value that is none.
        """
        place = environment.get("NEARKV_VLLM", "")
        if place in _OFF:
            return None
        check = environment.get("NEARKV_VLLM_CHECK", "")
        if check not in _SWITCH:
            raise ValueError(f"NEARKV_VLLM_CHECK={check!r}: must be 0 or 1")
        dtype = environment.get("NEARKV_VLLM_DTYPE") or None
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"NEARKV_VLLM_DTYPE={dtype!r}: must be one of {', '.join(DTYPES)}")
        return cls(place, _SWITCH[check], dtype, Path(environment.get("NEARKV_VLLM_REPLAYS") or "replays"))
