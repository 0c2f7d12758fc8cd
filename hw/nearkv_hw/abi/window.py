"""An aperture's address map: memory below, the command window above.

Host address = aperture * `DeviceConfig.aperture_bytes` + offset. Offsets below `capacity_bytes` are device
memory (the device address is the offset); the command window starts at offset `capacity_bytes`. Everything
else is outside. With several logical devices an aperture is that of the LD-ID aperture //
`DeviceConfig.logical_apertures`, and has that part of the memory which the LD-ID counts; any other message is
outside.
"""

from __future__ import annotations

from .bits import Field, Layout
from .config import DeviceConfig
from .descriptor import COMPLETION_BYTES, DESCRIPTOR_BYTES
from .lines import LINE_BITS, LINE_BYTES

WINDOW_BYTES = 1 << 16
REGISTERS_OFFSET = 0x0000
DOORBELL_OFFSET = 0x1000
COMPLETIONS_OFFSET = 0x4000
DESCRIPTORS_OFFSET = 0x8000

MAGIC = int.from_bytes(b"NEARKV\0\0", "little")

IDENTITY_LINE = 0
"""Register line of `IDENTITY`."""
DEVICE_COUNTERS_LINE = 1
"""Register line of `DEVICE_COUNTERS`."""
LINK_COUNTERS_LINE = 2
"""Register line of `LINK_COUNTERS`."""
RING_LINE = 3
"""Register line of `RING`."""
EXTENT_COUNTERS_LINE = 4
"""Register line of `EXTENT_COUNTERS`."""
OPTIONS_LINE = 5
"""Register line of `OPTIONS`."""
LINK_LAYER_COUNTERS_LINE = 6
"""Register line of the device's `LINK_LAYER_COUNTERS`."""
HOST_LINK_LAYER_COUNTERS_LINE = 7
"""Register line of the host's `LINK_LAYER_COUNTERS`."""
LINK_STATE_LINE = 8
"""Register line of `LINK_STATE`."""
CHANNEL_COUNTERS_LINE = 16
"""Register line of slice 0's `CHANNEL_COUNTERS`; slice s is s lines further."""
MEMORY_COUNTERS_LINE = 32
"""Register line of slice 0's `MEMORY_COUNTERS`; slice s is s lines further."""
QUEUE_COUNTERS_LINE = 48
"""Register line of slice 0's `QUEUE_COUNTERS`; slice s is s lines further."""

IDENTITY = Layout(
    "identity",
    LINE_BITS,
    Field("magic", 64, '"NEARKV"'),
    Field("abi_version", 16, "`ABI_VERSION`"),
    Field("contract_version", 16, "`CONTRACT_VERSION`"),
    Field("aperture", 8, "which aperture this window belongs to"),
    Field("apertures", 8, "apertures of the device"),
    Field("channels", 8, "device channels"),
    Field("lanes", 8, "elements that a unit takes per cycle"),
    Field("queries", 8, "query heads kept per pass"),
    Field("finish_lanes", 8, "lanes finished per cycle"),
    Field("ring_slots", 16, "slots of the descriptor and completion rings"),
    Field("dram", 8, "`Dram`"),
    Field("placement", 8, "`Placement`"),
    Field("link", 8, "`Link`"),
    Field("extent_shift", 8, "log2 of an extent's bytes"),
    Field("memory_latency_cycles", 16, "read latency of the fixed memory"),
    Field("clock_mhz", 16, "device clock"),
    Field("capacity_bytes", 64, "device memory"),
    Field("density_gbit", 16, "density of the DRAM's dies, 0 for the fixed memory"),
    Field("refresh", 8, "`Refresh`"),
    Field("fabric_share", 8, "sixteenths of a channel's lines that host, walker and writer get at least"),
    Field("ranks", 8, "ranks of a channel, each with a unit of its own"),
    Field("features", 32, "`Feature` flags: what the device has beyond plain jobs"),
    Field("link_layer", 8, "`LinkLayer`"),
)

OPTIONS = Layout(
    "options",
    LINE_BITS,
    Field("hdm_decoders", 8, "HDM decoders between link and memory"),
    Field("logical_devices", 8, "logical devices beyond the first"),
)
"""What a device has that most have not: zero in one without. Beside `IDENTITY`, so that a device without has
nothing of it."""

DEVICE_COUNTERS = Layout(
    "device counters",
    LINE_BITS,
    Field("cycles", 64, "device cycles since reset"),
    Field("link_reads", 64, "M2S Req messages that read a line"),
    Field("link_writes", 64, "M2S RwD messages"),
    Field("outside_reads", 64, "reads of no memory and no window, answered MemData-NXM"),
    Field("outside_writes", 64, "writes of no memory and no window, dropped and completed"),
    Field("violations", 64, "accesses to an extent that the tenant does not own, host and device side"),
    Field("jobs", 64, "descriptors completed"),
    Field("errors", 64, "descriptors completed with a status other than OK, and refused doorbells"),
)

LINK_COUNTERS = Layout(
    "link counters",
    LINE_BITS,
    Field("unsupported", 64, "messages of an opcode that the device does not have"),
)

LINK_LAYER_COUNTERS = Layout(
    "link layer counters",
    LINE_BITS,
    Field("sent", 64, "flits sent, repeated ones and those of the link layer itself included"),
    Field("replayed", 64, "of these, flits that were sent again"),
    Field("accepted", 64, "flits received in their sequence"),
    Field("crc_errors", 64, "flits received with a wrong CRC"),
    Field("retries", 64, "times that the other end was to send again, from an error to the flit asked for"),
    Field("retrainings", 64, "times that the physical layer carried nothing; of both ends together"),
    Field("stalled_cycles", 64, "cycles in which a message waited and there was no credit of its kind"),
)
"""Of one end of a link that has a link layer, since reset; zero where there is none."""

LINK_STATE = Layout(
    "link state",
    LINE_BITS,
    Field("opened", 1, "the link is initialised"),
    Field("version_received", 4, "of the host's INIT.Param"),
    Field("wrap", 8, "entries of the retry buffer, modulo which sequence numbers are counted"),
    Field("wrap_received", 8, "of the host's INIT.Param"),
    Field("retries_received", 5, "NUM_RETRY of the last RETRY.Req"),
    Field("reinits_received", 5, "NUM_PHY_REINIT of the same"),
    Field("write_pointer_received", 8, "WrPtr of the last RETRY.Ack"),
    Field("sequence_received", 8, "echo of Eseq of the same"),
    Field("free_received", 8, "NumFreeBuf of the same"),
    Field("kept", 16, "flits that wait in the retry buffer for their acknowledgement"),
    Field("tx_message", 10, "NDR that the host has given credits for, and that were not sent yet"),
    Field("tx_data", 10, "the same of DRS"),
    Field("rx_message", 10, "places for Req"),
    Field("rx_data", 10, "places for RwD"),
    Field("owed_message", 10, "places for Req that are free and whose credits were not returned yet"),
    Field("owed_data", 10, "the same of RwD"),
)
"""Of the device's link layer. What INIT.Param and RETRY flits say is zero with 256-byte flits, which have
none."""

RING = Layout(
    "ring state",
    LINE_BITS,
    Field("tail", 32, "descriptors posted, as the last doorbell said"),
    Field("head", 32, "descriptors fetched"),
    Field("completed", 32, "completion records written"),
)

EXTENT_COUNTERS = Layout(
    "extent counters",
    LINE_BITS,
    Field("scrubbing", 64, "extents that were given back and are not zero yet"),
    Field("free", 64, "extents that a claim can have"),
    Field("scrub_lines", 64, "lines that zeros were written over since reset"),
    Field("owned", 64, "extents that the window's tenant owns"),
    Field("quota", 64, "extents that it may own"),
)
"""Of the device's extents, but for what is said to be the tenant's."""

CHANNEL_COUNTERS = Layout(
    "channel counters",
    LINE_BITS,
    Field("unit_lines", 64, "lines of K, V and scales that the unit took"),
    Field("unit_busy", 64, "cycles in which the unit had a page to stream or a line under way"),
    Field("unit_no_data", 64, "busy cycles without a line from memory"),
    Field(
        "unit_wait",
        64,
        "busy cycles in which a line waited for weights, space, or the lanes' other steps of it",
    ),
    Field("fabric_reads", 64, "lines read by host and walker, and by units behind the crossbar"),
    Field("fabric_writes", 64, "lines written"),
    Field("conflicts", 64, "cycles in which unit and fabric wanted the channel"),
    Field("partial_beats", 64, "beats of partial results drained"),
)

MEMORY_COUNTERS = Layout(
    "memory counters",
    LINE_BITS,
    Field("row_hits", 64, "reads and writes of a row that was open"),
    Field("row_misses", 64, "rows that were opened in a bank without an open row"),
    Field("row_conflicts", 64, "rows that were closed because another row of the bank was wanted"),
    Field("refresh_cycles", 64, "cycles in which a controller let requests wait for a refresh"),
    Field(
        "turnaround_cycles",
        64,
        "cycles in which the bus turned between reads and writes while something waited",
    ),
    Field("idle_cycles", 64, "cycles in which a controller had nothing to do"),
    Field("corrected", 64, "lines read with a wrong bit, which was put right"),
    Field("uncorrectable", 64, "lines read with more wrong bits than can be put right, answered as poison"),
)
"""Of the memory behind a slice, all its controllers together; a cycle of each of them counts. Zero where the
memory has no DRAM rules."""

QUEUE_COUNTERS = Layout(
    "queue counters",
    LINE_BITS,
    Field("read_levels", 64, "reads that waited in the controllers, summed over the cycles"),
    Field("write_levels", 64, "writes that waited in the controllers, summed over the cycles"),
    Field("read_level_max", 64, "most reads that waited in one controller"),
    Field("write_level_max", 64, "most writes that waited in one controller"),
    Field("blocked_cycles", 64, "cycles in which a request of unit or fabric found no room"),
)
"""Of the same controllers."""

DOORBELL = Layout("doorbell", LINE_BITS, Field("tail", 32, "descriptors posted since reset, modulo 2^32"))


def options_of(config: DeviceConfig) -> dict[str, int]:
    """The fields of a device's `OPTIONS`."""
    return {"hdm_decoders": config.hdm_decoders, "logical_devices": config.logical_devices - 1}


def window_base(config: DeviceConfig, aperture: int) -> int:
    """Host address of an aperture's command window."""
    if not 0 <= aperture < config.apertures:
        raise ValueError(f"aperture {aperture}: the device has {config.apertures}")
    return aperture * config.aperture_bytes + config.capacity_bytes


def register_address(config: DeviceConfig, aperture: int, line: int) -> int:
    """Host address of a register line."""
    return window_base(config, aperture) + REGISTERS_OFFSET + line * LINE_BYTES


def descriptor_address(config: DeviceConfig, aperture: int, index: int) -> int:
    """Host address of the slot of the `index`-th descriptor since reset."""
    return window_base(config, aperture) + DESCRIPTORS_OFFSET + index % config.ring_slots * DESCRIPTOR_BYTES


def completion_address(config: DeviceConfig, aperture: int, index: int) -> int:
    """Host address of the completion record of the `index`-th descriptor since reset."""
    return window_base(config, aperture) + COMPLETIONS_OFFSET + index % config.ring_slots * COMPLETION_BYTES


def completion_phase(config: DeviceConfig, index: int) -> int:
    """The phase bit of a new record of the `index`-th descriptor: 1 on the first lap, then alternating."""
    return 1 - index // config.ring_slots % 2
