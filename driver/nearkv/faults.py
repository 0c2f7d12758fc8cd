"""Faults on purpose: what a device, its link or a neighbour can do to a host, to test what is built on it.

Each fault ends in an error that says what it struck, and leaves everything else working; docs/faults.md says
which.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig, Opcode
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import ATTEND, CLAIM, DESCRIPTOR_BYTES, DESCRIPTOR_VERSION, EXTENSION
from nearkv_hw.abi.lines import LINE_BYTES, LINE_SHIFT
from nearkv_hw.abi.window import (
    DESCRIPTORS_OFFSET,
    DOORBELL,
    DOORBELL_OFFSET,
    RING,
    RING_LINE,
    register_address,
    window_base,
)
from nearkv_sim.columns import column
from nearkv_sim.events import ALL, CAPACITY, EventKind, Recording
from nearkv_sim.maintenance import Maintenance
from nearkv_sim.port import (
    DeviceTimeout,
    Fence,
    LinkDown,
    Poll,
    Port,
    Program,
    Read,
    ReadResult,
    Write,
)

from .codec import one, record_line
from .errors import ArgumentError

if TYPE_CHECKING:
    from .cache import KVCache
    from .device import Device
    from .sequences import Sequence as Handle


class Faults:
    """Faults of one open device, from here on; nothing happens until one is asked for.

    Parameters
    ----------
    device : an open device; everything of it passes here from now on.

    Examples
    --------
    >>> import nearkv, torch
    >>> dev = nearkv.open("model")
    >>> faults = nearkv.faults.Faults(dev)
    >>> kv = dev.kv_cache(layers=1, kv_heads=1, head_dim=32, dtype="fp16")
    >>> s = kv.sequence()
    >>> kv.append(s, layer=0, k=torch.ones(20, 1, 32).half(), v=torch.ones(20, 1, 32).half())
    >>> faults.poison(kv, s, layer=0, row=17)
    >>> try:
    ...     kv.attend([s], layer=0, q=torch.ones(1, 1, 32).half())
    ... except nearkv.errors.DeviceError as error:
    ...     print(error.status.name, error.sequence, error.page)
    POISON 0 1
    >>> dev.close()
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._port: FaultyPort | None = None

        def wrap(port: Port) -> Port:
            self._port = FaultyPort(port)
            return self._port

        device.wrap_port(wrap)

    @contextmanager
    def hang(self, tenant: int = 0) -> Iterator[None]:
        """Within the block no job of a tenant completes."""
        port = self._own()
        port.hanging.add(tenant)
        try:
            yield
        finally:
            port.hanging.discard(tenant)

    def lose_link(self, after_lines: int = 0) -> None:
        """The link goes down once so many more lines were written; the program under way ends there."""
        self._own().lines_left = after_lines

    def restore_link(self) -> None:
        """The link is up again; whatever was under way never arrived."""
        self._own().lines_left = None

    def reset(self) -> None:
        """The device starts anew: its memory, owners and rings are lost.

        Raises
        ------
        RuntimeError : for a device that cannot be reset while it is open.
        """
        self._own().reset()

    def poison(self, kv: KVCache, sequence: Handle, *, layer: int, row: int, kv_head: int = 0) -> None:
        """Invert two bits of the line that holds a row's K, more than can be corrected.

        Raises
        ------
        RuntimeError : for a device whose memory keeps no check bits.
        """
        self._own().inject(kv.address_of(sequence, layer=layer, row=row, kv_head=kv_head), (0, 1))

    @contextmanager
    def full_memory(self, tenant: int = 0) -> Iterator[None]:
        """Within the block a tenant gets no more extents than it has."""
        extents = self._device._tenant(tenant).extents
        with extents.no_more():
            yield

    def hostile(
        self, tenant: int, descriptors: npt.NDArray[np.uint8], extensions: npt.NDArray[np.uint8]
    ) -> None:
        """Post descriptors [n, 64] as a tenant that keeps no rules, past its driver; whatever comes of them.

        The tenant's own session is of no use afterwards.
        """
        config, port = self._device.config, self._own()
        window = window_base(config, tenant)
        (state,) = port.run([Read(one(register_address(config, tenant, RING_LINE)))])
        tail = RING.unpack(state.data[0].tobytes())["tail"]
        for begin in range(0, len(descriptors), config.ring_slots):
            part = slice(begin, begin + config.ring_slots)
            count = len(descriptors[part])
            slot = (tail + np.arange(count, dtype=np.uint64)) % np.uint64(config.ring_slots)
            places = window + DESCRIPTORS_OFFSET + slot * np.uint64(DESCRIPTOR_BYTES)
            tail = tail + count & (1 << DOORBELL["tail"].width) - 1
            bell = np.zeros((1, LINE_BYTES), np.uint8)
            column(DOORBELL, "tail", bell)[:] = tail
            port.run(
                [
                    Write(places, descriptors[part]),
                    Write(places + np.uint64(LINE_BYTES), extensions[part]),
                    Fence(),
                    Write(one(window + DOORBELL_OFFSET), bell),
                ]
            )
            while RING.unpack(self._state(tenant))["completed"] != tail:
                pass

    def _state(self, tenant: int) -> bytes:
        port = self._own()
        (state,) = port.run([Read(one(register_address(self._device.config, tenant, RING_LINE)))])
        return bytes(state.data[0])

    def _own(self) -> FaultyPort:
        assert self._port is not None
        return self._port


class FaultyPort:
    """A port that does what `Faults` says.

    Members
    -------
    config, kind : of the device.
    hanging : tenants whose jobs do not complete.
    lines_left : that are written before the link goes down; None for a link that stays.
    """

    def __init__(self, port: Port) -> None:
        self._port = port
        self.config = port.config
        self.kind = port.kind
        self.hanging: set[int] = set()
        self.lines_left: int | None = None

    def run(self, program: Program) -> list[ReadResult]:
        """See `Port.run`; LinkDown when the link goes down."""
        if not self.hanging and self.lines_left is None:
            return self._port.run(program)
        results = []
        for operation in program:
            if (
                isinstance(operation, Poll)
                and operation.address // self.config.aperture_bytes in self.hanging
            ):
                raise DeviceTimeout(f"the line at {operation.address:#x} did not change")
            if self.lines_left is not None:
                operation = self._before_it_goes(operation)
            results += self._port.run([operation])
        return results

    def _before_it_goes(self, operation: Write | Read | Fence | Poll) -> Write | Read | Fence | Poll:
        """An operation that the link still carries; the first lines of a write, if these are all."""
        assert self.lines_left is not None
        lines = len(operation.addresses) if isinstance(operation, Write) else 0
        if lines <= self.lines_left and (self.lines_left or not isinstance(operation, Read | Poll)):
            self.lines_left -= lines
            return operation
        if isinstance(operation, Write) and self.lines_left:
            part = slice(0, self.lines_left)
            enables = None if operation.enables is None else operation.enables[part]
            addresses, data = operation.addresses[part], operation.data[part]
            self._port.run([replace(operation, addresses=addresses, data=data, enables=enables)])
        self.lines_left = 0
        raise LinkDown("the link is down")

    def reset(self) -> None:
        """See `Faults.reset`."""
        reset: Callable[[], None] | None = getattr(self._port, "reset", None)
        if reset is None:
            raise RuntimeError(f"a {self.kind} device cannot be reset while it is open; open another one")
        reset()

    @property
    def link_bytes(self) -> int:
        """See `Port.link_bytes`."""
        return self._port.link_bytes

    @property
    def maintenance(self) -> Maintenance:
        """See `Port.maintenance`."""
        return self._port.maintenance

    def inject(self, address: int, bits: Sequence[int]) -> None:
        """See `Port.inject`."""
        self._port.inject(address, bits)

    def start_wave(self, path: Path) -> None:
        """See `Port.start_wave`."""
        self._port.start_wave(path)

    def record(self, capacity: int = CAPACITY, kinds: Collection[EventKind] = ALL) -> None:
        """See `Port.record`."""
        self._port.record(capacity, kinds)

    def recorded(self) -> Recording:
        """See `Port.recorded`."""
        return self._port.recorded()

    def close(self) -> None:
        """See `Port.close`."""
        self._port.close()


def hostile_descriptors(
    config: DeviceConfig, seed: int, count: int, *, targets: Sequence[int], own: Sequence[int]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Descriptors of a tenant that wants what is not its own, and their second lines, uint8 [count, 64] each.

    A third are noise; a third are good ones of the tenant's with one field changed; and a third aim on
    purpose: tables, queries, results and lists at a neighbour's addresses, claims and releases of its memory.

    Parameters
    ----------
    seed : of all choices.
    targets : device addresses of a neighbour's: pages, page tables, records.
    own : device addresses of page tables of the tenant's own.

    Raises
    ------
    ArgumentError : without either.
    """
    if not targets or not own:
        raise ArgumentError("hostile descriptors need addresses to aim at, and some of the tenant's own")
    chance = random.Random(seed)
    first = np.zeros((count, LINE_BYTES), np.uint8)
    second = np.zeros((count, LINE_BYTES), np.uint8)
    for index in range(count):
        kind = chance.randrange(3)
        if kind == 0:
            first[index] = np.frombuffer(chance.randbytes(LINE_BYTES), np.uint8)
            second[index] = np.frombuffer(chance.randbytes(LINE_BYTES), np.uint8)
            column(ATTEND, "version", first[index : index + 1])[:] = DESCRIPTOR_VERSION
            column(ATTEND, "opcode", first[index : index + 1])[:] = chance.choice(list(Opcode))
            continue
        values, more = _aimed(config, chance, targets, own, on_purpose=kind == 1)
        layout = CLAIM if "first_extent" in values else ATTEND
        first[index] = record_line(layout, **values)[0]
        second[index] = record_line(EXTENSION, **more)[0]
    return first, second


def hostile_accesses(
    config: DeviceConfig, seed: int, count: int, *, tenant: int, targets: Sequence[int]
) -> list[Read | Write]:
    """Reads and writes of a tenant that wants what is not its own, a line each.

    Half aim at a neighbour's lines and those beside them, through the tenant's aperture; the others go
    anywhere in the aperture, and behind the last one. None are to its own doorbell.

    Parameters
    ----------
    seed : of all choices.
    targets : device addresses of a neighbour's.

    Raises
    ------
    ArgumentError : without any.
    """
    if not targets:
        raise ArgumentError("hostile accesses need addresses to aim at")
    chance = random.Random(seed)
    made: list[Read | Write] = []
    base = tenant * config.aperture_bytes
    while len(made) < count:
        kind = chance.randrange(8)
        if kind < 4:
            extent = chance.choice(targets) // EXTENT_BYTES * EXTENT_BYTES
            near = chance.choice([chance.choice(targets), extent + chance.randrange(EXTENT_BYTES)])
            place = base + near
        elif kind < 6:
            place = base + chance.randrange(config.capacity_bytes)
        elif kind < 7:
            place = base + config.capacity_bytes + chance.randrange(1 << 18)
        else:
            place = base + config.capacity_bytes + chance.randrange(config.capacity_bytes)
            place += chance.choice([0, (config.apertures - tenant) * config.aperture_bytes])
        place = place // LINE_BYTES * LINE_BYTES
        if place == window_base(config, tenant) + DOORBELL_OFFSET:
            continue
        address = one(place)
        if chance.random() < 0.5:
            made.append(Read(address))
            continue
        data = np.frombuffer(chance.randbytes(LINE_BYTES), np.uint8).reshape(1, LINE_BYTES)
        enables = None if chance.random() < 0.5 else np.array([chance.getrandbits(LINE_BYTES)], np.uint64)
        made.append(Write(address, data, enables, poison=chance.random() < 0.2))
    return made


def _aimed(
    config: DeviceConfig,
    chance: random.Random,
    targets: Sequence[int],
    own: Sequence[int],
    *,
    on_purpose: bool,
) -> tuple[dict[str, int], dict[str, int]]:
    """The fields of one descriptor and of its second line."""
    if chance.random() < 0.1:
        extent = chance.choice(targets) // EXTENT_BYTES
        opcode = chance.choice([Opcode.CLAIM_EXTENTS, Opcode.RELEASE_EXTENTS])
        # of what is its own it gives nothing back, for then it could try little more
        count = chance.choice([1, 2, config.extents]) if opcode is Opcode.CLAIM_EXTENTS else 1
        given = {"version": DESCRIPTOR_VERSION, "opcode": opcode}
        return {**given, "first_extent": extent, "extent_count": count}, {}
    table = chance.choice(own)
    values = {
        "version": DESCRIPTOR_VERSION,
        "opcode": Opcode.ATTEND,
        "table": table,
        "queries": table,
        "result": own[0] // EXTENT_BYTES * EXTENT_BYTES + EXTENT_BYTES // 2,
        "row_end": chance.randrange(1, 9),
        "score_factor": 0x3F800000,
        "head_dim": 8,
        "value_dim": 8,
        "group": chance.choice([1, 2, 4]),
        "query_rows": 1,
        "page_rows_log2": 2,
        "query_format": 1,
        "k_format": 1,
        "v_format": 1,
        "output_form": chance.randrange(4),
    }
    more: dict[str, int] = {}
    if on_purpose:
        for name in chance.sample(["table", "queries", "result", "sinks"], chance.randrange(1, 4)):
            values[name] = chance.choice(targets)
            values["flags"] = 2 if name == "sinks" else values.get("flags", 0)
        if chance.random() < 0.5:
            values["flags"] = values.get("flags", 0) | 1
            field, option = chance.choice([("ranges", 6), ("tree", 1), ("slopes", 5), ("codebooks", 7)])
            more = {field: chance.choice(targets) >> LINE_SHIFT, "options": 1 << option}
            more |= {"range_count": 2} if field == "ranges" else {}
    else:
        changed = chance.choice([known for known in ATTEND if not known.reserved])
        values[changed.name] = chance.getrandbits(changed.width)
    return values, more
