"""The model device as a host sees it: addresses, byte enables, tenants, windows, rings, registers."""

import numpy as np
import pytest
from nearkv_hw.abi import ABI_VERSION, LINE_BYTES, Status, configure, owner, window
from nearkv_hw.abi.config import EXTENT_BYTES
from nearkv_hw.abi.descriptor import COMPLETION
from nearkv_hw.abi.numerics import CONTRACT_VERSION
from nearkv_sim.model import ModelPort
from nearkv_sim.port import Access, DeviceTimeout, Fence, Poll, Read, Write
from rawhost import RawHost, claim_descriptor, factor_bits, nop_descriptor


def addresses(*values):
    return np.array(values, dtype=np.uint64)


def lines(seed, count):
    return np.random.default_rng(seed).integers(0, 256, (count, LINE_BYTES), dtype=np.uint8)


def test_writes_are_read_back(open_port):
    host = RawHost(open_port(), first_extent=3)
    where = addresses(*(host.allocate(LINE_BYTES) for _ in range(50)))[::-1]
    data = lines(1, 50)
    [result] = host.port.run([Write(where, data), Fence(), Read(where)])
    assert (result.data == data).all()
    assert (result.access == Access.DATA).all()


def test_byte_enables(open_port):
    host = RawHost(open_port())
    address = host.allocate(LINE_BYTES)
    old, new = lines(1, 1), lines(2, 2)
    masks = np.array([0xF0F0, 1 << 63 | 1], dtype=np.uint64)
    where = addresses(address, address)
    [result] = host.port.run([Write(where[:1], old), Write(where, new, masks), Read(where[:1])])
    want = old[0].copy()
    for mask, line in zip(masks.tolist(), new, strict=True):
        for byte in range(LINE_BYTES):
            if mask >> byte & 1:
                want[byte] = line[byte]
    assert (result.data[0] == want).all()


def test_nothing_outside_the_apertures(open_port):
    port = open_port()
    config, host = port.config, RawHost(port)
    base = window.window_base(config, 0)
    where = addresses(
        base + owner.OWNER_OFFSET + owner.OWNER_BYTES,
        config.aperture_bytes - LINE_BYTES,
        2 * config.aperture_bytes,
        2 * config.aperture_bytes + config.capacity_bytes,
        (1 << 52) - LINE_BYTES,
        (1 << 51) + LINE_BYTES,
    )
    before = host.counters()
    [result] = port.run([Write(where, lines(1, 6)), Fence(), Read(where)])
    assert (result.access == Access.OUTSIDE).all()
    assert not result.data.any()
    after = host.counters()
    assert after["outside_reads"] == before["outside_reads"] + 6
    assert after["outside_writes"] == before["outside_writes"] + 6
    assert after["violations"] == before["violations"]


def test_tenants_do_not_see_each_other(open_port):
    port = open_port()
    first, second = RawHost(port, 0), RawHost(port, 1, first_extent=8)
    mine, theirs = first.allocate(EXTENT_BYTES), second.allocate(EXTENT_BYTES)
    first.write(mine, bytes(range(64)))
    second.write(theirs, bytes(range(64, 128)))
    before = first.counters()
    for host, address in ((first, theirs), (second, mine), (first, 20 * EXTENT_BYTES)):
        host.write(address, bytes(64))
        result = host.access(address)
        assert result.access.tolist() == [Access.OUTSIDE]
        assert not result.data.any()
    after = first.counters()
    assert after["violations"] == before["violations"] + 6
    assert after["outside_reads"] == before["outside_reads"]
    assert first.read(mine, 64) == bytes(range(64))
    assert second.read(theirs, 64) == bytes(range(64, 128))


def test_rings_of_tenants_are_apart(open_port):
    port = open_port()
    first, second = RawHost(port, 0), RawHost(port, 1)
    assert [record["tag"] for record in first.post(nop_descriptor(1), nop_descriptor(2))] == [1, 2]
    assert second.register(window.RING_LINE, window.RING)["tail"] == 0
    assert [record["tag"] for record in second.post(nop_descriptor(3))] == [3]
    assert first.register(window.RING_LINE, window.RING)["completed"] == 2
    assert second.register(window.IDENTITY_LINE, window.IDENTITY)["aperture"] == 1
    assert first.counters()["jobs"] == 3


def test_ring_wraps(open_port):
    host = RawHost(open_port(ring_slots=4))
    for lap in range(5):
        for count in (1, 4, 3, 2):
            records = host.post(*(nop_descriptor(100 * lap + n) for n in range(count)))
            assert [record["tag"] for record in records] == [100 * lap + n for n in range(count)]
            assert {record["status"] for record in records} == {Status.OK}
    state = host.register(window.RING_LINE, window.RING)
    assert state["tail"] == state["head"] == state["completed"] == 50


def test_second_host_goes_on_where_the_first_stopped(open_port):
    port = open_port(ring_slots=4)
    RawHost(port).post(*[nop_descriptor()] * 3)
    again = RawHost(port)
    assert again.posted == 3
    assert [record["tag"] for record in again.post(nop_descriptor(8), nop_descriptor(9))] == [8, 9]


def test_bad_doorbells_are_refused(open_port):
    host = RawHost(open_port(ring_slots=4))
    for tail in (5, 0xFFFFFFFF):
        errors = host.counters()["errors"]
        host.port.run([host.doorbell(tail)])
        assert host.counters()["errors"] == errors + 1
    bell = host.doorbell(1)
    host.port.run([Write(bell.addresses, bell.data, np.array([0b0111], dtype=np.uint64))])
    assert host.register(window.RING_LINE, window.RING)["tail"] == 0
    assert host.counters()["jobs"] == 0
    assert host.post(nop_descriptor(5))[0]["tag"] == 5
    errors = host.counters()["errors"]
    host.port.run([host.doorbell(0)])  # back
    assert host.register(window.RING_LINE, window.RING)["tail"] == 1
    assert host.counters()["errors"] == errors + 1


def test_posted_but_not_written_descriptor_is_bad(open_port):
    host = RawHost(open_port())
    record = window.completion_address(host.config, 0, 0)
    [result] = host.port.run([host.doorbell(1), Poll(record, 1, 1), Read(addresses(record))])
    assert COMPLETION.unpack(result.data.tobytes())["status"] == Status.BAD_VERSION


def test_what_of_the_window_can_be_written(open_port):
    port = open_port(ring_slots=4)
    config = port.config
    base = window.window_base(config, 0)
    descriptor = window.descriptor_address(config, 0, 1)
    record = window.completion_address(config, 0, 1)
    readable = addresses(descriptor, descriptor + LINE_BYTES)
    dropped = addresses(
        base,
        base + 2 * LINE_BYTES,
        base + window.DOORBELL_OFFSET + LINE_BYTES,
        record,
        window.descriptor_address(config, 0, 3) + 2 * LINE_BYTES,
        base + window.COMPLETIONS_OFFSET + 4 * LINE_BYTES,
    )
    before = port.run([Read(dropped)])[0]
    assert (before.access == Access.DATA).all()
    data = lines(1, 2)
    half = np.array([0xFFFFFFFF] * 2, dtype=np.uint64)
    writes = Write(dropped, lines(2, len(dropped))), Write(readable, data, half)
    results = port.run([*writes, Fence(), Read(dropped), Read(readable)])
    assert (results[0].data == before.data).all()
    assert (results[1].data[:, :32] == data[:, :32]).all()
    assert not results[1].data[:, 32:].any()


def test_identity(open_port):
    port = open_port(channels=4, queries=8, apertures=3, memory_latency_cycles=77)
    identity = RawHost(port, 2).register(window.IDENTITY_LINE, window.IDENTITY)
    assert identity["magic"] == window.MAGIC
    assert (identity["abi_version"], identity["contract_version"]) == (ABI_VERSION, CONTRACT_VERSION)
    assert (identity["aperture"], identity["apertures"]) == (2, 3)
    for name in ("channels", "lanes", "queries", "finish_lanes", "ring_slots", "capacity_bytes", "clock_mhz"):
        assert identity[name] == getattr(port.config, name)
    assert identity["memory_latency_cycles"] == 77


def test_options(open_port):
    assert RawHost(open_port(), 0).register(window.OPTIONS_LINE, window.OPTIONS)["hdm_decoders"] == 0
    port = open_port(hdm_decoders=8)
    assert RawHost(port, 1).register(window.OPTIONS_LINE, window.OPTIONS)["hdm_decoders"] == 8


def test_a_reset_takes_decoders_back(open_port):
    port = open_port(hdm_decoders=2)
    decoders = port.maintenance.decoders
    address = np.array([window.register_address(port.config, 0, window.IDENTITY_LINE)], np.uint64)
    decoders.dvsec = [(1 << 40, port.config.address_bytes)]
    assert port.run([Read(address)])[0].access.tolist() == [Access.OUTSIDE]
    assert port.run([Read(address + np.uint64(1 << 40))])[0].access.tolist() == [Access.DATA]
    port.reset()
    assert port.run([Read(address)])[0].access.tolist() == [Access.DATA]


def test_counters_of_a_job(open_port):
    port = open_port()
    host = RawHost(port)
    rng = np.random.default_rng(3)
    k, v = (rng.integers(0, 0x4000, (64, 70), dtype=np.uint16) for _ in range(2))
    table = host.table([k], [v], page_rows=16)
    job = host.job(table, k[:5], factor=factor_bits(0.1), begin=8)

    def channel(n):
        return host.register(window.CHANNEL_COUNTERS_LINE + n, window.CHANNEL_COUNTERS)

    before, cycles = [channel(n) for n in range(2)], host.counters()["cycles"]
    [record] = host.post(job.descriptor())
    after = [channel(n) for n in range(2)]
    # 2 passes of 56 rows, 3 lines of K and of V each; pages 0 and 2 lie in channel 0
    assert (record["passes"], record["lines"]) == (2, 2 * 56 * 6)
    assert [a["unit_lines"] - b["unit_lines"] for a, b in zip(after, before, strict=True)] == [288, 384]
    beats = 4 * (1 + 35) + 1 + (1 + 35) + 1
    assert [a["partial_beats"] - b["partial_beats"] for a, b in zip(after, before, strict=True)] == [
        beats
    ] * 2
    assert sum(a["fabric_writes"] - b["fabric_writes"] for a, b in zip(after, before, strict=True)) == 5 * 26
    assert record["cycles"] >= 384
    assert host.counters()["cycles"] >= cycles + 384


def test_link_bytes(open_port):
    port = open_port()
    where = addresses(0, 64, 128)
    before = port.link_bytes
    port.run([Read(where), Write(where, lines(1, 3)), Poll(window.window_base(port.config, 0), 0, 0)])
    assert port.link_bytes - before == 7 * LINE_BYTES


def test_poll_in_vain(open_port):
    port = open_port()
    record = window.completion_address(port.config, 0, 0)
    with pytest.raises(DeviceTimeout, match="never equals 0x1"):
        port.run([Poll(record, 1, 1)])
    with pytest.raises(DeviceTimeout):
        port.run([Poll(5 * EXTENT_BYTES, 0, 0)])  # no memory that the tenant may see


def test_misaligned_addresses(open_port):
    port = open_port()
    for program in (
        [Read(addresses(64, 65))],
        [Write(addresses(32), lines(1, 1))],
        [Poll(8, 0, 0)],
        [Write(addresses(0, 64), lines(1, 1))],
    ):
        with pytest.raises(ValueError, match=r"multiple|must be"):
            port.run(program)


def test_closed(open_port, tmp_path):
    port = open_port()
    with pytest.raises(RuntimeError, match="rtl or cocotb"):
        port.start_wave(tmp_path / "wave.fst")
    port.close()
    port.close()
    with pytest.raises(RuntimeError, match="closed"):
        port.run([])


def test_address_space_costs_nothing():
    """A terabyte is opened, and its ends are used, on a host that has no such memory."""
    port = ModelPort(configure("card", dram="fixed", capacity_bytes=1 << 40, channels=16))
    host = RawHost(port)
    [record] = host.post(claim_descriptor(0, port.config.extents))
    assert record["status"] == Status.OK
    where = addresses(0, port.config.capacity_bytes // 2, port.config.capacity_bytes - LINE_BYTES)
    data = lines(4, 3)
    [result] = port.run([Write(where, data), Fence(), Read(where)])
    assert (result.data == data).all()
    port.close()
