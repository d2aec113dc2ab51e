# Everything a person or CI runs.  The targets make what they need: environments in .venv and .venv-light, servers in .tools.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Set TORCH_INDEX to PyTorch's CPU wheel index where pip would otherwise fetch a CUDA build of torch.
TORCH_INDEX ?=
PIP_EXTRA := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

export PYTHONSAFEPATH := 1
export OMP_NUM_THREADS := 1
# where records lie that this machine makes of itself, on a build that the shipped ones are not of
export ISOEXEC_EVIDENCE ?= $(CURDIR)/.cache/evidence
export PATH := $(CURDIR)/.tools/usr/bin:$(CURDIR)/.tools/usr/sbin:$(PATH)

LIGHT_ROOMS := tests/contracts tests/daemon tests/dashboards
# two processes, each with whole files: engines and gates compute on one thread
PYTEST := -m pytest -q -n 2 --dist loadfile
ENGINE_ROOMS := tests/kernels tests/probes tests/adapters tests/examples

.PHONY: demo test test-light test-engines lint format generate pin proven prometheus tools clean
.DEFAULT_GOAL := test

demo: .venv/.ready proven
	-@.ci/tools prometheus
	.venv/bin/isoexec demo $(DEMO_ARGS)

# one after the other, also under -j: each keeps both of its processes busy
test: test-light
	@$(MAKE) --no-print-directory test-engines

# contracts, daemon and dashboards, where torch, vLLM and Megatron are not installed
test-light: .venv-light/.ready tools
	.venv-light/bin/python $(PYTEST) $(LIGHT_ROOMS) tests/test_packaging.py tests/test_house.py

# kernels, probes and adapters, on the real engines
test-engines: .venv/.ready tools proven
	.venv/bin/python $(PYTEST) $(ENGINE_ROOMS)

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: .venv/.ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# Proves the CPU kernels as they are and writes their sources and evidence into the contracts: a new kernel is a new numerical
# policy. Only gates without a record of today's source, gate and environment are run. Five years: a fixed source on a fixed torch
# ages slowly, and another torch is another environment anyway.
pin: .venv/.ready
	.venv/bin/isoexec gate run --missing --valid-days 1825 --store contracts/evidence --pin $(wildcard contracts/library/*-cpu.yaml)

# Writes anew every file that is made of code: schemas, specification tables, the page of lint rules, shipped contracts (their
# digests are kept), golden vectors, dashboards. Tests compare them.
generate: .venv/.ready
	@mkdir -p .cache
	.venv/bin/isoexec contract schema --of contract > .cache/schema.json && mv .cache/schema.json contracts/spec/contract-v1.schema.json
	.venv/bin/isoexec contract schema --of evidence > .cache/schema.json && mv .cache/schema.json contracts/spec/evidence-v1.schema.json
	.venv/bin/isoexec contract explain --format markdown > .cache/lint.md && mv .cache/lint.md contracts/spec/lint.md
	.venv/bin/python -m isoexec.contracts.specification
	.venv/bin/python -m isoexec.contracts.models.library
	.venv/bin/python tests/contracts/vectors/make.py
	.venv/bin/isoexec dashboards build

# nothing where the shipped records are of this build (CPU, torch); else a minute of quick gates, once
proven: .venv/.ready
	@.venv/bin/isoexec gate run --quick --missing

prometheus:
	@.ci/tools prometheus

# the servers that the tests run, each unless it is on PATH
tools:
	@.ci/tools prometheus nats-server

# One environment for both engines.  Every pin is exact and --no-deps, since two of the engines' declared ranges are wider than what
# runs: the torchvision that pip would choose does not import beside this torch, and megatron-core declares Python 3.12 but ships,
# and runs as, a 3.11 wheel.
.venv/.ready: requirements/engines-cpu.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11) and "IsoExec needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-deps --ignore-requires-python $(PIP_EXTRA) -r requirements/engines-cpu.lock
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.venv-light/.ready: requirements/light.lock pyproject.toml
	$(PYTHON) -m venv .venv-light
	.venv-light/bin/python -m pip install --quiet --no-deps -r requirements/light.lock
	.venv-light/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@# compiled here once, or the first tests that send logprobs wait for it
	.venv-light/bin/python -c 'from isoexec.daemon.statistics import prepare; prepare()'
	touch $@

clean:
	rm -rf .venv .venv-light .tools build dist
