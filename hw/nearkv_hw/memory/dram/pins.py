"""What a DRAM controller and its part say to each other."""

from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2, exact_log2

from ...abi.dram import PARTS, DramPart, Refresh
from ...abi.lines import LINE_BITS

CHECK_BITS = 64
"""ECC bits beside a line: 8 for each of its 64-bit words."""


class DramPins(wiring.Signature):
    """The commands of one sub-channel, seen from the controller.

    A frame is as many device cycles as the part has sub-channels. Column commands are told in the frame's
    cycle `part.slots.column.cycle`, the others in `part.slots.activate.cycle`, which is the precharge's and
    the refresh's, too; at most one of a kind per frame, and no precharge beside a refresh. Each is then on
    the bus in its place of that frame, and the part checks it against every rule.

    Parameters
    ----------
    part : the part, a `DramPart` or a `Dram` that names one.
    density_gbit : its density, which gives the width of rows.

    Members
    -------
    odd : Out(1) : whether the frame is an odd one; frames alternate. Places on the bus depend on it.
    column_valid, column_write, column_bank, column_column : Out : read or write a line of the open row.
    write_data, write_check, write_poison : Out : the line that a write brings, told with the command.
    activate_valid, activate_late, activate_bank, activate_row : Out : open a row; later than in its place by
        `part.slots.late_tck`.
    precharge_valid, precharge_all, precharge_bank : Out : close the row of a bank, or of all.
    refresh_valid, refresh_all, refresh_set : Out : refresh all banks, or a set of them.
    read_valid, read_data, read_check, read_poison : In : the line of a read,
        `part.frames(...).read_cycles` device cycles after the cycle in which it was told.
    """

    def __init__(self, *, part, density_gbit):
        if part not in PARTS and not isinstance(part, DramPart):
            raise ValueError(
                f"part must be a DramPart, or one of {', '.join(p.name for p in PARTS)}, not {part!r}"
            )
        self.part = part = PARTS.get(part, part)
        self.density_gbit = density_gbit
        bank_bits = exact_log2(part.banks)
        super().__init__(
            {
                "odd": Out(1),
                "column_valid": Out(1),
                "column_write": Out(1),
                "column_bank": Out(bank_bits),
                "column_column": Out(exact_log2(part.row_lines)),
                "write_data": Out(LINE_BITS),
                "write_check": Out(CHECK_BITS),
                "write_poison": Out(1),
                "activate_valid": Out(1),
                "activate_late": Out(1),
                "activate_bank": Out(bank_bits),
                "activate_row": Out(ceil_log2(part.rows_of(density_gbit))),
                "precharge_valid": Out(1),
                "precharge_all": Out(1),
                "precharge_bank": Out(bank_bits),
                "refresh_valid": Out(1),
                "refresh_all": Out(1),
                "refresh_set": Out(exact_log2(part.refresh_sets(Refresh.PER_BANK))),
                "read_valid": In(1),
                "read_data": In(LINE_BITS),
                "read_check": In(CHECK_BITS),
                "read_poison": In(1),
            }
        )
