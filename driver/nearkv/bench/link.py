"""What flits carry, how fast they are simulated, and what the link adds to an access."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low
from typing import Any

import numpy as np
from nearkv_hw.abi.config import Link, LinkLayer
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.link import WIRE_NS
from nearkv_sim.events import EventKind
from nearkv_sim.link import KINDS, CompiledLink, LinkSetup, Passed, Traffic
from nearkv_sim.port import Program, Read, Write

from nearkv.bench import Progress, Quiet
from nearkv.device import Device, open

MESSAGES = 200_000
"""Requests of each measurement of what flits carry."""
TARGETS_NS = {"read": 80, "write": 40}
"""CXL 3.1 tables 13-2 and 13-3: MemRd to MemData and MemWr to Cmp, at the device's pins."""
_PAIRS = {
    "flits of 68 bytes with multi-data headers": LinkSetup(layer={"multi_data": True}),
    "flits of 68 bytes without multi-data headers": LinkSetup(layer={"multi_data": False}),
    "flits of 256 bytes": LinkSetup(flit_bytes=256),
}
_ACCESSES = 21
_NEVER = 1.0


def steps(layers: tuple[LinkLayer, ...]) -> int:
    """Steps that `measure` tells of."""
    return len(_PAIRS) + len(layers)


def measure(
    layers: tuple[LinkLayer, ...] = tuple(LinkLayer), progress: Progress | None = None
) -> Iterator[dict[str, Any]]:
    """Results `link.*`.

    Parameters
    ----------
    layers : link layers of the devices whose latencies are measured.
    progress : told of every step.
    """
    progress = progress or Quiet()
    for name, setup in _PAIRS.items():
        progress.begin(name)
        yield from _packing(CompiledLink(setup, progress.tell))
    for layer in layers:
        progress.begin(f"latency with link_layer={layer.name.lower()}")
        with open("rtl", report=progress.tell, link=Link.X8_32, link_layer=layer) as device:
            yield from _latencies(device)


def _packing(link: CompiledLink) -> Iterator[dict[str, Any]]:
    """Lines per flit where nothing but flits is short, and simulated flits per second."""
    setup = link.setup
    config = {"link_layer": f"flits_{setup.flit_bytes}", "messages": MESSAGES, **setup.layer}
    reads = link.run(Traffic(messages=MESSAGES, idle=(0, _NEVER, 0, 0), answers=True))
    writes = link.run(Traffic(messages=MESSAGES, idle=(_NEVER, 0, 0, 0), answers=True, full=1.0))
    drs, rwd = KINDS.index("drs"), KINDS.index("rwd")
    yield _result("read.lines_per_flit", reads.received[drs] / reads.flits[1], "lines", config)
    yield _result("write.lines_per_flit", writes.received[rwd] / writes.flits[0], "lines", config)
    yield _result("flits_per_s", _flits(reads, writes) / (reads.seconds + writes.seconds), "flits/s", config)


def _flits(*runs: Passed) -> int:
    return sum(sum(run.flits) for run in runs)


def _latencies(device: Device) -> Iterator[dict[str, Any]]:
    """From a request to its answer at the host's message streams, one access at a time, the middle of a few.

    Reads are of a closed bank of the DRAM. With a link layer the host's time is in it, and that on the wires,
    `wire_ns`.
    """
    config, port, tenant = device.config, device._port, device._tenant(0)
    address = tenant.hosts(tenant.scattered("latency", 1, LINE_BYTES))
    programs: dict[str, tuple[Program, str, str]] = {
        "read": ([Read(address)], "m2s_req", "s2m_drs"),
        "write": ([Write(address, np.zeros((1, LINE_BYTES), np.uint8))], "m2s_rwd", "s2m_ndr"),
    }
    for name, (program, request, answer) in programs.items():
        took = []
        for _ in range(_ACCESSES):
            port.record(kinds=[EventKind.LINK])
            port.run(program)
            events = port.recorded()
            sent, came = (events.of(f"link.{stream}.0")["cycle"] for stream in (request, answer))
            took.append(int(came[0]) - int(sent[0]))
        cycles = median_low(took)
        about = {
            **config.to_dict(),
            "cycles": cycles,
            "wire_ns": 0 if config.link_layer is LinkLayer.OFF else 2 * WIRE_NS,
            "target_ns": TARGETS_NS[name],
        }
        yield _result(f"{name}_latency_ns", cycles * 1000 / config.clock_mhz, "ns", about)


def _result(name: str, value: float, unit: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": f"link.{name}", "value": value, "unit": unit, "config": config}
