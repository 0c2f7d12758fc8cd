"""Caches over thousands of random steps against dictionaries: same rows, same bits, no leak, no page twice.

Two tenants on one device that completes late; forks, crops, beams, windows, prefixes, calls under way, tiers,
lost links, hangs, poisoned pages and hosts that die.
"""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from driver_cases import expected, same_bits, values
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from late_port import LatePort
from leaks import no_leak
from nearkv.device import Device
from nearkv.errors import ClosedError, DeviceError, DeviceTimeoutError, LinkError, StalePrefixError
from nearkv.faults import Faults
from nearkv.tiers import DeviceTier, NewestRows, TensorTier, TieredCache
from nearkv_hw.abi import configure
from nearkv_hw.abi.config import EXTENT_BYTES

EXAMPLES = int(os.environ.get("NEARKV_STATEFUL_EXAMPLES", "40"))
STEPS = 120
LAYERS, HEADS, DIM, PAGE = 2, 2, 8, 4
SHAPE = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "fp16"}
TENANTS = st.sampled_from([0, 1])
LAYER = st.integers(0, LAYERS - 1)
PICK = st.integers(0, 1 << 20)


@dataclass
class Layer:
    """K of all rows, of which V is the negative, and which were released."""

    k: torch.Tensor = field(default_factory=lambda: torch.zeros(0, HEADS, DIM).half())
    released: tuple[int, int] = (0, 0)

    @property
    def seen(self) -> torch.Tensor:
        index = torch.arange(len(self.k))
        return (index < self.released[0]) | (index >= self.released[1])

    def cut(self, rows: int) -> "Layer":
        if rows >= len(self.k):
            return self
        return Layer(self.k[:rows], (0, 0) if rows <= self.released[0] else self.released)

    def fits(self, rows: int) -> bool:
        return not self.released[0] < rows < min(self.released[1], len(self.k))


Rows = list[Layer]


class Caches(RuleBasedStateMachine):
    """One cache of each tenant, by slot what it holds, and what is under way."""

    @initialize(seed=st.integers(0, 1 << 30), eager=st.sampled_from([0.0, 0.1, 1.0]))
    def open(self, seed, eager):
        self.port = LatePort(configure("small", capacity_bytes=64 * EXTENT_BYTES), seed, eager=eager)
        self.device = Device(self.port)
        self.faults = Faults(self.device)
        self.kv = [self.device.kv_cache(**SHAPE, page_rows=PAGE, tenant=t) for t in (0, 1)]
        self.rows: list[dict[int, Rows]] = [{}, {}]
        self.prefixes: list[dict] = [{}, {}]
        self.gone: list = []
        self.under_way: list = []
        tiers = [TensorTier("hot"), DeviceTier(self.device, tenant=1, page_rows=2 * PAGE)]
        self.tiered = TieredCache(tiers, **SHAPE, policy=NewestRows(3))
        self.in_tiers: dict = {}
        self.count = seed % 1000

    def some(self, count):
        self.count += 1
        return values(count, HEADS, DIM, seed=self.count)

    def pick(self, tenant, number):
        """A slot that has a sequence, and its handle."""
        slot = sorted(self.rows[tenant])[number % len(self.rows[tenant])]
        return slot, self.kv[tenant].sequence_at(slot)

    def has(self, tenant):
        return bool(self.rows[tenant])

    def any_rows(self):
        return self.has(0) or self.has(1)

    def tenant_with_rows(self, tenant):
        return tenant if self.has(tenant) else 1 - tenant

    # Sequences

    @rule(tenant=TENANTS)
    def new(self, tenant):
        if len(self.rows[tenant]) < 8:
            self.rows[tenant][self.kv[tenant].sequence().slot] = [Layer() for _ in range(LAYERS)]

    @precondition(any_rows)
    @rule(
        tenant=TENANTS, number=PICK, layer=LAYER, count=st.sampled_from([1, 1, 2, 5, 37]), later=st.booleans()
    )
    def append(self, tenant, number, layer, count, later):
        tenant = self.tenant_with_rows(tenant)
        slot, handle = self.pick(tenant, number)
        k = self.some(count)
        call = self.kv[tenant].append_async if later else self.kv[tenant].append
        call(handle, layer=layer, k=k, v=-k)
        old = self.rows[tenant][slot][layer]
        self.rows[tenant][slot][layer] = Layer(torch.cat([old.k, k]), old.released)

    @precondition(any_rows)
    @rule(tenant=TENANTS, number=PICK, rows=st.none() | st.integers(0, 60))
    def fork(self, tenant, number, rows):
        tenant = self.tenant_with_rows(tenant)
        slot, handle = self.pick(tenant, number)
        own = self.rows[tenant][slot]
        if rows is not None and (rows > max(len(x.k) for x in own) or not all(x.fits(rows) for x in own)):
            rows = None
        if len(self.rows[tenant]) < 8:
            copy = self.kv[tenant].fork(handle, rows)
            self.rows[tenant][copy.slot] = [x if rows is None else x.cut(rows) for x in own]

    @precondition(any_rows)
    @rule(tenant=TENANTS, number=PICK, layer=LAYER, share=st.floats(0, 1))
    def crop(self, tenant, number, layer, share):
        tenant = self.tenant_with_rows(tenant)
        slot, handle = self.pick(tenant, number)
        own = self.rows[tenant][slot][layer]
        rows = int(share * len(own.k))
        if own.fits(rows):
            self.kv[tenant].crop(handle, rows, layer)
            self.rows[tenant][slot][layer] = own.cut(rows)

    @precondition(any_rows)
    @rule(tenant=TENANTS, number=PICK, layer=LAYER, share=st.floats(0, 1), kept=st.integers(0, 6))
    def release(self, tenant, number, layer, share, kept):
        tenant = self.tenant_with_rows(tenant)
        slot, handle = self.pick(tenant, number)
        own = self.rows[tenant][slot][layer]
        before = int(share * len(own.k))
        first, last = own.released
        kept = first if last else kept
        if kept <= before and before >= last:
            self.kv[tenant].release(handle, before, kept_rows=kept, layer=layer)
            if kept < before:
                self.rows[tenant][slot][layer] = Layer(own.k, (kept, before))

    @precondition(any_rows)
    @rule(tenant=TENANTS, number=PICK)
    def free(self, tenant, number):
        tenant = self.tenant_with_rows(tenant)
        slot, handle = self.pick(tenant, number)
        self.kv[tenant].free(handle)
        del self.rows[tenant][slot]

    @precondition(any_rows)
    @rule(tenant=TENANTS, chosen=st.lists(PICK, min_size=1, max_size=4))
    def beams(self, tenant, chosen):
        tenant = self.tenant_with_rows(tenant)
        slots = sorted(self.rows[tenant])[:3]
        handles = [self.kv[tenant].sequence_at(slot) for slot in slots]
        chosen = [number % len(slots) for number in chosen]
        held = [self.rows[tenant].pop(slot) for slot in slots]
        for handle, index in zip(self.kv[tenant].select(handles, chosen), chosen, strict=True):
            self.rows[tenant][handle.slot] = list(held[index])

    # Prefixes

    @precondition(any_rows)
    @rule(tenant=TENANTS, number=PICK, share=st.floats(0, 1), token=st.integers(0, 1))
    def publish(self, tenant, number, share, token):
        tenant = self.tenant_with_rows(tenant)
        slot, handle = self.pick(tenant, number)
        own = self.rows[tenant][slot]
        rows = int(share * min(x.released[0] if x.released[1] else len(x.k) for x in own))
        tokens = tuple([token] * min(rows, 3) + [self.count] * (rows - 3))
        if rows and not any(known == tokens for known, _ in self.prefixes[tenant].values()):
            prefix = self.kv[tenant].publish(handle, tokens)
            self.prefixes[tenant][prefix] = tokens, [x.k[:rows] for x in own]

    @rule(tenant=TENANTS, number=PICK, length=st.integers(1, 30))
    def find(self, tenant, number, length):
        known = self.prefixes[tenant]
        tokens = list(list(known.values())[number % len(known)][0])[:length] if known else [7] * length
        prefix, rows = self.kv[tenant].find_prefix(tokens)
        alike = {one: shared(tokens, own) for one, (own, _) in known.items()}
        assert rows == (alike[prefix] if prefix else 0)
        if rows >= PAGE or (prefix and len(self.rows[tenant]) < 8):
            assert rows == max(alike.values())
        if prefix and len(self.rows[tenant]) < 8:
            copy, found = self.kv[tenant].sequence_like(tokens)
            held = known[self.kv[tenant].find_prefix(tokens)[0]][1]
            self.rows[tenant][copy.slot] = [Layer(k[:found]) for k in held]

    @rule(tenant=TENANTS, number=PICK)
    def drop_prefix(self, tenant, number):
        known = self.prefixes[tenant]
        if known:
            prefix = list(known)[number % len(known)]
            self.kv[tenant].drop_prefix(prefix)
            del known[prefix]
            self.gone.append((tenant, prefix))
        for owner, prefix in self.gone[-3:]:
            with pytest.raises(StalePrefixError):
                self.kv[owner].fork_prefix(prefix)

    # Attention

    @precondition(any_rows)
    @rule(tenant=TENANTS, numbers=st.lists(PICK, min_size=1, max_size=3), layer=LAYER, later=st.booleans())
    def attend(self, tenant, numbers, layer, later):
        tenant = self.tenant_with_rows(tenant)
        picked = [self.pick(tenant, number) for number in numbers]
        self.count += 1
        q = values(len(picked), 2 * HEADS, DIM, seed=self.count)
        wanted = torch.cat(
            [answer(q[i : i + 1], self.rows[tenant][slot][layer]) for i, (slot, _) in enumerate(picked)]
        )
        call = self.kv[tenant].attend_async if later else self.kv[tenant].attend
        result = call([handle for _, handle in picked], layer=layer, q=q, scale=0.3)
        if later:
            self.under_way.append((tenant, result, wanted))
        else:
            assert same_bits(result, wanted)

    @precondition(lambda self: self.under_way)
    @rule(number=PICK)
    def wait(self, number):
        _, pending, wanted = self.under_way.pop(number % len(self.under_way))
        assert same_bits(pending.result(), wanted)

    # Tiers

    @rule(count=st.integers(1, 9), layer=LAYER, number=PICK, kept=st.none() | st.integers(0, 20))
    def tiers(self, count, layer, number, kept):
        if len(self.in_tiers) < 2:
            self.in_tiers[self.tiered.sequence()] = [Layer() for _ in range(LAYERS)]
        handle = list(self.in_tiers)[number % len(self.in_tiers)]
        own, k = self.in_tiers[handle], self.some(count)
        self.tiered.append(handle, layer=layer, k=k, v=-k)
        own[layer] = Layer(torch.cat([own[layer].k, k]))
        if kept is not None and kept <= max(len(x.k) for x in own):
            self.tiered.crop(handle, kept)
            self.in_tiers[handle] = own = [x.cut(kept) for x in own]
        q = values(1, 2 * HEADS, DIM, seed=self.count)
        assert same_bits(self.tiered.attend([handle], layer=layer, q=q, scale=0.3), answer(q, own[layer]))

    # Faults, after which tenant 0 starts anew

    @precondition(lambda self: self.has(0))
    @rule(number=PICK, layer=LAYER, lines=st.integers(0, 40), count=st.integers(1, 20))
    def the_link_is_lost(self, number, layer, lines, count):
        slot, handle = self.pick(0, number)
        self.settle()
        k, old = self.some(count), self.rows[0][slot][layer]
        self.faults.lose_link(lines)
        try:
            self.kv[0].append(handle, layer=layer, k=k, v=-k)
            self.faults.restore_link()
            new = True
        except LinkError:
            self.faults.restore_link()
            self.recover()
            new = self.kv[0].length(self.kv[0].sequence_at(slot), layer) > len(old.k)
        if new:
            self.rows[0][slot][layer] = Layer(torch.cat([old.k, k]), old.released)

    @precondition(lambda self: self.has(0))
    @rule(number=PICK, layer=LAYER)
    def a_job_hangs(self, number, layer):
        _, handle = self.pick(0, number)
        self.settle()
        q = values(1, 2 * HEADS, DIM, seed=self.count)
        with self.faults.hang(0), pytest.raises(DeviceTimeoutError):
            self.kv[0].attend([handle], layer=layer, q=q)
        with pytest.raises(ClosedError):
            self.kv[0].attend([handle], layer=layer, q=q)
        self.recover()

    @rule()
    def the_host_dies(self):
        """Tenant 0's driver is gone with all that it knew; what waited to be sent is sent first."""
        self.settle()
        self.recover()

    @precondition(lambda self: self.has(0))
    @rule(number=PICK, layer=LAYER, row=PICK)
    def a_page_is_lost(self, number, layer, row):
        slot, handle = self.pick(0, number)
        own = self.rows[0][slot][layer]
        seen = np.flatnonzero(own.seen.numpy())
        if not len(seen):
            return
        self.settle()
        row = int(seen[row % len(seen)])
        page = int(handle._tables[layer].page_addresses(row // PAGE, row // PAGE + 1)[0, 0])
        self.faults.poison(self.kv[0], handle, layer=layer, row=row)
        q = values(1, 2 * HEADS, DIM, seed=self.count)
        with pytest.raises(DeviceError) as raised:
            self.kv[0].attend([handle], layer=layer, q=q)
        assert (raised.value.sequence, raised.value.page) == (0, row // PAGE)
        for other in list(self.rows[0]):
            one = self.kv[0].sequence_at(other)
            if any(page in table.addresses().tolist() for table in one._tables):
                self.kv[0].free(one)
                del self.rows[0][other]
        left = set(self.kv[0].prefixes)
        for prefix in self.prefixes[0].keys() - left:
            self.gone.append((0, prefix))
            del self.prefixes[0][prefix]

    def settle(self):
        """Wait for everything that is under way."""
        self.device.synchronize()
        for _, pending, wanted in self.under_way:
            assert same_bits(pending.result(), wanted)
        self.under_way = []

    def recover(self):
        (self.kv[0],) = self.device.recover(0)
        assert {one.slot for one in self.kv[0].sequences} == set(self.rows[0])
        assert set(self.kv[0].prefixes) == set(self.prefixes[0])

    # What always holds

    @invariant()
    def memory_adds_up(self):
        if hasattr(self, "kv"):
            for kv in self.kv:
                if not kv._tenant._retired:
                    no_leak(kv)
            pages = [page for kv in self.kv for page in set(all_pages(kv))]
            assert len(pages) == len(set(pages)), "a page has two owners"

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        self.settle()
        for tenant, kv in enumerate(self.kv):
            assert {one.slot for one in kv.sequences} == set(self.rows[tenant])
            for slot, own in self.rows[tenant].items():
                handle = kv.sequence_at(slot)
                for layer, held in enumerate(own):
                    k, v = kv.read(handle, layer=layer)
                    assert same_bits(k, held.k[held.seen])
                    assert same_bits(v, -k)
            kv.close()
        self.tiered.close()
        assert [self.device.memory(t).pages for t in (0, 1)] == [0, 0]
        self.device.close()


def shared(first, second) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def answer(q, layer: Layer) -> torch.Tensor:
    k = layer.k[layer.seen]
    return expected(q, [(k, -k)], scale=0.3)


def all_pages(kv) -> list[int]:
    tables = [table for handle in kv.sequences for table in handle._tables]
    return [page for table in (*tables, *kv._prefixes.tables) for page in table.addresses().tolist()]


Caches.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestCaches = Caches.TestCase
