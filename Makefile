# A checkout needs python3 (3.11 or later, with venv) and make.
# A plain torch brings a CUDA build of several GB; with PIP_EXTRA_INDEX_URL set to PyTorch's index of CPU builds, pip takes one.

PYTHON ?= python3
JOBS ?= 2

# make demo
REQUESTS ?= 1000
SEED ?= 1
DEVICE_BLOCKS ?= 300
HOST_BLOCKS ?= 4000

# make trace: a published conversation trace, which this repository may not carry
TRACE ?= ../shared/data/traces/mooncake_conversation_trace.full.jsonl.gz
TRACE_DEVICE_BLOCKS ?= 4000
TRACE_HOST_BLOCKS ?= 16000

DEPS := .deps/bin/python
VENV := .venv/bin/python
HICACHE := .venv/bin/hicache
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
MODEL := --model deepseek-v4-flash --variant rocm_unified_bf16 --platform rocm-mi355x \
	--io-backend kernel --layout page_first

# Either could lend the suites a package that the checkout does not install.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup lint typecheck unit alone test wheels demo trace clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

setup: .venv/.done ## .deps (third-party packages) and .venv (core and plugins, editable)

.deps/.done: requirements-dev.txt constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("hicache needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .deps
	$(DEPS) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -c constraints.txt
	touch $@

.venv/.done: .deps/.done tools/thin_venv.sh pyproject.toml $(PLUGINS:%=plugins/%/pyproject.toml)
	tools/thin_venv.sh . $(PLUGINS:%=plugins/%)
	touch $@

lint: setup ## ruff
	$(DEPS) -m ruff check .

typecheck: setup ## mypy: packages strictly, then the tests
	$(VENV) -m mypy
	$(VENV) -m mypy --explicit-package-bases tests $(wildcard plugins/*/tests)

unit: setup ## all suites against the editable packages
	$(VENV) -m pytest -n $(JOBS)

wheels: setup ## a wheel of each distribution, in build/wheels
	rm -rf build/wheels
	for project in . $(PLUGINS:%=plugins/%); do \
		$(DEPS) -m build --wheel --no-isolation --outdir build/wheels $$project || exit; \
	done

alone: wheels ## each plugin's suite with only the core and that plugin installed, from wheels
	for plugin in $(PLUGINS); do tools/alone.sh $$plugin || exit; done

# One after the other under -j too: the cheap checks speak first.
test: setup ## everything that CI checks
	$(MAKE) lint
	$(MAKE) typecheck
	$(MAKE) unit
	$(MAKE) alone

demo: setup ## replay a generated trace through the simulator
	mkdir -p build/demo
	$(HICACHE) trace generate --requests $(REQUESTS) --seed $(SEED) --out build/demo/trace.jsonl
	$(HICACHE) replay build/demo/trace.jsonl $(MODEL) --layers 2 --policy write_through \
		--device-blocks $(DEVICE_BLOCKS) --host-blocks $(HOST_BLOCKS) --report build/demo/report.json

trace: setup ## replay TRACE, a whole published trace
	@mkdir -p build/trace
	@if [ -e "$(TRACE)" ]; then set -x; \
		$(HICACHE) replay "$(TRACE)" $(MODEL) --layers 1 --tokens-per-block 256 --policy write_through \
			--device-blocks $(TRACE_DEVICE_BLOCKS) --host-blocks $(TRACE_HOST_BLOCKS) --report build/trace/report.json; \
	else echo "skipped: $(TRACE) is not here; give a trace with TRACE=FILE"; fi

clean: ## what the targets built
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find hicache_core plugins tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## and both environments
	rm -rf .deps .venv
