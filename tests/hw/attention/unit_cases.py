"""Passes for the attention unit: what its streams carry, the memory behind it, and what must come out."""

from dataclasses import dataclass, field

from attention_golden import PartialGolden, bound, decode_all, float32_bits, partial, scaled
from nearkv_hw.abi.formats import (
    BF16,
    FP16,
    LUT4,
    LUT_SCALES,
    ROW_FORMATS,
    SCALE_BLOCKS,
    SCALE_CODES,
    SCALE_FORMATS,
    Format,
)
from nearkv_hw.abi.lines import LINE_BITS, LINE_BYTES
from nearkv_hw.interfaces import QueryLineKind


@dataclass(frozen=True)
class RowScales:
    """How the scales of rows are stored.

    Parameters
    ----------
    form : name of their format.
    block : elements that share one, or None for the whole row.
    """

    form: str
    block: int | None = None

    @property
    def format(self) -> Format:
        """Their format."""
        return SCALE_FORMATS[self.form]

    def count(self, dim):
        """Scales of a row."""
        return -(-dim // (self.block or dim))

    def pitch(self, dim):
        """Bytes from one row's scales to the next row's."""
        return 1 << (self.count(dim) * self.format.bits // 8 - 1).bit_length()  # two lines at most

    @property
    def fields(self):
        """Numbers of format and block in a unit's job."""
        return SCALE_CODES[self.form] + 1, SCALE_BLOCKS.index(self.block) + 1 if self.block else 0


@dataclass
class Pass:
    """What is expected of a pass."""

    value_dim: int
    lines: int
    partials: list[PartialGolden]
    status: int = 0
    page: int = 0


@dataclass
class Passes:
    """Items of the unit's streams, the memory's lines, and the expected partials.

    Parameters
    ----------
    line_lanes : 16-bit elements of a line.
    max_dim : largest head_dim and value_dim.
    """

    line_lanes: int
    max_dim: int
    memory: list = field(default_factory=list)
    faults: dict = field(default_factory=dict)
    jobs: list = field(default_factory=list)
    queries: list = field(default_factory=list)
    pages: list = field(default_factory=list)
    expected: list = field(default_factory=list)
    bounds: list = field(default_factory=list)

    def add(
        self,
        q,
        rows,
        values,
        *,
        value_dim,
        q_format=BF16,
        k_format=BF16,
        v_format=BF16,
        k_scales=None,
        v_scales=None,
        k_pitch=0,
        v_pitch=0,
        factor_bits=0x3F800000,
        cap_bits=0,
        sinks=None,
        slopes=None,
        group=None,
        position=0,
        sight=None,
        tree=None,
        page_rows=16,
        first_row=0,
        golden=True,
        scale_codes=None,
        books=None,
        latent=False,
        rng=None,
    ):
        """Add a pass.

        Parameters
        ----------
        q : element codes of every query.
        rows, values : element codes of every K and V row.
        k_scales, v_scales : `RowScales`, or None where rows have none.
        k_pitch, v_pitch : log2 of the rows that share a line.
        scale_codes : scales of every row by "k" and "v"; random ones from `rng` if not given.
        cap_bits : float32 bits of a softcap's C2, zero for none.
        slopes : float32 bits of a bias per query head, or None.
        group : query heads of a query row; all queries are of one row if not given.
        position : of the first query row.
        sight : causal, window and kept rows; all rows are seen if not given.
        tree : positions of the job's query rows, whose own rows are the last ones, masks of the pass's (bit i
            for the job's query row i), and the pass's first query row; `position` has no meaning then.
        books : fp16 codes that codes of lut4 stand for, K's 16 and V's, or None.
        latent : V is the first elements of the K rows; `values` and what is said of V are not looked at.
        sinks : float32 bits per query, or None.
        page_rows : rows of a page.
        first_row : rows of the first page that come before the first one.
        golden : compute what is expected; without it only lines and statuses are.
        """
        head_dim, group = len(q[0]), group or len(q)
        if latent:
            values, v_format, v_scales, v_pitch = [], BF16, None, 0
        self.jobs.append(
            {
                "tenant": 1,
                "queries": len(q),
                "head_dim": head_dim,
                "value_dim": value_dim,
                "k_format": k_format.code,
                "v_format": v_format.code,
                "query_format": q_format.code,
                "score_factor": factor_bits,
                "softcap": cap_bits,
                "k_pitch": k_pitch,
                "v_pitch": v_pitch,
                "sinks": int(sinks is not None),
                "slopes": int(slopes is not None),
                "codebook": int(books is not None),
                "latent": int(latent),
                "first": 1,
                "tree": int(tree is not None),
                "group": group,
                "position": position,
                **(sight or {}),
            }
        )
        areas = {"k": (rows, k_format, k_scales, head_dim), "v": (values, v_format, v_scales, value_dim)}
        pitches = {"k": k_pitch, "v": v_pitch}
        if latent:
            del areas["v"]
        scales = dict(scale_codes or {})
        for kind, (stored, _, how, dim) in areas.items():
            if how:
                self.jobs[-1][f"{kind}_scale"], self.jobs[-1][f"{kind}_block"] = how.fields
                if kind not in scales:
                    scales[kind] = [codes(rng, how.format, how.count(dim), "scale") for _ in stored]
        query_lines = [
            {"data": line, "kind": QueryLineKind.QUERY.value, "last": 0}
            for query in q
            for line in self._lines(query, q_format)
        ]
        if books:
            data = sum(code << 16 * n for n, code in enumerate([*books[0], *books[1]]))
            query_lines.append({"data": data, "kind": QueryLineKind.CODEBOOK.value, "last": 0})
        positions = masks = None
        if tree:
            positions, masks = tree
            self.jobs[-1] |= {"query_rows": len(positions), "own_row": 0}  # the row is known below
        for kind, listed in (
            (QueryLineKind.SLOPES, slopes),
            (QueryLineKind.POSITIONS, positions),
            (QueryLineKind.MASKS, masks and [m >> 32 * n & 0xFFFFFFFF for m in masks for n in range(8)]),
            (QueryLineKind.SINKS, sinks),
        ):
            for begin in range(0, len(listed or []), 16):
                data = sum(bits << 32 * n for n, bits in enumerate(listed[begin : begin + 16]))
                query_lines.append({"data": data, "kind": kind.value, "last": 0})
        query_lines[-1]["last"] = 1
        self.queries += query_lines

        start = len(self.memory)
        first_row = first_row % page_rows if rows else 0
        own_row = first_row + len(rows) - len(positions or [])
        if tree:
            self.jobs[-1]["own_row"] = own_row
        for page, first in enumerate(range(-first_row, len(rows), page_rows)):
            there = slice(max(first, 0), first + page_rows)
            item = {
                "last": 0,
                "page": page,
                "row": there.start - first,
                "rows": len(rows[there]),
                "index": first_row + there.start,
            }
            for kind, (stored, form, how, dim) in areas.items():
                item[f"{kind}_line"] = len(self.memory)
                self.memory += self._area(stored[there], form, pitches[kind], item["row"])
                if how:
                    item[f"{kind}_scales"] = len(self.memory)
                    own = item["row"] % max(LINE_BYTES // how.pitch(dim), 1)
                    self.memory += _scale_lines(scales[kind][there], how, dim, own)
            item["row"] %= LINE_BYTES
            self.pages.append(item)
        self.pages.append({"last": 1})
        decoded = {}
        for kind, (stored, form, how, _) in areas.items():
            book = books["kv".index(kind)] if books else None
            decoded[kind] = [
                decode_row(row, form, book, scales[kind][n] if how else None, how)
                for n, row in enumerate(stored)
            ]
        k = decoded["k"]
        v = [row[:value_dim] for row in k] if latent else decoded["v"]
        partials = [
            partial(
                decode_all(query, q_format),
                k,
                v,
                factor_bits=factor_bits,
                value_dim=value_dim,
                sink=None if sinks is None else sinks[index % group],
                slope_bits=0 if slopes is None else slopes[index % group],
                distances=_distances(
                    first_row, len(rows), position + index // group, sight, own_row, tree, index // group
                ),
                cap_bits=cap_bits,
            )
            for index, query in enumerate(q if golden else [])
        ]
        self.expected.append(Pass(value_dim, len(self.memory) - start, partials))

    def add_bounds(self, q, pages, *, q_format=BF16, form=BF16, factor_bits=0x3F800000, first=1, last=1):
        """Add a pass of bounds.

        Parameters
        ----------
        q : element codes of every query.
        pages : of every page the codes of its least and of its largest elements.
        form : of these, bf16 or fp16.
        first, last : whether it is the first, and the last one, of its job.
        """
        self.jobs.append(
            {
                "tenant": 1,
                "queries": len(q),
                "head_dim": len(q[0]),
                "value_dim": 1,
                "k_format": form.code,
                "v_format": BF16.code,
                "query_format": q_format.code,
                "score_factor": factor_bits,
                "group": len(q),
                "first": first,
                "last": last,
                "bounds": 1,
            }
        )
        lines = [
            {"data": line, "kind": QueryLineKind.QUERY.value, "last": 0}
            for query in q
            for line in self._lines(query, q_format)
        ]
        lines[-1]["last"] = 1
        self.queries += lines
        start = len(self.memory)
        for number, rows in enumerate(pages):
            item = {"last": 0, "page": 3 * number, "row": 0, "rows": 2, "index": number}
            item["k_line"] = len(self.memory)
            self.memory += [line for row in rows for line in self._lines(row, form)]
            self.pages.append(item)
            least, largest = (decode_all(row, form) for row in rows)
            value = max(bound(query, q_format, least, largest, factor_bits) for query in q)
            self.bounds.append({"value": value, "candidate": number, "first": first, "last": last})
        self.pages.append({"last": 1})
        self.expected.append(Pass(1, len(self.memory) - start, []))

    def _area(self, rows, form, pitch, first):
        """Lines of rows, the first of which is the page's row `first`."""
        if not pitch:
            return [line for row in rows for line in self._lines(row, form)]
        size, shared = 16 * self.line_lanes >> pitch, 1 << pitch
        bits = 0
        for place, row in enumerate(rows, start=first % shared):
            part = [*row, *[(1 << form.bits) - 1] * (size // form.bits - len(row))]  # padding: NaN
            bits |= sum(code << form.bits * n for n, code in enumerate(part)) << place * size
        count = -(-(first % shared + len(rows)) // shared)
        return [bits >> 16 * self.line_lanes * n & (1 << 16 * self.line_lanes) - 1 for n in range(count)]

    def _lines(self, codes, form):
        lines = []
        per_line = 16 * self.line_lanes // form.bits
        for first in range(0, len(codes), per_line):
            part = codes[first : first + per_line]
            part = [*part, *[(1 << form.bits) - 1] * (LINE_BITS // form.bits - len(part))]  # padding: NaN
            lines.append(sum(code << form.bits * n for n, code in enumerate(part)))
        return lines


def _distances(first_row, rows, position, sight, own_row, tree, query_row):
    """How far each row is from a query row, None where it is not seen."""
    distances = []
    for row in range(first_row, first_row + rows):
        at, seen = row, True
        if tree:
            positions, masks = tree
            position = positions[query_row]
            if row >= own_row:
                at = positions[row - own_row]
                seen = bool(masks[query_row] >> row - own_row & 1)
        distance = at - position
        if sight:
            seen = seen and not (sight["causal"] and distance > 0)
            if sight["window"] and distance <= -sight["window"] and row >= sight["kept"]:
                seen = False
        distances.append(distance if seen else None)
    return distances


def _scale_lines(scales, how, dim, first):
    """Lines of the scales of rows, the first of which is the line's row `first`."""
    pitch = 8 * how.pitch(dim)
    bits = sum(
        code << pitch * (first + row) + how.format.bits * n
        for row, own in enumerate(scales)
        for n, code in enumerate(own)
    )
    count = -(-(first + len(scales)) * pitch // LINE_BITS)
    return [bits >> LINE_BITS * n & (1 << LINE_BITS) - 1 for n in range(count)]


def decode_row(row, form, book, scales, how):
    """Decode a row, with its codebook and its scales if it has any."""
    elements = [FP16.decode(book[code]) for code in row] if form is LUT4 else decode_all(row, form)
    if how is None:
        return elements
    decoded = decode_all(scales, how.format)
    return [scaled(element, decoded[n // (how.block or len(row))]) for n, element in enumerate(elements)]


def codes(rng, format, count, kind="plain"):
    """Random element codes.

    kind : "plain" (values about one, some zero), "wide" (any magnitude), "any" (any code, few specials), or
        "special" (many NaN, infinities, zeros), or "scale" (values about one, some specials). Formats of
        fewer bits have codes of any kind.
    """
    result = []
    for _ in range(count):
        code = rng.getrandbits(format.bits)
        if format.bits < 16:
            while (
                not format.codebook
                and format.decode(code).special
                and rng.random() < (0.9 if kind == "special" else 0.995)
            ):
                code = rng.getrandbits(format.bits)
            if format.name == "e8m0" and kind == "scale" and rng.random() < 0.9:
                code = rng.randrange(110, 140)
            result.append(code)
            continue
        if kind == "scale":
            kind = "plain"
        if kind == "plain":
            middle = (1 << format.exponent_bits - 1) - 1
            field_ = rng.randrange(middle - 6, middle + 3)
            code = code & (0x8000 | (1 << format.fraction_bits) - 1) | field_ << format.fraction_bits
            code = code if rng.random() < 0.95 else code & 0x8000
        elif format.decode(code).special and (kind == "wide" or rng.random() < 0.9):
            code &= 0x8FFF
        if kind == "special" and rng.random() < 0.05:
            infinity = ((1 << format.exponent_bits) - 1) << format.fraction_bits
            code = rng.choice([infinity, infinity | 0x8000, infinity | 1, 0, 0x8000])
        result.append(code)
    return result


def random_bounds(passes, rng, queries, pages=None):
    """Add a random pass of bounds for at most `queries` queries."""
    lanes = passes.line_lanes
    dim = min(passes.max_dim, rng.choice([1, lanes - 1, lanes, lanes + 1, rng.randint(1, 4 * lanes)]))
    kind, q_format, form = (
        rng.choice(of) for of in (["plain", "wide", "any", "special"], [BF16, FP16], [BF16, FP16])
    )
    factor = float32_bits(rng.uniform(-1, 1) * rng.choice([1, 0.1, 10, 0]))
    pages = rng.choice([0, 1, 3, rng.randrange(40)]) if pages is None else pages
    passes.add_bounds(
        [codes(rng, q_format, dim, kind) for _ in range(rng.randint(1, queries))],
        [[codes(rng, form, dim, kind) for _ in range(2)] for _ in range(pages)],
        q_format=q_format,
        form=form,
        factor_bits=factor,
        first=rng.getrandbits(1),
        last=rng.getrandbits(1),
    )


def random_pass(passes, rng, queries):
    """Add a random pass of at most `queries` query heads."""
    lanes, largest = passes.line_lanes, passes.max_dim

    def dim():
        sizes = [1, 2, lanes // 2, lanes - 1, lanes, lanes + 1, 2 * lanes, rng.randint(1, 4 * lanes)]
        return min(largest, rng.choice(sizes))

    def pitch(form, dim):
        """As layouts have it, but sometimes rows that could share a line have lines of their own."""
        least = (16 * lanes // form.bits).bit_length() - 1 - (dim - 1).bit_length()
        return max(min(least, 2), 0) if rng.random() < 0.8 else 0

    head_dim, value_dim = dim(), dim()
    if rng.random() < 0.1:
        head_dim, value_dim = rng.choice([(largest, largest), (largest - 6, 3), (3, largest - 6)])
    rows = rng.choice([0, 1, 2, 5, rng.randrange(40), rng.randrange(90)])
    if head_dim + value_dim > 100:
        rows = min(rows, 20)
    kind = rng.choice(["plain", "plain", "wide", "any", "special"])
    q_format = rng.choice([BF16, FP16])
    latent = value_dim <= head_dim and rng.random() < 0.3
    k_format, v_format = (rng.choice([BF16, FP16, *ROW_FORMATS.values()]) for _ in range(2))
    if rng.random() < 0.3:  # rows that lie alike, and short ones that share lines
        v_format = k_format
        head_dim, value_dim = (rng.randint(1, 16 * lanes // k_format.bits // 2) for _ in range(2))
        head_dim, value_dim = min(head_dim, largest), min(value_dim, largest)
        latent = value_dim <= head_dim and rng.random() < 0.3
    k_scales, v_scales = (
        RowScales(
            rng.choice(LUT_SCALES if form is LUT4 else list(SCALE_FORMATS)), rng.choice([None, *SCALE_BLOCKS])
        )
        if form.bits <= 8 and rng.random() < 0.8
        else None
        for form in (k_format, v_format)
    )
    factor = float32_bits(rng.uniform(-1, 1) * rng.choice([1, 0.1, 10, 0]))
    if kind == "any":
        factor = factor & 0x807FFFFF | rng.randrange(60, 130) << 23
    count = rng.randint(1, queries)
    special_sinks = [0xFF800000, 0x7F800000, 0x7FC00001, 0, 1 << 31]
    sinks = [
        rng.choice([float32_bits(rng.uniform(-20, 20)), rng.getrandbits(32), rng.choice(special_sinks)])
        for _ in range(count)
    ]
    group = rng.randint(1, count)
    sight = None
    if rng.random() < 0.5:
        sight = {
            "causal": rng.getrandbits(1),
            "window": rng.choice([0, rng.randint(1, 50)]),
            "kept": rng.choice([0, rng.randint(1, 9)]),
        }
        sight["causal"] |= sight["window"] > 0
    tree, query_rows = None, -(-count // group)
    if query_rows <= rows and rng.random() < 0.4:
        job_rows = rng.choice([query_rows, rng.randint(query_rows, rows)])
        positions = [rng.choice([rng.randrange(100), rng.randrange(1 << 23)]) for _ in range(job_rows)]
        tree = positions, [rng.getrandbits(256) for _ in range(query_rows)]
    passes.add(
        [codes(rng, q_format, head_dim, kind) for _ in range(count)],
        [codes(rng, k_format, head_dim, kind) for _ in range(rows)],
        [codes(rng, v_format, value_dim, kind) for _ in range(rows)],
        value_dim=value_dim,
        q_format=q_format,
        k_format=k_format,
        v_format=v_format,
        k_scales=k_scales,
        v_scales=v_scales,
        k_pitch=pitch(k_format, head_dim),
        v_pitch=pitch(v_format, value_dim),
        factor_bits=factor,
        cap_bits=float32_bits(rng.uniform(0.5, 90)) if rng.random() < 0.3 else 0,
        sinks=sinks[:group] if rng.random() < 0.4 else None,
        slopes=[float32_bits(rng.uniform(-1, 1)) for _ in range(group)] if rng.random() < 0.3 else None,
        group=group,
        position=rng.randint(-3, 60),
        sight=sight,
        tree=tree,
        latent=latent,
        books=[codes(rng, FP16, 16, kind) for _ in range(2)]
        if LUT4 in (k_format, BF16 if latent else v_format)
        else None,
        page_rows=rng.choice([4, 8, 16, 64]),
        first_row=rng.choice([0, 0, rng.randrange(64)]),
        rng=rng,
    )
