#!/usr/bin/env python3
"""Speculative decoding: drafts from the prompt itself, judged several at a time, taken back where wrong.

A step over four query rows costs the device one pass over the context, as a step over one does.

python examples/speculative.py
"""

import nearkv
import nearkv.hf
import torch

PROMPT = (
    "Repeat this list word for word: apple, banana, cherry, date, elderberry, fig, grape, honeydew, "
    "kiwi, lemon, mango, nectarine."
)


def compare(max_new_tokens: int = 40, drafted: int = 4) -> tuple[list[int], list[int], int, int]:
    """Tokens of plain and of speculative decoding, and the model's steps for each."""
    loaded = nearkv.hf.load()
    model = loaded.model
    ids = nearkv.hf.prompt_ids(loaded, PROMPT)
    steps: list[int] = []
    counting = model.register_forward_pre_hook(lambda *_: steps.append(1))
    found = []
    with nearkv.open("model") as device:
        nearkv.hf.attach(model, device)
        for options in ({}, {"prompt_lookup_num_tokens": drafted}):
            before = device.stats()
            steps.clear()
            text = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                **options,
            )
            tokens = text[0, ids.shape[1] :].tolist()
            lines = (device.stats() - before).lines
            found.append((tokens, len(steps)))
            name = "speculative" if options else "plain"
            print(f"{name}: {len(tokens)} tokens, {len(steps)} steps, {lines} lines of KV streamed")
    counting.remove()
    nearkv.hf.detach(model)
    print(loaded.tokenizer.decode(found[1][0], skip_special_tokens=True))
    return found[0][0], found[1][0], found[0][1], found[1][1]


if __name__ == "__main__":
    compare()
