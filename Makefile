# make demo    the quickstart on a real model
# make test    the whole CPU suite
# make smoke   a few minutes of it, for another TORCH; test/smoke.txt lists the tests
# make lint    formatting, lint and types
# make docs    the documentation site, in build/site
#
# Each makes .venv first if it has to. Variables: PYTHON, VENV, TORCH, DEMO_ARGS, TEST_ARGS.

SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test smoke lint docs docs-serve format build clean

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell cat requirements/torch.txt)
TEST_ARGS ?= -n 2 --dist loadgroup --no-loadscope-reorder

# Packages are installed without bytecode. Each of the several hundred processes of the tests would
# compile the modules of torch that it imports, more than 10 s of work on a slow machine.
unexport PYTHONDONTWRITEBYTECODE

# The stamp is written last and carries the torch in its name, so that another TORCH is noticed.
READY := $(VENV)/.ready-$(subst /,_,$(TORCH))
BIN := $(VENV)/bin

help:
	@sed -n 's/^# \?//;/^make/p;/^Each/p' Makefile

venv: $(READY)

$(READY): pyproject.toml setup.py scripts/make_venv.sh $(wildcard requirements/*.txt)
	rm -f $(VENV)/.ready-*
	scripts/make_venv.sh $(VENV) $(PYTHON) '$(TORCH)'
	touch '$@'

demo: $(READY)
	$(BIN)/python examples/quickstart.py $(DEMO_ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(TEST_ARGS)

# The files are named for pytest to import no others.
smoke: $(READY)
	$(BIN)/python -m pytest -m smoke $(TEST_ARGS) $(shell sed -n 's/^\(test[^:[:space:]]*\.py\).*/\1/p' test/smoke.txt | sort -u)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/check_wording.py

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

docs-serve: $(READY)
	$(BIN)/python -m mkdocs serve

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(READY)
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
