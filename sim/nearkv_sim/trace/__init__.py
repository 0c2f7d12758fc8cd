"""From recorded events to the stages of jobs, and to a timeline that public viewers open."""

from __future__ import annotations

from .chrome import Timeline, timeline, write
from .stages import Job, Pass, Stages, UnitPass, stages_of

__all__ = ["Job", "Pass", "Stages", "Timeline", "UnitPass", "stages_of", "timeline", "write"]
