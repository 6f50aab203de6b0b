# Every command runs in .venv, which is built once and again only when pyproject.toml changes.
# make PYTHON=/path/to/python3.12 chooses the Python that it is built from.

VENV := .venv
RUN := $(VENV)/bin/python
DEMO ?= demo
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test storm lint bench docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 8

demo: $(VENV)/demo.stamp ## cache a real small model's states over real conversations in ./demo, and read them back
	$(RUN) -m benchmarks.fetch_target $(DEMO)
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.demo $(DEMO)

test: $(VENV)/dev.stamp ## run the tests, offline
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -n auto

storm: $(VENV)/dev.stamp ## run the long crash tests
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -n auto -m storm -o timeout=3600 -o faulthandler_timeout=3000

lint: $(VENV)/dev.stamp ## check style, format and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

bench: $(VENV)/dev.stamp ## measure the writers, and the loaders beside the peers
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.writers
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.loaders
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.loader_scale

docs: $(VENV)/dev.stamp ## build the documentation site in ./site; warnings are errors
	$(RUN) .ci/check_links.py
	$(RUN) -m sphinx -W --keep-going -q -E docs site
	@echo "open site/index.html"

clean: ## remove what the other targets made, but for .venv
	rm -rf demo site build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/created.stamp:
	@python=$$(.ci/python) && echo "building $(VENV) with $$python" && "$$python" -m venv --clear $(VENV)
	@touch $@

$(VENV)/demo.stamp: pyproject.toml | $(VENV)/created.stamp
	@echo "installing what the demo needs into $(VENV); PyTorch is large, so the first time takes a few minutes"
	@$(PIP) --editable '.[gguf]'
	@touch $@

# The development environment holds all that the demo needs.
$(VENV)/dev.stamp: pyproject.toml | $(VENV)/created.stamp
	@echo "installing the development environment into $(VENV); PyTorch is large, so the first time takes a few minutes"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/demo.stamp
