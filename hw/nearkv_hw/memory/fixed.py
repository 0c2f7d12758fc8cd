"""The simplest memory behind a channel: every command after the same number of cycles, one per cycle.

A DRAM controller takes this block's place behind the owner check and the arbitration: same commands in, same
answers out. It may take commands slowly, and must answer every one, in the order in which they came.
"""

from amaranth.hdl import Module, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi.lines import LINE_BITS, LINE_BYTES
from ..common.delay import Delay
from ..interfaces import LINE_ADDRESS_BITS
from .store import Store


def memory_command(tag):
    """A command to a channel's memory.

    `touch` clear: nothing is read or written, the answer only keeps its place in the order. `line` is the
    channel's; `tag` (any shape) comes back with the answer.
    """
    return data.StructLayout(
        {
            "tag": tag,
            "touch": unsigned(1),
            "line": unsigned(LINE_ADDRESS_BITS),
            "write": unsigned(1),
            "poison": unsigned(1),
            "enable": unsigned(LINE_BYTES),
            "data": unsigned(LINE_BITS),
        }
    )


def memory_answer(tag):
    """The answer to a `memory_command`: data and poison have a meaning for a read that touched memory."""
    return data.StructLayout({"tag": tag, "poison": unsigned(1), "data": unsigned(LINE_BITS)})


class FixedMemory(wiring.Component):
    """Memory with a fixed latency.

    Commands wait as addresses (and write data); the store is accessed when their time has come. They are
    carried out in their order, so a read sees every earlier write of its line and no later one.

    Parameters
    ----------
    channel : which channel's memory this is.
    latency_cycles : from a command to its answer, at least 1.
    tag : shape of the tag.

    Members
    -------
    commands : In(stream(memory_command(tag))) : reads and writes of lines; always ready.
    answers : Out(stream(memory_answer(tag), always_ready)) : one per command, in order.

    Latency is exactly `latency_cycles`, throughput one command per cycle.
    """

    def __init__(self, *, channel, latency_cycles, tag):
        if not isinstance(latency_cycles, int) or latency_cycles < 1:
            raise ValueError(f"latency_cycles must be a positive integer, not {latency_cycles!r}")
        self.channel = channel
        self.latency_cycles = latency_cycles
        self.tag = tag
        super().__init__(
            {
                "commands": In(stream.Signature(memory_command(tag))),
                "answers": Out(stream.Signature(memory_answer(tag), always_ready=True)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.store = store = Store(channel=self.channel)
        wait = self.latency_cycles - store.latency_cycles
        operation = data.StructLayout(
            {
                "tag": self.tag,
                "touch": 1,
                "line": LINE_ADDRESS_BITS,
                "write": 1,
                "poison": 1,
            }
        )
        content = data.StructLayout({"enable": LINE_BYTES, "data": LINE_BITS})
        m.submodules.operations = operations = Delay(shape=operation, cycles=wait)
        m.submodules.contents = contents = Delay(shape=content, cycles=wait)
        command, op = self.commands.payload, operations.o.payload
        m.d.comb += [
            self.commands.ready.eq(1),
            operations.i.valid.eq(self.commands.valid),
            contents.i.valid.eq(self.commands.valid & command.write),
            *(operations.i.payload[name].eq(command[name]) for name in operation.members),
            *(contents.i.payload[name].eq(command[name]) for name in content.members),
            store.read_enable.eq(operations.o.valid & op.touch & ~op.write),
            store.read_line.eq(op.line),
            store.write_enable.eq(operations.o.valid & op.touch & op.write),
            store.write_line.eq(op.line),
            store.write_data.eq(contents.o.payload.data),
            store.write_mask.eq(contents.o.payload.enable),
            store.write_poison.eq(op.poison),
            self.answers.payload.data.eq(store.read_data),
            self.answers.payload.poison.eq(store.read_poison),
        ]
        tag = Signal(self.tag, reset_less=True)
        m.d.sync += [self.answers.valid.eq(operations.o.valid), tag.eq(op.tag)]
        m.d.comb += self.answers.payload.tag.eq(tag)
        return m
