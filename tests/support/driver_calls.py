"""Random calls of the contract through the driver: caches in any format, attention with any variant."""

import random
from dataclasses import dataclass, field, replace

import torch
from contract_cases import VALUE_TYPES, Case, Sizes, random_case
from nearkv.quantise import RowFormat
from nearkv.reference import decode_attention, finish, log_sum_exp, page_summaries, select_pages
from nearkv_hw.abi.formats import ROW_FORMATS

SIZES = Sizes(batch=3, kv_heads=2, group=3, query_rows=4, rows=60, dim=80)
K_OPTIONS = ("k_format", "k_scales", "k_lut", "scale_block", "scale_format")


@dataclass
class DriverCall:
    """A call that the driver can make, and how.

    Members
    -------
    case : the call as the reference takes it.
    cache : arguments of `Device.kv_cache`.
    attend : arguments of `KVCache.attend` besides q.
    chunks : rows of each append.
    select : pages to select, or None.
    """

    case: Case
    cache: dict
    attend: dict
    chunks: list
    select: int | None
    text: str
    extras: dict = field(default_factory=dict)

    def check(self, device) -> None:
        """The device's answer, or the host's where the device has none, has the reference's bits."""
        case = self.case
        with device.kv_cache(**self.cache) as kv:
            sequences = self._filled(kv)
            attend = dict(self.attend)
            if self.select is not None:
                attend["select_pages"] = self.select
            result = kv.attend(sequences, layer=1, q=case.q, partial=True, **attend)
            out = kv.attend(
                sequences, layer=1, q=case.q, return_lse=True, out_dtype=self.extras["dtype"], **attend
            )
        options, pages = dict(case.options), None
        if self.select is not None:
            pages = self._selected()
            options |= {"pages": pages, "page_rows": self.cache["page_rows"]}
            assert torch.equal(result[1], pages), self.text
            assert torch.equal(out[2], pages), self.text
            result = result[0]
        want = decode_attention(case.q, case.k, case.v, partial=True, **options)
        assert result.equal(want), self.text
        wanted = finish(want, self.extras["dtype"], case.v_scale), log_sum_exp(want)
        for got, expected in zip(out[:2], wanted, strict=True):
            assert same_bits(got, expected), self.text

    def _filled(self, kv):
        """New sequences with the call's rows in layer 1, in pieces."""
        case = self.case
        sequences = [kv.sequence() for _ in range(case.q.shape[0])]
        begin = 0
        for count in self.chunks:
            part = slice(begin, begin + count)
            given = {
                name: tensor[:, part]
                for name, tensor in (
                    ("k", case.k), ("v", case.v),
                    ("k_scales", case.options.get("k_scales")), ("v_scales", case.options.get("v_scales")),
                )
                if tensor is not None
            }  # fmt: skip
            kv.append(sequences, layer=1, **given)
            begin += count
        return sequences

    def _selected(self):
        """The pages that the reference selects."""
        case, page_rows = self.case, self.cache["page_rows"]
        given = {name: case.options[name] for name in K_OPTIONS if name in case.options}
        summaries = page_summaries(case.k, page_rows=page_rows, **given)
        pages, rows = summaries.least.shape[1], case.k.shape[1]
        shown = case.sees().any(2)[:, 0]
        shown = torch.nn.functional.pad(shown, (0, pages * page_rows - rows))
        shown = shown.view(len(shown), pages, page_rows).any(-1)
        options = {name: case.options.get(name) for name in ("scale", "k_scale", "softcap")}
        return select_pages(case.q, summaries, count=self.select, candidates=shown, **options).pages


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equality of bit patterns."""
    kind = torch.int32 if first.dtype == torch.float32 else torch.int16
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(kind), second.contiguous().view(kind)
    )


def random_call(seed: str, sizes: Sizes = SIZES) -> DriverCall:
    """A random call from a seed."""
    rng = random.Random(seed)
    if rng.random() < 0.08:
        sizes = replace(sizes, dim=600, rows=12)
    case = random_case(rng, sizes)
    options = dict(case.options)
    batch, rows = case.k.shape[:2]
    query_rows = case.q.shape[1] if case.q.dim() == 4 else 1
    for name in ("pages", "page_rows", "row_positions"):
        options.pop(name, None)
    _settle_positions(rng, case, options, query_rows, rows)
    _settle_ranges(options, batch, rows)
    formats, heads = _formats(rng, case, options)
    _settle_types(case, options, formats, heads)
    attend = {
        name: options[name] for name in ("scale", "sinks", "softcap", "alibi_slopes") if name in options
    }
    attend |= {
        name: options[name] for name in ("window", "tree", "visible", "query_positions") if name in options
    }
    if options.get("kept_rows"):
        attend["kept_rows"] = options["kept_rows"]
    if "visible" not in options and rng.random() < 0.3:
        begin, end = sorted(rng.randint(0, rows) for _ in range(2))
        attend["rows"] = begin, end
        options["ranges"] = [[(begin, end)]] * batch
    page_rows = rng.choice((4, 8, 16, 64))
    select = rng.choice((1, 2, 5, 1000)) if rng.random() < 0.25 else None
    chunks, left = [], rows
    while left:
        chunks.append(rng.randint(1, left))
        left -= chunks[-1]
    cache = {
        "layers": 2, "kv_heads": case.k.shape[2], "head_dim": case.k.shape[3], "value_dim": case.lanes,
        "page_rows": page_rows, "summaries": select is not None, **formats, **heads,
    }  # fmt: skip
    case = Case(case.q, case.k, case.v, options, heads.get("v_scale"), case.name)
    if "k_scale" in heads:
        options["k_scale"] = heads["k_scale"]
    else:
        options.pop("k_scale", None)
    if case.v is None:
        case.v_scale = heads.get("k_scale")
    extras = {"dtype": rng.choice((torch.float32, torch.bfloat16, torch.float16))}
    text = f"seed {seed!r}: {case.describe()} cache {cache} attend {list(attend)} select {select}, {chunks}"
    return DriverCall(case, cache, attend, chunks, select, text, extras)


def _settle_positions(rng, case, options, query_rows: int, rows: int) -> None:
    """Query rows are the last rows, but for those of a tree; several are causal."""
    if "tree" in options and query_rows <= rows:
        if "query_positions" in options:
            shape = tuple(options["query_positions"].shape)
            generator = torch.Generator().manual_seed(rng.getrandbits(32))
            options["query_positions"] = torch.randint(0, 2 * rows + 2, shape, generator=generator)
            if case.q.dim() == 3:
                options["query_positions"] = options["query_positions"].view(-1, 1)
                case.q = case.q.unsqueeze(1)
        options.pop("causal", None)
        return
    options.pop("tree", None)
    options.pop("query_positions", None)
    if query_rows > 1:
        options["causal"] = True


def _settle_ranges(options, batch: int, rows: int) -> None:
    """Ranges are said by a mask."""
    ranges = options.pop("ranges", None)
    if ranges is None:
        return
    inside = torch.zeros(batch, rows, dtype=torch.bool)
    for index, own in enumerate(ranges):
        for begin, end in own:
            inside[index, begin:end] = True
    visible = options.get("visible")
    if visible is not None:
        inside = visible & (inside if visible.dim() == 2 else inside.unsqueeze(1))
    options["visible"] = inside


def _settle_types(case, options, formats, heads) -> None:
    """What the driver takes of queries and masks, and a factor that is finite."""
    if case.q.dim() == 3 and "visible" in options and options["visible"].dim() == 3:
        options["visible"] = options["visible"].squeeze(1)
    if "k_scale" in heads:
        options["scale"] = max(min(options["scale"], 1e30), -1e30)
    rows = {row.element for row in formats.values() if isinstance(row, RowFormat)}
    if len(rows) == 1 and rows <= {"bf16", "fp16"}:
        case.q = case.q.view(torch.int16).view(VALUE_TYPES[rows.pop()])


def _formats(rng, case, options):
    """Formats of a cache for a case's rows, and what its heads have in common."""
    found, heads = {}, {}
    for index, name in enumerate("kv"):
        if name == "v" and case.v is None:
            found["latent"] = True
            continue
        element = options.get(f"{name}_format") or options["k_format"]
        form = ROW_FORMATS[element]
        scale = block = None
        if f"{name}_scales" in options:
            scale, block = options["scale_format"][index], options["scale_block"][index]
        may = form.bits <= 8 and not form.codebook and scale in (None, "e4m3")
        own = may and rng.random() < 0.5
        found["dtype" if name == "k" else "value_dtype"] = RowFormat(element, scale, block, head_scale=own)
        if own:
            kv_heads = case.k.shape[2]
            heads[f"{name}_scale"] = torch.tensor(
                [rng.choice((1.0, 0.0173, 3.0, 1e-3)) for _ in range(kv_heads)]
            )
        if form.codebook:
            book = options[f"{name}_lut"]
            heads[f"{name}_lut"] = book if book.dtype == torch.float16 else book.view(torch.float16)
    return found, heads
