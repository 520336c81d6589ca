# `make demo` and `make test` do all the set-up on a machine that has only Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs bench bench-gpu memory-gpu growth growth-gpu clean

demo: $(VENV)/.installed
	$(BIN)/fedprism demo

test: $(VENV)/.installed lint
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, build/docs/index.html; a warning is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/docs

# One table of every headline workload beside what one would run instead. FEDPRISM_DATA names the folder with real data,
# PEER a folder with the peer `breaching` and what it needs.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bench.py --device cpu $(if $(PEER),--peer-path $(PEER))

# What runs on the CPU there is small: more threads would wait for each other.
bench-gpu: export OMP_NUM_THREADS = 4
bench-gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/bench.py --device cuda $(if $(PEER),--peer-path $(PEER))

# How much memory a large batch of photographs takes, whole and in parts.
memory-gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/matching_memory.py --device cuda --tf32

# How the cost of each solver grows with its size, as slopes of log against log.
growth: $(VENV)/.installed
	$(BIN)/python benchmarks/growth.py --device cpu --chart docs/growth.svg

growth-gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/growth.py --device cuda

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist
