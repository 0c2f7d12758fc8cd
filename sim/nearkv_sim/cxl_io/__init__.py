"""What of the device is reached through CXL.io, in software beside it: registers and the mailbox."""

from .device import CxlDevice

__all__ = ["CxlDevice"]
