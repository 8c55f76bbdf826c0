# Works with GNU make 3.81 (macOS) and newer.

PYTHON ?= python3
# Two workers of one thread each: a thread per core in each of them would only fight for the cores. One that has no
# tests left takes half of the other's.
PYTEST_ARGS ?= -n 2 --dist worksteal
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
# Written when everything is installed; holds the folder that the environment was made in.
STAMP := $(VENV)/.installed
# There while an installation runs, and holds make's process id, so a leftover tells of one that was killed.
BUSY := $(VENV)/.installing
EXTRAS := vision,wandb,tensorboard,data,text,hf,peft,dev
# Written when what `make check` needs besides is installed.
CHECKERS := $(VENV)/.installed-check
PIP := $(PY) -m pip install --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all matrix check format bench docs faults isa sweep results report clean distclean

# An environment cannot be moved or copied, and does not survive the removal of its Python: then set it up again.
ifneq ($(shell test -x $(PY) && test ! -e $(BUSY) && cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

help: ## show this list
	@echo 'usage: make TARGET [ARGS="overrides or options"] [PYTHON=python3.12] [PYTEST_ARGS="-n 4 -k clip"]'
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with all that training and tests need; at once when nothing changed

train: setup ## run the default recipe: python train.py $(ARGS)
	$(PY) train.py $(ARGS)

test: setup ## every promise once: pytest -m "not slow" $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: setup ## all tests, four times as long: pytest $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

matrix: ## run the tests in other versions of torch and Python, long: python scripts/matrix.py $(ARGS)
	$(PYTHON) scripts/matrix.py $(ARGS)

check: $(CHECKERS) ## lint, formatting and types, the same as CI; installs the tools when they are missing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright

format: $(CHECKERS) ## apply what the linter can fix, and the formatting
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup ## measure speed, about three minutes: python scripts/bench.py $(ARGS)
	$(PY) scripts/bench.py $(ARGS)

faults: setup ## break things on purpose, long: python scripts/faults.py $(ARGS)
	OMP_NUM_THREADS=1 $(PY) scripts/faults.py $(ARGS)

isa: setup ## the numeric tests once for each instruction set of this CPU, long: python scripts/isa_check.py $(ARGS)
	$(PY) scripts/isa_check.py $(ARGS)

sweep: setup ## the default recipe in three modes with five seeds each: python train.py -m ... $(ARGS)
	$(PY) train.py -m experiment=parity_classification $(ARGS)

results: setup ## run what is missing of the published experiments, long, and write their numbers: python scripts/results.py $(ARGS)
	$(PY) scripts/results.py $(ARGS)

report: setup ## compare runs with pictures: make report ARGS="multirun/modes --out report.html"
	$(PY) scripts/report.py $(ARGS)

docs: setup ## build the documentation into site/; installs mkdocs when it is missing
	@$(PY) -c 'import material, mkdocstrings' 2>/dev/null || \
		$(PIP) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean: ## remove build products and caches; runs stay
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . \( -path ./.venv -o -path ./.matrix -o -path ./.git -o -path ./outputs -o -path ./multirun \) -prune \
		-o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## remove .venv too, and the environments of make matrix
	rm -rf $(VENV) .matrix

# A killed installation, or one made in another folder, is thrown away. One that failed in an orderly way goes on where
# it stopped, and an environment that somebody made by hand is completed. Since 25.1 pip shows how far it is while it
# unpacks, which takes longest, and knows groups of dependencies.
$(STAMP): pyproject.toml setup.py constraints.txt
	@if [ -e $(BUSY) ] && kill -0 "$$(cat $(BUSY))" 2>/dev/null; then \
		echo "error: process $$(cat $(BUSY)) is installing into $(VENV); wait for it (or remove $(BUSY))." >&2; exit 1; fi
	@if [ -e $(BUSY) ] || { [ -e $(STAMP) ] && [ "$$(cat $(STAMP))" != "$(CURDIR)" ]; }; then rm -rf $(VENV); fi
	@python=$(PY); [ -x $$python ] || python="$(PYTHON)"; \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
		found=$$(command -v $$python >/dev/null && $$python --version 2>&1 || echo missing); \
		echo "error: Python 3.11, 3.12 or 3.13 is needed; $$python is $$found." \
			"Use make PYTHON=python3.12, or the path of one$$([ $$python != $(PY) ] || echo ', after make distclean')." >&2; \
		exit 1; }
	@mkdir -p $(VENV) && echo $$PPID > $(BUSY) && rm -f $(STAMP)
	@[ -x $(PY) ] || { rm -f $(PY); $(PYTHON) -m venv $(VENV); }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	@echo 'installing into $(VENV): a minute or a few, once'
	@$(PIP) -q 'pip>=25.1' && $(PIP) -c constraints.txt -e '.[$(EXTRAS)]' || { rm -f $(BUSY); exit 1; }
	@rm -f $(BUSY) && echo "$(CURDIR)" > $(STAMP)

$(CHECKERS): $(STAMP)
	@echo 'installing linters and type checkers into $(VENV), once'
	@echo $$PPID > $(BUSY)
	@$(PIP) -c constraints.txt --group check || { rm -f $(BUSY); exit 1; }
	@rm -f $(BUSY) && touch $@
