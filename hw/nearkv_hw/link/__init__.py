"""The link layer of CXL.mem: messages to 68-byte flits and back, with credits, acknowledgements and retry."""
