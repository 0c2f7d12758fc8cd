"""The device as a running program: its RTL in this process or under cocotb, or the software model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkv_hw.abi import PRESETS, Feature, configure

if TYPE_CHECKING:
    from .port import Port
    from .verilate import Report

KINDS = ("model", "rtl", "cocotb")
"""How a device can run; a preset of the configuration may follow a colon ("rtl:card")."""


SERVED = "unix:"
"""What the name of a served device begins with."""


def kind_and_preset(spec: str) -> tuple[str, str]:
    """What a device's name says, "rtl:card" or "rtl"; ValueError, as `open_port` has it, for any other."""
    kind, colon, preset = spec.partition(":") if isinstance(spec, str) else (spec, "", "")
    if kind == "unix":
        raise ValueError(f"{spec!r}: a served device is what it is; use {', '.join(KINDS)}")
    if kind not in KINDS:
        raise ValueError(
            f"unknown device {spec!r}; there are {', '.join(KINDS)}, each with :PRESET if wanted"
        )
    if colon and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r} in {spec!r}; there are {', '.join(PRESETS)}")
    return kind, preset or "small"


def open_port(
    spec: str = "model",
    *,
    trace: bool = False,
    seed: int | None = None,
    kernel: str | None = None,
    features: Feature | None = None,
    report: Report | None = None,
    **overrides: Any,
) -> Port:
    """Start a device.

    Parameters
    ----------
    spec : "model", "rtl" or "cocotb", with a preset after a colon where wanted: "rtl:card"; or "unix:PATH", a
        device that `nearkv serve` serves there, for which there are no options.
    trace : build the RTL with waveforms, so that the port's `start_wave` works.
    seed : of what the cocotb device, and no other, does at random; by default a new one, which its errors
        name.
    kernel : of the model device, and no other: "native" (compiled C++) or "torch", with the same bits. By
        default that of the environment variable NEARKV_KERNEL, else native where there is a C++ compiler.
    features : of the model device, and no other: what it has beyond plain jobs, to try a driver on a smaller
        device; by default all that the model knows.
    report : takes a line per step of a build; by default the terminal shows them.
    overrides : fields of `nearkv_hw.abi.DeviceConfig`.

    Raises
    ------
    ValueError : an unknown kind, preset or field, a value out of range, or an option that the kind does not
        have.
    BuildError, ToolMissing : the RTL, or the kernel that was asked for, could not be built: what failed, or
        what is missing and how to get it.
    """
    if isinstance(spec, str) and spec.startswith(SERVED):
        from .served import ServedPort

        given = {"trace": trace or None, "seed": seed, "kernel": kernel, "features": features, **overrides}
        if any(value is not None for value in given.values()):
            raise ValueError(f"{spec!r} is a device that runs already; it takes no options")
        return ServedPort(Path(spec.removeprefix(SERVED)))
    kind, preset = kind_and_preset(spec)
    config = configure(preset, **overrides)
    if trace and kind == "model":
        raise ValueError("trace=True: the model has no signals to record; open rtl or cocotb for a wave")
    if seed is not None and kind != "cocotb":
        raise ValueError(f"seed={seed!r}: only the cocotb device does anything at random, not {kind}")
    if kernel is not None and kind != "model":
        raise ValueError(f"kernel={kernel!r}: only the model device has kernels, not {kind}")
    if features is not None and kind != "model":
        raise ValueError(f"features={features!r}: only the model device can leave some out, not {kind}")
    if kind == "model":
        from .model import ModelPort

        return ModelPort(config, kernel=kernel, report=report, features=features)
    if kind == "rtl":
        from .rtl import RtlPort

        return RtlPort(config, trace=trace, report=report)
    from .cocotb.port import CocotbPort

    return CocotbPort(config, trace=trace, seed=seed, report=report)
