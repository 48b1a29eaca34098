SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
# The set-up environment if there is one, else the Python at hand (a GPU machine that has torch and the build tools).
PY := $(if $(wildcard $(VENV)/bin/python),$(abspath $(VENV))/bin/python,$(PYTHON))
CUDA ?= AUTO
JOBS ?= $(shell nproc)
BUILD := build/$(shell $(PY) -c 'import sys; print(sys.implementation.cache_tag)')

.PHONY: build
build: ## Build the extension in place (engine/_runtime.*.so)
	@$(PY) cuda/build.py --build $(BUILD) --cuda $(CUDA) --jobs $(JOBS)
