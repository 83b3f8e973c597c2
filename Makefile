# Everything a developer or CI does here. `make help` lists the targets.
# PYTHON names another Python 3.11; ARGS is passed on to the command of the target.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
BIN := .venv/bin
ARGS ?=
CHAT ?= What is the capital of Japan?
N ?= 20
S ?= 3600

.DEFAULT_GOAL := help
.PHONY: help setup setup-run up down test test-fast e2e chaos soak lint format type protos settings contracts drift check bench lock compose-test clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install everything, development tools included, into .venv (at once when current)
	@$(PYTHON) tools/setup.py --set dev

setup-run:
	@$(PYTHON) tools/setup.py --set cpu

up: setup-run ## Start a cluster on this machine, ask one question, stay (ARGS=--detach: return)
	@$(BIN)/forebay up --chat "$(CHAT)" $(ARGS)

down: ## Stop a detached cluster
	@$(BIN)/forebay down $(ARGS)

test: setup ## All tests, the end-to-end ones on the real engine included
	$(BIN)/python -m tools.run_tests $(ARGS)

test-fast: setup ## All tests but those on the real engine
	$(BIN)/python -m pytest -m "not engine" $(ARGS)

e2e: setup ## The end-to-end tests alone
	$(BIN)/python -m pytest tests/e2e $(ARGS)

chaos: setup ## The tests that kill, stop and cut processes, N times each (N=20)
	FOREBAY_CHAOS_REPEATS=$(N) $(BIN)/python -m pytest -m chaos $(ARGS)

soak: setup ## An hour of mixed load on the tiers, a third of it abandoned (S=3600)
	FOREBAY_SOAK_S=$(S) $(BIN)/python -m pytest tests/e2e/kvbm/test_soak.py -s $(ARGS)

lint: setup ## Formatting, lint rules, protobuf style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code
	tools/buf_breaking.sh

format: setup ## Bring Python and protobuf files into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	cd protos && ../$(BIN)/buf format --write

type: setup ## mypy --strict
	$(BIN)/mypy

contracts: setup ## Who may import whom
	$(BIN)/lint-imports

protos: setup ## Generate services/gen from protos/
	$(BIN)/python tools/gen_protos.py

settings: setup ## Write docs/SETTINGS.md from the settings classes
	$(BIN)/python -m tools.gen_settings

drift: setup ## Are generated code and generated docs what their sources give?
	$(BIN)/python tools/gen_protos.py --check
	$(BIN)/python -m tools.gen_settings --check

check: lint type contracts drift ## All static checks

bench: setup ## What gateway, router, kvbm and transfers cost and save: ratios with their goals
	$(BIN)/python -m benchmarks.gateway $(ARGS)
	$(BIN)/python -m benchmarks.router $(ARGS)
	$(BIN)/python -m benchmarks.kvbm $(ARGS)
	$(BIN)/python -m benchmarks.transfer $(ARGS)

lock: setup ## Compile requirements/lock-*.txt anew (ARGS=--upgrade: newest versions)
	$(BIN)/python -m tools.lock $(ARGS)

compose-test: ## Build the images, run compose.yaml for real, kill a worker, tear down (needs root)
	tools/compose_test.sh

clean: ## Remove .venv and what tools left behind
	rm -rf .venv .forebay build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
