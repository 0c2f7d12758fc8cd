"""The device in software: same descriptors, same memory image, same bits, no compiler."""

from .port import ModelPort

__all__ = ["ModelPort"]
