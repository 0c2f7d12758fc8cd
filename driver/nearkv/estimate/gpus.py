"""GPUs: what decode needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from nearkv.arguments import one_of

from .value import Value


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU; all figures are those of its data sheet unless they say otherwise.

    Parameters
    ----------
    name : for people.
    memory_bytes : of its memory, as the driver shows it: a data sheet's GB are about 2^30 bytes.
    bandwidth : of its memory, bytes/s, peak.
    attention_efficiency : share of that which a decode-attention kernel reaches.
    attention_launch_s : what such a kernel takes per layer on top.
    flops : bf16 operations/s with dense matrices.
    host_link : bytes/s per direction towards the host and its CXL devices.
    peer_link : bytes/s per direction towards the other GPUs.
    power_w : board power.
    """

    name: str
    memory_bytes: Value
    bandwidth: Value
    attention_efficiency: Value
    attention_launch_s: Value
    flops: Value
    host_link: Value
    peer_link: Value
    power_w: Value

    def to_dict(self) -> dict[str, Any]:
        """The numbers without their sources."""
        return {f.name: v.value if isinstance(v := getattr(self, f.name), Value) else v for f in fields(self)}


_FITS = "LLMServingSim profiles of vLLM 0.19: {}, linear fit, R2 >= 0.9996"
_FITTED = {  # share of peak: 4,096 bytes per row and layer over the slope; and the intercept
    "rtx-4090": (4096 / 0.004299e-6 / 1008e9, 27.3e-6, "27.3 + 0.004299 * rows microseconds per layer"),
    "rtx-pro-6000": (4096 / 0.002684e-6 / 1792e9, 25.1e-6, "25.1 + 0.002684 * rows microseconds per layer"),
}
_LAUNCH = (
    "as a hand-over to a device takes, so that short contexts favour neither; the fits, of whole layers "
    "of a server, have 25 to 27 microseconds"
)
_PCIE = {4: 31.5e9, 5: 63.0e9}
"""Bytes/s of sixteen lanes after line coding."""


def _gpu(
    name: str,
    source: str,
    *,
    memory_mib: int,
    bandwidth: float,
    tflops: float,
    pcie: int,
    peer: float,
    watts: float,
) -> Gpu:
    if name in _FITTED:
        share, launch, fit = _FITTED[name]
        efficiency = Value(share, "of peak", _FITS.format(fit), "derived")
        launch_s = Value(launch, "s", _FITS.format(fit))
    else:
        efficiency = Value(0.85, "of peak", "as the lower of the two fits", "assumed", 0.8, 0.95)
        launch_s = Value(5e-6, "s", _LAUNCH, "assumed", 5e-6, 27.3e-6)
    return Gpu(
        name=name,
        memory_bytes=Value(memory_mib << 20, "bytes", "nvidia-smi, or rocm-smi: total memory"),
        bandwidth=Value(bandwidth, "bytes/s", source),
        attention_efficiency=efficiency,
        attention_launch_s=launch_s,
        flops=Value(tflops * 1e12, "operations/s", f"{source}, bf16 without sparsity"),
        host_link=Value(_PCIE[pcie], "bytes/s", f"PCIe {pcie}.0 x16 after line coding"),
        peer_link=Value(
            peer or _PCIE[pcie], "bytes/s", source if peer else "no link of its own: PCIe as to the host"
        ),
        power_w=Value(watts, "W", source),
    )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "a100",
            "NVIDIA A100 80GB SXM data sheet",
            memory_mib=81920,
            bandwidth=2039e9,
            tflops=312,
            pcie=4,
            peer=300e9,
            watts=400,
        ),
        _gpu(
            "h100",
            "NVIDIA H100 SXM data sheet",
            memory_mib=81559,
            bandwidth=3350e9,
            tflops=989,
            pcie=5,
            peer=450e9,
            watts=700,
        ),
        _gpu(
            "h200",
            "NVIDIA H200 SXM data sheet",
            memory_mib=143771,
            bandwidth=4800e9,
            tflops=989,
            pcie=5,
            peer=450e9,
            watts=700,
        ),
        _gpu(
            "b200",
            "NVIDIA HGX B200 data sheet, an eighth of it; its hosts have PCIe 5.0",
            memory_mib=183359,
            bandwidth=7700e9,
            tflops=2250,
            pcie=5,
            peer=900e9,
            watts=1000,
        ),
        _gpu(
            "l40s",
            "NVIDIA L40S data sheet",
            memory_mib=46068,
            bandwidth=864e9,
            tflops=362.05,
            pcie=4,
            peer=0,
            watts=350,
        ),
        _gpu(
            "rtx-4090",
            "NVIDIA Ada architecture white paper",
            memory_mib=24564,
            bandwidth=1008e9,
            tflops=165.2,
            pcie=4,
            peer=0,
            watts=450,
        ),
        _gpu(
            "rtx-pro-6000",
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet",
            memory_mib=97887,
            bandwidth=1792e9,
            tflops=503.8,
            pcie=5,
            peer=0,
            watts=600,
        ),
        _gpu(
            "mi300x",
            "AMD Instinct MI300X data sheet",
            memory_mib=196592,
            bandwidth=5300e9,
            tflops=1307.4,
            pcie=5,
            peer=448e9,
            watts=750,
        ),
    )
}
"""By name."""


def gpu(name: str) -> Gpu:
    """A GPU by its name.

    Raises
    ------
    ArgumentError : there is none of that name.
    """
    return one_of("gpu", name, GPUS)
