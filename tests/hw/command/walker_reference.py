"""What the walker must send for a list of descriptors, worked out in plain Python from the layouts."""

from dataclasses import dataclass, field

from nearkv_hw.abi import Opcode, OutputForm, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import ATTEND, CLAIM, DESCRIPTOR_VERSION, FLAG_SINKS, NOP
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

EXTENT_LINES = EXTENT_BYTES // LINE_BYTES
NO_FAULT, DENIED, POISON, OUTSIDE = range(4)


@dataclass
class Memory:
    """Lines as integers; `owners` by extent; poisoned lines."""

    config: object
    lines: dict = field(default_factory=dict)
    owners: dict = field(default_factory=dict)
    poisoned: set = field(default_factory=set)

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


class Reference:
    """The walker, in software; claims change `memory.owners` as the slices' tables do."""

    def __init__(self, config, memory):
        self.config = config
        self.memory = memory
        units = range(config.units)
        self.sent = Expected([[] for _ in units], [[] for _ in units], [[] for _ in units])

    def take(self, posted):
        """One descriptor, as it is posted: tenant, index, fetched, line."""
        status, detail, passes = Status.OK, 0, 0
        line, tenant = posted["line"], posted["tenant"]
        head = ATTEND.unpack(line)
        status = self.first_status(line, head)
        if status is Status.OK and head["opcode"] == Opcode.CLAIM_EXTENTS:
            status, detail = self.claim(CLAIM.unpack(line), tenant)
        elif status is Status.OK and head["opcode"] == Opcode.ATTEND:
            status, table = self.table(head, tenant)
            if status is Status.OK:
                passes = -(-head["group"] // self.config.queries)
                for first in range(0, head["group"], self.config.queries):
                    self.send_pass(head, table, tenant, first)
        self.sent.tickets.append(
            {
                **{name: posted[name] for name in ("tenant", "index", "fetched")},
                "tag": head["tag"],
                "status": int(status),
                "detail": detail,
                "passes": passes,
            }
        )

    def first_status(self, line, head):
        """What the descriptor's own line tells."""
        layouts = {Opcode.NOP: NOP, Opcode.ATTEND: ATTEND, Opcode.CLAIM_EXTENTS: CLAIM}
        if head["version"] != DESCRIPTOR_VERSION:
            return Status.BAD_VERSION
        if head["opcode"] not in list(Opcode):
            return Status.BAD_OPCODE
        attends = head["opcode"] == Opcode.ATTEND
        if line & layouts[head["opcode"]].reserved_mask() or head["flags"] & ~(FLAG_SINKS if attends else 0):
            return Status.BAD_FLAGS
        if not attends:
            return Status.OK
        if head["output_scale"]:
            return Status.BAD_FLAGS
        if not self.config.units:
            return Status.NO_UNITS
        if not (
            1 <= head["head_dim"] <= 256
            and 1 <= head["value_dim"] <= 256
            and 1 <= head["group"] <= 128
            and head["query_rows"] == 1
            and 2 <= head["page_rows_log2"] <= 13
        ):
            return Status.BAD_GEOMETRY
        if (
            any(head[name] > 1 for name in ("k_format", "v_format", "query_format"))
            or head["output_form"] > 3
        ):
            return Status.BAD_FORMAT
        if head["score_factor"] & 0x7F800000 == 0x7F800000:
            return Status.BAD_FACTOR
        names = ["table", "queries", "result"] + ["sinks"] * (head["flags"] == FLAG_SINKS)
        if any(head[name] % 64 or head[name] >= self.config.capacity_bytes for name in names):
            return Status.BAD_ADDRESS
        return Status.OK

    def claim(self, claim, tenant):
        extents = range(claim["first_extent"], claim["first_extent"] + claim["extent_count"])
        if not extents or extents[-1] >= self.config.extents:
            return Status.BAD_EXTENT, 0
        for extent in extents:
            if self.memory.owners.get(extent, tenant) != tenant:
                return Status.EXTENT_TAKEN, extent
        self.memory.owners.update(dict.fromkeys(extents, tenant))
        return Status.OK, 0

    def table(self, job, tenant):
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
        return Status.OK, table

    def send_pass(self, job, table, tenant, first):
        sent, config = self.sent, self.config
        heads = min(config.queries, job["group"] - first)
        sinks = job["flags"] == FLAG_SINKS
        k_lines = -(-job["head_dim"] * 2 // 64)
        unit = {
            "tenant": tenant,
            "queries": heads,
            **{name: job[name] for name in ("head_dim", "value_dim", "k_format", "v_format", "query_format")},
            "score_factor": job["score_factor"],
        }
        for number, jobs in enumerate(sent.jobs):
            jobs.append({**unit, "sinks": int(sinks and number == 0)})
        form = OutputForm(job["output_form"])
        sent.results.append(
            {
                "tenant": tenant,
                "queries": heads,
                "value_dim": job["value_dim"],
                "form": int(form),
                "line": job["result"] // 64 + first * ResultLayout(job["value_dim"], form).lines,
                "fault": 0,
            }
        )
        self.send_queries(job, tenant, first, heads * k_lines, sinks)
        self.send_pages(job, table, tenant)

    def send_queries(self, job, tenant, first, count, sinks):
        begin = job["queries"] // 64 + first * -(-job["head_dim"] * 2 // 64)
        status = Status.OK
        for n in range(count + sinks):
            is_sink = n == count
            line = job["sinks"] // 64 + first // 16 if is_sink else begin + n
            data, fault = self.memory.read(line, tenant)
            if fault and status is Status.OK:
                status = Status.POISON if fault == POISON else Status.DENIED
            for unit, lines in enumerate(self.sent.queries):
                last = n == count - 1 + (sinks and unit == 0)
                if is_sink and unit == 0:
                    lines.append({"data": data >> first % 16 * 32, "sink": 1, "last": 1})
                elif not is_sink:
                    lines.append({"data": data, "sink": 0, "last": int(last)})
        self.sent.query_outcomes.append({"status": int(status), "page": 0})

    def send_pages(self, job, table, tenant):
        config = self.config
        page_rows = 1 << job["page_rows_log2"]
        status, at, pages = Status.OK, 0, []
        begin, end = job["row_begin"], job["row_end"]
        if begin != end:
            pages = range(begin // page_rows, (end - 1) // page_rows + 1)
        first_entry = job["table"] // 64 + 1 + job["kv_head"] * table_entry_lines(table["entries"])
        k_lines, v_lines = (-(-job[name] * 2 // 64) for name in ("head_dim", "value_dim"))
        for page in pages:
            data, fault = self.memory.read(first_entry + page // 8, tenant)
            if fault:
                status = Status.POISON if fault == POISON else Status.DENIED
                break
            bits = data >> page % 8 * 64 & (1 << 64) - 1
            entry = ENTRY.unpack(bits)
            lines = page_rows * (k_lines + v_lines)
            if (
                not entry["valid"]
                or bits & ENTRY.reserved_mask()
                or entry["line"] >= config.capacity_bytes // 64
                or entry["line"] % EXTENT_LINES + lines > EXTENT_LINES
            ):
                status, at = Status.BAD_PAGE, page
                break
            extent, within = divmod(entry["line"], EXTENT_LINES)
            base = extent // config.slices * EXTENT_LINES + within
            rows = range(max(begin - page * page_rows, 0), min(end - page * page_rows, page_rows))
            layout = RowLayout(job["head_dim"], job["value_dim"], page_rows)
            self.sent.pages[extent % config.slices].append(
                {
                    "last": 0,
                    "page": page,
                    "k_line": base + layout.k_offset(rows[0]) // 64,
                    "v_line": base + layout.v_offset(rows[0]) // 64,
                    "rows": len(rows),
                }
            )
        for items in self.sent.pages:
            items.append({"last": 1})
        self.sent.page_outcomes.append({"status": int(status), "page": at})
