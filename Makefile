# Two entry points for a fresh machine: `make demo` and `make test`. Each makes the environment it needs.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

OLDEST := .venv-oldest
DEMO := demo_checkpoint

.PHONY: demo test test-oldest lint clean

$(BIN)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "dsa_jax needs Python 3.12 or newer; set PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

$(OLDEST)/bin/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "dsa_jax needs Python 3.12 or newer; set PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q --upgrade pip
	$(OLDEST)/bin/python -m pip install -q -e '.[test]' 'jax==0.11.2' 'jaxlib==0.11.2'
	touch $@

# A tiny random GLM checkpoint, prefilled and decoded on 8 virtual CPU devices.
demo: $(BIN)/.installed
	rm -rf $(DEMO)
	$(BIN)/dsa-jax tiny $(DEMO) --family glm52
	JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 $(BIN)/dsa-jax generate $(DEMO) --tp 8 \
		--prompt-ids '[[11, 42, 7, 99, 3, 150, 23, 8], [5, 6, 7]]' --max-new-tokens 32 --ignore-eos

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not aot"

test-oldest: $(OLDEST)/bin/.installed
	$(OLDEST)/bin/python -m pytest -m quick

clean:
	rm -rf $(VENV) .venv-* build *.egg-info demo_checkpoint
