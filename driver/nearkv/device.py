"""A device as a user holds it: opened by name, asked what it is, and given caches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import numpy as np
import torch
from nearkv_hw.abi import ABI_VERSION, DeviceConfig, Feature
from nearkv_hw.abi.config import EXTENT_SHIFT
from nearkv_hw.abi.descriptor import ATTEND, MAX_HEAD_DIM, MAX_LARGE_DIM
from nearkv_hw.abi.memory import CACHE
from nearkv_hw.abi.numerics import CONTRACT_VERSION
from nearkv_hw.abi.window import IDENTITY, IDENTITY_LINE, MAGIC, register_address
from nearkv_sim import open_port
from nearkv_sim.cxl_io import CxlDevice
from nearkv_sim.events import ALL, CAPACITY, EventKind, Recording
from nearkv_sim.port import Access, Port, Read
from nearkv_sim.trace import timeline
from nearkv_sim.trace import write as write_timeline

from .arguments import whole_number
from .cache import KVCache
from .compaction import compact
from .errors import ArgumentError, ClosedError, UnknownHandleError, VersionError
from .formats import Blocks, Dtype, Pair, chosen_format, needs_of
from .heads import GivenHeads
from .memory_use import MemoryUse
from .owner import Owner
from .stats import AttentionTotals, Stats, read_stats
from .streams import Stream
from .table import PageTable
from .tenant import Tenant

if TYPE_CHECKING:
    from .cxl import CxlHost

TraceSummary = dict[str, Any]
"""What a timeline holds, by name: cycles, events, jobs, and what it leaves out."""
_MAX_LAYERS = (1 << CACHE["layers"].width) - 1
_MAX_KV_HEADS = 1 << ATTEND["kv_head"].width


def open(spec: str = "model", **overrides: Any) -> Device:
    """Start a device and open it.

    Parameters
    ----------
    spec : "model", "rtl" or "cocotb", with a preset of the configuration after a colon where wanted
        ("rtl:card"); or "unix:PATH", a device that `nearkv serve` serves there.
    overrides : fields of `nearkv_hw.abi.DeviceConfig`, such as channels=1, and what
        `nearkv_sim.open_port` takes.

    Raises
    ------
    ValueError : for an unknown spec, preset or field, or a value out of range.
    VersionError : when what answers is no device that this driver can use.

    Examples
    --------
    >>> import nearkv
    >>> with nearkv.open("model", channels=1) as dev:
    ...     dev.config.channels
    1
    """
    port = open_port(spec, **overrides)
    try:
        return Device(port)
    except BaseException:
        port.close()
        raise


class Device:
    """An open device; `nearkv.open` makes it.

    Parameters
    ----------
    port : a running device, which this one closes in the end.

    Members
    -------
    config : what the device says that it is made of.
    features : what it has beyond plain jobs; see `nearkv_hw.abi.Feature`.
    kind : how it runs: "model", "rtl", "cocotb", ...

    Raises
    ------
    VersionError : when what answers is no nearkv device, or keeps another version of the abi or the contract.
    """

    def __init__(self, port: Port) -> None:
        self.kind = port.kind
        self.config, self.features = _identify(port)
        self._port = port
        self._tenants: dict[int, Tenant] = {}
        self._caches: list[KVCache] = []
        self._totals = AttentionTotals()
        self._streams: WeakSet[Stream] = WeakSet()
        self._cxl: CxlHost | None = None
        self._closed = False

    def kv_cache(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Dtype = "bf16",
        value_dtype: Dtype | None = None,
        scale_dtype: Pair = None,
        scale_block: Blocks = None,
        latent: bool = False,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_lut: torch.Tensor | None = None,
        v_lut: torch.Tensor | None = None,
        summaries: bool = False,
        page_rows: int = 16,
        tenant: int = 0,
    ) -> KVCache:
        """A new cache in a tenant's memory.

        Parameters
        ----------
        layers, kv_heads : layers, and KV heads of each.
        head_dim, value_dim : elements of a K row and of a V row, 1 to 256, on devices with large rows to
            1,023; V is as long as K if not given.
        dtype : how K is stored, and V where value_dtype does not say so: the name of a preset of
            `nearkv.quantise.PRESETS` ("bf16", "fp8", "int8", "q8_0", "nvfp4", ...), a torch type, the name of
            an element format ("fp8_e5m2", "lut4", ...), or a `nearkv.quantise.RowFormat`.
        value_dtype : how V is stored.
        scale_dtype, scale_block : format of scales along a row ("fp16", "bf16", "e4m3", "e8m0") and the
            elements that share one (16, 32, 64, 128, None for the row); each for both, or a pair, K's and
            V's. With them dtype names an element format.
        latent : V is the first value_dim elements of the K row, and is stored once.
        k_scale, v_scale : float32 [kv_heads] or [layers, kv_heads] for formats with a scale per head (fp8,
            nvfp4); found from each layer's first rows where not given.
        k_lut, v_lut : float16 [kv_heads, 16] or [layers, kv_heads, 16], the numbers of lut4; likewise.
        summaries : keep a summary of each page's K, for `attend(select_pages=)`.
        page_rows : rows of a page, a power of two from 4; a page has to fit an extent of 1 MiB.
        tenant : which of the device's apertures.

        Raises
        ------
        ArgumentError, DtypeError, ShapeError, UnknownHandleError, ClosedError : for arguments that are not
            allowed, or that this device has not.
        OutOfMemoryError : when there is no room for the cache's record.

        Examples
        --------
        >>> import nearkv, torch
        >>> dev = nearkv.open("model")
        >>> kv = dev.kv_cache(layers=1, kv_heads=1, head_dim=32, dtype="int8", value_dtype="mxfp4")
        >>> kv
        <KV cache of 1 layers, 1 KV heads, 32/32 int8/mxfp4, pages of 16 rows, 0 sequences>
        >>> dev.close()
        """
        self._check_open()
        value_dim = head_dim if value_dim is None else value_dim
        whole_number("layers", layers, 1, _MAX_LAYERS)
        whole_number("kv_heads", kv_heads, 1, _MAX_KV_HEADS)
        largest = MAX_LARGE_DIM if Feature.LARGE_ROWS in self.features else MAX_HEAD_DIM
        whole_number("head_dim", head_dim, 1, largest)
        whole_number("value_dim", value_dim, 1, head_dim if latent else largest)
        whole_number("page_rows", page_rows, 1, 1 << 31)
        form = chosen_format(dtype, value_dtype, scale_dtype, scale_block, latent=latent)
        short = Feature.SHORT_ROWS in self.features
        try:
            layout = form.layout(head_dim, value_dim, page_rows, short=short, summaries=summaries)
        except ValueError as error:
            raise ArgumentError(str(error)) from error
        if self.config.units:
            needs_of(form, layout).refuse(self.features, self.kind)
        given = {"k_scale": k_scale, "v_scale": v_scale, "k_lut": k_lut, "v_lut": v_lut}
        heads = GivenHeads.checked(form, layers, kv_heads, given)
        cache = KVCache(self._tenant(tenant), self._totals, layout, form, heads)
        self._caches = [known for known in self._caches if not known.closed]
        self._caches.append(cache)
        return cache

    def attach(self, tenant: int = 0) -> list[KVCache]:
        """The caches that an earlier session of a tenant left on the device, the newest first.

        Each sequence (`KVCache.sequences`) is there in its slot, with the rows that were committed. What that
        session had begun and not finished never was, and memory that nothing names is free. It must have
        ended: nobody else may use the tenant's memory from here on.

        Raises
        ------
        UnknownHandleError : for a tenant that the device has not.
        VersionError : when records are of another version.
        ProtocolError : for what no driver leaves behind.
        AccessError : when a line is poisoned.

        Examples
        --------
        >>> import nearkv
        >>> dev = nearkv.open("model")
        >>> dev.attach()
        []
        >>> dev.close()
        """
        self._check_open()
        of = self._tenant(tenant)
        found = of.earlier()
        of.adopt(found)
        caches = [KVCache(of, self._totals, one.layout, one.form, one.heads, found=one) for one in found]
        self._caches += caches
        return caches

    def stats(self) -> Stats:
        """What the device and its channels counted since reset, and what attention took; see `Stats`."""
        self._check_open()
        self._flush()
        return read_stats(self._port, self.config, self._totals)

    def recover(self, tenant: int = 0) -> list[KVCache]:
        """Start a tenant's session anew, after its ring hung, the link was lost or the device was reset.

        Its caches here are closed, with nothing written; what was committed on the device comes back, as
        `attach` has it. Other tenants' caches are as they were.

        Raises
        ------
        DeviceTimeoutError, LinkError : when the device still does not answer.
        What `attach` raises.
        """
        self._check_open()
        before = self._tenants.pop(tenant, None)
        if before is not None:
            before.stream.abandon()
            for cache in self._caches:
                if cache.belongs_to(before):
                    cache.abandon()
            if before.was_reset:
                self._tenants[tenant] = Tenant(self._port, self.config, tenant, self.features, fresh=True)
        return self.attach(tenant)

    def release(self, tenant: int = 0) -> None:
        """End a tenant's session and give all of its memory back, for others to have once the device has
        written zeros over it; its caches are closed, and what is committed on the device is lost.

        Raises
        ------
        UnknownHandleError : for a tenant that the device has not.
        DeviceTimeoutError, LinkError : when the device does not answer.

        Examples
        --------
        >>> import nearkv
        >>> dev = nearkv.open("model")
        >>> kv = dev.kv_cache(layers=1, kv_heads=1, head_dim=32)
        >>> dev.release()
        >>> kv.closed, dev.stats().free_extents
        (True, 2047)
        >>> dev.close()
        """
        self._check_open()
        of = self._tenant(tenant)
        del self._tenants[tenant]
        of.stream.abandon()
        for cache in self._caches:
            if cache.belongs_to(of):
                cache.abandon()
        of.release_all()

    @property
    def owner(self) -> Owner:
        """Quotas of tenants, and the log of what they tried; for who owns the device."""
        self._check_open()
        return Owner(self._port, self.config)

    def wrap_port(self, wrap: Callable[[Port], Port]) -> None:
        """Have everything pass through another port from now on; for faults and for measuring."""
        self._check_open()
        self._port = wrapped = wrap(self._port)
        for tenant in self._tenants.values():
            tenant.wrap_port(lambda port: wrapped)

    def stream(self, depth: int = 8) -> Stream:
        """A stream for `KVCache.attend_async` and `append_async`.

        Parameters
        ----------
        depth : calls under way at most; another one waits for the oldest.
        """
        self._check_open()
        stream = Stream(depth, self._flush)
        self._streams.add(stream)
        return stream

    def synchronize(self) -> None:
        """Wait for all calls that are under way, in any stream, and until appended rows are committed."""
        self._check_open()
        for stream in self._all_streams():
            stream.synchronize()

    def wait_for_scrub(self) -> None:
        """Wait until the device has written zeros over all memory that was given back, whoever had it: until
        then that takes some of the memory's time, which a measurement would show.

        Raises
        ------
        DeviceTimeoutError, LinkError : when the device does not answer.
        """
        self._check_open()
        anyone = next(iter(self._tenants.values()), None)
        (anyone or self._tenant(0)).ring.wait_for_scrub()

    def memory(self, tenant: int = 0) -> MemoryUse:
        """What a tenant's memory holds, as this driver has placed it."""
        self._check_open()
        return self._tenant(tenant).memory()

    def compact(self, tenant: int = 0, most_bytes: int | None = None) -> int:
        """Move pages of a tenant together, and give extents that hold nothing then back to the device.

        Freed sequences leave extents with few pages each, which pages of other sizes, and other tenants,
        cannot use. Afterwards less than 1 MiB lies idle in each channel for each size of pages, and what the
        ends of extents leave. Sequences, handles and results are as before; calls under way are waited for.

        Parameters
        ----------
        most_bytes : of pages to move at most; None for all that it takes.

        Returns
        -------
        Bytes of pages that were moved.

        Raises
        ------
        ArgumentError, UnknownHandleError : for what is none.
        DeviceTimeoutError, LinkError : when the device does not answer.

        Examples
        --------
        >>> import nearkv
        >>> dev = nearkv.open("model")
        >>> dev.compact()
        0
        >>> dev.close()
        """
        self._check_open()
        of, moved = self._tenant(tenant), 0
        if most_bytes is not None:
            whole_number("most_bytes", most_bytes, 0, 1 << 62)
        self.synchronize()
        tables: dict[int, list[PageTable]] = {}
        for cache in self._caches:
            if cache.belongs_to(of) and not cache.closed:
                tables.setdefault(cache.page_bytes, []).extend(cache.page_tables)
        for page_bytes, own in tables.items():
            left = None if most_bytes is None else most_bytes - moved
            moved += compact(of, of.pages(page_bytes), own, left)
        of.release_free()
        return moved

    def cxl(self, *, dynamic_bytes: int = 0) -> CxlHost:
        """The device as a CXL host finds it: configuration space, registers and mailbox; one for all calls.

        Commands act on this device: poison that is injected is what caches read, and Sanitize and Secure
        Erase end all its caches.

        Parameters
        ----------
        dynamic_bytes : of its memory, from the top, what is dynamic capacity, which tenants have once it was
            offered and accepted; a multiple of 256 MiB. Only the first call can say it.

        Raises
        ------
        ValueError : memory that is not a multiple of 256 MiB, or another dynamic_bytes than before.
        RuntimeError : dynamic capacity of a device that cannot withhold memory.

        Examples
        --------
        >>> import nearkv
        >>> from nearkv_hw.abi.mailbox import Opcode
        >>> dev = nearkv.open("model")
        >>> dev.cxl().send(Opcode.INJECT_POISON, (4096).to_bytes(8, "little"))
        b''
        >>> dev.cxl().poison()
        [(4096, <PoisonSource.INJECTED: 3>)]
        >>> dev.close()
        """
        self._check_open()
        if self._cxl is None:
            from .cxl import CxlHost

            device = CxlDevice(self.config, self._port.maintenance, dynamic_bytes=dynamic_bytes)
            device.on_erased(self._forget)
            device.dynamic.on_changed(self._capacity_changed)
            self._cxl = CxlHost(device)
        elif dynamic_bytes not in (0, self._cxl.device.dynamic.region.length):
            raise ArgumentError(
                f"dynamic_bytes={dynamic_bytes}: the host found the device with "
                f"{self._cxl.device.dynamic.region.length}; open another one"
            )
        return self._cxl

    def start_wave(self, path: Path) -> None:
        """Record an FST of everything from here on; RuntimeError where there are no traces."""
        self._check_open()
        self._port.start_wave(path)

    @contextmanager
    def trace(self, path: Path, *, events: int = CAPACITY) -> Iterator[TraceSummary]:
        """Record what happens inside the block as a timeline for ui.perfetto.dev and chrome://tracing.

        Parameters
        ----------
        path : where the timeline is written when the block ends; compressed if it ends in .gz.
        events : to keep at most; later ones are lost and counted.

        Returns
        -------
        An empty dictionary; when the block has ended it says what the timeline holds and what it leaves out.

        Raises
        ------
        RuntimeError : the device cannot record.
        OSError : the file cannot be written.
        """
        path = Path(path)
        path.touch()  # what cannot be written is better known before the work
        summary: TraceSummary = {}
        with self.record(events=events) as recorded:
            try:
                yield summary
            finally:
                shown = timeline(recorded(), self.config)
                write_timeline(shown, path, self.config)
                summary.update(shown.summary)

    @contextmanager
    def record(
        self, *, events: int = CAPACITY, kinds: Collection[EventKind] = ALL
    ) -> Iterator[Callable[[], Recording]]:
        """Record what happens inside the block.

        Parameters
        ----------
        events : to keep at most.
        kinds : of events to keep.

        Returns
        -------
        A function that ends the recording and returns it.

        Raises
        ------
        RuntimeError : the device cannot record.
        """
        self._check_open()
        self._port.record(events, kinds)
        kept: list[Recording] = []

        def recorded() -> Recording:
            if not kept:
                kept.append(self._port.recorded())
            return kept[0]

        try:
            yield recorded
        finally:
            recorded()

    def close(self) -> None:
        """Close all caches and end the device. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            for stream in self._all_streams():
                stream.abandon()
            for cache in self._caches:
                cache.abandon()
        finally:
            self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = (
            "closed" if self._closed else f"{self.config.channels} channels, {self.config.queries} queries"
        )
        return f"<{self.kind} device {self.config.name}, {state}>"

    def _all_streams(self) -> list[Stream]:
        return [*self._streams, *(tenant.stream for tenant in self._tenants.values())]

    def _flush(self) -> None:
        """Send the writes that wait."""
        for tenant in self._tenants.values():
            tenant.flush()

    def _forget(self) -> None:
        """All memory was erased, and with it what caches and tenants knew of it."""
        for cache in self._caches:
            cache.abandon()
        self._caches.clear()
        self._tenants.clear()

    def _capacity_changed(self, address: int, size: int, given: bool) -> None:
        """Dynamic capacity has come or gone."""
        extents = range(address >> EXTENT_SHIFT, address + size >> EXTENT_SHIFT)
        if not given:
            for tenant in self._tenants.values():
                tenant.extents.removed(extents)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the device is closed; open it again")

    def _tenant(self, aperture: int) -> Tenant:
        known = not isinstance(aperture, bool) and isinstance(aperture, int)
        if not known or not 0 <= aperture < self.config.apertures:
            raise UnknownHandleError(
                f"tenant={aperture!r}: the device has apertures 0 to {self.config.apertures - 1}"
            )
        if aperture not in self._tenants:
            self._tenants[aperture] = Tenant(self._port, self.config, aperture, self.features)
        return self._tenants[aperture]


def _identify(port: Port) -> tuple[DeviceConfig, Feature]:
    """The configuration in the device's identity line, and what it has beyond plain jobs."""
    address = register_address(port.config, 0, IDENTITY_LINE)
    (result,) = port.run([Read(np.array([address], np.uint64))])
    identity = IDENTITY.unpack(result.data[0].tobytes())
    if result.access[0] != Access.DATA or identity["magic"] != MAGIC:
        raise VersionError(f"no nearkv device answers at {address:#x} (magic {identity['magic']:#x})")
    for name, wanted in (
        ("abi_version", ABI_VERSION),
        ("contract_version", CONTRACT_VERSION),
        ("extent_shift", EXTENT_SHIFT),
    ):
        if identity[name] != wanted:
            raise VersionError(
                f"the device has {name} {identity[name]}, this driver knows {wanted}; "
                "use the driver of the device's release"
            )
    known: dict[str, Any] = {
        f.name: type(getattr(port.config, f.name))(identity[f.name])
        for f in fields(DeviceConfig)
        if f.name in identity
    }
    return replace(port.config, **known), Feature(identity["features"]) & Feature.all()
