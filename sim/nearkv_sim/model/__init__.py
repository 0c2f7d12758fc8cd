"""The device in software: same descriptors, same memory image, same bits, with a compiler or without."""

from .port import ModelPort

__all__ = ["ModelPort"]
