"""Prefixes that hosts of a served device share: a tenant of their own holds them, and answers for them.

A device lets nobody reach another tenant's pages. So what hosts share lies in memory of a tenant that is
none of theirs, the library's, whose driver runs beside the server: it finds prefixes, counts who uses them,
and has the device attend to them for whoever does. What it answers is a partial, which merges exactly with
that of the rows that a host has itself.
"""

from __future__ import annotations

from .client import SharedPrefix, SharedRows
from .server import Library

__all__ = ["Library", "SharedPrefix", "SharedRows"]
