# README's commands. Everything lives in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(sort $(wildcard plugins/*))
# Flower asks for older versions than the pinned ones: its package is installed without it, and tested in .venv-flower.
FLOWER := plugins/fedcore-flower
# make setup PROFILE=core: without development tools, and without packages that need more than fedcore does.
PROFILE ?= dev
# make setup TORCH=cpu: torch without CUDA. TORCH_INDEX is the address of an index, or a folder, with its wheels.
TORCH ?= default
TORCH_INDEX ?=
DEV := $(VENV)/.installed
CORE := $(VENV)/.installed-core

.PHONY: setup train test test-slow test-reliability test-flower test-dist oracles lint types docs results dist audit check clean

setup: $(if $(filter core,$(PROFILE)),$(CORE),$(DEV))

$(DEV) $(CORE): pyproject.toml constraints.txt tools/install.py $(addsuffix /pyproject.toml,$(PLUGINS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedcore needs Python 3.11 or newer; name it with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py --profile $(if $(filter $(CORE),$@),core,dev) --torch $(TORCH) --torch-index "$(TORCH_INDEX)"
	@touch $@
	@echo 'Installed. This puts fedcore and python of $(VENV) on the path: . $(BIN)/activate'

FLOWER_VENV := .venv-flower
FLOWER_STAMP := $(FLOWER_VENV)/.installed
FLOWER_WITH := $(FLOWER) $(addprefix plugins/fedcore-,console accelerate functional simulation testing workers zoo moon ditto fedper fedamp fedbuff fedcd fedcme feddf fedeccr)

$(FLOWER_STAMP): pyproject.toml $(FLOWER)/constraints.txt $(addsuffix /pyproject.toml,$(FLOWER_WITH))
	$(PYTHON) -m venv $(FLOWER_VENV)
	$(FLOWER_VENV)/bin/pip install --quiet -c $(FLOWER)/constraints.txt hatchling editables
	$(FLOWER_VENV)/bin/pip install --quiet --no-build-isolation -c $(FLOWER)/constraints.txt -e . pytest mypy \
	  types-PyYAML -e "$(FLOWER)[partitioners]" $(foreach plugin,$(filter-out $(FLOWER),$(FLOWER_WITH)),-e $(plugin))
	@touch $(FLOWER_STAMP)

# The first round needs no development tools: without an environment the core profile is installed.
train: $(or $(wildcard $(DEV)),$(CORE))
	$(BIN)/fedcore train --plugin fedcd
	@echo 'Next: . $(BIN)/activate, then for example: fedcore train --plugin moon --rounds 5'

# Three processes on two cores: one often waits for a process that its test started.
test: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -m slow

test-reliability: setup
	$(BIN)/python -m pytest -s -m "slow or not slow" tests/reliability

# Federations over loopback, with Flower's SuperLink and SuperNodes.
test-flower: $(FLOWER_STAMP)
	$(FLOWER_VENV)/bin/python -m pytest -m "slow or not slow" $(FLOWER)/tests

# Wheels are built, read, and installed into an empty environment.
test-dist: setup
	$(BIN)/python -m pytest -m "slow or not slow" tests/packaging

# make oracles flgo fluke: these libraries run in environments of their own, and their fixtures are written again.
ifeq (oracles,$(firstword $(MAKECMDGOALS)))
ORACLES := $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
$(eval $(ORACLES):;@:)
endif
oracles: setup
	$(BIN)/python benchmarks/oracles/run.py $(ORACLES)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/hadolint Dockerfile
	$(BIN)/actionlint -shellcheck= -pyflakes=
	$(BIN)/python tools/measures.py --most
	$(BIN)/python -m pytest -q tests/documentation/test_docs.py -k 'links_lead or pages_show or modules_that'

types: setup
	$(BIN)/mypy
	$(BIN)/mypy $(addprefix -p fedcore_,$(subst -,_,$(PLUGINS:plugins/fedcore-%=%)))
	$(BIN)/python -m pytest -q -m slow tests/documentation/test_types.py

# The variable silences an announcement about MkDocs itself, which is no warning about our pages.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	FEDCORE_SITE=site $(BIN)/python -m pytest -q -m slow -k 'not tutorial' tests/documentation/test_site.py
	@echo 'Built. The first page, which needs no server: site/index.html'

# The tables and pictures of docs/results.md that are made from results/.
results: setup
	$(BIN)/fedcore results page docs/results.md --from results

# Wheel and sdist of the core and of every package in plugins/, in dist/.
dist: setup
	rm -rf dist
	$(BIN)/python tools/dist.py dist

AUDIT_VENV := .venv-audit
AUDIT := $(AUDIT_VENV)/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off

# Known vulnerabilities of every pinned version. Needs the package index's advisories; strict, so that a version that
# could not be looked up fails too.
audit: $(AUDIT_VENV)/bin/pip-audit
	$(AUDIT) -r constraints.txt
	$(AUDIT) -r $(FLOWER)/constraints.txt

$(AUDIT_VENV)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/pip install --quiet pip-audit

check: test lint types docs

clean:
	rm -rf $(VENV) $(FLOWER_VENV) $(AUDIT_VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
