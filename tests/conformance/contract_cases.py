"""Cases for everything that implements the numerics contract: the contract's vectors, and random ones.

A case is the arguments of one `nearkv.reference.decode_attention` call, as tensors of codes or values.
"""

import json
import math
import os
import random
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import oracle
import torch
from nearkv_hw.abi.formats import (
    ELEMENT_FORMATS,
    FP16,
    LUT_ENTRIES,
    LUT_SCALES,
    QUERY_FORMATS,
    ROW_FORMATS,
    SCALE_BLOCKS,
    SCALE_FORMATS,
)

VECTORS = Path(__file__).parent / "data" / "contract.json"
VALUE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEED_VARIABLE = "NEARKV_TEST_SEED"


@dataclass
class Case:
    """The arguments of a call; `options` are keywords that shape the partial, `v_scale` only the result.

    Without `v`, V is the first `value_dim` elements of the K row.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    options: dict
    v_scale: torch.Tensor | None = None
    name: str = ""

    @property
    def lanes(self):
        """Elements of a V row."""
        return self.options["value_dim"] if self.v is None else self.v.shape[3]

    def to(self, device):
        """The same case on another device."""

        def move(x):
            return x.to(device) if isinstance(x, torch.Tensor) else x

        options = {name: move(option) for name, option in self.options.items()}
        return Case(move(self.q), move(self.k), move(self.v), options, move(self.v_scale), self.name)

    def partial(self):
        """The reference's partial result."""
        from nearkv.reference import decode_attention

        return decode_attention(self.q, self.k, self.v, partial=True, **self.options)

    def positions(self):
        """Positions of query rows [batch, query_rows] and of rows [batch, rows] with the case's distances."""
        batch, rows = self.k.shape[:2]
        tree = self.options.get("tree") is not None
        query_rows = self.q.shape[1] if self.q.dim() == 4 else 1
        query, held = (self.options.get(name) for name in ("query_positions", "row_positions"))
        shift = query_rows if query is None else 0  # of several query rows the first may stand before row 0
        query = torch.arange(rows, rows + query_rows) if query is None else query
        held = torch.arange(shift, rows + shift) if held is None else held
        query = query.view(query.numel() // query_rows, query_rows).expand(batch, -1)
        held = held.expand(batch, rows)
        return query, torch.cat([held[:, : rows - query_rows], query], dim=1) if tree else held

    def sees(self):
        """What each query row sees, bool [batch, kv_heads, query_rows, rows], worked out row by row."""
        batch, rows, kv_heads, _ = self.k.shape
        query, held = self.positions()
        given = {
            name: self.options[name] for name in ("causal", "window", "kept_rows") if name in self.options
        }
        seen = torch.tensor(
            [[oracle.sees(p, held[b].tolist(), **given) for p in query[b].tolist()] for b in range(batch)],
            dtype=torch.bool,
        ).reshape(batch, 1, query.shape[1], rows)
        visible, tree = self.options.get("visible"), self.options.get("tree")
        if visible is not None:
            seen = seen & (visible if visible.dim() == 3 else visible.unsqueeze(1)).unsqueeze(1)
        if tree is not None:
            seen[..., rows - query.shape[1] :] &= tree if tree.dim() == 2 else tree.unsqueeze(1)
        if "ranges" in self.options:
            inside = [
                [any(b <= r < e for b, e in own) for r in range(rows)] for own in self.options["ranges"]
            ]
            seen = seen & torch.tensor(inside, dtype=torch.bool).reshape(batch, 1, 1, rows)
        seen = seen.expand(batch, kv_heads, -1, rows)
        if "pages" in self.options:
            pages = self.options["pages"].repeat_interleave(self.options["page_rows"], dim=2)[:, :, :rows]
            seen = seen & pages.unsqueeze(2)
        return seen

    def describe(self):
        """One line for a report of a failure."""
        v = None if self.v is None else tuple(self.v.shape)
        shapes = f"q {tuple(self.q.shape)} {self.q.dtype} k {tuple(self.k.shape)} v {v}"
        options = {n: tuple(x.shape) if isinstance(x, torch.Tensor) else x for n, x in self.options.items()}
        return f"{self.name} {shapes} {options} v_scale {self.v_scale}"


@dataclass
class Vector:
    """One of the contract's vectors: a case of one query, and what must come out."""

    case: Case
    denominator: list
    numerators: list
    query_nan: bool
    outputs: dict


@dataclass
class Sizes:
    """The largest sizes that a random case may have."""

    batch: int = 2
    query_rows: int = 2
    kv_heads: int = 2
    group: int = 3
    rows: int = 9
    dim: int = 20
    dims: tuple = field(default=())
    """When given, head and value dims are among these."""


def seed_of_run():
    """A fresh seed, or the one that the environment asks for; printed, so that a failure can be repeated."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    print(f"{SEED_VARIABLE}={seed}")
    return seed


def code_tensor(codes, form):
    """Codes as the tensor that the format is stored in."""
    storage = torch.int16 if form.bits == 16 else torch.uint8
    return torch.tensor(codes, dtype=torch.int64).to(storage)


def result_codes(tensor):
    """The bits of a finished result as Python integers, in one flat list."""
    bits = tensor.element_size() * 8
    storage = torch.int32 if bits == 32 else torch.int16
    return [code % (1 << bits) for code in tensor.contiguous().view(storage).flatten().tolist()]


def vectors():
    """The contract's vectors."""
    return [_vector(entry) for entry in json.loads(VECTORS.read_text())]


def _vector(entry):
    rows, value_dim = len(entry["k"]), len(entry["v"][0]) if entry["v"] else 1
    k_form, v_form = ELEMENT_FORMATS[entry["k_format"]], ELEMENT_FORMATS[entry["v_format"]]
    q = code_tensor(entry["q"], QUERY_FORMATS[entry["q_format"]]).view(VALUE_TYPES[entry["q_format"]])
    options = {"scale": entry["scale"], "k_format": k_form.name, "v_format": v_form.name}
    for name in ("k_scales", "v_scales"):
        if entry[name] is not None:
            codes = code_tensor(entry[name], SCALE_FORMATS[entry["scale_format"]])
            options |= {name: codes.reshape(1, rows, 1, -1), "scale_format": entry["scale_format"]}
            options["scale_block"] = entry["block"]
    if entry["visible"] is not None:
        options["visible"] = torch.tensor([entry["visible"]], dtype=torch.bool)
    if entry["sink"] is not None:
        options["sinks"] = torch.tensor([float(entry["sink"])])
    case = Case(
        q.reshape(1, 1, -1),
        code_tensor(entry["k"], k_form).reshape(1, rows, 1, q.numel()),
        code_tensor(entry["v"], v_form).reshape(1, rows, 1, value_dim),
        options,
        None if entry["out_scale"] is None else torch.tensor([entry["out_scale"]]),
        entry["name"],
    )
    return Vector(case, entry["denominator"], entry["numerators"], entry["query_nan"], entry["out"])


REGIMES = ("near one", "window", "anything", "tiny", "huge", "few values")
"""Where the exponents of a tensor's floating codes lie."""


def random_codes(form, shape, regime, generator):
    """Random codes of numbers of a format; no NaN and no infinity."""

    def draw(low, high):
        return torch.randint(low, high, shape, generator=generator)

    if form.integer or form.bits < 16:
        codes = draw(0, 1 << form.bits)
        if regime == "few values":
            codes = codes & (1 << form.bits - 1 | 1)
        if form.codebook:
            return codes.to(torch.uint8)
        return codes.masked_fill(torch.isin(codes, special_codes(form)), 0).to(torch.uint8)
    top = (1 << form.exponent_bits) - 1  # infinities and NaN start here
    middle = top // 2
    low, high = {
        "near one": (middle - 3, middle + 3),
        "window": (middle // 2, middle // 2 + 12),
        "anything": (0, top),
        "tiny": (0, 2),
        "huge": (top - 3, top),
        "few values": (middle, middle + 1),
    }[regime]
    fraction = draw(0, 1 << form.fraction_bits)
    if regime == "few values":
        fraction = fraction & (1 << form.fraction_bits - 1)
    codes = draw(0, 2) << (form.bits - 1) | draw(low, min(high, top)) << form.fraction_bits | fraction
    # Some exact zeros of both signs, which no exponent field alone gives often enough.
    codes = torch.where(draw(0, 16) == 0, codes & (1 << form.bits - 1), codes)
    return codes.to(torch.int16)


@lru_cache
def special_codes(form):
    """The codes of a format that are NaN or infinite."""
    if form.codebook:
        return torch.tensor([])
    return torch.tensor([code for code in range(1 << form.bits) if form.decode(code).special is not None])


def sprinkle(codes, form, chance, generator):
    """Put NaN and infinities of a format, where it has any, into some places of a tensor of codes."""
    kinds = special_codes(form)
    if not chance or not len(kinds):
        return codes
    pick = kinds[torch.randint(0, len(kinds), codes.shape, generator=generator)]
    hit = torch.rand(codes.shape, generator=generator) < chance
    return torch.where(hit, pick, codes.to(torch.int64)).to(codes.dtype)


def random_case(rng, largest=None):
    """A random case: any format, scale, special, mask, sink and shape that the contract knows.

    `rng` is a `random.Random`; Hypothesis's own works too and then shrinks shapes and choices.
    """
    largest = largest or Sizes()
    batch, kv_heads, group = (rng.randint(1, n) for n in (largest.batch, largest.kv_heads, largest.group))
    rows, query_rows = rng.randint(0, largest.rows), rng.randint(1, largest.query_rows)
    head_dim, value_dim = (
        rng.choice(largest.dims) if largest.dims else rng.randint(1, largest.dim) for _ in range(2)
    )
    q_form = QUERY_FORMATS[rng.choice(sorted(QUERY_FORMATS))]
    k_form, v_form = (ROW_FORMATS[rng.choice(sorted(ROW_FORMATS))] for _ in range(2))
    regimes = [rng.choice(REGIMES) for _ in range(3)]
    specials = rng.choice((0, 0, 0.002, 0.05))
    generator = torch.Generator().manual_seed(rng.getrandbits(32))

    def codes(form, shape, regime):
        return sprinkle(random_codes(form, shape, regime, generator), form, specials, generator)

    shape = (batch, query_rows, kv_heads * group, head_dim)
    if query_rows == 1 and rng.random() < 0.5:
        shape = (batch, kv_heads * group, head_dim)
    q = codes(q_form, shape, regimes[0]).view(VALUE_TYPES[q_form.name])
    k = codes(k_form, (batch, rows, kv_heads, head_dim), regimes[1])
    v = codes(v_form, (batch, rows, kv_heads, value_dim), regimes[2])
    if rows > 1 and rng.random() < 0.2:
        v[:, rows // 2 :] = (v ^ code_tensor(1 << v_form.bits - 1, v_form)).flip(1)[:, rows // 2 :]
        k[:, rows // 2 :] = k.flip(1)[:, rows // 2 :]
    options = {
        "scale": rng.choice((head_dim**-0.5, 0.125, 1.0, -0.3, 0.0, 1e-42, 1e-20, 2e38, -7e20)),
        "k_format": k_form.name,
        "v_format": v_form.name,
    }
    latent = rng.random() < 0.15
    if latent:
        v, options["v_format"], options["value_dim"] = None, None, rng.randint(1, head_dim)
    both = [], []
    for name, form, dim in (("k", k_form, head_dim), ("v", v_form, value_dim)):
        if latent and name == "v":
            continue
        if form.codebook:
            options[f"{name}_lut"] = codes(FP16, (kv_heads, LUT_ENTRIES), rng.choice(REGIMES))
        block = rng.choice((*SCALE_BLOCKS, None))
        scale_format = rng.choice(sorted(LUT_SCALES if form.codebook else SCALE_FORMATS))
        both[0].append(block)
        both[1].append(scale_format)
        if form.bits <= 8 and rng.random() < 0.6:
            regime, blocks = rng.choice(REGIMES), -(-dim // (block or dim))
            options[f"{name}_scales"] = codes(
                SCALE_FORMATS[scale_format], (batch, rows, kv_heads, blocks), regime
            )
    if "k_scales" in options or "v_scales" in options:
        options["scale_block"], options["scale_format"] = ((x[0], x[-1]) for x in both)
    if rng.random() < 0.3:
        options["k_scale"] = torch.tensor([rng.uniform(-2, 2) for _ in range(kv_heads)])
        options["scale"] = max(min(options["scale"], 1e30), -1e30)
    if rng.random() < 0.4:
        choices = (0.0, -0.0, 1.5, -20.0, 1e30, -1e30, 1e-40) + (
            (torch.inf, -torch.inf, torch.nan) if specials else ()
        )
        options["sinks"] = torch.tensor([rng.choice(choices) for _ in range(kv_heads * group)])
    if rng.random() < 0.5:
        masks = (batch, rows) if rng.random() < 0.5 else (batch, query_rows, rows)
        options["visible"] = torch.rand(masks, generator=generator) < rng.choice((0.0, 0.5, 0.9))
    if rng.random() < 0.3:
        options["softcap"] = rng.choice((0.02, 5.0, 50.0, 100.0, 700.0, 1e-20))
        options["scale"] = max(min(options["scale"], 1e15), -1e15)
    if rng.random() < 0.3:
        options["alibi_slopes"] = torch.tensor(
            [rng.choice((0.0, -0.0, 0.5, -0.25, 2.0**-8, 1e-5, 1e30, 1e-40)) for _ in range(kv_heads * group)]
        )
    options |= random_visibility(rng, shape, rows, kv_heads, generator)
    v_scale = None
    if rng.random() < 0.4:
        choices = (1.0, 0.0173, -3.0, 0.0, 1e-40, 1e30, torch.inf, -torch.inf, torch.nan)
        v_scale = torch.tensor([rng.choice(choices) for _ in range(kv_heads)])
    return Case(q, k, v, options, v_scale, f"{'/'.join(regimes)} specials {specials}")


def random_visibility(rng, shape, rows, kv_heads, generator):
    """What may be said of visibility, positions included, for a q of a shape."""
    batch, query_rows = shape[0], shape[1] if len(shape) == 4 else 1
    options = random_positions(rng, shape, rows) if rng.random() < 0.3 else {}
    if rng.random() < 0.3:
        options["causal"] = True
    if rng.random() < 0.3:
        options["window"] = rng.choice((1, 2, rng.randint(1, rows + 2), 1 << 22))
        if rng.random() < 0.5:
            options["kept_rows"] = rng.randint(0, rows + 1)
    if rng.random() < 0.2:
        bounds = [
            [sorted(rng.randint(0, rows) for _ in range(2)) for _ in range(rng.randint(0, 3))]
            for _ in range(batch)
        ]
        options["ranges"] = [[tuple(pair) for pair in own] for own in bounds]
    if rng.random() < 0.2 and query_rows <= rows and "row_positions" not in options:
        size = (batch, query_rows, query_rows) if rng.random() < 0.5 else (query_rows, query_rows)
        options["tree"] = torch.rand(size, generator=generator) < 0.6
    if rng.random() < 0.2:
        options["page_rows"] = rng.choice((1, 2, 3, 4, rows + 1))
        pages = -(-rows // options["page_rows"])
        options["pages"] = torch.rand(batch, kv_heads, pages, generator=generator) < 0.6
    return options


def random_positions(rng, shape, rows):
    """Positions of query rows, and of rows or not, for a q of a shape."""

    def draw(*size):
        top = rng.choice((2 * rows + 2, 1 << 23))
        drawn = [rng.randrange(top) for _ in range(math.prod(size))]
        return torch.tensor(drawn, dtype=torch.int64).reshape(size)

    batch, query_rows = shape[0], shape[1] if len(shape) == 4 else 1
    one_row, shared = len(shape) == 3, rng.random() < 0.5
    found = {
        "query_positions": draw(*((batch,) if one_row else (query_rows,) if shared else (batch, query_rows)))
    }
    if rng.random() < 0.5:
        found["row_positions"] = draw(*((rows,) if shared else (batch, rows)))
    return found


def random_cases(seed, count, largest=None):
    """`count` random cases from a seed."""
    rng = random.Random(seed)
    return (random_case(rng, largest) for _ in range(count))
