"""A small system that serves, requests for it, and what a step of their prompts takes."""

from dataclasses import replace

from nearkv.estimate import Setup
from nearkv.estimate.steps import matrices, prompt_attention
from nearkv.serving import Request, Serving, Trace, machine, systems

SETUP = Setup(model="llama-3.1-8b", context=131072, batch=64, devices=2)
ALL = systems(SETUP)
ROW_BYTES = 131072  # of a token in llama-3.1-8b, bf16
SIZE = 512


def trace(*requests, block_tokens=SIZE):
    return Trace(name="made", requests=requests, block_tokens=block_tokens)


def request(at=0.0, prompt=1000, output=1, blocks=()):
    return Request(arrival_s=at, prompt=prompt, output=output, blocks=tuple(blocks))


def small(system, *rows, setup=SETUP, serving=None, below=()):
    """A machine whose homes, and places below, have few rows."""
    whole = machine(setup, system, serving or Serving())
    homes = [replace(home, rows=room) for home, room in zip(whole.homes, rows, strict=True)]
    places = [replace(place, rows=room) for place, room in zip(whole.below, below, strict=True)]
    return replace(whole, homes=homes, below=places, staging_rows=min(whole.staging_rows, rows[0]))


def prompt_s(setup, *chunks):
    """A step of prompts alone on the GPUs."""
    whole = sum(matrices(setup, sum(tokens for _, tokens in chunks)).values())
    return whole + prompt_attention(setup, chunks)
