"""The host under cocotb: the test module inside the simulator that carries out programs from a socket.

`port.CocotbPort` starts the simulator with one end of a socket pair. Messages leave and answers are taken
with random idle and backpressure, ports and tags are drawn at random, and all that the device sends is
checked.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cocotb
import numpy as np
from cocotb.triggers import Event, RisingEdge, SimTimeoutError, with_timeout
from nearkv_hw.abi import DeviceConfig, configure
from nearkv_hw.abi.bits import Layout
from nearkv_hw.abi.cxl import (
    M2S_REQ,
    M2S_RWD,
    S2M_DRS,
    S2M_NDR,
    TAG_BITS,
    M2SReqOp,
    M2SRwDOp,
    MetaField,
    S2MDrsOp,
    S2MNdrOp,
)
from nearkv_hw.abi.hdm import WORD_BITS
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT

from .. import wire
from ..dram import inject
from ..messages import DRS_DATA, RWD_DATA, RWD_ENABLE
from ..port import Access, DeviceTimeout, Fence, Operation, Poll, Read, ReadResult, Write
from ..programs import ld_id_of
from .streams import PERIOD_NS, StreamSink, StreamSource, cycle, cycles, random, start

_TAGS = 64
_HANG_CYCLES = 200_000
_POLL_GAP_CYCLES = 64
_ALL_BYTES = (1 << LINE_BYTES) - 1


@dataclass(frozen=True)
class _Line:
    """One line to read or write: a row of an operation's arrays, and the LD-ID of its messages."""

    operation: Write | Read
    result: ReadResult | None
    index: int

    @property
    def ld_id(self) -> int:
        ld_ids = self.operation.ld_ids
        return 0 if ld_ids is None else int(ld_ids[self.index])


@dataclass
class _Port:
    """A port of the device's endpoint, with tags of its own; `outstanding` has None for a poll's read, and
    `ld_ids` the LD-ID of each of these."""

    number: int
    requests: StreamSource
    writes: StreamSource
    free_tags: list[int]
    outstanding: dict[int, _Line | None] = field(default_factory=dict)
    ld_ids: dict[int, int] = field(default_factory=dict)

    def release(self, header: dict[str, int], stream: str) -> _Line | None:
        """The line that an answer is for; its tag is free again."""
        tag = header["tag"]
        assert tag in self.outstanding, (
            f"{stream}_{self.number}: tag {tag:#x}, which no access awaits (cycle {cycle()})"
        )
        ld_id = self.ld_ids.pop(tag)
        assert header["ld_id"] == ld_id, f"{stream}_{self.number}: LD-ID {header['ld_id']} answers {ld_id}"
        self.free_tags.append(tag)
        return self.outstanding.pop(tag)


class Host:
    """Carries out programs on a device under test.

    Parameters
    ----------
    dut : the device, after reset, clock running.
    config : what it is made of.
    idle, backpressure : probabilities of a cycle without a message and without ready, on every stream.

    Of a device with several ports each access goes to any of them.
    """

    def __init__(self, dut: Any, config: DeviceConfig, *, idle: float, backpressure: float):
        self.link_bytes = 0
        self._config = config
        self._dut = dut
        self._answered = Event()
        self._rng = random("host")
        self._polled: tuple[int, Access] | None = None
        self._ports: list[_Port] = []
        while hasattr(dut, f"m2s_req_{len(self._ports)}_valid"):
            self._add_port(len(self._ports), idle, backpressure)

    def _add_port(self, number: int, idle: float, backpressure: float) -> None:
        dut = self._dut
        port = _Port(
            number=number,
            requests=StreamSource(dut, f"m2s_req_{number}", idle=idle),
            writes=StreamSource(dut, f"m2s_rwd_{number}", idle=idle),
            free_tags=self._rng.sample(range(1 << TAG_BITS), _TAGS),
        )
        for stream, deliver in (("s2m_ndr", self._completed), ("s2m_drs", self._arrived)):
            StreamSink(dut, f"{stream}_{number}", backpressure=backpressure, deliver=partial(deliver, port))
        self._ports.append(port)

    async def run(self, program: list[Operation]) -> list[ReadResult]:
        """The results of a program's reads; DeviceTimeout as in `Port.run`."""
        results: list[ReadResult] = []
        lines: deque[_Line] = deque()
        for operation in program:
            match operation:
                case Fence():
                    await self._exchange(lines)
                case Poll():
                    await self._exchange(lines)
                    await self._poll(operation)
                case Write():
                    lines.extend(_Line(operation, None, i) for i in range(len(operation.addresses)))
                case Read():
                    count = len(operation.addresses)
                    result = ReadResult(np.zeros((count, LINE_BYTES), np.uint8), np.zeros(count, np.uint8))
                    results.append(result)
                    lines.extend(_Line(operation, result, i) for i in range(count))
        await self._exchange(lines)
        return results

    async def _exchange(self, lines: deque[_Line]) -> None:
        """Send all lines and wait for all answers."""
        while lines or self._under_way():
            while lines and (port := self._free_port()):
                line = lines.popleft()
                tag = self._take_tag(port, line, line.ld_id)
                address = int(line.operation.addresses[line.index])
                if isinstance(line.operation, Read):
                    self._send_read(port, tag, address)
                else:
                    self._send_write(port, tag, address, line.operation, line.index)
            await self._wait()

    def _under_way(self) -> int:
        """Accesses that wait for their answers."""
        return sum(len(port.outstanding) for port in self._ports)

    def _free_port(self) -> _Port | None:
        """A port with a free tag, at random."""
        free = [port for port in self._ports if port.free_tags]
        return self._rng.choice(free) if free else None

    async def _poll(self, poll: Poll) -> None:
        began = cycle()
        while True:
            self._polled = None
            port = self._rng.choice(self._ports)
            tag = self._take_tag(port, None, ld_id_of(self._config, poll.address))
            self._send_read(port, tag, poll.address)
            while self._polled is None:
                await self._wait()
            found, access = self._polled
            if access != Access.DATA:
                what = "is poisoned" if access == Access.POISON else "is in no memory"
                raise DeviceTimeout(f"the line at {poll.address:#x} {what}")
            if found & poll.mask == poll.value:
                return
            waited = cycle() - began
            if waited >= poll.timeout_cycles:
                raise DeviceTimeout(f"the line at {poll.address:#x} did not change within {waited} cycles")
            await cycles(self._dut, self._rng.randint(0, min(_POLL_GAP_CYCLES, waited // 8)))

    async def _wait(self) -> None:
        """Wait for an answer of any kind."""
        self._answered.clear()
        try:
            await with_timeout(self._answered.wait(), _HANG_CYCLES * PERIOD_NS, "ns")
        except SimTimeoutError:
            raise AssertionError(
                f"{self._under_way()} accesses have had no answer for {_HANG_CYCLES} cycles"
            ) from None

    def _take_tag(self, port: _Port, line: _Line | None, ld_id: int) -> int:
        tag = port.free_tags.pop(self._rng.randrange(len(port.free_tags)))
        port.outstanding[tag], port.ld_ids[tag] = line, ld_id
        return tag

    def _send_read(self, port: _Port, tag: int, address: int) -> None:
        port.requests.send(
            [
                M2S_REQ.pack(
                    valid=1,
                    opcode=self._rng.choice([M2SReqOp.MEM_RD, M2SReqOp.MEM_RD_DATA]),
                    meta_field=MetaField.NO_OP,
                    tag=tag,
                    address=address >> LINE_SHIFT,
                    ld_id=port.ld_ids[tag],
                )
            ]
        )

    def _send_write(self, port: _Port, tag: int, address: int, write: Write, index: int) -> None:
        whole = write.enables is None
        enable = int(write.enables[index]) if write.enables is not None else _ALL_BYTES
        header = M2S_RWD.pack(
            valid=1,
            opcode=M2SRwDOp.MEM_WR if whole else M2SRwDOp.MEM_WR_PTL,
            meta_field=MetaField.NO_OP,
            tag=tag,
            address=address >> LINE_SHIFT,
            poison=write.poison,
            ld_id=port.ld_ids[tag],
        )
        data = int.from_bytes(write.data[index].tobytes(), "little")
        port.writes.send([header | enable << RWD_ENABLE | data << RWD_DATA])
        self.link_bytes += LINE_BYTES

    def _completed(self, port: _Port, message: int) -> None:
        header = _header("s2m_ndr", S2M_NDR, message)
        assert header["opcode"] == S2MNdrOp.CMP, f"s2m_ndr: opcode {header['opcode']} is not Cmp"
        line = port.release(header, "s2m_ndr")
        assert line is not None, f"s2m_ndr: tag {header['tag']:#x} is a read's"
        assert isinstance(line.operation, Write), f"s2m_ndr: tag {header['tag']:#x} is a read's"
        self._answered.set()

    def _arrived(self, port: _Port, message: int) -> None:
        header = _header("s2m_drs", S2M_DRS, message)
        assert header["opcode"] in list(S2MDrsOp), f"s2m_drs: unknown opcode {header['opcode']}"
        data = message >> DRS_DATA
        access = Access.POISON if header["poison"] else Access.DATA
        if header["opcode"] == S2MDrsOp.MEM_DATA_NXM:
            access, data = Access.OUTSIDE, 0
        line = port.release(header, "s2m_drs")
        if line is None:
            self._polled = (data & 0xFFFF_FFFF_FFFF_FFFF, access)
        else:
            assert line.result is not None, f"s2m_drs: tag {header['tag']:#x} is a write's"
            line.result.data[line.index] = np.frombuffer(data.to_bytes(LINE_BYTES, "little"), np.uint8)
            line.result.access[line.index] = access
        self.link_bytes += LINE_BYTES
        self._answered.set()


class Registers:
    """The register port of a device's HDM decoders, if it has one.

    Parameters
    ----------
    dut : the device under test.
    """

    def __init__(self, dut: Any):
        self._edge = RisingEdge(dut.clk)
        self._port: dict[str, Any] = {}
        if hasattr(dut, "decoder_write_valid"):
            names = ("write_payload", "write_valid", "write_ready", "read_word", "read_data")
            self._port = {name: getattr(dut, f"decoder_{name}") for name in names}
            self._port["write_valid"].value = 0

    async def access(self, *, word: int, value: int | None) -> int | None:
        """Write a register, or read it where there is no value; what it holds. None without such a port."""
        port = self._port
        if not port:
            return None
        if value is not None:
            port["write_payload"].value = word | value << WORD_BITS
            port["write_valid"].value = 1
            await self._ready()
            port["write_valid"].value = 0
            return value
        await self._ready()
        port["read_word"].value = word
        for _ in range(2):
            await self._edge
        return int(port["read_data"].value)

    async def _ready(self) -> None:
        """Until a cycle in which a write is taken: no commit is checked."""
        await self._edge
        while not self._port["write_ready"].value:
            await self._edge


def _header(stream: str, layout: Layout, message: int) -> dict[str, int]:
    header = layout.unpack(message)
    assert header["valid"], f"{stream}: a message whose valid bit is clear (cycle {cycle()})"
    assert message & layout.reserved_mask() == 0, f"{stream}: reserved bits are set: {header}"
    return header


@cocotb.test()  # type: ignore[untyped-decorator]
async def serve(dut: Any) -> None:
    """Carry out programs until the other end of the socket closes."""
    await start(dut)
    config = configure(**json.loads(os.environ["NEARKV_CONFIG"]))
    host = Host(
        dut,
        config,
        idle=float(os.environ["NEARKV_IDLE"]),
        backpressure=float(os.environ["NEARKV_BACKPRESSURE"]),
    )
    registers = Registers(dut)
    with socket.socket(fileno=int(os.environ["NEARKV_SOCKET"])) as connection:
        while True:
            try:
                head, arrays = wire.receive(connection)
            except EOFError:
                return
            reply: dict[str, Any] = {}
            results: list[ReadResult] = []
            if "register" in head:
                reply["value"] = await registers.access(**head["register"])
                wire.send(connection, reply)
                continue
            if "inject" in head:
                inject(ctypes.CDLL(None), None, config, **head["inject"])
                wire.send(connection, reply)
                continue
            try:
                results = await host.run(wire.unpack_program(head["program"], arrays))
            except DeviceTimeout as error:
                reply["timeout"] = str(error)
            reply |= {"link_bytes": host.link_bytes, "cycles": cycle()}
            wire.send(connection, reply, wire.pack_results(results))
