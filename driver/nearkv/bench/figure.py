"""A number that a benchmark found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One number of one device."""

    name: str
    value: float
    unit: str
    config: dict[str, Any] = field(default_factory=dict)
