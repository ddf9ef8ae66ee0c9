# `make demo` and `make test` do all their own set-up: git, make and python3.11 with venv are enough.
PYTHON ?= python3.11
# For instance PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu": a torch without
# CUDA is a tenth of the download.
PIP_FLAGS ?=
# A file's tests stay in one process, with the fixtures that they share; the longest files come first.
SPREAD ?= -n 2 --dist loadfile --no-loadscope-reorder --benchmark-disable
PYTEST_FLAGS ?= $(SPREAD) -m "not nightly" $(RECORDED)
# RECORD=file.json: outcomes and durations of the tests.
RECORD ?=
RECORDED = $(if $(RECORD),--record=$(RECORD))
BIN := .venv/bin
STAMP := .venv/.stamp

# Without compiled files, every process that a test starts compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs wheel wheel-test test static lint type imports pytest nightly nightly-today coverage bench venv clean

demo: venv
	$(BIN)/bigbrain-fx demo --force

# The pages of docs/ as a site in docs/_build; a warning (a broken link, say) is an error.
docs: venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[docs]"
	$(BIN)/sphinx-build -E -W --keep-going -n -q -b html docs docs/_build

# The wheel, built without a network into dist/; then installed where no checkout is, and tried:
# init, split, verify and run in an empty folder.
wheel: venv
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --no-index -w dist .

wheel-test: wheel
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:xdist tests/promise/test_wheel.py

# make test ROOM=schedule: the tests of one room, wherever it stands under tests/.
ROOM ?=
FOLDER = $(shell find tests -type d -name '$(ROOM)' -not -path '*/golden/*' -not -path '*/third_party/*')

ifeq ($(ROOM),)
# The static checks run beside the tests; what they print comes after the tests' own output.
test: venv
	@report=$$(mktemp); trap 'rm -f "$$report"' EXIT; \
	nice -n 5 $(MAKE) --no-print-directory --keep-going static >"$$report" 2>&1 & static=$$!; \
	code=0; $(MAKE) --no-print-directory pytest || code=$$?; \
	wait $$static || { echo "static checks failed:"; cat "$$report"; code=1; }; \
	exit $$code
else
test: venv
	@test -n "$(FOLDER)" || { echo "no room '$(ROOM)' in tests/; there are:" \
	    $$(find tests -name 'test_*.py' -printf '%h\n' | sort -u | xargs -n 1 basename); exit 2; }
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_FLAGS) $(FOLDER)
endif

static: lint type imports

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: venv
	$(BIN)/mypy

imports: venv
	$(BIN)/lint-imports --no-logo

# One thread per process: two test processes share two cores, and bitwise tests fix the count.
# Compiled first: where PYTHONDONTWRITEBYTECODE is set, each of a thousand processes would do it.
pytest: venv
	$(BIN)/python -m compileall -q bigbrain_fx estimators partitioners tools
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PYTEST_FLAGS)

# All tests, with all their models, places, seeds and examples: hours. make nightly SLICE=3/8 runs
# one of eight parts of about equal time.
SLICE ?=
nightly: venv
	OMP_NUM_THREADS=1 $(BIN)/pytest $(SPREAD) --hypothesis-profile=nightly \
	    $(if $(SLICE),--slice=$(SLICE)) $(RECORDED)

# Today's part of them, for at most 20 minutes; what fails runs again, alone.
nightly-today: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.nightly

# Every form of training code against a plain loop, into docs/reference/coverage.md (half an hour); then every
# model of the zoo, in two splits with two planners each, as real processes: about an hour.
coverage: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.conformance forms --write docs/reference/coverage.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.conformance coverage

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
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache demo-out dist
