# Needs only Python 3.11 or newer with pip, and make. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-faults test-gpu lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/installed ## install, then run the main job on the borehole example
	$(BIN)/vcal demo

test: lint ## install with the test extras, then lint, types and the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5

# Smaller: make test-faults KILLS=50 KILLED_TRAININGS=10 FUZZ=2000 SOAK=60; one part: make test-faults FAULTS=tests/faults/test_kills.py
KILLS ?= 1000
KILLED_TRAININGS ?= 200
FUZZ ?= 100000
SOAK ?= 1800
FAULTS ?= tests
test-faults: $(VENV)/installed-test ## every failing system call, kills by the thousand, fuzzing: takes hours
	OMP_NUM_THREADS=1 VCAL_FAULTS_KILLS=$(KILLS) VCAL_FAULTS_KILLED_TRAININGS=$(KILLED_TRAININGS) VCAL_FAULTS_FUZZ=$(FUZZ) \
		VCAL_FAULTS_SOAK=$(SOAK) $(BIN)/python -m pytest -m faults $(FAULTS)

test-gpu: $(VENV)/installed-test ## on a machine with CUDA: equivalence tests on all its GPUs, and the benchmark
	@$(BIN)/python -c 'import sys, torch; n = torch.cuda.device_count(); print(n, "CUDA device(s), torch", torch.__version__); sys.exit(n == 0 and "no CUDA device is visible to torch; install a CUDA build of torch into $(VENV), or use make test" or 0)'
	$(BIN)/python -m pytest -m gpu
	$(BIN)/vcal bench train --quick

lint: $(VENV)/installed-test ## lint, formatting and types only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/installed-test ## format the code and mend what the linter can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove the environment and the tools' caches, never data
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find vcal_dist jobs storage tests -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamps are older than what they depend on only when the environment has to change. The test
# environment contains the other one, so it stamps both: `make demo` after `make test` installs nothing.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vcal-dist needs Python 3.11 or newer, %s is %s; call make PYTHON=..." % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) with the test extras (a few minutes the first time)"
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/installed
