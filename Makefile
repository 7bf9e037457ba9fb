PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: generate head test test-plan test-torch lint

generate: $(VENV)/installed
	$(BIN)/python -m infer.generate --budget 256 --compare

# Trains the draft head that ships here, from text that its target writes.
head: $(VENV)/installed
	$(BIN)/python -m train.regenerate --model jetspec_jax/assets/target --prompts tasks:8000 \
		--max-new-tokens 192 --batch-size 64 --out runs/regenerated
	$(BIN)/python -m train.distill --config configs/tiny.py --resume=auto

# By file, since the tests of a file share what they have compiled.
test: $(VENV)/installed-test lint
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

# Compiles for GPUs that are not there; JAX_PLATFORMS keeps the CUDA plugin from looking for one.
test-plan: $(VENV)/installed-test
	$(BIN)/pip install --quiet --editable '.[test,plan]'
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/test_topology.py tests/test_kernel_compile.py tests/test_training_memory.py tests/test_plan.py

# Compares with transformers on PyTorch, which nothing else needs.
test-torch: $(VENV)/installed-test
	$(BIN)/pip install --quiet torch==2.13.0
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/test_parity_live.py

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/installed
