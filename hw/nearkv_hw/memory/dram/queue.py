"""Accesses that wait for their command, oldest first."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ...common.trees import one_hot_select
from .banks import place_layout


def entry_layout(part, density_gbit, entries):
    """An access that waits."""
    return data.StructLayout(
        {
            "place": place_layout(part, density_gbit),
            "slot": ceil_log2(entries),
        }
    )


def moved(vector, stay):
    """Bits of entries, where the entries are once one left: those in `stay` are where they were."""
    return (vector & stay) | ((vector >> 1) & ~stay)


class AccessQueue(wiring.Component):
    """A queue from whose middle entries leave; those behind move up, so the order is the age.

    What belongs to an entry and is not needed to choose (tags, data) lies outside, in memories with a place
    for each of the entries' `slot`s. Slots move with entries; the slot of one that leaves goes to the end.

    Parameters
    ----------
    part : the part.
    density_gbit : its density.
    entries : entries, at least 2.
    asked : lines that are looked for.

    Members
    -------
    follow : In(1) : a frame begins; all inputs up to `closed` take effect.
    stay : In(entries) : the entries before the one that left with the frame before; all of them if none did.
    leave : In(entries) : the one that left, or none.
    activate, activate_bank, activate_row : In : a row was opened in the frame before.
    precharge, precharge_all, precharge_bank : In : a row was closed, or all.
    insert : In(1) : append an access at `place`. Not while full.
    place, unit, hit, closed : In : the access, and what its bank says after these commands: its row is open,
        no row is.
    slot : Out : the slot that the inserted access gets.
    asked : In(place).array, same : Out(1).array : whether some entry is an access to the very line.
    entries : Out(entry_layout).array : the entries, oldest first.
    used, hits, closes, units : Out(entries) : per entry: whether it is one; its row is open; its bank has no
        row open; it is the unit's.
    full : Out(1)
    """

    def __init__(self, *, part, density_gbit, entries, asked):
        if not isinstance(entries, int) or entries < 2:
            raise ValueError(f"entries must be an integer of at least 2, not {entries!r}")
        self.count = entries
        place = place_layout(part, density_gbit)
        bank = place["bank"].shape
        super().__init__(
            {
                "follow": In(1),
                "stay": In(entries),
                "leave": In(entries),
                "activate": In(1),
                "activate_bank": In(bank),
                "activate_row": In(place["row"].shape),
                "precharge": In(1),
                "precharge_all": In(1),
                "precharge_bank": In(bank),
                "insert": In(1),
                "place": In(place),
                "unit": In(1),
                "hit": In(1),
                "closed": In(1),
                "slot": Out(ceil_log2(entries)),
                "asked": In(place).array(asked),
                "same": Out(1).array(asked),
                "entries": Out(entry_layout(part, density_gbit, entries)).array(entries),
                **{name: Out(entries) for name in ("used", "hits", "closes", "units")},
                "full": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        count, entries = self.count, self.entries
        slot_bits = len(self.slot)
        slots = [Signal(slot_bits, name=f"slot_{i}", init=i) for i in range(count)]
        places = [Signal.like(self.place, name=f"place_{i}", reset_less=True) for i in range(count)]
        for entry, place, slot in zip(entries, places, slots, strict=True):
            m.d.comb += [entry.place.eq(place), entry.slot.eq(slot)]

        stay, freed = self.stay, Signal(slot_bits)
        m.d.comb += freed.eq(one_hot_select(self.leave, slots))
        opened = Cat(place.bank == self.activate_bank for place in places)
        matched = Cat(place.row == self.activate_row for place in places)
        shut = Cat(place.bank == self.precharge_bank for place in places)
        activated, hit, precharged = Signal(count), Signal(count), Signal(count)
        m.d.comb += [
            activated.eq(opened & self.activate.replicate(count)),
            hit.eq(activated & matched & self.used),
            precharged.eq((shut | self.precharge_all.replicate(count)) & self.precharge.replicate(count)),
        ]

        left, here = Signal(count), Signal(count)
        m.d.comb += [
            left.eq(moved(self.used, stay)),
            here.eq(((left << 1) | 1) & ~left & self.insert.replicate(count)),
        ]
        with m.If(self.follow):
            m.d.sync += [
                self.used.eq(left | here),
                self.units.eq(self._put(moved(self.units, stay), here, self.unit)),
                self.hits.eq(self._put(moved((self.hits | hit) & ~precharged, stay), here, self.hit)),
                self.closes.eq(
                    self._put(moved((self.closes & ~activated) | precharged, stay), here, self.closed)
                ),
            ]
            for i in range(count):
                with m.If(~stay[i]):
                    m.d.sync += slots[i].eq(slots[i + 1] if i + 1 < count else freed)
                    if i + 1 < count:
                        m.d.sync += places[i].eq(places[i + 1])
                with m.If(here[i]):
                    m.d.sync += places[i].eq(self.place)

        free = ((self.used << 1) | 1) & ~self.used  # the first one, if there is any
        m.d.comb += [
            self.slot.eq(one_hot_select(free[:count], slots)),
            *(
                same.eq((Cat(place == asked for place in places) & self.used).any())
                for same, asked in zip(self.same, self.asked, strict=True)
            ),
            self.full.eq(self.used[-1]),
        ]
        return m

    def _put(self, vector, here, bit):
        """A vector with `bit` at `here`."""
        return (vector & ~here) | (here & bit.replicate(self.count))
