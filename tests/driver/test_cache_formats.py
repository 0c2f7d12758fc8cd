"""Caches in every format through their life: quantising, codes, crops, copies, tenants, and a second host."""

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import memory_image, same_bits, values
from nearkv.errors import ArgumentError, DtypeError, OutOfMemoryError, ShapeError
from nearkv.quantise import PRESETS, RowFormat, attention_arguments, decode, find_codebook, quantise
from nearkv.reference import decode_attention
from nearkv_hw.abi import Feature
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.formats import ROW_FORMATS, SCALE_FORMATS
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_hw.abi.memory import CACHE, ENTRY, HEAD_SCALE, ROOT, TABLE, RowLayout, table_entry_lines
from nearkv_hw.abi.rows import ELEMENTS_BY_CODE, Stored
from nearkv_sim.port import Access, Read

NARROW = [name for name, preset in PRESETS.items() if preset.k.form.bits < 16]
SCALE = 0.3


def reference(q, k, v, **options):
    """The reference on quantised rows of one sequence."""
    given = attention_arguments(*(_batched(rows) for rows in (k, v) if rows is not None))
    return decode_attention(q, given.pop("k"), given.pop("v"), scale=SCALE, **options, **given)


def _batched(rows):
    scales = None if rows.scales is None else rows.scales[None]
    return type(rows)(rows.format, rows.codes[None], scales, rows.head_scale, 0, rows.codebook)


def rows_of(count: int, dims=(40, 24), *, seed: int = 1, kv_heads: int = 2):
    return tuple(
        values(count, kv_heads, dim, seed=seed + n, dtype=torch.float32) for n, dim in enumerate(dims)
    )


def held(kv, handle, layer: int = 0):
    return kv.read_codes(handle, layer=layer)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "features", [Feature.all(), Feature.all() & ~(Feature.SHORT_ROWS | Feature.OUTPUT_SCALE)]
)
def test_rows_are_quantised_on_append(name, features):
    """A device's rows are those of `nearkv.quantise`, however they are appended; the first ones set a head's
    scale. Its attention over them has the reference's bits."""
    k, v = rows_of(37)
    if name in ("bf16", "fp16"):
        k, v = (x.to(torch.bfloat16 if name == "bf16" else torch.float16) for x in (k, v))
    form = PRESETS[name]
    heads = [quantise(x[:5], form.k).head_scale for x in (k, v)]
    wanted = [quantise(x, form.k, head_scale=head) for x, head in zip((k, v), heads, strict=True)]
    q = values(1, 4, 40, seed=9, dtype=torch.bfloat16 if name == "bf16" else torch.float16)
    with nearkv.open("model", features=features) as device:
        kv = device.kv_cache(layers=1, kv_heads=2, head_dim=40, value_dim=24, dtype=name, page_rows=8)
        handle = kv.sequence()
        for begin, end in ((0, 5), (5, 6), (6, 30), (30, 37)):
            kv.append(handle, layer=0, k=k[begin:end], v=v[begin:end])
        found = held(kv, handle)
        for own, want in zip(found, wanted, strict=True):
            assert torch.equal(own.codes, want.codes)
            assert (own.scales is None) == (want.scales is None)
            assert want.scales is None or torch.equal(own.scales, want.scales)
            assert (own.head_scale is None) == (want.head_scale is None)
            assert want.head_scale is None or torch.equal(own.head_scale, want.head_scale)
        for out_dtype in (torch.float32, torch.bfloat16):
            out = kv.attend([handle], layer=0, q=q, scale=SCALE, out_dtype=out_dtype)
            assert same_bits(out, reference(q, *wanted, out_dtype=out_dtype))
        for got, want in zip(kv.read(handle, layer=0), wanted, strict=True):
            assert torch.equal(got.float(), want.values().float())


def test_what_saturates_is_counted(model):
    kv = model.kv_cache(
        layers=2, kv_heads=1, head_dim=16, dtype="fp8", k_scale=torch.ones(1), v_scale=torch.ones(1)
    )
    handle = kv.sequence()
    k = torch.full((3, 1, 16), 448.0)
    kv.append(handle, layer=0, k=k, v=k)
    assert model.stats().saturated == 0
    k[0, 0, :5] = 1e6
    k[2, 0, 1] = -torch.inf
    kv.append(handle, layer=1, k=k, v=torch.zeros_like(k))
    assert model.stats().saturated == 6
    codes = held(kv, handle, 1)[0].codes
    assert codes[0, 0, 0] == 0x7E
    assert codes[2, 0, 1] == 0xFE


def random_codes(row: RowFormat, rows: int, dim: int, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(form, *shape):
        codes = torch.randint(0, 1 << form.bits, shape, generator=generator)
        return (codes - ((codes >> 15) << 16)).to(torch.int16) if form.bits == 16 else codes.to(torch.uint8)

    scales = None if row.scale_form is None else draw(row.scale_form, rows, 2, row.blocks(dim))
    return draw(row.form, rows, 2, dim), scales


FORMATS = [
    RowFormat(element, scale, block)
    for element, form in ROW_FORMATS.items()
    for scale in (None, *SCALE_FORMATS)
    for block in ((None,) if scale is None else (16, None))
    if (scale is None or form.bits <= 8) and not (form.codebook and scale in ("bf16", "fp16"))
]


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: f"{row.element}-{row.scale}-{row.block}")
def test_codes_are_taken_unchanged(model, row):
    """Any code, NaN and infinities included, lies on the device as it was given."""
    k, k_scales = random_codes(row, 21, 36, seed=1)
    v, v_scales = random_codes(row, 21, 70, seed=2)
    books = {}
    if row.form.codebook:
        books = {f"{n}_lut": values(2, 16, seed=5) for n in "kv"}
    kv = model.kv_cache(
        layers=1, kv_heads=2, head_dim=36, value_dim=70, dtype=row, value_dtype=row, page_rows=4, **books
    )
    handle = kv.sequence()
    for part in (slice(0, 3), slice(3, 4), slice(4, 21)):
        scales = {} if k_scales is None else {"k_scales": k_scales[part], "v_scales": v_scales[part]}
        kv.append(handle, layer=0, k=k[part], v=v[part], **scales)
    for own, codes, scales in zip(held(kv, handle), (k, v), (k_scales, v_scales), strict=True):
        assert torch.equal(own.codes, codes)
        assert scales is None or torch.equal(own.scales, scales)


BYTES = torch.zeros(1, 1, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (ArgumentError, "k holds codes of int8 with fp16 scales; give k_scales",
         {"k": BYTES}),
        (ShapeError, r"k_scales has shape \[1, 1, 2\], must have \[1, 1, 1\]",
         {"k": BYTES, "k_scales": torch.zeros(1, 1, 2).half()}),
        (DtypeError, "k_scales is torch.uint8, codes of fp16 are torch.int16",
         {"k": BYTES, "k_scales": BYTES[..., :1]}),
        (ArgumentError, "k_scales go with codes", {"k_scales": torch.zeros(1, 1, 1).half()}),
        (DtypeError, "k is torch.float64, must be values", {"k": torch.zeros(1, 1, 32).double()}),
        (ArgumentError, "v holds codes, and nothing says what multiplies them; give v_scale=",
         {"v": BYTES}),
        (ShapeError, "k has 1 rows and v has 2", {"v": torch.zeros(2, 1, 32)}),
        (ArgumentError, "int8 has no NaN",
         {"k": torch.tensor(torch.nan).expand(1, 1, 32), "dtype": RowFormat("int8")}),
    ],
)  # fmt: skip
def test_refused_rows_change_nothing(model, error, message, given):
    given = {"k": torch.zeros(1, 1, 32), "v": torch.zeros(1, 1, 32), **given}
    dtype = given.pop("dtype", "int8")
    kv = model.kv_cache(layers=1, kv_heads=1, head_dim=32, dtype=dtype, value_dtype="fp8")
    handle = kv.sequence()
    image = memory_image(model)
    with pytest.raises(error, match=message):
        kv.append(handle, layer=0, **given)
    assert kv.length(handle) == 0
    assert np.array_equal(memory_image(model), image)


def test_codes_of_four_bits_are_below_16(model):
    kv = model.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype=RowFormat("fp4_e2m1"))
    codes = torch.full((1, 1, 8), 16, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="codes of fp4_e2m1 are below 16, got 16"):
        kv.append(kv.sequence(), layer=0, k=codes, v=codes)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dims", [(16, 16), (40, 24)])
def test_a_cropped_reordered_cache_is_that_of_its_rows(model, name, dims):
    """F13: quantised rows through crop, append, fork and reset are those that were quantised once."""
    k, v = rows_of(30, dims)
    form = PRESETS[name].k
    kv = model.kv_cache(layers=1, kv_heads=2, head_dim=dims[0], value_dim=dims[1], dtype=name, page_rows=4)
    first = kv.sequence()
    kv.append(first, layer=0, k=k[:20], v=v[:20])
    heads = [rows.head_scale for rows in held(kv, first)]
    copy = kv.fork(first)
    kv.crop(first, 9)
    kv.append(first, layer=0, k=k[20:], v=v[20:])
    order = [*range(9), *range(20, 30)]
    q = values(1, 4, dims[0], seed=9)
    for handle, chosen in ((first, order), (copy, [*range(20)])):
        wanted = [quantise(x[chosen], form, head_scale=h) for x, h in zip((k, v), heads, strict=True)]
        for own, want in zip(held(kv, handle), wanted, strict=True):
            assert torch.equal(own.codes, want.codes)
        assert same_bits(kv.attend([handle], layer=0, q=q, scale=SCALE), reference(q, *wanted))
    kv.reset()
    kv.append(first, layer=0, k=k[:3], v=v[:3])
    wanted = [quantise(x[:3], form, head_scale=h) for x, h in zip((k, v), heads, strict=True)]
    assert same_bits(kv.attend([first], layer=0, q=q, scale=SCALE), reference(q, *wanted))


def test_tenants_with_other_formats_share_a_device(model):
    k, v = rows_of(20, (32, 32))
    q = values(1, 2, 32, seed=3)
    wanted = {}
    for tenant, name in ((0, "mxfp4"), (1, "q8_0")):
        kv = model.kv_cache(layers=1, kv_heads=2, head_dim=32, dtype=name, tenant=tenant)
        handle = kv.sequence()
        kv.append(handle, layer=0, k=k, v=v)
        wanted[tenant] = kv, handle, [quantise(x, PRESETS[name].k) for x in (k, v)]
    for kv, handle, rows in wanted.values():
        assert same_bits(kv.attend([handle], layer=0, q=q, scale=SCALE), reference(q, *rows))
    assert model.stats().violations == 0


def test_a_full_device_learns_nothing():
    """Rows that find no room set no scale of a head."""
    with nearkv.open("model", channels=1, capacity_bytes=4 << 20) as device:
        kv = device.kv_cache(layers=1, kv_heads=1, head_dim=128, dtype="fp8", page_rows=64)
        handle = kv.sequence()
        with pytest.raises(OutOfMemoryError):
            kv.append(handle, layer=0, k=torch.ones(40_000, 1, 128), v=torch.ones(40_000, 1, 128))
        assert kv.head_scales(0) == (None, None)
        k, v = (x[:, :1] for x in rows_of(5, (128, 128)))
        kv.append(handle, layer=0, k=k, v=v)
        assert torch.equal(kv.head_scales(0)[0], quantise(k, PRESETS["fp8"].k).head_scale)


class Attached:
    """A second host, which knows the documented layout and nothing else."""

    def __init__(self, device) -> None:
        self._port, self._config = device._port, device.config
        firsts = np.arange(device.config.extents, dtype=np.uint64) * np.uint64(EXTENT_BYTES)
        (result,) = self._port.run([Read(firsts)])
        first = int(np.flatnonzero(result.access == Access.DATA)[0])
        root = ROOT.unpack(self.read(first * EXTENT_BYTES, 64))
        self.record = CACHE.unpack(self.read(root["first_cache"], 64))

    def read(self, address: int, size: int) -> bytes:
        begin = address // LINE_BYTES * LINE_BYTES
        count = -(-(address + size - begin) // LINE_BYTES)
        lines = begin + np.arange(count, dtype=np.uint64) * np.uint64(LINE_BYTES)
        (result,) = self._port.run([Read(lines)])
        assert not result.access.any()
        return result.data.tobytes()[address - begin :][:size]

    def stored(self, part: str) -> Stored:
        names = {"element": "format", "scale": "scale", "block": "block", "pitch": "pitch"}
        return Stored.of(**{what: self.record[f"{part}_{name}"] for what, name in names.items()})

    def head(self, layer: int, head: int) -> tuple[float, float]:
        at = self.record["head_scales"] + 8 * (layer * self.record["kv_heads"] + head)
        scales = HEAD_SCALE.unpack(self.read(at, 8))
        return tuple(float(np.uint32(scales[name]).view(np.float32)) for name in ("k_scale", "v_scale"))

    def books(self, layer: int, head: int):
        at = self.record["codebooks"] + 64 * (layer * self.record["kv_heads"] + head)
        return np.frombuffer(self.read(at, 64), np.float16).reshape(2, 16)

    def numbers(self, part: str, layer: int, head: int):
        """The numbers of all rows of sequence 0, scales of the head left out: float64 [rows, dim]."""
        record, stored = self.record, self.stored(part)
        layout = RowLayout(
            record["head_dim"], record["value_dim"], 1 << record["page_rows_log2"], self.stored("k"),
            self.stored("v"), bool(record["latent"]), bool(record["summaries"]),
        )  # fmt: skip
        dim = record["head_dim"] if part == "k" else record["value_dim"]
        table = int.from_bytes(self.read(record["directory"] + 8 * layer, 8), "little")
        header = TABLE.unpack(self.read(table, 64))
        entries = table + 64 * (1 + head * table_entry_lines(header["entries"]))
        area = 0 if part == "k" else 2
        rows = []
        for row in range(header["committed_rows"]):
            page, slot = divmod(row, layout.page_rows)
            base = ENTRY.unpack(self.read(entries + 8 * page, 8))["line"] * LINE_BYTES

            def codes(which, form, count, base=base, slot=slot):
                raw = self.read(
                    base + layout.areas[which] + slot * layout.pitches[which], layout.pitches[which]
                )
                data = np.frombuffer(raw, np.uint16 if form.bits == 16 else np.uint8)
                if form.bits == 4:
                    data = np.stack([data & 0xF, data >> 4], axis=-1).reshape(-1)
                return torch.from_numpy(data[:count].astype(np.int64))

            own = codes(area, stored.element, dim)
            if stored.element.codebook:
                own = torch.from_numpy(self.books(layer, head)["kv".index(part)].astype(np.float64))[own]
            else:
                own = decode(own, stored.element)
            if stored.scale is not None:
                scales = decode(codes(area + 1, stored.scale, stored.blocks(dim)), stored.scale)
                own = own * scales.repeat_interleave(stored.block or dim)[:dim]
            rows.append(own)
        return torch.stack(rows)


@pytest.mark.parametrize("name", [*PRESETS, "lut4"])
def test_a_second_host_finds_what_it_needs(name):
    """Formats, pitches, scales of heads and codebooks: all that numbers are made of lies on the device."""
    with nearkv.open("model") as device:
        kv = device.kv_cache(layers=2, kv_heads=2, head_dim=20, value_dim=40, dtype=name, page_rows=4)
        handle = kv.sequence()
        for layer in range(2):
            k, v = rows_of(11, (20, 40), seed=10 * layer)
            if kv.dtype is not None:
                k, v = k.to(kv.dtype), v.to(kv.dtype)
            kv.append(handle, layer=layer, k=k, v=v)
        other = Attached(device)
        assert ELEMENTS_BY_CODE[other.record["k_format"]] == kv.format.k.form
        for layer in range(2):
            for part, rows in zip("kv", held(kv, handle, layer), strict=True):
                for head in range(2):
                    scale = other.head(layer, head)["kv".index(part)] if other.record["head_scales"] else 1.0
                    assert torch.equal(other.numbers(part, layer, head) * scale, rows.values()[:, head])


def test_codebooks_are_found_or_given(model):
    """The first rows' codebook stays; one that is given is used."""
    k, v = rows_of(60, (32, 16))
    row = RowFormat("lut4", "e8m0", 16)
    given = find_codebook(v, row)
    kv = model.kv_cache(
        layers=2, kv_heads=2, head_dim=32, value_dim=16, dtype="lut4", scale_dtype=(None, "e8m0"),
        scale_block=(None, 16), v_lut=given,
    )  # fmt: skip
    handle = kv.sequence()
    kv.append(handle, layer=0, k=k[:40], v=v[:40])
    kv.append(handle, layer=0, k=k[40:], v=v[40:])
    book = find_codebook(k[:40], RowFormat("lut4"))
    wanted = quantise(k, RowFormat("lut4"), codebook=book), quantise(v, row, codebook=given)
    for own, want in zip(held(kv, handle), wanted, strict=True):
        assert torch.equal(own.codes, want.codes)
        assert torch.equal(own.codebook, want.codebook)
    error = (wanted[0].values() - k.double()).pow(2).mean().sqrt()
    assert error < 0.15, "of numbers whose standard deviation is 1"
    q = values(1, 4, 32, seed=9)
    assert same_bits(kv.attend([handle], layer=0, q=q, scale=SCALE), reference(q, *wanted))


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8"])
def test_latent_rows_of_deepseek(name):
    """MLA: rows of 576 elements whose first 512 are V, read once."""
    k = values(50, 1, 576, seed=1, dtype=torch.bfloat16)
    q = values(1, 16, 576, seed=2, dtype=torch.bfloat16)
    with nearkv.open("model") as device:
        kv = device.kv_cache(
            layers=1, kv_heads=1, head_dim=576, value_dim=512, dtype=name, latent=True, page_rows=16
        )
        handle = kv.sequence()
        kv.append(handle, layer=0, k=k)
        before = device.stats()
        out = kv.attend([handle], layer=0, q=q, scale=SCALE)
        lines = (device.stats() - before).attention_lines
        row_lines = {"bf16": 18, "mxfp8": 9, "fp8": 9}[name]
        passes = 16 // device.config.queries
        assert passes * 50 * row_lines <= lines < passes * (50 * row_lines + 30)
        wanted = quantise(k, PRESETS[name].k)
        assert same_bits(out, reference(q, wanted, None, value_dim=512))
        with pytest.raises(ArgumentError, match="V is part of the K row"):
            kv.append(handle, layer=0, k=k, v=k[..., :512])
