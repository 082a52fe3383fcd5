# Every target sets up .venv/ first, if it does not fit pyproject.toml.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
RUN_DIR ?= runs/demo
SEEDS ?= 2000
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

.PHONY: help setup demo check test test-slow test-rounds live soak chaos screenshots bench generate clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | column -t -s $$'\t'

setup: ## create or refresh .venv/
	@scripts/setup.sh
	@$(if $(filter setup,$(MAKECMDGOALS)),echo 'ready: source .venv/bin/activate')

demo: setup ## train with faults, about a minute
	@$(BIN)/nvrx-sre demo --run-dir $(RUN_DIR)

check: setup ## the fast gates: lint, format, types, structure, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --explicit-package-bases tests/live
	@$(BIN)/python -m pytest tests/structure -q
	@$(BIN)/nvrx-sre generate --check

test: check ## the fast gates, then all tests but the slow ones
	@scripts/test-tools.sh
	@$(BIN)/python -m pytest -q -m "not slow" --ignore=tests/structure -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-slow: setup ## the slow tests: long runs of real processes
	@scripts/test-tools.sh
	@$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

live: setup ## faulted runs, a real Prometheus and Alertmanager, and who is told what
	@scripts/test-tools.sh
	@$(BIN)/python -m pytest -q tests/live $(PYTEST_ARGS)

soak: setup ## thousands of simulated jobs under random faults, and planted bugs that must be found
	@$(BIN)/nvrx-sre simulate --seeds $(SEEDS) --ranks 8
	@$(BIN)/nvrx-sre simulate --seeds $(SEEDS) --ranks 8 --hosts 4
	@$(BIN)/nvrx-sre simulate --seeds $$(($(SEEDS) / 20)) --ranks 64 --hosts 8
	@$(BIN)/python -m pytest -q tests/simulation $(PYTEST_ARGS)

chaos: setup ## every kind of fault in every phase on real processes, an hour: docs/reference/chaos.md
	@rm -rf runs/chaos
	@$(BIN)/python -m pytest -q -m chaos --chaos-results runs/chaos $(PYTEST_ARGS) || true
	@$(BIN)/python -m tests.chaos.render runs/chaos

test-rounds: setup ## all tests three times in different orders
	@scripts/test-tools.sh
	@for round in 1 2 3; do $(BIN)/python -m pytest -q $(PYTEST_ARGS); done

screenshots: setup ## docs/screenshots/ from live runs, in a headless Chromium, five minutes
	@scripts/test-tools.sh
	@scripts/browser.sh
	@$(BIN)/python scripts/screenshots.py

bench: setup ## recovery, checkpoint and telemetry benchmarks, rows in runs/bench-*.json
	@mkdir -p runs
	@$(BIN)/nvrx-sre bench recovery --json runs/bench-recovery.json
	@$(BIN)/nvrx-sre bench checkpoint --json runs/bench-checkpoint.json
	@$(BIN)/nvrx-sre bench telemetry --json runs/bench-telemetry.json

generate: setup ## dashboards/ and alerts/ from the catalog
	@$(BIN)/nvrx-sre generate

clean: ## remove what the targets made, .venv/ included; runs/ stays
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
