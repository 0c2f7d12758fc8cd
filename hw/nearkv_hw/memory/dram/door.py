"""Where accesses wait to enter a controller's queues."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ...abi.lines import LINE_BITS
from ...common.buffer import Buffer
from ...structs import bits_of
from .address import place_of
from .banks import place_layout
from .pins import CHECK_BITS

CONTENTS_BITS = LINE_BITS + CHECK_BITS + 1
"""What a write brings: line, check bits, poison."""
_FABRIC_WAITING = 2
_CONTENTS_WAITING = 4
"""Contents of every write that can be on its way: in the buffer, at its head, chosen."""


def unit_layout(line_bits, tag):
    """A read by the unit."""
    return data.StructLayout({"line": line_bits, "tag": tag})


def fabric_layout(line_bits, tag):
    """A read or write of a line by the fabric; data, check bits and poison are a write's."""
    return data.StructLayout(
        {
            "data": LINE_BITS,
            "check": CHECK_BITS,
            "line": line_bits,
            "tag": tag,
            "write": 1,
            "poison": 1,
        }
    )


class Door(wiring.Component):
    """One access per frame enters, of the clients in turn.

    The oldest access of each client is in registers. In the last but one cycle of a frame it is known whether
    it meets a queued access to its line that it must not overtake; in the last one an access is chosen; in
    the first one of the next frame it enters.

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    tag : shape of what comes back with an answer.
    unit_waiting : reads of the unit that wait here.

    Members
    -------
    unit : In(stream(unit_layout)), fabric : In(stream(fabric_layout)) : accesses.
    check, choose : In(1) : a frame's last cycle but one, its last one.
    unit_place, fabric_place : Out(place) : the oldest accesses.
    unit_met : In(1) : a queued write is to `unit_place`. fabric_met_write, fabric_met_read : In(1) : a queued
        write, a queued read is to `fabric_place`.
    unit_room, fabric_room, write_room : In(1) : room for a read of the unit, of the fabric, for a write.
    unit_waits, fabric_waits, fabric_reads : Out(1) : an access waits; a read of the fabric does.
    unit_blocked, fabric_blocked : Out(1) : a read waits for a queued write of its line to go.
    takes_unit, takes_fabric, takes_write : Out(1) : with `choose`: the access is chosen.
    enters : Out(1) : in the first cycle of the next frame it enters: from_unit, write, place, tag : Out.
    leave : In(1) : the write that enters takes its `contents` : Out.
    """

    def __init__(self, *, part, density_gbit, tag, unit_waiting):
        self.part = part
        self.unit_waiting = unit_waiting
        place = place_layout(part, density_gbit)
        bits = ("check", "choose", "unit_met", "fabric_met_write", "fabric_met_read")
        rooms = ("unit_room", "fabric_room", "write_room")
        waits = ("unit_waits", "fabric_waits", "fabric_reads", "unit_blocked", "fabric_blocked")
        takes = ("takes_unit", "takes_fabric", "takes_write", "enters", "from_unit", "write")
        super().__init__(
            {
                "unit": In(stream.Signature(unit_layout(place.size, tag))),
                "fabric": In(stream.Signature(fabric_layout(place.size, tag))),
                **{name: In(1) for name in (*bits, *rooms, "leave")},
                **{name: Out(1) for name in (*waits, *takes)},
                **{name: Out(place) for name in ("unit_place", "fabric_place", "place")},
                "tag": Out(tag),
                "contents": Out(CONTENTS_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        tag = self.unit.payload.shape()["tag"].shape
        head = data.StructLayout({"line": self.place.shape().size, "tag": tag, "write": 1})
        m.submodules.unit_buffer = unit = Buffer(shape=self.unit.payload.shape(), depth=self.unit_waiting)
        m.submodules.fabric_buffer = fabric = Buffer(shape=head, depth=_FABRIC_WAITING)
        m.submodules.contents_buffer = contents = Buffer(
            shape=CONTENTS_BITS, depth=_CONTENTS_WAITING, early=True
        )
        wiring.connect(m, wiring.flipped(self.unit), unit.i)
        asked = self.fabric.payload
        m.d.comb += [
            fabric.i.valid.eq(self.fabric.valid & contents.i.ready),
            contents.i.valid.eq(self.fabric.valid & fabric.i.ready & asked.write),
            contents.early.eq(self.fabric.valid & asked.write),
            self.fabric.ready.eq(fabric.i.ready & contents.i.ready),
            *(fabric.i.payload[name].eq(asked[name]) for name in head.members),
            contents.i.payload.eq(Cat(asked.data, asked.check, asked.poison)),
            contents.o.ready.eq(self.leave),
            self.contents.eq(contents.o.payload),
        ]

        # The oldest access of each client.
        unit_tag, fabric_tag = (Signal(tag, reset_less=True, name=f"{n}_tag") for n in ("unit", "fabric"))
        fabric_write = Signal(reset_less=True)
        for buffer, valid, takes, place, kept in (
            (unit, self.unit_waits, self.takes_unit, self.unit_place, {"tag": unit_tag}),
            (
                fabric,
                self.fabric_waits,
                self.takes_fabric,
                self.fabric_place,
                {"tag": fabric_tag, "write": fabric_write},
            ),
        ):
            bank, row, column = place_of(self.part, buffer.o.payload.line)
            m.d.comb += buffer.o.ready.eq(~valid | takes)
            with m.If(buffer.o.ready):
                m.d.sync += [
                    valid.eq(buffer.o.valid),
                    *(place[name].eq(v) for name, v in (("bank", bank), ("row", row), ("column", column))),
                    *(register.eq(buffer.o.payload[name]) for name, register in kept.items()),
                ]

        # Check: against what is queued, and what entered just now.
        same_unit, same_fabric = Signal(), Signal()
        unit_checked, unit_met, fabric_checked, fabric_met = (Signal() for _ in range(4))
        m.d.comb += [
            same_unit.eq(self.enters & (self.unit_place == self.place)),
            same_fabric.eq(self.enters & (self.fabric_place == self.place)),
        ]
        with m.If(self.check):
            m.d.sync += [
                unit_checked.eq(self.unit_waits),
                unit_met.eq(self.unit_met | (same_unit & self.write)),
                fabric_checked.eq(self.fabric_waits),
                fabric_met.eq(
                    Mux(fabric_write, self.fabric_met_read, self.fabric_met_write)
                    | (same_fabric & (self.write ^ fabric_write))
                ),
            ]

        # Choose.
        unit_may, fabric_may, prefer_unit = Signal(), Signal(), Signal()
        m.d.comb += [
            self.fabric_reads.eq(self.fabric_waits & ~fabric_write),
            self.unit_blocked.eq(unit_checked & unit_met),
            self.fabric_blocked.eq(fabric_checked & fabric_met & ~fabric_write),
            unit_may.eq(unit_checked & ~unit_met & self.unit_room),
            fabric_may.eq(
                fabric_checked & ~fabric_met & Mux(fabric_write, self.write_room, self.fabric_room)
            ),
            self.takes_unit.eq(self.choose & unit_may & (prefer_unit | ~fabric_may)),
            self.takes_fabric.eq(self.choose & fabric_may & ~(prefer_unit & unit_may)),
            self.takes_write.eq(self.takes_fabric & fabric_write),
        ]
        with m.If(self.choose):
            m.d.sync += [
                self.enters.eq(unit_may | fabric_may),
                self.from_unit.eq(self.takes_unit),
                self.write.eq(self.takes_write),
                self.place.eq(Mux(self.takes_unit, self.unit_place, self.fabric_place)),
                self.tag.eq(Mux(self.takes_unit, bits_of(unit_tag), bits_of(fabric_tag))),
            ]
            with m.If(unit_may | fabric_may):
                m.d.sync += prefer_unit.eq(~self.takes_unit)
        return m
