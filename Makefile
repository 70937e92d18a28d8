# `make demo` and `make test` need nothing but Python 3.11 to 3.13, git and make: the first rules set up the rest.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PROTOS := $(wildcard proto/*.proto)
# Tests wait for a third of their time and more: four workers keep two cores busy.
WORKERS ?= 4
SLOW_WORKERS ?= 2
# A file's tests stay together, and files come as tests/conftest.py orders them: the long ones first.
FAST = -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
EXTRAS := examples,incremental,metrics,safetensors,tls,web

# The newest supported Python that runs, unless PYTHON= names one. To be on PATH is not enough: pyenv's shims of inactive versions only fail.
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
NEWEST = $(shell for name in python3.13 python3.12 python3.11 python3; do $$name -c '$(SUPPORTED)' 2>/dev/null && echo $$name && break; done)
CHOSEN = $(or $(PYTHON),$(NEWEST))
VERSION := import sys; print("%d.%d" % sys.version_info[:2])
define NONE
no Python 3.11 to 3.13 that runs with its modules venv and ensurepip.
Looked on PATH for python3.13, python3.12, python3.11 and python3.
Install one (on Debian with python3-venv), activate one (pyenv shell 3.13), or name one: make PYTHON=/path/to/python3.13
endef

# Where it is set, each of the suite's thousands of processes compiles the product anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check programs downstream slow slow-libraries coverage figures release accelerator lint types proto docs clean setup same-python

setup: $(STAMP)

$(BIN)/python:
	$(if $(CHOSEN),,$(error $(NONE)))
	@$(CHOSEN) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || { \
		echo "PYTHON=$(CHOSEN): expected Python 3.11 or newer that runs with its modules venv and ensurepip" >&2; exit 1; }
	$(CHOSEN) -m venv --clear $(VENV)

# A .venv that is there is used, but not in place of another Python that was asked for.
same-python: $(BIN)/python
	@test -z "$(PYTHON)" || test "$$($(PYTHON) -c '$(VERSION)')" = "$$($(BIN)/python -c '$(VERSION)')" || { \
		echo "$(VENV) is not of PYTHON=$(PYTHON), but of Python $$($(BIN)/python -c '$(VERSION)'): leave out PYTHON, or remove $(VENV)" >&2; exit 1; }

$(STAMP): pyproject.toml $(BIN)/python | same-python
	@# Older pips know no dependency groups.
	$(PIP) --upgrade 'pip>=25.1'
	$(PIP) -e '.[$(EXTRAS)]' --group dev --group test --group libraries
	@# Old on purpose: code from this protoc works with protobuf 5, 6 and 7. Its own pin of protobuf is for its Python API, unused here.
	$(PIP) --no-deps grpcio-tools==1.66.2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(FAST)

# One room or wing and its tests: make check ROOM=checkpoint/format
check: $(STAMP)
	@test -n "$(ROOM)" && test -d "src/holdfast/$(ROOM)" || { \
		echo "expected ROOM= a room or a wing (make check ROOM=checkpoint/format), found '$(ROOM)'" >&2; exit 2; }
	$(BIN)/ruff check --quiet $(ROOM) tests/$(ROOM)
	$(BIN)/ruff format --check --quiet $(ROOM) tests/$(ROOM)
	$(BIN)/mypy -p holdfast.$(subst /,.,$(ROOM))
	$(BIN)/python -m pytest -q $(FAST) tests/$(ROOM)

# Whole programs, in every ending and under every Python: make programs NAME=plain_jax. tests/programs/README.md says more.
programs: $(STAMP)
	$(BIN)/python -m tests.programs $(if $(NAME),--name $(NAME)) $(if $(ENDING),--ending $(ENDING))

# Programs of the shape of those downstream: flax, Keras, Brax, grain, MaxText, Tunix; on Orbax too, where they import it.
downstream: $(STAMP) slow-libraries
	$(BIN)/python -m pytest -m "slow or not slow" -n $(SLOW_WORKERS) tests/system/test_clients.py tests/compat/orbax/test_programs.py

slow: $(STAMP) slow-libraries
	$(BIN)/python -m pytest -m slow -n $(SLOW_WORKERS) --maxschedchunk 1

slow-libraries: $(STAMP)
	$(PIP) -e '.[$(EXTRAS),ray]' --group slow

# Which lines the fast tests reach, those of the processes that they start too.
coverage: $(STAMP)
	$(PIP) --group coverage
	rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest $(FAST)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# The table of README, and the page of results behind it. Half an hour on two cores, which do nothing else.
figures: $(STAMP)
	$(BIN)/python benchmarks/versus_orbax.py --write

# What is uploaded, checked as its users get it. CONTRIBUTING.md says what comes before and after.
release: $(STAMP)
	$(PIP) --group release
	$(BIN)/python scripts/build_release.py dist

# What can be checked on one GPU or TPU: skips where there is none. The jax of .venv has to be one that finds it (jax[cuda12], jax[tpu]).
accelerator: $(STAMP)
	$(BIN)/python -m pytest tests/system/test_accelerator.py -s -rs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports --no-logo --no-cache

types: $(STAMP)
	$(BIN)/mypy -p holdfast.coordination -p holdfast.multihost -p holdfast.checkpoint -p holdfast.launch -p holdfast.compat -p holdfast.web -p holdfast.testing -p holdfast.cli

docs: $(STAMP)
	$(PIP) --group docs
	$(BIN)/zensical build --clean --strict
	$(BIN)/python scripts/write_redirects.py site

proto: $(STAMP)
	$(BIN)/python scripts/generate_proto.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
