"""`nearkv info`: what a device is made of."""

from __future__ import annotations

from typing import Annotated

import typer
from nearkv_hw.abi import Feature

from .output import JsonOption, print_json, print_table, say

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
    """Open a device and print the configuration that it reports of itself, and what it has beyond plain jobs.

    What a device counts while it works is in nearkv run --counters and in nearkv trace.
    """
    import nearkv

    with nearkv.open(spec) as device:
        config = device.config.to_dict()
        kind = device.kind
        features = [flag.name.lower() for flag in Feature if flag in device.features and flag.name]
    if as_json:
        print_json({"spec": spec, "kind": kind, "config": config, "features": features})
    else:
        rows = (
            (name, f"{value:,}" if isinstance(value, int) else value, _UNITS.get(name, ""))
            for name, value in config.items()
        )
        print_table(f"{spec}: a {kind} device", ("field", "value", "unit"), rows)
        say(f"Beyond plain jobs it has: {', '.join(features) or 'nothing'}.")
