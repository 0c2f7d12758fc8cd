"""The register lines of a command window."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi import ABI_VERSION, DeviceConfig
from ..abi.config import EXTENT_SHIFT, LinkLayer
from ..abi.lines import LINE_BITS
from ..abi.numerics import CONTRACT_VERSION
from ..abi.window import (
    CHANNEL_COUNTERS,
    CHANNEL_COUNTERS_LINE,
    DEVICE_COUNTERS,
    DEVICE_COUNTERS_LINE,
    EXTENT_COUNTERS,
    EXTENT_COUNTERS_LINE,
    HOST_LINK_LAYER_COUNTERS_LINE,
    IDENTITY,
    IDENTITY_LINE,
    LINK_COUNTERS,
    LINK_COUNTERS_LINE,
    LINK_LAYER_COUNTERS,
    LINK_LAYER_COUNTERS_LINE,
    LINK_STATE,
    LINK_STATE_LINE,
    MAGIC,
    MEMORY_COUNTERS,
    MEMORY_COUNTERS_LINE,
    OPTIONS,
    OPTIONS_LINE,
    QUEUE_COUNTERS,
    QUEUE_COUNTERS_LINE,
    RING,
    RING_LINE,
    options_of,
)
from ..features import FEATURES
from ..interfaces import EXTENTS_BITS, TENANT_BITS
from ..structs import layout_of

REGISTER_BITS = 6
"""Register lines that can be told apart: the last slice's counters are below 64."""


def link_layer_members(config):
    """Members of a design that is told of the link layer; none where there is no such."""
    if config.link_layer is LinkLayer.OFF:
        return {}
    return {
        "link_layers": In(layout_of(LINK_LAYER_COUNTERS)).array(2),
        "link_state": In(layout_of(LINK_STATE)),
    }


class Registers(wiring.Component):
    """Reads of register lines: what the device is, what it has counted, where the rings stand.

    Parameters
    ----------
    config : what the device is made of.

    Members
    -------
    read : In(1), line : In(6), aperture : In(3) : a read; a line that holds nothing reads as zero.
    data : Out(LINE_BITS) : its data, from the next cycle on until the next read.
    device : In(DEVICE_COUNTERS), link : In(LINK_COUNTERS), extents : In(EXTENT_COUNTERS) : counters of the
        device, its link and its extents.
    channels : In(CHANNEL_COUNTERS).array(slices) : counters of each slice of the memory.
    memories : In(MEMORY_COUNTERS).array(slices), queues : In(QUEUE_COUNTERS).array(slices) : counters of what
        is behind each slice.
    rings : In(RING).array(apertures) : state of each aperture's ring.
    quotas, holdings : In(EXTENTS_BITS).array(apertures) : extents that each tenant may own, and does own.
    link_layers : In(LINK_LAYER_COUNTERS) x 2, link_state : In(LINK_STATE) : with a link layer, counters of
        the device's end and of the host's, and the state of the device's.

    A line is read in one cycle, so that its counters belong together.
    """

    latency_cycles = 1

    def __init__(self, *, config):
        if not isinstance(config, DeviceConfig):
            raise TypeError(f"config must be a DeviceConfig, not {config!r}")
        self.config = config
        super().__init__(
            {
                "read": In(1),
                "line": In(REGISTER_BITS),
                "aperture": In(TENANT_BITS),
                "data": Out(LINE_BITS),
                "device": In(layout_of(DEVICE_COUNTERS)),
                "link": In(layout_of(LINK_COUNTERS)),
                "extents": In(layout_of(EXTENT_COUNTERS)),
                "channels": In(layout_of(CHANNEL_COUNTERS)).array(config.slices),
                "memories": In(layout_of(MEMORY_COUNTERS)).array(config.slices),
                "queues": In(layout_of(QUEUE_COUNTERS)).array(config.slices),
                "rings": In(layout_of(RING)).array(config.apertures),
                "quotas": In(EXTENTS_BITS).array(config.apertures),
                "holdings": In(EXTENTS_BITS).array(config.apertures),
                **link_layer_members(config),
            }
        )

    def elaborate(self, platform):
        m = Module()
        held = Signal(LINE_BITS, reset_less=True)
        identity = Signal(layout_of(IDENTITY), init=identity_values(self.config))
        ring = Signal(layout_of(RING))
        extents = Signal(layout_of(EXTENT_COUNTERS))
        m.d.comb += [self.data.eq(held), extents.eq(self.extents)]
        with m.Switch(self.aperture):
            for n, aperture_ring in enumerate(self.rings):
                with m.Case(n):
                    m.d.comb += [
                        ring.eq(aperture_ring),
                        extents.owned.eq(self.holdings[n]),
                        extents.quota.eq(self.quotas[n]),
                    ]
        with m.If(self.read):
            with m.Switch(self.line):
                with m.Case(IDENTITY_LINE):
                    m.d.sync += held.eq(identity)
                    m.d.sync += data.View(layout_of(IDENTITY), held).aperture.eq(self.aperture)
                with m.Case(DEVICE_COUNTERS_LINE):
                    m.d.sync += held.eq(self.device)
                with m.Case(LINK_COUNTERS_LINE):
                    m.d.sync += held.eq(self.link)
                with m.Case(EXTENT_COUNTERS_LINE):
                    m.d.sync += held.eq(extents)
                if options := OPTIONS.pack(options_of(self.config)):
                    with m.Case(OPTIONS_LINE):
                        m.d.sync += held.eq(options)
                if self.config.link_layer is not LinkLayer.OFF:
                    for line, told in (
                        (LINK_LAYER_COUNTERS_LINE, self.link_layers[0]),
                        (HOST_LINK_LAYER_COUNTERS_LINE, self.link_layers[1]),
                        (LINK_STATE_LINE, self.link_state),
                    ):
                        with m.Case(line):
                            m.d.sync += held.eq(told)
                with m.Case(RING_LINE):
                    m.d.sync += held.eq(ring)
                for first, slices in (
                    (CHANNEL_COUNTERS_LINE, self.channels),
                    (MEMORY_COUNTERS_LINE, self.memories),
                    (QUEUE_COUNTERS_LINE, self.queues),
                ):
                    for n, counters in enumerate(slices):
                        with m.Case(first + n):
                            m.d.sync += held.eq(counters)
                with m.Default():
                    m.d.sync += held.eq(0)
        return m


def identity_values(config):
    """The identity line's fields for a configuration; the aperture is the reader's."""
    given = {
        "magic": MAGIC,
        "abi_version": ABI_VERSION,
        "features": int(FEATURES),
        "contract_version": CONTRACT_VERSION,
        "aperture": 0,
        "extent_shift": EXTENT_SHIFT,
    }
    return {
        field.name: given[field.name] if field.name in given else int(getattr(config, field.name))
        for field in IDENTITY
        if not field.reserved
    }
