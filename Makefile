# `make demo` and `make test` need nothing but Python 3.11+, git and make: the first rule sets up the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PROTOS := $(wildcard proto/*.proto)
WORKERS ?= 2

.PHONY: demo test slow lint types proto docs clean setup

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "holdfast needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	@# Old on purpose: code from this protoc works with protobuf 5, 6 and 7. Its own pin of protobuf is for its Python API, unused here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps grpcio-tools==1.66.2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

slow: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[slow]'
	$(BIN)/python -m pytest -m slow -n $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers cannot follow an editable install's import hook: they get a tree of links instead.
types: $(STAMP)
	$(BIN)/python scripts/link_types.py
	$(BIN)/mypy -p holdfast.coordination -p holdfast.multihost -p holdfast.checkpoint -p holdfast.launch -p holdfast.cli

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python scripts/link_types.py
	$(BIN)/mkdocs build --strict

proto: $(STAMP)
	$(BIN)/python scripts/generate_proto.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
