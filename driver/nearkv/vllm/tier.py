"""A KV tier of vLLM's offloading on the device: blocks that left the engine's memory, as bytes near it.

--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1000000000,
    "secondary_tiers": [{"type": "NearKVTier", "module_path": "nearkv.vllm.tier", "device": "model"}]}}'
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, ClassVar

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import nearkv
from nearkv.chunks import Bytes, ChunkMemory
from nearkv.errors import AccessError, OutOfMemoryError

logger = init_logger(__name__)


class NearKVTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks of blocks in device memory, the least recently used one going when there is no room.

    Transfers run one after the other in a thread of their own, the only one that uses the device.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector : as vLLM gives them.
    device : what `nearkv.open` takes; "unix:PATH" shares one with others.
    capacity_bytes : of all chunks at most; the device's memory if not given.
    tenant : which of the device's apertures.
    locality : "LOCAL" or "REMOTE", for vLLM's events.
    """

    medium: ClassVar[Medium] = Medium.CPU  # memory that the host addresses, not storage

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        device: str = "model",
        capacity_bytes: int | None = None,
        tenant: int = 0,
        locality: str | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._device = nearkv.open(device)
        try:
            self._chunks = ChunkMemory(
                self._device, chunk_bytes=self.block_size_bytes, capacity_bytes=capacity_bytes, tenant=tenant
            )
        except BaseException:
            self._device.close()
            raise
        self._lock = Lock()
        # under the lock: what is stored, the least recently used first; what is on its way; what is read
        self._stored: OrderedDict[OffloadKey, None] = OrderedDict()
        self._arriving: Counter[OffloadKey] = Counter()
        self._leaving: Counter[OffloadKey] = Counter()
        self._finished: list[JobResult] = []
        self._jobs: set[Future[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nearkv-tier")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT for a chunk that is there, RETRY for one on its way, else MISS."""
        with self._lock:
            if key in self._stored:
                return LookupResult.HIT
            return LookupResult.RETRY if key in self._arriving else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """These chunks were used last."""
        with self._lock:
            self._touch(keys)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Take chunks over from the primary tier; those that are there already stay as they are."""
        with self._lock:
            self._arriving.update(job_metadata.keys)
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Bring chunks back to the primary tier; until that is done they stay here."""
        with self._lock:
            self._leaving.update(job_metadata.keys)
        self._submit(job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that were done since the last call. A job of which some keys failed names the others."""
        with self._lock:
            done, self._finished = self._finished, []
            self._jobs = {job for job in self._jobs if not job.done()}
        return done

    def has_pending_work(self) -> bool:
        """Whether jobs are under way, or done and not asked for."""
        with self._lock:
            return bool(self._finished) or any(not job.done() for job in self._jobs)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are wanted as they come."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait for all jobs."""
        wait(self._jobs)

    def shutdown(self) -> None:
        """Finish all jobs, and end the device. A second call does nothing."""
        self._thread.shutdown(wait=True)
        self._device.close()

    # Below: what the thread does

    def _submit(self, job: TransferJob, carry_out: Callable[[TransferJob], list[OffloadKey]]) -> None:
        def run() -> None:
            began = time.perf_counter()
            done: list[OffloadKey] = []
            try:
                done = carry_out(job)
            except Exception:  # the engine goes on without what the tier cannot do
                logger.exception("job %d of tier %s failed", job.job_id, self.tier_type)
            result = JobResult(
                job_id=job.job_id,
                success=len(done) == len(job.keys),
                successful_keys=done if job.is_promotion else None,
                transfer_time=time.perf_counter() - began,
                transfer_bytes=len(done) * self.block_size_bytes,
            )
            with self._lock:
                self._finished.append(result)

        self._jobs.add(self._thread.submit(run))

    def _store(self, job: TransferJob) -> list[OffloadKey]:
        done = []
        for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            try:
                if key not in self._stored:
                    self._with_room(key, chunk)
                done.append(key)
            except OutOfMemoryError:
                pass  # the job says that it failed
            finally:
                self._moved(key, self._arriving)
        return done

    def _with_room(self, key: OffloadKey, chunk: int) -> None:
        """Store a chunk; others go first where there is no room. OutOfMemoryError when none may go."""
        while True:
            try:
                self._chunks.store(key, self._primary(chunk))
            except OutOfMemoryError:
                with self._lock:
                    oldest = next((k for k in self._stored if k not in self._leaving), None)
                    if oldest is None:
                        raise
                    del self._stored[oldest]
                self._chunks.drop(oldest)
            else:
                with self._lock:
                    self._stored[key] = None
                return

    def _load(self, job: TransferJob) -> list[OffloadKey]:
        done = []
        for key, chunk in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            try:
                if key in self._stored:
                    self._chunks.load(key, self._primary(chunk))
                    done.append(key)
            except AccessError:  # its content is lost
                with self._lock:
                    del self._stored[key]
                self._chunks.drop(key)
            finally:
                self._moved(key, self._leaving)
        return done

    def _moved(self, key: OffloadKey, under_way: Counter[OffloadKey]) -> None:
        """A chunk is no longer under way, and was used last."""
        with self._lock:
            under_way[key] -= 1
            if not under_way[key]:
                del under_way[key]
            self._touch([key])

    def _primary(self, chunk: int) -> Bytes:
        """A chunk's bytes in the primary tier."""
        all_chunks = np.frombuffer(self._primary_kv_view, np.uint8).reshape(len(self._primary_kv_view), -1)
        found: Bytes = all_chunks[chunk]
        return found

    def _touch(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if key in self._stored:
                self._stored.move_to_end(key)
