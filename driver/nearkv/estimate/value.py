"""Figures with where they come from, and bands where sources differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    """A quantity that is known to lie between two values.

    Parameters
    ----------
    low, mid, high : the values; `mid` is what sums and comparisons use.
    """

    low: float
    mid: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.mid <= self.high:
            raise ValueError(
                f"a band goes from low over mid to high, not {self.low}, {self.mid}, {self.high}"
            )

    def __add__(self, other: Band) -> Band:
        return Band(self.low + other.low, self.mid + other.mid, self.high + other.high)

    def __mul__(self, factor: float) -> Band:
        """The band of so many of them; `factor` is at least 0."""
        return Band(self.low * factor, self.mid * factor, self.high * factor)

    __rmul__ = __mul__

    def to_dict(self) -> dict[str, float]:
        """The three values."""
        return {"low": self.low, "mid": self.mid, "high": self.high}


NOTHING = Band(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Value:
    """A figure of a table.

    Parameters
    ----------
    value : the number.
    unit : of what.
    source : where it comes from.
    sure : "published", "derived" from what is published, or "assumed".
    low, high : what other sources say; the same as `value` if not given.
    """

    value: float
    unit: str
    source: str
    sure: str = "published"
    low: float | None = None
    high: float | None = None

    @property
    def band(self) -> Band:
        """The range of the sources."""
        return Band(
            self.value if self.low is None else self.low,
            self.value,
            self.value if self.high is None else self.high,
        )
