"""The DRAM of a channel: a controller per sub-channel, error correction, and what they share."""

from functools import reduce
from operator import add, or_

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ...abi import DeviceConfig
from ...abi.config import Placement
from ...abi.dram import PARTS
from ...abi.lines import LINE_BITS
from ...common.delay import Delay
from ...common.trees import reduce_tree
from ..backend import Backend
from ..ecc import LINE_CHECK_BITS, EccDecoder, line_check
from .address import subchannel_of
from .controller import DramController, default_read_entries
from .part import DramBox
from .partial import PartialWrites
from .refresh import RefreshTimer

EVENTS = {
    "row_hits": "row_hit",
    "row_misses": "row_miss",
    "row_conflicts": "row_conflict",
    "refresh_cycles": "refresh_busy",
    "turnaround_cycles": "turnaround",
}
"""Counters, and the events of the controllers that they count."""
QUEUES = {"read": "reads_waiting", "write": "writes_waiting"}
"""Queues of the controllers, and their levels."""
COUNTERS = (
    *(*EVENTS, "idle_cycles", "corrected", "uncorrectable"),
    *(f"{queue}_{what}" for queue in QUEUES for what in ("levels", "level_max")),
)


class DramMemory(wiring.Component):
    """DRAM behind a channel: sub-channels that take turns on one bus of a line per cycle.

    Sub-channel s begins its frames in cycles that are s modulo the number of sub-channels, so no two of them
    bring a line in the same cycle; they share the encoder, the decoder and the refresh timer.

    Parameters
    ----------
    channel : which channel's memory this is.
    config : the device's configuration, with a DRAM part.
    slot_bits : width of the accesses' slots.

    Members
    -------
    port : In(Backend) : accesses. A unit at the PHY has a decoder of its own.
    waiting : Out(range(places + 1)) : reads that waited in the controllers a cycle ago. Of writes, most are
        only being collected.
    refused : Out(1) : an access of the fabric found no room in them a cycle ago.
    row_hits, row_misses, row_conflicts : Out(64) : lines that met their row open, no row, another row.
    refresh_cycles, turnaround_cycles, idle_cycles : Out(64) : cycles that a sub-channel spent on it, over all
        of them.
    corrected, uncorrectable : Out(64) : lines that were corrected, or could not be and became poison.
    read_levels, read_level_max, write_levels, write_level_max : Out(64) : accesses that waited in the
        controllers: summed over the cycles, and the most of one of them.
    """

    def __init__(self, *, channel, config, slot_bits):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        if config.dram not in PARTS:
            raise ValueError(f"config must have a DRAM part, not dram={config.dram.name.lower()}")
        self.channel = channel
        self.config = config
        self.part = PARTS[config.dram]
        self.slot_bits = slot_bits
        self.writers = self.part.subchannels
        backend = Backend(unit_bits=slot_bits, fabric_bits=slot_bits, writers=self.writers)
        self.places = self.part.subchannels * default_read_entries(self.part)
        super().__init__(
            {
                "port": In(backend),
                "waiting": Out(range(self.places + 1)),
                "refused": Out(1),
                **{name: Out(64) for name in COUNTERS},
            }
        )

    @staticmethod
    def unloaded_cycles(config):
        """Most cycles from a read of a closed bank to its answer, with nothing else under way."""
        controller = DramController(part=PARTS[config.dram], density_gbit=config.density_gbit, tag=1)
        return controller.unloaded_cycles + EccDecoder.latency_cycles

    def elaborate(self, platform):
        m = Module()
        part, config = self.part, self.config
        tag = data.StructLayout({"slot": self.slot_bits, "merge": 1})
        m.submodules.partial = partial = PartialWrites(slot_bits=self.slot_bits)
        same = {"part": part, "density_gbit": config.density_gbit, "refresh": config.refresh}
        m.submodules.timer = timer = RefreshTimer(**same)
        wiring.connect(m, wiring.flipped(self.port.fabric), partial.i)
        fabric_sub, fabric_line = subchannel_of(part, partial.o.payload.line)
        unit_sub, unit_line = subchannel_of(part, self.port.unit.payload.line)
        check = line_check(m, partial.o.payload.data)

        turn = Signal(range(part.subchannels))
        m.d.sync += turn.eq(turn + 1)
        controllers, boxes = [], []
        for s in range(part.subchannels):
            controller = m.submodules[f"controller_{s}"] = DramController(
                **same, tag=tag, fabric_share=config.fabric_share
            )
            box = m.submodules[f"part_{s}"] = DramBox(**same, channel=self.channel, subchannel=s)
            wiring.connect(m, controller.pins, box.pins)
            unit, fabric = controller.unit, controller.fabric
            m.d.comb += [
                controller.phase.eq(turn == s),
                controller.due.eq(timer.due),
                unit.valid.eq(self.port.unit.valid & (unit_sub == s)),
                unit.payload.line.eq(unit_line),
                unit.payload.tag.slot.eq(self.port.unit.payload.slot),
                fabric.valid.eq(partial.o.valid & (fabric_sub == s)),
                fabric.payload.line.eq(fabric_line),
                fabric.payload.write.eq(partial.o.payload.write),
                fabric.payload.poison.eq(partial.o.payload.poison),
                fabric.payload.data.eq(partial.o.payload.data),
                fabric.payload.check.eq(check),
                fabric.payload.tag.slot.eq(partial.o.payload.slot),
                fabric.payload.tag.merge.eq(partial.o.payload.merge),
                self.port.written[s].valid.eq(controller.written.valid),
                self.port.written[s].slot.eq(controller.written.payload.slot),
            ]
            controllers.append(controller)
            boxes.append(box)
        for s, controller in enumerate(controllers):
            others = (other.drains for n, other in enumerate(controllers) if n != s)
            m.d.comb += controller.join.eq(Cat(others).any())
        for stream, sub, targets in (
            (self.port.unit, unit_sub, [controller.unit for controller in controllers]),
            (partial.o, fabric_sub, [controller.fabric for controller in controllers]),
        ):
            takes = ((sub == s) & target.ready for s, target in enumerate(targets))
            m.d.comb += stream.ready.eq(Cat(takes).any())
        m.d.sync += [
            self.waiting.eq(reduce_tree([controller.reads_waiting for controller in controllers], add)),
            self.refused.eq(partial.o.valid & ~partial.o.ready),
        ]
        self._return(m, tag, partial, controllers, boxes)
        for name, event in EVENTS.items():
            self._count(m, name, [getattr(controller, event) for controller in controllers])
        self._watch_queues(m, controllers, timer)
        return m

    def _return(self, m, tag, partial, controllers, boxes):
        """Lines on their way back: at most one per cycle, corrected, to whoever asked."""
        came = data.StructLayout(
            {"line": LINE_BITS, "check": LINE_CHECK_BITS, "unit": 1, "tag": tag, "poison": 1}
        )
        lines = []
        for s, (controller, box) in enumerate(zip(controllers, boxes, strict=True)):
            line = Signal(came, name=f"came_{s}")
            with m.If(box.pins.read_valid):
                m.d.comb += [
                    line.unit.eq(controller.answers.payload.unit),
                    line.tag.eq(controller.answers.payload.tag),
                    line.poison.eq(box.pins.read_poison),
                    line.line.eq(box.pins.read_data),
                    line.check.eq(box.pins.read_check),
                ]
            lines.append(line.as_value())
        now, valid = Signal(came), Signal()
        m.d.comb += [
            now.as_value().eq(reduce(or_, lines)),
            valid.eq(Cat(box.pins.read_valid for box in boxes).any()),
        ]
        # a unit at the PHY has a decoder of its own
        apart = self.config.placement is Placement.PHY
        decoders = []
        for n, mine in enumerate((now.unit, ~now.unit) if apart else (1,)):
            decoder = m.submodules[f"decoder_{n}"] = _Return(came=came)
            m.d.comb += [decoder.valid.eq(valid & mine), decoder.came.eq(now)]
            decoders.append(decoder)
        unit, fabric = decoders[0], decoders[-1]
        for way, port, mine in (
            (unit, self.port.unit_read, unit.unit),
            (fabric, self.port.fabric_read, ~fabric.unit & ~fabric.tag.merge),
        ):
            m.d.comb += [
                port.valid.eq(way.done & mine),
                port.payload.slot.eq(way.tag.slot),
                port.payload.poison.eq(way.poison),
                port.payload.data.eq(way.line),
            ]
        m.d.comb += [
            partial.read.eq(fabric.done & ~fabric.unit & fabric.tag.merge),
            partial.read_data.eq(fabric.line),
            partial.read_poison.eq(fabric.poison),
        ]
        self._count(m, "corrected", [way.done & way.corrected for way in decoders])
        self._count(m, "uncorrectable", [way.done & way.uncorrectable for way in decoders])

    def _watch_queues(self, m, controllers, timer):
        """Counts what waits, and when nothing does; the refresh timer is told, too."""
        for queue, level in QUEUES.items():
            levels = [getattr(controller, level) for controller in controllers]
            total = Signal(16, name=f"{queue}_now")
            highest = Signal.like(levels[0], name=f"{queue}_highest")
            most, total_of = getattr(self, f"{queue}_level_max"), getattr(self, f"{queue}_levels")
            m.d.sync += [
                total.eq(reduce_tree(levels, add)),
                total_of.eq(total_of + total),
                highest.eq(reduce_tree(levels, lambda a, b: Mux(a > b, a, b))),
            ]
            with m.If(highest > most):
                m.d.sync += most.eq(highest)
        waiting = Signal(len(controllers))
        m.d.comb += waiting.eq(Cat((c.reads_waiting != 0) | (c.writes_waiting != 0) for c in controllers))
        m.d.sync += timer.wanted.eq(waiting.any())
        self._count(m, "idle_cycles", list(~waiting))

    def _count(self, m, name, events):
        counter, now = getattr(self, name), Signal(range(len(events) + 1), name=f"{name}_now")
        m.d.sync += [now.eq(reduce_tree(events, add)), counter.eq(counter + now)]


class _Return(wiring.Component):
    """A decoder, and what travels beside a line through it.

    Parameters
    ----------
    came : shape of what comes from the part, with `unit`, `tag`, `poison`, `line` and `check`.

    Members
    -------
    valid, came : In : a line.
    done, unit, tag, poison, line, corrected, uncorrectable : Out : the line, `EccDecoder.latency_cycles`
        later. What could not be corrected is poison.
    """

    def __init__(self, *, came):
        super().__init__(
            {
                "valid": In(1),
                "came": In(came),
                "done": Out(1),
                "unit": Out(1),
                "tag": Out(came.members["tag"]),
                "poison": Out(1),
                "line": Out(LINE_BITS),
                "corrected": Out(1),
                "uncorrectable": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.decoder = decoder = EccDecoder()
        beside = data.StructLayout({"unit": 1, "tag": self.tag.shape(), "poison": 1})
        m.submodules.beside = travels = Delay(shape=beside, cycles=decoder.latency_cycles)
        then = travels.o.payload
        m.d.comb += [
            decoder.line.eq(self.came.line),
            decoder.check.eq(self.came.check),
            travels.i.valid.eq(self.valid),
            *(travels.i.payload[name].eq(self.came[name]) for name in beside.members),
            self.done.eq(travels.o.valid),
            self.unit.eq(then.unit),
            self.tag.eq(then.tag),
            self.poison.eq(then.poison | decoder.uncorrectable),
            self.line.eq(decoder.corrected_line),
            self.corrected.eq(decoder.corrected),
            self.uncorrectable.eq(decoder.uncorrectable),
        ]
        return m
