"""Refused calls: the right error, a message that helps, and not a byte of the device changed."""

import math
from contextlib import suppress
from functools import partial

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import TamperingPort, context, filled, memory_image, same_bits, values
from nearkv.device import Device
from nearkv.errors import (
    AccessError,
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceTimeoutError,
    DtypeError,
    NearkvError,
    OutOfMemoryError,
    ProtocolError,
    ShapeError,
    UnknownHandleError,
    VersionError,
)
from nearkv_hw.abi import Feature, Status
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import COMPLETION
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    IDENTITY,
    register_address,
)
from nearkv_sim.port import Access, DeviceTimeout, Poll, Read, ReadResult


class Setting:
    """A cache with two filled sequences, a freed one, and one of another cache."""

    def __init__(self, device: Device) -> None:
        self.kv = device.kv_cache(layers=2, kv_heads=2, head_dim=8, value_dim=4, dtype="fp16", page_rows=4)
        self.a, self.b = filled(self.kv, [context(5, 2, 8, 4, seed=n) for n in (1, 2)])
        self.freed = self.kv.sequence()
        self.kv.free(self.freed)
        self.other = device.kv_cache(layers=2, kv_heads=2, head_dim=8, value_dim=4, dtype="fp16").sequence()

    def append(self, sequence="a", layer=0, k=None, v=None):
        sequence = getattr(self, sequence) if isinstance(sequence, str) else sequence
        k = values(1, 2, 8, seed=1) if k is None else k
        v = values(1, 2, 4, seed=2) if v is None else v
        self.kv.append(sequence, layer=layer, k=k, v=v)

    def attend(self, sequences=("a", "b"), layer=0, q=None, **options):
        sequences = [getattr(self, s) if isinstance(s, str) else s for s in sequences]
        q = values(len(sequences), 4, 8, seed=3) if q is None else q
        return self.kv.attend(sequences, layer=layer, q=q, **options)


some = partial(values, seed=1)

REFUSED = [
    # appending
    (ShapeError, r"k has shape \[1, 2, 7\], must have \[rows, 2, 8\]", lambda s: s.append(k=some(1, 2, 7))),
    (ShapeError, r"v has shape \[1, 3, 4\]", lambda s: s.append(v=some(1, 3, 4))),
    (ShapeError, "k has 2 rows and v has 1", lambda s: s.append(k=some(2, 2, 8))),
    (ShapeError, r"k has shape \[2, 8\]", lambda s: s.append(k=some(2, 8))),
    (DtypeError, "k is torch.bfloat16, the cache holds fp16; convert",
     lambda s: s.append(k=some(1, 2, 8).bfloat16())),
    (DtypeError, "v is torch.float32", lambda s: s.append(v=some(1, 2, 4).float())),
    (DtypeError, "k must be a torch tensor, not list", lambda s: s.append(k=[[1.0]])),
    (UnknownHandleError, "layer=2: the cache has layers 0 to 1", lambda s: s.append(layer=2)),
    (UnknownHandleError, "layer=-1", lambda s: s.append(layer=-1)),
    (UnknownHandleError, "layer=True", lambda s: s.append(layer=True)),
    (ClosedError, "sequence 2 was freed", lambda s: s.append("freed")),
    (UnknownHandleError, "belongs to another cache", lambda s: s.append("other")),
    (DtypeError, "a sequence is what", lambda s: s.append([3])),
    (ArgumentError, r"\[0, 1, 0\] names a sequence twice",
     lambda s: s.append([s.a, s.b, s.a], k=some(3, 1, 2, 8), v=some(3, 1, 2, 4))),
    (ShapeError, r"k has shape \[1, 1, 2, 8\], must have \[2, rows, 2, 8\]",
     lambda s: s.append([s.a, s.b], k=some(1, 1, 2, 8), v=some(2, 1, 2, 4))),
    (ShapeError, "no sequence", lambda s: s.append([], k=some(0, 1, 2, 8), v=some(0, 1, 2, 4))),
    (DtypeError, "k is a meta tensor", lambda s: s.append(k=some(1, 2, 8).to("meta"))),
    (DtypeError, "a batch is a list of sequences, not generator",
     lambda s: s.kv.append((n for n in [s.a]), layer=0, k=some(1, 1, 2, 8), v=some(1, 1, 2, 4))),
    # attending
    (ShapeError, r"q has shape \[2, 4, 9\], must have \[2, q_heads, 8\]",
     lambda s: s.attend(q=some(2, 4, 9))),
    (ShapeError, "q has 3 heads, must have a multiple of the cache's 2", lambda s: s.attend(q=some(2, 3, 8))),
    (ShapeError, "q has 0 heads", lambda s: s.attend(q=some(2, 0, 8))),
    (ShapeError, "no query rows", lambda s: s.attend(q=some(2, 0, 4, 8))),
    (ShapeError, r"must have \[2, q_heads, 8\]", lambda s: s.attend(q=some(3, 4, 8))),
    (DtypeError, "q is a meta tensor, must be a dense tensor with data",
     lambda s: s.attend(q=some(2, 4, 8).to("meta"))),
    (DtypeError, "q is torch.sparse_coo", lambda s: s.attend(q=some(2, 4, 8).to_sparse())),
    (DtypeError, "a batch is a list of sequences, not Sequence",
     lambda s: s.kv.attend(s.a, layer=0, q=some(1, 4, 8))),
    (DtypeError, "q is torch.float32", lambda s: s.attend(q=some(2, 4, 8).float())),
    (ShapeError, "no sequence", lambda s: s.attend([])),
    (ArgumentError, "scale=nan: must be finite", lambda s: s.attend(scale=math.nan)),
    (ArgumentError, "scale=inf", lambda s: s.attend(scale=math.inf)),
    (ArgumentError, "must be finite in float32", lambda s: s.attend(scale=1e39)),
    (ArgumentError, "scale='x': must be a number", lambda s: s.attend(scale="x")),
    (ArgumentError, "must be a number that a float can hold", lambda s: s.attend(scale=10**400)),
    (ArgumentError, "window=0: must be an integer from 1", lambda s: s.attend(window=0)),
    (ArgumentError, "window=1.5", lambda s: s.attend(window=1.5)),
    (ArgumentError, "0 <= begin <= end <= length", lambda s: s.attend(rows=(0, 6))),
    (ArgumentError, "0 <= begin <= end <= length", lambda s: s.attend(rows=[(0, 5), (3, 2)])),
    (ArgumentError, "0 <= begin <= end <= length", lambda s: s.attend(rows=(-1, 2))),
    (ArgumentError, "0 <= begin", lambda s: s.attend(q=some(2, 2, 4, 8), rows=(0, 6))),
    (ShapeError, r"must be \(begin, end\)", lambda s: s.attend(rows=[(0, 1), (0, 1), (0, 1)])),
    (ShapeError, r"rows=\(0\.5, 2\): must be \(begin, end\)", lambda s: s.attend(rows=(0.5, 2))),
    (ShapeError, r"rows=5: must be", lambda s: s.attend(rows=5)),
    (ShapeError, r"rows=\(2,\): must be", lambda s: s.attend(rows=(2,))),
    (ShapeError, r"of integers of 64 bits", lambda s: s.attend(rows=(0, 1 << 70))),
    (ShapeError, r"visible has shape \[2, 4\], must have \[2, 5\]",
     lambda s: s.attend(visible=torch.ones(2, 4, dtype=torch.bool))),
    (DtypeError, "visible must be a bool tensor, not torch.float32",
     lambda s: s.attend(visible=torch.ones(2, 5))),
    (ArgumentError, "rows or visible, not both",
     lambda s: s.attend(rows=(0, 1), visible=torch.ones(2, 5, dtype=torch.bool))),
    (ShapeError, r"sinks have shape \[3\], must have \[4\]", lambda s: s.attend(sinks=torch.zeros(3))),
    (DtypeError, "sinks must be a tensor of float32",
     lambda s: s.attend(sinks=torch.zeros(4, dtype=torch.float64))),
    (DtypeError, "out_dtype=torch.float64: must be one of", lambda s: s.attend(out_dtype=torch.float64)),
    (ArgumentError, "a partial has neither", lambda s: s.attend(partial=True, return_lse=True)),
    (ArgumentError, "a partial has neither", lambda s: s.attend(partial=True, out_dtype=torch.float16)),
    (UnknownHandleError, "layer=2", lambda s: s.attend(layer=2)),
    (ClosedError, "sequence 2 was freed", lambda s: s.attend(["freed"])),
    (UnknownHandleError, "another cache", lambda s: s.attend(["other"])),
    # both
    (ArgumentError, "twice", lambda s: s.kv.append_attend(
        [s.a, s.a], layer=0, k=some(2, 1, 2, 8), v=some(2, 1, 2, 4), q=some(2, 4, 8))),
    (ShapeError, "q has 3 heads", lambda s: s.kv.append_attend(
        [s.a], layer=0, k=some(1, 1, 2, 8), v=some(1, 1, 2, 4), q=some(1, 3, 8))),
    (ArgumentError, "softcap must be above 0", lambda s: s.kv.append_attend(
        [s.a], layer=0, k=some(1, 1, 2, 8), v=some(1, 1, 2, 4), q=some(1, 4, 8), softcap=-1.0)),
    (ArgumentError, "select_pages needs a cache with summaries", lambda s: s.attend(select_pages=1)),
    (ArgumentError, "query_positions go with a tree", lambda s: s.attend(query_positions=torch.zeros(1))),
    (ArgumentError, "kept_rows=2: they are rows that a window leaves", lambda s: s.attend(kept_rows=2)),
    (ShapeError, r"alibi_slopes have shape \[3\], must have \[4\]",
     lambda s: s.attend(alibi_slopes=torch.ones(3))),
    (ShapeError, r"tree has shape \[2, 2\], must have \[1, 1\]",
     lambda s: s.attend(tree=torch.ones(2, 2, dtype=torch.bool))),
    (ArgumentError, "no option return_lse", lambda s: s.kv.append_attend(
        [s.a], layer=0, k=some(1, 1, 2, 8), v=some(1, 1, 2, 4), q=some(1, 4, 8), return_lse=True)),
    (DtypeError, "a batch is a list", lambda s: s.kv.append_attend(
        (n for n in [s.a]), layer=0, k=some(1, 1, 2, 8), v=some(1, 1, 2, 4), q=some(1, 4, 8))),
    # the rest
    (ArgumentError, r"attend\(\) has no option 'scael'; there are scale", lambda s: s.attend(scael=1)),
    (ArgumentError, "rows=6: must be an integer from 0 to 5", lambda s: s.kv.crop(s.a, 6)),
    (ArgumentError, "rows=-1", lambda s: s.kv.crop(s.a, -1)),
    (ClosedError, "was freed", lambda s: s.kv.free(s.freed)),
    (ClosedError, "was freed", lambda s: s.kv.fork(s.freed)),
    (ClosedError, "was freed", lambda s: s.kv.length(s.freed)),
    (UnknownHandleError, "slot 7 of the cache has no sequence", lambda s: s.kv.sequence_at(7)),
    (UnknownHandleError, "slot None of the cache has no sequence", lambda s: s.kv.sequence_at(None)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=lambda p: p if isinstance(p, str) else "")
def test_refused_calls_change_nothing(model, error, message, call):
    setting = Setting(model)
    setting.attend()
    image, posted = memory_image(model), setting.kv._tenant.ring.posted
    with pytest.raises(error, match=message) as caught:
        call(setting)
    assert isinstance(caught.value, NearkvError)
    assert np.array_equal(memory_image(model), image)
    assert setting.kv._tenant.ring.posted == posted
    assert [setting.kv.length(s) for s in (setting.a, setting.b)] == [5, 5]
    setting.append()
    assert setting.kv.length(setting.a) == 6


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ArgumentError, "layers=0: must be an integer from 1", {"layers": 0}),
        (ArgumentError, "kv_heads=0", {"kv_heads": 0}),
        (ArgumentError, "kv_heads=4096", {"kv_heads": 4096}),
        (ArgumentError, "head_dim=1024: must be an integer from 1 to 1023", {"head_dim": 1024}),
        (ArgumentError, "value_dim=0", {"value_dim": 0}),
        (ArgumentError, "head_dim=8.0", {"head_dim": 8.0}),
        (ArgumentError, "page_rows must be a power of two from 4", {"page_rows": 12}),
        (ArgumentError, "page_rows must be a power of two from 4", {"page_rows": 2}),
        (ArgumentError, "use at most 1024 rows", {"page_rows": 8192, "head_dim": 256}),
        (DtypeError, "dtype='int7': a cache holds 'bf16', 'fp16', 'fp8', 'int8'", {"dtype": "int7"}),
        (DtypeError, "dtype=torch.float32", {"dtype": torch.float32}),
        (DtypeError, r"dtype=\[\]", {"dtype": []}),
        (UnknownHandleError, "tenant=2: the device has apertures 0 to 1", {"tenant": 2}),
    ],
)  # fmt: skip
def test_refused_caches(model, error, message, arguments):
    arguments = {"layers": 1, "kv_heads": 1, "head_dim": 8, **arguments}
    with pytest.raises(error, match=message):
        model.kv_cache(**arguments)
    assert model.stats().jobs == 0


REFUSED_BY_PLAIN_DEVICES = [
    ("K is fp8_e4m3: this model device has elements of bf16, fp16 only", {"dtype": "fp8"}),
    ("K is int8: this model device has", {"dtype": "q8_0"}),
    ("V is fp4_e2m1: this model device has elements of bf16, fp16 only",
     {"dtype": "fp16", "value_dtype": "mxfp4"}),
    ("K is lut4: this model device has elements of bf16, fp16 only", {"dtype": "lut4"}),
    ("latent.*: this model device has K and V rows of their own only", {"latent": True}),
    ("pages with summaries: this model device has pages without summaries only", {"summaries": True}),
    ("head_dim=257: must be an integer from 1 to 256", {"head_dim": 257}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "arguments"), REFUSED_BY_PLAIN_DEVICES, ids=str)
def test_caches_that_a_device_has_not_are_refused(plain_model, message, arguments):
    with pytest.raises(ArgumentError, match=message):
        plain_model.kv_cache(**{"layers": 1, "kv_heads": 1, "head_dim": 8, **arguments})
    assert plain_model.stats().jobs == 0


def test_scales_that_a_device_has_not_are_refused():
    with nearkv.open("model", features=Feature.NARROW) as device:
        with pytest.raises(
            ArgumentError, match="K has e8m0 scales along the row: this model device has no sca"
        ):
            device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="mxfp8")
        device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp8").close()


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"alibi_slopes": torch.ones(4)},
        {"tree": torch.ones(1, 1, dtype=torch.bool)},
    ],
    ids=str,
)
def test_variants_that_a_device_has_not_are_refused(plain_model, options):
    setting = Setting(plain_model)
    with pytest.raises(ArgumentError, match=f"this device has no {next(iter(options))}"):
        setting.attend(**options)


def test_what_the_host_would_do_is_no_single_program(plain_model):
    setting = Setting(plain_model)
    with pytest.raises(ArgumentError, match="use append and then attend"):
        setting.kv.append_attend(
            [setting.a], layer=0, k=some(1, 1, 2, 8), v=some(1, 1, 2, 4), q=some(1, 2, 4, 8)
        )
    assert setting.kv.length(setting.a) == 5


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ArgumentError, "dtype fp16 takes no scales|fp16 takes no scales",
         {"dtype": "fp16", "scale_dtype": "e8m0"}),
        (ArgumentError, "scales of lut4 must be e4m3, e8m0, not bf16",
         {"dtype": "lut4", "scale_dtype": "bf16"}),
        (ArgumentError, "block=7: must be 16, 32, 64, 128, or None",
         {"dtype": "int8", "scale_dtype": "fp16", "scale_block": 7}),
        (ArgumentError, "scale='fp32': there are", {"dtype": "int8", "scale_dtype": "fp32"}),
        (ArgumentError, "value_dtype='fp16': with latent=True", {"latent": True, "value_dtype": "fp16"}),
        (ArgumentError, "value_dim=9: must be an integer from 1 to 8", {"latent": True, "value_dim": 9}),
        (ArgumentError, "k_scale belongs to a scale per head; K of this cache has none",
         {"k_scale": torch.ones(1)}),
        (ArgumentError, "v_lut belongs to lut4; V of this cache has none", {"v_lut": torch.ones(1, 16)}),
        (ShapeError, r"k_scale has shape \[2\], must have \[1\] or \[1, 1\]",
         {"dtype": "fp8", "k_scale": torch.ones(2)}),
        (DtypeError, "k_scale must be a torch.float32 tensor",
         {"dtype": "fp8", "k_scale": torch.ones(1).half()}),
        (ArgumentError, "k_scale must be finite and above 0", {"dtype": "fp8", "k_scale": torch.zeros(1)}),
    ],
)  # fmt: skip
def test_formats_that_do_not_go_together(model, error, message, arguments):
    with pytest.raises(error, match=message):
        model.kv_cache(**{"layers": 1, "kv_heads": 1, "head_dim": 8, **arguments})
    assert model.stats().jobs == 0


def test_errors_are_built_in_ones_too():
    for error, kind in ((ShapeError, ValueError), (DtypeError, TypeError), (OutOfMemoryError, MemoryError),
                        (UnknownHandleError, LookupError), (ClosedError, ValueError)):  # fmt: skip
        assert issubclass(error, kind)
        assert issubclass(error, NearkvError)


def test_closed_things_say_so():
    device = nearkv.open("model")
    setting = Setting(device)
    closed = device.kv_cache(layers=1, kv_heads=1, head_dim=8)
    closed.close()
    closed.close()
    with pytest.raises(ClosedError, match="the KV cache is closed"):
        closed.sequence()
    device.close()
    device.close()
    for call in (setting.append, setting.attend, setting.kv.sequence, setting.kv.reset):
        with pytest.raises(ClosedError):
            call()
    for call in (device.stats, lambda: device.kv_cache(layers=1, kv_heads=1, head_dim=8)):
        with pytest.raises(ClosedError, match="the device is closed"):
            call()
    setting.kv.close()


# Exhausted memory

TINY = {"capacity_bytes": 2 * EXTENT_BYTES}


def full_cache(device: Device):
    """A cache with 32 KiB pages whose memory has no page left: (cache, sequence)."""
    kv = device.kv_cache(layers=1, kv_heads=1, head_dim=256, dtype="fp16", page_rows=32)
    sequence = kv.sequence()
    k, v = context(32, 1, 256, 256, seed=1)
    with suppress(OutOfMemoryError):
        while True:
            kv.append(sequence, layer=0, k=k, v=v)
    return kv, sequence


def test_appending_to_a_full_device_changes_nothing():
    with nearkv.open("model", **TINY) as device:
        kv, sequence = full_cache(device)
        length, image, load = kv.length(sequence), memory_image(device), list(kv._tenant._load)
        assert length > 0
        k, v = context(33, 1, 256, 256, seed=1)
        with pytest.raises(OutOfMemoryError, match="no room for 2 pages of 32768 bytes; free sequences"):
            kv.append(sequence, layer=0, k=k, v=v)
        assert np.array_equal(memory_image(device), image)
        assert kv.length(sequence) == length
        assert kv._tenant._load == load
        kv.crop(sequence, length - 32)
        kv.append(sequence, layer=0, k=k[:32], v=v[:32])
        assert same_bits(kv.read(sequence, layer=0)[0][-32:], k[:32])


def test_one_of_two_sequences_without_room_and_neither_grows():
    with nearkv.open("model", **TINY) as device:
        kv, sequence = full_cache(device)
        other = kv.sequence()
        length = kv.length(sequence)
        kv.crop(sequence, length - 32)
        image = memory_image(device)
        k, v = (torch.stack([rows] * 2) for rows in context(32, 1, 256, 256, seed=1))
        with pytest.raises(OutOfMemoryError):
            kv.append([sequence, other], layer=0, k=k, v=v)
        assert np.array_equal(memory_image(device), image)
        assert (kv.length(sequence), kv.length(other)) == (length - 32, 0)
        kv.append(other, layer=0, k=k[0], v=v[0])


def test_attending_without_room_for_results_changes_nothing():
    with nearkv.open("model", **TINY) as device:
        kv, sequence = full_cache(device)
        length, image = kv.length(sequence), memory_image(device)
        many = values(1, 1024, 256, seed=1)
        with pytest.raises(OutOfMemoryError, match="consecutive extents left"):
            kv.attend([sequence], layer=0, q=many)
        kv.crop(sequence, length - 1)
        k, v = context(1, 1, 256, 256, seed=1)
        before = memory_image(device)
        with pytest.raises(OutOfMemoryError):
            kv.append_attend([sequence], layer=0, k=k[None], v=v[None], q=many)
        assert np.array_equal(memory_image(device), before)
        assert kv.length(sequence) == length - 1
        assert image.shape == before.shape
        assert kv.attend([sequence], layer=0, q=many[:, :1]).isfinite().all()


def test_other_things_without_room():
    with nearkv.open("model", **TINY) as device:
        kv, sequence = full_cache(device)
        length = kv.length(sequence)
        copy = kv.fork(sequence, length - 1)
        pages = kv._pages.used
        with pytest.raises(OutOfMemoryError, match="no room for 1 pages"):
            kv.append(copy, layer=0, **dict(zip("kv", context(1, 1, 256, 256, seed=1), strict=True)))
        assert (kv.length(copy), kv._pages.used) == (length - 1, pages)
        with pytest.raises(OutOfMemoryError):
            device.kv_cache(layers=20_000, kv_heads=1, head_dim=8)
        with pytest.raises(OutOfMemoryError, match="other tenants own all 2 extents"):
            device.kv_cache(layers=1, kv_heads=1, head_dim=8, tenant=1)
        wide = device.kv_cache(layers=4, kv_heads=2000, head_dim=1)
        with suppress(OutOfMemoryError):
            while True:
                wide.sequence()
        arena = list(kv._tenant.arena._free)
        with pytest.raises(OutOfMemoryError, match="consecutive extents left"):
            wide.sequence()
        assert kv._tenant.arena._free == arena


# Devices that misbehave


def attend_on(port) -> torch.Tensor:
    device = Device(port)
    kv = device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16", page_rows=4)
    return kv.attend(filled(kv, [context(5, 1, 8, 8, seed=1)]), layer=0, q=values(1, 1, 8, seed=1))


def attending(program) -> bool:
    """Whether a program is an attention call: it waits, and reads results after that."""
    return any(isinstance(operation, Poll) for operation in program) and len(program) > 8


def waiting(program) -> bool:
    """Whether a program waits for a batch, or goes on waiting for it."""
    return any(isinstance(operation, Poll) for operation in program)


@pytest.mark.parametrize(
    ("status", "page"), [(Status.PAGE_DENIED, 3), (Status.POISON, 3), (Status.BAD_RANGE, None)]
)
def test_a_failed_job_names_status_and_page(status, page):
    def fail(program, results):
        if attending(program):
            record = COMPLETION.unpack(results[2].data[0].tobytes()) | {"status": status, "detail": 3}
            results[2].data[0] = np.frombuffer(COMPLETION.pack_bytes(record), np.uint8)
        return results

    with pytest.raises(
        DeviceError, match=f"1 of 1 jobs failed; the first .*KV head 0.* with {status.name}"
    ) as caught:
        attend_on(TamperingPort(fail))
    assert (caught.value.status, caught.value.page) == (status, page)


@pytest.mark.parametrize("change", [{"phase": 0}, {"tag": 7}])
def test_a_record_of_an_earlier_lap_is_refused(change):
    def stale(program, results):
        if attending(program):
            record = COMPLETION.unpack(results[2].data[0].tobytes()) | change
            results[2].data[0] = np.frombuffer(COMPLETION.pack_bytes(record), np.uint8)
        return results

    with pytest.raises(ProtocolError, match="are old, or the tags"):
        attend_on(TamperingPort(stale))


@pytest.mark.parametrize(("access", "poison"), [(Access.POISON, True), (Access.OUTSIDE, False)])
def test_a_result_that_cannot_be_read(access, poison):
    def lose(program, results):
        if attending(program):
            results[-1].access[0] = access
        return results

    with pytest.raises(AccessError, match="is poisoned" if poison else "outside") as caught:
        attend_on(TamperingPort(lose))
    assert caught.value.poison == poison


@pytest.mark.parametrize(
    ("failure", "error"), [(DeviceTimeout, DeviceTimeoutError), (KeyboardInterrupt, KeyboardInterrupt)]
)
def test_a_device_that_hangs_takes_no_more_work(failure, error):
    port = TamperingPort(lambda program, results: results)
    device = Device(port)
    kv = device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16")
    handles = filled(kv, [context(5, 1, 8, 8, seed=1)])
    q = values(1, 1, 8, seed=1)
    kv.attend(handles, layer=0, q=q)

    def hang(program, results):
        if waiting(program):
            raise failure("no answer")
        return results

    port.change = hang
    with pytest.raises(error, match="no answer"):
        kv.attend(handles, layer=0, q=q)
    port.change = lambda program, results: results
    with pytest.raises(ClosedError, match="an earlier batch never ended; take over what is committed"):
        kv.attend(handles, layer=0, q=q)


@pytest.mark.parametrize(
    ("layout", "line", "field"),
    [
        (DEVICE_COUNTERS, DEVICE_COUNTERS_LINE, "jobs"),
        (CHANNEL_COUNTERS, CHANNEL_COUNTERS_LINE + 1, "unit_lines"),
    ],
)
def test_other_tenants_work_may_take_its_time(layout, line, field):
    """A late batch is waited for as long as the device completes jobs or streams lines, and no longer."""
    waits, moved = [], 0
    port = TamperingPort(lambda program, results: results)
    device = Device(port)
    kv = device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16")
    handles = filled(kv, [context(5, 1, 8, 8, seed=1)])
    q = values(1, 1, 8, seed=1)
    expected = kv.attend(handles, layer=0, q=q)
    address = register_address(device.config, 0, line)

    def work_for_others(program, results):
        nonlocal moved
        if waiting(program):
            waits.append(program)
            if len(waits) <= 3:
                raise DeviceTimeout("busy")
            return results
        reads = [operation for operation in program if isinstance(operation, Read)]
        for read, result in zip(reads, results, strict=True):
            for at in np.flatnonzero(read.addresses == address):
                moved += 1
                values_now = layout.unpack(result.data[at].tobytes())
                values_now[field] += moved
                result.data[at] = np.frombuffer(layout.pack_bytes(values_now), np.uint8)
        return results

    port.change = work_for_others
    assert torch.equal(kv.attend(handles, layer=0, q=q), expected)
    assert len(waits) == 4
    address = -1  # nothing moves
    waits.clear()
    with pytest.raises(DeviceTimeoutError, match="the device does nothing any more \\(busy\\)"):
        kv.attend(handles, layer=0, q=q)
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("field", "message"),
    [("magic", "no nearkv device answers"), ("abi_version", "has abi_version 99, this driver knows 3"),
     ("contract_version", "has contract_version 99"), ("extent_shift", "has extent_shift 99")],
)  # fmt: skip
def test_a_device_of_another_version_is_refused(field, message):
    def other(program, results):
        line = IDENTITY.unpack(results[0].data[0].tobytes()) | {field: 99}
        return [ReadResult(np.frombuffer(IDENTITY.pack_bytes(line), np.uint8)[None], results[0].access)]

    with pytest.raises(VersionError, match=message):
        Device(TamperingPort(other))


def test_the_configuration_is_what_the_device_says():
    def eight(program, results):
        line = IDENTITY.unpack(results[0].data[0].tobytes()) | {"queries": 8, "dram": 2, "clock_mhz": 600}
        return [ReadResult(np.frombuffer(IDENTITY.pack_bytes(line), np.uint8)[None], results[0].access)]

    config = Device(TamperingPort(eight)).config
    assert (config.queries, config.clock_mhz, config.channels) == (8, 600, 2)
    assert config.to_dict()["dram"] == "ddr5_4800"


def test_a_shared_page_that_cannot_be_read_takes_no_rows():
    poisoned = False

    def poison(program, results):
        if poisoned and results:
            results[0].access[0] = Access.POISON
        return results

    device = Device(TamperingPort(poison))
    kv = device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16", page_rows=4)
    (handle,) = filled(kv, [context(3, 1, 8, 8, seed=1)])
    copy = kv.fork(handle)
    k, v = context(1, 1, 8, 8, seed=2)
    poisoned = True
    with pytest.raises(AccessError, match="is poisoned"):
        kv.append(copy, layer=0, k=k, v=v)
    assert (kv.length(copy), kv._pages.used, kv._pages.shared) == (3, 1, 1)
    poisoned = False
    kv.append(copy, layer=0, k=k, v=v)
    assert same_bits(kv.read(copy, layer=0)[0][3:], k)
    assert kv.length(handle) == 3


def test_rows_of_a_failed_call_are_there():
    """append_attend: after a DeviceError the rows are committed, on the device and in the mirror."""
    failing = False

    def fail(program, results):
        if failing and attending(program):
            record = COMPLETION.unpack(results[2].data[0].tobytes()) | {"status": Status.POISON}
            results[2].data[0] = np.frombuffer(COMPLETION.pack_bytes(record), np.uint8)
        return results

    device = Device(TamperingPort(fail))
    kv = device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16", page_rows=4)
    (handle,) = filled(kv, [context(31, 1, 8, 8, seed=1)])
    k, v = context(2, 1, 8, 8, seed=5)
    failing = True
    with pytest.raises(DeviceError):
        kv.append_attend([handle], layer=0, k=k[None], v=v[None], q=values(1, 1, 8, seed=1))
    failing = False
    assert kv.length(handle) == 33
    assert same_bits(kv.read(handle, layer=0)[0][-2:], k)
    kv.append_attend([handle], layer=0, k=k[None], v=v[None], q=values(1, 1, 8, seed=1))
    assert kv.length(handle) == 35
