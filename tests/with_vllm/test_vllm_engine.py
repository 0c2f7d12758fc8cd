"""vLLM's own engine with its KV cache and attention on the device: bits and tokens are the reference's."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import serve_prompts
from nearkv.hf import models

pytestmark = pytest.mark.vllm
LAYERS = 30
ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
BLOCK_ROWS = serve_prompts.BLOCK_ROWS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """SmolLM2 as a plain directory of bf16."""
    folder = tmp_path_factory.mktemp("smollm2")
    models.save(models.load(), folder)
    return folder


def served(model, folder, **settings):
    """What the engine made of the prompts, in a process of its own."""
    file = folder / "found.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEARKV_VLLM")}
    command = [sys.executable, serve_prompts.__file__, str(model), str(file)]
    done = subprocess.run(
        command, env={**environment, **ENGINE, **settings}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def on_device(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replays")
    return served(model, folder, NEARKV_VLLM="model", NEARKV_VLLM_CHECK="1", NEARKV_VLLM_REPLAYS=str(folder))


def test_every_call_on_the_device_has_the_references_bits(on_device):
    steps = on_device["calls"] // LAYERS
    assert on_device["calls"] == on_device["equal"] == steps * LAYERS
    assert steps >= 2 * serve_prompts.NEW_TOKENS
    assert on_device["lines"] > 0
    assert on_device["host_lines"] == 0  # prompts too were attended to where the rows are


def test_tokens_are_those_of_the_reference_in_its_place(model, on_device, tmp_path):
    by_reference = served(model, tmp_path, NEARKV_VLLM="reference")
    assert by_reference["tokens"] == on_device["tokens"]


def test_first_tokens_are_those_of_vllms_own_backend_in_float32(model, on_device, tmp_path):
    own = served(model, tmp_path)
    assert [len(batch) for batch in own["tokens"]] == [8, 2]
    for ours, theirs in zip(on_device["tokens"], own["tokens"], strict=True):
        assert [tokens[:8] for tokens in ours] == [tokens[:8] for tokens in theirs]


def test_a_shared_prefix_is_on_the_device_once(on_device):
    prompts, cached = on_device["prompts"][0], on_device["cached"][0]
    shared = max(cached)
    assert sorted(cached) == [0] + [shared] * 7
    assert shared >= BLOCK_ROWS
    last = serve_prompts.NEW_TOKENS - 1  # the last token's row is never written
    own = sum(-(-(rows + last - shared) // BLOCK_ROWS) for rows in prompts)
    assert on_device["held_blocks"][0] == LAYERS * (shared // BLOCK_ROWS + own)


def test_blocks_were_used_again(on_device):
    """The second batch, whose tokens are right all the same, has blocks of the first."""
    last = serve_prompts.NEW_TOKENS - 1
    batch = zip(on_device["prompts"][1], on_device["cached"][1], strict=True)
    needed = sum(-(-(rows + last - cached) // BLOCK_ROWS) for rows, cached in batch)
    before, after = on_device["held_blocks"]
    assert after < before + LAYERS * needed
