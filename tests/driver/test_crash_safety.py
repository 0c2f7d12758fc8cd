"""A host dies anywhere in anything: a second one finds every committed row, no torn one, and no leak."""

import os
import random

import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from killing import HostDied, KillingPort
from leaks import no_leak
from nearkv.device import Device
from nearkv.errors import ProtocolError, VersionError
from nearkv.reference import page_summaries
from nearkv_hw.abi import LINE_BYTES, configure
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.memory import CACHE, ENTRY, TABLE
from nearkv_sim.model import ModelPort
from nearkv_sim.port import Read, Write

LAYERS, HEADS, DIM, PAGE = 2, 2, 8, 4
KILLS = int(os.environ.get("NEARKV_KILLS", "200"))
"""Points at which a host dies; more of them where the environment says so."""
SHAPE = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "fp16", "page_rows": PAGE}

KINDS = [
    "new",
    "append",
    "append",
    "append",
    "batch",
    "fork",
    "crop",
    "slide",
    "free",
    "beam",
    "publish",
    "drop",
]

Layer = tuple[torch.Tensor, tuple[int, int]]
"""K of all rows, of which V is the negative, and the released ones."""


class Host:
    """A session that does things at random and knows what the device should hold.

    Members
    -------
    rows : by slot, what each layer holds.
    before : the same before the step that is under way.
    """

    def __init__(self, port, seed: int, **options) -> None:
        self.device = Device(port)
        self.kv = self.device.kv_cache(**SHAPE, **options)
        self.random = random.Random(seed)
        self.rows: dict[int, list[Layer]] = {}
        self.prefixes: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        self.prefixes_before: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        self.published = 0
        self.before: dict[int, list[Layer]] = {}

    def step(self) -> None:
        """One operation; `rows` says what comes of it before the device hears of it."""
        self.prefixes_before = dict(self.prefixes)
        self.before = {slot: list(layers) for slot, layers in self.rows.items()}
        kind = self.random.choice(KINDS)
        if kind == "new" or not self.rows:
            self._expect_new([(torch.zeros(0, HEADS, DIM).half(), (0, 0))] * LAYERS)
            self.kv.sequence()
            return
        slot, layer = self.random.choice(sorted(self.rows)), self.random.randrange(LAYERS)
        handle = self.kv.sequence_at(slot)
        k, released = self.rows[slot][layer]
        if kind in ("append", "batch"):
            others = [s for s in self.rows if s != slot] if kind == "batch" else []
            slots = [slot, *self.random.sample(others, min(len(others), 2))]
            count = self.random.choice([1, 1, 2, 3, 9, 40])
            new = torch.randn(len(slots), count, HEADS, DIM, generator=self._generator()).half()
            for own, rows in zip(slots, new, strict=True):
                old, gone = self.rows[own][layer]
                self.rows[own][layer] = torch.cat([old, rows]), gone
            self.kv.append([self.kv.sequence_at(s) for s in slots], layer=layer, k=new, v=-new)
        elif kind == "fork":
            lengths = [len(own[0]) for own in self.rows[slot]]
            gone = [own[1] for own in self.rows[slot]]
            rows = self.random.choice([None, self.random.randint(0, max(lengths))])
            if rows is not None and any(
                a < rows < min(b, n) for (a, b), n in zip(gone, lengths, strict=True)
            ):
                rows = None
            self._expect_new([own if rows is None else cut(own, rows) for own in self.rows[slot]])
            self.kv.fork(handle, rows)
        elif kind == "crop":
            rows = self.random.choice([0, released[0], max(released[1], len(k) - 1), len(k)])
            if rows <= len(k) and not released[0] < rows < released[1]:
                self.rows[slot][layer] = cut((k, released), rows)
                self.kv.crop(handle, rows, layer)
        elif kind == "slide":
            before = self.random.randint(released[1], max(released[1], len(k)))
            if before <= len(k):
                kept = released[0] if released[1] else self.random.randint(0, min(before, 5))
                if kept < before:
                    self.rows[slot][layer] = k, (kept, before)
                self.kv.release(handle, before, kept_rows=kept, layer=layer)
        elif kind == "publish":
            self._publish(handle, self.rows[slot])
        elif kind == "drop":
            if self.kv.prefixes:
                gone = self.random.choice(self.kv.prefixes)
                self.prefixes.pop(gone.generation)
                self.kv.drop_prefix(gone)
        elif kind == "free":
            del self.rows[slot]
            self.kv.free(handle)
        else:
            slots = sorted(self.rows)
            chosen = [self.random.randrange(len(slots)) for _ in range(min(len(slots), 3))]
            for place, index in enumerate(chosen):
                if index in chosen[:place]:
                    self._expect_new(list(self.rows[slots[index]]))
            for index, own in enumerate(slots):
                if index not in chosen:
                    del self.rows[own]
            self.kv.select([self.kv.sequence_at(s) for s in slots], chosen)

    def _publish(self, handle, layers: list[Layer]) -> None:
        whole = [released[0] if released[1] else len(k) for k, released in layers]
        if not min(whole):
            return
        rows = self.random.randint(1, min(whole))
        tokens = [self.random.randrange(1 << 32) for _ in range(rows)]
        self.prefixes[self.published + 1] = tokens, [k[:rows] for k, _ in layers]
        self.kv.publish(handle, tokens)
        self.published += 1

    def _expect_new(self, layers: list[Layer]) -> None:
        slot = next(slot for slot in range(1000) if slot not in self.rows)
        self.rows[slot] = list(layers)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.random.randrange(1 << 30))


def cut(own: Layer, rows: int) -> Layer:
    k, released = own
    if rows >= len(k):
        return own
    return k[:rows], ((0, 0) if rows <= released[0] else released)


def found_in(kv, slot: int) -> list[Layer] | None:
    """What a second host reads of a slot."""
    handle = {one.slot: one for one in kv.sequences}.get(slot)
    if handle is None:
        return None
    layers = []
    for layer in range(LAYERS):
        k, v = kv.read(handle, layer=layer)
        assert same_bits(v, -k), "K and V of a row are of one append"
        table = handle._tables[layer]
        layers.append((k, table.released, kv.length(handle, layer)))
    return layers


def is_state(found, wanted: Layer) -> bool:
    k, released = wanted
    held = torch.ones(len(k), dtype=torch.bool)
    held[released[0] : released[1]] = False
    return found[1:] == (released, len(k)) and same_bits(found[0], k[held])


def check(kv, host: Host) -> None:
    """Every sequence and layer is as before or as after the step; memory is what they need, and no more."""
    for slot in {*host.before, *host.rows, *(one.slot for one in kv.sequences)}:
        found = found_in(kv, slot)
        allowed = [known.get(slot) for known in (host.before, host.rows)]
        if found is None:
            assert None in allowed, f"sequence {slot} is lost"
            continue
        for layer, own in enumerate(found):
            states = [layers[layer] for layers in allowed if layers is not None]
            assert any(is_state(own, state) for state in states), f"sequence {slot}, layer {layer} is torn"
    there = {prefix.generation: prefix for prefix in kv.prefixes}
    assert there.keys() >= host.prefixes_before.keys() & host.prefixes.keys(), "a prefix is lost"
    for generation, prefix in there.items():
        tokens, rows = {**host.prefixes_before, **host.prefixes}[generation]
        assert kv.find_prefix(tokens) == (prefix, len(tokens))
        handle = kv.fork_prefix(prefix)
        for layer in range(LAYERS):
            assert same_bits(kv.read(handle, layer=layer)[0], rows[layer])
        kv.free(handle)
    no_leak(kv)


@pytest.mark.parametrize("summaries", [False, True])
def test_a_host_that_dies_anywhere_leaves_what_was_committed(summaries):
    """200 random points, within an operation and between any two lines that it writes."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    died = 0
    for kill in range(KILLS // 2):
        device = ModelPort(configure("small", capacity_bytes=8 * EXTENT_BYTES))
        port = KillingPort(device, seed + kill)
        host = Host(port, seed + kill, summaries=summaries)
        for _ in range(host.random.randrange(1, 25)):
            host.step()
        port.left = host.random.randrange(40)
        try:
            while True:
                host.step()
        except HostDied:
            died += 1
        second = Device(device)
        (kv,) = second.attach()
        check(kv, host)
        survives(kv, second)
        device.close()
    assert died == KILLS // 2


def survives(kv, device) -> None:
    """The second host goes on: attention over what it found, more rows, and then the memory is free."""
    q = values(1, 2 * HEADS, DIM, seed=3)
    more = context(5, HEADS, DIM, DIM, seed=5)
    for handle in kv.sequences:
        for layer in range(LAYERS):
            before = kv.read(handle, layer=layer)
            kv.append(handle, layer=layer, k=more[0], v=more[1])
            rows = tuple(torch.cat(pair) for pair in zip(before, more, strict=True))
            assert same_bits(kv.read(handle, layer=layer)[0], rows[0])
            out = kv.attend([handle], layer=layer, q=q, scale=0.3)
            assert same_bits(out, expected(q, [rows], scale=0.3))
            if kv._layout.summaries:
                check_summaries(kv, handle._tables[layer], rows[0])
    no_leak(kv)
    kv.close()
    use = device.memory()
    assert use.pages == 0
    assert not device.attach()


def check_summaries(kv, table, k) -> None:
    """Each page's summary is that of the rows that it holds."""
    if table.released != (0, 0):
        return
    found = page_summaries(k[None], page_rows=PAGE)
    for page in range(table.pages):
        for head, base in enumerate(table.page_addresses(page, page + 1)[:, 0].tolist()):
            lines = kv._tenant.read(
                np.array([base, base + 64], np.uint64) + np.uint64(kv._layout.summary_offset)
            )
            least, largest = torch.from_numpy(lines.view(np.int16)[:, :DIM].copy())
            assert torch.equal(least, found.least[0, page, head])
            assert torch.equal(largest, found.largest[0, page, head])


def test_every_line_of_an_append_is_a_point(model):
    """One append to a page that is shared and full in the middle, killed after each of its lines in turn."""
    k = values(11, HEADS, DIM, seed=1)
    total = None
    kill = 0
    while total is None or kill < total:
        device = ModelPort(configure("small"))
        port = KillingPort(device, kill)
        kv = Device(port).kv_cache(**SHAPE)
        (handle,) = filled(kv, [(k[:6], -k[:6])])
        kv.fork(handle)
        port.written, port.left = 0, kill if total is not None else None
        try:
            kv.append(handle, layer=0, k=k[6:], v=-k[6:])
            total = port.written if total is None else total
        except HostDied:
            kill += 1
        (found,) = Device(device).attach()
        lengths = [found.length(one) for one in found.sequences]
        assert lengths[1] == 6
        assert lengths[0] in (6, 11)
        for one, length in zip(found.sequences, lengths, strict=True):
            assert same_bits(found.read(one, layer=0)[0], k[:length])
        no_leak(found)
        device.close()
    assert total > 10


@pytest.mark.parametrize("dtype", ["bf16", "int8", "q8_0", "q4_0", "fp8", "nvfp4", "mxfp4", "lut4"])
def test_a_second_host_knows_how_rows_are_stored(dtype):
    """Formats, rules, scales of heads and codebooks: what it appends is quantised as the first one's is."""
    rows = [values(n, 2, 64, seed=n).to(torch.bfloat16) for n in (7, 5)]
    kinds = {"layers": 2, "kv_heads": 2, "head_dim": 64, "page_rows": PAGE, "dtype": dtype}
    device = ModelPort(configure("small"))
    first = Device(device)
    kept, left = first.kv_cache(**kinds), first.kv_cache(**kinds)
    handles = [kept.sequence(), left.sequence()]
    for kv, handle in zip((kept, left), handles, strict=True):
        kv.append(handle, layer=0, k=rows[0], v=-rows[0])
    kept.append(handles[0], layer=0, k=rows[1], v=-rows[1])
    kept.append(handles[0], layer=1, k=rows[1], v=-rows[1])
    found = Device(device).attach()
    assert [kv.format for kv in found] == [left.format, kept.format]
    (handle,) = found[0].sequences
    found[0].append(handle, layer=0, k=rows[1], v=-rows[1])
    found[0].append(handle, layer=1, k=rows[1], v=-rows[1])
    for layer in range(2):
        for one, other in zip(
            found[0].read_codes(handle, layer=layer), kept.read_codes(handles[0], layer=layer), strict=True
        ):
            assert torch.equal(one.codes, other.codes)
            for own, wanted in (
                (one.scales, other.scales),
                (one.head_scale, other.head_scale),
                (one.codebook, other.codebook),
            ):
                assert (own is None) == (wanted is None)
                assert own is None or torch.equal(own, wanted)
        q = values(1, 4, 64, seed=9).to(torch.bfloat16)
        assert same_bits(
            found[0].attend([handle], layer=layer, q=q), kept.attend([handles[0]], layer=layer, q=q)
        )


def test_sessions_follow_each_other(device):
    """Three sessions of one tenant, each with what the one before left and caches of its own."""
    k = values(30, HEADS, DIM, seed=1)
    tenant = 1
    first = Device(device._port)
    for cache in first.attach(tenant):
        cache.close()
    filled(first.kv_cache(**SHAPE, tenant=tenant), [(k[:9], -k[:9])])
    second = Device(device._port)
    own = second.kv_cache(**SHAPE, tenant=tenant)
    filled(own, [(k[:5], -k[:5])])
    (found,) = second.attach(tenant)
    (handle,) = found.sequences
    found.append(handle, layer=0, k=k[9:], v=-k[9:])
    third = Device(device._port)
    newest, oldest = third.attach(tenant)
    assert [kv.length(kv.sequences[0]) for kv in (newest, oldest)] == [5, 30]
    assert same_bits(oldest.read(oldest.sequences[0], layer=0)[0], k)
    for kv in (newest, oldest):
        kv.close()
    assert third.attach(tenant) == []
    assert third.memory(tenant).pages == 0


def tampered(change):
    """A device whose only cache has one sequence of nine rows, with a line of its records changed."""
    port = ModelPort(configure("small"))
    kv = Device(port).kv_cache(**SHAPE)
    (handle,) = filled(kv, [(values(9, HEADS, DIM, seed=1),) * 2])
    address, layout, fields = change(kv, handle._tables[0])
    (result,) = port.run([Read(np.array([address], np.uint64))])
    data = np.frombuffer(layout.pack_bytes({**layout.unpack(result.data[0].tobytes()), **fields}), np.uint8)
    port.run([Write(np.array([address], np.uint64), data.reshape(1, LINE_BYTES))])
    return Device(port)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (
            VersionError,
            "no cache record of version",
            lambda kv, t: (kv._sequences._record, CACHE, {"version": 1}),
        ),
        (
            ProtocolError,
            "comes back to",
            lambda kv, t: (kv._sequences._record, CACHE, {"next": kv._sequences._record}),
        ),
        (VersionError, "no page table of version", lambda kv, t: (t.address, TABLE, {"magic": 1})),
        (ProtocolError, "has layer 1, not 0", lambda kv, t: (t.address, TABLE, {"layer": 1})),
        (ProtocolError, "lacks pages of rows", lambda kv, t: (t.address, TABLE, {"committed_rows": 13})),
    ],
)
def test_what_no_driver_leaves_is_not_taken_over(error, message, change):
    with pytest.raises(error, match=message):
        tampered(change).attach()


def test_entries_of_rows_that_never_were_are_gone():
    """A page table names no page that is free once a second host has it."""
    port = ModelPort(configure("small"))
    kv = Device(port).kv_cache(**SHAPE)
    (handle,) = filled(kv, [(values(9, HEADS, DIM, seed=1),) * 2])
    address = handle._tables[0].address
    (header,) = port.run([Read(np.array([address], np.uint64))])
    fields = {**TABLE.unpack(header.data[0].tobytes()), "committed_rows": 4}
    line = np.frombuffer(TABLE.pack_bytes(fields), np.uint8).reshape(1, LINE_BYTES)
    port.run([Write(np.array([address], np.uint64), line)])
    (found,) = Device(port).attach()
    assert found.length(found.sequences[0]) == 4
    (entries,) = port.run([Read(np.array([address + LINE_BYTES], np.uint64))])
    words = entries.data.view("<u8")[0].tolist()
    assert [ENTRY.unpack(word.to_bytes(8, "little"))["valid"] for word in words] == [1] + [0] * 7
