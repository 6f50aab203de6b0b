# Every command runs in .venv, which is built once and again only when pyproject.toml changes.
# make PYTHON=/path/to/python3.12 chooses the Python that it is built from.

VENV := .venv
RUN := $(VENV)/bin/python
DEMO ?= demo
BENCH ?= bench
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test storm faults partners partnertest lint bench docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

demo: $(VENV)/demo.stamp ## cache a real small model's states over real conversations in ./demo, and read them back
	$(RUN) -m benchmarks.fetch_target $(DEMO)
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.demo $(DEMO)

test: $(VENV)/dev.stamp ## run the tests, offline
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -n auto

storm: $(VENV)/dev.stamp ## run the long crash tests
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -n auto -m storm -o timeout=3600 -o faulthandler_timeout=3000

faults: $(VENV)/dev.stamp ## break the library line by line, in copies of it, and look whether a test fails (under an hour)
	$(RUN) -m tests.faults.run

partners: ## resolve this package beside each partner, and build the environments of their tests and of the lowest versions (long)
	$$(.ci/python) .ci/partners.py

partnertest: ## run the tests of those environments that are there, and say which are not
	$$(.ci/python) .ci/partners.py --test

lint: $(VENV)/dev.stamp ## check style, format and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

bench: $(VENV)/dev.stamp ## measure chunk sizes, reading and writing beside the peers, and costs, into ./bench (under an hour)
	$(RUN) -m benchmarks.fetch_target $(DEMO)
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.demo $(DEMO)
	HF_HUB_OFFLINE=1 $(RUN) -m dspark_store.precompute --target-model $(DEMO)/target/*.gguf --device cpu \
		--input-data $(DEMO)/messages.jsonl --output-dir $(BENCH)/fp32 --dtype fp32 --seq-length 512 \
		--batch-size 4 --shard-size 16 --max-samples 32 --resume
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.chunk_sizes --store $(DEMO)/store --sweep --out $(BENCH)
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.loaders --json $(BENCH)/loaders_synthetic.json
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.loaders --store $(DEMO)/store --samples 80 --json $(BENCH)/loaders_real.json
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.writers --json $(BENCH)/writers.json
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.loader_scale --json $(BENCH)/loader_scale.json
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.tokenise --chats 40000 --json $(BENCH)/tokenise.json
	HF_HUB_OFFLINE=1 $(RUN) -m benchmarks.ratios $(BENCH)/fp32 --json $(BENCH)/ratios.json
	$(RUN) -m benchmarks.report --from $(BENCH) --to $(BENCH)/benchmarks.md

docs: $(VENV)/dev.stamp ## build the documentation site in ./site; warnings are errors
	$(RUN) .ci/check_links.py
	$(RUN) -m sphinx -W --keep-going -q -E docs site
	@echo "open site/index.html"

clean: ## remove what the other targets made, but for .venv
	rm -rf demo bench site build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
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
