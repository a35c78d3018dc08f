# `make demo` and `make test` each stand alone on a fresh machine: what they need is set up once, in .venv.
# The stamps live inside .venv, so that removing it is enough to begin anew.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Nothing is compiled ahead: what is never imported, the most of it, need not be, and the rest is where it is first used.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# uv takes a third of pip's time, and is told where pip looks for wheels; where there is no uv, pip installs.
WHEELS_AT = $${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null)}
WANTED ?= --constraint constraints.txt
INSTALL = { $(PIP) --constraint constraints.txt uv && \
	UV_FIND_LINKS="$(WHEELS_AT)" $(BIN)/uv pip install --quiet --python $(BIN)/python $(WANTED) $(1); } || $(PIP) $(WANTED) $(1)
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

# Empty is off: where it is set, every process would compile anew what it imports of ours, and pytest each test.
export PYTHONDONTWRITEBYTECODE :=

ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test setup lint format type imports docs unit renew test-python
.PHONY: pictures test-lowest test-newest test-simulated-gpu test-browser chromium wheel bench gpu

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 15

demo: $(INSTALLED)  ## set up, then profile a small model on this machine (ARGS="--model.size=small")
	$(BIN)/python -m lm_profiler fit --config configs/demo.yaml $(ARGS)

# The browser's tests run beside the others: one of pytest's processes does them, and no core waits for a page meanwhile.
test: $(INSTALLED_DEV) chromium  ## set up, then every check that CI runs
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint type imports docs
	@$(MAKE) --no-print-directory unit PYTEST_ARGS="--override-ini=norecursedirs=.* $(PYTEST_ARGS)"

setup: $(INSTALLED_DEV)  ## create .venv and install the package and the tools into it

lint: $(INSTALLED_DEV)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED_DEV)  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a busy machine its workers may not start in time; then it ends with 2, not with 1 as for errors, and works alone.
type: $(INSTALLED_DEV)  ## mypy, strict
	$(BIN)/mypy --num-workers 2 || { [ $$? -eq 2 ] && $(BIN)/mypy; }

imports: $(INSTALLED_DEV)  ## import-linter: who may import whom
	$(BIN)/lint-imports

# Fresh each time (-E): an unchanged page would not repeat its warnings. -n: a name without a place is one, too.
docs: $(INSTALLED_DEV)  ## build the documentation into docs/_build, warnings as errors
	$(BIN)/python -m sphinx -q -W --keep-going -n -E -b html docs docs/_build

# Side by side, each process with a thread of its own: the tests mostly wait for processes that start.
unit: $(INSTALLED_DEV)  ## pytest; it builds and inspects the wheel as well (PYTEST_ARGS="-k phases")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# In one process, since tests share some of the files. Only the tests that store: others of the same files train.
STORED = assert_(refused_as_)?stored
STORING = /^(class|def) / {name = $$2; sub(/[(:].*/, "", name)} \
  /$(STORED)\(/ {print FILENAME (name ~ /^test_/ ? "::" name : "")}

renew: $(INSTALLED_DEV)  ## write the stored texts (tests/stored/texts) anew, and show what has changed
	RENEW=1 $(BIN)/python -m pytest -q $(PYTEST_ARGS) \
	  $$(awk '$(STORING)' $$(grep -rlE '$(STORED)' tests --include='test_*.py') | sort -u)

test-python:  ## pytest under another Python, in an environment of its own (PYTHON=python3.12)
	$(MAKE) unit VENV=.venv-$(notdir $(PYTHON))

# An old release may warn of what is newer than itself, so a warning is no error there.
test-lowest:  ## pytest with the lowest versions that pyproject.toml allows (PYTHON=python3.10)
	$(MAKE) unit VENV=.venv-lowest WANTED='--resolution lowest-direct' \
	  PYTEST_ARGS='-W default --disable-warnings $(PYTEST_ARGS)'

test-newest:  ## pytest with the newest versions that pyproject.toml allows
	$(MAKE) unit VENV=.venv-newest WANTED=

test-simulated-gpu:  ## the tests marked gpu on a simulated GPU (PYTHON=python3.12; torch with CUDA takes 6 GB)
	$(MAKE) setup VENV=.venv-simulated-gpu WANTED='torch==2.11.0 transformers nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.*'
	.venv-simulated-gpu/bin/python -m benchmarks.simulated_gpu .venv-simulated-gpu/bin/python -m pytest -m gpu $(PYTEST_ARGS)
	SIMULATED_GPU_COUNT=2 .venv-simulated-gpu/bin/python -m benchmarks.simulated_gpu .venv-simulated-gpu/bin/python -m pytest -m gpu tests/callbacks/test_nccl_ranks.py tests/rehearse/test_ranks.py

CHROMIUM = command -v chromium || command -v chromium-browser

chromium:
	@{ $(CHROMIUM); } >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && sudo= || sudo="sudo -n"; \
	  echo "installing Chromium"; $$sudo apt-get update -q && $$sudo apt-get install -y -q --no-install-recommends chromium; } || { \
	  echo "make test-browser needs Chromium: install your system's package, for Debian: apt-get install chromium" >&2; exit 1; }

test-browser: $(INSTALLED_DEV) chromium  ## the TensorBoard tab in a real Chromium (SCREENSHOTS=folder keeps pictures)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile tests/browser

pictures: $(INSTALLED_DEV) chromium  ## draw the pictures of the documentation anew, on an idle machine
	sh docs/draw_pictures.sh $(BIN) "$$($(CHROMIUM))"

wheel: $(INSTALLED_DEV)  ## inspect a wheel of this tree, then build it into dist/
	$(BIN)/python -m pytest tests/test_packaging.py
	rm -rf build dist  # setuptools would pack what an earlier build left behind
	$(BIN)/python -m build --wheel --no-isolation

bench: $(INSTALLED)  ## what the instruments cost, in microseconds a step
	$(BIN)/python -m benchmarks.overhead $(ARGS)

GPU_INSTALLED := $(if $(WHEELS),.venv-gpu/.installed,$(INSTALLED_DEV))

gpu: $(GPU_INSTALLED)  ## all that must be seen on a GPU, in 8 minutes (WHEELS=folder: no network; ARGS="--parts=1,2")
	$(dir $(GPU_INSTALLED))bin/python -m benchmarks.gpu $(ARGS)

.venv-gpu/.installed: pyproject.toml
	benchmarks/wheelhouse.sh install $(WHEELS) $(PYTHON)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "lm_profiler needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up $(VENV); this takes a minute or two"
	$(PYTHON) -m venv --clear $(VENV)

# An environment that uv made has no pip.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(call INSTALL,--editable .)
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(call INSTALL,--editable '.[dev]')
	@touch $@ $(INSTALLED)
