"""The CXL endpoint: messages in, messages out."""
