"""What one layer's attention takes on a GPU, over the link, and on devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil
from typing import Any

from nearkv_hw.abi import DeviceConfig
from nearkv_hw.abi.config import Link, Placement
from nearkv_hw.abi.dram import PARTS, ceiling
from nearkv_hw.abi.formats import OutputForm
from nearkv_hw.abi.lines import LINE_BYTES, lines_of
from nearkv_hw.abi.link import RATES
from nearkv_hw.abi.memory import ResultLayout
from nearkv_sim.model import timing

from .energy import bits_of_sums
from .models import AttentionLayers
from .setup import Setup

_QUERY_BYTES = 2
"""Bytes of a query's element: bf16."""
_COMMAND_LINES = 1
"""Lines that a job's descriptor, and its record, take; they are the command window's and not in DRAM."""


@dataclass(frozen=True, kw_only=True)
class OnDevices:
    """Attention of one layer on the devices.

    Parameters
    ----------
    seconds : from doorbell to last completion, all devices at once.
    bound : which part of the device sets the pace.
    out_bytes, in_bytes : over the links, to the devices and from them.
    out_s, in_s : what these take.
    lines : K and V lines that the units take, every pass counted.
    queries : lines that come over the links into DRAM, and that the units read from there.
    results, answers : lines that the units write to DRAM, and those of them that go back over the links.
    multiplies : of the units.
    sum_bits : of their sums, read and written.
    """

    seconds: float
    bound: str
    out_bytes: float
    in_bytes: float
    out_s: float
    in_s: float
    lines: float
    queries: float
    results: float
    answers: float
    multiplies: float
    sum_bits: float


def gpu_seconds(setup: Setup, kind: AttentionLayers, rows: float, batch: int) -> float:
    """Attention of one layer over `rows` rows of each sequence in GPU memory; 0 without rows."""
    if rows <= 0:
        return 0.0
    gpu = setup.gpu
    rate = setup.gpus * gpu.bandwidth.value * gpu.attention_efficiency.value
    read = batch * rows * kind.row_bytes(setup.kv_format) / rate
    flops = 2 * batch * rows * kind.q_heads * (kind.head_dim + kind.value_dim)
    return gpu.attention_launch_s.value + max(read, flops / (setup.gpus * gpu.flops.value))


def link_rates(setup: Setup) -> tuple[float, float]:
    """Bytes/s from GPUs to devices and back: the devices' links or the GPUs' own, what is less.

    Hosts that share the devices share their links.
    """
    write, read = _link_bytes(setup.config.link)
    own = setup.gpus * setup.gpu.host_link.value
    devices = setup.devices / setup.hosts
    return (
        setup.link_factor * min(own, devices * write),
        setup.link_factor * min(own, devices * read),
    )


@cache
def _link_bytes(link: Link) -> tuple[float, float]:
    """Bytes/s that a link writes and reads."""
    rate = RATES[link]
    return float(rate.write_bytes_per_second), float(rate.read_bytes_per_second)


def fetch_rate(setup: Setup) -> float:
    """Bytes/s at which rows come over the link: no faster than the devices' DRAM delivers them."""
    part, config = PARTS[setup.config.dram], setup.config
    lines = config.channels * ceiling(part, config.density_gbit, config.refresh) * config.clock_mhz * 1e6
    return min(link_rates(setup)[1], setup.devices / setup.hosts * lines * LINE_BYTES)


def on_devices(setup: Setup, kind: AttentionLayers, rows: float, batch: int, *, partial: bool) -> OnDevices:
    """Attention of one layer over `rows` rows of each sequence that lie on the devices.

    Jobs, one per sequence and KV head, are dealt to the devices; where there are fewer jobs than devices the
    rows of each are shared out, too, and partial results come back.

    Parameters
    ----------
    setup : with a placement that has units.
    kind : the layers.
    rows : of each sequence.
    batch : sequences.
    partial : whether other rows of the sequences lie elsewhere, so that partial results come back.
    """
    config, jobs = setup.config, batch * kind.kv_heads
    shares = max(1, setup.devices // jobs)
    each = ceil(jobs * shares / setup.devices)
    job_rows = max(1, ceil(rows / shares))
    form = OutputForm.PARTIAL if partial or shares > 1 else OutputForm.BF16
    layout = ResultLayout(kind.value_dim, form)
    answer_lines = layout.lines if form is OutputForm.PARTIAL else layout.planes[0]
    query_lines = lines_of(kind.head_dim * _QUERY_BYTES)
    row_lines = kind.pitch_bytes(setup.kv_format) / kind.kv_heads / LINE_BYTES
    taken = 1 + kind.value_dim / kind.head_dim if kind.shared_row else 1.0
    cycles, bound = _cycles(
        config,
        setup.host_share,
        jobs=each * setup.hosts,
        rows=job_rows,
        group=kind.group,
        value_dim=kind.value_dim,
        row_lines=row_lines,
        query_lines=query_lines,
        page_rows=setup.page_rows,
        result_lines=layout.lines,
        taken=taken / setup.unit_rate,
    )
    heads, passes = batch * kind.q_heads * shares, len(timing.passes_of(config, kind.group))
    queries, answers, commands = heads * query_lines, heads * answer_lines, jobs * shares * _COMMAND_LINES
    out_bytes, in_bytes = LINE_BYTES * (queries + commands), LINE_BYTES * (answers + commands)
    write_rate, read_rate = link_rates(setup)
    products = batch * rows * kind.q_heads * (kind.head_dim + kind.value_dim)
    return OnDevices(
        seconds=cycles / (config.clock_mhz * 1e6),
        bound=bound,
        out_bytes=out_bytes,
        in_bytes=in_bytes,
        out_s=out_bytes / write_rate,
        in_s=in_bytes / read_rate,
        lines=jobs * rows * row_lines * passes,
        queries=queries,
        results=heads * layout.lines,
        answers=answers,
        multiplies=products,
        sum_bits=bits_of_sums(batch * rows * kind.q_heads * kind.value_dim),
    )


@lru_cache(maxsize=1 << 16)
def _cycles(config: DeviceConfig, host_share: float, **work: Any) -> tuple[float, str]:
    """Cycles of equal jobs, and what sets their pace."""
    jobs = timing.uniform(config, **work)
    found = timing.batch(config, [jobs], host_share=host_share)
    return timing.call(config, jobs, host_share=host_share), found.bound


def has_units(setup: Setup) -> bool:
    """Whether the devices work attention out themselves."""
    return setup.config.placement is not Placement.HOST
