"""Shares of a sub-channel: how much of its time the unit and the fabric each have when both want it."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

SIXTEENTHS = 16
TURN_FRAMES = 16
"""Frames of a turn for each sixteenth of the share."""
LEAST_FRAMES = 4
OWED_LIMIT = 2047


def checked_share(fabric_share):
    """A share of the fabric, if it is one."""
    if not isinstance(fabric_share, int) or not 0 <= fabric_share <= SIXTEENTHS:
        raise ValueError(f"fabric_share must be 0 to {SIXTEENTHS} sixteenths, not {fabric_share!r}")
    return fabric_share


class Shares(wiring.Component):
    """Who comes first, by shares of time.

    Clients that want the memory at once take turns in being *favoured*: of 256 frames the fabric has 16 for
    each sixteenth of its share, the unit the rest. The favoured client may close rows that the other one uses
    and, if it is the fabric, have its writes written; so neither can keep the other from a bank or from the
    bus for longer than its turn. A turn lasts until the client had at least one column command. The unit's
    turn is counted from its first one: what lies before (the end of writes, the other's rows closed and its
    own opened), like what the fabric's turn took too long, is taken off the fabric's next turns, if need be
    all of one. Without a share the fabric still has `LEAST_FRAMES` a turn, so that it never waits for ever.
    Frames in which the fabric, favoured, leaves a row to the unit are an advance on the unit's next turn.

    Column commands of entries that are ready alternate more finely, so that few accesses of one client never
    wait for many of the other's: `first_unit` says whom they belong to, by what each had of late.

    Parameters
    ----------
    fabric_share : sixteenths of the time that belong to the fabric, 0 to 16.

    Members
    -------
    tick : In(1) : a frame ends.
    unit_wants, fabric_wants : In(1) : the client has accesses that wait.
    pause : In(1) : a frame that counts for nobody (refresh).
    unit_column, fabric_column : In(1) : the frame has a column command of the client.
    yields : In(1) : the fabric is favoured and leaves a row to the unit.
    may_yield : Out(1) : it may, as long as something is left of the unit's next turn.
    favour_unit : Out(1) : the unit is favoured, by what was wanted in the cycle before. A client that wants
        alone always is.
    first_unit : Out(1) : the unit's column commands come first.
    holds_writes : Out(1) : writes of the fabric must not begin: the unit is favoured, and has had less than
        its share, or, also where its share is nothing, not yet a command in its turn.
    """

    def __init__(self, *, fabric_share):
        self.fabric_share = checked_share(fabric_share)
        super().__init__(
            {
                **{
                    name: In(1)
                    for name in (
                        "tick",
                        "unit_wants",
                        "fabric_wants",
                        "pause",
                        "unit_column",
                        "fabric_column",
                        "yields",
                    )
                },
                **{name: Out(1) for name in ("favour_unit", "first_unit", "holds_writes", "may_yield")},
            }
        )

    def elaborate(self, platform):
        m = Module()
        fabric, unit = self.fabric_share, SIXTEENTHS - self.fabric_share
        longest = SIXTEENTHS * TURN_FRAMES
        unit_turn, served = Signal(), Signal()
        left = Signal(range(longest + 1), init=fabric * TURN_FRAMES)
        lead = Signal(range(longest))  # frames that the fabric had too many of, not yet taken off
        both = Signal()  # in the cycle before
        serves = Signal()
        m.d.sync += both.eq(self.unit_wants & self.fabric_wants & ~self.pause)
        m.d.comb += serves.eq(Mux(unit_turn, self.unit_column, self.fabric_column))
        whole = max(fabric * TURN_FRAMES, LEAST_FRAMES)
        units = Signal(range(longest + 1), init=longest - whole)  # frames of the unit's next turn
        m.d.comb += self.may_yield.eq(units != 0)
        with m.If(self.tick & both):
            m.d.sync += served.eq(served | serves)
            with m.If(self.yields & ~unit_turn & (units != 0)):
                m.d.sync += units.eq(units - 1)
            with m.Elif(~served & ~serves & (unit_turn | (left == 0))):
                m.d.sync += lead.eq(Mux(lead == longest - 1, lead, lead + 1))
            with m.Elif(left != 0):
                m.d.sync += left.eq(left - 1)
            with m.Elif(unit_turn & (lead >= whole)):
                m.d.sync += [left.eq(longest - whole), lead.eq(lead - whole)]
            with m.Elif(served | serves):
                m.d.sync += [
                    unit_turn.eq(~unit_turn),
                    served.eq(0),
                    left.eq(Mux(unit_turn, whole - lead, units)),
                    lead.eq(Mux(unit_turn, 0, lead)),
                    units.eq(longest - whole),
                ]
        m.d.sync += self.favour_unit.eq(self.unit_wants & (~self.fabric_wants | unit_turn))
        m.d.comb += self.holds_writes.eq(self.favour_unit & (self.first_unit | (unit_turn & ~served)))

        owed = Signal(signed(13))  # to the unit, in sixteenths of a column command
        change = Signal(signed(6))
        with m.If(self.unit_column):
            m.d.comb += change.eq(-fabric)
        with m.Elif(both):
            m.d.comb += change.eq(unit)
        with m.Elif(owed > 0):
            m.d.comb += change.eq(-1)
        with m.Elif(owed < 0):
            m.d.comb += change.eq(1)
        rises, falls = owed < OWED_LIMIT, owed > -OWED_LIMIT
        with m.If(self.tick & ~self.pause):
            with m.If(Mux(change < 0, falls, rises)):
                m.d.sync += owed.eq(owed + change)
            m.d.sync += self.first_unit.eq(owed > 0)
        return m
