"""What the walker must send for a list of descriptors, worked out in plain Python from the layouts."""

import zlib
from dataclasses import dataclass, field

from nearkv_hw.abi import Opcode, OutputForm, Status
from nearkv_hw.abi.config import EXTENT_BYTES, MAX_APERTURES
from nearkv_hw.abi.descriptor import (
    ATTEND,
    CLAIM,
    DESCRIPTOR_VERSION,
    EXTENSION,
    FLAG_EXTENDED,
    FLAG_SINKS,
    NOP,
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
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import (
    ENTRY,
    LAYOUT_VERSION,
    TABLE,
    TABLE_MAGIC,
    ResultLayout,
    RowLayout,
    table_entry_lines,
)
from nearkv_hw.abi.numerics import MAX_ROWS
from nearkv_hw.abi.rows import Stored
from nearkv_hw.interfaces import EXTENTS_BITS, QueryLineKind

OPTIONS = (
    *(OPTION_CAUSAL, OPTION_TREE, OPTION_LATENT, OPTION_ALIBI, OPTION_RANGES, OPTION_CODEBOOK),
    *(OPTION_SUMMARIES, OPTION_SELECT),
)
ROW_FIELDS = [f"{rows}_{what}" for rows in "kv" for what in ("scale", "block", "pitch")]
LISTS = ["slopes", "codebooks", "ranges", "tree", "selected"]
HAD = [
    *(*ROW_FIELDS, *LISTS, "softcap", "options", "window", "kept", "first_position", "range_count"),
    "select_pages",
]
"""What the device has of an extension."""

EXTENT_LINES = EXTENT_BYTES // LINE_BYTES
NO_FAULT, DENIED, POISON, OUTSIDE = range(4)
SCRUBBING = -1
"""Owner of an extent that was given back."""
MOST_EXTENTS = (1 << EXTENTS_BITS) - 1


def bound_of(line, number):
    """The bound that a unit finds of the summary in a line of its channel, in a job's pass of that number."""
    return zlib.crc32(b"%d %d" % (line, number)) % 9 - 4


@dataclass
class Memory:
    """Lines as integers; `owners` by extent, SCRUBBING for what was given back; poisoned lines; how many
    extents each tenant may claim, and how many it has claimed."""

    config: object
    lines: dict = field(default_factory=dict)
    owners: dict = field(default_factory=dict)
    poisoned: set = field(default_factory=set)
    quotas: dict = field(default_factory=lambda: dict.fromkeys(range(MAX_APERTURES), MOST_EXTENTS))
    holdings: dict = field(default_factory=lambda: dict.fromkeys(range(MAX_APERTURES), 0))

    def read(self, line, tenant):
        """Data and fault, as the fabric answers."""
        if line >= self.config.capacity_bytes // LINE_BYTES:
            return 0, OUTSIDE
        if self.owners.get(line // EXTENT_LINES) != tenant:
            return 0, DENIED
        return self.lines.get(line, 0), POISON if line in self.poisoned else NO_FAULT


@dataclass
class Expected:
    """Everything that leaves the walker, in order."""

    jobs: list
    queries: list
    pages: list
    results: list = field(default_factory=list)
    tickets: list = field(default_factory=list)
    query_outcomes: list = field(default_factory=list)
    page_outcomes: list = field(default_factory=list)
    written: list = field(default_factory=list)


class Reference:
    """The walker, in software; claims change `memory.owners` as the slices' tables do."""

    def __init__(self, config, memory, candidates):
        self.config = config
        self.candidates = candidates
        self.memory = memory
        units = range(config.units)
        self.sent = Expected([[] for _ in units], [[] for _ in units], [[] for _ in units])

    def take(self, posted):
        """One descriptor, as it is posted: tenant, index, fetched, line, extension."""
        status, detail, passes = Status.OK, 0, 0
        line, tenant = posted["line"], posted["tenant"]
        head = ATTEND.unpack(line)
        more = EXTENSION.unpack(posted["extension"] if head["flags"] & FLAG_EXTENDED else 0)
        status = self.first_status(line, head, more)
        head |= {name: more[name] for name in HAD}
        if status is Status.OK and head["opcode"] in (Opcode.CLAIM_EXTENTS, Opcode.RELEASE_EXTENTS):
            status, detail = self.claim(CLAIM.unpack(line), tenant)
        elif status is Status.OK and head["opcode"] == Opcode.ATTEND:
            status, table = self.table(head, tenant)
            if status is Status.OK:
                queries = head["group"] * head["query_rows"]
                passes = -(-queries // self.config.queries)
                firsts = range(0, queries, self.config.queries)
                if head["options"] & OPTION_SELECT:
                    self.send_selecting(head, table, tenant, firsts)
                else:
                    for first in firsts:
                        self.send_pass(head, table, tenant, first)
        self.sent.tickets.append(
            {
                **{name: posted[name] for name in ("tenant", "index", "fetched")},
                "tag": head["tag"],
                "status": int(status),
                "detail": detail,
                "passes": passes,
                "bounds": int(passes and head["options"] & OPTION_SELECT != 0),
            }
        )

    def send_selecting(self, job, table, tenant, firsts):
        """The passes of bounds, and then those over the selected pages."""
        found, good = {}, True  # bounds of the candidates
        for number, first in enumerate(firsts):
            self.send_pass(job, table, tenant, first, bounds=(number, found))
            good = good and self.sent.page_outcomes[-1]["status"] == Status.OK
        *others, last = found or [None]
        best = sorted(others, key=lambda page: (-found[page], page))[: job["select_pages"] - 1]
        chosen = [page for page in found if page in best or page == last] if good else []
        for first in firsts:
            self.send_pass(job, table, tenant, first, chosen=(chosen, good))
            if good and first == 0 and not self.written(job, tenant, chosen):
                self.sent.page_outcomes[-1]["status"] = int(Status.RESULT_DENIED)

    def written(self, job, tenant, chosen):
        """Write the list of selected pages; whether all of it could be."""
        words = [len(chosen), *chosen]
        good = True
        for n in range(0, len(words), 16):
            line = job["selected"] + n // 16
            data = sum(word << 32 * i for i, word in enumerate(words[n : n + 16]))
            self.sent.written.append((line, tenant, data))
            good = good and self.memory.read(line, tenant)[1] in (NO_FAULT, POISON)
        return good

    def first_status(self, line, head, more):
        """What the descriptor's own lines tell."""
        layouts = {Opcode.NOP: NOP, Opcode.ATTEND: ATTEND}
        layouts |= dict.fromkeys((Opcode.CLAIM_EXTENTS, Opcode.RELEASE_EXTENTS), CLAIM)
        if head["version"] != DESCRIPTOR_VERSION:
            return Status.BAD_VERSION
        if head["opcode"] not in list(Opcode):
            return Status.BAD_OPCODE
        attends = head["opcode"] == Opcode.ATTEND
        if line & layouts[head["opcode"]].reserved_mask() or head["flags"] & ~(
            FLAG_SINKS | FLAG_EXTENDED if attends else 0
        ):
            return Status.BAD_FLAGS
        if not attends:
            return Status.OK
        if any(more[name] for name in more if name not in HAD):
            return Status.BAD_FLAGS
        options = more["options"]
        positioned = (
            options & (OPTION_CAUSAL | OPTION_ALIBI) or more["window"]
        ) and not options & OPTION_TREE
        latent = options & OPTION_LATENT
        if (
            options & ~sum(OPTIONS)
            or (more["first_position"] and not positioned)
            or (more["kept"] and not more["window"])
            or (more["slopes"] and not options & OPTION_ALIBI)
            or (more["codebooks"] and not options & OPTION_CODEBOOK)
            or ((more["ranges"] or more["range_count"]) and not options & OPTION_RANGES)
            or (more["tree"] and not options & OPTION_TREE)
            or ((more["select_pages"] or more["selected"]) and not options & OPTION_SELECT)
            or (options & OPTION_SELECT and (options & OPTION_TREE or not options & OPTION_SUMMARIES))
            or (latent and (head["v_format"] or any(more[f"v_{n}"] for n in ("scale", "block", "pitch"))))
        ):
            return Status.BAD_FLAGS
        if not self.config.units:
            return Status.NO_UNITS
        if not (
            head["head_dim"] >= 1
            and 1 <= head["value_dim"] <= (head["head_dim"] if latent else 1023)
            and 1 <= head["group"] <= 128
            and 1 <= head["query_rows"] <= (255 if head["flags"] & FLAG_EXTENDED else 1)
            and 2 <= head["page_rows_log2"] <= 13
            and (more["select_pages"] or not options & OPTION_SELECT)
        ):
            return Status.BAD_GEOMETRY
        if head["query_format"] > 1 or head["output_form"] > 3:
            return Status.BAD_FORMAT
        stored = "k" if latent else "kv"
        if not all(self.rows_are_good(head, more, rows) for rows in stored):
            return Status.BAD_FORMAT
        if (7 in [head[f"{rows}_format"] for rows in stored]) != bool(options & OPTION_CODEBOOK):
            return Status.BAD_FORMAT
        if head["score_factor"] & 0x7F800000 == 0x7F800000 or more["softcap"] > 0x44800000:
            return Status.BAD_FACTOR
        names = ["table", "queries", "result", *["sinks"] * bool(head["flags"] & FLAG_SINKS)]
        if max(more[name] for name in LISTS) >= self.config.capacity_bytes // 64:
            return Status.BAD_ADDRESS
        if any(head[name] % 64 or head[name] >= self.config.capacity_bytes for name in names):
            return Status.BAD_ADDRESS
        return Status.OK

    @staticmethod
    def rows_are_good(head, more, rows):
        """Whether K or V is stored in a way that the device has."""
        form, scale, block, pitch = (
            head[f"{rows}_format"],
            *(more[f"{rows}_{what}"] for what in ("scale", "block", "pitch")),
        )
        if form == 7 and scale in (1, 2):
            return False
        if form > 7 or scale > 4 or block > 4 or (block and not scale) or (scale and form < 2):
            return False
        stored = Stored.of(element=form, scale=scale, block=block, pitch=pitch)
        return stored.pitch_code(head["head_dim" if rows == "k" else "value_dim"]) == pitch

    def claim(self, claim, tenant):
        extents = range(claim["first_extent"], claim["first_extent"] + claim["extent_count"])
        if not extents or extents[-1] >= self.config.extents:
            return Status.BAD_EXTENT, 0
        if claim["opcode"] == Opcode.RELEASE_EXTENTS:
            own = [extent for extent in extents if self.memory.owners.get(extent) == tenant]
            self.memory.owners.update(dict.fromkeys(own, SCRUBBING))
            # of those that were owned from the first nobody counted the claim
            self.memory.holdings[tenant] = self.memory.holdings[tenant] - len(own) & MOST_EXTENTS
            return Status.OK, len(own)
        for extent in extents:
            owner = self.memory.owners.get(extent, tenant)
            if owner != tenant:
                return Status.EXTENT_BUSY if owner == SCRUBBING else Status.EXTENT_TAKEN, extent
        holdings = self.memory.holdings[tenant] + sum(self.memory.owners.get(e) is None for e in extents)
        if holdings > self.memory.quotas[tenant]:
            return Status.OVER_QUOTA, self.memory.quotas[tenant]
        self.memory.holdings[tenant] = holdings
        self.memory.owners.update(dict.fromkeys(extents, tenant))
        return Status.OK, 0

    def table(self, job, tenant):
        try:
            self.layout(job)
        except ValueError:
            return Status.BAD_GEOMETRY, None
        log2 = job["page_rows_log2"]
        pages = (job["row_end"] - 1 >> log2) - (job["row_begin"] >> log2) + 1
        if job["options"] & OPTION_SELECT and pages > self.candidates:
            return Status.BAD_GEOMETRY, None
        header, fault = self.memory.read(job["table"] // 64, tenant)
        if fault:
            return (Status.POISON if fault == POISON else Status.DENIED), None
        table = TABLE.unpack(header)
        if (
            table["magic"] != TABLE_MAGIC
            or table["version"] != LAYOUT_VERSION
            or table["heads"] <= job["kv_head"]
        ):
            return Status.BAD_TABLE, None
        room = min(table["committed_rows"], table["entries"] << job["page_rows_log2"], MAX_ROWS)
        if not job["row_begin"] <= job["row_end"] <= room:
            return Status.BAD_RANGE, None
        if job["options"] & OPTION_TREE and job["query_rows"] > job["row_end"]:
            return Status.BAD_RANGE, None
        return Status.OK, table

    def send_pass(self, job, table, tenant, first, bounds=None, chosen=None):
        """A pass; `bounds`: its number and the bounds so far; `chosen`: the pages, if there were bounds."""
        sent, config = self.sent, self.config
        heads = min(config.queries, job["group"] * job["query_rows"] - first)
        sinks = bool(job["flags"] & FLAG_SINKS)
        query_lines = -(-job["head_dim"] * 2 // 64)
        unit = {
            "tenant": tenant,
            "queries": heads,
            **{name: job[name] for name in ("head_dim", "value_dim", "k_format", "v_format", "query_format")},
            **{
                f"{rows}_{what}": job[f"{rows}_{what}"]
                for rows in "kv"
                for what in ("scale", "block", "pitch")
            },
            "score_factor": job["score_factor"],
            **{name: job[name] for name in ("softcap", "group", "window", "kept")},
            "first": int(first == 0),
            "last": int(first + heads == job["group"] * job["query_rows"]),
            "bounds": 0,
            "position": job["first_position"],
            "causal": int(bool(job["options"] & OPTION_CAUSAL or job["window"])),
            "slopes": int(bool(job["options"] & OPTION_ALIBI)),
            "codebook": int(bool(job["options"] & OPTION_CODEBOOK)),
            "latent": int(bool(job["options"] & OPTION_LATENT)),
            "tree": int(bool(job["options"] & OPTION_TREE)),
            "query_rows": job["query_rows"],
            "own_row": (job["row_end"] - job["query_rows"]) % (1 << 23),
        }
        lists = bounds is None
        if bounds:
            sinks = False
            unit |= dict.fromkeys(("v_format", "softcap", "window", "kept", "causal", "slopes", "tree"), 0)
            unit |= {f"{rows}_{what}": 0 for rows in "kv" for what in ("scale", "block", "pitch")}
            unit |= {"codebook": 0, "latent": 0, "value_dim": 1, "bounds": 1}
            unit["k_format"] = job["k_format"] if job["k_format"] < 2 else 0
        for number, jobs in enumerate(sent.jobs):
            jobs.append({**unit, "sinks": int(sinks and number == 0)})
        form = OutputForm(job["output_form"])
        sent.results.append(
            {
                "tenant": tenant,
                "queries": heads,
                "value_dim": job["value_dim"],
                "form": int(form),
                "output_scale": job["output_scale"],
                "line": job["result"] // 64 + first * ResultLayout(job["value_dim"], form).lines,
                "fault": int(not lists),
            }
        )
        query_rows = range(first // job["group"], (first + heads - 1) // job["group"] + 1)
        self.send_queries(job, tenant, first, heads * query_lines, sinks, query_rows, lists)
        self.send_pages(job, table, tenant, bounds, chosen)

    def send_queries(self, job, tenant, first, count, sinks, query_rows, lists):
        begin = job["queries"] // 64 + first * -(-job["head_dim"] * 2 // 64)
        list_lines = -(-job["group"] // 16)
        parts = [(QueryLineKind.QUERY, begin, count)]
        options = job["options"] if lists else 0
        if options & OPTION_CODEBOOK:
            parts.append((QueryLineKind.CODEBOOK, job["codebooks"], 1))
        if options & OPTION_ALIBI:
            parts.append((QueryLineKind.SLOPES, job["slopes"], list_lines))
        if options & OPTION_TREE:
            position_lines = -(-job["query_rows"] // 16)
            masks = range(query_rows[0] // 2, query_rows[-1] // 2 + 1)
            parts.append((QueryLineKind.POSITIONS, job["tree"], position_lines))
            parts.append((QueryLineKind.MASKS, job["tree"] + position_lines + masks[0], len(masks)))
        if sinks:
            parts.append((QueryLineKind.SINKS, job["sinks"] // 64, list_lines))
        status = Status.OK
        sent = [[] for _ in self.sent.queries]
        for kind, first_line, number in parts:
            for line in range(first_line, first_line + number):
                data, fault = self.memory.read(line, tenant)
                if status is Status.OK:
                    status = self.line_status(job, kind, line - first_line, data, fault)
                for lines in sent[:1] if kind is QueryLineKind.SINKS else sent:
                    lines.append({"data": data, "kind": kind.value, "last": 0})
        for lines, all_lines in zip(sent, self.sent.queries, strict=True):
            lines[-1]["last"] = 1
            all_lines += lines
        self.sent.query_outcomes.append({"status": int(status), "page": 0})

    @staticmethod
    def line_status(job, kind, number, data, fault):
        """What is wrong with a line of queries or of a list."""
        if fault:
            return Status.POISON if fault == POISON else Status.DENIED
        words = [data >> 32 * n & 0xFFFFFFFF for n in range(16)]
        if kind is QueryLineKind.SLOPES:
            bad = any(word >> 23 & 0xFF == 0xFF for word in words[: max(job["group"] - 16 * number, 0)])
        elif kind is QueryLineKind.POSITIONS:
            bad = any(word >> 23 for word in words[: max(job["query_rows"] - 16 * number, 0)])
        else:
            bad = False
        return Status.BAD_LIST if bad else Status.OK

    @staticmethod
    def layout(job):
        """How a job's rows lie in pages; ValueError when a page is larger than an extent."""
        k, v = (
            Stored.of(
                element=job[f"{rows}_format"],
                **{what: job[f"{rows}_{what}"] for what in ("scale", "block", "pitch")},
            )
            for rows in "kv"
        )
        latent = bool(job["options"] & OPTION_LATENT)
        summaries = bool(job["options"] & OPTION_SUMMARIES)
        return RowLayout(
            job["head_dim"], job["value_dim"], 1 << job["page_rows_log2"], k, v, latent, summaries
        )

    def send_pages(self, job, table, tenant, bounds, chosen):
        status, at = Status.OK, 0
        seen = set()  # candidates of this pass
        for begin, end in self.pieces(job, tenant):
            if isinstance(begin, Status):
                status = begin
                break
            if chosen and not chosen[1]:
                continue
            status, at = self.send_rows(job, table, tenant, begin, end, bounds, seen, chosen)
            if status is not Status.OK:
                break
        for items in self.sent.pages:
            items.append({"last": 1})
        self.sent.page_outcomes.append({"status": int(status), "page": at})

    def pieces(self, job, tenant):
        """Runs of rows, in order; at a list's fault its status and None."""
        given = [(job["row_begin"], job["row_end"])]
        if job["options"] & OPTION_RANGES:
            given = list(self.listed(job, tenant))
        causal = job["options"] & OPTION_CAUSAL or job["window"]
        parts = [(0, MAX_ROWS)]
        if causal and not job["options"] & OPTION_TREE:
            last = job["first_position"] + job["query_rows"]
            first = job["first_position"] - job["window"] + 1
            parts = [(0, last)]
            if job["window"] and first > job["kept"]:
                parts = [(0, min(job["kept"], last)), (first, last)]
        for begin, end in given:
            if isinstance(begin, Status):
                yield begin, None
                return
            cut = [(max(begin, b), min(end, e)) for b, e in parts]
            yield from [(b, e) for b, e in cut if b < e]

    def listed(self, job, tenant):
        """The ranges of a list."""
        before = job["row_begin"]
        for n in range(job["range_count"]):
            data, fault = self.memory.read(job["ranges"] + n // 8, tenant)
            if fault:
                yield (Status.POISON if fault == POISON else Status.DENIED), None
                return
            pair = RANGE.unpack(data >> n % 8 * 64 & (1 << 64) - 1)
            if not before <= pair["begin"] < pair["end"] <= job["row_end"]:
                yield Status.BAD_LIST, None
                return
            before = pair["end"]
            yield pair["begin"], pair["end"]

    def send_rows(self, job, table, tenant, begin, end, bounds, seen, chosen):
        """The pages of a run of rows; the status and the page at fault."""
        config = self.config
        page_rows = 1 << job["page_rows_log2"]
        pages = range(begin // page_rows, (end - 1) // page_rows + 1)
        first_entry = job["table"] // 64 + 1 + job["kv_head"] * table_entry_lines(table["entries"])
        layout = self.layout(job)
        for page in pages:
            data, fault = self.memory.read(first_entry + page // 8, tenant)
            if fault:
                return (Status.POISON if fault == POISON else Status.DENIED), 0
            bits = data >> page % 8 * 64 & (1 << 64) - 1
            entry = ENTRY.unpack(bits)
            if (
                not entry["valid"]
                or bits & ENTRY.reserved_mask()
                or entry["line"] >= config.capacity_bytes // 64
                or entry["line"] % EXTENT_LINES + layout.page_lines > EXTENT_LINES
            ):
                return Status.BAD_PAGE, page
            extent, within = divmod(entry["line"], EXTENT_LINES)
            base = extent // config.slices * EXTENT_LINES + within
            if chosen and page not in chosen[0]:
                continue
            if bounds:
                if page not in seen:
                    line = base + layout.summary_offset // 64
                    self.sent.pages[extent % config.slices].append(
                        {"last": 0, "page": page, "k_line": line, "rows": 2, "row": 0, "index": len(seen)}
                    )
                    seen.add(page)
                    number, found = bounds
                    value = bound_of(line, number)
                    found[page] = max(value, found.get(page, value))
                continue
            rows = range(max(begin - page * page_rows, 0), min(end - page * page_rows, page_rows))
            k, latent = layout.k_offset(rows[0]) // 64, job["options"] & OPTION_LATENT
            k_scales, v_scales = (layout.areas[area] + rows[0] * layout.pitches[area] for area in (1, 3))
            self.sent.pages[extent % config.slices].append(
                {
                    "last": 0,
                    "page": page,
                    "k_line": base + k,
                    "v_line": base + (k if latent else layout.v_offset(rows[0]) // 64),
                    "rows": len(rows),
                    **({"k_scales": base + k_scales // 64} if job["k_scale"] else {}),
                    **({"v_scales": base + v_scales // 64} if job["v_scale"] else {}),
                    "row": rows[0] % 64,
                    "index": page * page_rows + rows[0],
                }
            )
        return Status.OK, 0
