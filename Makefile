# lmlab: everything a checkout can do. `make` alone lists it.
.DEFAULT_GOAL := help
BOOT ?= python3
PYTHON ?= .venv/bin/python
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline

.PHONY: help setup demo test lint test-slow test-parity test-browser check-all gpu wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.venv/ready: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(BOOT) -m venv .venv
	.venv/bin/python -m pip install -q -c constraints.txt -e ".[test,parity,sweepers]"
	@touch $@

# With PYTHON=… the caller brings an interpreter that has everything; then nothing is installed.
setup: $(if $(filter .venv/bin/python,$(PYTHON)),.venv/ready) ## make .venv with pinned versions (about 3 minutes)

demo: setup ## norm × position on the embedded corpus, two seeds each, and their report (about 5 minutes after set-up)
	$(PYTHON) -m lmlab sweep experiment=first_look
	$(PYTHON) -m lmlab report
	@echo "next:  .venv/bin/lmlab sweep experiment=first_look --seeds 4  (two more seeds, the others are kept)"
	@echo "       .venv/bin/lmlab sweep norm=rmsnorm,layernorm attn=mha,gqa --dry-run"
	@echo "       .venv/bin/lmlab train norm=rmsnorm pos=rope attn=gqa"

test: setup ## the whole suite (about 5 minutes on 2 cores)
	$(PYTHON) -m pytest -n 2 --dist worksteal --ignore=tests/parity tests

test-slow: setup ## sweeps under every launcher, killed runs, presets on every row, a wheel, tasks of lm_eval (about 5 minutes)
	$(PYTHON) -m pytest -n 2 --dist worksteal -m slow tests

test-parity: setup ## against transformers on tiny random models, import and export (under 2 minutes)
	$(PYTHON) -m pytest -n 2 --dist worksteal tests/parity

test-browser: setup ## the report's page in a real browser (about a minute)
	@tests/browser/install.sh $(PYTHON)
	$(PYTHON) -m pytest -q tests/browser

lint: setup ## ruff, mypy, import directions
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy lmlab
	$(PYTHON) -m pytest -q tests/test_imports.py

check-all: setup ## every option, and every pair of options of two groups, by `lmlab check` (about 15 minutes on 2 cores)
	$(PYTHON) -m lmlab check --all

gpu: setup ## on a GPU machine: against CPU, every kernel's parity, every benchmark (8 minutes; PYTHON=python3 runs without .venv)
	PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(PYTHON) experiments/gpu/run.py
	PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(PYTHON) experiments/gpu/speed.py

wheel: setup ## build dist/*.whl
	$(PYTHON) -m build --no-isolation --wheel

clean: ## remove what tests and builds left
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache
