# Everything runs in .venv, which holds the locked dependencies; the targets make it first if need be.
#
#   make serve ARGS="--port 9000"    the server, on the packaged model and the demo documents; ARGS adds flags
#   make check                       most of the suite in four minutes, for the inner loop: what is not marked slow;
#                                    it ends with the tests that should be, if any
#   make test                        the suite of every change, in two processes: ten minutes on two cores once its
#                                    programs are compiled;
#                                    LANES="kernels train" adds the slow tests of these rooms, as .ci/run does for
#                                    those that a change touches (ALL_LANES below)
#   make test-long                   all lanes; randomised runs, kills and kernel matrices
#   make test-gpu-compile            the GPU kernels compiled to sm_90 and simulated; needs Python 3.12, skips without;
#                                    MARK="compile and long" for the long runs of it
#   make docs                        the documentation site, into build/site; warnings are errors
#   make lint, make format           ruff and mypy
#   make lock                        solve requirements.lock and docs/requirements.lock from pyproject.toml; pins that
#                                    still fit are kept
#
# PYTHON=… names the interpreter that .venv is made from; remove .venv to change it.

PYTHON ?= python3.11 python3.12 python3
# Exits 0 in a Python that can make virtual environments, of a version that the lock is tested on.
FITS := import ensurepip, sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})
BASE = $(or $(shell for p in $(PYTHON); do "$$p" -c '$(FITS)' 2>/dev/null && echo "$$p" && break; done), \
	$(error None of these is a Python 3.11 or 3.12 that has the venv module: $(PYTHON). \
	Install one (Debian: python3.11 and python3.11-venv) or name one: make setup PYTHON=…))

READY := .venv/.ready
RUN := .venv/bin/python -m
PIP := -m pip --disable-pip-version-check install --quiet

# The kernels' second environment: Python 3.12 brings the JAX of GPU images, and Triton with its assembler.
COMPILE := .venv-compile
MARK ?= compile and not long
COMPILE_READY := $(COMPILE)/.ready
PYTHON312 := $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python; do \
	"$$p" -c 'import ensurepip' 2>/dev/null && echo "$$p" && break; done)

# What builds the documentation; nothing of ragjax is imported, its docstrings are read.
DOCS := .venv-docs
DOCS_READY := $(DOCS)/.ready

# Client packages as they are, apart from what the server needs.
CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.ready
CLIENT_PACKAGES := anthropic==2.14.0 openai==3.57.0 openai-agents==0.24.0 'pydantic-ai-slim[openai]==2.68.0'

.PHONY: setup serve check test test-long test-gpu-compile docs lint format lock
.DELETE_ON_ERROR:

setup: $(READY)

# Wheels only: to build a source distribution pip would fetch tools that no lock pins.
$(READY): requirements.lock pyproject.toml
	@.venv/bin/python -c 'import pip' 2>/dev/null || $(BASE) -m venv --clear .venv
	@echo "installing the locked dependencies into .venv (a minute or two, mostly download)"
	@.venv/bin/python $(PIP) --only-binary :all: --require-hashes --requirement requirements.lock
	@.venv/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

serve: setup
	@$(RUN) ragjax.serve $(ARGS)

# Files go to the processes in the order of tests/conftest.py: slow ones first.
SUITE := pytest -n 2 --dist loadfile --no-loadscope-reorder

ALL_LANES := engine kernels models quality retrieval reuse runner store train benchmarks
OTHER_LANES = $(patsubst %,or %_lane,$(filter-out $(LANES),$(ALL_LANES)))

check: setup
	$(RUN) $(SUITE) -q -m "not (slow or long or gpu or compile)" --durations 10 --durations-min 3

test: setup
	$(RUN) $(SUITE) -m "not (long or gpu or compile $(OTHER_LANES))"

test-long: setup $(CLIENTS_READY)
	RAGJAX_CLIENTS_PYTHON=$${RAGJAX_CLIENTS_PYTHON:-$(CURDIR)/$(CLIENTS)/bin/python} $(RUN) pytest -m "(long$(foreach l,$(ALL_LANES), or $(l)_lane)) and not gpu and not compile" \
		--timeout 3600 --durations 10

$(CLIENTS_READY): Makefile
	@$(BASE) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python $(PIP) --only-binary :all: $(CLIENT_PACKAGES)
	@touch $@

ifdef PYTHON312
test-gpu-compile: $(COMPILE_READY)
	$(COMPILE)/bin/python -m pytest -m "$(MARK)" --timeout 1200
else
test-gpu-compile:
	@echo "skipped: the kernels are compiled to sm_90 with Python 3.12, and there is none here (python3.12, pyenv)"
endif

$(COMPILE_READY): requirements.lock requirements-compile.lock pyproject.toml
	@$(COMPILE)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON312) -m venv --clear $(COMPILE)
	@echo "installing the locked dependencies and Triton into $(COMPILE) (some minutes, mostly download)"
	@$(COMPILE)/bin/python $(PIP) --only-binary :all: --require-hashes --requirement requirements.lock
	@$(COMPILE)/bin/python $(PIP) --only-binary :all: --no-deps --require-hashes --requirement requirements-compile.lock
	@$(COMPILE)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# Not --quiet: with it mkdocs counts no warnings, and --strict lets them pass.
docs: $(DOCS_READY)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "build/site/index.html"

$(DOCS_READY): docs/requirements.lock
	@$(DOCS)/bin/python -c 'import pip' 2>/dev/null || $(BASE) -m venv --clear $(DOCS)
	@echo "installing what builds the documentation into $(DOCS)"
	@$(DOCS)/bin/python $(PIP) --only-binary :all: --require-hashes --requirement docs/requirements.lock
	@touch $@

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: setup
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

lock:
	@set -e; home=$$(mktemp -d); trap 'rm -rf "$$home"' EXIT; \
	$(BASE) -m venv "$$home"; \
	"$$home/bin/python" $(PIP) uv==0.13.9; \
	"$$home/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-header --extra serve --extra train --extra bench --extra dev pyproject.toml --output-file requirements.lock; \
	"$$home/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-header --group docs --output-file docs/requirements.lock
