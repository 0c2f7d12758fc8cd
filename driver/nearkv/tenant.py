"""One tenant of a device: its aperture, its command ring, and the memory that it owns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import LINE_BYTES, DeviceConfig, Feature, Opcode, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import CLAIM, DESCRIPTOR_VERSION
from nearkv_hw.abi.memory import CACHE, LAYOUT_VERSION, ROOT, ROOT_MAGIC
from nearkv_sim.columns import column
from nearkv_sim.port import Access, Addresses, Lines, Operation, Port, Read, ReadResult, Write

from .allocator import Arena, Extents, Pages, Run
from .codec import one, record_line
from .errors import (
    AccessError,
    DeviceError,
    DeviceResetError,
    OutOfMemoryError,
    ProtocolError,
    QuotaError,
    VersionError,
)
from .memory_use import MemoryUse
from .queued_port import QueuedPort
from .ring import CommandRing, Completions
from .streams import Stream

if TYPE_CHECKING:
    from .recovery import FoundCache
    from .table import PageTable

Made = TypeVar("Made")
_LANE_BYTES = EXTENT_BYTES // 16
"""Of an extent that a lane has for queries or results, unless it needs more."""
_DEPTH = 8
"""Calls under way at most in a tenant's own stream."""

_PROBED = 8
"""Extents of which it is asked at once whether they are the tenant's."""
_PLAIN = Feature(0)
_NOT_TO_BE_HAD = (Status.EXTENT_TAKEN, Status.EXTENT_BUSY, Status.OVER_QUOTA)
"""How a claim may end that is no fault."""


class Tenant:
    """What caches of one tenant share.

    Addresses are device addresses everywhere but in programs, where `host` turns them into host addresses.

    Parameters
    ----------
    port : the device.
    config : what the device says of itself.
    aperture : the tenant's number.
    features : what the device has beyond plain jobs.
    fresh : whatever the tenant owns holds nothing, because the device was reset.

    Raises
    ------
    OutOfMemoryError : when other tenants own the whole memory.

    Members
    -------
    stream : of calls that name none.
    was_reset : whether the device turned out not to know the tenant any more.
    moves : how often an area of `staging` or `scattered` went elsewhere; until then its addresses stay.
    """

    def __init__(
        self,
        port: Port,
        config: DeviceConfig,
        aperture: int,
        features: Feature = _PLAIN,
        *,
        fresh: bool = False,
    ) -> None:
        self.config = config
        self.features = features
        self.aperture = aperture
        self._port = QueuedPort(port)
        self.ring = CommandRing(self._port, config, aperture)
        self.ring.on_complete = self._reclaim
        self.ring.on_hang = self.raise_if_reset
        self.stream = Stream(_DEPTH, self.flush)
        self._base = aperture * config.aperture_bytes
        self._load = [0] * config.slices
        self._pages: dict[int, Pages] = {}
        self._staging: dict[str, tuple[int, int]] = {}
        self._scattered: dict[str, list[int]] = {}
        self._retired: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()
        """Memory that jobs under way may still read: the number of the first job that does not."""
        self._lanes: list[int] = []
        self._lanes_made = 0
        self.moves = 0
        self._at_quota = False
        owned, roots = self._owned_extents() if self.ring.posted else ([], [])
        self.extents = Extents(
            self._claim,
            first=config.extents_of(aperture).start,
            extents=config.extents_of(aperture).stop,
            channels=config.slices,
            in_use=frozenset(owned),
            any_free=self._any_free,
            at_quota=lambda: self._at_quota,
            no_room=self._no_room,
        )
        self.arena = Arena(self.extents)
        self._chain: list[int] = []
        """Addresses of this driver's cache records, in the order in which the root leads to them."""
        self._owned = frozenset(owned)
        self._adopted = False
        self._generations = 0
        self.was_reset = False
        if owned:
            self._root = self._find_root(owned, roots)
            self._earlier = 0
            if fresh or not self.read(one(self._root)).any():  # a session that ended as it began
                self._write_root(0)
            else:
                self._earlier, self._generations = self._attach()
        else:
            self._root = self._format()
            self._earlier = 0

    @property
    def device_kind(self) -> str:
        """How the device runs."""
        return self._port.kind

    def host(self, address: int) -> int:
        """The host address of a device address."""
        return self._base + address

    def hosts(self, addresses: Addresses) -> Addresses:
        """The host addresses of device addresses."""
        return addresses + np.uint64(self._base)

    def write(self, addresses: Addresses, data: Lines) -> Write:
        """The operation that writes lines at device addresses."""
        return Write(self.hosts(addresses), data)

    def run(self, program: Sequence[Operation]) -> list[ReadResult]:
        """Carry out a program of memory accesses."""
        return self._port.run(program)

    def ask(self, request: dict[str, Any], arrays: Sequence[Any] = ()) -> tuple[dict[str, Any], list[Any]]:
        """What the server of a device answers beside it; see `QueuedPort.ask`."""
        return self._port.ask(request, arrays)

    def read(self, addresses: Addresses) -> Lines:
        """Lines [n, 64] at device addresses; AccessError as `checked` has it."""
        (result,) = self._port.run([Read(self.hosts(addresses))])
        return self.checked(result, addresses)

    def checked(self, result: ReadResult, addresses: Addresses) -> Lines:
        """The data of a read; AccessError when a line is poisoned or is no memory of the tenant's, and
        DeviceResetError when the device was reset."""
        if np.count_nonzero(result.access):
            index = int(np.flatnonzero(result.access)[0])
            address, poison = int(addresses[index]), result.access[index] == Access.POISON
            if not poison:
                self.raise_if_reset()
            raise AccessError(
                f"line {address:#x} of tenant {self.aperture} "
                + ("is poisoned: what it held is lost" if poison else "is outside what the tenant owns"),
                address=address,
                poison=bool(poison),
            )
        return result.data

    def retire(self, give: Callable[..., None], *what: Any) -> None:
        """Give memory back that nothing names any more, once no job under way reads it."""
        if self.ring.outstanding:
            self._retired.append((self.ring.posted, give, what))
        else:
            give(*what)

    def with_memory(self, make: Callable[[], Made]) -> Made:
        """What `make` returns; where it finds no memory, once jobs under way have given theirs back.

        Raises
        ------
        OutOfMemoryError : when there is none then.
        """
        try:
            return make()
        except OutOfMemoryError:
            if not self._retired:
                raise
        self.ring.wait_through(self.ring.posted)
        return make()

    def settle(self, tables: Iterable[PageTable]) -> None:
        """Wait for the jobs under way that read page tables which are about to change."""
        self.ring.wait_through(max((table.jobs_end for table in tables), default=0))

    def enqueue(self, program: Sequence[Operation]) -> None:
        """Have writes wait for the next program, or `flush`; nothing overtakes them."""
        self._port.enqueue(program)

    def flush(self) -> None:
        """Carry out what waits."""
        self._port.flush()

    def take_lane(self) -> int:
        """The number of a set of areas that no call under way uses; 0 is that of calls that wait."""
        if not self._lanes:
            self._lanes_made += 1
            return self._lanes_made
        return self._lanes.pop()

    def give_lane(self, lane: int) -> None:
        """The areas are free for another call."""
        self._lanes.append(lane)

    def release_free(self) -> None:
        """Give extents that hold nothing back to the device."""
        if runs := self.extents.release():
            self._post_runs(Opcode.RELEASE_EXTENTS, runs)

    def release_all(self) -> None:
        """Give all extents back to the device, whatever they hold; the session ends with that."""
        self._post_runs(Opcode.RELEASE_EXTENTS, [(0, self.config.extents)])

    def _reclaim(self) -> None:
        while self._retired and self._retired[0][0] <= self.ring.completed:
            _, give, what = self._retired.popleft()
            give(*what)

    def pages(self, page_bytes: int) -> Pages:
        """The pages of one size."""
        if page_bytes not in self._pages:
            self._pages[page_bytes] = Pages(self.extents, page_bytes, self._load)
        return self._pages[page_bytes]

    @property
    def page_bytes(self) -> int:
        """Bytes of pages in use, of all sizes."""
        return sum(self._load)

    def memory(self) -> MemoryUse:
        """What the tenant's memory holds."""
        extents, arena, kinds = self.extents, self.arena, self._pages.values()
        free_pages = sum(pages.free_bytes for pages in kinds)
        owned, free = extents.owned * EXTENT_BYTES, extents.free * EXTENT_BYTES
        held = owned - free - free_pages - arena.free_bytes
        return MemoryUse(
            capacity_bytes=self.config.capacity_bytes,
            owned_bytes=owned,
            free_bytes=free,
            page_bytes=self.page_bytes,
            pages=sum(pages.used for pages in kinds),
            shared_pages=sum(pages.shared for pages in kinds),
            free_page_bytes=free_pages,
            other_bytes=held - self.page_bytes,
            free_other_bytes=arena.free_bytes,
            largest_free_run_bytes=arena.largest_free_bytes,
        )

    def raise_if_reset(self) -> None:
        """DeviceResetError when the device does not know the tenant any more: it has no root record."""
        (result,) = self.run([Read(one(self.host(self._root)))])
        values = ROOT.unpack(result.data[0].tobytes())
        if result.access[0] == Access.OUTSIDE or values["magic"] != ROOT_MAGIC:
            self.was_reset = True
            raise DeviceResetError(
                f"the device was reset: tenant {self.aperture} does not own its root record any more; all "
                "that was on the device is lost, recover() starts anew"
            )

    def wrap_port(self, wrap: Callable[[Port], Port]) -> None:
        """Have everything pass through another port."""
        self._port.wrap(wrap)

    def staging(self, name: str, size_bytes: int) -> int:
        """The address of an area that every batch uses anew; it grows when a batch needs more."""
        address, size = self._staging.get(name, (0, 0))
        if size < size_bytes:
            grown = 1 << (size_bytes - 1).bit_length()
            larger = self.arena.take(grown)
            if size:
                self.retire(self.arena.give, address, size)
                self.moves += 1
            address, size = larger, grown
            self._staging[name] = address, size
        return address

    def scattered(self, name: str, count: int, size_bytes: int, lane: int = 0) -> npt.NDArray[np.uint64]:
        """The addresses of `count` areas of one size, over the memory's slices in turn, that every batch of a
        lane uses anew; larger than an extent, or without whole extents for that, one after the other wherever
        there is room.

        Raises
        ------
        OutOfMemoryError : when there is no room left.
        """
        slices = self.config.slices
        item = np.arange(count, dtype=np.int64)
        turn, row = item % slices, item // slices
        first_extent, begin, room = 0, 0, EXTENT_BYTES
        if lane and -(-count // slices) * size_bytes <= _LANE_BYTES:
            # lanes with little in them share extents
            group, place = divmod(lane - 1, EXTENT_BYTES // _LANE_BYTES)
            first_extent, begin, room = group * slices, place * _LANE_BYTES, _LANE_BYTES
            extents = self._scattered.setdefault(f"{name} of lanes", [])
        else:
            name = f"{name} {lane}" if lane else name
            extents = self._scattered.setdefault(name, [])
        per_extent = room // size_bytes
        if not per_extent:
            return (self.staging(name, count * size_bytes) + item * size_bytes).astype(np.uint64)
        index = first_extent + row // per_extent * slices + turn
        while len(extents) <= index.max(initial=-1):
            extent = self.extents.take_near(len(extents) % slices)
            if extent is None:
                own = f"{name} {lane}" if room == _LANE_BYTES else name
                return (self.staging(own, count * size_bytes) + item * size_bytes).astype(np.uint64)
            extents.append(extent)
        addresses: npt.NDArray[np.int64] = (
            np.array(extents, np.int64)[index] * EXTENT_BYTES + begin + row % per_extent * size_bytes
        )
        return addresses.astype(np.uint64)

    def link(self, record: int, values: dict[str, int]) -> None:
        """Write a new cache record at `record` and put it at the head of the tenant's chain."""
        self._chain.insert(0, record)
        self.rewrite(record, values)
        self._write_root(record)

    def earlier(self) -> list[FoundCache]:
        """The caches that an earlier session left and that nobody took over.

        Raises
        ------
        VersionError, ProtocolError, AccessError : as `find_caches` has them.
        """
        from .recovery import find_caches  # late: it needs tenants

        return find_caches(self, self._earlier)

    def adopt(self, caches: Sequence[FoundCache]) -> None:
        """Take over the earlier session's memory: what its caches have is in use, and all else is free."""
        if self._adopted:
            return
        self.ring.settle()
        runs = [run for cache in caches for run in cache.runs()]
        used = self.arena.adopt([(self._root, LINE_BYTES), *runs] if self._owned else runs)
        sizes: dict[int, list[Addresses]] = {}
        for cache in caches:
            sizes.setdefault(cache.layout.page_bytes, []).append(cache.pages())
        for page_bytes, pages in sizes.items():
            extents = self.pages(page_bytes).adopt(np.concatenate(pages))
            if extents & used:
                raise ProtocolError(f"extents {sorted(extents & used)} hold pages and something else")
            used |= extents
        self.extents.adopt(self._owned, used)
        self._chain += [cache.address for cache in caches]
        self._earlier = 0
        self._adopted = True

    def rewrite(self, record: int, values: dict[str, int]) -> None:
        """Write a cache record anew, where it is in the chain."""
        self.run([self.record_write(record, values)])

    def record_write(self, record: int, values: dict[str, int]) -> Write:
        """The operation that writes a cache record anew."""
        return self.write(one(record), record_line(CACHE, **values, next=self._following(record)))

    def unlink(self, record: int) -> None:
        """Take a cache record out of the chain."""
        index, following = self._chain.index(record), self._following(record)
        if index == 0:
            self._write_root(following)
        else:
            before = one(self._chain[index - 1])
            line = self.read(before).copy()
            column(CACHE, "next", line)[:] = following
            self.run([self.write(before, line)])
        del self._chain[index]

    def _following(self, record: int) -> int:
        index = self._chain.index(record) + 1
        return self._chain[index] if index < len(self._chain) else self._earlier

    def _claim(self, runs: Sequence[Run]) -> list[bool]:
        """Claim runs of extents; which of them are the tenant's now."""
        completions = self._post_runs(Opcode.CLAIM_EXTENTS, runs, may_be=_NOT_TO_BE_HAD)
        self._at_quota = bool((completions.of("status") == Status.OVER_QUOTA).any())
        owned: list[bool] = (completions.of("status") == Status.OK).tolist()
        return owned

    def _any_free(self, wait: bool) -> bool:
        """See `Extents`."""
        counters = self.ring.extent_counters()
        self._at_quota = counters["owned"] >= counters["quota"]
        if self._at_quota:
            return False
        if not wait:
            return counters["free"] > 0
        if counters["scrubbing"]:
            self.ring.wait_for_scrub()
        return counters["scrubbing"] > 0

    def _no_room(self, text: str) -> OutOfMemoryError:
        """The error for a lack of memory, whose text says what there is no room for."""
        if not self._at_quota:
            return OutOfMemoryError(text)
        counters = self.ring.extent_counters()
        return QuotaError(
            f"{text}; tenant {self.aperture} may own {counters['quota']} extents of {EXTENT_BYTES >> 20} MiB "
            f"and owns {counters['owned']}: free sequences or caches, or have the device's owner raise that"
        )

    def _post_runs(self, opcode: Opcode, runs: Sequence[Run], may_be: Collection[Status] = ()) -> Completions:
        """Post a descriptor for each run of extents; DeviceError for a status that it may not end with."""
        completions, _ = self.ring.run(extent_descriptors(opcode, runs))
        for index in completions.failed.tolist():
            status = Status(int(completions.of("status")[index]))
            if status not in may_be:
                first, count = runs[index]
                raise DeviceError(
                    f"{opcode.name} of {count} extents from {first}: {status.name}",
                    status=status,
                    tag=int(completions.of("tag")[index]),
                    detail=int(completions.of("detail")[index]),
                )
        return completions

    def _owned_extents(self) -> tuple[list[int], list[int]]:
        """The extents that an earlier session of this tenant claimed, those that answer; and which of them
        begin as root records do."""
        owned: list[int] = []
        roots: list[int] = []
        count = self.ring.extent_counters()["owned"]
        for first in range(0, self.config.extents, _PROBED):
            if len(owned) == count:  # every extent that does not answer is a violation
                break
            extents = np.arange(first, min(first + _PROBED, self.config.extents), dtype=np.uint64)
            (result,) = self._port.run([Read(self.hosts(extents * np.uint64(EXTENT_BYTES)))])
            owned += extents[result.access != Access.OUTSIDE].tolist()
            roots += extents[column(ROOT, "magic", result.data) == ROOT_MAGIC].tolist()
        return owned, roots

    def _find_root(self, owned: Sequence[int], roots: Sequence[int]) -> int:
        """The address of the root record, or of where it belongs when a session wrote none yet. It is not in
        the lowest extent where a neighbour had that one first and left."""
        if len(roots) > 1:
            raise ProtocolError(
                f"tenant {self.aperture}: extents {', '.join(map(str, roots))} all begin with a root record"
            )
        return (roots or owned)[0] * EXTENT_BYTES

    def _format(self) -> int:
        """Claim the first extent and write the root record into its first line."""
        extent = self.extents.take_run(1)
        if extent is None:
            text = f"tenant {self.aperture} has no extent"
            if not self._at_quota:
                text = f"tenant {self.aperture}: other tenants own all {self.config.extents} extents"
            raise self._no_room(text)
        root = extent * EXTENT_BYTES
        self.arena.give(root + LINE_BYTES, EXTENT_BYTES - LINE_BYTES)
        self._root = root
        self._write_root(0)
        return root

    def next_generation(self) -> int:
        """A number that no prefix of the tenant ever had; the device knows it before it is used."""
        self._generations += 1
        self._write_root(self._chain[0] if self._chain else self._earlier)
        return self._generations

    def _attach(self) -> tuple[int, int]:
        """The first cache record of an earlier session, which this one leaves as it is, and the prefixes that
        were ever published."""
        values = ROOT.unpack(self.read(one(self._root))[0].tobytes())
        if values["magic"] != ROOT_MAGIC or values["version"] != LAYOUT_VERSION:
            raise VersionError(
                f"tenant {self.aperture} owns extent {self._root // EXTENT_BYTES}, but no root record of "
                f"version {LAYOUT_VERSION} is there (magic {values['magic']:#x}, version {values['version']})"
            )
        return values["first_cache"], values["generations"]

    def _write_root(self, first_cache: int) -> None:
        line = record_line(
            ROOT,
            magic=ROOT_MAGIC,
            version=LAYOUT_VERSION,
            first_cache=first_cache,
            generations=self._generations,
        )
        self.run([self.write(one(self._root), line)])


def extent_descriptors(opcode: Opcode, runs: Sequence[Run]) -> Lines:
    """Descriptors, uint8 [n, 64], of claims or releases of runs of extents."""
    lines = record_line(CLAIM, version=DESCRIPTOR_VERSION, opcode=opcode).repeat(len(runs), axis=0)
    for name, values in zip(("first_extent", "extent_count"), zip(*runs, strict=True), strict=True):
        column(CLAIM, name, lines)[:] = values
    return lines
