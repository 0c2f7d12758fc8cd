# amaranth: UnusedElaboratable=no
"""The completer: records in order, the first fault of a job, phase bits."""

import cocotb
import pytest
from nearkv_hw.abi import Status, configure
from nearkv_hw.abi.descriptor import COMPLETION
from nearkv_hw.abi.window import completion_phase
from nearkv_hw.command.completer import Completer
from nearkv_hw.command.records import Completed, Outcome, Ticket
from nearkv_hw.interfaces import PassDone
from nearkv_sim.cocotb.runner import run
from nearkv_sim.cocotb.streams import StreamSink, StreamSource, random, start

CONFIG = configure("small", ring_slots=8)


@pytest.mark.rtl
def test_completer():
    run(Completer(ring_slots=CONFIG.ring_slots), module=__file__)


@pytest.mark.parametrize("ring_slots", [0, 3, -8])
def test_ring_slots_are_checked(ring_slots):
    with pytest.raises(ValueError, match="ring_slots must be a power of two"):
        Completer(ring_slots=ring_slots)


def bench(dut, idle, backpressure):
    """Sources for tickets, query outcomes, page outcomes and finished passes, and the sink of records."""
    names = (
        ("tickets", Ticket),
        ("query_outcomes", Outcome),
        ("page_outcomes", Outcome),
        ("passes", PassDone),
    )
    sources = [StreamSource(dut, name, idle=idle, shape=shape) for name, shape in names]
    return sources, StreamSink(dut, "o", backpressure=backpressure, shape=Completed)


@cocotb.test()
async def tells_the_first_fault(dut):
    await start(dut)
    (tickets, *parts), records = bench(dut, idle=0.3, backpressure=0.4)
    rng = random("completer")
    dut.now.value = now = 1000
    expected = []
    for index in range(200):
        own = rng.choices([Status.OK, Status.BAD_RANGE, Status.EXTENT_TAKEN], [6, 1, 1])[0]
        passes = rng.randint(1, 5) if own is Status.OK and rng.random() < 0.8 else 0
        status, detail = own, rng.getrandbits(20) if own is Status.EXTENT_TAKEN else 0
        ticket = {
            "tenant": rng.randrange(2),
            "index": index,
            "fetched": rng.randrange(now),
            "tag": rng.getrandbits(32),
        }
        bounds = rng.getrandbits(1)  # as many passes come first
        more = {"status": int(status), "detail": detail, "passes": passes, "bounds": bounds}
        tickets.send([ticket | more])
        total = 0
        for _ in range(passes << bounds):
            lines = rng.getrandbits(20)
            total += lines
            query, entry, streamed = (
                rng.choices([Status.OK, Status.DENIED, Status.POISON], [20, 1, 1])[0],
                rng.choices([Status.OK, Status.DENIED, Status.BAD_PAGE], [10, 1, 1])[0],
                rng.choices([Status.OK, Status.PAGE_DENIED, Status.RESULT_DENIED], [10, 1, 1])[0],
            )
            # A pass streams nothing behind its first entry at fault.
            page = rng.randrange(1, 1 << 21) if entry is Status.BAD_PAGE else 0
            at = rng.randrange(page or 1 << 21) if streamed is Status.PAGE_DENIED else 0
            told = [(query, 0), (entry, page), (streamed, at)]
            for part, (fault, where) in zip(parts, told, strict=True):
                item = {"status": int(fault), "page": where}
                part.send([item | {"lines": lines} if part is parts[2] else item])
            if streamed is Status.PAGE_DENIED:  # a page at fault lies before any entry at fault
                told = [told[0], told[2], told[1]]
            for fault, where in told:
                if status is Status.OK and fault is not Status.OK:
                    status, detail = fault, where
        expected.append(
            {
                "tenant": ticket["tenant"],
                "index": index,
                "failed": int(status is not Status.OK),
                "record": COMPLETION.pack(
                    phase=completion_phase(CONFIG, index),
                    status=status,
                    passes=passes,
                    tag=ticket["tag"],
                    cycles=now - ticket["fetched"],
                    lines=total,
                    detail=detail,
                ),
            }
        )
    assert await records.receive(len(expected)) == expected


@cocotb.test()
async def tells_soon(dut):
    """A record stands `latency_cycles` after the last pass; passes are taken one per cycle."""
    await start(dut)
    (tickets, *parts), records = bench(dut, idle=0, backpressure=0)
    tickets.send([{"passes": 10}])
    for part in parts:
        part.send([{}] * 10)
    await records.receive()
    assert parts[2].cycles[-1] - parts[2].cycles[0] == 9
    assert records.cycles[0] - parts[2].cycles[-1] == Completer.latency_cycles
