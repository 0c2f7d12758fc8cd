#!/usr/bin/env python3
"""A chat whose context stays on the device: each turn reads in what is new, and nothing else.

python examples/chat.py                                         asks what you type, until an empty line
python examples/chat.py "Name a colour." "And another one."     asks these
"""

import sys
from collections.abc import Iterator

import nearkv
import nearkv.hf
import torch


def chat(questions: Iterator[str], max_new_tokens: int = 24) -> list[tuple[str, int]]:
    """Answers, and the rows that each turn read in."""
    loaded = nearkv.hf.load()
    model, tokenizer = loaded.model, loaded.tokenizer
    answers = []
    with nearkv.open("model") as device:
        cache = nearkv.hf.attach(model, device)
        messages: list[dict[str, str]] = []
        text = torch.empty(1, 0, dtype=torch.int64)
        for question in questions:
            messages.append({"role": "user", "content": question})
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            # what the template makes of the last answer may differ from what the model said: keep what agrees
            cache.crop(min(0, _common(text, prompt) - cache.get_seq_length()))
            new_rows = prompt.shape[1] - cache.get_seq_length()
            text = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                **{nearkv.hf.cache_argument(): cache},
            )
            answer = tokenizer.decode(text[0, prompt.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": answer})
            print(f"> {question}\n{answer}\n({new_rows} rows were new, {cache.get_seq_length()} are there)")
            answers.append((answer, new_rows))
    nearkv.hf.detach(model)
    return answers


def _common(first: torch.Tensor, second: torch.Tensor) -> int:
    """Tokens that two texts begin with, at most all but the last of the second."""
    count = min(first.shape[1], second.shape[1] - 1)
    differ = (first[0, :count] != second[0, :count]).nonzero()
    return int(differ[0]) if len(differ) else count


def typed() -> Iterator[str]:
    """Lines from the keyboard, until an empty one."""
    while line := input("> ").strip():
        yield line


if __name__ == "__main__":
    chat(iter(sys.argv[1:]) if sys.argv[1:] else typed())
