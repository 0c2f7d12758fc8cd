"""The counters of a device's slices, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .output import print_table, say

_COLUMNS = 8
"""More slices than these are summed up: a terminal is not wide enough for them."""


def print_counters(channels: Sequence[Mapping[str, int]], memories: Sequence[Mapping[str, int]]) -> None:
    """Print what units, fabric and memory counted; what nobody counted is named below the table.

    Parameters
    ----------
    channels, memories : of every slice, the fields of `nearkv.stats.ChannelStats` and `MemoryStats`.
    """
    slices = [{**channel, **memory} for channel, memory in zip(channels, memories, strict=True)]
    counted = {name: [slice_[name] for slice_ in slices] for name in slices[0]}
    if len(slices) > _COLUMNS:
        columns = ["all", "least of a slice", "most"]
        rows = {name: [sum(of), min(of), max(of)] for name, of in counted.items()}
    else:
        columns = [f"slice {n}" for n in range(len(slices))]
        rows = counted
    print_table(
        "counters",
        ("", *columns),
        ([name, *(f"{value:,}" for value in rows[name])] for name in rows if any(counted[name])),
    )
    zero = [name for name, of in counted.items() if not any(of)]
    if zero:
        say(f"0 in every slice: {', '.join(zero)}.")
