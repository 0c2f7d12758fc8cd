"""Random calls of the contract as raw jobs of a device: every variant that a descriptor can ask for.

Pages, lists and descriptors are put together here by docs/memory-layout.md, apart from the driver.
"""

import random
from dataclasses import dataclass, replace

import numpy as np
import torch
from contract_cases import Case, Sizes, random_case
from nearkv.reference import Partial, State, decode_attention, finish, page_summaries, select_pages
from nearkv.reference.alibi import alibi_bits
from nearkv.reference.arguments import score_factors
from nearkv.reference.fixed import float32_bits
from nearkv.reference.softcap import softcap_bits
from nearkv.results import Finished, partial_of
from nearkv_hw.abi import LINE_BYTES, Opcode, OutputForm, Status
from nearkv_hw.abi import descriptor as abi
from nearkv_hw.abi.formats import QUERY_FORMATS, ROW_FORMATS, SCALE_FORMATS
from nearkv_hw.abi.lines import lines_of
from nearkv_hw.abi.memory import (
    ENTRIES_PER_LINE,
    ENTRY,
    LAYOUT_VERSION,
    TABLE,
    TABLE_MAGIC,
    ResultLayout,
    RowLayout,
    table_entry_lines,
)
from nearkv_hw.abi.rows import Stored
from rawhost import RawHost

FORMS = {OutputForm.FP32: torch.float32, OutputForm.BF16: torch.bfloat16, OutputForm.FP16: torch.float16}
SIZES = Sizes(batch=2, kv_heads=2, group=3, query_rows=4, rows=70, dim=140)
REFUSALS = {Status.BAD_FLAGS, Status.BAD_FORMAT, Status.BAD_GEOMETRY}
"""What a device says to a job that it has no feature for."""
K_OPTIONS = ("k_format", "k_scales", "k_lut", "scale_block", "scale_format")


@dataclass
class VariantJob:
    """A call whose rows are seen by ranges, causality, windows and trees alone.

    Members
    -------
    case : the call; its positions are those that a descriptor can name.
    first_position : of query row 0, or None where the call leaves positions to the contract.
    select_pages : pages to select, or None.
    """

    case: Case
    form: OutputForm
    page_rows: int
    short: bool
    select_pages: int | None
    seed: str

    @property
    def rows(self) -> int:
        """Rows of the context."""
        return self.case.k.shape[1]

    @property
    def query_rows(self) -> int:
        """Query rows."""
        return self.case.q.shape[1]


def random_job(seed: str, sizes: Sizes = SIZES) -> VariantJob:
    """A random call from a seed."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        sizes = replace(sizes, dim=1023, rows=12)
    case = random_case(rng, sizes)
    options = dict(case.options)
    batch, rows = case.k.shape[:2]
    for name in ("visible", "pages", "page_rows", "row_positions"):
        options.pop(name, None)
    q = case.q if case.q.dim() == 4 else case.q.unsqueeze(1)
    query_rows = q.shape[1]
    positions = options.pop("query_positions", None)
    if positions is not None:
        tree = "tree" in options
        first = torch.tensor([rng.randint(-3 if tree else 0, 2 * rows + 2) for _ in range(batch)])
        positions = first[:, None].clamp(min=0) + torch.arange(query_rows)
        if tree:
            positions = torch.randint(0, 2 * rows + 2, (batch, query_rows), generator=_generator(rng))
        options["query_positions"] = positions
    if case.v_scale is not None and not bool((case.v_scale.isfinite() & (case.v_scale != 0)).all()):
        case.v_scale = torch.where(case.v_scale == 0, torch.inf, case.v_scale)
    form = rng.choice((OutputForm.PARTIAL, *OutputForm))
    select = None
    if rng.random() < 0.3:
        select = rng.choice((1, 2, 3, 1 << 20))
    return VariantJob(
        Case(q, case.k, case.v, options, case.v_scale, case.name), form,
        rng.choice((4, 8, 16, 64)), rng.random() < 0.7, select, seed,
    )  # fmt: skip


def _generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(32))


class Bench:
    """Runs calls on a device and holds what comes back against the reference.

    Parameters
    ----------
    port : the device.
    partly : whether it may refuse a call for want of a feature.
    """

    def __init__(self, port, *, partly: bool = False) -> None:
        self.host = RawHost(port)
        self.partly = partly

    def check(self, job: VariantJob) -> Status:
        """All jobs of a call, one for each sequence and KV head, have the reference's bits.

        Returns OK, or the status with which the call's first job was refused.
        """
        case, text = (
            job.case,
            f"seed {job.seed!r}: {job.case.describe()} {job.form!r} {job.page_rows} rows a page",
        )
        text += f" short {job.short} select {job.select_pages}"
        batch, _, kv_heads, _ = case.k.shape
        q_heads = case.q.shape[2]
        group = q_heads // kv_heads
        options, chosen = dict(case.options), None
        summaries = None
        if job.select_pages is not None:
            given = {name: options[name] for name in K_OPTIONS if name in options}
            summaries = page_summaries(case.k, page_rows=job.page_rows, **given)
            sees = case.sees().any(2)
            pages = -(-job.rows // job.page_rows)
            padded = torch.nn.functional.pad(sees, (0, pages * job.page_rows - job.rows))
            may = padded.view(batch, kv_heads, pages, job.page_rows).any(-1)[:, 0]
            picked = select_pages(
                case.q, summaries, scale=options["scale"], count=job.select_pages, candidates=may,
                k_scale=options.get("k_scale"), softcap=options.get("softcap"),
            )  # fmt: skip
            options |= {"pages": picked.pages, "page_rows": job.page_rows}
            chosen = picked.numbers()
        want = decode_attention(case.q, case.k, case.v, partial=True, **options)
        for b in range(batch):
            for head in range(kv_heads):
                record, lines, selected = self._run(job, b, head, summaries)
                if self.partly and record["status"] in REFUSALS and (b, head) == (0, 0):
                    return Status(record["status"])
                assert record["status"] == 0, (record, text)
                heads = slice(head * group, (head + 1) * group)
                own = _picked(want, b, heads)
                self._hold(
                    job, own, lines, None if case.v_scale is None else case.v_scale[head : head + 1], text
                )
                if chosen is not None:
                    assert selected == chosen[b][head], text
        return Status.OK

    def _hold(self, job: VariantJob, own: Partial, lines, v_scale, text: str) -> None:
        shape = (job.query_rows, own.query_nan.shape[2])
        results = lines.reshape(1, shape[0] * shape[1], -1, LINE_BYTES)
        flat = _flattened(own)
        if job.form is OutputForm.PARTIAL:
            found = partial_of(Finished(results, completions=None), job.case.lanes)
            assert found.equal(flat), text
            return
        expected = finish(flat, FORMS[job.form], v_scale)
        size = job.form.lane_bytes
        got = results.reshape(*results.shape[:2], -1)[..., : job.case.lanes * size].copy().view(f"<i{size}")
        assert np.array_equal(got, expected.view(torch.int32 if size == 4 else torch.int16)), text

    def _run(self, job: VariantJob, b: int, head: int, summaries):
        """Post one job: its completion record, its result lines and the pages that it selected."""
        case, host, options = job.case, self.host, job.case.options
        stored = [self._stored(job, name) for name in ("k", "v")]
        latent = case.v is None
        layout = RowLayout(
            case.k.shape[3], case.lanes, job.page_rows, stored[0], None if latent else stored[1], latent,
            job.select_pages is not None,
        )  # fmt: skip
        q = case.q[b, :, head * (case.q.shape[2] // case.k.shape[2]) :][
            :, : case.q.shape[2] // case.k.shape[2]
        ]
        group = q.shape[1]
        table = self._place_table(job, layout, b, head, summaries)
        query_bytes = layout.query_lines * LINE_BYTES
        queries = np.full((job.query_rows * group, query_bytes), 0xFF, np.uint8)
        codes = np.ascontiguousarray(q.contiguous().view(torch.int16).numpy().reshape(len(queries), -1))
        queries[:, : 2 * codes.shape[1]] = codes.view(np.uint8)
        heads = slice(head * group, (head + 1) * group)
        result = ResultLayout(case.lanes, job.form)
        flags, sinks = 0, 0
        if options.get("sinks") is not None:
            flags |= abi.FLAG_SINKS
            sinks = host.place(options["sinks"][heads].numpy().tobytes())
        more = self._extension(job, layout, b, head, heads)
        if any(more.values()) or job.query_rows > 1:
            flags |= abi.FLAG_EXTENDED
        size = len(queries) * result.lines * LINE_BYTES
        address = host.allocate(size)
        scale = 0
        if case.v_scale is not None and job.form is not OutputForm.PARTIAL:
            scale = float32_bits(float(case.v_scale[head]))
        fields = {
            "version": abi.DESCRIPTOR_VERSION,
            "opcode": Opcode.ATTEND,
            "flags": flags,
            "table": table,
            "queries": host.place(queries.tobytes()),
            "result": address,
            "sinks": sinks,
            "row_begin": 0,
            "row_end": job.rows,
            "score_factor": int(_factors(case)[head]) & 0xFFFFFFFF,
            "output_scale": scale,
            "head_dim": layout.head_dim,
            "value_dim": layout.value_dim,
            "group": group,
            "query_rows": job.query_rows,
            "page_rows_log2": job.page_rows.bit_length() - 1,
            "k_format": layout.k.element.code,
            "v_format": 0 if latent else layout.value.element.code,
            "query_format": next(f.code for f in QUERY_FORMATS.values() if _TYPES[f.name] == case.q.dtype),
            "output_form": job.form,
            "kv_head": 0,
        }
        record = host.post_extended(abi.ATTEND.pack_bytes(fields), abi.EXTENSION.pack_bytes(more))
        lines = np.frombuffer(host.read(address, size), np.uint8)
        selected = None
        if more["selected"]:
            words = np.frombuffer(host.read(more["selected"] * LINE_BYTES, self._selected_bytes), "<u4")
            selected = words[1 : 1 + int(words[0])].tolist()
        return record, lines, selected

    def _extension(self, job: VariantJob, layout: RowLayout, b: int, head: int, heads: slice):
        """The fields of the extension, with the lists that they name in memory; all zero for a plain job."""
        host, options = self.host, job.case.options
        more = {field.name: 0 for field in abi.EXTENSION}
        more |= {
            "k_scale": layout.k.scale_code,
            "k_block": layout.k.block_code,
            "k_pitch": layout.k.pitch_code(layout.head_dim),
        }
        if layout.latent:
            more["options"] |= abi.OPTION_LATENT
        else:
            more |= {
                "v_scale": layout.value.scale_code,
                "v_block": layout.value.block_code,
                "v_pitch": layout.value.pitch_code(layout.value_dim),
            }
        if options.get("softcap") is not None:
            more["softcap"] = softcap_bits(options["softcap"])
        if options.get("causal"):
            more["options"] |= abi.OPTION_CAUSAL
        if options.get("window") is not None:
            more |= {"window": min(options["window"], (1 << 24) - 1), "kept": options.get("kept_rows", 0)}
        positions = options.get("query_positions")
        own = torch.arange(job.rows - job.query_rows, job.rows) if positions is None else positions[b]
        if options.get("tree") is not None:
            more["options"] |= abi.OPTION_TREE
            tree = options["tree"] if options["tree"].dim() == 2 else options["tree"][b]
            if own.min() < 0:
                own = own.clamp(min=0)
            data = own.numpy().astype("<u4").tobytes()
            data = data.ljust(lines_of(len(data)) * LINE_BYTES, b"\xff")
            masks = np.ones((job.query_rows, 256), np.uint8)
            masks[:, : job.query_rows] = tree.numpy()
            data += np.packbits(masks, axis=1, bitorder="little").tobytes()
            more["tree"] = host.place(data) // LINE_BYTES
        elif options.get("causal") or more["window"] or options.get("alibi_slopes") is not None:
            more["first_position"] = int(own[0])
        if options.get("alibi_slopes") is not None:
            more["options"] |= abi.OPTION_ALIBI
            slopes = [alibi_bits(slope) for slope in options["alibi_slopes"][heads].tolist()]
            more["slopes"] = host.place(np.array(slopes, "<u4").tobytes()) // LINE_BYTES
        if "ranges" in options:
            more["options"] |= abi.OPTION_RANGES
            ranges = _joined(options["ranges"][b])
            more["range_count"] = len(ranges)
            if ranges:
                more["ranges"] = host.place(np.array(ranges, "<u4").tobytes()) // LINE_BYTES
        if "k_lut" in options or "v_lut" in options:
            more["options"] |= abi.OPTION_CODEBOOK
            books = [options.get(f"{name}_lut") for name in "kv"]
            data = b"".join(b"\xff" * 32 if x is None else x[head].numpy().tobytes() for x in books)
            more["codebooks"] = host.place(data) // LINE_BYTES
        if job.select_pages is not None:
            more["options"] |= abi.OPTION_SUMMARIES | abi.OPTION_SELECT
            more["select_pages"] = min(job.select_pages, (1 << 24) - 1)
            self._selected_bytes = 4 * (2 + -(-job.rows // job.page_rows))
            more["selected"] = host.allocate(self._selected_bytes) // LINE_BYTES
        return more

    def _stored(self, job: VariantJob, name: str) -> Stored:
        options, which = job.case.options, "kv".index(name)
        scales = options.get(f"{name}_scales")
        scale = SCALE_FORMATS[options["scale_format"][which]] if scales is not None else None
        block = options["scale_block"][which] if scales is not None else None
        form = options.get(f"{name}_format") or options["k_format"]
        return Stored(ROW_FORMATS[form], scale, block, job.short)

    def _place_table(self, job: VariantJob, layout: RowLayout, b: int, head: int, summaries) -> int:
        """Pages and page table of one head of a context."""
        case, host = job.case, self.host
        count = -(-job.rows // job.page_rows)
        pages = []
        for page in range(count):
            data = np.full(layout.page_bytes, 0xFF, np.uint8)
            rows = slice(page * job.page_rows, min((page + 1) * job.page_rows, job.rows))
            parts = [("k", 0)] if layout.latent else [("k", 0), ("v", 2)]
            for name, area in parts:
                codes = getattr(case, name)[b, rows, head]
                _put(data, layout.areas[area], layout.pitches[area], codes, _bits(layout, name))
                scales = case.options.get(f"{name}_scales")
                if scales is not None:
                    own = scales[b, rows, head]
                    _put(data, layout.areas[area + 1], layout.pitches[area + 1], own, 8 * own.element_size())
            if summaries is not None:
                pitch = layout.summary_lines * LINE_BYTES
                both = torch.stack([summaries.least[b, page, head], summaries.largest[b, page, head]])
                _put(data, layout.summary_offset, pitch, both, 16)
            pages.append(host.place(data.tobytes()))
        words = [ENTRY.pack(valid=1, line=page // LINE_BYTES) for page in pages]
        words += [0] * (table_entry_lines(count) * ENTRIES_PER_LINE - len(words))
        header = TABLE.pack_bytes(
            magic=TABLE_MAGIC, version=LAYOUT_VERSION, heads=1, entries=count, committed_rows=job.rows
        )
        return host.place(header + np.array(words, "<u8").tobytes())


_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _factors(case: Case) -> torch.Tensor:
    options = case.options
    return score_factors(options["scale"], options.get("k_scale"), options.get("softcap"), case.k.shape[2])


def _bits(layout: RowLayout, name: str) -> int:
    return (layout.k if name == "k" else layout.value).element.bits


def _put(data, offset: int, pitch: int, codes: torch.Tensor, bits: int) -> None:
    """Rows of codes at a pitch; two of 4 bits to a byte, the first in the low bits."""
    for row, values in enumerate(codes.contiguous()):
        raw = values.view(torch.int16).numpy() if bits == 16 else values.numpy()
        if bits == 4:
            raw = np.append(raw, np.zeros(len(raw) % 2, np.uint8))
            raw = raw[0::2] | raw[1::2] << 4
        raw = np.ascontiguousarray(raw).view(np.uint8)
        data[offset + row * pitch :][: len(raw)] = raw


def _joined(ranges) -> list[tuple[int, int]]:
    """The union of ranges, rising and disjoint."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if begin == end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _picked(partial: Partial, b: int, heads: slice) -> Partial:
    """One sequence and some heads of a partial [batch, query_rows, q_heads]."""

    def states(state: State) -> State:
        return State(*(x[b : b + 1, :, heads] for x in (state.top, state.high, state.low)))

    return Partial(
        states(partial.denominator), states(partial.numerators),
        partial.query_nan[b : b + 1, :, heads], partial.lane_flags[b : b + 1, :, heads],
    )  # fmt: skip


def _flattened(partial: Partial) -> Partial:
    """[1, query_rows, heads] as [1, queries], query row after query row."""

    def states(state: State) -> State:
        return State(*(x.flatten(1, 2) for x in (state.top, state.high, state.low)))

    return Partial(
        states(partial.denominator), states(partial.numerators),
        partial.query_nan.flatten(1, 2), partial.lane_flags.flatten(1, 2),
    )  # fmt: skip
