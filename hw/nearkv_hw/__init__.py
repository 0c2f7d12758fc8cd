"""The device as hardware, and the contract that both sides of the link keep."""
