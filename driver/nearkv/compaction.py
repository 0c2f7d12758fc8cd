"""Pages of few rows in many extents, moved together, so that whole extents are free for others."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_sim.port import Fence, Operation

from .allocator import Pages
from .codec import span
from .errors import AccessError
from .table import PageTable
from .tenant import Tenant

_Named = dict[int, list[tuple[PageTable, int, int]]]
"""Of each page, the tables that name it, with head and page index."""


def compact(tenant: Tenant, pages: Pages, tables: Many[PageTable], most_bytes: int | None = None) -> int:
    """Empty extents whose pages find room in other extents of their channel, the emptiest first.

    Afterwards less than an extent lies idle in each channel, and what the ends of extents leave, unless pages
    that no table names, or whose content is lost, are in the way, or `most_bytes` were not enough. A page is
    copied, then all tables name the copy, then the page is free: whoever dies in between leaves both whole.

    Parameters
    ----------
    tenant, pages : whose memory it is, and its pages of one size.
    tables : all page tables that name some of these.
    most_bytes : to move at most; an extent is moved as a whole or not at all.

    Returns
    -------
    Bytes that were moved.

    Raises
    ------
    DeviceTimeoutError, LinkError : when the device does not answer.
    """
    tenant.flush()
    tenant.ring.wait_through(
        tenant.ring.posted
    )  # nobody reads a page table now, and what was retired is free
    named: _Named = {}
    for table in tables:
        for index in table.held_pages.tolist():
            for head, page in enumerate(table.page_addresses(index, index + 1)[:, 0].tolist()):
                named.setdefault(page, []).append((table, head, index))
    moved = 0
    for channel in range(tenant.config.slices):
        stuck: set[int] = set()
        while True:
            used = pages.partly_used(channel)
            candidates = [extent for extent in used if extent not in stuck]
            source = min(candidates, key=lambda extent: len(used[extent]), default=None)
            if source is None:
                break
            going = used[source]
            room = sum(pages.per_extent - len(own) for extent, own in used.items() if extent != source)
            size = len(going) * pages.page_bytes
            if room < len(going):  # and for others, too: a page more of theirs leaves one more free
                break
            if most_bytes is not None and moved + size > most_bytes:
                return moved
            whole = all(len(named.get(page, ())) == pages.holders(page) for page in going)
            if not whole or not _move(tenant, pages, named, source, going):
                stuck.add(source)
                continue
            moved += size
    return moved


def _move(tenant: Tenant, pages: Pages, named: _Named, source: int, going: list[int]) -> bool:
    """Move the pages of an extent; False, with nothing changed, when some of their content is lost."""
    lines = pages.page_bytes // LINE_BYTES
    try:
        content = tenant.read(np.concatenate([span(page, lines) for page in going]))
    except AccessError:
        return False
    after = pages.take_beside(source, len(going))
    changed: dict[tuple[int, int], tuple[PageTable, int]] = {}
    for page, new in zip(going, after, strict=True):
        named[new] = named.pop(page)
        for table, head, index in named[new]:
            table.replace(head, index, new)
            changed[id(table), index] = table, index
    entries = [table.entry_lines(index, index + 1) for table, index in changed.values()]
    program: list[Operation] = [
        tenant.write(np.concatenate([span(page, lines) for page in after]), content),
        Fence(),
        tenant.write(*(np.concatenate(parts) for parts in zip(*entries, strict=True))),
        Fence(),
    ]
    tenant.run(program)
    for page, new in zip(going, after, strict=True):
        pages.moved(page, new)
    return True
