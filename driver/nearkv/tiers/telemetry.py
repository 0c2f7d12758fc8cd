"""What tiers did, as numbers and as the text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TierStats:
    """One tier's figures.

    Members
    -------
    name : of the tier.
    rows, used_bytes, capacity_bytes : what is there, and what may be; None for no bound.
    bytes_in, bytes_out : that came and went, in rows without padding.
    calls : attention calls that met rows here.
    hit_share : of the attention of all calls so far, what fell on rows that were here, 0 to 1.
    """

    name: str
    rows: int
    used_bytes: int
    capacity_bytes: int | None
    bytes_in: int
    bytes_out: int
    calls: int
    hit_share: float

    @property
    def watermark(self) -> float | None:
        """Used bytes of those that may be used; None for no bound."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "watermark": self.watermark}


_HELP = {
    "rows": ("gauge", "Rows in the tier, of all sequences and layers."),
    "used_bytes": ("gauge", "Bytes of these rows."),
    "capacity_bytes": ("gauge", "Bytes that rows of the tier may take."),
    "bytes_in": ("counter", "Bytes of rows that came."),
    "bytes_out": ("counter", "Bytes of rows that went."),
    "calls": ("counter", "Attention calls that met rows in the tier."),
    "hit_share": ("gauge", "Share of attention that fell on rows in the tier."),
    "watermark": ("gauge", "Used share of the capacity."),
}


def prometheus(stats: Many[TierStats]) -> str:
    """The figures of tiers in Prometheus's text format (version 0.0.4).

    Examples
    --------
    >>> print(prometheus([TierStats("hot", 3, 96, None, 96, 0, 1, 0.25)]).splitlines()[2])
    nearkv_tier_rows{tier="hot"} 3
    """
    lines = []
    names = [*(field.name for field in fields(TierStats) if field.name != "name"), "watermark"]
    for name in names:
        kind, text = _HELP[name]
        metric = f"nearkv_tier_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
        for tier in stats:
            value = getattr(tier, name)
            if value is not None:
                label = tier.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
                lines.append(f'{metric}{{tier="{label}"}} {value}')
    return "\n".join(lines) + "\n"
