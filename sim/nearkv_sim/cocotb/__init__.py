"""Benches and the device under cocotb: the same Verilog with its ports and named probes visible to Python."""
