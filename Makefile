# make check   lint, types and the quick tests: two minutes
# make test    lint, types and the whole test suite
# make train   a trained CartPole agent, from nothing but python3, make and a C++ compiler
# Everything is installed into .venv; nothing outside this directory is changed. `make clean-venv` removes it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# The version of torch that the tests run with. On a machine without an NVIDIA GPU it is tried first: everyone then has
# the same numerics, and where a CPU-only build of it is on offer that build is taken instead of gigabytes of GPU
# libraries. Any torch that meets the requirement in pyproject.toml works, and one that is already in .venv is kept.
TORCH := 2.13.0
# Installs the tested versions of everything else, or, where they cannot be had, any that meet the requirements.
INSTALL = pip_install() { $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable "$$1" \
  || { echo "the versions in constraints.txt cannot be installed here: taking those that the requirements lead to"; \
       $(BIN)/python -m pip install --quiet --editable "$$1"; }; }; pip_install

TORCH_VENV := build/torch-$(TORCH)
TORCH_TESTS := contract executor memory ops_norms ops_scan products recorder resume rewrites rng torch_internals

.PHONY: help check check-tests install train test test-tests test-compiled test-gpu test-torch regress lint format bench docs
.PHONY: site release-check constraints clean clean-venv
.DEFAULT_GOAL := help

help:
	@echo "make check     lint, types and the quick tests: run it before each commit (two minutes on two cores)"
	@echo "make test      lint, types and all tests (WORKERS=n: test processes, 2 by default)"
	@echo "make install   .venv with an editable install"
	@echo "make train     train PPO on CartPole-v1 to a solved score"
	@echo "make test-compiled   compiled equals eager, for every algorithm"
	@echo "make test-gpu        on a CUDA device: captured equals eager, for every algorithm"
	@echo "make test-torch TORCH=2.15.0   the tests that depend on torch, with that version in build/torch-2.15.0"
	@echo "make regress   train three algorithms on three tasks and compare with their bars (a minute or two on two cores)"
	@echo "make lint      ruff and mypy only        make format   rewrite the code in the project's format"
	@echo "make bench     compare with Stable-Baselines3 on this machine, and the value heads with each other"
	@echo "make docs      write the generated tables of docs, and the types of the public names"
	@echo "make site      build the documentation site into build/site"
	@echo "make release-check   build the wheel and try it with the oldest and newest Python and torch"
	@echo "make constraints     write the installed versions to constraints.txt"
	@echo "make clean     remove caches and build files        make clean-venv   remove .venv"

# Stamp files say what is installed: the second `make test` installs nothing, a changed pyproject.toml does.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "rl_training needs Python 3.10 or newer; make PYTHON=python3.12 chooses another one" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
	  || command -v nvidia-smi >/dev/null 2>&1 \
	  || $(BIN)/python -m pip install "torch==$(TORCH)" \
	  || echo "torch $(TORCH) cannot be installed here: taking the version that the requirements lead to"
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.torch
	@$(INSTALL) .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/.torch
	@$(INSTALL) '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(VENV)/.torch
	@$(INSTALL) '.[bench,box2d,mujoco]'
	@touch $(VENV)/.installed $@

install: $(VENV)/.installed

train: $(VENV)/.installed
	$(BIN)/rl-training train --config ppo/cartpole --set eval_episodes=20 --set eval_interval=10000 --set stop_at_return=495

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A file's tests stay in one process (they share fixtures); the processes take whole files in turn, the slow ones first.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Side by side: mypy is one process, and alone it would leave the other cores idle.
check: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs 2 lint check-tests

test: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs 2 lint test-tests

check-tests: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

test-tests: $(VENV)/.installed-dev
	$(PYTEST) --durations=20

# The suite compiles a few algorithms; this compiles them all (an hour of one core).
test-compiled: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(WORKERS) tests/test_contract.py -k compiled_equals_eager --compile-all

test-gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(WORKERS) tests/test_gpu.py

$(TORCH_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet "torch==$(TORCH)" --editable '.[dev]'
	@touch $@

test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/pytest -n $(WORKERS) --dist loadfile $(TORCH_TESTS:%=tests/test_%.py)

# Always trained from the start: results of another version would say nothing.
regress: $(VENV)/.installed
	rm -rf build/regress
	$(BIN)/rl-training bench regress --strict --device cpu --output-dir build/regress --results build/regress/results

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/heads.py

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_stub.py

site: docs
	@$(INSTALL) '.[docs]'
	$(BIN)/python -m mkdocs build --strict

# RELEASE="python3.11=2.13.0" tries another pair of Python and torch.
release-check: $(VENV)/.installed-dev
	.ci/release-check $(RELEASE)

# Run it with the newest versions installed and the whole suite passing.
constraints: $(VENV)/.installed-dev
	@head -2 constraints.txt > constraints.tmp
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch >> constraints.tmp
	mv constraints.tmp constraints.txt

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-venv:
	rm -rf $(VENV)
