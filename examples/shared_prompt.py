#!/usr/bin/env python3
"""A system prompt that is read once and served to eight requests, which decode together.

python examples/shared_prompt.py
"""

import nearkv
import nearkv.hf
import torch

SYSTEM = "You answer in one short sentence, without explaining yourself, and you are always polite."
QUESTIONS = (
    "What is the capital of France?",
    "Name a fruit.",
    "What colour is the sky?",
    "How many legs has a spider?",
    "Say hello in Spanish.",
    "What is two plus two?",
    "Which animal barks?",
    "What do bees make?",
)


def serve(questions: tuple[str, ...] = QUESTIONS, max_new_tokens: int = 12) -> tuple[list[str], int, int]:
    """The answers, the rows of the common prompt, and the rows that were read in altogether."""
    loaded = nearkv.hf.load()
    model, tokenizer = loaded.model, loaded.tokenizer

    def ids_of(question: str | None) -> torch.Tensor:
        messages = [{"role": "system", "content": SYSTEM}]
        if question is not None:
            messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=question is not None
        )
        return tokenizer(text, return_tensors="pt").input_ids[0]

    system = ids_of(None)
    prompts = [ids_of(question)[len(system) :] for question in questions]
    with nearkv.open("model") as device:
        cache = nearkv.hf.attach(model, device)
        with torch.inference_mode():
            model(system[None], use_cache=True, **{nearkv.hf.cache_argument(): cache})
        batcher = nearkv.hf.Batcher(model, cache)
        for prompt in prompts:
            batcher.add(prompt, max_new_tokens=max_new_tokens, after=cache)
        done = batcher.run()
        jobs = device.stats().jobs
    nearkv.hf.detach(model)
    answers = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in done.values()]
    read = len(system) + sum(map(len, prompts))
    for question, answer in zip(questions, answers, strict=True):
        print(f"{question} {answer}")
    print(f"{read} rows read in, {read + 7 * len(system)} without sharing; {jobs} attention jobs")
    return answers, len(system), read


if __name__ == "__main__":
    serve()
