"""What an earlier session of a tenant left on the device, read back from the root on.

Nothing is trusted but what is reachable and committed: slots that lack a table, entries of rows that never
were committed or that were released, and all memory that no record names are what a session that ended in the
middle of something leaves, and are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from nearkv_hw.abi.formats import LUT_ENTRIES, SCALE_FORMATS
from nearkv_hw.abi.lines import LINE_BYTES, lines_of
from nearkv_hw.abi.memory import (
    CACHE,
    CACHE_MAGIC,
    ENTRY,
    LAYOUT_VERSION,
    NO_SEQUENCE,
    PREFIX,
    PREFIX_MAGIC,
    RULES,
    TABLE,
    TABLE_MAGIC,
    RowLayout,
    table_entry_lines,
)
from nearkv_hw.abi.rows import Stored

from .codec import one, span
from .errors import ProtocolError, VersionError
from .formats import described
from .heads import SCALES_BYTES, GivenHeads
from .quantise.formats import PRESETS, CacheFormat, RowFormat, Rule
from .table import PageTable
from .tenant import Tenant

_VALID = np.uint64(1 << ENTRY.offset("valid"))
_ADDRESS_BYTES = 8
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class FoundPrefix:
    """A prefix as the device holds it.

    Members
    -------
    address, generation, root : of its record.
    tokens : its tokens.
    tables : its page tables, one for each layer.
    size_bytes : of the record.
    """

    address: int
    generation: int
    root: bytes
    tokens: npt.NDArray[np.uint32]
    tables: list[PageTable]
    size_bytes: int


@dataclass(frozen=True)
class FoundCache:
    """A cache as the device holds it.

    Members
    -------
    address : of its record.
    fields : of its record.
    layout, form, heads : how it stores rows, and what their heads have in common.
    slots : sequences in the directory, by slot: their page tables, or None.
    directory : the directory's addresses, [slots * layers]; zero where a slot lacks a table.
    prefixes : in the order of their chain.
    stale : tables whose entries on the device say more than they should.
    unclean : slots that lack some of their tables.
    """

    address: int
    fields: dict[str, int]
    layout: RowLayout
    form: CacheFormat
    heads: GivenHeads
    slots: list[list[PageTable] | None]
    directory: npt.NDArray[np.uint64]
    prefixes: list[FoundPrefix]
    stale: list[PageTable]
    unclean: list[int]

    @property
    def tables(self) -> list[PageTable]:
        """All page tables, those of prefixes included."""
        own = [table for slot in self.slots if slot is not None for table in slot]
        return own + [table for prefix in self.prefixes for table in prefix.tables]

    def runs(self) -> Iterator[tuple[int, int]]:
        """What the cache has besides pages: addresses and bytes."""
        fields, heads = self.fields, self.fields["layers"] * self.fields["kv_heads"]
        yield self.address, LINE_BYTES
        yield fields["directory"], len(self.directory) * _ADDRESS_BYTES
        if fields["head_scales"]:
            yield fields["head_scales"], heads * SCALES_BYTES
        if fields["codebooks"]:
            yield fields["codebooks"], heads * LINE_BYTES
        for table in self.tables:
            yield table.address, table.size_bytes
        for prefix in self.prefixes:
            yield prefix.address, prefix.size_bytes

    def pages(self) -> npt.NDArray[np.uint64]:
        """The addresses of its pages, as often as a table names them."""
        return np.concatenate([np.empty(0, np.uint64), *(table.addresses() for table in self.tables)])


def find_caches(tenant: Tenant, first: int) -> list[FoundCache]:
    """The caches from a record on, in the order of the chain.

    Raises
    ------
    VersionError : for a record or table of another version.
    ProtocolError : for what no driver leaves behind.
    AccessError : when a line is poisoned.
    """
    found: list[FoundCache] = []
    while first:
        if first in {cache.address for cache in found}:
            raise ProtocolError(f"the chain of cache records comes back to {first:#x}")
        found.append(_find(tenant, first))
        first = found[-1].fields["next"]
    return found


def _find(tenant: Tenant, address: int) -> FoundCache:
    fields = CACHE.unpack(tenant.read(one(address))[0].tobytes())
    if (fields["magic"], fields["version"]) != (CACHE_MAGIC, LAYOUT_VERSION):
        raise VersionError(
            f"no cache record of version {LAYOUT_VERSION} is at {address:#x} (magic {fields['magic']:#x}, "
            f"version {fields['version']})"
        )
    layout, form = _storage(fields)
    layers, slots = fields["layers"], fields["sequences"]
    lines = tenant.read(span(fields["directory"], lines_of(slots * layers * _ADDRESS_BYTES)))
    addresses = lines.reshape(-1).view("<u8")[: slots * layers].astype(np.uint64).reshape(slots, layers)
    whole, empty = (addresses != 0).all(axis=1), (addresses == 0).all(axis=1)
    directory = np.where(whole[:, None], addresses, np.uint64(0))
    used = np.flatnonzero(whole)
    tables, stale = _tables(tenant, fields, address, directory[used].reshape(-1), used.tolist(), layout)
    slots_found: list[list[PageTable] | None] = [None] * slots
    for index, slot in enumerate(used.tolist()):
        slots_found[slot] = tables[index * layers :][:layers]
    prefixes, stale_too = _prefixes(tenant, fields, address, layout)
    return FoundCache(
        address=address,
        fields=fields,
        layout=layout,
        form=form,
        heads=_heads(tenant, fields, form),
        slots=slots_found,
        directory=directory.reshape(-1),
        prefixes=prefixes,
        stale=stale + stale_too,
        unclean=np.flatnonzero(~whole & ~empty).tolist(),
    )


def _prefixes(
    tenant: Tenant, fields: dict[str, int], record: int, layout: RowLayout
) -> tuple[list[FoundPrefix], list[PageTable]]:
    """A cache's prefixes, and those of their tables whose entries say more than they should."""
    found: list[FoundPrefix] = []
    stale: list[PageTable] = []
    address, layers = fields["prefixes"], fields["layers"]
    while address:
        values = PREFIX.unpack(tenant.read(one(address))[0].tobytes())
        if (values["magic"], values["version"]) != (PREFIX_MAGIC, LAYOUT_VERSION):
            raise VersionError(f"no prefix record of version {LAYOUT_VERSION} is at {address:#x}")
        if address in {prefix.address for prefix in found}:
            raise ProtocolError(f"the chain of prefix records comes back to {address:#x}")
        table_lines, token_lines = lines_of(layers * _ADDRESS_BYTES), lines_of(values["rows"] * _TOKEN_BYTES)
        lines = tenant.read(span(address + LINE_BYTES, table_lines + token_lines))
        where = lines[:table_lines].reshape(-1).view("<u8")[:layers].astype(np.uint64)
        tokens = lines[table_lines:].reshape(-1).view("<u4")[: values["rows"]].astype(np.uint32)
        tables, more = _tables(tenant, fields, record, where, [NO_SEQUENCE], layout)
        stale += more
        root = values["root"].to_bytes(16, "little")
        size = (1 + len(lines)) * LINE_BYTES
        found.append(FoundPrefix(address, values["generation"], root, tokens, tables, size))
        address = values["next"]
    return found, stale


def _tables(
    tenant: Tenant,
    fields: dict[str, int],
    record: int,
    where: npt.NDArray[np.uint64],
    slots: list[int],
    layout: RowLayout,
) -> tuple[list[PageTable], list[PageTable]]:
    """The page tables of some slots, and those whose entries on the device say more than they should."""
    if not len(where):
        return [], []
    headers = [TABLE.unpack(line.tobytes()) for line in tenant.read(where)]
    for index, (address, header) in enumerate(zip(where.tolist(), headers, strict=True)):
        place, layer = divmod(index, fields["layers"])
        _check(address, header, fields, record, slot=slots[place], layer=layer)
    sizes = [header["heads"] * table_entry_lines(header["entries"]) for header in headers]
    lines = tenant.read(
        np.concatenate(
            [span(address + LINE_BYTES, size) for address, size in zip(where.tolist(), sizes, strict=True)]
        )
    )
    ends = np.cumsum(sizes)
    tables, stale = [], []
    for address, header, begin, end in zip(where.tolist(), headers, [0, *ends[:-1]], ends, strict=True):
        entries = lines[begin:end].reshape(header["heads"], -1).view("<u8").astype(np.uint64)
        kept = _kept(address, header, entries, layout.page_rows)
        table = PageTable.read(address, header, kept[:, : -(-header["committed_rows"] // layout.page_rows)])
        tables.append(table)
        if (kept != entries).any():
            stale.append(table)
    return tables, stale


def _check(
    address: int, header: dict[str, int], fields: dict[str, int], record: int, *, slot: int, layer: int
) -> None:
    """ProtocolError or VersionError for a header that is not that of the table named in the directory."""
    if (header["magic"], header["version"]) != (TABLE_MAGIC, LAYOUT_VERSION):
        raise VersionError(f"no page table of version {LAYOUT_VERSION} is at {address:#x}")
    wanted = {"heads": fields["kv_heads"], "layer": layer, "sequence": slot, "cache": record}
    for name, value in wanted.items():
        if header[name] != value:
            raise ProtocolError(f"the page table at {address:#x} has {name} {header[name]}, not {value}")


def _kept(
    address: int, header: dict[str, int], entries: npt.NDArray[np.uint64], page_rows: int
) -> npt.NDArray[np.uint64]:
    """The entries that count: of rows that are committed and not released."""
    kept = entries.copy()
    pages = -(-header["committed_rows"] // page_rows)
    kept[:, pages:] = 0
    kept[:, -(-header["released_begin"] // page_rows) : header["released_end"] // page_rows] = 0
    named = kept[:, :pages]
    missing = (named == 0) != (named[:1] == 0)
    if pages > header["entries"] or missing.any() or ((named & _VALID == 0) & (named != 0)).any():
        raise ProtocolError(f"the page table at {address:#x} lacks pages of rows that are committed")
    held = (named[0] != 0).nonzero()[0]
    gone = range(-(-header["released_begin"] // page_rows), header["released_end"] // page_rows)
    if len(held) + len(gone) != pages:
        raise ProtocolError(f"the page table at {address:#x} lacks pages of rows that are committed")
    return kept


def _storage(fields: dict[str, int]) -> tuple[RowLayout, CacheFormat]:
    """How a cache stores its rows."""
    stored = {
        part: Stored.of(
            element=fields[f"{part}_format"],
            scale=fields[f"{part}_scale"],
            block=fields[f"{part}_block"],
            pitch=fields[f"{part}_pitch"],
        )
        for part in "kv"
    }
    latent = bool(fields["latent"])
    layout = RowLayout(
        fields["head_dim"],
        fields["value_dim"],
        1 << fields["page_rows_log2"],
        stored["k"],
        None if latent else stored["v"],
        latent,
        bool(fields["summaries"]),
    )
    rows = {
        part: RowFormat(
            own.element.name,
            next((name for name, form in SCALE_FORMATS.items() if form == own.scale), None),
            own.block,
            bool(fields[f"{part}_head_scale"]),
            Rule(RULES[fields[f"{part}_rule"]]),
        )
        for part, own in stored.items()
    }
    k, v = _name(rows["k"], 0), _name(rows["v"], 1)
    if latent:
        return layout, CacheFormat(f"{k} latent", rows["k"])
    return layout, CacheFormat(k if k == v else f"{k}/{v}", rows["k"], rows["v"])


def _name(row: RowFormat, which: int) -> str:
    """A row format's name, that of a preset if there is one."""
    for name, preset in PRESETS.items():
        if (preset.k, preset.v)[which] == row:
            return name
    return described(row)


def _heads(tenant: Tenant, fields: dict[str, int], form: CacheFormat) -> GivenHeads:
    """What the heads have in common, with what is known of it for each layer."""
    layers, heads = fields["layers"], fields["kv_heads"]
    empty = GivenHeads.checked(form, layers, heads, {})
    known = {name: [False] * layers for name in empty.known}
    if fields["head_scales"]:
        lines = tenant.read(span(fields["head_scales"], lines_of(layers * heads * SCALES_BYTES)))
        values = lines.reshape(-1).view("<f4")[: layers * heads * 2].reshape(layers, heads, 2)
        for index, part in enumerate("kv"):
            if part in empty.scales:
                empty.scales[part][:] = torch.from_numpy(values[..., index].copy())
                known[f"{part}_scale"] = empty.scales[part].gt(0).all(dim=1).tolist()
    if fields["codebooks"]:
        lines = tenant.read(span(fields["codebooks"], layers * heads))
        books = lines.reshape(-1).view("<f2").reshape(layers, heads, 2, LUT_ENTRIES)
        for index, part in enumerate("kv"):
            if part in empty.books:
                empty.books[part][:] = torch.from_numpy(books[:, :, index].copy())
                known[f"{part}_lut"] = empty.books[part].ne(0).flatten(1).any(dim=1).tolist()
    return replace(empty, found=known)
