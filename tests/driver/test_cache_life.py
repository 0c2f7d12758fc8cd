"""Caches over their life: what lies on the device, growth, reuse, and a second host that reads it all."""

import nearkv
import numpy as np
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from nearkv.device import Device
from nearkv_hw.abi import LINE_BYTES, DeviceConfig
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.formats import ELEMENT_FORMATS
from nearkv_hw.abi.memory import (
    CACHE,
    CACHE_MAGIC,
    ENTRY,
    LAYOUT_VERSION,
    ROOT,
    ROOT_MAGIC,
    TABLE,
    TABLE_MAGIC,
    RowLayout,
    table_entry_lines,
)
from nearkv_hw.abi.rows import Stored
from nearkv_sim.port import Access, Port, Read

STORAGE = {"element": "format", "scale": "scale", "block": "block", "pitch": "pitch"}


class SecondHost:
    """Another host of the same tenant: it knows the abi and reads the device, nothing else."""

    def __init__(self, port: Port, config: DeviceConfig, tenant: int = 0) -> None:
        self._port, self._config, self._base = port, config, tenant * config.aperture_bytes

    def lines(self, address: int, count: int) -> bytes:
        addresses = self._base + address + np.arange(count, dtype=np.uint64) * np.uint64(LINE_BYTES)
        (result,) = self._port.run([Read(addresses)])
        assert not result.access.any()
        return result.data.tobytes()

    def caches(self) -> list[dict[str, int]]:
        """The tenant's cache records, from the root on."""
        firsts = self._base + np.arange(self._config.extents, dtype=np.uint64) * np.uint64(EXTENT_BYTES)
        (result,) = self._port.run([Read(firsts)])
        first = int(np.flatnonzero(result.access == Access.DATA)[0])
        root = ROOT.unpack(self.lines(first * EXTENT_BYTES, 1))
        assert (root["magic"], root["version"]) == (ROOT_MAGIC, LAYOUT_VERSION)
        records, address = [], root["first_cache"]
        while address:
            record = CACHE.unpack(self.lines(address, 1))
            assert (record["magic"], record["version"]) == (CACHE_MAGIC, LAYOUT_VERSION)
            records.append({**record, "address": address})
            address = record["next"]
        return records

    def rows(self, record: dict[str, int], slot: int, layer: int) -> tuple[list, list] | None:
        """K and V codes of a sequence: [rows][heads][elements]; None when the slot is free."""
        index = slot * record["layers"] + layer
        line = self.lines(record["directory"] + index * 8 // LINE_BYTES * LINE_BYTES, 1)
        table = int.from_bytes(line[index % 8 * 8 :][:8], "little")
        if not table:
            return None
        header = TABLE.unpack(self.lines(table, 1))
        assert (header["magic"], header["version"]) == (TABLE_MAGIC, LAYOUT_VERSION)
        assert (header["heads"], header["layer"]) == (record["kv_heads"], layer)
        assert (header["sequence"], header["cache"]) == (slot, record["address"])
        storage = [
            Stored.of(**{what: record[f"{part}_{name}"] for what, name in STORAGE.items()}) for part in "kv"
        ]
        sizes = record["head_dim"], record["value_dim"], 1 << record["page_rows_log2"]
        layout = RowLayout(*sizes, *storage, bool(record["latent"]), bool(record["summaries"]))
        k, v = [], []
        for row in range(header["committed_rows"]):
            k.append([])
            v.append([])
            for head in range(header["heads"]):
                page, within = divmod(row, layout.page_rows)
                entries = table + (1 + head * table_entry_lines(header["entries"])) * LINE_BYTES
                raw = self.lines(entries + page // 8 * LINE_BYTES, 1)[page % 8 * 8 :][:8]
                entry = ENTRY.unpack(raw)
                assert entry["valid"] == 1
                base = entry["line"] * LINE_BYTES
                for rows, offset, pitch, dim in (
                    (k, layout.k_offset(within), layout.k_pitch_bytes, layout.head_dim),
                    (v, layout.v_offset(within), layout.v_pitch_bytes, layout.value_dim),
                ):
                    first = offset % LINE_BYTES
                    data = self.lines(base + offset - first, -(-(first + pitch) // LINE_BYTES))
                    data = np.frombuffer(data[first : first + pitch], np.int16)
                    assert not data[dim:].any(), "padding is zero"
                    rows[-1].append(data[:dim].tolist())
        return k, v


def codes(tensor: torch.Tensor) -> list:
    return tensor.view(torch.int16).tolist()


@pytest.mark.parametrize("tenant", [0, 1])
def test_a_second_host_finds_everything(model, tenant):
    """Two caches, many sequences, tables and a directory that grew and moved: all is found from the root."""
    shapes = [
        {"layers": 2, "kv_heads": 2, "head_dim": 40, "value_dim": 8, "page_rows": 4, "dtype": "fp16"},
        {"layers": 1, "kv_heads": 1, "head_dim": 8, "page_rows": 16, "dtype": "bf16"},
    ]
    model.kv_cache(layers=1, kv_heads=1, head_dim=8, tenant=1 - tenant)
    first, second = (model.kv_cache(**shape, tenant=tenant) for shape in shapes)
    wanted = {}
    for number in range(10):
        handle = first.sequence()
        for layer in range(2):
            k, v = context(50 if number == 9 else number, 2, 40, 8, seed=10 * number + layer)
            for part in (slice(0, 3), slice(3, None)):
                first.append(handle, layer=layer, k=k[part], v=v[part])
            wanted[handle.slot, layer] = k, v
    gone = first.sequence()
    first.free(gone)
    filled(second, [context(5, 1, 8, 8, seed=3, dtype=torch.bfloat16)])
    host = SecondHost(model._port, model.config, tenant)
    newer, older = host.caches()
    assert older["sequences"] == 16
    assert older["k_format"] == older["v_format"] == ELEMENT_FORMATS["fp16"].code
    assert [older[n] for n in ("layers", "kv_heads", "head_dim", "value_dim")] == [2, 2, 40, 8]
    assert newer["k_format"] == ELEMENT_FORMATS["bf16"].code
    for (slot, layer), (k, v) in wanted.items():
        assert host.rows(older, slot, layer) == (codes(k), codes(v))
    assert host.rows(older, gone.slot, 0) is None
    second.close()
    assert [record["address"] for record in host.caches()] == [older["address"]]
    second = model.kv_cache(**shapes[1], tenant=tenant)
    first.close()
    assert len(host.caches()) == 1
    second.close()
    assert host.caches() == []


def test_rows_exist_only_once_committed(model):
    """The header line is written after a fence, in a write that carries nothing else of the append."""
    with model.kv_cache(layers=1, kv_heads=2, head_dim=16, dtype="fp16", page_rows=4) as kv:
        (handle,) = filled(kv, [context(3, 2, 16, 16, seed=1)])
        programs = []
        run = model._port.run
        model._port.run = lambda program: programs.append(program) or run(program)
        try:
            kv.append(handle, layer=0, **dict(zip("kv", context(2, 2, 16, 16, seed=2), strict=True)))
        finally:
            del model._port.run
        header = kv._tenant.host(handle._tables[0].address)
        ((*rows, fence, commit),) = programs
        assert all(header not in write.addresses for write in rows)
        assert type(fence).__name__ == "Fence"
        assert commit.addresses.tolist() == [header]


def test_growth_keeps_rows_and_one_write_moves_the_table(device):
    contexts = [context(70, 2, 8, 8, seed=1)]
    q = values(1, 2, 8, seed=3)
    with device.kv_cache(layers=1, kv_heads=2, head_dim=8, dtype="fp16", page_rows=4) as kv:
        handle = kv.sequence()
        addresses = set()
        k, v = contexts[0]
        for row in range(70):
            kv.append(handle, layer=0, k=k[row : row + 1], v=v[row : row + 1])
            addresses.add(handle._tables[0].address)
        assert len(addresses) == 3, "8, 16, 32 entries"
        out = kv.attend([handle], layer=0, q=q)
        read = kv.read(handle, layer=0)
    assert same_bits(read[0], k)
    assert same_bits(read[1], v)
    assert same_bits(out, expected(q, contexts, scale=8**-0.5))


def test_pages_of_a_sequence_rotate_over_the_channels(model):
    with model.kv_cache(layers=1, kv_heads=3, head_dim=8, dtype="fp16", page_rows=4) as kv:
        (handle,) = filled(kv, [context(21, 3, 8, 8, seed=1)])
        pages = handle._tables[0].page_addresses(0, 6)
        channel = pages // np.uint64(EXTENT_BYTES) % np.uint64(2)
        assert ((channel[:, 1:] + channel[:, :-1]) == 1).all()
        assert (channel.sum() * 2) == channel.size


def test_crop_fork_free_and_reset(device):
    k, v = context(30, 2, 8, 16, seed=1)
    more = context(5, 2, 8, 16, seed=5)
    with device.kv_cache(layers=2, kv_heads=2, head_dim=8, value_dim=16, dtype="fp16", page_rows=8) as kv:
        handle = kv.sequence()
        for layer in range(2):
            kv.append(handle, layer=layer, k=k, v=v)
        copy = kv.fork(handle)
        kv.crop(handle, 9)
        kv.append(handle, layer=0, k=more[0], v=more[1])
        assert [kv.length(handle, layer) for layer in range(2)] == [14, 9]
        assert same_bits(kv.read(handle, layer=0)[0], torch.cat([k[:9], more[0]]))
        assert same_bits(kv.read(copy, layer=1)[1], v)
        kv.crop(handle, 10, layer=0)
        kv.crop(handle, 9)
        assert [kv.length(handle, layer) for layer in range(2)] == [9, 9]
        kv.reset()
        assert kv.length(copy, 1) == 0
        assert kv.read(copy, layer=0)[0].shape == (0, 2, 8)
        kv.append(copy, layer=0, k=k, v=v)
        assert same_bits(kv.read(copy, layer=0)[0], k)
        kv.free(copy)
        assert kv.sequence().slot == copy.slot


def test_a_windowed_cache_rewinds(model):
    """A11: six rows, back to three, one more: the window of four sees those four, in every layer."""
    k, v = context(6, 1, 8, 8, seed=1)
    more = context(1, 1, 8, 8, seed=5)
    q = values(1, 2, 8, seed=9)
    with model.kv_cache(layers=2, kv_heads=1, head_dim=8, dtype="fp16", page_rows=4) as kv:
        handle = kv.sequence()
        for layer in range(2):
            kv.append(handle, layer=layer, k=k, v=v)
        kv.crop(handle, 3)
        rows = [torch.cat([old[:3], new]) for old, new in zip((k, v), more, strict=True)]
        for layer in range(2):
            kv.append(handle, layer=layer, k=more[0], v=more[1])
            assert kv.length(handle, layer) == 4
            found = kv.attend([handle], layer=layer, q=q, scale=0.3, window=4)
            assert same_bits(found, expected(q, [rows], scale=0.3))


def test_a_batch_is_appended_to_the_named_sequences_only(model):
    """E9: rows go to sequences 3 and 1, in that order; the others stay as they are."""
    with model.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16") as kv:
        handles = filled(kv, [context(2, 1, 8, 8, seed=n) for n in range(4)])
        before = [kv.read(h, layer=0)[0] for h in handles]
        k, v = values(2, 3, 1, 8, seed=8), values(2, 3, 1, 8, seed=9)
        kv.append([handles[3], handles[1]], layer=0, k=k, v=v)
        after = [kv.read(h, layer=0)[0] for h in handles]
    for i, new in ((3, k[0]), (1, k[1])):
        assert same_bits(after[i], torch.cat([before[i], new]))
    for i in (0, 2):
        assert same_bits(after[i], before[i])


def test_no_rows_are_no_change(model):
    with model.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16") as kv:
        (handle,) = filled(kv, [context(0, 1, 8, 8, seed=1)])
        assert kv.length(handle) == 0
        assert kv.read(handle, layer=0)[1].shape == (0, 1, 8)


def test_memory_is_used_again(model):
    """A thousand sequences one after the other take no more memory than the first."""
    with model.kv_cache(layers=2, kv_heads=2, head_dim=16, dtype="fp16") as kv:
        k, v = context(100, 2, 16, 16, seed=1)
        claimed = None
        for number in range(100):
            handle = kv.sequence()
            for layer in range(2):
                kv.append(handle, layer=layer, k=k, v=v)
            kv.free(handle)
            tail = kv._tenant.ring.posted
            claimed = tail if number == 0 else claimed
            assert tail == claimed
        assert kv._tenant._load == [0, 0]


def test_a_later_session_keeps_to_itself():
    """A new driver on a device in use goes on with the ring and leaves the earlier session's memory alone."""
    with nearkv.open("model") as device:
        kv = device.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16")
        contexts = [context(20, 1, 8, 8, seed=1)]
        (handle,) = filled(kv, contexts)
        q = values(1, 1, 8, seed=3)
        kv.attend([handle], layer=0, q=q)
        later = Device(device._port)
        other = later.kv_cache(layers=1, kv_heads=1, head_dim=8, dtype="fp16")
        out = other.attend(filled(other, contexts), layer=0, q=q)
        assert same_bits(out, expected(q, contexts, scale=8**-0.5))
        assert len(SecondHost(device._port, device.config).caches()) == 2
        assert same_bits(kv.read(handle, layer=0)[0], contexts[0][0])
        other.close()
        assert len(SecondHost(device._port, device.config).caches()) == 1
