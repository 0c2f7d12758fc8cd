"""Who owns which extent of a channel: the table that every access is checked against."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..interfaces import TENANT_BITS, OwnerPort

_PACKED = 16
"""Extents per row of the memory: few rows to clear, and little Verilog."""


class Owner(data.Struct):
    """The owner of an extent; `tenant` has a meaning when it is `owned`. What is neither `owned` nor
    `scrubbing` is free."""

    owned: 1
    tenant: TENANT_BITS
    scrubbing: 1  # it was given back and is not zero yet


class OwnerCheck(wiring.Signature):
    """The check of an access, seen from the block that asks.

    Parameters
    ----------
    extents : of the channel.

    Members
    -------
    valid, extent : Out : start the check of an access to the channel's `extent`.
    owner : In(Owner) : the owner, from the next cycle on until the next check.
    """

    def __init__(self, extents):
        super().__init__({"valid": Out(1), "extent": Out(range(extents)), "owner": In(Owner)})


class OwnerTable(wiring.Component):
    """Owner table of one channel, on chip.

    After reset every extent is free: the table is swept before the first look-up, which takes `clear_cycles`.
    An extent beyond the channel is owned by somebody else whoever asks. An extent that is given back is
    nobody's, and free when whoever takes `scrub` has written zeros over it.

    Parameters
    ----------
    config : the device's configuration.
    checks : accesses that are checked per cycle, 1 or 2.

    Members
    -------
    port : In(OwnerPort) : look-ups, claims and releases, one at a time. What finds an extent free, or the
        tenant's, takes it, or gives it back, in the same step; accesses checked after the answer came meet
        the new owner.
    scrub : Out(stream) : an extent that was given back; it is free once it was taken. The lowest one of a
        table row goes first, rows in turn.
    checks : In(OwnerCheck) x checks : checks of accesses.
    ready : Out(1) : the table is clear; until then no check may be started.
    scrubbing, free : Out : extents that were given back and are not free yet, and those that are free.

    Latency of a check is 1 cycle (`latency_cycles`), one check per cycle and port. A request at `port` is
    answered after 2 cycles (`port_latency_cycles`) and takes 3; it waits a cycle more where the table is
    searched for what was given back, which takes 2 cycles for a row of the table.
    """

    latency_cycles = 1
    port_latency_cycles = 2

    def __init__(self, *, config, checks=1):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        if checks not in (1, 2):
            raise ValueError(f"checks must be 1 or 2, not {checks!r}")
        self.extents = config.slice_extents
        self._rows = max(2, -(-self.extents // _PACKED))
        super().__init__(
            {
                "port": In(OwnerPort()),
                "scrub": Out(stream.Signature(range(self.extents))),
                "checks": In(OwnerCheck(self.extents)).array(checks),
                "ready": Out(1),
                "scrubbing": Out(range(self.extents + 1)),
                "free": Out(range(self.extents + 1), init=self.extents),
            }
        )

    @property
    def clear_cycles(self):
        """Cycles from reset to `ready`."""
        return self._rows

    def elaborate(self, platform):
        m = Module()
        row = data.ArrayLayout(Owner, _PACKED)
        m.submodules.table = table = Memory(shape=row, depth=self._rows, init=[])
        write = table.write_port(granularity=1)
        looked_up = table.read_port()
        for n, check in enumerate(self.checks):
            checked = table.read_port()
            column = Signal(range(_PACKED), name=f"column_{n}", reset_less=True)
            with m.If(check.valid):
                m.d.sync += column.eq(check.extent)
            m.d.comb += [
                checked.en.eq(check.valid),
                checked.addr.eq(check.extent >> 4),
                check.owner.eq(checked.data[column]),
            ]

        request = Signal.like(self.port.request.payload, reset_less=True)
        found, after = Signal(Owner), Signal(Owner)
        takes, gives, freed = Signal(), Signal(), Signal()
        with m.If(request.extent < self.extents):
            m.d.comb += found.eq(looked_up.data[request.extent[:4]])
        with m.Else():
            m.d.comb += [found.owned.eq(1), found.tenant.eq(~request.tenant)]
        m.d.comb += write.data.eq(Cat(after for _ in range(_PACKED)))
        m.d.sync += [
            self.scrubbing.eq(self.scrubbing + gives - freed),
            self.free.eq(self.free - takes + freed),
        ]
        with m.If(self.scrub.valid & self.scrub.ready):
            m.d.sync += self.scrub.valid.eq(0)
        zero = Signal()  # what `scrub` names is, and the table does not say so yet
        m.d.sync += zero.eq((zero | (self.scrub.valid & self.scrub.ready)) & ~freed)
        seek = Signal(range(self._rows))  # row of the table to search
        lost = Signal(range(_PACKED))
        for n in reversed(range(_PACKED)):
            with m.If(looked_up.data[n].scrubbing):
                m.d.comb += lost.eq(n)

        sweep = Signal(range(self._rows))
        with m.FSM():
            with m.State("CLEAR"):
                m.d.comb += [write.en.eq(~0), write.addr.eq(sweep)]
                m.d.sync += sweep.eq(sweep + 1)
                with m.If(sweep == self._rows - 1):
                    m.d.sync += self.ready.eq(1)
                    m.next = "IDLE"
            with m.State("IDLE"):
                asks = self.port.request.valid
                searches = (self.scrubbing != 0) & ~self.scrub.valid & ~zero
                m.d.comb += [
                    self.port.request.ready.eq(1),
                    looked_up.en.eq(asks | searches),
                    looked_up.addr.eq(Mux(asks, self.port.request.payload.extent >> 4, seek)),
                ]
                m.d.sync += request.eq(self.port.request.payload)
                with m.If(asks):
                    m.next = "DECIDE"
                with m.Elif(zero):
                    m.next = "FREE"
                with m.Elif(searches):
                    m.next = "SEARCH"
            with m.State("DECIDE"):
                m.d.comb += [
                    takes.eq(request.claim & ~found.owned & ~found.scrubbing),
                    gives.eq(request.release & found.owned & (found.tenant == request.tenant)),
                    after.owned.eq(takes),
                    after.tenant.eq(request.tenant),
                    after.scrubbing.eq(gives),
                    write.addr.eq(request.extent >> 4),
                    write.en.eq(Mux(takes | gives, 1, 0) << request.extent[:4]),
                ]
                m.d.sync += [
                    *(
                        self.port.response.payload[name].eq(found[name])
                        for name in ("owned", "tenant", "scrubbing")
                    ),
                    self.port.response.valid.eq(1),
                ]
                m.next = "ANSWER"
            with m.State("ANSWER"):
                with m.If(self.port.response.ready):
                    m.d.sync += self.port.response.valid.eq(0)
                    m.next = "IDLE"
            with m.State("SEARCH"):
                row = Cat(entry.scrubbing for entry in looked_up.data)
                with m.If(row.any()):
                    m.d.sync += [self.scrub.payload.eq(Cat(lost, seek)), self.scrub.valid.eq(1)]
                with m.Else():
                    m.d.sync += seek.eq(Mux(seek == self._rows - 1, 0, seek + 1))
                m.next = "IDLE"
            with m.State("FREE"):
                m.d.comb += [
                    freed.eq(1),
                    write.addr.eq(self.scrub.payload >> 4),
                    write.en.eq(1 << self.scrub.payload[:4]),
                ]
                m.next = "IDLE"
        return m
