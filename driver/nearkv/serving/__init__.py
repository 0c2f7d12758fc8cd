"""Serving: request traces, public ones and made-up ones."""

from __future__ import annotations

from .synthetic import Synthetic
from .trace import Request, Trace, read

__all__ = ["Request", "Synthetic", "Trace", "read"]
