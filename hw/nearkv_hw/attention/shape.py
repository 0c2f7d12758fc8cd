"""The size of an attention unit, checked once and shared by its blocks."""

from dataclasses import dataclass

from amaranth.hdl import Mux
from amaranth.lib import data, enum
from amaranth.utils import exact_log2

from ..abi.descriptor import MAX_LARGE_DIM
from ..abi.formats import SCALE_BLOCKS
from ..interfaces import ROW_BITS

BANKS = 2
"""Passes whose queries are kept, and passes whose sums are: pass n has bank n mod BANKS of both."""
PASSES = 4
"""Passes under way: one is loaded, the next streams K, the next V, the last one is drained."""


def abreast_bits(shape):
    """Bits of the log2 of the rows that a step takes."""
    return exact_log2(shape.rows_abreast)


class LineParts(enum.Enum, shape=2):
    """Steps that a line is taken in: as many as keep the lanes busy, or rows that share it."""

    ONE = 0
    TWO = 1
    FOUR = 2


MAX_DIM = 1 << MAX_LARGE_DIM.bit_length()
"""What is beyond the largest head_dim and value_dim of a job."""

BLOCK_ROWS = 16
"""Rows that are streamed in one go."""


class RowBlock(data.Struct):
    """Consecutive rows of a context."""

    index: ROW_BITS  # the first one
    rows: range(BLOCK_ROWS + 1)


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """How large a unit is.

    Parameters
    ----------
    lanes : elements that are multiplied in a cycle: one, two or four times `line_lanes`.
    line_lanes : 16-bit elements of a line: 4, 8, 16 or 32; as many as lanes, but at most 32, if not given.
        With as many lanes a line of 8-bit or 4-bit codes takes two or four cycles; with four times as many,
        one.
    queries : query heads kept per pass: 1, 2, 4, 8 or 16.
    finish_lanes : lanes of a partial beat: 2, 4 or 8, at most half of `line_lanes`.
    max_dim : largest head_dim and value_dim: 64, 128, 256 or 1,024. Below 1,024 a unit is for synthesis and
        tests: with 256, each of 8 lanes has the memory that each of 32 has with 1,024.

    Raises
    ------
    ValueError : naming the parameter, what was given and what is allowed.
    """

    lanes: int = 32
    line_lanes: int | None = None
    queries: int = 4
    finish_lanes: int = 2
    max_dim: int = MAX_DIM

    def __post_init__(self):
        if self.line_lanes is None:
            object.__setattr__(self, "line_lanes", min(self.lanes, 32) if isinstance(self.lanes, int) else 0)
        if self.line_lanes not in (4, 8, 16, 32):
            raise ValueError(f"line_lanes must be 4, 8, 16 or 32, not {self.line_lanes!r}")
        if self.lanes not in (allowed := [self.line_lanes << n for n in range(3)]):
            raise ValueError(
                f"lanes must be {allowed[0]}, {allowed[1]} or {allowed[2]} with "
                f"line_lanes={self.line_lanes}, not {self.lanes!r}"
            )
        if self.queries not in (1, 2, 4, 8, 16):
            raise ValueError(f"queries must be 1, 2, 4, 8 or 16, not {self.queries!r}")
        if self.finish_lanes not in (2, 4, 8) or self.finish_lanes > self.line_lanes // 2:
            raise ValueError(
                f"finish_lanes must be 2, 4 or 8 and at most half of line_lanes={self.line_lanes}, "
                f"not {self.finish_lanes!r}"
            )
        if self.max_dim not in (64, 128, 256, MAX_DIM):
            raise ValueError(f"max_dim must be 64, 128, 256 or {MAX_DIM}, not {self.max_dim!r}")

    @property
    def row_lines(self):
        """Lines of the longest row, of 16-bit codes; no row has more steps."""
        return self.max_dim // self.line_lanes

    @property
    def wide(self):
        """Blocks of `line_lanes` lanes: 1, 2 or 4."""
        return self.lanes // self.line_lanes

    @property
    def rows_abreast(self):
        """Rows of a line that are taken in one step, at most: four where each can have a block of lanes of
        its own, else one."""
        return 4 if self.wide == 4 else 1

    def block_steps(self, block):
        """Steps of the longest row in which a block of lanes has a part: later ones need narrower codes."""
        return max(self.row_lines >> block.bit_length(), 1)

    @property
    def scale_lanes(self):
        """Lanes that have the same scale, whatever the block of scales and the rows abreast."""
        return min(SCALE_BLOCKS[0], self.lanes // self.rows_abreast)

    @property
    def scale_groups(self):
        """Scales that the lanes have at once."""
        return self.lanes // self.scale_lanes

    def states(self, block):
        """Steps of sums, and of each query, that a lane of a block keeps."""
        return BANKS * self.block_steps(block)

    @property
    def groups(self):
        """Beats that the sums of a step take at most."""
        return self.lanes // self.finish_lanes


def chosen(of_passes, number):
    """What `number` names of a view with something for every pass."""
    halves = [Mux(number[0], of_passes[n + 1], of_passes[n]) for n in range(0, PASSES, 2)]
    return Mux(number[1], halves[1], halves[0])
