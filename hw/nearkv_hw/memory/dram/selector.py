"""Which entries of a queue come next: one each for a column command, a precharge, and an activate."""

from operator import or_

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ...common.trees import one_hot_select, reduce_tree
from .aftermath import Aftermath
from .banks import Commands, decides_ahead, place_layout
from .queue import entry_layout, moved

PATIENCE_FRAMES = 64
"""How long the oldest entry lets others use the bank's row that it would close."""
GRACE_FRAMES = 32
"""How long the fabric, though favoured, leaves a row alone that the unit hits: a line of another row costs a
stream less between two of the stream's own rows."""
KEPT_FRAMES = 4
"""How long a row that was hit stays open for more, where only the client that is not favoured wants another:
as long as it takes until an access follows one that left, so that a stream does not lose its row between two.
"""
_FLAGS = ("preferred", "columns", "activates", "precharges")


class Selector(wiring.Component):
    """Chooses for each kind of command the oldest entry that is ready for it.

    An entry whose row is open may go when the rules allow it. One that finds another row closes it when no
    entry hits that row, and one that finds none opens its own. Where entries of one bank disagree:

    - the *favoured* client comes first: its entries close rows that only the other client's hit, and those no
      longer count as ready; the other client's entries leave rows alone that a favoured entry hits;
    - the oldest entry, after `PATIENCE_FRAMES`, closes a row in spite of its own client's hits.

    A queue without the bus may `prepare`: open and close rows in banks that no entry of the other queue is
    for.

    Choosing takes three steps, so that none is long: collect what the entries want of each bank, flag those
    that are ready, pick the oldest. Where a frame is too short for that (`decides_ahead`), what each bank
    allows is settled a frame ahead; entries are flagged by it as the next frame begins, without those that
    the commands of the frame between forbid, and the queue is asked in the very cycle in which it changes.

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    refresh : how it is refreshed.
    entries : entries of the queue.
    shared : whether entries belong to two clients (reads); if not (writes), all are favoured.

    Members
    -------
    collect, flag, tick : In(1) : the cycles of the three steps; `tick` is the frame's last one. A controller
        that decides ahead collects in the frame's first cycle and flags in its last one.
    entry : In(entry_layout).array, used, hits, closes, units : In : the queue's.
    arrives : In(1), arrives_bank, arrives_hit, arrives_unit : In : deciding ahead: what the queue gets with
        `collect`.
    commands : In(Commands), crowded : In(1) : deciding ahead: the frame's before, and what `Banks` says.
    active : In(1) : the queue has the bus. prepare : In(1) : it has not, but may prepare.
    may_yield : In(1) : the fabric, favoured, may leave rows to the unit. yields : Out(1) : it does, as of the
        frame before.
    favour_unit : In(1) : the unit is the favoured client. first_unit : In(1) : of entries that may go, the
        unit's come first.
    columns, activates, precharges : In(banks) : banks in which the rules and refresh allow each command, in
        the frame that is flagged.
    others : In(banks) : banks that the other queue has entries for.
    wanted : Out(banks) : banks that this queue has entries for.
    column : Out(1), column_place, column_slot, column_unit : Out : the entry that may go, in the cycle of
        `tick`.
    activate, activate_bank, activate_row : Out. precharge, precharge_bank : Out.
    leave, stay : Out(entries) : from then to the next `tick`: the entry that goes; the entries before it, all
        if there is none.
    """

    def __init__(self, *, part, density_gbit, refresh, entries, shared):
        self.part = part
        self.ahead = decides_ahead(part)
        self.density_gbit = density_gbit
        self.refresh = refresh
        self.count = entries
        self.shared = shared
        place = place_layout(part, density_gbit)
        self._place = place
        layout = entry_layout(part, density_gbit, entries)
        banks, bank = part.banks, place["bank"].shape
        super().__init__(
            {
                "collect": In(1),
                "flag": In(1),
                "tick": In(1),
                "entry": In(layout).array(entries),
                **{name: In(entries) for name in ("used", "hits", "closes", "units")},
                "arrives": In(1),
                "arrives_bank": In(bank),
                "arrives_hit": In(1),
                "arrives_unit": In(1),
                "commands": In(Commands(part=part, density_gbit=density_gbit)),
                "crowded": In(1),
                **{name: In(1) for name in ("active", "prepare", "may_yield", "favour_unit", "first_unit")},
                **{name: In(banks) for name in ("columns", "activates", "precharges", "others")},
                "wanted": Out(banks),
                "yields": Out(1),
                "column": Out(1),
                "column_place": Out(place),
                "column_slot": Out(layout["slot"].shape),
                "column_unit": Out(1),
                "activate": Out(1),
                "activate_bank": Out(bank),
                "activate_row": Out(place["row"].shape),
                "precharge": Out(1),
                "precharge_bank": Out(bank),
                "leave": Out(entries),
                "stay": Out(entries, init=(1 << entries) - 1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        ahead = self.ahead
        misses = self.used & ~self.hits
        collected = self._elaborate_collect(m, misses)
        ready = self._elaborate_ready(m, misses, collected)
        flags = [Signal(self.count, name=name, reset_less=True) for name in _FLAGS]
        if ahead:
            ready = self._elaborate_aftermath(m, *ready)
        columns = ready[0]
        preferred = columns & self._favoured(self.first_unit)
        if ahead:
            preferred, *ready = (moved(vector, self.stay) for vector in (preferred, *ready))
        with m.If(self.collect if ahead else self.flag):
            m.d.sync += [flag.eq(value) for flag, value in zip(flags, (preferred, *ready), strict=True)]
        self._elaborate_pick(m, *flags)
        return m

    def _elaborate_collect(self, m, misses):
        """What entries want of each bank, and what the oldest one insists on."""
        count, banks = self.count, self.part.banks
        favour = Signal(count)
        m.d.comb += favour.eq(self._favoured(self.favour_unit))
        wanted = [Signal(banks, name=f"wanted_{i}") for i in range(count)]
        used = self.used & ~self.leave if self.ahead else self.used
        m.d.comb += [w.eq(u << e.place.bank) for w, u, e in zip(wanted, used, self.entry, strict=True)]
        if self.ahead:
            arrives = Signal(banks)
            m.d.comb += arrives.eq(self.arrives << self.arrives_bank)
            arrives_favoured = ~(self.arrives_unit ^ self.favour_unit) if self.shared else Const(1)
        else:
            arrives, arrives_favoured = Const(0, banks), Const(0)

        def collected(flags, flag, name):
            """Banks of the entries in `flags`, and of the one that arrives, if `flag`."""
            vector = Signal(banks, name=name, reset_less=True)
            parts = [
                w & flag.replicate(banks) for w, flag in zip((*wanted, arrives), (*flags, flag), strict=True)
            ]
            with m.If(self.collect):
                m.d.sync += vector.eq(reduce_tree(parts, or_))
            return vector

        hit_any = collected(self.hits, self.arrives_hit, "hit_any")
        hit_favoured, missed_favoured = hit_any, Const(0, banks)
        if self.shared:
            hit_favoured = collected(self.hits & favour, self.arrives_hit & arrives_favoured, "hit_favoured")
            missed_favoured = collected(
                misses & favour, ~self.arrives_hit & arrives_favoured, "missed_favoured"
            )
        favour_unit = Signal()  # the one that the vectors were collected for
        with m.If(self.collect):
            m.d.sync += [
                self.wanted.eq(reduce_tree((*wanted, arrives), or_)),
                favour_unit.eq(self.favour_unit),
            ]

        # The oldest entry's patience.
        waited = Signal(range(PATIENCE_FRAMES + 1))
        urgent_favoured = Signal()  # the oldest entry insists, and is favoured
        insisted = Signal(banks)  # its bank, if it wants another row
        insists, yields = Signal(), Signal()
        m.d.comb += insists.eq(
            (waited == PATIENCE_FRAMES) & ~yields & ~self.leave[0] & ~self.hits[0] & ~self.closes[0]
        )
        with m.If(self.collect):
            m.d.sync += [
                insisted.eq(wanted[0] & insists.replicate(banks)),
                urgent_favoured.eq(insists & favour[0]),
            ]
            with m.If(self.leave[0] | ~self.used[0]):
                m.d.sync += waited.eq(0)
            with m.Elif(waited != PATIENCE_FRAMES):
                m.d.sync += waited.eq(waited + 1)
        taken = ~Const(0, banks)
        if self.shared:
            taken = self._taken(m, hit_any & ~hit_favoured, missed_favoured, yields)
            hit_any = hit_any | self._lately(m, hit_any)
        return hit_any, hit_favoured, missed_favoured, taken, favour_unit, insisted, urgent_favoured

    def _taken(self, m, hit_other, missed_favoured, yields):
        """Banks that the favoured client wants another row of, and does not leave to the other one."""
        waited, over, waits = Signal(range(GRACE_FRAMES + 1)), Signal(), Signal()
        m.d.comb += [
            over.eq((waited == GRACE_FRAMES) | ~self.may_yield | self.favour_unit),
            waits.eq((hit_other & missed_favoured).any()),
            yields.eq(waits & ~over),
        ]
        with m.If(self.tick):
            m.d.sync += self.yields.eq(yields)
            with m.If(~waits):
                m.d.sync += waited.eq(0)
            with m.Elif(yields):
                m.d.sync += waited.eq(waited + 1)
        return missed_favoured & (over.replicate(self.part.banks) | ~hit_other)

    def _lately(self, m, hit_any):
        """Banks whose open row was hit within the last `KEPT_FRAMES` frames, and some for twice as long."""
        lately, before = Signal.like(hit_any, name="lately"), Signal.like(hit_any, name="before")
        age = Signal(range(KEPT_FRAMES))
        with m.If(self.collect):
            m.d.sync += age.eq(age + 1)
            with m.If(age == 0):
                m.d.sync += [lately.eq(hit_any), before.eq(lately)]
            with m.Else():
                m.d.sync += lately.eq(lately | hit_any)
        return lately | before

    def _elaborate_ready(self, m, misses, collected):
        """Entries that are ready for each command, by what their bank allows to favoured ones and others."""
        hit_any, hit_favoured, missed_favoured, taken, favour_unit, insisted, urgent_favoured = collected
        count, banks = self.count, self.part.banks
        active, may = self.active.replicate(banks), Signal(banks)
        m.d.comb += may.eq(active | (self.prepare.replicate(banks) & ~self.others))
        columns = self.columns if self.ahead else self.columns & active
        first = urgent_favoured.replicate(banks)
        allowed = {
            "go": columns & ~(insisted & first),
            "go_other": columns & ~insisted & ~taken,
            "move": may & (self.activates | (self.precharges & ~hit_favoured & taken)),
            "move_other": may & ~missed_favoured & (self.activates | (self.precharges & ~hit_any)),
            # the oldest entry closes a row that its own client hits
            "insists": (insisted & self.precharges & (~hit_favoured | first)).any() & self.active,
        }
        go, go_other, move, move_other, insists = (
            self._flagged(m, name, value) for name, value in allowed.items()
        )
        favour = self._favoured(favour_unit)

        def ready(vector, other, flags, name):
            """Entries in `flags` whose bank is in the vector for their client."""
            own = Cat(vector.bit_select(e.place.bank, 1) for e in self.entry)
            result = Signal(count, name=name)
            if self.shared:
                others = Cat(other.bit_select(e.place.bank, 1) for e in self.entry)
                m.d.comb += result.eq(flags & ((own & favour) | (others & ~favour)))
            else:
                m.d.comb += result.eq(flags & own)
            return result

        goes = ready(go, go_other, self.hits, "goes")
        moves = ready(move, move_other, misses, "moves")
        return goes, moves & self.closes, (moves | (insists & misses[0])) & ~self.closes

    def _flagged(self, m, name, value):
        """A value of the cycle of `flag`; deciding ahead, in the cycle after it."""
        signal = Signal.like(value, name=name)
        if self.ahead:
            with m.If(self.flag):
                m.d.sync += signal.eq(value)
        else:
            m.d.comb += signal.eq(value)
        return signal

    def _elaborate_aftermath(self, m, goes, activates, precharges):
        """What was ready a frame ahead, without what the commands since and a turn of the bus forbid."""
        m.submodules.aftermath = aftermath = Aftermath(
            part=self.part,
            density_gbit=self.density_gbit,
            refresh=self.refresh,
            banks=self.count,
            write=not self.shared,
        )
        wiring.connect(m, wiring.flipped(self.commands), aftermath.commands)
        m.d.comb += [
            aftermath.crowded.eq(self.crowded),
            *(bank.eq(e.place.bank) for bank, e in zip(aftermath.bank, self.entry, strict=True)),
        ]
        had_bus = self._flagged(m, "had_bus", self.active)
        # a queue that just lost the bus leaves the banks to the other one
        columns, rows = self.active, self.active | ~had_bus
        return (
            goes & ~aftermath.stops_column & columns.replicate(self.count),
            activates & ~aftermath.stops_activate & rows.replicate(self.count),
            precharges & ~aftermath.stops_precharge & rows.replicate(self.count),
        )

    def _elaborate_pick(self, m, preferred, columns, activates, precharges):
        """The oldest of each; of columns, of those of the client that comes first."""
        count = self.count
        if self.shared:
            pairs = zip(_oldest(preferred), _oldest(columns), strict=True)
            chosen, stays = (Mux(preferred.any(), first, second) for first, second in pairs)
        else:
            chosen, stays = _oldest(columns)
        column, activate, precharge = Signal(count), Signal(count), Signal(count)
        banks = [e.place.bank for e in self.entry]
        m.d.comb += [
            column.eq(chosen),
            activate.eq(_oldest(activates)[0]),
            precharge.eq(_oldest(precharges)[0]),
            self.column.eq(columns.any()),
            self.activate.eq(activates.any()),
            self.precharge.eq(precharges.any()),
            self.column_place.eq(one_hot_select(column, [e.place.as_value() for e in self.entry])),
            self.column_slot.eq(one_hot_select(column, [e.slot for e in self.entry])),
            self.column_unit.eq((column & self.units).any()),
            self.activate_bank.eq(one_hot_select(activate, banks)),
            self.activate_row.eq(one_hot_select(activate, [e.place.row for e in self.entry])),
            self.precharge_bank.eq(one_hot_select(precharge, banks)),
        ]
        with m.If(self.tick):
            m.d.sync += [self.leave.eq(column), self.stay.eq(stays)]

    def _favoured(self, favour_unit):
        """Entries of the client that is favoured, or that comes first: the unit's, or all others."""
        if not self.shared:
            return ~Const(0, self.count)
        return ~(self.units ^ favour_unit.replicate(self.count))


def _oldest(flags):
    """The lowest bit that is set, and the bits before it, all if none is set: a tree, not a carry chain."""
    count = len(flags)
    reached, step = flags, 1  # whether this bit or one below is set
    while step < count:
        reached, step = (reached | (reached << step))[:count], 2 * step
    return flags & ~(reached << 1)[:count], ~reached
