"""DRAM behind a memory channel: address map, controllers, and the parts themselves."""
