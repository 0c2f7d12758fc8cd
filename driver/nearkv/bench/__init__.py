"""What `nearkv bench` measures, a module for each group."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Whoever waits for a bench."""

    def begin(self, title: str) -> None:
        """Another step; the one before is over."""

    def tell(self, line: str) -> None:
        """What the step does now."""


class Quiet:
    """A `Progress` of which nobody hears."""

    def begin(self, title: str) -> None:
        """Nothing."""

    def tell(self, line: str) -> None:
        """Nothing."""
