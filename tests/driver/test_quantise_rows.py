"""Rows to codes and scales: every format with every scale against fractions, presets, and what is refused."""

import math
import random
from fractions import Fraction

import numpy as np
import oracle
import pytest
import torch
from contract_cases import seed_of_run
from nearkv.errors import ArgumentError, DtypeError, ShapeError
from nearkv.quantise import PRESETS, CacheFormat, RowFormat, Rule, attention_arguments, cache_format, quantise
from nearkv.reference import decode_attention
from nearkv_hw.abi.formats import ELEMENT_FORMATS, SCALE_BLOCKS, SCALE_FORMATS

NARROW = [name for name, form in ELEMENT_FORMATS.items() if form.bits <= 8]
LARGEST = {"fp8_e4m3": 448, "fp8_e5m2": 57344, "fp4_e2m1": 6, "int8": 127, "int4": 7}
POWER = {"fp8_e4m3": 8, "fp8_e5m2": 15, "fp4_e2m1": 2, "int8": 6, "int4": 2}
"""floor(log2) of the largest."""


def number(name, code):
    """A code's number as a fraction, None for what is no number."""
    sign, m, e = oracle.decode(name, code)
    return None if isinstance(m, str) else (-1) ** sign * m * Fraction(2) ** e


def codes_of(name, bits):
    """Codes and numbers of a format, -0 left out."""
    every = [(number(name, code), code) for code in range(1 << bits)]
    return sorted((x, code) for x, code in every if x is not None and not (x == 0 and code))


TABLES = {name: codes_of(name, form.bits) for name, form in ELEMENT_FORMATS.items() if form.bits <= 8}
SCALES = {name: codes_of(name, 8) for name in ("e4m3", "e8m0")}
for _name in ("fp16", "bf16"):
    SCALES[_name] = [pair for pair in codes_of(_name, 16) if pair[0] >= 0]


def nearest(x, table):
    """The number of a table nearest to a fraction, ties to the even code; the last one beyond."""
    low, high = 0, len(table) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if table[middle][0] <= x else (low, middle)
    first, second = table[low], table[high]
    below, above = x - first[0], second[0] - x
    if below == above:
        return first if first[1] % 2 == 0 else second
    return first if below < above else second


def exact_row(row, form, head=Fraction(1)):
    """(scale codes, numbers) of a row of fractions, from the definitions of the formats' page."""
    block = form.block or len(row)
    scales, numbers = [], []
    for begin in range(0, len(row), block):
        part, scale = row[begin : begin + block], Fraction(1)
        if form.scale is not None:
            peak = max(abs(x) for x in part) / head
            if form.scale == "e8m0":
                power = -127 if peak == 0 else floor_log2(peak) - POWER[form.element]
                scale, code = next(
                    pair for pair in SCALES["e8m0"] if pair[0] >= Fraction(2) ** max(power, -127)
                )
            else:
                scale, code = nearest(peak / LARGEST[form.element], SCALES[form.scale])
            scales.append(code)
        factor = scale * head
        numbers += [factor * nearest(x / factor, TABLES[form.element])[0] if factor else factor for x in part]
    return scales, numbers


def floor_log2(x):
    """floor(log2(x)) of a positive fraction."""
    power = x.numerator.bit_length() - x.denominator.bit_length()
    return power if Fraction(2) ** power <= x else power - 1


def random_rows(rng, shape):
    """float32 rows, some blocks of zeros, tiny or huge numbers, and numbers that ties are likely with."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    rows = torch.randn(shape, generator=generator)
    if rng.random() < 0.4:
        rows = torch.randint(-32, 33, shape, generator=generator) * 0.25
    rows = rows * 2.0 ** rng.choice((-140, -30, -8, 0, 0, 0, 6, 20))
    if rng.random() < 0.3:
        rows[..., : rng.randrange(shape[-1])] = 0
    return rows


def row_formats():
    for element in NARROW:
        yield RowFormat(element)
        yield RowFormat(element, head_scale=True)
        for scale in SCALE_FORMATS:
            for block in (*SCALE_BLOCKS, None):
                yield RowFormat(element, scale, block)
        yield RowFormat(element, "e4m3", 16, head_scale=True)


@pytest.mark.parametrize(
    "form", list(row_formats()), ids=lambda f: f"{f.element} {f.scale} {f.block} {f.head_scale}"
)
def test_rows_against_fractions(form):
    rng = random.Random(seed_of_run())
    for _ in range(3):
        rows = random_rows(rng, (2, 2, rng.choice((1, 16, 33, 40))))
        found = quantise(rows, form)
        values = found.values()
        for r in range(2):
            for head in range(2):
                per_head = (
                    Fraction(1) if found.head_scale is None else Fraction(found.head_scale[head].item())
                )
                exact = [Fraction(x) for x in rows[r, head].tolist()]
                scales, numbers = exact_row(exact, form, per_head)
                if found.scales is not None:
                    mask = (1 << SCALE_FORMATS[form.scale].bits) - 1
                    assert [code & mask for code in found.scales[r, head].tolist()] == scales
                assert values[r, head].tolist() == [float(x) for x in numbers]


@pytest.mark.parametrize("element", NARROW)
def test_scale_per_head(element):
    """The float32 nearest to the head's peak by the format's largest, and by that of its e4m3 scales."""
    rows = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(seed_of_run()))
    rows[:, 1] = 0
    for form, top in (
        (RowFormat(element, head_scale=True), LARGEST[element]),
        (RowFormat(element, "e4m3", 16, head_scale=True), LARGEST[element] * 448),
    ):
        peaks = rows.abs().amax((0, 2)).tolist()
        wanted = [np.float32(peak / top) if peak else 1.0 for peak in peaks]
        found = quantise(rows, form)
        assert found.head_scale.dtype == torch.float32
        assert found.head_scale.tolist() == [float(x) for x in wanted]
        later = quantise(rows[3:], form, head_scale=found.head_scale)
        assert torch.equal(later.codes, found.codes[3:])


# --- llama.cpp


def llama_block(row, name):
    """(d, codes) of a block of float32, in the order of operations that llama.cpp has."""
    if name == "q8_0":
        d = np.float32(max(abs(x) for x in row)) / np.float32(127)
    else:
        largest = np.float32(0)
        for x in row:
            if abs(largest) < abs(x):
                largest = x
        d = largest / np.float32(-8)
    inverse = np.float32(1) / d if d else np.float32(0)
    scaled = [np.float32(x * inverse) for x in row]
    if name == "q8_0":
        codes = [int(math.copysign(math.floor(abs(float(x)) + 0.5), x)) for x in scaled]
    else:
        codes = [min(15, int(np.float32(x + np.float32(8.5)))) - 8 for x in scaled]
    return int(np.float16(d).view(np.uint16)), codes


def llama_rows(rng):
    """Blocks of 32: random ones, and such as make ties, zeros, and both signs of the largest magnitude."""
    rows = [random_rows(rng, (32,)) * 2.0**-8 for _ in range(60)]
    rows = [row for row in rows if not 0 < float(row.abs().max()) < 1e-30]
    half = torch.arange(-16, 16) + 0.5
    rows += [torch.cat([half[:31], torch.tensor([127.0])]), torch.cat([half[:31] / 2, torch.tensor([-8.0])])]
    rows += [torch.zeros(32), torch.tensor([4.0, -4.0] * 16), torch.tensor([-4.0, 4.0] * 16)]
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_llama_cpps_codes(name):
    rows = llama_rows(random.Random(seed_of_run()))
    form = PRESETS[name].k
    found = quantise(rows.unsqueeze(1), form)
    bits = form.form.bits
    for row, codes, scale in zip(
        rows.numpy(), found.codes[:, 0].tolist(), found.scales.flatten().tolist(), strict=True
    ):
        d, wanted = llama_block(row, name)
        assert scale & 0xFFFF == d
        assert codes == [code & ((1 << bits) - 1) for code in wanted]


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_ggufs_own_quantiser(name):
    """Bytes of the `gguf` package's blocks, which has llama.cpp's results bit for bit."""
    gguf = pytest.importorskip("gguf")
    rows = llama_rows(random.Random(seed_of_run()))
    theirs = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType[name.upper()])
    found = quantise(rows.unsqueeze(1), PRESETS[name].k)
    assert torch.equal(torch.from_numpy(theirs[:, :2].copy()).view(torch.int16), found.scales[:, 0])
    if name == "q8_0":
        codes = torch.from_numpy(theirs[:, 2:].copy())
    else:
        nibbles = torch.from_numpy(theirs[:, 2:].copy())
        codes = (torch.cat([nibbles & 15, nibbles >> 4], dim=-1) + 8) & 15  # theirs count from -8
    assert torch.equal(codes, found.codes[:, 0])


def test_q4_0_cuts_the_other_sign_of_the_largest():
    found = quantise(torch.tensor([[[-4.0, 4.0] + [0.0] * 30]]), PRESETS["q4_0"].k)
    assert found.codes[0, 0, :2].tolist() == [8, 7]  # -8 and 7
    assert found.saturated == 1


# --- what saturates, and what is no number


def test_saturated_elements_are_counted():
    rows = torch.tensor([[[1.0, 500.0, -1e9, 448.0]]])
    assert quantise(rows, RowFormat("fp8_e4m3")).saturated == 2
    assert quantise(rows, RowFormat("fp8_e4m3"), head_scale=None).values().flatten().tolist() == [
        1,
        448,
        -448,
        448,
    ]
    # An e8m0 scale leaves what is above 7/8 of a power of two beyond fp4's 6: 7.5 / 1, but not 6.9.
    mx = quantise(torch.tensor([[[7.5, 6.9, 1.0]]]), PRESETS["mxfp4"].k)
    assert (mx.saturated, mx.values().flatten().tolist()) == (1, [6.0, 6.0, 1.0])
    # A block beyond the largest scale is cut whole: 1e9 / 127 is no fp16.
    huge = quantise(torch.tensor([[[1e9, 1e8, 1.0]]]), PRESETS["int8"].k)
    assert huge.saturated == 3
    assert huge.values().flatten().tolist() == [65504.0 * 127, 65504.0 * 127, 0.0]
    assert quantise(torch.full((1, 1, 32), 1e9), PRESETS["q8_0"].k).saturated == 32


@pytest.mark.parametrize("stray", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["int8", "int4", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4"])
def test_a_block_with_no_number_is_nan(name, stray):
    """The block alone: what stands beside it has the codes that it has without."""
    form = PRESETS[name].k
    rows = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(seed_of_run()))
    heads = torch.tensor([0.01]) if form.head_scale else None
    clean = quantise(rows, form, head_scale=heads)
    rows[1, 0, 40] = stray
    found = quantise(rows, form, head_scale=heads)
    block = form.block or 64
    hit = torch.zeros(2, 1, 64, dtype=torch.bool)
    hit[1, 0, 40 // block * block : (40 // block + 1) * block] = True
    assert found.values()[hit].isnan().all()
    assert torch.equal(found.values()[~hit], clean.values()[~hit])
    assert int((clean.codes != found.codes)[~hit].sum()) == 0


def test_no_numbers_without_scales():
    rows = torch.tensor([[[torch.nan, torch.inf, -torch.inf, 1.0]]])
    found = quantise(rows, RowFormat("fp8_e5m2"))
    assert found.values().flatten().tolist()[1:] == [57344.0, -57344.0, 1.0]
    assert found.values().flatten()[0].isnan()
    assert found.saturated == 2
    with pytest.raises(ArgumentError, match="int8 has no NaN"):
        quantise(rows, RowFormat("int8"))


# --- presets


def test_presets():
    assert set(PRESETS) == {
        "bf16", "fp16", "fp8", "int8", "int4", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4",
    }  # fmt: skip
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert preset.k == preset.v


@pytest.mark.parametrize(
    ("name", "dim", "row_bytes", "row_lines", "page_lines"),
    [  # by hand, for K and V of `dim` and pages of 16 rows
        ("bf16", 128, 2 * 256, 8, 128),
        ("fp8", 64, 2 * 64, 2, 32),
        ("int8", 64, 2 * (64 + 2), 2, 2 * (16 + 1)),
        ("int4", 64, 2 * (32 + 4), 1, 2 * (8 + 1)),
        ("q8_0", 128, 2 * (128 + 8), 4, 2 * (32 + 2)),
        ("q4_0", 32, 2 * (16 + 2), Fraction(1, 2), 2 * (4 + 1)),
        ("mxfp8", 96, 2 * (128 + 4), 4, 2 * (32 + 1)),
        ("mxfp4", 128, 2 * (64 + 4), 2, 2 * (16 + 1)),
        ("nvfp4", 128, 2 * (64 + 8), 2, 2 * (16 + 2)),
        ("nvfp4", 59, 2 * (32 + 4), 1, 2 * (8 + 1)),
    ],
)
def test_what_a_row_takes(name, dim, row_bytes, row_lines, page_lines):
    preset = PRESETS[name]
    assert preset.row_bytes(dim, dim) == row_bytes
    assert preset.row_lines(dim, dim) == row_lines
    assert preset.page_lines(dim, dim, 16) == page_lines


def test_latent_rows_are_stored_once():
    latent = CacheFormat("latent", PRESETS["fp8"].k)
    assert latent.row_bytes(576, 512) == 576
    assert latent.row_lines(576, 512) == 9
    assert latent.page_lines(576, 512, 4) == 36


def test_k_and_v_are_independent():
    mixed = cache_format("int8", "mxfp4")
    assert mixed.row_bytes(64, 128) == 64 + 2 + 64 + 4
    assert mixed.k == PRESETS["int8"].k
    assert mixed.v == PRESETS["mxfp4"].v
    assert cache_format("int8", "int8") is PRESETS["int8"]


@pytest.mark.parametrize("k_name", PRESETS)
@pytest.mark.parametrize("v_name", ["fp16", "fp8", "int8", "q4_0", "nvfp4"])
def test_attention_over_presets(k_name, v_name):
    """The reference's answer over codes and scales is that of the numbers they stand for."""
    generator = torch.Generator().manual_seed(seed_of_run())
    k, v = (torch.randn(1, 40, 2, 48, generator=generator) for _ in range(2))
    q = torch.randn(1, 4, 48, generator=generator).to(torch.bfloat16)
    both = cache_format(k_name, v_name)
    k_rows, v_rows = quantise(k, both.k), quantise(v, both.v)
    found = decode_attention(q, scale=0.15, **attention_arguments(k_rows, v_rows)).double()
    k, v = (x.values().repeat_interleave(2, dim=2) for x in (k_rows, v_rows))
    weights = torch.einsum("bhd,brhd->bhr", q.double(), k).mul(0.15).softmax(-1)
    exact = torch.einsum("bhr,brhd->bhd", weights, v)
    assert float((found - exact).abs().max() / exact.abs().max()) < 6e-6


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"element": "fp9"}, "element='fp9': there are bf16, fp16"),
        ({"element": "int8", "scale": "fp32"}, "scale='fp32': there are bf16, fp16, e4m3, e8m0"),
        ({"element": "int8", "block": 32}, "block=32 needs a scale format"),
        ({"element": "bf16", "scale": "fp16"}, "bf16 takes no scales"),
        ({"element": "fp16", "head_scale": True}, "fp16 takes no scales"),
        ({"element": "int8", "scale": "fp16", "block": 8}, "block=8: must be 16, 32, 64, 128, or None"),
        ({"element": "int8", "scale": "fp16", "head_scale": True}, "fp16 scales have range enough"),
        (
            {"element": "int8", "scale": "bf16", "block": 32, "rule": Rule.Q8_0},
            "the rule q8_0 needs element='int8'",
        ),
    ],
)
def test_refused_formats(options, message):
    with pytest.raises(ArgumentError, match=message):
        RowFormat(**options)


@pytest.mark.parametrize(
    ("rows", "options", "error", "message"),
    [
        (
            torch.ones(1, 2, 4).double(),
            {},
            DtypeError,
            "rows must be a tensor of float32, .*, not torch.float64",
        ),
        ([1.0], {}, DtypeError, "not list"),
        (torch.ones(4), {}, ShapeError, r"rows have shape \[4\], must have \[..., kv_heads, dim\]"),
        (torch.ones(2, 0), {}, ShapeError, "dim >= 1"),
        (
            torch.ones(1, 2, 4),
            {"head_scale": torch.ones(3)},
            ShapeError,
            r"head_scale has shape \[3\], must have \[2\]",
        ),
        (
            torch.ones(1, 2, 4),
            {"head_scale": torch.ones(2).double()},
            DtypeError,
            "head_scale must be float32",
        ),
        (torch.ones(1, 2, 4), {"head_scale": torch.zeros(2)}, ArgumentError, "must be finite and above 0"),
        (
            torch.full((1, 2, 4), torch.inf),
            {},
            ArgumentError,
            "rows with NaN or infinities tell no scale per head",
        ),
    ],
)
def test_refused_rows(rows, options, error, message):
    with pytest.raises(error, match=message):
        quantise(rows, PRESETS["fp8"].k, **options)


def test_a_scale_per_head_that_a_format_does_not_have():
    with pytest.raises(ArgumentError, match="int8 has no scale per head here"):
        quantise(torch.ones(1, 2, 4), PRESETS["int8"].k, head_scale=torch.ones(2))


def test_unknown_presets():
    with pytest.raises(ArgumentError, match="format='int3': there are bf16"):
        cache_format("int3")


def test_types_and_shapes():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.randn(3, 5, 2, 40).to(dtype)
        for form, block in ((PRESETS["nvfp4"].k, 16), (PRESETS["int8"].k, 40), (PRESETS["bf16"].k, None)):
            found = quantise(rows, form)
            assert found.codes.shape == rows.shape
            assert found.codes.dtype == (torch.int16 if form.element == "bf16" else torch.uint8)
            if block:
                assert found.scales.shape == (3, 5, 2, -(-40 // block))
    assert quantise(torch.zeros(0, 2, 8), PRESETS["nvfp4"].k).codes.shape == (0, 2, 8)
    codes = quantise(torch.randn(1, 1, 8).to(torch.bfloat16), PRESETS["bf16"].k)
    assert codes.saturated == 0
