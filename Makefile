# `make demo` and `make test` do all the set-up on a machine that has only Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What is installed, and what builds it, has the versions of this file; empty: the newest.
PINNED ?= constraints.txt

# Rounding differs from CPU to CPU. `make test CPU=avx2` and `CPU=sse41` compute as older ones do.
CPU ?= this
SETTINGS_this :=
SETTINGS_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
SETTINGS_sse41 := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Nehalem
ifeq ($(origin SETTINGS_$(CPU)),undefined)
  $(error CPU is $(CPU); use this, avx2 or sse41)
endif

.PHONY: demo test lint lock newest tables docs pictures bench rounding bench-gpu memory-gpu growth growth-gpu clean

demo: $(VENV)/.installed
	$(BIN)/fedprism demo

# PYTEST has further options, such as PYTEST="-m quality" or PYTEST="tests/solvers --shift-seeds 1000".
# Each core has a test process of its own, so each of these has one thread.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(SETTINGS_$(CPU)) $(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Renews constraints.txt: the newest versions that pyproject.toml allows, for every Python and system that it supports.
lock: $(VENV)/.installed
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev --no-annotate \
	  --custom-compile-command "make lock" --output-file constraints.txt pyproject.toml

# Linters and tests with the newest versions of everything, in an environment of their own.
newest:
	rm -rf .venv-newest
	$(MAKE) lint test VENV=.venv-newest PINNED=

# The tables of the documentation, which are made from the code and from stored results.
tables: $(VENV)/.installed
	$(BIN)/python docs/tables.py

# The pictures and figures of README, from runs: a minute or two, and Chromium for the report.
pictures: $(VENV)/.installed
	$(BIN)/python docs/pictures.py

# The documentation as a site, build/docs/index.html; a warning is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees/research -c docs -D root_doc=README research build/docs/research

# One table of every headline workload beside what one would run instead. FEDPRISM_DATA names the folder with real data,
# PEER a folder with the peer `breaching` and what it needs.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bench.py --device cpu $(if $(PEER),--peer-path $(PEER))

# What runs on the CPU there is small: more threads would wait for each other.
bench-gpu: export OMP_NUM_THREADS = 4
bench-gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/bench.py --device cuda $(if $(PEER),--peer-path $(PEER))

# How far rounding moves what attacks reach: the table of research/results.md.
rounding: $(VENV)/.installed
	$(BIN)/python benchmarks/rounding.py this
	$(SETTINGS_avx2) $(BIN)/python benchmarks/rounding.py avx2
	$(SETTINGS_sse41) $(BIN)/python benchmarks/rounding.py sse41

# How much memory a large batch of photographs takes, whole and in parts.
memory-gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/matching_memory.py --device cuda --tf32

# How the cost of each solver grows with its size, as slopes of log against log.
growth: $(VENV)/.installed
	$(BIN)/python benchmarks/growth.py --device cpu --chart research/growth.svg

growth-gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/growth.py --device cuda

# pip before 25.3 builds by PIP_CONSTRAINT, later ones by PIP_BUILD_CONSTRAINT. Compiling is left to the first import.
$(VENV)/.installed: pyproject.toml papers/pyproject.toml $(PINNED)
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(PINNED) PIP_BUILD_CONSTRAINT=$(PINNED) \
	  $(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]" --editable ./papers
	touch $@

clean:
	rm -rf $(VENV) .venv-newest build dist
