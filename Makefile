# `make demo` replays a recorded exploration and then explores a small model on this machine; `make test` runs every
# check. Both set up .venv first.
# Another interpreter: make PYTHON=python3.12 (after `make clean`, if .venv exists already).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
# Python caches what it compiles, even where the environment forbids it: tests start hundreds of processes.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/pytest
RECORDED := benchmarks/tables/olmoe-zipf
RECORDING := benchmarks/results/tables/olmoe-zipf.jsonl

# Threads that spin at a barrier while another program has the core make small kernels tens of times slower.
export OMP_WAIT_POLICY ?= PASSIVE

# Some tests wait for processes that they start: four at a time keep two cores busy. Each further one would collect all
# tests again, which takes fourteen seconds of a core.
TEST_PROCESSES ?= 4

.PHONY: demo test style types tests test-gpu test-frameworks setup clean

demo: $(STAMP)
	@echo "1 of 2: a recording. OLMoE-1B-7B was measured on one H200."
	@echo "This replays those measurements, without a GPU."
	@$(BIN)/bexp explore $(RECORDED).yaml --device replay:$(RECORDING)
	@echo
	@echo "2 of 2: this machine. A small mixture-of-experts model is measured on its CPU."
	@echo "This takes about a minute."
	@$(BIN)/bexp explore examples/tiny-moe.yaml
	@echo
	@echo "Trust each answer as far as its confidence goes. Below the confidence that was asked for,"
	@echo "it is called provisional. On a CPU that is busy with other programs it may be below."

# The style and type checks run beside the tests; each is told whether or not another fails.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=3 --keep-going style types tests

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

tests: $(COMPILED)
	$(PYTEST) --numprocesses=$(TEST_PROCESSES) --dist=worksteal

# One process compiles what all of them import, after a set-up; several at a time would each do all of it.
$(COMPILED): $(STAMP)
	@$(PYTEST) --collect-only --quiet --quiet >/dev/null || true
	@touch $(COMPILED)

# The tests that need a GPU, side by side over the GPUs there are. They print each failure when it happens, and go on
# where a run was cut off: make test-gpu GPU_TESTS="--minutes 10".
test-gpu: $(STAMP)
	$(BIN)/python -m tests.gpu $(GPU_TESTS)

# Exports, read by the parsers of the frameworks that they are for. This downloads those frameworks, about 1.5 GB.
test-frameworks: $(STAMP)
	$(BIN)/python -m tests.frameworks.run

setup: $(STAMP)

# An interrupted set-up leaves a .venv whose pip does not run. It is built again. The pip that comes with Python 3.11 is
# slower to choose among versions than the newest.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null || \
	  { echo "bexp needs Python 3.11 or 3.12, but $(PYTHON) is: $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "python3-venv is missing. On Debian or Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV); the first time, this downloads PyTorch and takes minutes."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear --upgrade-deps $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-compile \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .frameworks .hypothesis .import_linter_cache
