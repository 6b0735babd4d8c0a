# Two entry points for a fresh machine: `make demo` and `make test`. Each makes the environment it needs.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

OLDEST := .venv-oldest
NEWEST_AOT := .venv-newest-aot
DEMO := demo_checkpoint

.PHONY: demo test test-oldest test-aot lint clean

define make_venv
	@test -n "$(PYTHON)" || { echo "dsa_jax needs Python 3.12 or newer; set PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -q --upgrade pip
endef

# jax with its CUDA plugin, to compile for GPUs that are not there: no driver, no CUDA libraries, only the assembler.
define make_aot_venv
	$(call make_venv,$(1))
	$(1)/bin/python -m pip install -q -e '.[test,triton]' $(2)
	version=$$($(1)/bin/python -c 'import importlib.metadata as m; print(m.version("jaxlib"))') && \
		$(1)/bin/python -m pip install -q --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	command -v ptxas >/dev/null || $(1)/bin/python -m pip install -q --no-deps 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*'
	touch $(1)/.installed
endef

$(BIN)/.installed: pyproject.toml
	$(call make_venv,$(VENV))
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

# A tiny random GLM checkpoint, prefilled and decoded on 8 virtual CPU devices.
demo: $(BIN)/.installed
	rm -rf $(DEMO)
	$(BIN)/dsa-jax tiny $(DEMO) --family glm52
	JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 $(BIN)/dsa-jax generate $(DEMO) --tp 8 --dcp 2 --dtype float32 \
		--prompt-ids '[[11, 42, 7, 99, 3, 150, 23, 8], [5, 6, 7]]' --max-new-tokens 32 --ignore-eos

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not gpu and not aot"

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m quick

$(NEWEST_AOT)/.installed: pyproject.toml
	$(call make_aot_venv,$(NEWEST_AOT),)

$(OLDEST)/.installed: pyproject.toml
	$(call make_aot_venv,$(OLDEST),'jax==0.11.2' 'jaxlib==0.11.2')

# Compiles the kernels for GPUs that are not there on the oldest and the newest jax, whole steps for 8 x H200 on the oldest,
# which GPU machines have. Without jax's check of CUDA's libraries: compiling needs none.
AOT := JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1
AOT_ARGS := -m pytest -n 2 --dist loadfile --max-worker-restart 0 -m aot tests/lowering
STEPS := full_size prefetch step_memory

test-aot: $(NEWEST_AOT)/.installed $(OLDEST)/.installed
	$(AOT) $(NEWEST_AOT)/bin/python $(AOT_ARGS) $(STEPS:%=--ignore tests/lowering/test_%.py)
	$(AOT) $(OLDEST)/bin/python $(AOT_ARGS)

clean:
	rm -rf $(VENV) .venv-* build *.egg-info demo_checkpoint
