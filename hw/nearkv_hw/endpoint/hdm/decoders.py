"""The HDM decoder capability: registers, commits, and translation."""

from operator import or_

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ...abi import hdm
from ...abi.hdm import DVSEC_RANGES, UNIT_BITS, WORD_BITS, Word
from ...common.pipeline import stage
from ...common.trees import one_hot_select, reduce_tree
from ...structs import layout_of
from .commit import Check, Programmed, factors
from .translate import LINE_BITS, Range, Translate, Translated

_LOW_BITS = hdm.DECODER["base_low"]["bits_31_28"].width
_UNITS = {"base": Word.BASE_LOW, "size": Word.SIZE_LOW, "skip": Word.SKIP_LOW}
"""What is programmed in units: the lower of its two registers, whose upper one follows."""


def _first_word(decoder):
    return (hdm.FIRST_DECODER + decoder * hdm.DECODER_STRIDE) // 4


class RegisterWrite(data.Struct):
    """A write of a 32-bit register."""

    word: WORD_BITS  # its offset / 4
    data: 32


class DvsecRange(data.Struct):
    """A range of the DVSEC, in 256 MiB."""

    active: 1  # memory is enabled and the range has a size
    base: UNIT_BITS
    size: UNIT_BITS


class _Decoder(data.Struct):
    """What a decoder keeps: what is programmed, and what is in force since its commit."""

    programmed: Programmed
    position: 4
    lock_on_commit: 1
    commit: 1
    committed: 1
    error: 1
    end: UNIT_BITS + 1
    device_after: UNIT_BITS + 1


class Decoders(wiring.Component):
    """HDM decoders of a device: host addresses to its own, by ranges that software programs and commits.

    Decoders are committed in ascending order: a commit of decoder n is refused with `error` unless all below
    it are committed and none above it is, and unless `Check` finds it in order. What is in force are copies
    that a commit takes, so programming a committed decoder changes nothing until it is taken back and
    committed anew. A decoder that was locked on commit changes no more until reset. Until the decoders are
    enabled the ranges of the DVSEC decode, from device address 0 on, the second behind the first.

    Parameters
    ----------
    decoders : how many there are, one of `abi.hdm.COUNT_CODES`.
    capacity : the device's memory, in 256 MiB.
    lookups : addresses that are translated in a cycle.

    Members
    -------
    write : In(stream(RegisterWrite)) : register writes; while a commit is checked it waits.
    clear : In(1) : with it everything that was programmed is as after reset, locked or not; not while
        `write` waits.
    read_word : In : a register's offset / 4.
    read_data : Out(32) : its value a cycle later.
    dvsec : In(DvsecRange) x 2.
    i : In(stream(LINE_BITS), always_ready) x lookups : host addresses of lines.
    o : Out(stream(Translated), always_ready) x lookups : where they lead, `latency_cycles` later.

    Throughput is one address per cycle and lookup. A commit is checked in `Check.latency_cycles` + 1 cycles.
    """

    latency_cycles = Translate.latency_cycles

    def __init__(self, *, decoders, capacity, lookups=1):
        self.capability = hdm.capability_of(decoders)
        if not isinstance(lookups, int) or lookups < 1:
            raise ValueError(f"lookups must be a positive integer, not {lookups!r}")
        self.decoders = decoders
        self.capacity = capacity
        super().__init__(
            {
                "write": In(stream.Signature(RegisterWrite)),
                "clear": In(1),
                "read_word": In(WORD_BITS),
                "read_data": Out(32),
                "dvsec": In(DvsecRange).array(DVSEC_RANGES),
                "i": In(stream.Signature(LINE_BITS, always_ready=True)).array(lookups),
                "o": Out(stream.Signature(Translated, always_ready=True)).array(lookups),
            }
        )

    def elaborate(self, platform):
        m = Module()
        decoders = [Signal(_Decoder, name=f"decoder_{n}") for n in range(self.decoders)]
        ranges = [Signal(Range, name=f"range_{n}") for n in range(self.decoders)]
        enable = Signal()
        used = [Signal(Range, name=f"used_{n}") for n in range(self.decoders + DVSEC_RANGES)]
        for n, (asked, told) in enumerate(zip(self.i, self.o, strict=True)):
            m.submodules[f"translate_{n}"] = translate = Translate(ranges=len(used))
            wiring.connect(m, wiring.flipped(asked), translate.i)
            wiring.connect(m, translate.o, wiring.flipped(told))
            m.d.comb += [theirs.eq(ours) for theirs, ours in zip(translate.ranges, used, strict=True)]
        for kept, ours in zip(ranges, used, strict=False):
            m.d.comb += ours.eq(kept)
            m.d.comb += ours.active.eq(kept.active & enable)
        self._dvsec_ranges(m, used[self.decoders :], enable)
        busy = Signal()
        starts = self._write(m, decoders, ranges, enable, busy)
        self._commit(m, decoders, ranges, starts, busy)
        self._read(m, decoders, enable)
        with m.If(self.clear):
            m.d.sync += [enable.eq(0), *(state.eq(0) for state in (*decoders, *ranges))]
        return m

    def _dvsec_ranges(self, m, ranges, enable):
        behind = 0
        for given, used in zip(self.dvsec, ranges, strict=True):
            m.d.sync += [
                used.active.eq(given.active & ~enable),
                used.base.eq(given.base),
                used.end.eq(given.base + given.size),
                used.device.eq(behind),
            ]
            behind = given.size

    def _write(self, m, decoders, ranges, enable, busy):
        """Register writes. Returns, for each decoder, whether one begins its commit."""
        written = self.write.payload
        control = data.View(layout_of(hdm.CONTROL), written.data)
        m.d.comb += self.write.ready.eq(~busy)
        accepted = self.write.valid & self.write.ready
        with m.If(accepted & (written.word == hdm.GLOBAL_CONTROL.at // 4)):
            m.d.sync += enable.eq(data.View(layout_of(hdm.GLOBAL_CONTROL), written.data).enable)

        starts = []
        for n, decoder in enumerate(decoders):
            program, first = decoder.programmed, _first_word(n)
            here = accepted & ~(decoder.committed & decoder.lock_on_commit)
            for name, word in _UNITS.items():
                with m.If(here & (written.word == first + word)):
                    m.d.sync += program[name][:_LOW_BITS].eq(written.data[-_LOW_BITS:])
                with m.If(here & (written.word == first + word + 1)):
                    m.d.sync += program[name][_LOW_BITS:].eq(written.data)
            with m.If(here & (written.word == first + Word.CONTROL)):
                m.d.sync += [
                    program.granularity.eq(control.granularity),
                    program.ways.eq(control.ways),
                    decoder.position.eq(control.position),
                    decoder.lock_on_commit.eq(control.lock_on_commit),
                    decoder.commit.eq(control.commit),
                ]
                with m.If(~control.commit):
                    m.d.sync += [decoder.committed.eq(0), decoder.error.eq(0), ranges[n].active.eq(0)]
            starts.append(here & (written.word == first + Word.CONTROL) & control.commit & ~decoder.commit)
        return starts

    def _commit(self, m, decoders, ranges, starts, busy):
        """Check the decoder whose commit begins, against those before it; what is in force once that ends."""
        m.submodules.check = check = Check(capacity=self.capacity)
        waiting, chosen = Signal(range(check.latency_cycles + 2)), Signal(self.decoders)
        m.d.comb += busy.eq(waiting != 0)
        with m.If(reduce_tree(starts, or_)):
            m.d.sync += [chosen.eq(Cat(starts)), waiting.eq(check.latency_cycles + 1)]
        with m.Elif(busy):
            m.d.sync += waiting.eq(waiting - 1)
        below = chosen[1:]  # bit n - 1: decoder n is chosen, and n - 1 is before it
        m.d.comb += [
            check.programmed.eq(one_hot_select(chosen, [d.programmed.as_value() for d in decoders])),
            check.host_end.eq(self._before(below, [d.end for d in decoders])),
            check.device_end.eq(self._before(below, [d.device_after for d in decoders])),
        ]
        committed = Cat(d.committed for d in decoders)
        in_order = stage(m, committed == (chosen - 1)[: self.decoders])
        for n, decoder in enumerate(decoders):
            with m.If((waiting == 1) & chosen[n]):
                program = decoder.programmed
                three, fold = factors(program.ways)
                ok = check.ok & in_order
                m.d.sync += [decoder.committed.eq(ok), decoder.error.eq(~ok)]
                with m.If(ok):
                    m.d.sync += [
                        decoder.end.eq(check.end),
                        decoder.device_after.eq(check.device_after),
                        ranges[n].active.eq(1),
                        ranges[n].base.eq(program.base),
                        ranges[n].end.eq(check.end),
                        ranges[n].device.eq(check.device),
                        ranges[n].granularity.eq(program.granularity),
                        ranges[n].fold.eq(fold),
                        ranges[n].three.eq(three),
                    ]

    @staticmethod
    def _before(below, values):
        return one_hot_select(below, values[:-1]) if len(values) > 1 else 0

    def _read(self, m, decoders, enable):
        """The register that is asked for, a cycle later."""
        answers = {hdm.CAPABILITY.at // 4: self.capability}
        answers[hdm.GLOBAL_CONTROL.at // 4] = hdm.GLOBAL_CONTROL.pack(enable=1) * enable
        for n, decoder in enumerate(decoders):
            program, first = decoder.programmed, _first_word(n)
            for name, word in _UNITS.items():
                answers[first + word] = program[name][:_LOW_BITS] << 32 - _LOW_BITS
                answers[first + word + 1] = program[name][_LOW_BITS:]
            control = data.View(layout_of(hdm.CONTROL), Signal(32, name=f"control_{n}"))
            m.d.comb += [
                control.granularity.eq(program.granularity),
                control.ways.eq(program.ways),
                control.lock_on_commit.eq(decoder.lock_on_commit),
                control.commit.eq(decoder.commit),
                control.committed.eq(decoder.committed),
                control.error.eq(decoder.error),
                control.host_only.eq(1),
                control.position.eq(decoder.position),
            ]
            answers[first + Word.CONTROL] = control.as_value()
        with m.Switch(self.read_word):
            for word, value in answers.items():
                with m.Case(word):
                    m.d.sync += self.read_data.eq(value)
            with m.Default():
                m.d.sync += self.read_data.eq(0)
