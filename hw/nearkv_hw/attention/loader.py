"""The start of a pass: a number for it, its parameters, its queries and sinks."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..abi.descriptor import MAX_GROUP, MAX_QUERY_ROWS, TREE_ROW_BYTES
from ..abi.lines import LINE_BITS
from ..arithmetic.decode import CODE_BITS, CodeKind, code_kind
from ..arithmetic.score import FLOAT_BITS, Factor, FactorDecoder
from ..interfaces import POSITION_BITS, ROW_BITS, TENANT_BITS, QueryLine, QueryLineKind, UnitJob
from .array import BOOK_ENTRIES, BookEntry
from .codes import row_codes, set_row_codes
from .scoring import BoundsPass, Sight, opening, query_parameters, tree_word
from .shape import BANKS, PASSES, abreast_bits


def pass_parameters(shape):
    """What the unit keeps of a pass while it lasts."""
    return data.StructLayout(
        {
            "tenant": TENANT_BITS,
            "k": row_codes(shape),
            "v": row_codes(shape),
            "query_kind": CodeKind,
            "query_lines_last": range(shape.row_lines),
            "queries": shape.queries.bit_length(),
            "value_dim": 10,
            "factor": Factor,
            "capped": 1,
            "cap": Factor,
            "sight": Sight,
            "biased": 1,
            "latent": 1,
            "bounds": BoundsPass,
        }
    )


_LIST_SHIFT = (LINE_BITS // FLOAT_BITS).bit_length() - 1
_LANE_SHIFT = FLOAT_BITS.bit_length() - 1
_MASK_WORDS = 8 * TREE_ROW_BYTES // FLOAT_BITS


def query_load(shape):
    """A line of a query on its way into the cells."""
    return data.StructLayout(
        {
            "data": CODE_BITS * shape.line_lanes,
            "number": range(PASSES),
            "query": range(shape.queries),
            "line": range(shape.row_lines),  # step of K rows that its elements are for
            "block": range(shape.wide),  # and block of lanes
            "abreast": abreast_bits(shape),  # log2 of the rows abreast, for each of which it is
            "count": range(shape.line_lanes + 1),  # elements of the line
            "last": 1,
        }
    )


class Loader(wiring.Component):
    """Loads one query line per cycle, while earlier passes stream; of lists and codebooks one number.

    Passes are numbered in turn. A pass is taken when its number is free, and its queries are loaded when the
    pass that had their bank has no more K.

    Parameters
    ----------
    shape : UnitShape.

    Members
    -------
    jobs, queries : In(stream) : passes, and their lines of queries and sinks.
    loads : Out(stream) : query lines for the cells.
    openings : Out(stream) : the sinks, after the last query line.
    parameters : Out : parameters of one query (`query_parameters`), before the opening.
    tree : Out : a word of the pass's tree (`tree_word`), before the opening.
    book : Out : a number of the pass's codebook, for the array.
    k_ended : In : the pass of that number has no more K.
    freed : In : the pass of that number is over.
    passes : Out : parameters of the passes.
    start : Out : there is a pass of that number, from this cycle on.
    loaded : Out : its queries are in the cells, its sinks on their way.
    """

    def __init__(self, *, shape):
        self.shape = shape
        super().__init__(
            {
                "jobs": In(stream.Signature(UnitJob)),
                "queries": In(stream.Signature(QueryLine)),
                "loads": Out(stream.Signature(query_load(shape))),
                "openings": Out(stream.Signature(opening(shape.queries))),
                "parameters": Out(query_parameters(shape.queries)),
                "tree": Out(tree_word(shape.queries)),
                "book": Out(BookEntry),
                "k_ended": In(PASSES),
                "freed": In(PASSES),
                "passes": Out(data.ArrayLayout(pass_parameters(shape), PASSES)),
                "start": Out(PASSES),
                "loaded": Out(PASSES),
            }
        )

    def elaborate(self, platform):
        m = Module()
        line_shift = exact_log2(self.shape.line_lanes)
        number = Signal(range(PASSES))
        own = Signal(PASSES, init=1)
        opened, loaded = Signal(PASSES), Signal(PASSES)
        # passes whose K may still meet their queries; one of a bank at most
        asking = Signal(PASSES)
        bank_taken = Signal()
        m.d.comb += [
            self.loaded.eq(loaded),
            bank_taken.eq(
                Cat(
                    asking[other] & own[mine]
                    for mine in range(PASSES)
                    for other in range(mine % BANKS, PASSES, BANKS)
                ).any()
            ),
        ]
        now = Signal(pass_parameters(self.shape))  # of the pass that is being loaded
        query_count_last = Signal(range(self.shape.line_lanes + 1))
        sinks, lists, listed, codebook = Signal(), Signal(), Signal(), Signal()
        all_here = Signal()  # all lines of queries and lists
        entry = Signal(range(BOOK_ENTRIES))
        m.d.comb += [
            self.book.address.eq(Cat(entry, number)),
            self.book.data.eq(self.queries.payload.data.word_select(entry, CODE_BITS)),
        ]
        # the query whose parameters come next: its head, its row, and the row's position
        head, row, position = Signal(8), Signal(8), Signal(signed(POSITION_BITS))
        slot = Signal(range(self.shape.queries))  # its row's number in the pass
        group, query_rows = Signal(8), Signal(8)
        list_word = Signal(8)  # of a list that goes on from line to line
        mask_word, mask_half, mask_slot = (
            Signal(range(_MASK_WORDS)),
            Signal(),
            Signal(range(self.shape.queries + 1)),
        )
        kind = self.queries.payload.kind
        is_masks = kind == QueryLineKind.MASKS
        word = self.queries.payload.data.word_select(
            Mux(is_masks, Cat(mask_word, mask_half), list_word[:_LIST_SHIFT]), FLOAT_BITS
        )
        words = {}
        for of_kind, bits, depth, address in (
            (QueryLineKind.SLOPES, FLOAT_BITS, MAX_GROUP, head),
            (QueryLineKind.SINKS, FLOAT_BITS, MAX_GROUP, head),
            (QueryLineKind.POSITIONS, ROW_BITS, MAX_QUERY_ROWS + 1, row),
        ):
            m.submodules[f"list_{of_kind.name.lower()}"] = kept = memory.Memory(
                shape=bits, depth=depth, init=[]
            )
            read, write = kept.read_port(domain="comb"), kept.write_port()
            m.d.comb += [
                read.addr.eq(address),
                write.addr.eq(list_word),
                write.data.eq(word),
                write.en.eq(lists & self.queries.valid & (kind == of_kind)),
            ]
            words[of_kind] = read.data
        m.d.comb += [
            self.tree.number.eq(number),
            self.tree.is_position.eq(lists & self.queries.valid & (kind == QueryLineKind.POSITIONS)),
            self.tree.index.eq(list_word),
            self.tree.is_mask.eq(lists & self.queries.valid & is_masks & (mask_slot != self.shape.queries)),
            self.tree.slot.eq(mask_slot),
            self.tree.word.eq(mask_word),
            self.tree.data.eq(word),
        ]
        code, cap_code = Signal(FLOAT_BITS), Signal(FLOAT_BITS)
        values = Signal(FLOAT_BITS * self.shape.queries)
        query = Signal(range(self.shape.queries))
        line = Signal(range(self.shape.row_lines))
        m.submodules.factor = factor = FactorDecoder()
        m.submodules.cap = cap = FactorDecoder()
        m.d.comb += [factor.code.eq(code), cap.code.eq(cap_code)]
        m.d.sync += [
            opened.eq(opened & ~self.freed),
            loaded.eq(loaded & ~self.freed),
            asking.eq(asking & ~self.k_ended),
        ]
        m.d.comb += [
            self.loads.payload.data.eq(self.queries.payload.data),
            self.loads.payload.number.eq(number),
            self.loads.payload.query.eq(query),
            self.loads.payload.abreast.eq(now.k.abreast),
            self.loads.payload.last.eq(line == now.query_lines_last),
            self.loads.payload.count.eq(
                Mux(self.loads.payload.last, query_count_last, self.shape.line_lanes)
            ),
            self.openings.payload.number.eq(number),
            self.openings.payload.sinks.eq(sinks),
            self.openings.payload.values.eq(values),
        ]
        for extra in range(exact_log2(self.shape.wide) + 1):  # lines of a query that a step of K takes
            with m.If((now.k.step_shift == line_shift + extra) | (extra == 0)):
                m.d.comb += [
                    self.loads.payload.line.eq(line >> extra),
                    self.loads.payload.block.eq(line[:extra] if extra else 0),
                ]
        m.submodules.slope = slope = FactorDecoder()
        parameters = Signal(query_parameters(self.shape.queries))  # but for the slope, which is decoded
        m.d.sync += [
            parameters.valid.eq(0),
            parameters.number.eq(number),
            parameters.query.eq(query),
            parameters.position.eq(Mux(now.sight.tree, words[QueryLineKind.POSITIONS], position)),
            parameters.slot.eq(slot),
        ]
        m.d.comb += [
            slope.code.eq(words[QueryLineKind.SLOPES]),
            self.parameters.eq(parameters),
            self.parameters.slope.eq(slope.factor),
        ]
        job = self.jobs.payload
        names = {"form": "format", "scale": "scale", "block": "block", "pitch": "pitch"}
        stored = {"k": {name: job[f"k_{field}"] for name, field in names.items()}}
        stored["v"] = {
            name: Mux(job.latent, job[f"k_{field}"], job[f"v_{field}"]) for name, field in names.items()
        }
        # K and V must agree on the rows of a line: weights come as rows were scored
        same_pitch = stored["k"]["pitch"] == stored["v"]["pitch"]
        abreast = Mux(same_pitch & ~job.bounds, stored["k"]["pitch"], 0)
        with m.FSM():
            with m.State("job"):
                m.d.comb += self.jobs.ready.eq(~(opened & own).any())
                with m.If(self.jobs.valid & self.jobs.ready):
                    m.d.sync += [
                        now.tenant.eq(job.tenant),
                        *(
                            statement
                            for rows, dim, row_dim in (
                                ("k", job.head_dim, job.head_dim),
                                ("v", job.value_dim, Mux(job.latent, job.head_dim, job.value_dim)),
                            )
                            for statement in set_row_codes(
                                self.shape, now[rows], dim=dim, row_dim=row_dim, **stored[rows]
                            )
                        ),
                        now.k.abreast.eq(abreast),
                        now.v.abreast.eq(abreast),
                        now.query_kind.eq(code_kind(job.query_format)),
                        now.query_lines_last.eq((job.head_dim - 1) >> line_shift),
                        query_count_last.eq((job.head_dim - 1)[:line_shift] + 1),
                        now.queries.eq(job.queries),
                        now.value_dim.eq(job.value_dim),
                        sinks.eq(job.sinks),
                        listed.eq(job.sinks | job.slopes | job.causal | job.tree),
                        group.eq(job.group),
                        query_rows.eq(job.query_rows),
                        slot.eq(0),
                        mask_slot.eq(0),
                        mask_half.eq(row[0] & ~job.first),
                        now.sight.causal.eq(job.causal),
                        now.sight.window.eq(job.window),
                        now.sight.kept.eq(job.kept),
                        now.sight.tree.eq(job.tree),
                        now.sight.own_row.eq(job.own_row),
                        now.biased.eq(job.slopes),
                        now.latent.eq(job.latent),
                        now.bounds.some.eq(job.bounds),
                        now.bounds.first.eq(job.first),
                        now.bounds.last.eq(job.last),
                        codebook.eq(job.codebook),
                        code.eq(job.score_factor),
                        cap_code.eq(job.softcap),
                        now.capped.eq(job.softcap.any()),
                    ]
                    with m.If(job.first):
                        m.d.sync += [head.eq(0), row.eq(0), position.eq(job.position)]
                    m.next = "open"
            with m.State("open"):
                for index in range(PASSES):
                    with m.If(own[index]):
                        m.d.sync += self.passes[index].eq(now)
                m.d.comb += self.start.eq(own)
                m.d.sync += [opened.eq((opened & ~self.freed) | own), query.eq(0), line.eq(0)]
                m.next = "bank"
            with m.State("bank"):
                for index in range(PASSES):
                    with m.If(own[index]):
                        m.d.sync += [
                            self.passes[index].factor.eq(factor.factor),
                            self.passes[index].cap.eq(cap.factor),
                        ]
                with m.If(~bank_taken):
                    m.d.sync += asking.eq((asking & ~self.k_ended) | own)
                    m.next = "queries"
            with m.State("queries"):
                m.d.comb += [self.loads.valid.eq(self.queries.valid), self.queries.ready.eq(self.loads.ready)]
                with m.If(self.queries.valid & self.loads.ready):
                    m.d.sync += all_here.eq(self.queries.payload.last)
                    m.d.sync += line.eq(Mux(self.loads.payload.last, 0, line + 1))
                    with m.If(self.loads.payload.last):
                        m.d.sync += query.eq(query + 1)
                        with m.If(query + 1 == now.queries):
                            m.d.sync += query.eq(0)
                            m.next = "lists"
                            with m.If(codebook):
                                m.next = "codebook"
            with m.State("codebook"):
                m.d.comb += [
                    self.book.valid.eq(self.queries.valid),
                    self.queries.ready.eq(entry == BOOK_ENTRIES - 1),
                ]
                with m.If(self.queries.valid):
                    m.d.sync += entry.eq(entry + 1)
                    with m.If(self.queries.ready):
                        m.d.sync += all_here.eq(self.queries.payload.last)
                        m.next = "lists"
            with m.State("lists"):
                count = Mux(kind == QueryLineKind.POSITIONS, query_rows, group)
                last_word = list_word == count - 1
                last_mask_word = mask_word == (query_rows - 1) >> _LANE_SHIFT
                m.d.comb += [
                    lists.eq(~all_here),
                    self.queries.ready.eq(
                        lists
                        & Mux(is_masks, last_mask_word & mask_half, last_word | list_word[:_LIST_SHIFT].all())
                    ),
                ]
                with m.If(all_here):
                    m.next = "opening"
                    with m.If(listed):
                        m.next = "parameters"
                with m.Elif(self.queries.valid):
                    with m.If(self.queries.ready):
                        m.d.sync += all_here.eq(self.queries.payload.last)
                    with m.If(~is_masks):
                        m.d.sync += list_word.eq(Mux(last_word, 0, list_word + 1))
                    with m.Else():
                        m.d.sync += mask_word.eq(Mux(last_mask_word, 0, mask_word + 1))
                        with m.If(last_mask_word):
                            m.d.sync += mask_half.eq(~mask_half)
                            with m.If(mask_slot != self.shape.queries):
                                m.d.sync += mask_slot.eq(mask_slot + 1)
            with m.State("parameters"):
                next_row = head + 1 == group
                m.d.sync += [
                    parameters.valid.eq(1),
                    query.eq(query + 1),
                    head.eq(Mux(next_row, 0, head + 1)),
                    row.eq(row + next_row),
                    slot.eq(slot + next_row),
                    position.eq(position + next_row),
                ]
                for index in range(self.shape.queries):
                    with m.If(query == index):
                        sink = words[QueryLineKind.SINKS]
                        m.d.sync += values[index * FLOAT_BITS :][:FLOAT_BITS].eq(sink)
                with m.If(query + 1 == now.queries):
                    m.next = "written"
            with m.State("written"):
                m.next = "opening"
            with m.State("opening"):
                m.d.comb += self.openings.valid.eq(1)
                with m.If(self.openings.ready):
                    m.d.sync += [
                        loaded.eq((loaded & ~self.freed) | own),
                        number.eq(number + 1),
                        own.eq(own.rotate_left(1)),
                    ]
                    m.next = "job"
        return m
