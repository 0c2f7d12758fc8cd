// The data behind one memory channel, kept by store.cpp: a line read and a line written per cycle.
//
// Read data and poison are registered: valid in the cycle after read_enable. A read in the cycle of a write to the same
// line brings the old line. Each instance has memory of its own, zero at first, lost when the simulation ends.
module nearkv_store #(
    // verilator lint_off UNUSEDPARAM
    parameter int CHANNEL = 0  // tells instances apart in waveforms
    // verilator lint_on UNUSEDPARAM
) (
    input  logic         clk,
    input  logic         read_enable,
    input  logic [ 33:0] read_line,
    output logic [511:0] read_data,
    output logic         read_poison,
    input  logic         write_enable,
    input  logic [ 33:0] write_line,
    input  logic [511:0] write_data,
    input  logic [ 63:0] write_mask,
    input  logic         write_poison
);
  import "DPI-C" function chandle nearkv_store_open();
  import "DPI-C" function void nearkv_store_close(input chandle store);
  import "DPI-C" function bit nearkv_store_read(
    input chandle store,
    input longint unsigned line,
    output bit [511:0] data
  );
  import "DPI-C" function void nearkv_store_write(
    input chandle store,
    input longint unsigned line,
    input bit [511:0] data,
    input longint unsigned mask,
    input bit poison
  );

  chandle store = nearkv_store_open();
  final nearkv_store_close(store);

  bit [511:0] data;
  bit poison;
  // What a function returns passes through variables that nobody else reads.
  // verilator lint_off BLKSEQ
  always_ff @(posedge clk) begin
    if (read_enable) begin
      poison = nearkv_store_read(store, {30'b0, read_line}, data);
      read_data <= data;
      read_poison <= poison;
    end
    if (write_enable) begin
      nearkv_store_write(store, {30'b0, write_line}, write_data, write_mask, write_poison);
    end
  end
  // verilator lint_on BLKSEQ
endmodule
