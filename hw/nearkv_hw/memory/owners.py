"""Who owns which extent of a channel: the table that every access is checked against."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from ..abi import DeviceConfig
from ..interfaces import TENANT_BITS, OwnerPort

_PACKED = 16
"""Extents per row of the memory: few rows to clear, and little Verilog."""


class Owner(data.Struct):
    """The owner of an extent; `tenant` has a meaning when it is `owned`."""

    owned: 1
    tenant: TENANT_BITS


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

    After reset no extent is owned: the table is swept before the first look-up, which takes `clear_cycles`.
    An extent beyond the channel is owned by somebody else whoever asks.

    Parameters
    ----------
    config : the device's configuration.
    checks : accesses that are checked per cycle, 1 or 2.

    Members
    -------
    port : In(OwnerPort) : look-ups and claims, one at a time. A claim takes the extent in the same step that
        finds it free; accesses checked after the answer came meet the new owner.
    checks : In(OwnerCheck) x checks : checks of accesses.
    ready : Out(1) : the table is clear; until then no check may be started.

    Latency of a check is 1 cycle (`latency_cycles`), one check per cycle and port. A request at `port` is
    answered after 2 cycles (`port_latency_cycles`) and takes 3.
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
                "checks": In(OwnerCheck(self.extents)).array(checks),
                "ready": Out(1),
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
        found = Signal(Owner)
        with m.If(request.extent < self.extents):
            m.d.comb += found.eq(looked_up.data[request.extent[:4]])
        with m.Else():
            m.d.comb += [found.owned.eq(1), found.tenant.eq(~request.tenant)]
        m.d.comb += looked_up.addr.eq(self.port.request.payload.extent >> 4)
        sweep = Signal(range(self._rows))
        with m.FSM():
            with m.State("CLEAR"):
                m.d.comb += [write.en.eq(~0), write.addr.eq(sweep)]
                m.d.sync += sweep.eq(sweep + 1)
                with m.If(sweep == self._rows - 1):
                    m.d.sync += self.ready.eq(1)
                    m.next = "IDLE"
            with m.State("IDLE"):
                m.d.comb += [self.port.request.ready.eq(1), looked_up.en.eq(self.port.request.valid)]
                m.d.sync += request.eq(self.port.request.payload)
                with m.If(self.port.request.valid):
                    m.next = "DECIDE"
            with m.State("DECIDE"):
                taker = Signal(Owner)
                m.d.comb += [
                    taker.owned.eq(1),
                    taker.tenant.eq(request.tenant),
                    write.addr.eq(request.extent >> 4),
                    write.en.eq(Mux(request.claim & ~found.owned, 1, 0) << request.extent[:4]),
                    *(write.data[i].eq(taker) for i in range(_PACKED)),
                ]
                m.d.sync += [
                    self.port.response.payload.owned.eq(found.owned),
                    self.port.response.payload.tenant.eq(found.tenant),
                    self.port.response.valid.eq(1),
                ]
                m.next = "ANSWER"
            with m.State("ANSWER"):
                with m.If(self.port.response.ready):
                    m.d.sync += self.port.response.valid.eq(0)
                    m.next = "IDLE"
        return m
