# Each target sets .venv up first; a second time that only looks. PYTHON=... names an interpreter, DATA=... the folder of data sets.
DATA ?= ../shared/data
BENCH ?= *
WORKERS ?= 3
export DATA PYTHON

# `python -m`, not the scripts beside it: their first line cannot hold a path with spaces
PY := .venv/bin/python

.PHONY: help demo test test-faults lint bench
.NOTPARALLEL:

help:
	@echo 'make demo         train a model on real data, climb a short ladder with it, write both as a page'
	@echo 'make test         the tests (TESTS=... to choose, DATA=... for the data sets, WORKERS=3 at a time)'
	@echo 'make lint         style and types'
	@echo 'make test-faults  the large fault counts and the long runs'
	@echo 'make bench        every benchmark, or BENCH=name for one'

# one thread: a small model is fastest so, and a busy machine slows many threads far more than one
demo:
	@.ci/setup demo
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m surefoot demo

test:
	@.ci/setup dev
	@$(PY) -m compileall -q surefoot tests benchmarks # what tests start begins half a second sooner, where Python writes no bytecode itself
	@git status >/dev/null 2>&1 || true # writes the index of a fresh clone anew; until then each run of a test that asks git reads every file
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist loadfile $(TESTS)

test-faults:
	@.ci/setup dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "faults or slow" $(TESTS)

lint:
	@.ci/setup dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench:
	@.ci/setup bench
	@set -e; for script in benchmarks/$(BENCH)/run.py; do \
	  [ -f "$$script" ] || { echo "there is no $$script" >&2; exit 2; }; \
	  echo "== $$script"; OMP_NUM_THREADS=1 PYTHONPATH=. $(PY) "$$script"; \
	done
