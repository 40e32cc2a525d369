# `make demo` and `make test` need nothing but Python 3.11 or newer; everything else is fetched into $(VENV).
PYTHON ?= python3
VENV ?= .venv
SECONDS_TO_TRAIN ?= 180
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
BIN := $(VENV)/bin

.PHONY: demo test lint bench bench-quality bench-wan venv clean

demo: venv  ## a bootstrap peer and three volunteers train one model on this machine
	@$(BIN)/spesd demo --seconds $(SECONDS_TO_TRAIN)

test: venv  ## every test; pass more options as ARGS="-k roster"
	@$(BIN)/python -m pytest $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv  ## tables for people, one JSON object as the last line; see bench/README.md
	@$(BIN)/python -m bench $(ARGS)

bench-quality: $(VENV)/.bench-installed  ## what a swarm learns; ARGS="--full" takes hours, see docs/learning.md
	@$(BIN)/python -m bench.quality $(ARGS)

bench-wan: venv  ## rounds over emulated home links beside a central server; Linux and root, e.g. `sudo make bench-wan`
	@$(BIN)/python -m bench.wan $(ARGS)

venv: $(VENV)/.installed

# torch comes first and alone: with it in the same call pip backtracks through its large wheels. All the rest comes in
# ONE call: in two, pip settles on a protobuf that grpcio-tools refuses.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "spesd needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch==2.13.0
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	$(PIP) check
	@touch $@

$(VENV)/.bench-installed: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
