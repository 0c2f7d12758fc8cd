"""The command window: rings, doorbells, registers and completion records, for several apertures at once."""

from itertools import pairwise

import cocotb
import pytest
from nearkv_hw.abi import configure
from nearkv_hw.abi.descriptor import COMPLETION
from nearkv_hw.abi.owner import (
    AUDIT,
    AUDIT_LINE,
    OWNER_OFFSET,
    QUOTAS,
    QUOTAS_LINE,
    RECORD,
    RECORDS,
    RECORDS_LINE,
    WEIGHTS,
    WEIGHTS_LINE,
)
from nearkv_hw.abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    COMPLETIONS_OFFSET,
    DESCRIPTORS_OFFSET,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    DOORBELL_OFFSET,
    EXTENT_COUNTERS,
    EXTENT_COUNTERS_LINE,
    IDENTITY,
    IDENTITY_LINE,
    LINK_COUNTERS,
    LINK_COUNTERS_LINE,
    MAGIC,
    RING,
    RING_LINE,
    WINDOW_BYTES,
)
from nearkv_hw.command.owner import OwnerPage
from nearkv_hw.command.records import Completed, Posted
from nearkv_hw.command.window import CommandWindow
from nearkv_hw.interfaces import FabricRequest, FabricResponse, Refusal
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start, value

ALL = (1 << 64) - 1
DESCRIPTORS, COMPLETIONS, DOORBELL = (
    offset // 64 for offset in (DESCRIPTORS_OFFSET, COMPLETIONS_OFFSET, DOORBELL_OFFSET)
)


@pytest.mark.rtl
@pytest.mark.parametrize(("apertures", "ring_slots"), [(2, 256), (3, 4)])
def test_window(apertures, ring_slots):
    chosen = {"apertures": apertures, "ring_slots": ring_slots}
    run(CommandWindow(config=configure("small", **chosen)), module=__file__, parameters=chosen)


class Host:
    """Accesses to the window through its fabric port; answers are checked to be those asked for."""

    def __init__(self, dut, *, idle=0.3, backpressure=0.3):
        self.dut = dut
        self.config = configure("small", **parameters())
        self.requests = StreamSource(dut, "host_request", idle=idle, shape=FabricRequest)
        self.responses = StreamSink(dut, "host_response", backpressure=backpressure, shape=FabricResponse)
        self.count = 0

    async def access(self, aperture, line, **write):
        self.count += 1
        request = {"line": line, "tenant": aperture, "id": self.count % 65536, **write}
        self.requests.send([request])
        (response,) = await self.responses.receive()
        assert (response["id"], response["write"]) == (request["id"], write.get("write", 0))
        assert response["fault"] == 0
        return response["data"]

    async def read(self, aperture, line):
        return await self.access(aperture, line)

    async def write(self, aperture, line, data, *, enable=ALL, poison=0):
        await self.access(aperture, line, write=1, data=data, enable=enable, poison=poison)

    async def ring(self, aperture):
        return RING.unpack(await self.read(aperture, RING_LINE))

    async def errors(self):
        return DEVICE_COUNTERS.unpack(await self.read(0, DEVICE_COUNTERS_LINE))["errors"]


@cocotb.test()
async def posts_what_was_written(dut):
    """Descriptors of all apertures, over several laps, byte enables included, come out once and in order."""
    await start(dut)
    host, rng = Host(dut), random("post")
    slots, apertures = host.config.ring_slots, host.config.apertures
    out = StreamSink(dut, "descriptors", backpressure=0.5, shape=Posted)
    slot_data = [[0] * 2 * slots for _ in range(apertures)]
    written = [0] * apertures
    expected = [[] for _ in range(apertures)]
    got = [[] for _ in range(apertures)]

    def collect(items):
        for item in items:
            got[item["tenant"]].append((item["index"], item["line"], item["extension"]))

    for _ in range(60):
        aperture = rng.randrange(apertures)
        fetched = (await host.ring(aperture))["head"]
        for _ in range(rng.randint(0, min(6, slots - (written[aperture] - fetched)))):
            slot = written[aperture] % slots
            for line in (2 * slot, 2 * slot + 1):
                enable = rng.choice([ALL, ALL, rng.getrandbits(64)])
                data = rng.getrandbits(512)
                await host.write(aperture, DESCRIPTORS + line, data, enable=enable)
                mask = sum(0xFF << 8 * n for n in range(64) if enable >> n & 1)
                slot_data[aperture][line] = slot_data[aperture][line] & ~mask | data & mask
                assert await host.read(aperture, DESCRIPTORS + line) == slot_data[aperture][line]
            expected[aperture].append((written[aperture], *slot_data[aperture][2 * slot :][:2]))
            written[aperture] += 1
        await host.write(aperture, DOORBELL, written[aperture])
        assert (await host.ring(aperture))["tail"] == written[aperture]
        collect(await out.receive(len(out)))
    collect(await out.receive(sum(written) - sum(map(len, got))))
    assert got == expected
    assert sum(written) > slots if slots == 4 else sum(written) > 20


@cocotb.test()
async def posts_soon(dut):
    await start(dut)
    host = Host(dut, idle=0, backpressure=0)
    out = StreamSink(dut, "descriptors", shape=Posted)
    await host.write(1, DOORBELL, 3)
    rung = host.requests.cycles[-1]
    await out.receive(3)
    first = CommandWindow.post_latency_cycles
    assert [cycle - rung for cycle in out.cycles] == [first, first + 2, first + 4]


@cocotb.test()
async def takes_apertures_in_turn(dut):
    await start(dut)
    host = Host(dut)
    apertures = host.config.apertures
    out = StreamSink(dut, "descriptors", backpressure=1, shape=Posted)
    for aperture in range(apertures):
        for slot in range(4):
            await host.write(aperture, DESCRIPTORS + 2 * slot, 100 * aperture + slot)
    for aperture in range(apertures):
        await host.write(aperture, DOORBELL, 4)
    out.backpressure = 0
    order = [item["tenant"] for item in await out.receive(4 * apertures)]
    assert order == [n % apertures for n in range(4 * apertures)]


@cocotb.test()
async def who_has_had_its_lines_is_left_out(dut):
    """A record's lines are a debit, which a grant of the owner's weight pays while nobody else waits."""
    await start(dut)
    host = Host(dut)
    apertures = host.config.apertures
    out = StreamSink(dut, "descriptors", backpressure=1, shape=Posted)
    records = StreamSource(dut, "completions", shape=Completed)
    await host.write(0, (OWNER_OFFSET // 64) + WEIGHTS_LINE, WEIGHTS.pack(tenant0=5), enable=0xF)
    lines = 300 * 5 * 1024  # more grants than cycles in which it waits alone
    records.send([{"tenant": 0, "record": COMPLETION.pack(lines=lines)}])
    await records.drained()
    for aperture in range(apertures):
        await host.write(aperture, DOORBELL, 4)
    out.backpressure = 0
    order = [item["tenant"] for item in await out.receive(4 * apertures)]
    assert order == [n % (apertures - 1) + 1 for n in range(4 * (apertures - 1))] + [0] * 4


@cocotb.test()
async def refuses_bad_doorbells(dut):
    await start(dut)
    host = Host(dut)
    slots = host.config.ring_slots
    StreamSink(dut, "descriptors", backpressure=1)
    await host.write(0, DOORBELL, slots + 1)
    assert await host.ring(0) == {**dict.fromkeys(RING.unpack(0), 0)}
    assert await host.errors() == 1
    await host.write(0, DOORBELL, (1 << 32) - 1)  # behind the head
    await host.write(0, DOORBELL, 1, enable=0b0111)
    await host.write(0, DOORBELL, 1, poison=1)
    assert await host.errors() == 4
    await host.write(1, DOORBELL, slots, enable=0b1111)
    assert (await host.ring(1))["tail"] == slots
    assert (await host.ring(0))["tail"] == 0
    assert await host.errors() == 4
    await host.write(1, DOORBELL, slots - 1)  # back
    assert (await host.ring(1))["tail"] == slots
    assert await host.errors() == 5


@cocotb.test()
async def poisoned_descriptor_becomes_a_bad_one(dut):
    """Zeros in the first line; in the second ones, as an extension of zeros would be a good one."""
    await start(dut)
    host = Host(dut)
    for line, data, expected in ((0, (1 << 512) - 1, 0), (1, 0, (1 << 512) - 1)):
        await host.write(0, DESCRIPTORS + line, data)
        await host.write(0, DESCRIPTORS + line, 5, enable=1, poison=1)
        assert await host.read(0, DESCRIPTORS + line) == expected


@cocotb.test()
async def shows_registers(dut):
    await start(dut)
    host, rng = Host(dut), random("registers")
    config = host.config
    device, link, extents = (rng.getrandbits(512) for _ in range(3))
    channels = [rng.getrandbits(512) for _ in range(config.channels)]
    dut.device.value, dut.link.value, dut.extents.value = device, link, extents
    for n, counters in enumerate(channels):
        getattr(dut, f"channels_{n}").value = counters
    for aperture in range(config.apertures):
        getattr(dut, f"holdings_{aperture}").value = 7 * aperture
        identity = IDENTITY.unpack(await host.read(aperture, IDENTITY_LINE))
        assert identity["magic"] == MAGIC
        assert identity["aperture"] == aperture
        for name in ("apertures", "ring_slots", "capacity_bytes", "channels", "queries", "link", "clock_mhz"):
            assert identity[name] == getattr(config, name)
        counters = DEVICE_COUNTERS.unpack(await host.read(aperture, DEVICE_COUNTERS_LINE))
        own = {"cycles": counters["cycles"], "jobs": 0, "errors": 0}
        assert counters == {**DEVICE_COUNTERS.unpack(device), **own}
        assert await host.read(aperture, LINK_COUNTERS_LINE) == LINK_COUNTERS.pack(LINK_COUNTERS.unpack(link))
        shown = EXTENT_COUNTERS.unpack(await host.read(aperture, EXTENT_COUNTERS_LINE))
        own = {"owned": 7 * aperture, "quota": config.extents}
        assert shown == {**EXTENT_COUNTERS.unpack(extents), **own}
        for n, counted in enumerate(channels):
            line = await host.read(aperture, CHANNEL_COUNTERS_LINE + n)
            assert CHANNEL_COUNTERS.unpack(line) == CHANNEL_COUNTERS.unpack(counted)
    before = DEVICE_COUNTERS.unpack(await host.read(0, DEVICE_COUNTERS_LINE))["cycles"]
    await cycles(dut, 100)
    assert (
        before + 100
        < DEVICE_COUNTERS.unpack(await host.read(0, DEVICE_COUNTERS_LINE))["cycles"]
        < before + 150
    )


@cocotb.test()
async def keeps_completion_records(dut):
    await start(dut)
    host, rng = Host(dut), random("records")
    slots, apertures = host.config.ring_slots, host.config.apertures
    source = StreamSource(dut, "completions", idle=0.3, shape=Completed)
    records, failures, count = {}, 0, [0] * apertures
    for _ in range(3 * slots):
        aperture, failed, record = rng.randrange(apertures), rng.getrandbits(1), rng.getrandbits(512)
        source.send([{"tenant": aperture, "index": count[aperture], "failed": failed, "record": record}])
        records[aperture, count[aperture] % slots] = record
        count[aperture] += 1
        failures += failed
    await source.drained()
    await cycles(dut, 2)
    for aperture in range(apertures):
        assert (await host.ring(aperture))["completed"] == count[aperture]
        for slot in rng.sample(range(slots), min(slots, 20)):
            await host.write(aperture, COMPLETIONS + slot, 1)  # records are not the host's to write
            assert await host.read(aperture, COMPLETIONS + slot) == records.get((aperture, slot), 0)
    device = DEVICE_COUNTERS.unpack(await host.read(0, DEVICE_COUNTERS_LINE))
    assert (device["jobs"], device["errors"]) == (sum(count), failures)


@cocotb.test()
async def old_records_are_gone_after_reset(dut):
    """The memory keeps its records over a reset; none of them may be taken for a new one."""
    await start(dut)
    host = Host(dut)
    source = StreamSource(dut, "completions", shape=Completed)
    slots = host.config.ring_slots
    for lap in range(2):
        for index in range(slots):
            source.send([{"tenant": 1, "index": lap * slots + index, "record": ALL}])
    await source.drained()
    await cycles(dut, 2)
    assert await host.read(1, COMPLETIONS + slots - 1) == ALL
    dut.rst.value = 1
    await cycles(dut, 2)
    dut.rst.value = 0
    assert await host.read(1, COMPLETIONS) == await host.read(1, COMPLETIONS + slots - 1) == 0
    source.send([{"tenant": 1, "index": 0, "record": 5}])
    await source.drained()
    await cycles(dut, 2)
    assert [await host.read(1, COMPLETIONS + n) for n in range(3)] == [5, 0, 0]


@cocotb.test()
async def what_is_nothing_reads_as_zero(dut):
    await start(dut)
    host = Host(dut)
    slots, config = host.config.ring_slots, host.config
    used = {IDENTITY_LINE, DEVICE_COUNTERS_LINE, RING_LINE, LINK_COUNTERS_LINE, EXTENT_COUNTERS_LINE}
    used |= {CHANNEL_COUNTERS_LINE + n for n in range(config.channels)}
    nothing = {*range(80), *range(250, 260), 500, *range(WINDOW_BYTES // 64 - 4, WINDOW_BYTES // 64)} - used
    nothing |= {COMPLETIONS + slots, DESCRIPTORS + 2 * slots} if slots < 256 else set()
    for line in sorted(nothing):
        if line != DOORBELL:
            await host.write(1, line, ALL)
    for line in sorted(nothing):
        kept = DESCRIPTORS <= line < DESCRIPTORS + 2 * slots
        assert await host.read(1, line) == (ALL if kept else 0), line


@cocotb.test()
async def the_owners_page_is_behind_the_window(dut):
    """Quotas are written there, poison is not; violations are in the log; a bad count is refused."""
    await start(dut)
    host = Host(dut)
    page, config = OWNER_OFFSET // 64, host.config
    reports = StreamSource(dut, "reports", idle=0.3, shape=Refusal)
    quotas = {f"tenant{n}": 3 + n for n in range(config.apertures)}
    await host.write(0, page + QUOTAS_LINE, QUOTAS.pack(quotas))
    await host.write(0, page + QUOTAS_LINE, 0, poison=1)
    assert await host.errors() == 1
    assert QUOTAS.unpack(await host.read(0, page + QUOTAS_LINE)) == {**QUOTAS.unpack(0), **quotas}
    for n in range(config.apertures):
        assert value(getattr(dut, f"quotas_{n}")) == 3 + n
        assert EXTENT_COUNTERS.unpack(await host.read(n, EXTENT_COUNTERS_LINE))["quota"] == 3 + n
    tried = [(n << 14 | 5, n % 8, n % 3) for n in range(RECORDS)]
    reports.send([{"line": line, "tenant": tenant, "kind": kind} for line, tenant, kind in tried])
    await reports.drained()
    await cycles(dut, OwnerPage.report_cycles)
    assert AUDIT.unpack(await host.read(0, page + AUDIT_LINE))["recorded"] == RECORDS
    for n, (line, tenant, kind) in enumerate(tried):
        record = RECORD.unpack(await host.read(0, page + RECORDS_LINE + n))
        assert (record["sequence"], record["address"] // 64) == (n, line)
        assert (record["tenant"], record["kind"]) == (tenant, kind)
    await host.write(0, page + AUDIT_LINE, AUDIT.pack(read=RECORDS + 1))
    assert await host.errors() == 2
    await host.write(0, page + AUDIT_LINE, AUDIT.pack(read=RECORDS))
    assert await host.errors() == 2
    assert AUDIT.unpack(await host.read(0, page + AUDIT_LINE))["read"] == RECORDS


@cocotb.test()
async def one_access_in_two_cycles(dut):
    await start(dut)
    host = Host(dut, idle=0, backpressure=0)
    host.requests.send([{"line": n, "id": n} for n in range(50)])
    answers = await host.responses.receive(50)
    assert [answer["id"] for answer in answers] == list(range(50))
    taken = host.requests.cycles
    assert all(later - earlier == 2 for earlier, later in pairwise(taken))
    latency = {answer - asked for asked, answer in zip(taken, host.responses.cycles, strict=True)}
    assert latency == {CommandWindow.latency_cycles}
