#!/usr/bin/env python3
"""A needle in a long context: 131,072 rows on the device, and one of them is what the query asks for.

At each of several depths a key is put that the query matches better than any other by far, and attention has
to return its value; then a real model has to find a number in a page of text.

python examples/needle.py
"""

import nearkv
import nearkv.hf
import torch

DEPTHS = (0.0, 0.1, 0.5, 0.9, 1.0)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is 71432. Remember it: 71432 is the pass key. "
QUESTION = "What is the pass key? The pass key is"


def rows_found(rows: int = 131_072, head_dim: int = 64, part: int = 8192) -> dict[float, float]:
    """For each depth, how much of the attention's weight goes to the needle."""
    generator = torch.Generator().manual_seed(0)
    query = torch.nn.functional.normalize(torch.randn(head_dim, generator=generator), dim=0)
    found = {}
    with nearkv.open("model", capacity_bytes=1 << 28) as device:
        for depth in DEPTHS:
            at = round(depth * (rows - 1))
            with device.kv_cache(layers=1, kv_heads=1, head_dim=head_dim, dtype="fp8", page_rows=64) as kv:
                sequence = kv.sequence()
                for first in range(0, rows, part):
                    k, v = torch.randn(part, 1, head_dim, generator=generator), torch.zeros(part, 1, head_dim)
                    if first <= at < first + part:
                        k[at - first], v[at - first] = 8 * query, 1.0
                    kv.append(sequence, layer=0, k=k, v=v)
                q = (4 * query).view(1, 1, -1).half()
                found[depth] = float(kv.attend([sequence], layer=0, q=q, scale=1.0).mean())
            print(f"{rows:,} rows, needle at {at:,}: {found[depth]:.4f} of the weight")
    return found


def text_found(pages: int = 18, depth: float = 0.4) -> tuple[str, int]:
    """What SmolLM2 says the pass key is, and the tokens of the context."""
    loaded = nearkv.hf.load()
    before = round(pages * depth)
    text = FILLER * before + NEEDLE + FILLER * (pages - before) + QUESTION
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    with nearkv.open("model") as device:
        nearkv.hf.attach(loaded.model, device, kv_format="q8_0")
        out = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
        )
    nearkv.hf.detach(loaded.model)
    answer = loaded.tokenizer.decode(out[0, ids.shape[1] :])
    print(f"{ids.shape[1]} tokens: {QUESTION}{answer}")
    return answer, ids.shape[1]


if __name__ == "__main__":
    rows_found()
    text_found()
