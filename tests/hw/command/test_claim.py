"""Claims of tenants of several logical devices: what each can have, exhaustively on a small device."""

import pytest
from amaranth.sim import Simulator
from nearkv_hw.abi.descriptor import Status
from nearkv_hw.command.claim import Claimer

EXTENTS, APERTURES = 8, 4


def outcomes(logical_devices, claims):
    """Status of each (tenant, first, count, release) of a device whose extents are all free."""
    block = Claimer(slices=1, extents=EXTENTS, apertures=APERTURES, logical_devices=logical_devices)
    told = []

    async def bench(ctx):
        (owner,) = block.owners
        for quota in block.quotas:
            ctx.set(quota, 1 << 16)  # every claim counts: nobody keeps what was taken
        ctx.set(block.o.ready, 1)
        for tenant, first, count, release in claims:
            ctx.set(block.i.payload.tenant, tenant)
            ctx.set(block.i.payload.first_extent, first)
            ctx.set(block.i.payload.extent_count, count)
            ctx.set(block.i.payload.release, release)
            ctx.set(block.i.valid, 1)
            await ctx.tick()
            ctx.set(block.i.valid, 0)
            waiting = 0
            for _ in range(8 * EXTENTS + 20):
                ctx.set(owner.request.ready, 1)
                ctx.set(owner.response.valid, int(waiting > 0))
                if ctx.get(block.o.valid):
                    told.append(Status(ctx.get(block.o.payload.status)))
                    break
                asked = ctx.get(owner.request.valid)
                assert not asked or ctx.get(owner.request.payload.extent) in range(first, first + count)
                answered = waiting > 0 and ctx.get(owner.response.ready)
                waiting += int(asked) - int(answered)
                await ctx.tick()
            else:
                pytest.fail(f"no end of {tenant, first, count, release}")
            await ctx.tick()

    simulator = Simulator(block)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return told


@pytest.mark.parametrize("logical_devices", [1, 2, 4])
def test_a_tenant_has_extents_of_its_logical_device(logical_devices):
    claims = [
        (tenant, first, count, release)
        for tenant in range(APERTURES)
        for first in range(EXTENTS + 1)
        for count in range(EXTENTS + 2)
        for release in (0, 1)
    ]
    part = EXTENTS // logical_devices

    def expected(tenant, first, count, _):
        begin = tenant * logical_devices // APERTURES * part
        good = count > 0 and begin <= first and first + count <= begin + part
        return Status.OK if good else Status.BAD_EXTENT

    assert outcomes(logical_devices, claims) == [expected(*claim) for claim in claims]
