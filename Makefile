# `make demo` and `make test` do all their own set-up: git, make and python3.11 with venv are enough.
PYTHON ?= python3.11
# For instance PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu": a torch without
# CUDA is a tenth of the download.
PIP_FLAGS ?=
PYTEST_FLAGS ?= -n 2 --benchmark-disable -m "not promise"
BIN := .venv/bin
STAMP := .venv/.stamp

.PHONY: demo test lint type imports pytest promise coverage bench venv clean

demo: venv
	$(BIN)/python -m tools.demo

# make test ROOM=schedule: the tests of one room, wherever it stands under tests/.
ROOM ?=
FOLDER = $(shell find tests -type d -name '$(ROOM)' -not -path '*/golden/*' -not -path '*/third_party/*')

ifeq ($(ROOM),)
test: lint type imports pytest
else
test: venv
	@test -n "$(FOLDER)" || { echo "no room '$(ROOM)' in tests/; there are:" \
	    $$(find tests -name 'test_*.py' -printf '%h\n' | sort -u | xargs -n 1 basename); exit 2; }
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_FLAGS) $(FOLDER)
endif

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: venv
	$(BIN)/mypy

imports: venv
	$(BIN)/lint-imports --no-logo

# One thread per process: two test processes share two cores, and bitwise tests fix the count.
pytest: venv
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_FLAGS)

# Promises that take too long for every change: more seeds, more places of the same kinds of tests.
promise: venv
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --benchmark-disable -m promise

# Every form of training code against a plain loop, into docs/coverage.md (half an hour); then every
# model of the zoo, in two splits with two planners each, as real processes: about an hour.
coverage: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.forms --write docs/coverage.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.coverage

# Naive and analytical splits, planners, compile time, measured: some minutes. To keep the figures
# of today and compare with them tomorrow (they stay in .benchmarks/ on this machine):
#   make bench BENCH_FLAGS=--benchmark-save=before
#   make bench BENCH_FLAGS="--benchmark-compare=*_before --benchmark-compare-fail=median:20%"
BENCH_FLAGS ?=
bench: venv
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/benchmarks --benchmark-only $(BENCH_FLAGS)

venv: $(STAMP)

# The stamp is written last: an install that was interrupted is done again.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache demo-out
