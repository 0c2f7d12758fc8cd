// Tells the device's recorder (events.h) of every cycle in which `valid` is set. Where nobody can ask for events, under
// cocotb, it tells nobody.
module nearkv_event #(
    parameter string NAME = "event",
    parameter int INDEX = 0
) (
    input logic        clk,
    input logic        valid,
    input logic [31:0] a,
    input logic [31:0] b
);
  import "DPI-C" function chandle nearkv_event_open(
    input string name,
    input int index
  );
  import "DPI-C" function void nearkv_event_close(input chandle tap);
  import "DPI-C" function void nearkv_event_record(
    input chandle tap,
    input int unsigned a,
    input int unsigned b
  );

  chandle tap = nearkv_event_open(NAME, INDEX);
  final nearkv_event_close(tap);

  always_ff @(posedge clk) if (valid) nearkv_event_record(tap, a, b);
endmodule
