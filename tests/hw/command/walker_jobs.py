"""Random descriptors for the walker, good ones and ones with a thing wrong, and the memory that they need."""

from nearkv_hw.abi import Opcode
from nearkv_hw.abi.descriptor import (
    ATTEND,
    CLAIM,
    DESCRIPTOR_VERSION,
    EXTENSION,
    FLAG_EXTENDED,
    FLAG_SINKS,
    OPTION_ALIBI,
    OPTION_CAUSAL,
    OPTION_CODEBOOK,
    OPTION_LATENT,
    OPTION_RANGES,
    OPTION_SELECT,
    OPTION_SUMMARIES,
    OPTION_TREE,
    RANGE,
)
from nearkv_hw.abi.memory import ENTRY, LAYOUT_VERSION, TABLE, TABLE_MAGIC, RowLayout, table_entry_lines
from nearkv_hw.abi.rows import Stored
from walker_reference import EXTENT_LINES, Memory

CAPACITY_BYTES = 64 << 20


def random_memory(config, rng):
    """A memory in which tenant 0 owns most extents, tenant 1 and nobody the rest."""
    owners = rng.choices([0, 1, None], [6, 2, 1], k=config.extents)
    owners[:2] = 0, 1
    return Memory(config, owners={n: owner for n, owner in enumerate(owners) if owner is not None})


def owned_line(memory, tenant, rng, lines=1):
    """The first of some lines within an extent of the tenant, often the extent's last ones."""
    extent = rng.choice([n for n, owner in memory.owners.items() if owner == tenant])
    last = EXTENT_LINES - lines
    return extent * EXTENT_LINES + rng.choice([rng.randint(0, last), rng.randint(0, last), last])


def random_job(memory, config, rng, tenant):
    """A good attention job: its descriptor's fields, and its table, queries and sinks in memory."""
    head_dim, value_dim = (rng.choice([1, 8, 16, 31, 32, 33, 64, 128, 129, 256, 576, 1023]) for _ in range(2))
    log2 = rng.choice([2, 2, 3, 4, 6])
    entries = rng.choice([1, 3, 8, 9, 30])
    rows = rng.randint(0, entries << log2)
    end = rng.randint(0, rows)
    begin = rng.choice([0, rng.randint(0, end), end])
    heads = rng.randint(1, 3)
    kv_head = rng.randrange(heads)
    group = rng.choice([1, 2, 3, 4, 5, 8, 16, 17])
    entry_lines = table_entry_lines(entries)
    table = owned_line(memory, tenant, rng, 1 + heads * entry_lines)
    query_rows = rng.choice([1, 1, 2, 5])
    queries = owned_line(memory, tenant, rng, group * query_rows * 32)
    sinks, slopes, books, ranges, tree, selected = (owned_line(memory, tenant, rng, 8) for _ in range(6))
    options = rng.choice([0, OPTION_CAUSAL]) | rng.choice([0, OPTION_ALIBI]) | rng.choice([0, OPTION_RANGES])
    options |= rng.choice([0, OPTION_TREE]) if query_rows <= end else 0
    options |= rng.choice([0, 0, OPTION_SUMMARIES, OPTION_SUMMARIES | OPTION_SELECT])
    options &= ~OPTION_TREE if options & OPTION_SELECT else -1
    window = rng.choice([0, rng.randint(1, (1 << 24) - 1), rng.randint(1, 30), rng.randint(1, 4)])
    positioned = (options & (OPTION_CAUSAL | OPTION_ALIBI) or window) and not options & OPTION_TREE
    edges = sorted(rng.sample(range(begin, end + 1), rng.randrange(min(end - begin + 1, 40)) // 2 * 2))
    pairs = list(zip(edges[::2], edges[1::2], strict=True)) if options & OPTION_RANGES else []
    sight = {
        "options": options,
        "window": window,
        "kept": rng.choice([rng.randrange(1 << 24), rng.randrange(9), rng.randrange(rows + 1)])
        if window
        else 0,
        "first_position": rng.choice(
            [rng.randrange(-(1 << 23), 1 << 23), rng.randrange(-9, rows + 9), end - query_rows]
        )
        if positioned
        else 0,
        "slopes": slopes if options & OPTION_ALIBI else 0,
        "ranges": ranges if options & OPTION_RANGES else 0,
        "range_count": len(pairs),
        "tree": tree if options & OPTION_TREE else 0,
        "select_pages": rng.choice([1, 2, 5, 1 << 20]) if options & OPTION_SELECT else 0,
        "selected": selected if options & OPTION_SELECT else 0,
    }
    memory.lines[table] = TABLE.pack(
        magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=heads, entries=entries, committed_rows=rows
    )
    how = {
        rows: {"element": rng.choice([0, 1, *range(8)]), "scale": 0, "block": 0, "pitch": 0} for rows in "kv"
    }
    for own, dim in zip(how.values(), (head_dim, value_dim), strict=True):
        if own["element"] > 1 and rng.random() < 0.7:
            own |= {"scale": rng.randint(3 if own["element"] == 7 else 1, 4), "block": rng.randrange(5)}
        if rng.random() < 0.7:
            own["pitch"] = Stored.of(**{**own, "pitch": 1}).pitch_code(dim)
    latent = value_dim <= head_dim and rng.random() < 0.3
    if latent:
        how["v"] = {"element": 0, "scale": 0, "block": 0, "pitch": 0}
    layout = RowLayout(
        head_dim,
        value_dim,
        1 << log2,
        *(Stored.of(**own) for own in how.values()),
        latent=latent,
        summaries=True,
    )
    if rng.random() < 0.5:
        sight, query_rows = dict.fromkeys(sight, 0), 1
    sight["options"] |= OPTION_LATENT if latent else 0
    sight["codebooks"] = 0
    if any(own["element"] == 7 for own in how.values()):
        sight["options"] |= OPTION_CODEBOOK
        sight["codebooks"] = books
        memory.lines[books] = rng.getrandbits(512)
    extended = (
        any(sight.values())
        or query_rows > 1
        or any(own["scale"] or own["pitch"] for own in how.values())
        or rng.random() < 0.2
    )
    for n in range(entry_lines * 8):
        line = owned_line(memory, tenant, rng, layout.page_lines)
        put_entry(memory, table + 1 + kv_head * entry_lines, n, ENTRY.pack(valid=1, line=line))
    for n, (first, behind) in enumerate(pairs):
        put_entry(memory, ranges, n, RANGE.pack(begin=first, end=behind))
    for n in range(16):
        # most slopes are numbers, most positions within what is allowed
        slope = rng.getrandbits(32) & ~(1 << 30 if rng.random() < 0.99 else 0)
        position = rng.getrandbits(23 if rng.random() < 0.98 else 32)
        for first, bits in ((slopes, slope), (tree, position)):
            line = memory.lines.get(first, 0)
            memory.lines[first] = line & ~(0xFFFFFFFF << 32 * n) | bits << 32 * n
    lists = (*range(sinks, sinks + 8), *range(slopes + 1, slopes + 8), *range(tree + 1, tree + 8))
    for line in (*range(queries, queries + group * query_rows * 32), *lists):
        memory.lines[line] = rng.getrandbits(512)
    return {
        "version": DESCRIPTOR_VERSION,
        "opcode": int(Opcode.ATTEND),
        "flags": rng.choice([0, FLAG_SINKS]) | (FLAG_EXTENDED if extended else 0),
        "tag": rng.getrandbits(32),
        "table": table * 64,
        "queries": queries * 64,
        "result": rng.randrange(config.capacity_bytes // 64) * 64,
        "sinks": sinks * 64,
        "row_begin": begin,
        "row_end": end,
        "score_factor": rng.getrandbits(32) & ~(1 << 30),
        "output_scale": rng.choice([0, rng.getrandbits(32)]),
        "head_dim": head_dim,
        "value_dim": value_dim,
        "group": group,
        "query_rows": query_rows,
        "page_rows_log2": log2,
        "k_format": how["k"]["element"],
        "v_format": how["v"]["element"],
        "query_format": rng.randrange(2),
        "output_form": rng.randrange(4),
        "kv_head": kv_head,
        "extension": {
            f"{rows}_{what}": own[what] for rows, own in how.items() for what in ("scale", "block", "pitch")
        }
        | sight
        | {"softcap": rng.choice([0, rng.randint(1, 0x44800000)])},
    }


def put_entry(memory, first_line, n, bits):
    line = first_line + n // 8
    shift = n % 8 * 64
    memory.lines[line] = memory.lines.get(line, 0) & ~((1 << 64) - 1 << shift) | bits << shift


def spoil(job, memory, rng, tenant):
    """Make one thing of a good job bad, somewhere."""
    table = job["table"] // 64
    first = table + 1 + job["kv_head"] * table_entry_lines(TABLE.unpack(memory.lines[table])["entries"])
    page = rng.randrange(
        job["row_begin"] >> job["page_rows_log2"], (job["row_end"] >> job["page_rows_log2"]) + 1
    )
    foreign = owned_line(memory, 1 - tenant, rng, 16)
    edge = owned_line(memory, tenant, rng) // EXTENT_LINES * EXTENT_LINES + EXTENT_LINES - 1
    header = TABLE.unpack(memory.lines[table])

    def change_header(**fields):
        memory.lines[table] = TABLE.pack({**header, **fields})

    choices = [
        lambda: job.update(version=1),
        lambda: job.update(opcode=rng.randint(len(Opcode), 255)),
        lambda: job.update(flags=1 << rng.choice([2, 15])),
        lambda: extend(job, options=1 << rng.choice([3, 4, *range(8, 16)])),
        lambda: extend(job, **{rng.choice(["ranges", "range_count", "tree"]): rng.randint(1, 99)}),
        lambda: extend(job, options=OPTION_RANGES, range_count=20, ranges=rng.choice([1 << 45, foreign])),
        lambda: extend(job, options=OPTION_RANGES, range_count=rng.choice([1, 9, 100])),
        lambda: extend(job, options=OPTION_TREE, tree=rng.choice([1 << 45, foreign])),
        lambda: extend(job, options=OPTION_TREE) or job.update(query_rows=job["row_end"] % 255 + 1),
        lambda: spoil_range(job, memory, rng),
        lambda: memory.poisoned.add(job["extension"][rng.choice(["ranges", "tree", "slopes"])]),
        lambda: extend(job, options=OPTION_LATENT, v_block=1),
        lambda: extend(job, options=OPTION_LATENT) or job.update(head_dim=31, value_dim=33, v_format=0),
        lambda: extend(job, options=0, codebooks=1),
        lambda: extend(job, options=OPTION_CODEBOOK) or job.update(k_format=0, v_format=0),
        lambda: extend(job, options=0, codebooks=0, slopes=0) or job.update(k_format=7),
        lambda: (
            extend(job, options=OPTION_CODEBOOK, codebooks=CAPACITY_BYTES // 64) or job.update(k_format=7)
        ),
        lambda: extend(job, options=OPTION_CODEBOOK, codebooks=foreign) or job.update(k_format=7),
        lambda: extend(job, **{rng.choice(["select_pages", "selected", "reserved_tree"]): 1}),
        lambda: extend(job, options=rng.choice([OPTION_SELECT, OPTION_SELECT | OPTION_SUMMARIES])),
        lambda: extend(job, options=OPTION_SELECT | OPTION_SUMMARIES | OPTION_TREE, select_pages=1),
        lambda: select(job, select_pages=0),
        lambda: select(job, selected=foreign),
        lambda: select(job, selected=CAPACITY_BYTES // 64),
        lambda: select(job, selected=CAPACITY_BYTES // 64 - 1),
        lambda: extend(job, kept=1, window=0),
        lambda: extend(job, options=0, window=0, kept=0, slopes=0, first_position=rng.choice([1, -1])),
        lambda: extend(job, options=OPTION_CAUSAL, slopes=1),
        lambda: extend(job, options=OPTION_ALIBI, slopes=rng.choice([CAPACITY_BYTES // 64, foreign])),
        lambda: extend(job, softcap=rng.randint(0x44800001, (1 << 32) - 1)),
        lambda: extend(job, **{rng.choice(["k_scale", "v_scale"]): rng.randint(5, 7)}),
        lambda: extend(job, **{rng.choice(["k_block", "v_block"]): rng.randint(5, 7)}),
        lambda: extend(job, **{rng.choice(["k_pitch", "v_pitch"]): rng.randint(1, 3)}),
        lambda: extend(job, k_scale=1, k_block=0) or job.update(k_format=rng.randrange(2)),
        lambda: extend(job, v_scale=0, v_block=1),
        lambda: job.update({rng.choice(["head_dim", "value_dim"]): 0}),
        lambda: job.update(group=rng.choice([0, 129, 255])),
        lambda: job.update(query_rows=0),
        lambda: job.update(query_rows=2, flags=job["flags"] & ~FLAG_EXTENDED),
        lambda: job.update(page_rows_log2=rng.choice([0, 1, 14, 15])),
        lambda: job.update({rng.choice(["k_format", "v_format"]): rng.randint(8, 15)}),
        lambda: job.update({rng.choice(["query_format"]): rng.randint(2, 3)}),
        lambda: job.update(output_form=rng.randint(4, 7)),
        lambda: job.update(score_factor=0x7F800000 | rng.getrandbits(23) | rng.getrandbits(1) << 31),
        lambda: job.update(
            {rng.choice(["table", "queries", "result"]): rng.choice([1, 32, CAPACITY_BYTES, 1 << 63])}
        ),
        lambda: job.update(flags=FLAG_SINKS, sinks=CAPACITY_BYTES + 64),
        lambda: job.update({rng.choice(["table", "queries"]): foreign * 64}),
        lambda: job.update(flags=FLAG_SINKS, sinks=foreign * 64),
        lambda: change_header(magic=header["magic"] ^ 1 << rng.randrange(32)),
        lambda: change_header(version=1),
        lambda: job.update(kv_head=min(header["heads"], 2047)),  # another job may have written the header
        lambda: change_header(heads=2047, entries=(1 << 32) - 1) or job.update(kv_head=2046),
        lambda: job.update(row_begin=job["row_end"] + 1),
        lambda: change_header(committed_rows=max(job["row_end"] - 1, 0)),
        lambda: change_header(committed_rows=(1 << 32) - 1) or job.update(row_end=(1 << 32) - 1),
        lambda: change_header(committed_rows=1 << 31, entries=1 << 31) or job.update(row_end=1 << 23),
        lambda: put_entry(memory, first, page, ENTRY.pack(line=foreign)),
        lambda: put_entry(memory, first, page, 1 | 1 << rng.choice([1, 5, 52, 63])),
        lambda: put_entry(memory, first, page, ENTRY.pack(valid=1, line=edge)),
        lambda: put_entry(memory, first, page, ENTRY.pack(valid=1, line=CAPACITY_BYTES // 64)),
        lambda: put_entry(memory, first, page, ENTRY.pack(valid=1, line=1 << 45)),
        lambda: memory.poisoned.add(rng.choice([table, first + page // 8])),
        lambda: memory.poisoned.add(job["queries"] // 64 + rng.randrange(8)),
        lambda: memory.poisoned.add(job["sinks"] // 64),
    ]
    rng.choice(choices)()


def spoil_range(job, memory, rng):
    """Ranges that are empty, out of order, or beyond the job's rows."""
    count = job["extension"]["range_count"]
    if count:
        n = rng.randrange(count)
        begin = rng.choice([0, job["row_end"], rng.getrandbits(32)])
        bits = RANGE.pack(begin=begin, end=rng.choice([begin, job["row_end"] + 1, rng.getrandbits(32)]))
        put_entry(memory, job["extension"]["ranges"], n, bits)


def select(job, **fields):
    """Make it a job that selects pages, if it is not."""
    options = (job["extension"]["options"] & ~OPTION_TREE) | OPTION_SELECT | OPTION_SUMMARIES
    extend(job, tree=0, options=options, **({"select_pages": 3} | fields))


def extend(job, **fields):
    job["flags"] |= FLAG_EXTENDED
    job["extension"].update(fields)


def random_descriptors(memory, config, rng, count):
    """Posted descriptors of two tenants: good jobs, spoilt jobs, claims, releases, fences and noise."""
    posted = []
    for index in range(count):
        tenant = rng.choices([0, 1], [3, 1])[0]
        kind = rng.choices(["job", "spoilt", "claim", "nop", "noise"], [10, 10, 2, 1, 2])[0]
        if kind in ("job", "spoilt"):
            job = random_job(memory, config, rng, tenant)
            if kind == "spoilt":
                spoil(job, memory, rng, tenant)
            lines = lines_of(job, rng)
        elif kind == "claim":
            opcode = rng.choices([Opcode.CLAIM_EXTENTS, Opcode.RELEASE_EXTENTS], [3, 1])[0]
            many = config.extents if opcode is Opcode.CLAIM_EXTENTS else 1
            line = CLAIM.pack(
                version=DESCRIPTOR_VERSION,
                opcode=opcode,
                tag=index,
                flags=rng.choices([0, 2], [5, 1])[0],
                first_extent=rng.choice([rng.randrange(config.extents), (1 << 32) - 1]),
                extent_count=rng.choice([0, 1, 2, 3, many]),
            )
        elif kind == "nop":
            line = 1 | rng.choice([0, 0, 1 << 300]) | index << 32
        else:
            line = rng.getrandbits(512) & ~0xFFFF | 1 | rng.randrange(4) << 8
        if kind not in ("job", "spoilt"):
            lines = {"line": line, "extension": rng.getrandbits(512)}
        posted.append({"tenant": tenant, "index": index, "fetched": rng.getrandbits(32), **lines})
    return posted


def lines_of(job, rng):
    """A job's two lines; the second is anything where the first does not say that it is there."""
    line = ATTEND.pack({name: value for name, value in job.items() if name != "extension"})
    extended = job["flags"] & FLAG_EXTENDED
    return {
        "line": line,
        "extension": EXTENSION.pack(job["extension"]) if extended else rng.getrandbits(512),
    }
