"""The device under cocotb, its streams shaken and checked: attention, tenants, poison."""

import cocotb
import pytest
from cocotb.task import bridge, resume
from nearkv_hw.abi import OutputForm, Status, configure
from nearkv_hw.abi.cxl import M2S_RWD
from nearkv_hw.abi.lines import LINE_BYTES
from nearkv_sim.build import device_design
from nearkv_sim.cocotb.host import Host
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import random, start
from raw_device import Aperture, Space, claim_descriptor, ok, random_context

CONFIG = configure("small")


@pytest.mark.rtl
@pytest.mark.slow
def test_device_under_cocotb():
    run(device_design(CONFIG), module=__file__, timeout_s=1200)


class PoisoningHost(Host):
    """A host that marks what it writes to some addresses as poisoned."""

    def __init__(self, dut, **options):
        super().__init__(dut, **options)
        self.poisoned = set()
        for port in self._ports:
            port.writes.send = self._marking(port.writes.send)

    def _marking(self, send):
        place = M2S_RWD.offset("poison")
        return lambda messages: send([message | self._is_poisoned(message) << place for message in messages])

    def _is_poisoned(self, message):
        return (message >> M2S_RWD.offset("address") & (1 << 46) - 1) * LINE_BYTES in self.poisoned


class BridgedPort:
    """A `Port` for code that runs beside the simulation, in a thread of its own."""

    def __init__(self, host):
        self.config = CONFIG
        self.host = host
        self.run = resume(host.run)


async def with_port(dut, body, *, idle=0.2, backpressure=0.2):
    """Run `body(port, rng)` against the device."""
    await start(dut)
    port = BridgedPort(PoisoningHost(dut, idle=idle, backpressure=backpressure))
    await bridge(body)(port, random(body.__name__))


@cocotb.test()
async def tenants_in_turn(dut):
    """Two tenants' batches of all result forms, interleaved; claims and refusals between them."""

    def body(port, rng):
        apertures = [Aperture(port, n) for n in range(2)]
        batches = []
        for n, aperture in enumerate(apertures):
            ok([aperture.claim(4 * n, 4)])
            sinks = [rng.uniform(-2, 2) for _ in range(6)]
            batch = [
                random_context(rng, rows=rng.randint(0, 20), group=6, sinks=sinks, page_rows=4, form=form)
                for form in OutputForm
            ]
            space = Space(rng, range(4 * n, 4 * n + 4))
            for context in batch:
                context.place(aperture, space)
            batches.append(batch)
        for aperture, batch in zip(apertures, batches, strict=True):
            aperture.post([*(context.descriptor() for context in batch), claim_descriptor(3, 2)])
        for aperture, batch in zip(apertures, batches, strict=True):
            *records, refused = aperture.collect(len(batch) + 1)
            ok(records)
            assert refused["status"] == Status.EXTENT_TAKEN
            for context in batch:
                context.check(aperture)

    await with_port(dut, body)


@cocotb.test()
async def poison_is_told(dut):
    """A poisoned line of whatever a job reads ends the job with POISON and, for a page, with the page."""

    def body(port, rng):
        aperture = Aperture(port)
        ok([aperture.claim(0, 4)])
        context = random_context(rng, rows=18, page_rows=4, group=3, sinks=[0.0] * 3)
        context.place(aperture, Space(rng, range(4)))
        placed, layout = context.placed, context.layout
        cases = [
            (placed["table"], 0),
            (placed["entries"], 0),
            (placed["queries"] + 3 * LINE_BYTES, 0),
            (placed["sinks"], 0),
            (placed["pages"][0] + layout.k_offset(1), 0),
            (placed["pages"][3] + layout.v_offset(3) + LINE_BYTES, 3),
            (placed["pages"][4] + layout.v_offset(0), 4),
        ]
        for address, page in cases:
            line = aperture.read(address, LINE_BYTES)
            port.host.poisoned = {address}
            aperture.write(address, line)
            port.host.poisoned = set()
            (record,) = aperture.run([context.descriptor()])
            assert (Status(record["status"]), record["detail"]) == (Status.POISON, page), hex(address)
            aperture.write(address, line)
            ok(aperture.run([context.descriptor()]))
            context.check(aperture)

    await with_port(dut, body)
