"""The blocks that `nearkv_hw.synth` synthesises, each in a small configuration."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from amaranth.lib import wiring

from .abi import configure
from .abi.dram import Dram
from .abi.flits import MIN_RETRY_ENTRIES, Side
from .arithmetic.bias import Bias
from .arithmetic.binned import BinnedAccumulator, TermAligner
from .arithmetic.decode import ElementDecoder
from .arithmetic.product import PRODUCT_BITS, Product
from .arithmetic.reciprocal import Reciprocal
from .arithmetic.rounding import Round
from .arithmetic.scale import Scaler
from .arithmetic.score import ScorePipe
from .arithmetic.softcap import Softcap
from .arithmetic.weight import WeightPipe
from .attention.array import Array
from .attention.cell import Cell
from .attention.codes import Scales
from .attention.dot import DotProducts
from .attention.drain import Drain
from .attention.issue import Issue
from .attention.loader import Loader
from .attention.scoring import Scoring
from .attention.shape import UnitShape
from .attention.streamer import Streamer
from .attention.unit import AttentionUnit
from .command.completer import Completer
from .command.owner import OwnerPage
from .command.selection import Selector
from .command.walker import Walker
from .command.window import CommandWindow
from .endpoint.endpoint import Endpoint
from .endpoint.hdm.decoders import Decoders
from .link.packer import Packer
from .link.packer256 import Packer256
from .link.receiver import Receiver
from .link.replay import Replay
from .link.transmitter import Transmitter
from .link.unpacker import Unpacker
from .link.unpacker256 import Unpacker256
from .memory.channel import MemoryChannel
from .memory.dram.controller import DramController
from .memory.fabric import Fabric
from .memory.owners import OwnerTable
from .memory.scrub import Scrubber
from .results.finish import Finish
from .results.merge import Merge
from .results.results import Results
from .results.scaling import ScaleLane
from .results.writer import Writer

LANES = 8
QUERIES = 1
FINISH_LANES = 2
UNIT = UnitShape(lanes=LANES, queries=QUERIES, finish_lanes=FINISH_LANES, max_dim=256)
"""With 256 elements per row, each of 8 lanes has the memory that each of the device's 32 has."""
CONFIG = configure("small", queries=QUERIES, capacity_bytes=256 << 20, ring_slots=16)
MASTERS = 3
CONTROLLER_TAG_BITS = 10
HDM_DECODERS = 10
REPLAY_ENTRIES = 8
CANDIDATES = 1024
"""Pages to select from; a device has room for 65,536."""


@dataclass(frozen=True)
class Block:
    """A block to synthesise.

    Parameters
    ----------
    name : what the table calls it.
    make : makes the component.
    lanes : lanes that it has, by which figures per lane divide; 0 where it has none.
    """

    name: str
    make: Callable[[], wiring.Component]
    lanes: int = 0


BLOCKS = (
    Block("attention-unit", lambda: AttentionUnit(**asdict(UNIT)), LANES),
    Block("array", lambda: Array(shape=UNIT), LANES),
    Block("cell", lambda: Cell(query_states=UNIT.states(0), states=UNIT.states(0)), 1),
    Block("dot-products", lambda: DotProducts(lanes=LANES), LANES),
    Block("scoring", lambda: Scoring(queries=QUERIES, pipes=1)),
    Block("score-pipe", ScorePipe),
    Block("softcap", Softcap),
    Block("bias", Bias),
    Block("weight-pipe", WeightPipe),
    Block("element-decoder", ElementDecoder, 1),
    Block("scaler", Scaler, 1),
    Block("scales", lambda: Scales(shape=UNIT), LANES),
    Block("product", Product, 1),
    Block("term-aligner", lambda: TermAligner(significand_bits=PRODUCT_BITS), 1),
    Block("binned-accumulator", lambda: BinnedAccumulator(states=16), 1),
    Block("loader", lambda: Loader(shape=UNIT), LANES),
    Block("streamer", lambda: Streamer(shape=UNIT, outstanding=64), LANES),
    Block("issue", lambda: Issue(shape=UNIT, outstanding=64)),
    Block("drain", lambda: Drain(shape=UNIT), LANES),
    Block("results", lambda: Results(units=2, finish_lanes=FINISH_LANES), FINISH_LANES),
    Block("merge", lambda: Merge(units=2, finish_lanes=FINISH_LANES), FINISH_LANES),
    Block("finish", lambda: Finish(finish_lanes=FINISH_LANES), FINISH_LANES),
    Block("scale-lane", ScaleLane, 1),
    Block("reciprocal", Reciprocal),
    Block("rounding", Round, 1),
    Block("writer", lambda: Writer(finish_lanes=FINISH_LANES), FINISH_LANES),
    Block("owner-table", lambda: OwnerTable(config=CONFIG)),
    Block("scrubber", lambda: Scrubber(extents=CONFIG.slice_extents)),
    Block("memory-channel", lambda: MemoryChannel(channel=0, config=CONFIG)),
    Block("dram-controller", lambda: DramController(part=Dram.DDR5_6400, tag=CONTROLLER_TAG_BITS)),
    Block("fabric", lambda: Fabric(masters=MASTERS, config=CONFIG)),
    Block("endpoint", lambda: Endpoint(config=CONFIG)),
    Block("link-packer", lambda: Packer(side=Side.DEVICE)),
    Block("link-transmitter", lambda: Transmitter(entries=MIN_RETRY_ENTRIES)),
    Block("link-receiver", lambda: Receiver(side=Side.DEVICE)),
    Block("link-unpacker", lambda: Unpacker(side=Side.DEVICE, places={"req": 16, "rwd": 8})),
    Block("link-packer256", lambda: Packer256(side=Side.DEVICE)),
    Block("link-replay", lambda: Replay(entries=REPLAY_ENTRIES)),
    Block("link-unpacker256", lambda: Unpacker256(side=Side.DEVICE, places={"req": 16, "rwd": 8})),
    Block("hdm-decoders", lambda: Decoders(decoders=HDM_DECODERS, capacity=1 << 12)),
    Block("owner-page", lambda: OwnerPage(config=CONFIG)),
    Block("command-window", lambda: CommandWindow(config=CONFIG)),
    Block("walker", lambda: Walker(config=CONFIG, candidates=CANDIDATES)),
    Block("selector", lambda: Selector(units=2, candidates=CANDIDATES)),
    Block("completer", lambda: Completer(ring_slots=CONFIG.ring_slots)),
)
