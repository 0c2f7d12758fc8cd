"""The device as a CXL host finds it: enumeration, registers, the mailbox, and what tools print of them."""

from .host import CxlHost, MailboxError

__all__ = ["CxlHost", "MailboxError"]
