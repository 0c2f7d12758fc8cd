"""Jobs with nothing wrong, all of a doorbell at once; others go through `walker`, which knows what is wrong.

What costs a job a hundred microseconds of small steps in Python is one call of the native kernel for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from nearkv_hw.abi import DeviceConfig, Feature, Opcode
from nearkv_hw.abi.descriptor import (
    ATTEND,
    EXTENSION,
    FLAG_EXTENDED,
    MIN_PAGE_ROWS_LOG2,
    OPTION_LATENT,
    OPTION_SUMMARIES,
)
from nearkv_hw.abi.lines import LINE_BYTES

from ..columns import column
from ..port import Lines
from . import timing
from .counters import Counters
from .job import Job, Refusal, check, opcode_of
from .memory import Memory
from .native import Native, device_record, kind_record

_OWN = ("tag", "table", "queries", "result", "sinks", "row_begin", "row_end", "kv_head")
_OWN_FACTORS = ("score_factor", "output_scale")
"""Fields of a descriptor in which jobs of one kind may differ."""
_KINDS_KEPT = 256


def _kind_words(features: Feature) -> npt.NDArray[np.uint64]:
    """A mask of what makes a kind, over a descriptor's words."""
    own = [*_OWN, *(_OWN_FACTORS if Feature.OUTPUT_SCALE in features else _OWN_FACTORS[:1])]
    bits = (1 << ATTEND.width) - 1
    for name in own:
        bits &= ~(((1 << ATTEND[name].width) - 1) << ATTEND.offset(name))
    return np.frombuffer(bits.to_bytes(ATTEND.width // 8, "little"), "<u8")


class Kind:
    """What good descriptors say that differ in addresses, rows, KV head and factors alone.

    Parameters
    ----------
    job : one of theirs.
    config : the device's.

    Members
    -------
    passes : query heads of each pass.
    partial_beats : beats of partial results that a job drains in each slice.
    record : for the native kernel.
    """

    def __init__(self, job: Job, config: DeviceConfig) -> None:
        self.passes = tuple(timing.passes_of(config, job.shape.queries))
        self.partial_beats = sum(timing.partial_beats(config, q, job.shape.value_dim) for q in self.passes)
        self.record = kind_record(job, len(self.passes))
        self._shape = job.shape
        layout = job.shape.layout(MIN_PAGE_ROWS_LOG2)
        self._sum_lines = layout.value.steps(layout.value_dim, config.lanes)
        self._taken = timing.unit_cycles(config, layout, self.passes[0])

    def work(self, lines: npt.NDArray[np.float64], count: int = 1) -> timing.Work:
        """What so many jobs ask of the device, with `lines` of each pass in each slice."""
        return timing.Work(
            passes=self.passes,
            lines=lines,
            query_lines=self._shape.query_lines,
            result_lines=self._shape.result.lines,
            value_dim=self._shape.value_dim,
            count=count,
            taken=self._taken,
            sum_lines=self._sum_lines,
        )


@dataclass(frozen=True)
class Plain:
    """Good jobs of a kind, done.

    Members
    -------
    kind : theirs.
    members : which descriptors they are, rising.
    results : their results, [jobs, lines, 64].
    result_lines : the first line of each one's place in the memory.
    lines : K and V lines of a pass in each slice, [jobs, slices].
    """

    kind: Kind
    members: npt.NDArray[np.intp]
    results: Lines
    result_lines: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]


class PlainJobs:
    """Does the jobs of a batch that have nothing wrong; what they read and stream is counted here.

    Left out, too, are jobs that are good but rare: without rows, or with queries, sinks, entries or results
    in two extents, all jobs where the memory has inverted bits, and those whose extension says more than how
    rows are stored.

    Parameters
    ----------
    config, memory, counters, features : the device's.
    kernel : what does them.
    """

    def __init__(
        self,
        config: DeviceConfig,
        memory: Memory,
        counters: Counters,
        kernel: Native,
        features: Feature,
    ) -> None:
        self._config = config
        self._memory = memory
        self._counters = counters
        self._kernel = kernel
        self._features = features
        self._kind_words = _kind_words(features)
        self._device = device_record(memory, config.slices)
        self._kind = lru_cache(_KINDS_KEPT)(self._kind_of)

    def do(self, descriptors: Lines, extensions: Lines, tenant: int) -> list[Plain]:
        """The good jobs among descriptors and their second lines [n, 64], kind by kind; nothing is written to
        the memory."""
        if not self._memory.intact:
            return []
        keys = descriptors.view("<u8") & self._kind_words
        extended = (column(ATTEND, "flags", descriptors) & FLAG_EXTENDED) != 0
        if extended.any():
            keys = np.concatenate([keys, extensions.view("<u8") * extended[:, None]], axis=1)
        if (keys == keys[0]).all():
            kinds = [(keys[0], np.arange(len(keys)))]
        else:
            some, kind = np.unique(keys, axis=0, return_inverse=True)
            kinds = [(key, np.flatnonzero(kind.reshape(-1) == n)) for n, key in enumerate(some)]
        found = []
        for key, members in kinds:
            known = self._kind(key.tobytes())
            if known:
                found.append(self._together(known, descriptors, members, tenant))
        return [plain for plain in found if len(plain.members)]

    def _kind_of(self, key: bytes) -> Kind | None:
        """The kind of good descriptors, by one without what they differ in, and its second line."""
        descriptor, extension = key[:LINE_BYTES], key[LINE_BYTES:]
        fields = ATTEND.unpack(descriptor)
        try:
            if opcode_of(fields, descriptor, self._features) is not Opcode.ATTEND:
                return None
            if extension and EXTENSION.unpack(extension)["options"] & ~(OPTION_LATENT | OPTION_SUMMARIES):
                return None
            job = check(fields, 0, self._config, self._features, extension)
            if job.shape.query_rows > 1 or (job.asked is not None and job.asked.causal):
                return None
            return Kind(job, self._config)
        except Refusal:
            return None

    def _together(self, kind: Kind, descriptors: Lines, members: npt.NDArray[np.intp], tenant: int) -> Plain:
        """Those of the descriptors of one kind that are good."""
        if len(members) < len(descriptors):
            descriptors = descriptors[members]
        results, jobs, result_lines, lines, reads = self._kernel.walk(
            self._device, kind.record, descriptors, tenant
        )
        good = result_lines >= 0
        if good.all():
            self._kernel.attend(jobs, self._memory)
        else:
            self._kernel.attend(jobs[good], self._memory)
            members, results = members[good], results[good]
            result_lines, lines = result_lines[good], lines[good]
        self._counters.channels["fabric_reads"] += reads
        self._counters.stream(lines.sum(axis=0) * len(kind.passes))
        self._counters.channels["partial_beats"] += len(members) * kind.partial_beats
        return Plain(kind, members, results, result_lines, lines)
