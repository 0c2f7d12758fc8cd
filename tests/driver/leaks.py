"""Whether a cache has exactly the memory that it needs."""


def no_leak(kv) -> None:
    """Each page is counted once for every table that names it, and the memory adds up."""
    named: dict[int, int] = {}
    tables = [table for handle in kv.sequences for table in handle._tables]
    for table in (*tables, *kv._prefixes.tables):
        for page in table.addresses().tolist():
            named[page] = named.get(page, 0) + 1
    pages = kv._pages
    assert pages.used == len(named)
    assert pages._others == {page: count - 1 for page, count in named.items() if count > 1}
    free = {page for channel in pages._free for own in channel.values() for page in own}
    assert not free & named.keys()
    use = kv._tenant.memory()
    assert use.page_bytes == sum(kind.used * kind.page_bytes for kind in kv._tenant._pages.values())
    assert use.other_bytes >= 0
    assert use.free_page_bytes >= len(free) * pages.page_bytes
