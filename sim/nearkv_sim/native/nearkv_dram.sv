// The DRAM of one sub-channel, kept and checked by dram.cpp: nearkv_hw/memory/dram/pins.py says what the ports mean.
//
// A command is told in one cycle; in which tCK it is on the bus follows from RULES and from `odd`. A read's line is
// shown READ_CYCLES cycles later. Each instance has memory of its own, zero at first, lost when the simulation ends.
module nearkv_dram #(
    parameter int CHANNEL = 0,
    parameter int SUBCHANNEL = 0,
    parameter int READ_CYCLES = 8,
    parameter int BANK_BITS = 5,
    parameter int ROW_BITS = 16,
    parameter int COLUMN_BITS = 6,
    parameter int SET_BITS = 2,
    parameter string PART = "",
    parameter string RULES = ""
) (
    input  logic                   clk,
    input  logic                   rst,
    input  logic                   odd,
    input  logic                   column_valid,
    input  logic                   column_write,
    input  logic [  BANK_BITS-1:0] column_bank,
    input  logic [COLUMN_BITS-1:0] column_column,
    input  logic [          511:0] write_data,
    input  logic [           63:0] write_check,
    input  logic                   write_poison,
    input  logic                   activate_valid,
    input  logic                   activate_late,
    input  logic [  BANK_BITS-1:0] activate_bank,
    input  logic [   ROW_BITS-1:0] activate_row,
    input  logic                   precharge_valid,
    input  logic                   precharge_all,
    input  logic [  BANK_BITS-1:0] precharge_bank,
    input  logic                   refresh_valid,
    input  logic                   refresh_all,
    input  logic [   SET_BITS-1:0] refresh_set,
    output logic                   read_valid,
    output logic [          511:0] read_data,
    output logic [           63:0] read_check,
    output logic                   read_poison
);
  import "DPI-C" function chandle nearkv_dram_open(
    input int channel,
    input int subchannel,
    input string part,
    input string rules
  );
  import "DPI-C" function void nearkv_dram_reset(input chandle dram);
  import "DPI-C" function void nearkv_dram_close(input chandle dram);
  import "DPI-C" function bit nearkv_dram_activate(
    input chandle dram,
    input longint cycle,
    input bit odd,
    input bit late,
    input int unsigned bank,
    input int unsigned row
  );
  import "DPI-C" function bit nearkv_dram_precharge(
    input chandle dram,
    input longint cycle,
    input bit odd,
    input bit all,
    input int unsigned bank
  );
  import "DPI-C" function bit nearkv_dram_refresh(
    input chandle dram,
    input longint cycle,
    input bit odd,
    input bit all,
    input int unsigned set
  );
  import "DPI-C" function bit nearkv_dram_read(
    input chandle dram,
    input longint cycle,
    input bit odd,
    input int unsigned bank,
    input int unsigned column
  );
  import "DPI-C" function bit nearkv_dram_write(
    input chandle dram,
    input longint cycle,
    input bit odd,
    input int unsigned bank,
    input int unsigned column,
    input bit [511:0] data,
    input longint unsigned check,
    input bit poison
  );
  import "DPI-C" function bit nearkv_dram_take(
    input chandle dram,
    output bit [511:0] data,
    output longint unsigned check
  );

  chandle dram = nearkv_dram_open(CHANNEL, SUBCHANNEL, PART, RULES);
  final nearkv_dram_close(dram);

  longint cycle;
  logic [READ_CYCLES-2:0] under_way;  // reads, the oldest on top
  initial begin
    cycle = 0;
    under_way = '0;
    read_valid = 1'b0;
  end

  bit [511:0] data;
  longint unsigned check;
  bit poison, stop;
  // What a function returns passes through variables that nobody else reads.
  // verilator lint_off BLKSEQ
  always_ff @(posedge clk) begin
    cycle <= cycle + 1;
    under_way <= {under_way[READ_CYCLES-3:0], column_valid & ~column_write};
    read_valid <= under_way[READ_CYCLES-2];
    if (under_way[READ_CYCLES-2]) begin
      poison = nearkv_dram_take(dram, data, check);
      read_data <= data;
      read_check <= check;
      read_poison <= poison;
    end
    stop = 1'b0;
    if (precharge_valid) begin
      stop |= nearkv_dram_precharge(dram, cycle, odd, precharge_all, 32'(precharge_bank));
    end
    if (refresh_valid) begin
      stop |= nearkv_dram_refresh(dram, cycle, odd, refresh_all, 32'(refresh_set));
    end
    if (activate_valid) begin
      stop |= nearkv_dram_activate(
          dram, cycle, odd, activate_late, 32'(activate_bank), 32'(activate_row)
      );
    end
    if (column_valid) begin
      if (column_write) begin
        stop |= nearkv_dram_write(
            dram, cycle, odd, 32'(column_bank), 32'(column_column), write_data, write_check, write_poison
        );
      end else begin
        stop |= nearkv_dram_read(dram, cycle, odd, 32'(column_bank), 32'(column_column));
      end
    end
    if (stop) $fatal(1, "a rule of the DRAM was broken");
    if (rst) begin
      nearkv_dram_reset(dram);
      cycle <= 0;
      under_way <= '0;
      read_valid <= 1'b0;
    end
  end
  // verilator lint_on BLKSEQ
endmodule
