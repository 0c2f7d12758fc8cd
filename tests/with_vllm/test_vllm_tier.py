"""The KV tier under vLLM's own offloading manager: what leaves the primary tier comes back, every byte."""

import random
import uuid
from threading import Event

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from nearkv.vllm.tier import NearKVTier
from nearkv_hw.abi.mailbox import Opcode
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

pytestmark = pytest.mark.vllm
CHUNK_BYTES = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
REQUEST = ReqContext(req_id="one")


def key(number):
    return make_offload_key(number.to_bytes(32, "big"), 0)


def made(view, **config):
    """A tier as vLLM makes it from its configuration."""
    config = {"type": "NearKVTier", "module_path": "nearkv.vllm.tier", "device": "model", **config}
    return SecondaryTierFactory.create_secondary_tier(config, view, None)


@pytest.fixture
def primary():
    """The bytes of a primary tier of eight chunks."""
    return np.zeros((8, CHUNK_BYTES), np.uint8)


@pytest.fixture
def tier(primary):
    made_tier = made(memoryview(primary))
    yield made_tier
    made_tier.shutdown()


def finished(tier, submit, number, keys, chunks, is_promotion):
    submit(TransferJob(number, keys, np.array(chunks, np.int32), is_promotion, REQUEST))
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert result.job_id == number
    return result


def stored(tier, number, numbers, chunks):
    return finished(tier, tier.submit_store, number, [key(n) for n in numbers], chunks, False)


def loaded(tier, number, numbers, chunks):
    return finished(tier, tier.submit_load, number, [key(n) for n in numbers], chunks, True)


def test_chunks_come_back_from_the_device(tier, primary):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    data = np.random.default_rng(seed).integers(0, 256, (4, CHUNK_BYTES), np.uint8)
    primary[:4] = data
    assert tier.lookup(key(0), REQUEST) is LookupResult.MISS
    result = stored(tier, 1, range(4), range(4))
    assert (result.success, result.transfer_bytes) == (True, 4 * CHUNK_BYTES)
    assert tier.lookup(key(3), REQUEST) is LookupResult.HIT
    primary[:] = 0
    assert loaded(tier, 2, [3, 0, 2], [5, 1, 7]).success
    for chunk, number in ((5, 3), (1, 0), (7, 2)):
        assert (primary[chunk] == data[number]).all()
    assert not primary[[0, 2, 3, 4, 6]].any()
    assert not tier.has_pending_work()


def test_the_least_recently_used_chunk_goes(primary):
    tier = made(memoryview(primary), capacity_bytes=3 * CHUNK_BYTES, locality="LOCAL")
    stored(tier, 1, range(3), range(3))
    tier.touch([key(0)], REQUEST)
    assert stored(tier, 2, [3], [3]).success
    found = [tier.lookup(key(n), REQUEST) for n in range(4)]
    assert found == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT, LookupResult.HIT]
    tier.shutdown()


def test_a_chunk_on_its_way_is_asked_for_again_later(tier):
    gate = Event()
    tier._thread.submit(gate.wait)
    tier.submit_store(TransferJob(1, [key(1)], np.array([0], np.int32), False, REQUEST))
    assert tier.has_pending_work()
    assert tier.lookup(key(1), REQUEST) is LookupResult.RETRY
    gate.set()
    tier.drain_jobs()
    assert tier.lookup(key(1), REQUEST) is LookupResult.HIT


def test_a_chunk_that_is_about_to_be_read_is_not_the_one_that_goes(primary):
    primary[:] = np.arange(8, dtype=np.uint8)[:, None]
    tier = made(memoryview(primary), capacity_bytes=2 * CHUNK_BYTES)
    stored(tier, 1, [0, 1], [0, 1])
    gate = Event()
    tier._thread.submit(gate.wait)
    tier.submit_store(TransferJob(2, [key(2)], np.array([2], np.int32), False, REQUEST))
    tier.submit_load(TransferJob(3, [key(0)], np.array([5], np.int32), True, REQUEST))
    gate.set()
    tier.drain_jobs()
    assert all(result.success for result in tier.get_finished_jobs())
    assert (primary[5] == 0).all()
    assert tier.lookup(key(1), REQUEST) is LookupResult.MISS
    tier.shutdown()


def test_a_lost_chunk_fails_alone(tier, primary):
    primary[:] = 7
    stored(tier, 1, range(3), range(3))
    tier._device.cxl().send(Opcode.INJECT_POISON, tier._chunks._at[key(1)].to_bytes(8, "little"))
    primary[:] = 0
    result = loaded(tier, 2, range(3), range(3))
    assert not result.success
    assert list(result.successful_keys) == [key(0), key(2)]
    assert (primary[[0, 2]] == 7).all()
    assert not primary[1].any()
    assert tier.lookup(key(1), REQUEST) is LookupResult.MISS


def test_a_chunk_that_is_not_there_fails(tier):
    result = loaded(tier, 1, [9], [0])
    assert not result.success
    assert list(result.successful_keys) == []


@pytest.fixture
def manager():
    """vLLM's manager of tiers: two chunks in host memory, and the device behind them."""
    region = SharedOffloadRegion(
        engine_id=uuid.uuid4().hex,
        num_chunks=2,
        rank=None,
        kv_bytes_per_chunk=CHUNK_BYTES,
        cpu_page_size=CHUNK_BYTES,
    )
    first = CPUPrimaryTierOffloadingManager(num_chunks=2, cache_policy="lru", mmap_region=region)
    tier = made(first.get_kv_memoryview())
    yield TieringOffloadingManager(primary_tier=first, secondary_tiers=[tier])
    tier.shutdown()
    first.shutdown()


def end_step(manager):
    """The end of an engine's step, after which the tier's jobs are done."""
    for tier in manager.secondary_tiers:
        tier.drain_jobs()
    manager.on_schedule_end(ScheduleEndContext((), ()))


def test_vllms_manager_brings_blocks_back_that_host_memory_has_lost(manager):
    view = np.frombuffer(manager.primary_tier.get_kv_memoryview(), np.uint8).reshape(2, CHUNK_BYTES)
    data = np.random.default_rng(5).integers(0, 256, (6, CHUNK_BYTES), np.uint8)
    manager.on_new_request(REQUEST)
    for number in range(6):  # a block at a time, as the engine would copy them: host memory has room for two
        out = manager.prepare_store([key(number)], REQUEST)
        assert out.keys_to_store == [key(number)]
        view[out.store_spec.chunk_ids[0]] = data[number]
        manager.complete_store([key(number)], REQUEST)
        end_step(manager)
    assert manager.primary_tier.lookup(key(0), REQUEST) is LookupResult.MISS
    for number in (0, 3, 1):
        assert manager.lookup(key(number), REQUEST) is LookupResult.HIT_PENDING
        end_step(manager)
        end_step(manager)
        assert manager.lookup(key(number), REQUEST) is LookupResult.HIT
        spec = manager.prepare_load([key(number)], REQUEST)
        assert (view[spec.chunk_ids[0]] == data[number]).all()
        manager.complete_load([key(number)], REQUEST)
    del view
    manager.on_request_finished(REQUEST)


def test_it_is_a_tier_of_vllms():
    config = {"type": "NearKVTier", "module_path": "nearkv.vllm.tier"}
    assert SecondaryTierFactory.get_tier_class(config) is NearKVTier
