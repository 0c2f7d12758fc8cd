"""The structs that travel between blocks, and the memory port's signatures.

Addresses are line addresses (byte address / 64). `line` of a fabric request is of the whole device; behind
the fabric, and for the units, it is of one channel. Layouts begin with their line, whose words
then lie at whole words in a simulator, too.
"""

from amaranth.hdl import signed, unsigned
from amaranth.lib import data, enum, stream
from amaranth.lib.wiring import In, Out, Signature

from .abi import cxl, memory
from .abi.descriptor import MAX_CANDIDATES, Status
from .abi.formats import OutputForm
from .abi.lines import LINE_BITS, LINE_BYTES
from .abi.numerics import LIMB_BITS, MAX_ROWS, SCORE_LIMIT, TOP_BITS
from .abi.owner import Violation

LINE_ADDRESS_BITS = 34
"""Line addresses of a device of at most 1 TiB."""
EXTENTS_BITS = 21
"""A number of extents of such a device."""
TENANT_BITS = 3
REQUEST_ID_BITS = 20
"""Room for a CXL tag and LD-ID, which the endpoint's requests carry as their id."""
PAGE_BITS = 21
"""Page indices of a context of 2^23 - 1 rows in pages of 4."""
ROW_BITS = MAX_ROWS.bit_length()
"""Bits of a row's number in its context."""
POSITION_BITS = 25
"""Bits of a query row's position, signed."""
CANDIDATE_BITS = (MAX_CANDIDATES - 1).bit_length()
"""Bits of a page's number among those that a job selects from."""
SCALE_ROW_BITS = LINE_BYTES.bit_length() - 1
"""Bits of a row's number among those whose scales share a line; a row has a byte of them at least."""


class Fault(enum.Enum, shape=2):
    """What a memory access met."""

    NONE = 0
    DENIED = 1  # the extent is not the tenant's: no data is returned, nothing is written
    POISON = 2  # the line is poisoned
    OUTSIDE = 3  # beyond the memory


class DevLoad(enum.Enum, shape=2):
    """`cxl.DevLoad`: how loaded the device, or a part of it, is."""

    LIGHT = int(cxl.DevLoad.LIGHT)
    OPTIMAL = int(cxl.DevLoad.OPTIMAL)
    MODERATE_OVERLOAD = int(cxl.DevLoad.MODERATE_OVERLOAD)
    SEVERE_OVERLOAD = int(cxl.DevLoad.SEVERE_OVERLOAD)


class ReadRequest(data.Struct):
    """A unit's read of one line of its own channel."""

    line: LINE_ADDRESS_BITS
    tenant: TENANT_BITS


class ReadResponse(data.Struct):
    """The answer to a `ReadRequest`; data is zero when there is a fault other than poison."""

    data: LINE_BITS
    fault: Fault


class FabricRequest(data.Struct):
    """A read or write of one line by the endpoint, the walker or the writer."""

    data: LINE_BITS
    enable: LINE_BYTES
    line: LINE_ADDRESS_BITS
    tenant: TENANT_BITS
    id: REQUEST_ID_BITS
    write: 1
    poison: 1


class FabricResponse(data.Struct):
    """The answer to a `FabricRequest`, reads and writes alike. Answers of one channel keep their order."""

    data: LINE_BITS
    id: REQUEST_ID_BITS
    write: 1
    fault: Fault


class Snoop(data.Struct):
    """A write on its way to a memory channel: what is known of its line on chip is no longer true."""

    valid: 1
    line: LINE_ADDRESS_BITS  # of the device


class OwnerRequest(data.Struct):
    """Look up the owner of an extent of a channel; with `claim` take it if it is free, with `release` give it
    back if it is the tenant's."""

    extent: 20
    tenant: TENANT_BITS
    claim: 1
    release: 1


class OwnerResponse(data.Struct):
    """The owner before the request."""

    owned: 1
    tenant: TENANT_BITS
    scrubbing: 1  # nobody's, but not zero yet


class Refusal(data.Struct):
    """An access that was refused to its tenant."""

    line: LINE_ADDRESS_BITS
    tenant: TENANT_BITS
    kind: Violation


class UnitJob(data.Struct):
    """One pass of a job, the same for every unit but for `sinks`."""

    tenant: TENANT_BITS
    queries: 5  # queries of this pass, 1 to the kept ones
    first: 1  # they are the job's first ones
    last: 1  # and its last ones
    bounds: 1  # rows are pairs, a page's least and its largest elements: the page's bound is wanted, no more
    group: 8  # query heads of every query row
    position: signed(POSITION_BITS)  # of the job's first query row
    causal: 1  # rows after a query's own position are not seen; set with a window, too
    window: 24  # rows up to the own one that are seen, zero for all
    kept: 24  # first rows of the context that a window leaves visible
    tree: 1  # query rows have positions and masks of their own
    query_rows: 8  # of the job
    own_row: ROW_BITS  # with a tree, query row 0's own row
    slopes: 1  # scores get a bias
    codebook: 1  # codes of lut4 have numbers
    latent: 1  # V is the first elements of the K row
    head_dim: 10
    value_dim: 10
    k_format: 4
    v_format: 4
    k_scale: 3  # as descriptors have it: format of the scales, 0 for none
    v_scale: 3
    k_block: 3  # what a scale is for
    v_block: 3
    k_pitch: 2  # log2 of the rows that share a line
    v_pitch: 2
    query_format: 2
    score_factor: 32
    softcap: 32  # float32 bits of C2, zero for none
    sinks: 1  # this unit adds the sinks


class QueryLineKind(enum.Enum, shape=3):
    """What a line of the stream of queries holds, in the order in which they come."""

    QUERY = 0
    CODEBOOK = 1
    SLOPES = 2
    POSITIONS = 3
    MASKS = 4
    SINKS = 5


class QueryLine(data.Struct):
    """A line of queries, or of a list that belongs to them, of the pass whose `UnitJob` came last.

    Query lines come in order: query 0's lines, query 1's lines, ...; after them a codebook (K's 16 fp16
    numbers, then V's); slopes, a float32 for each of the job's query heads from bit 0 of the first line up;
    of a tree the positions of the job's query rows, 32 bits each, and the masks of the pass's query rows, the
    even ones in the first half of a line; and sinks, like slopes, to the unit that adds them.
    """

    data: LINE_BITS
    kind: QueryLineKind
    last: 1  # last line of the pass, for the unit


class PageItem(data.Struct):
    """Rows of one page to stream, or the end of the pass."""

    last: 1  # no page: the pass ends here
    page: PAGE_BITS  # index in the context, for error reports
    k_line: LINE_ADDRESS_BITS  # channel line of the first K row to stream
    v_line: LINE_ADDRESS_BITS  # channel line of the first V row to stream
    k_scales: LINE_ADDRESS_BITS  # channel line with the first K row's scales, where there are any
    v_scales: LINE_ADDRESS_BITS
    row: SCALE_ROW_BITS  # the first row's number in the page, its lowest bits
    index: ROW_BITS  # and in the context
    rows: 14  # rows to stream, at least 1


class Bound(data.Struct):
    """What no score of a page is larger than, for the queries of a pass."""

    value: signed(SCORE_LIMIT.bit_length() + 1)
    candidate: CANDIDATE_BITS  # which of the pages that the job selects from
    first: 1  # of the job's passes of bounds
    last: 1


class State(data.Struct):
    """A binned sum; with `some` clear it is empty and the rest has no meaning."""

    some: 1
    top: signed(TOP_BITS)
    high: signed(LIMB_BITS)
    low: signed(LIMB_BITS)


class LanePartial(data.Struct):
    """One lane of a partial: the state and the lane's flags (abi.memory.LANE_*)."""

    state: State
    flags: 3


class BeatKind(enum.Enum, shape=2):
    """What a partial beat holds."""

    DENOMINATOR = 0  # lane 0's state is the denominator; lane 0's flags bit 0 is the query's NaN flag
    LANES = 1
    END = 2  # the pass ends: status, page and lines are valid


def partial_beat(finish_lanes):
    """The beat of a unit's partial stream, `finish_lanes` lanes wide.

    A pass is sent as: one DENOMINATOR beat per query; then query 0's lanes in ceil(value_dim / finish_lanes)
    LANES beats (lanes beyond value_dim have no meaning), query 1's lanes, ...; then one END beat.
    """
    return data.StructLayout(
        {
            "kind": BeatKind,
            "lanes": data.ArrayLayout(LanePartial, finish_lanes),
            "status": unsigned(8),  # Status.OK, POISON or PAGE_DENIED
            "page": unsigned(PAGE_BITS),  # page at fault
            "lines": unsigned(32),  # K and V lines streamed
        }
    )


class ResultJob(data.Struct):
    """What merge, finish and writer need to know of a pass; one per pass, in the units' order."""

    tenant: TENANT_BITS
    queries: 5
    value_dim: 10
    form: OutputForm
    output_scale: 32  # float32 bits of what multiplies finished lanes, zero for none
    line: LINE_ADDRESS_BITS  # device line of the pass's first result
    fault: 1  # nothing is written, as of a pass of bounds


class PassDone(data.Struct):
    """A pass is over and its results, if any, are in memory."""

    status: Status
    page: PAGE_BITS
    lines: 32


class UnitMemory(Signature):
    """A unit's private read port, seen from the unit. Answers come in order and wait until they are taken."""

    def __init__(self):
        super().__init__(
            {
                "request": Out(stream.Signature(ReadRequest)),
                "response": In(stream.Signature(ReadResponse)),
            }
        )


class FabricPort(Signature):
    """A port into the fabric, seen from the block that asks."""

    def __init__(self):
        super().__init__(
            {
                "request": Out(stream.Signature(FabricRequest)),
                "response": In(stream.Signature(FabricResponse)),
            }
        )


class OwnerPort(Signature):
    """A port to a channel's owner table, seen from the block that asks."""

    def __init__(self):
        super().__init__(
            {
                "request": Out(stream.Signature(OwnerRequest)),
                "response": In(stream.Signature(OwnerResponse)),
            }
        )


assert memory.LANE_NEGATIVE_INFINITY < 8
