"""The owner's page: quotas, weights, holdings, and the log of violations."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..abi import DeviceConfig
from ..abi.lines import LINE_BITS, LINE_BYTES, LINE_SHIFT
from ..abi.owner import (
    AUDIT,
    AUDIT_LINE,
    HOLDINGS,
    HOLDINGS_LINE,
    OWNER_BYTES,
    QUOTAS,
    QUOTAS_LINE,
    RECORD,
    RECORDS,
    RECORDS_LINE,
    WEIGHT_BITS,
    WEIGHTS,
    WEIGHTS_LINE,
)
from ..interfaces import EXTENTS_BITS, LINE_ADDRESS_BITS, Refusal
from ..memory.scrub import EXTENT_LINES_LOG2
from ..structs import layout_of

OWNER_LINES = OWNER_BYTES // LINE_BYTES
_KEPT = data.StructLayout({"refusal": Refusal, "cycle": RECORD["cycle"].width})
"""What the log keeps of a record."""


class OwnerPage(wiring.Component):
    """Quotas and weights of tenants as their owner sets them, and a log of the violations of all of them.

    Parameters
    ----------
    config : what the device is made of.

    Members
    -------
    access : In(1), line : In : an access, to this line of the page. Its data is there from the next cycle on
        until the next access.
    write : In(1), given : In(LINE_BITS), enable : In(64) : it writes words of 32 bits, those of which all
        bytes are enabled; what takes no writes stays as it is.
    data : Out(LINE_BITS) : the line's data.
    refused : Out(1) : a write says that more was read than was recorded, or less than before, or names a
        weight that is none.
    quotas : Out(EXTENTS_BITS) x apertures : extents that each tenant may own.
    weights : Out(WEIGHT_BITS) x apertures : share of each in the attention units.
    holdings : In(EXTENTS_BITS) x apertures : extents that each owns.
    cycles : In(64) : the device's cycle.
    reports : In(stream(Refusal)) : violations; `line` is of the device.
    lost : In : violations that nobody could report, in this cycle.
    forget : Out(1) : records were read; who keeps repetitions back shall report them anew.

    A report is compared with every record that is not read, one in 2 cycles, and recorded when it is like
    none of them and there is room; the next one is taken after `report_cycles` at most.
    """

    report_cycles = 2 * RECORDS + 3

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        super().__init__(
            {
                "access": In(1),
                "line": In(range(OWNER_LINES)),
                "write": In(1),
                "given": In(LINE_BITS),
                "enable": In(LINE_BYTES),
                "data": Out(LINE_BITS),
                "refused": Out(1),
                "quotas": Out(EXTENTS_BITS, init=config.extents).array(config.apertures),
                "weights": Out(WEIGHT_BITS, init=1).array(config.apertures),
                "holdings": In(EXTENTS_BITS).array(config.apertures),
                "cycles": In(64),
                "reports": In(stream.Signature(Refusal)),
                "lost": In(8),
                "forget": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bits = ceil_log2(RECORDS)
        m.submodules.log = log = memory.Memory(shape=_KEPT, depth=RECORDS, init=[])
        shown, held = Signal(LINE_BITS, reset_less=True), Signal(range(OWNER_LINES), reset_less=True)
        recorded, read = Signal(32), Signal(32)
        lost = Signal(64)
        full_here, known = Signal(), Signal()

        # The host's side.
        host = log.read_port()
        sequence = Signal(32)
        record = Signal(layout_of(RECORD))
        m.d.comb += [
            host.en.eq(self.access),
            host.addr.eq(self.line[:bits]),
            # of the last lap that has one there
            sequence.eq(recorded - 1 - (recorded - 1 - held)[:bits]),
            record.address.eq(host.data.refusal.line << LINE_SHIFT),
            record.cycle.eq(host.data.cycle),
            record.sequence.eq(sequence),
            record.tenant.eq(host.data.refusal.tenant),
            record.kind.eq(host.data.refusal.kind),
            known.eq((held >= RECORDS_LINE) & (held < RECORDS_LINE + RECORDS)),
            full_here.eq(known & (sequence < recorded)),
            self.data.eq(Mux(known, Mux(full_here, record, 0), shown)),
        ]
        quotas, holdings = Signal(layout_of(QUOTAS)), Signal(layout_of(HOLDINGS))
        weights = Signal(layout_of(WEIGHTS))
        audit = Signal(layout_of(AUDIT))
        m.d.comb += [audit.recorded.eq(recorded), audit.read.eq(read), audit.lost.eq(lost)]
        for n, (quota, holding) in enumerate(zip(self.quotas, self.holdings, strict=True)):
            m.d.comb += [quotas[f"tenant{n}"].eq(quota), holdings[f"tenant{n}"].eq(holding)]
            m.d.comb += weights[f"tenant{n}"].eq(self.weights[n])
        with m.If(self.access):
            m.d.sync += held.eq(self.line)
            with m.Switch(self.line):
                for line, value in (
                    (QUOTAS_LINE, quotas),
                    (HOLDINGS_LINE, holdings),
                    (AUDIT_LINE, audit),
                    (WEIGHTS_LINE, weights),
                ):
                    with m.Case(line):
                        m.d.sync += shown.eq(value)
                with m.Default():
                    m.d.sync += shown.eq(0)
        writes = self.access & self.write
        no_weight = Signal(self.config.apertures)
        for n, (quota, weight) in enumerate(zip(self.quotas, self.weights, strict=True)):
            given, whole = self._word(QUOTAS, f"tenant{n}")
            with m.If(writes & (self.line == QUOTAS_LINE) & whole):
                # More than all of any device is all of it.
                m.d.sync += quota.eq(Mux(given[EXTENTS_BITS:].any(), (1 << EXTENTS_BITS) - 1, given))
            given, whole = self._word(WEIGHTS, f"tenant{n}")
            with m.If(writes & (self.line == WEIGHTS_LINE) & whole):
                with m.If(given[WEIGHT_BITS:].any() | (given == 0)):
                    m.d.comb += no_weight[n].eq(1)
                with m.Else():
                    m.d.sync += weight.eq(given)
        given, whole = self._word(AUDIT, "read")
        reads = writes & (self.line == AUDIT_LINE) & whole
        fits = (given - read)[: len(read)] <= (recorded - read)[: len(read)]
        m.d.comb += [self.refused.eq(reads & ~fits | no_weight.any()), self.forget.eq(reads & fits)]
        with m.If(self.forget):
            m.d.sync += read.eq(given)

        # The log's side.
        entry, write = log.read_port(), log.write_port()
        told = Signal(Refusal, reset_less=True)
        at = Signal(32, reset_less=True)
        unseen = Signal()
        there = entry.data.refusal
        m.d.comb += [
            entry.addr.eq(at[:bits]),
            write.addr.eq(recorded[:bits]),
            write.data.refusal.eq(told),
            write.data.cycle.eq(self.cycles),
        ]
        m.d.sync += lost.eq(lost + self.lost + unseen)
        with m.FSM():
            with m.State("WAIT"):
                m.d.comb += self.reports.ready.eq(1)
                m.d.sync += [told.eq(self.reports.payload), at.eq(read)]
                with m.If(self.reports.valid):
                    m.next = "LOOK"
            with m.State("LOOK"):
                with m.If(at == recorded):
                    m.next = "RECORD"
                with m.Else():
                    m.next = "COMPARE"
            with m.State("COMPARE"):
                m.d.sync += at.eq(at + 1)
                m.next = "LOOK"
                with m.If(
                    Cat(
                        there.line >> EXTENT_LINES_LOG2 == told.line >> EXTENT_LINES_LOG2,
                        there.tenant == told.tenant,
                        there.kind == told.kind,
                    ).all()
                ):
                    m.next = "WAIT"
            with m.State("RECORD"):
                with m.If(recorded - read == RECORDS):
                    m.d.comb += unseen.eq(1)
                with m.Else():
                    m.d.comb += write.en.eq(1)
                    m.d.sync += recorded.eq(recorded + 1)
                m.next = "WAIT"
        return m

    def _word(self, layout, name):
        """What is written of a word, and whether all of it is."""
        offset, size = layout.offset(name), layout[name].width
        return self.given[offset:][:size], self.enable[offset // 8 :][: size // 8].all()


assert RECORD["address"].width >= LINE_ADDRESS_BITS + LINE_SHIFT
