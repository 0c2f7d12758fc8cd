"""Which entries of a queue come next: one each for a column command, a precharge, and an activate."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ...common.trees import reduce_tree
from .banks import place_layout
from .queue import entry_layout

PATIENCE_FRAMES = 64
"""How long the oldest entry lets others use the bank's row that it would close."""


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
    that are ready, pick the oldest. What is collected may be a frame old where that errs to the safe side.

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    entries : entries of the queue.
    shared : whether entries belong to two clients; if not, all are favoured.

    Members
    -------
    collect, flag, tick : In(1) : the cycles of the three steps; `tick` is the frame's last one.
    entry : In(entry_layout).array, used, hits, closes, units : In : the queue's.
    active : In(1) : the queue has the bus. prepare : In(1) : it has not, but may prepare.
    favour_unit : In(1) : the unit is the favoured client. first_unit : In(1) : of entries that may go, the
        unit's come first.
    columns, activates, precharges : In(banks) : banks in which the rules and refresh allow each command.
    others : In(banks) : banks that the other queue has entries for.
    wanted : Out(banks) : banks that this queue has entries for.
    column : Out(1), column_entry : Out(entries), column_place, column_slot, column_unit : Out : the entry
        that may go, in the cycle of `tick`.
    column_stay : Out(entries) : the entries before that one; all if there is none.
    column_banks, activate_banks, precharge_banks : Out(banks) : the commands' banks as bits of vectors.
    activate, activate_bank, activate_row : Out. precharge, precharge_bank : Out.
    """

    def __init__(self, *, part, density_gbit, entries, shared):
        self.part = part
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
                **{name: In(1) for name in ("active", "prepare", "favour_unit", "first_unit")},
                **{name: In(banks) for name in ("columns", "activates", "precharges", "others")},
                "wanted": Out(banks),
                "column": Out(1),
                "column_entry": Out(entries),
                "column_stay": Out(entries),
                "column_place": Out(place),
                "column_banks": Out(banks),
                "column_slot": Out(layout["slot"].shape),
                "column_unit": Out(1),
                "activate": Out(1),
                "activate_bank": Out(bank),
                "activate_banks": Out(banks),
                "activate_row": Out(place["row"].shape),
                "precharge": Out(1),
                "precharge_bank": Out(bank),
                "precharge_banks": Out(banks),
            }
        )

    def elaborate(self, platform):
        m = Module()
        count, banks = self.count, self.part.banks
        favoured_now = self._favoured(self.favour_unit)

        # Collect: what entries want of each bank.
        wanted = [Signal(banks, name=f"wanted_{i}") for i in range(count)]
        m.d.comb += [
            w.eq(used << e.place.bank) for w, used, e in zip(wanted, self.used, self.entry, strict=True)
        ]

        def collected(flags, name):
            """Banks of the entries in `flags`."""
            vector = Signal(banks, name=name, reset_less=True)
            parts = [w & flag.replicate(banks) for w, flag in zip(wanted, flags, strict=True)]
            with m.If(self.collect):
                m.d.sync += vector.eq(reduce_tree(parts, _or))
            return vector

        misses = self.used & ~self.hits
        favour = Signal(count)
        m.d.comb += favour.eq(favoured_now)
        hit_any = collected(self.hits, "hit_any")
        hit_favoured = collected(self.hits & favour, "hit_favoured") if self.shared else hit_any
        missed_favoured = collected(misses & favour, "missed_favoured") if self.shared else Const(0, banks)
        with m.If(self.collect):
            m.d.sync += self.wanted.eq(reduce_tree(wanted, _or))
        favour_unit = Signal()  # the one that the vectors were collected for
        with m.If(self.collect):
            m.d.sync += favour_unit.eq(self.favour_unit)

        # The oldest entry's patience.
        waited = Signal(range(PATIENCE_FRAMES + 1))
        urgent, urgent_favoured = Signal(), Signal()  # the oldest entry insists; and is favoured
        insisted = Signal(banks)  # its bank, if it wants another row
        with m.If(self.tick):
            with m.If(self.column_entry[0] | ~self.used[0]):
                m.d.sync += waited.eq(0)
            with m.Elif(waited != PATIENCE_FRAMES):
                m.d.sync += waited.eq(waited + 1)
        insists = Signal()
        m.d.comb += insists.eq((waited == PATIENCE_FRAMES) & ~self.hits[0] & ~self.closes[0])
        with m.If(self.collect):
            m.d.sync += [
                insisted.eq(wanted[0] & insists.replicate(banks)),
                urgent.eq(insists),
                urgent_favoured.eq(insists & favour[0]),
            ]
        with m.If(self.tick & self.column_entry[0]):
            m.d.sync += urgent.eq(0)

        # Flag: entries that are ready, by what their bank allows to favoured ones and to others.
        active, may = self.active.replicate(banks), Signal(banks)
        m.d.comb += may.eq(active | (self.prepare.replicate(banks) & ~self.others))
        go, go_other = Signal(banks), Signal(banks)
        move, move_other = Signal(banks), Signal(banks)
        m.d.comb += [
            go.eq(self.columns & active & ~(insisted & urgent_favoured.replicate(banks))),
            move.eq(may & (self.activates | (self.precharges & ~hit_favoured))),
            go_other.eq(self.columns & active & ~insisted & ~missed_favoured),
            move_other.eq(may & ~missed_favoured & (self.activates | (self.precharges & ~hit_any))),
        ]
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
        insist = Signal()  # the oldest entry closes a row that its own client hits
        allowed = Mux(urgent_favoured, self.precharges, self.precharges & ~hit_favoured)
        m.d.comb += insist.eq(
            urgent & self.active & misses[0] & allowed.bit_select(self.entry[0].place.bank, 1)
        )
        columns, activates, precharges = (Signal(count, reset_less=True) for _ in range(3))
        with m.If(self.flag):
            m.d.sync += [
                columns.eq(goes),
                activates.eq(moves & self.closes),
                precharges.eq((moves | insist) & ~self.closes),
            ]

        # Pick: the oldest.
        column, activate, precharge = Signal(count), Signal(count), Signal(count)
        if self.shared:
            preferred = Signal(count)
            m.d.comb += preferred.eq(columns & ~(self.units ^ self.first_unit.replicate(count)))
            pairs = zip(_oldest(preferred), _oldest(columns), strict=True)
            chosen, stay = (Mux(preferred.any(), first, second) for first, second in pairs)
        else:
            chosen, stay = _oldest(columns)
        m.d.comb += [
            column.eq(chosen),
            self.column_stay.eq(stay),
            activate.eq(_oldest(activates)[0]),
            precharge.eq(_oldest(precharges)[0]),
            self.column.eq(columns.any()),
            self.column_entry.eq(column),
            self.activate.eq(activates.any()),
            self.precharge.eq(precharges.any()),
            self.column_banks.eq(_chosen(column, wanted)),
            self.activate_banks.eq(_chosen(activate, wanted)),
            self.precharge_banks.eq(_chosen(precharge, wanted)),
            self.column_place.eq(_chosen(column, [e.place.as_value() for e in self.entry])),
            self.column_slot.eq(_chosen(column, [e.slot for e in self.entry])),
            self.column_unit.eq((column & self.units).any()),
            self.activate_bank.eq(_chosen(activate, [e.place.bank for e in self.entry])),
            self.activate_row.eq(_chosen(activate, [e.place.row for e in self.entry])),
            self.precharge_bank.eq(_chosen(precharge, [e.place.bank for e in self.entry])),
        ]
        return m

    def _favoured(self, favour_unit):
        """Entries of the favoured client."""
        if not self.shared:
            return ~Const(0, self.count)
        return ~(self.units ^ favour_unit.replicate(self.count))


def _or(a, b):
    return a | b


def _oldest(flags):
    """The lowest bit that is set, and the bits before it, all if none is set: a tree, not a carry chain."""
    count = len(flags)
    reached, step = flags, 1  # whether this bit or one below is set
    while step < count:
        reached, step = (reached | (reached << step))[:count], 2 * step
    return flags & ~(reached << 1)[:count], ~reached


def _chosen(one, values):
    """The value whose bit is set in `one`; zero if none is."""
    return reduce_tree(
        [value & bit.replicate(len(value)) for value, bit in zip(values, one, strict=True)], _or
    )
