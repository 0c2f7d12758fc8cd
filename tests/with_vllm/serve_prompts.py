"""Starts vLLM's engine on a model, gives it prompts, and writes what came of them to a file of JSON.

python serve_prompts.py MODEL FILE; the environment says where attention is (`nearkv.vllm.Settings`).
"""

import json
import os
import sys
from pathlib import Path

BLOCK_ROWS = 32
POOL_BLOCKS = 11
"""One is the engine's own; the others are fewer than all prompts take, so that some are used again."""
SYSTEM = "<|im_start|>system\nAnswer in a few plain words and be kind. {}<|im_end|>\n<|im_start|>user\n"
QUESTIONS = [
    "The capital of France?",
    "Three colours?",
    "Two plus two?",
    "Who wrote Hamlet?",
    "What is water made of?",
    "Days of a week?",
    "What do bees make?",
    "Which animal barks?",
]
LATER = ["Is the sun a star?", "Where do penguins live?"]
FIRST = "Never make anything up; say so when you do not know the answer."
SECOND = "The user is a child who likes to hear about the sky and animals."
END = "<|im_end|>\n<|im_start|>assistant\n"
NEW_TOKENS = 8


def main(model: str, file: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        block_size=BLOCK_ROWS,
        num_gpu_blocks_override=POOL_BLOCKS,
        max_num_batched_tokens=40,  # prompts come in pieces, beside the steps of others
        max_num_seqs=8,
        disable_log_stats=True,
    )
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    answers, held = [], []
    for questions, rule in ((QUESTIONS, FIRST), (LATER, SECOND)):
        prompts = [f"{SYSTEM.format(rule)}{question}{END}" for question in questions]
        answers.append(engine.generate(prompts, sampling))
        held.append(held_blocks())
    found = {
        "prompts": [[len(a.prompt_token_ids) for a in batch] for batch in answers],
        "cached": [[a.num_cached_tokens for a in batch] for batch in answers],
        "tokens": [[list(a.outputs[0].token_ids) for a in batch] for batch in answers],
        "texts": [[a.outputs[0].text for a in batch] for batch in answers],
        "held_blocks": held,
        **checks(),
    }
    Path(file).write_text(json.dumps(found))


def held_blocks() -> int:
    """Blocks that the device holds, all layers."""
    if not os.environ.get("NEARKV_VLLM"):
        return 0
    from nearkv.vllm.host_blocks import CheckedBlocks
    from nearkv.vllm.residence import residence

    stores = [s for s in residence().stores if isinstance(s, CheckedBlocks)]
    return sum(store.device_blocks.held_blocks for store in stores)


def checks() -> dict:
    """What checks came to, and what the device did."""
    if not os.environ.get("NEARKV_VLLM"):
        return {}
    from nearkv.vllm.residence import residence

    own = residence()
    stats = None if own.device is None else own.device.stats()
    return {
        "calls": own.tally.calls,
        "equal": own.tally.equal,
        "check_s": own.tally.seconds,
        "lines": 0 if stats is None else stats.lines,
        "host_lines": 0 if stats is None else stats.host_lines,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
