"""Streams in cocotb benches: sources with random idle, sinks with random backpressure, the protocol checked.

The stream contract: an item is transferred in a cycle in which valid and ready are both high; once valid, the
source holds valid and payload until then; valid never waits for ready. `StreamSink` checks what it sees.
"""

from __future__ import annotations

import random as _random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import cocotb
from cocotb.clock import Clock
from cocotb.simtime import get_sim_time
from cocotb.triggers import Event, RisingEdge

from .payload import pack, unpack
from .runner import ports

PERIOD_NS = 2


def random(*names: object) -> _random.Random:
    """A generator that follows from the run's seed and `names` alone, whatever order the tests run in."""
    return _random.Random(f"{cocotb.RANDOM_SEED}/{'/'.join(map(str, names))}")


def cycle() -> int:
    """The number of the present clock cycle; right after a rising edge, of the cycle that the edge began."""
    return int(get_sim_time("ns")) // PERIOD_NS


async def start(dut: Any, *, reset_cycles: int = 2) -> None:
    """Set every input to zero, start the clock, reset the design; returns just after a rising edge."""
    names = ports()
    for name, port in names.items():
        if port["direction"] == "in" and name not in ("clk", "rst"):
            getattr(dut, name).value = 0
    Clock(dut.clk, PERIOD_NS, "ns").start(start_high=False)
    if "rst" in names:
        dut.rst.value = 1
        await cycles(dut, reset_cycles)
        dut.rst.value = 0
    await RisingEdge(dut.clk)


async def cycles(dut: Any, count: int) -> None:
    """Wait for `count` rising edges."""
    edge = RisingEdge(dut.clk)
    for _ in range(count):
        await edge


def value(handle: Any) -> int:
    """The unsigned integer that a port holds, whatever its width."""
    held = handle.value
    return held.to_unsigned() if hasattr(held, "to_unsigned") else int(held)


class StreamSource:
    """Sends items into an input stream of the design.

    Parameters
    ----------
    dut : the design, clock running.
    prefix : the stream's name: ports `{prefix}_valid`, `_ready`, `_payload`.
    idle : probability of a cycle without an item, for each item anew; may be changed at any time.
    shape : Amaranth shape or abi `Layout` of the payload: items are then values of it (dicts for structs),
        without it they are integers.

    Members
    -------
    cycles : list of the cycle in which each item was taken.

    While there is no item the payload is noise, so that a design that looks at it without valid is found out.
    """

    def __init__(self, dut: Any, prefix: str, *, idle: float = 0.0, shape: Any = None):
        self.idle = idle
        self.cycles: list[int] = []
        self._shape = shape
        self._items: deque[int] = deque()
        self._rng = random("source", prefix)
        self._edge = RisingEdge(dut.clk)
        self._valid = getattr(dut, f"{prefix}_valid")
        self._ready = getattr(dut, f"{prefix}_ready", None)
        self._payload = getattr(dut, f"{prefix}_payload", None)
        self._width = ports()[f"{prefix}_payload"]["width"] if self._payload is not None else 0
        self._filled = Event()
        self._drained = Event()
        self._drained.set()
        cocotb.start_soon(self._drive())

    def send(self, items: Iterable[Any]) -> None:
        """Queue items; they leave as idle and the design's ready let them."""
        self._items.extend(self._encode(item) for item in items)
        if self._items:
            self._drained.clear()
            self._filled.set()

    async def drained(self) -> None:
        """Wait until the design has taken every queued item."""
        await self._drained.wait()

    def _encode(self, item: Any) -> int:
        return int(item) if self._shape is None else pack(self._shape, item)

    async def _drive(self) -> None:
        active = False
        while True:
            if not self._items or (self.idle and self._rng.random() < self.idle):
                if active or self.idle:
                    self._valid.value = 0
                    self._set_payload(self._rng.getrandbits(self._width or 1))
                    active = False
                if self._items:
                    await self._edge
                else:
                    self._drained.set()
                    self._filled.clear()
                    await self._filled.wait()
                continue
            self._set_payload(self._items[0])
            self._valid.value = 1
            active = True
            await self._edge
            while self._ready is not None and not self._ready.value:
                await self._edge
            self._items.popleft()
            self.cycles.append(cycle() - 1)

    def _set_payload(self, bits: int) -> None:
        if self._payload is not None:
            self._payload.value = bits


class StreamSink:
    """Takes items from an output stream of the design and checks that it keeps the stream contract.

    Parameters
    ----------
    dut, prefix, shape : as in `StreamSource`; items are integers, or values of `shape`.
    backpressure : probability of a cycle without ready; may be changed at any time (1.0 stops the stream).
    deliver : called with each item when it is taken; without it items wait for `receive`.

    Members
    -------
    cycles : list of the cycle in which each item was taken.
    """

    def __init__(
        self,
        dut: Any,
        prefix: str,
        *,
        backpressure: float = 0.0,
        shape: Any = None,
        deliver: Callable[[Any], None] | None = None,
    ):
        self.backpressure = backpressure
        self.cycles: list[int] = []
        self._prefix = prefix
        self._shape = shape
        self._deliver = deliver
        self._items: deque[int] = deque()
        self._rng = random("sink", prefix)
        self._edge = RisingEdge(dut.clk)
        self._valid = getattr(dut, f"{prefix}_valid")
        self._ready = getattr(dut, f"{prefix}_ready", None)
        self._payload = getattr(dut, f"{prefix}_payload", None)
        self._reset = getattr(dut, "rst", None)
        self._arrived = Event()
        cocotb.start_soon(self._take())

    def __len__(self) -> int:
        """Items taken from the design and not received yet."""
        return len(self._items)

    async def receive(self, count: int = 1) -> list[Any]:
        """The next `count` items, in order; waits for them."""
        while len(self._items) < count:
            self._arrived.clear()
            await self._arrived.wait()
        return [self._decode(self._items.popleft()) for _ in range(count)]

    def _decode(self, bits: int) -> Any:
        return bits if self._shape is None else unpack(self._shape, bits)

    async def _take(self) -> None:
        held: int | None = None
        ready = self._ready is None
        while True:
            if self._ready is not None:
                wanted = not self.backpressure or self._rng.random() >= self.backpressure
                if wanted != ready:
                    self._ready.value = int(wanted)
                ready = wanted
            await self._edge
            if self._reset is not None and self._reset.value:
                held = None
                continue
            if not self._valid.value:
                assert held is None, f"{self._prefix}: valid fell before the item was taken (cycle {cycle()})"
                continue
            bits = value(self._payload) if self._payload is not None else 0
            assert held is None or bits == held, (
                f"{self._prefix}: payload {held:#x} became {bits:#x} before it was taken (cycle {cycle()})"
            )
            held = None if ready else bits
            if ready:
                self.cycles.append(cycle() - 1)
                if self._deliver is not None:
                    self._deliver(self._decode(bits))
                    continue
                self._items.append(bits)
                self._arrived.set()
