# Everything a newcomer types. Each target installs what it needs first, once, into .venv.
#
#   make demo     four workers on an emulated T4 + V100 cluster train three ways, and a table says what was gained
#   make test     every test but those that need a GPU, or minutes each
#   make test-long  those that need minutes each, live
#   make check    format, lint, types, import contracts, documentation
#   make bench    the quick form of every experiment, and one table, in under ten minutes
#   make soak     half an hour of live training with a failure a minute, outside CI
#   make package  the wheel and the source distribution, in dist/
#   make compat   a part of the tests with the lowest and with the newest versions allowed: gigabytes, outside CI
#   make docs     the documentation as a static site, in site/

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Redone when pyproject.toml changes, and only then.
STAMP  := $(VENV)/.installed
OUT    ?= out
# Errors only: pip's warnings here are about its own set-up, not about ours.
PIP_QUIET := -qq --disable-pip-version-check

# Two cores are the reference machine: torch's own threads would only fight with the worker processes.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: help setup demo test test-long test-gpu check format bench soak package compat docs clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   make /  make /p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "rex_ray needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one:  make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu:  apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): torch, Ray and the rest, several GB. This takes some minutes, once."
	@$(BIN)/python -m pip install $(PIP_QUIET) --upgrade "pip>=24"
	$(BIN)/python -m pip install $(PIP_QUIET) --editable ".[dev]"
	@touch $(STAMP)

demo: setup
	$(BIN)/rex-ray demo --output $(OUT)/demo

# Pure tests run first, then those with real processes, then those with a real Ray: the cheapest failure comes first.
# Pure ones share nothing, so they share the cores; the others have several processes each, and the machine to themselves.
test: setup
	$(BIN)/python -m pytest -m "not dist and not ray and not gpu" -n 2 --dist worksteal
	$(BIN)/python -m pytest -m "(dist or ray) and not gpu and not long" --durations=10

test-long: setup
	$(BIN)/python -m pytest -m "long and not gpu" --durations=10

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m experiments.bench --out $(OUT)/bench

soak: setup
	$(BIN)/python -m experiments.soak --minutes 30 --json $(OUT)/soak.json

# By way of the source distribution, so that nothing that lies about here comes into the wheel.
package: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist

compat:
	$(PYTHON) tools/compat.py lowest
	$(PYTHON) tools/compat.py newest

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(OUT) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
