"""Passes for the attention unit: what its streams carry, the memory behind it, and what must come out."""

from dataclasses import dataclass, field

from attention_golden import PartialGolden, decode_all, float32_bits, partial
from nearkv_hw.abi.formats import BF16, FP16
from nearkv_hw.abi.lines import LINE_BITS

PAD = 0xFFFF
"""Element code of padding: NaN in both formats."""


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
    lanes : elements of a line.
    max_dim : largest head_dim and value_dim.
    """

    lanes: int
    max_dim: int
    memory: list = field(default_factory=list)
    faults: dict = field(default_factory=dict)
    jobs: list = field(default_factory=list)
    queries: list = field(default_factory=list)
    pages: list = field(default_factory=list)
    expected: list = field(default_factory=list)

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
        factor_bits=0x3F800000,
        sinks=None,
        page_rows=16,
        golden=True,
    ):
        """Add a pass.

        Parameters
        ----------
        q : element codes of every query.
        rows, values : element codes of every K and V row.
        sinks : float32 bits per query, or None.
        page_rows : rows of a page.
        golden : compute what is expected; without it only lines and statuses are.
        """
        head_dim = len(q[0])
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
                "sinks": int(sinks is not None),
            }
        )
        query_lines = [{"data": line, "sink": 0, "last": 0} for query in q for line in self._lines(query)]
        if sinks is not None:
            data = sum(sink << 32 * index for index, sink in enumerate(sinks))
            query_lines.append({"data": data, "sink": 1, "last": 0})
        query_lines[-1]["last"] = 1
        self.queries += query_lines

        start = len(self.memory)
        for page, first in enumerate(range(0, len(rows), page_rows)):
            there = slice(first, first + page_rows)
            item = {"last": 0, "page": page, "k_line": len(self.memory), "rows": len(rows[there])}
            self.memory += [line for row in rows[there] for line in self._lines(row)]
            item["v_line"] = len(self.memory)
            self.memory += [line for row in values[there] for line in self._lines(row)]
            self.pages.append(item)
        self.pages.append({"last": 1})
        k = decode_all_rows(rows, k_format)
        v = decode_all_rows(values, v_format)
        partials = [
            partial(
                decode_all(query, q_format),
                k,
                v,
                factor_bits=factor_bits,
                value_dim=value_dim,
                sink=None if sinks is None else sinks[index],
            )
            for index, query in enumerate(q if golden else [])
        ]
        self.expected.append(Pass(value_dim, len(self.memory) - start, partials))

    def _lines(self, codes):
        lines = []
        for first in range(0, len(codes), self.lanes):
            part = codes[first : first + self.lanes]
            part = [*part, *[PAD] * (LINE_BITS // 16 - len(part))]
            lines.append(sum(code << 16 * lane for lane, code in enumerate(part)))
        return lines


def decode_all_rows(rows, format):
    """Decode every row."""
    return [decode_all(row, format) for row in rows]


def codes(rng, format, count, kind="plain"):
    """Random element codes.

    kind : "plain" (values about one, some zero), "wide" (any magnitude), "any" (any code, few specials), or
        "special" (many NaN, infinities, zeros).
    """
    result = []
    for _ in range(count):
        code = rng.getrandbits(16)
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


def random_pass(passes, rng, queries):
    """Add a random pass of at most `queries` query heads."""
    lanes, largest = passes.lanes, passes.max_dim

    def dim():
        return min(
            largest, rng.choice([1, 2, lanes - 1, lanes, lanes + 1, 2 * lanes, rng.randint(1, 4 * lanes)])
        )

    head_dim, value_dim = dim(), dim()
    if rng.random() < 0.1:
        head_dim, value_dim = rng.choice([(largest, largest), (largest - 6, 3), (3, largest - 6)])
    rows = rng.choice([0, 1, 2, 5, rng.randrange(40), rng.randrange(90)])
    if head_dim + value_dim > 100:
        rows = min(rows, 20)
    kind = rng.choice(["plain", "plain", "wide", "any", "special"])
    k_format, v_format, q_format = (rng.choice([BF16, FP16]) for _ in range(3))
    factor = float32_bits(rng.uniform(-1, 1) * rng.choice([1, 0.1, 10, 0]))
    if kind == "any":
        factor = factor & 0x807FFFFF | rng.randrange(60, 130) << 23
    count = rng.randint(1, queries)
    special_sinks = [0xFF800000, 0x7F800000, 0x7FC00001, 0, 1 << 31]
    sinks = [
        rng.choice([float32_bits(rng.uniform(-20, 20)), rng.getrandbits(32), rng.choice(special_sinks)])
        for _ in range(count)
    ]
    passes.add(
        [codes(rng, q_format, head_dim, kind) for _ in range(count)],
        [codes(rng, k_format, head_dim, kind) for _ in range(rows)],
        [codes(rng, v_format, value_dim, kind) for _ in range(rows)],
        value_dim=value_dim,
        q_format=q_format,
        k_format=k_format,
        v_format=v_format,
        factor_bits=factor,
        sinks=sinks if rng.random() < 0.4 else None,
        page_rows=rng.choice([4, 8, 16, 64]),
    )
