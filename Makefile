# Two entry points for a fresh machine: `make demo` and `make test`. Each makes the environment it needs.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

$(BIN)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "dsa_jax needs Python 3.12 or newer; set PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not aot"

clean:
	rm -rf $(VENV) .venv-* build *.egg-info demo_checkpoint
