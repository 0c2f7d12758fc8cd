#!/usr/bin/env python3
"""One context in three tiers: the newest rows in host memory, older ones on a device, the oldest on a second.

Each tier returns a partial of what it holds, and merging them is exact: the result has the bits of one tier
that holds everything. Only partials travel.

python examples/three_tiers.py
"""

import nearkv
import torch

KV_HEADS, Q_HEADS, HEAD_DIM = 2, 8, 64


def attend(rows: tuple[int, int, int] = (3000, 1500, 100)) -> tuple[torch.Tensor, torch.Tensor]:
    """The result over the tiers (oldest first) and that of a single tier."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, sum(rows), KV_HEADS, HEAD_DIM, generator=generator).half()
    q = torch.randn(1, Q_HEADS, HEAD_DIM, generator=generator).half()
    sinks = torch.randn(Q_HEADS, generator=generator)
    cold_k, warm_k, hot_k = k.split(rows)
    cold_v, warm_v, hot_v = v.split(rows)
    shape = {"layers": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "fp16"}
    with nearkv.open("model") as warm, nearkv.open("model", channels=1) as cold:
        partials = []
        for name, device, tier_k, tier_v in (("cold", cold, cold_k, cold_v), ("warm", warm, warm_k, warm_v)):
            kv = device.kv_cache(**shape)
            sequence = kv.sequence()
            kv.append(sequence, layer=0, k=tier_k, v=tier_v)
            partials.append(kv.attend([sequence], layer=0, q=q, scale=0.125, partial=True))
            moved = device.stats()
            print(f"{name}: {len(tier_k)} rows, {moved.lines} lines streamed")
        hot = nearkv.reference.decode_attention(
            q, hot_k[None], hot_v[None], scale=0.125, sinks=sinks, k_format="fp16", partial=True
        )  # one of the parts has the sinks
        print(f"hot: {len(hot_k)} rows in host memory")
    merged = nearkv.merge(nearkv.merge(*partials), hot)
    whole = nearkv.reference.decode_attention(q, k[None], v[None], scale=0.125, sinks=sinks, k_format="fp16")
    return nearkv.finish(merged, torch.float32), whole


if __name__ == "__main__":
    in_tiers, whole = attend()
    print("every bit equal" if torch.equal(in_tiers, whole) else "DIFFERENT")
