"""What others published beside what this package says of the same.

A figure of theirs that is a parameter of ours would stand beside itself and is left out: the 154 ns that CXL
adds to a load, and the 140 ns of a switch. Rows whose number of ours is another source's say so, and those of
GPUs whose fit is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearkv_hw.abi import configure
from nearkv_hw.abi.config import Link
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.link import RATES
from nearkv_sim.model import timing

from .gpus import gpu
from .layers import fetch_rate, gpu_seconds, on_devices
from .setup import CXL_LOAD_S, Setup, device
from .table import model as known

_ATTACC_PEAK = 670.4e9
"""Bytes/s of AttAcc's stack."""
_ATTACC_TCK_S = 0.769e-9
_DMSIM = "CXL-DMSim, arXiv 2411.02282"
_TARGET_NS = 80.0
"""From MemRd to MemData at a device's pins, x16 at 64 GT/s, idle, without IDE: CXL 3.1 tables 13-2, 13-3."""
_MEASURED_BYTES = 50.7e9
"""Bytes/s that reads brought over a x16 link at 32 GT/s (CXL-DMSim)."""


@dataclass(frozen=True)
class Comparison:
    """A published number and ours.

    Parameters
    ----------
    what : of which quantity, with its conditions.
    source : who published it.
    unit : of both.
    theirs, ours : the numbers.
    note : why they differ, or what of theirs went into ours.
    """

    what: str
    source: str
    unit: str
    theirs: float
    ours: float
    note: str = ""

    @property
    def difference(self) -> float:
        """Ours against theirs, relative."""
        return self.ours / self.theirs - 1


def comparisons() -> list[Comparison]:
    """Every comparison, in the order of the table."""
    return [*_gpus(), *_links(), *_latencies(), *_buffering(), *_attacc(), *_bounds(), *_llama()]


def _gpus() -> Iterator[Comparison]:
    """Decode attention of vLLM: microseconds per layer are a launch and a slope by rows of all sequences."""
    fits = (
        ("rtx-4090", "llama-3.1-8b", 27.3, 0.004299, "its fit is our launch and rate"),
        ("rtx-pro-6000", "llama-3.1-8b", 25.1, 0.002684, "its fit is our launch and rate"),
        ("rtx-pro-6000", "qwen3-32b", 25.5, 0.002686, "launch and rate are those of Llama-3.1-8B"),
    )
    for name, model, launch, slope, note in fits:
        for sequences, rows in ((1, 4096), (16, 8192)):
            setup = Setup(model=known(model), context=rows, batch=sequences, gpu=gpu(name))
            kind = setup.model.attention[0]
            yield Comparison(
                f"{name}, {model}: attention of a layer, {sequences} x {rows:,} rows",
                "LLMServingSim profiles of vLLM 0.19",
                "us",
                launch + slope * sequences * rows,
                gpu_seconds(setup, kind, rows, sequences) * 1e6,
                note,
            )


def _links() -> Iterator[Comparison]:
    rate = RATES[Link.X16_32]
    yield Comparison(
        "x16 link at 32 GT/s: reads",
        _DMSIM,
        "GB/s",
        _MEASURED_BYTES / 1e9,
        float(rate.read_bytes_per_second) / 1e9,
        "ours is the ceiling of the flits, without credits that run out",
    )
    rate = RATES[Link.X16_64]
    wire = rate.wires * rate.transfers_per_second.value / 8
    yield Comparison(
        "x16 link at 64 GT/s: lines read, of what the wires carry",
        "CXL 3.1 table 13-1, note: 60 to 90 %",
        "%",
        90.0,
        100 * float(rate.read_bytes_per_second / wire),
        "beside the upper end, for ours is a ceiling",
    )


def _latencies() -> Iterator[Comparison]:
    """A read at the device's pins, and one of the host's."""
    for dram, name in (("ddr5_6400", "DDR5-6400"), ("lpddr5x_8533", "LPDDR5X-8533")):
        yield Comparison(
            f"MemRd to MemData at the device, idle, a closed bank of {name}",
            "CXL 3.1 tables 13-2 and 13-3, target",
            "ns",
            _TARGET_NS,
            _device_read_s(dram) * 1e9,
            "ours ends at the endpoint: no PHY and no link layer",
        )
    yield Comparison(
        "a load over CXL, at the host",
        "Melody, ASPLOS 2025: the middle of 140 to 410 ns, four devices on five CPUs",
        "ns",
        (140 + 410) / 2,
        CXL_LOAD_S.value * 1e9,
        f"ours is the ASIC of {_DMSIM}: 130 ns of a local load and 154 more",
    )


def _buffering() -> Iterator[Comparison]:
    """The buffering law: what must be under way to fill a link is its rate times the latency."""
    rate = float(RATES[Link.X16_32].read_bytes_per_second)
    from_host = rate * CXL_LOAD_S.value / LINE_BYTES
    yield Comparison(
        "lines under way at the device that fill a x16 link at 32 GT/s with reads, DDR5-6400",
        f"{_MEASURED_BYTES / 1e9:g} GB/s times {_TARGET_NS:g} ns over 64 bytes",
        "lines",
        _MEASURED_BYTES * _TARGET_NS * 1e-9 / LINE_BYTES,
        rate * _device_read_s("ddr5_6400") / LINE_BYTES,
        f"as the rate and the latency above; from the host, {CXL_LOAD_S.value * 1e9:.0f} ns away, it takes "
        f"{from_host:.0f}",
    )


def _device_read_s(dram: str) -> float:
    """Seconds from a read to its line, at the endpoint of an idle device."""
    config = device(dram=dram)
    return timing.host_read_cycles(config) / (config.clock_mhz * 1e6)


def _attacc() -> Iterator[Comparison]:
    """AttAcc's buffer-die placement in an HBM3 stack: heads of 4,096 rows of 128 fp16 elements."""
    config = configure(dram="hbm3_6400", channels=16, capacity_bytes=1 << 34)
    for heads, rows, cycles in ((188, 4096, 871_721), (188, 2048, 435_461), (130, 4096, 725_887)):
        work = timing.uniform(
            config, jobs=heads, rows=rows, group=1, value_dim=128, row_lines=8, query_lines=4
        )
        moved = heads * rows * 512
        ours = heads * rows * 8 / (timing.call(config, work) * config.slices)
        yield Comparison(
            f"AttAcc buffer die: {heads} heads, {rows:,} rows",
            "AttAcc, public cycle results",
            "of peak",
            moved / (cycles * _ATTACC_TCK_S) / _ATTACC_PEAK,
            ours,
            "refresh of all banks every 3.9 us and rows of 1 KiB cost ours more"
            if heads == 188
            else "heads dealt to 32 pseudo-channels do not balance; our pages, dealt to channels, do",
        )


def _bounds() -> Iterator[Comparison]:
    """What a unit at the controller gains over reading the rows: DRAM over link."""
    cases = (
        ("64 x LPDDR5X-8533 over a x16 link at 32 GT/s", 1.1e12 / 63e9, "lpddr5x_8533", 16),
        ("4 x DDR5-6400 over a x16 link at 32 GT/s", 3.2, "ddr5_6400", 4),
    )
    for what, theirs, dram, channels in cases:
        config = device(dram=dram, channels=channels, link="x16_32")
        setup = Setup(model=known("llama-3.1-70b"), context=131072, gpus=2, config=config)
        kind = setup.model.attention[0]
        near = on_devices(setup, kind, 131072, 1, partial=False)
        far = 131072 * kind.pitch_bytes(setup.kv_format) / fetch_rate(setup)
        yield Comparison(
            f"speed-up bound: {what}",
            "peak over peak",
            "times",
            theirs,
            far / near.seconds,
            "of their peaks, DRAM loses a tenth to refresh and rows, the link a sixth to headers",
        )


def _llama() -> Iterator[Comparison]:
    """Llama-3.1-70B at 128K: all attention of a token."""
    for what, theirs, source, overrides, near in (
        ("rows over an x16 link at 32 GT/s", 847.0, "42.9 GB at 50.7 GB/s", {"link": "x16_32"}, False),
        ("units at 4 DDR5-6400 channels", 233.0, "42.9 GB at 204.8 GB/s x 0.9", {}, True),
        (
            "units at 64 LPDDR5X channels",
            49.0,
            "42.9 GB at 1.1 TB/s x 0.8",
            {"dram": "lpddr5x_8533", "channels": 16},
            True,
        ),
    ):
        config = device(**overrides)
        setup = Setup(model=known("llama-3.1-70b"), context=131072, gpus=2, config=config)
        kind = setup.model.attention[0]
        if near:
            seconds = on_devices(setup, kind, 131072, 1, partial=False).seconds
        else:
            seconds = 131072 * kind.pitch_bytes(setup.kv_format) / fetch_rate(setup)
        yield Comparison(f"Llama-3.1-70B at 128K, a token: {what}", source, "ms", theirs, 80e3 * seconds)
