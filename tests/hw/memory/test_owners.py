# amaranth: UnusedElaboratable=no
"""The owner table: nothing is owned after reset, a claim takes what is free and no more, checks see it, and
what is given back is free once it was scrubbed."""

import cocotb
import pytest
from cocotb.triggers import RisingEdge
from nearkv_hw.abi import configure
from nearkv_hw.interfaces import OwnerRequest, OwnerResponse
from nearkv_hw.memory.owners import Owner, OwnerTable
from nearkv_sim.cocotb.payload import unpack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, cycles, random, start, value


@pytest.mark.rtl
@pytest.mark.parametrize("extents", [1, 1024])
def test_owner_table(extents):
    table = OwnerTable(config=configure("small", capacity_bytes=2 * extents << 20))
    run(
        table,
        module=__file__,
        parameters={
            "extents": extents,
            "clear_cycles": table.clear_cycles,
            "latency_cycles": table.latency_cycles,
            "port_latency_cycles": table.port_latency_cycles,
        },
    )


def test_config_is_checked():
    with pytest.raises(TypeError, match="config must be a DeviceConfig, not 'small'"):
        OwnerTable(config="small")


SCRUBBING = "scrubbing"


def bench(dut, idle=0.0, backpressure=0.0):
    source = StreamSource(dut, "port_request", shape=OwnerRequest, idle=idle)
    return source, StreamSink(dut, "port_response", shape=OwnerResponse, backpressure=backpressure)


def owner_of(answer):
    """A tenant, SCRUBBING or None."""
    assert not (answer["owned"] and answer["scrubbing"])
    return answer["tenant"] if answer["owned"] else SCRUBBING if answer["scrubbing"] else None


async def checked(dut, extent):
    """The owner as an access meets it: a tenant, SCRUBBING or None."""
    dut.checks_0_valid.value = 1
    dut.checks_0_extent.value = extent
    await RisingEdge(dut.clk)
    dut.checks_0_valid.value = 0
    dut.checks_0_extent.value = 0
    for _ in range(parameters()["latency_cycles"]):
        await RisingEdge(dut.clk)
    return owner_of(unpack(Owner, value(dut.checks_0_owner)))


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.7])
async def claims_are_atomic(dut, idle, backpressure):
    rng = random("claims")
    await start(dut)
    source, sink = bench(dut, idle, backpressure)
    extents = parameters()["extents"]
    owners, expected, requests = {}, [], []
    for _ in range(300):
        extent, tenant, claim = rng.randrange(min(extents, 24)), rng.randrange(8), rng.random() < 0.5
        extent = rng.choice([extent, extents - 1 - extent])
        requests.append({"extent": extent, "tenant": tenant, "claim": int(claim)})
        expected.append(owners.get(extent))
        if claim:
            owners.setdefault(extent, tenant)
    source.send(requests)
    answers = await sink.receive(len(requests))
    assert [owner_of(answer) for answer in answers] == expected
    for extent in {r["extent"] for r in requests}:
        assert await checked(dut, extent) == owners.get(extent)


@cocotb.test()
@cocotb.parametrize(idle=[0.0, 0.5], backpressure=[0.0, 0.7])
async def what_is_given_back_is_free_when_it_is_zero(dut, idle, backpressure):
    """Random claims and releases: nobody gets an extent before it was scrubbed, and each is scrubbed once."""
    rng = random("releases", idle, backpressure)
    await start(dut)
    source, sink = bench(dut, idle, backpressure)
    scrubs = StreamSink(dut, "scrub", backpressure=1)
    extents = parameters()["extents"]
    owners = {}
    for _ in range(4):
        requests, expected, given = [], [], set()
        for _ in range(120):
            extent, tenant = rng.choice([0, extents - 1, rng.randrange(min(extents, 24))]), rng.randrange(3)
            what = rng.choice(["claim", "release", "look"])
            requests.append(
                {"extent": extent, "tenant": tenant, what: 1}
                if what != "look"
                else {"extent": extent, "tenant": tenant}
            )
            expected.append(owners.get(extent))
            if what == "claim":
                owners.setdefault(extent, tenant)
            elif what == "release" and owners.get(extent) == tenant:
                owners[extent] = SCRUBBING
                given.add(extent)
        source.send(requests)
        assert [owner_of(answer) for answer in await sink.receive(len(requests))] == expected
        await cycles(dut, 2)
        assert value(dut.scrubbing) == len(given)
        assert value(dut.free) == extents - len(owners)
        for extent in given:
            assert await checked(dut, extent) == SCRUBBING
            del owners[extent]
        scrubs.backpressure = 0.5
        assert set(await scrubs.receive(len(given))) == given
        await cycles(dut, 2 * parameters()["clear_cycles"] + 20)
        scrubs.backpressure = 1
        assert len(scrubs) == 0
        assert (value(dut.scrubbing), value(dut.free)) == (0, extents - len(owners))
        for extent in given:
            assert await checked(dut, extent) is None


@cocotb.test()
async def a_claim_is_in_force_when_it_is_answered(dut):
    await start(dut)
    source, sink = bench(dut)
    last = parameters()["extents"] - 1
    assert value(dut.ready) == 0
    await cycles(dut, parameters()["clear_cycles"])
    assert value(dut.ready) == 1
    source.send([{"extent": last, "tenant": 5, "claim": 0}])
    assert (await sink.receive())[0]["owned"] == 0
    assert await checked(dut, last) is None
    source.send([{"extent": last, "tenant": 5, "claim": 1}])
    assert (await sink.receive())[0]["owned"] == 0
    assert await checked(dut, last) == 5
    assert [a - b for a, b in zip(sink.cycles, source.cycles, strict=True)] == [
        parameters()["port_latency_cycles"]
    ] * 2


@cocotb.test()
async def extents_beyond_the_channel_belong_to_somebody_else(dut):
    await start(dut)
    source, sink = bench(dut)
    extents = parameters()["extents"]
    for extent in (extents, 2 * extents, (1 << 20) - 1):
        for tenant in (0, 7):
            source.send([{"extent": extent, "tenant": tenant, "claim": 1}])
            (answer,) = await sink.receive()
            assert answer["owned"] == 1
            assert answer["tenant"] != tenant
    for extent in range(min(extents, 16)):
        assert await checked(dut, extent) is None


@cocotb.test()
async def reset_frees_every_extent(dut):
    await start(dut)
    source, sink = bench(dut)
    extents = parameters()["extents"]
    chosen = sorted({0, extents // 2, extents - 1})
    source.send([{"extent": extent, "tenant": 3, "claim": 1} for extent in chosen])
    await sink.receive(len(chosen))
    assert await checked(dut, chosen[-1]) == 3
    dut.rst.value = 1
    await cycles(dut, 2)
    dut.rst.value = 0
    await cycles(dut, parameters()["clear_cycles"] + 1)
    for extent in chosen:
        assert await checked(dut, extent) is None
