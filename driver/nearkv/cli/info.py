"""`nearkv info`: what a device is made of."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from nearkv_hw.abi import DeviceConfig, Feature

from .output import JsonOption, print_json, print_table, say

if TYPE_CHECKING:
    from nearkv.device import Device

_DIM = 128
_PAGE_ROWS = 16
_UNITS = {
    "capacity_bytes": "bytes",
    "memory_latency_cycles": "cycles",
    "clock_mhz": "MHz",
}


def info(
    spec: Annotated[
        str, typer.Argument(help="Which device: model, rtl or cocotb, and a preset: rtl:card.")
    ] = "model",
    as_json: JsonOption = False,
) -> None:
    """Open a device and print the configuration that it reports of itself, what it has beyond plain jobs, how
    much of its memory tenants have and may have, and how many lines its units take in a cycle, by KV format.

    What a device counts while it works is in nearkv run --counters and in nearkv trace.
    """
    import nearkv

    with nearkv.open(spec) as device:
        config = device.config.to_dict()
        kind = device.kind
        features = [flag.name.lower() for flag in Feature if flag in device.features and flag.name]
        rates = _rates(device.config)
        memory = _memory(device)
    if as_json:
        print_json(
            {
                **{"spec": spec, "kind": kind, "config": config, "features": features, "memory": memory},
                "lines_per_cycle": rates,
            }
        )
    else:
        rows = (
            (name, f"{value:,}" if isinstance(value, int) else value, _UNITS.get(name, ""))
            for name, value in config.items()
        )
        print_table(f"{spec}: a {kind} device", ("field", "value", "unit"), rows)
        say(f"Beyond plain jobs it has: {', '.join(features) or 'nothing'}.")
        shown = ((name, "  ".join(f"{value:,}" for value in values)) for name, values in memory.items())
        print_table("memory; bytes are those of each tenant", ("", "value"), shown)
        print_table(
            f"lines per cycle and unit, rows of {_DIM} elements, {device.config.queries} queries",
            ("KV format", "lines per cycle"),
            ((name, f"{rate:.2f}") for name, rate in rates.items()),
        )


def _memory(device: Device) -> dict[str, list[int]]:
    """How much memory is free, and how much of it each tenant has and may have, if we may know that."""
    from nearkv.errors import TenantTakenError

    stats = device.stats()
    names = ("free_extents", "scrubbing_extents", "scrub_lines", "violations")
    found = {name: [getattr(stats, name)] for name in names}
    with suppress(TenantTakenError):  # hosts of a served device are not its owner
        found |= {"held_bytes": device.owner.holdings(), "quota_bytes": device.owner.quotas()}
    return found


def _rates(config: DeviceConfig) -> dict[str, float]:
    """Lines that a unit takes per cycle, at most one, by KV format."""
    from nearkv_sim.model.timing import unit_cycles

    from nearkv.quantise.formats import PRESETS

    layouts = {name: preset.layout(_DIM, _DIM, _PAGE_ROWS) for name, preset in PRESETS.items()}
    return {name: 1 / unit_cycles(config, layout, config.queries) for name, layout in layouts.items()}
