"""What an estimate is asked for: a model, its work, GPUs and devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from nearkv_hw.abi import DeviceConfig, configure
from nearkv_hw.abi.config import CHANNEL_CHOICES, EXTENT_BYTES, Placement
from nearkv_hw.abi.dram import PARTS
from nearkv_hw.abi.lines import LINE_BYTES

from nearkv.arguments import one_of, whole_number
from nearkv.errors import ArgumentError

from .energy import FORM_FACTORS
from .formats import KVFormat, kv_format
from .gpus import Gpu, gpu
from .models import Model
from .table import model
from .value import Value

MAX_CONTEXT = 1 << 30
LAUNCH_S = Value(
    5e-6,
    "s",
    "a GPU hands a layer's jobs to the device and sees them done: 1.5 microseconds for a kernel that stores "
    "and polls by itself, 20 for copies by the driver (64 bytes, cxl_pytorch_expander latency_results.csv)",
    "assumed",
    low=1.5e-6,
    high=20e-6,
)
_LOCAL_LOAD_S = 154e-9 / (2.18 - 1)
CXL_LOAD_S = Value(
    _LOCAL_LOAD_S + 154e-9,
    "s",
    "a load over CXL: 154 ns more than a local one and 2.18 times as long, so that a local one takes 130 "
    "(CXL-DMSim, arXiv 2411.02282, ASIC); low and high: four devices on five CPUs (Melody, ASPLOS 2025)",
    "derived",
    low=140e-9,
    high=410e-9,
)
SWITCH_S = Value(
    140e-9,
    "s",
    "a CXL switch, there and back: 70 ns a way (Pond, ASPLOS 2023, at least)",
    "assumed",
    140e-9,
    400e-9,
)
LOADS_PER_LAYER = 3.5
"""Round trips of a layer: queries written, the doorbell rung (half a one), a record polled, results read."""
GPU_RESERVE = 0.1
"""Share of a GPU's memory for activations and graphs: what vLLM leaves by default."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One question.

    Parameters
    ----------
    model : a `Model`, or the name of one in the table.
    context : rows of every sequence.
    batch : sequences that decode together.
    kv_format : a `KVFormat`, or its name.
    gpu, gpus : a `Gpu` or its name, and how many share the model (tensor parallel).
    config : of each device; its placement is that of the three tiers, and every placement is answered.
    devices : how many, all at the GPUs' host.
    capacity_bytes : memory of a device; what its parts hold if not given.
    micro_batches : parts of a batch that take turns on GPU and device; 1 for none.
    launch_s : what a GPU and the device take per layer to hand over, beyond the loads.
    switch : whether a CXL switch is between host and devices.
    hosts : hosts that share the devices with the same work each.
    host_share : lines per cycle and slice that others want of a device's memory, 0 to 1.
    page_rows : rows of a KV page.
    form : the card's form, of `FORM_FACTORS`.
    link_factor : how many times faster than its data sheet the way between GPUs and devices is, both the
        GPUs' ports and the devices' links.
    unit_rate : lines that a unit takes per cycle; the RTL's takes 1.

    Raises
    ------
    ArgumentError : naming what was given and what is allowed.
    """

    model: Model
    context: int
    batch: int = 1
    kv_format: KVFormat = field(default_factory=lambda: kv_format("bf16"))
    gpu: Gpu = field(default_factory=lambda: gpu("h100"))
    gpus: int = 1
    config: DeviceConfig = field(default_factory=lambda: device())
    devices: int = 1
    capacity_bytes: int = 0
    micro_batches: int = 1
    launch_s: float = LAUNCH_S.value
    switch: bool = False
    hosts: int = 1
    host_share: float = 0.0
    page_rows: int = 16
    form: str = "cem"
    link_factor: float = 1.0
    unit_rate: float = 1.0

    def __post_init__(self) -> None:
        for name, known in (("model", model), ("kv_format", kv_format), ("gpu", gpu)):
            given = getattr(self, name)
            if isinstance(given, str):
                object.__setattr__(self, name, known(given))
        whole_number("context", self.context, 1, MAX_CONTEXT)
        whole_number("batch", self.batch, 1, 1 << 20)
        for name in ("gpus", "devices", "hosts"):
            whole_number(name, getattr(self, name), 1, 1024)
        whole_number("micro_batches", self.micro_batches, 1, self.batch)
        whole_number("capacity_bytes", self.capacity_bytes, 0, 1 << 50)
        whole_number("page_rows", self.page_rows, 1, 1 << 16)
        if not 0 <= self.host_share <= 1:
            raise ArgumentError(f"host_share={self.host_share!r}: must be 0 to 1 line per cycle and slice")
        if not 0 <= self.launch_s <= 1:
            raise ArgumentError(f"launch_s={self.launch_s!r}: must be 0 to 1 second")
        for name, unit in (("unit_rate", "lines per cycle"), ("link_factor", "times the data sheets' rates")):
            if not 1e-6 <= getattr(self, name) <= 1e6:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: must be 1e-6 to 1e6 {unit}")
        one_of("form", self.form, FORM_FACTORS)
        if self.config.dram not in PARTS:
            raise ArgumentError(
                f"dram=fixed is no part; there are {', '.join(d.name.lower() for d in PARTS)}"
            )

    @property
    def device_bytes(self) -> int:
        """Memory of one device."""
        if self.capacity_bytes:
            return self.capacity_bytes
        part = PARTS[self.config.dram]
        return self.config.slices * part.channel_lines(self.config.density_gbit) * LINE_BYTES

    @property
    def round_trip_s(self) -> float:
        """What a layer pays besides bytes: handing over, and loads over the link."""
        load = CXL_LOAD_S.value + (SWITCH_S.value if self.switch else 0.0)
        return self.launch_s + LOADS_PER_LAYER * load

    def at(self, placement: Placement) -> Setup:
        """The same with the units elsewhere."""
        return replace(self, config=placed(self.config, placement))

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain values, names of model, format and GPU."""
        return {
            "model": self.model.name,
            "context": self.context,
            "batch": self.batch,
            "kv_format": self.kv_format.name,
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "devices": self.devices,
            "device_bytes": self.device_bytes,
            "micro_batches": self.micro_batches,
            "launch_s": self.launch_s,
            "switch": self.switch,
            "hosts": self.hosts,
            "host_share": self.host_share,
            "page_rows": self.page_rows,
            "form": self.form,
            "link_factor": self.link_factor,
            "unit_rate": self.unit_rate,
            "config": self.config.to_dict(),
        }


def device(preset: str = "card", **overrides: Any) -> DeviceConfig:
    """The configuration of a device with all the memory that its parts hold, for estimates.

    Parameters
    ----------
    preset : what is not overridden.
    overrides : fields of the configuration.

    Raises
    ------
    ValueError : an unknown preset or field, or a value that is not allowed.
    """
    if "capacity_bytes" in overrides:
        return configure(preset, **overrides)
    config = configure(preset, capacity_bytes=_LEAST_BYTES, **overrides)
    if config.dram not in PARTS:
        return config
    whole = config.slices * PARTS[config.dram].channel_lines(config.density_gbit) * LINE_BYTES
    return replace(config, capacity_bytes=min(1 << whole.bit_length() - 1, _MOST_BYTES))


_LEAST_BYTES = max(CHANNEL_CHOICES) * EXTENT_BYTES
_MOST_BYTES = 1 << 40
"""What a configuration of any number of channels may have, and of the largest parts."""


def placed(config: DeviceConfig, placement: Placement) -> DeviceConfig:
    """The same channels with the units elsewhere; two ranks where they stand at ranks, if channels allow."""
    ranks = max(2, config.ranks) if placement is Placement.RANK else 1
    return replace(config, placement=placement, ranks=ranks)
