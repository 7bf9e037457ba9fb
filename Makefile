PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: generate test lint

generate: $(VENV)/installed
	$(BIN)/python -m infer.generate --budget 256

test: $(VENV)/installed-test lint
	$(BIN)/python -m pytest

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
