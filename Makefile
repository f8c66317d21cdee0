# make train | real | test | test-real | test-all | conformance | docs | lint | gate | bench | peers | bench-peers | bench-real | soak. Everything happens in $(VENV), which is made when it is missing.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#   ARGS='seed=1'       settings for the program that the target runs
#   EXTRA=cuda12        an extra of pyproject.toml to install as well: cuda12, cuda13 or tpu
#   TUNIX_LITE_REAL=X   the folder of `make real` and `make test-real` for real models

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
EXTRA ?=
TUNIX_LITE_REAL ?= $(HOME)/.cache/tunix_lite/real

# `make train seed=1` sets a variable of make, which the program would never see.
SETTINGS := $(filter-out PYTHON VENV ARGS EXTRA TUNIX_LITE_REAL SHELL MAKE% -%,\
	$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
ifneq ($(SETTINGS),)
$(error settings go into ARGS: make $(or $(MAKECMDGOALS),train) ARGS='$(foreach name,$(sort $(SETTINGS)),$(name)=$($(name)))')
endif

UV := $(shell command -v uv 2>/dev/null)
ifdef UV
USABLE = test -x $(VENV)/bin/python
CREATE = uv venv --quiet --seed --python $(PYTHON) $(VENV)
INSTALL = uv pip install --quiet --python $(VENV)/bin/python
else
USABLE = $(VENV)/bin/python -m pip --version >/dev/null 2>&1
CREATE = $(PYTHON) -m venv $(VENV)
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
endif

# One stamp per set of extras: repeated makes install nothing, a newer pyproject.toml makes them install again.
STAMP = $(VENV)/.installed
DEVICE := $(if $(EXTRA),$(STAMP)-$(EXTRA))

.DEFAULT_GOAL := help
.PHONY: help install train real test wide test-real test-all conformance golden docs lint gate bench peers bench-peers bench-real soak

help:
	@echo 'make train    train the bundled model with GRPO on the devices there are'
	@echo 'make real     fetch SmolLM2 135M (93 MB, no account) into $(TUNIX_LITE_REAL), and train it'
	@echo 'make test     run the tests: every claim once'
	@echo 'make wide     run the rest: wide products of settings, and comparisons with transformers and PEFT'
	@echo 'make test-all run both'
	@echo 'make test-real fetch the same model, and run the tests that read real models'
	@echo 'make conformance print what each framework means by an objective, and whether settings of ours give its numbers'
	@echo 'make golden   compare texts, settings, memory plans and programs with those that are recorded'
	@echo 'make docs     build the documentation into docs/_build/html; a warning is an error'
	@echo 'make lint     ruff: rules and formatting'
	@echo 'make gate     count FLOPs, bytes, kernels and more of tiny programs; more than benchmarks/gate.json has is an error'
	@echo 'make bench    time one GRPO step'
	@echo 'make peers    install TRL and Tunix, each into a venv of its own under .peers/, some 3 GB'
	@echo 'make bench-peers race ours, TRL and Tunix on the same work in turns'
	@echo 'make bench-real  race ours, transformers, TRL and llama.cpp on real weights: ARGS="--models FOLDER ..."'
	@echo 'make soak     an hour of kills and signals, after which a run must be the same to the bit'
	@echo 'make install  only make $(VENV) and install the package into it'
	@echo
	@echo "ARGS='training.max_steps=20 seed=1' gives settings; EXTRA=cuda12 installs JAX for NVIDIA GPUs;"
	@echo 'PYTHON=python3.12 chooses the interpreter.'

install: $(STAMP) $(DEVICE)

train: $(STAMP) $(DEVICE)
	$(VENV)/bin/python run_training.py $(ARGS)

REAL_MODEL = $(TUNIX_LITE_REAL)/gguf/smollm2-135m-instruct-q4_1.gguf

# Looks at the file's digest each time: a broken one is refused here, with its name.
real: $(STAMP) $(STAMP)-gguf $(DEVICE)
	$(VENV)/bin/python examples/install_real_model.py '$(TUNIX_LITE_REAL)'
	$(VENV)/bin/python run_training.py experiment=smollm2 'model.weights=$(REAL_MODEL)' $(ARGS)

test-real: $(STAMP)-test $(STAMP)-parity $(STAMP)-gguf $(DEVICE)
	$(VENV)/bin/python examples/install_real_model.py '$(TUNIX_LITE_REAL)'
	TUNIX_LITE_REAL='$(TUNIX_LITE_REAL)' $(VENV)/bin/python -m pytest -m real $(ARGS)

# Files start in the order of tests/conftest.py. By default those of few tests start last, and they take longest.
test: $(STAMP)-test $(DEVICE)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

wide: $(STAMP)-test $(STAMP)-parity $(DEVICE)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'wide or parity' $(ARGS)

test-all: test wide

# ARGS=cispo prints one objective with its formulas; ARGS='--write docs/references/conformance.md' writes the page.
conformance: $(STAMP) $(DEVICE)
	PYTHONPATH=tests $(VENV)/bin/python -m conformance $(ARGS)

# ARGS='--runs COMMIT' makes whole runs at that commit and here, and compares them to the bit: some ten minutes.
# ARGS=--write records the texts anew.
golden: $(STAMP)-test $(DEVICE)
	$(VENV)/bin/python tests/golden/golden.py $(ARGS)

docs: $(STAMP)-docs
	$(VENV)/bin/python -m sphinx -W --keep-going -b html docs docs/_build/html

lint: $(STAMP)-test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .

gate: $(STAMP)
	$(VENV)/bin/python benchmarks/gate.py $(ARGS)

soak: $(STAMP)-test $(DEVICE)
	$(VENV)/bin/python tests/soak.py --minutes 60 $(ARGS)

bench: $(STAMP) $(DEVICE)
	$(VENV)/bin/python benchmarks/grpo_step.py $(ARGS)

peers:
	$(PYTHON) benchmarks/peers/install.py $(ARGS)

bench-peers: $(STAMP) .peers/tunix/bin/python .peers/trl/bin/python
	$(VENV)/bin/python benchmarks/peers/run.py $(ARGS)
	$(VENV)/bin/python docs/benchmarks_page.py

bench-real: $(STAMP)
	$(VENV)/bin/python benchmarks/real/race.py $(ARGS)
	$(VENV)/bin/python docs/benchmarks_page.py

.peers/%/bin/python:
	$(PYTHON) benchmarks/peers/install.py $*

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is missing or older than Python 3.11; name another: make PYTHON=python3.12 ..."; exit 1; }
	@$(USABLE) || $(CREATE)
	@touch $@

$(STAMP): pyproject.toml | $(VENV)/.made
	@echo 'Installing into $(VENV). The first time this downloads JAX and the rest; later it is skipped.'
	$(INSTALL) -e .
	@touch $@

$(STAMP)-%: pyproject.toml | $(VENV)/.made
	$(INSTALL) -e '.[$*]'
	@touch $@
