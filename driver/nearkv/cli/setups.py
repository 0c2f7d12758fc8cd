"""Options of the commands that ask about a model on GPUs and devices, and the setup that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .overrides import overrides_of

if TYPE_CHECKING:
    from nearkv.estimate import Setup

ModelOption = Annotated[str | None, typer.Option(help="A model of the table; see nearkv estimate --list.")]
ConfigFileOption = Annotated[
    Path | None, typer.Option("--config", help="The model's Hugging Face config.json.")
]
KVFormatOption = Annotated[
    str, typer.Option(help="bf16, fp16, fp8_e4m3, fp8_e5m2, int8, int4, mxfp4, nvfp4.")
]
GpuOption = Annotated[str, typer.Option(help="A GPU of the table; see nearkv estimate --list.")]
GpusOption = Annotated[int, typer.Option(help="GPUs that share the model.")]
DeviceOption = Annotated[str, typer.Option(help="Preset of the devices.")]
DevicesOption = Annotated[int, typer.Option(help="How many of them.")]
CapacityOption = Annotated[
    str, typer.Option(help="Memory of a device, such as 512g; what its parts hold if not given.")
]
MicroBatchesOption = Annotated[
    int, typer.Option(help="Parts of the batch that take turns on GPU and device.")
]
LaunchOption = Annotated[
    float | None, typer.Option(help="Microseconds in which GPU and device hand a layer over.")
]
SwitchOption = Annotated[bool, typer.Option("--switch", help="A CXL switch is on the way.")]
HostsOption = Annotated[int, typer.Option(help="Hosts that share the devices, with the same work each.")]
HostShareOption = Annotated[
    float, typer.Option(help="Lines per cycle and slice that others want of a device's memory.")
]
UnitRateOption = Annotated[
    float,
    typer.Option(
        metavar="LINES", help="Lines that a unit takes per cycle; the RTL's takes 1, of 16-bit elements."
    ),
]
LinkFactorOption = Annotated[
    float,
    typer.Option(
        metavar="TIMES",
        help="How many times as fast as their data sheets the GPUs' ports and the devices' links are.",
    ),
]


def setup_of(
    *,
    model: str | None,
    config: Path | None,
    kv_format: str,
    gpu: str,
    device: str,
    overrides: list[str] | None,
    capacity: str,
    launch_us: float | None,
    **given: Any,
) -> Setup:
    """The setup that options describe; `given` are fields as they are."""
    from nearkv.estimate import Setup, from_config
    from nearkv.estimate import device as described
    from nearkv.estimate import gpu as gpu_of
    from nearkv.estimate import kv_format as kv_format_of
    from nearkv.estimate import model as known
    from nearkv.estimate.quantities import quantity
    from nearkv.estimate.setup import LAUNCH_S

    if (model is None) == (config is None):
        raise typer.BadParameter("give --model NAME or --config FILE; nearkv estimate --list shows the names")
    return Setup(
        model=from_config(config) if config else known(str(model)),
        kv_format=kv_format_of(kv_format),
        gpu=gpu_of(gpu),
        config=described(device, **overrides_of(overrides)),
        capacity_bytes=quantity(capacity, "capacity"),
        launch_s=LAUNCH_S.value if launch_us is None else launch_us * 1e-6,
        **given,
    )
