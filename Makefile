# Every target sets up what it needs; nothing is installed by hand.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FUZZ_SECONDS := 10
SOAK_MINUTES := 60
ATHERIS := 3.0.0
LOWEST := pack,view,pixels,documents,waveforms,slides,wfdb,train,webdataset,sign,remote,htj2k,service,prometheus,metrics,ray,hf,lightning,lora
# uv does not read pip's find-links; where that variable holds local wheels (a CPU build of torch, say), pass it on.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Every packing process and rank imports the same libraries: where bytecode may not be written, each compiles them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-slow test-lowest test-gpu wheels soak fuzz images licenses dist sbom release docs check size fix golden constraints clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# constraints.txt is the lock: uv checks the hashes in it, also of the packages that build. One line of it as requirement:
uv_of = awk '/^uv==/,!/\\$$/' constraints.txt > $(1)/uv.txt && $(1)/bin/python -m pip install --quiet --require-hashes --requirement $(1)/uv.txt
, := ,
sbom_of = .release-venv/bin/uv venv --quiet --clear .release-venv/$(1) && .release-venv/bin/uv pip install --quiet \
	--python .release-venv/$(1)/bin/python --constraints constraints.txt "$$(ls dist/*.whl)[$(2)]" && \
	.release-venv/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
	--output-file dist/shardflow-$(1).cdx.json .release-venv/$(1)
LOCKED := --constraints constraints.txt --build-constraints constraints.txt

setup: $(STAMP) ## Create .venv from the locked packages, with the console script at .venv/bin/shardflow

# `venv --clear` would empty the folder behind a link, which others may use.
$(STAMP): pyproject.toml constraints.txt
	@test ! -L $(VENV) || { echo "$(VENV) must be a folder of this clone, got a link; remove the link, and run make again." >&2; exit 2; }
	python3 -m venv --clear $(VENV)
	$(call uv_of,$(VENV))
	$(BIN)/uv pip install --python $(BIN)/python $(LOCKED) --editable '.[pack,pixels,wfdb,train,webdataset,remote,ray,hf,lightning,trl,qlora,metrics,prometheus,wandb,mlflow]' --group dev
	@touch $@

demo: $(STAMP) ## Pack real DICOM, train on two processes, kill one, resume on one, and show that nothing was lost
	$(BIN)/python -m pipelines.demo --output demo-output

test: $(STAMP) ## Run the tests (about half an hour on two cores)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(STAMP) ## Run the long sweeps
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "slow and not gpu" $(PYTEST_ARGS)

# torch as the lock has it: every machine has its build. What tests need beside extras comes from the lock as well.
test-lowest: $(STAMP) ## Run the fast tests of format, sampling, fields and storage with the lowest versions of dependencies
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .lowest-venv
	$(BIN)/uv pip install --quiet --python .lowest-venv/bin/python $(LOCKED) torch hypothesis pytest pytest-timeout pytest-xdist pyyaml simpleitk
	$(BIN)/uv pip install --quiet --python .lowest-venv/bin/python --resolution lowest-direct --editable '.[$(LOWEST)]'
	.lowest-venv/bin/python -m pytest -q tests/architecture/test_imports.py -k 'not layers'
	.lowest-venv/bin/python -m pytest -q -n auto --maxprocesses 4 -m fast $(addprefix tests/unit/,format sampling fields storage) $(PYTEST_ARGS)

# The registry is asked, and nothing installed. Without the local wheels, which are of this machine alone. On 3.14 pack lacks one.
wheels: $(STAMP) ## Ask whether each locked package has wheels for Linux on x86-64 and ARM64, for Python 3.11 to 3.14
	@set -e; for version in 3.11 3.12 3.13 3.14; do for machine in x86_64 aarch64; do \
		extras="--all-extras"; test $$version != 3.14 || extras="$(addprefix --extra ,$(filter-out pack,$(subst $(,), ,$(LOWEST))))"; \
		UV_FIND_LINKS= $(BIN)/uv pip compile --quiet --no-header --no-annotate --only-binary :all: --constraints constraints.txt \
			--python-version $$version --python-platform $$machine-manylinux_2_28 $$extras pyproject.toml > /dev/null; \
		echo "Python $$version, $$machine: wheels for $$extras"; \
	done; done

test-gpu: $(STAMP) ## Run the tests that need a CUDA device, on a machine that has one
	$(BIN)/python -m pytest -n 0 -m gpu tests/gpu $(PYTEST_ARGS)

soak: $(STAMP) ## Pack, append, train, kill, resize, resume, evaluate and remove in a loop for SOAK_MINUTES (60)
	$(BIN)/python -m benchmarks.training.soak --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

fuzz: $(STAMP) .fuzz-venv/.installed ## Feed every reader with mutated input, FUZZ_SECONDS (10) each, and record it in .fuzz-corpus
	mkdir -p .fuzz-corpus
	PYTHONPATH=.fuzz-venv $(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) --output .fuzz-corpus/record.json $(FUZZ_ARGS)

# A folder beside the environment of the tests, so that the lock needs no fuzzer.
.fuzz-venv/.installed: Makefile $(STAMP)
	rm -rf .fuzz-venv
	$(BIN)/uv pip install --quiet --target .fuzz-venv --python $(BIN)/python atheris==$(ATHERIS)
	@touch $@

images: ## Build both container images with podman, and run, stop and resume packing and training in them (Debian, root)
	docker/check_images.sh $(IMAGES_ARGS)

licenses: $(STAMP) ## Print the license table of what the images install, with the native libraries in wheels
	@$(BIN)/python -m tests.architecture.licenses

# The same bytes from the same commit on any machine: hatchling sets every time to a fixed one.
dist: $(STAMP) ## Build wheel and source distribution into dist/
	rm -rf dist
	$(BIN)/uv build --quiet --build-constraints constraints.txt --out-dir dist

sbom: dist ## Write what the wheel installs for each image as CycloneDX into dist/, with versions and licenses
	python3 -m venv --clear .release-venv
	$(call uv_of,.release-venv)
	.release-venv/bin/uv pip install --quiet --python .release-venv/bin/python $(LOCKED) cyclonedx-bom
	$(call sbom_of,pack,pack$(,)wfdb$(,)remote)
	$(call sbom_of,train,train$(,)prometheus$(,)remote$(,)service)

release: sbom ## Fill dist/ for a release: wheel, sources, bills of materials, licenses, digests
	$(BIN)/python -m tests.architecture.licenses > dist/LICENSES.md
	cd dist && sha256sum -- *.whl *.tar.gz *.json *.md > SHA256SUMS

docs: $(STAMP) ## Build the documentation site into site/; open site/index.html, no server or network is needed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Look at site/index.html"

check: $(STAMP) ## Format, lint, strict types, import layers, and the fast tests: under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[bf]*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 -m fast $(PYTEST_ARGS)

size: $(STAMP) ## Count modules, code lines, public names and words of documents
	$(BIN)/python -m tests.architecture.size

fix: $(STAMP) ## Format and apply the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: $(STAMP) ## Rewrite the golden files; review the diff, it is a change of format or order
	$(BIN)/python -m pytest -q -m "not gpu" --update-golden

# Without the local wheels: a CPU build of torch that lies there must not become the pin of every machine. torch alone has
# no hashes, since every machine has its build of it.
constraints: ## Lock the newest versions that fit together, with their hashes, in constraints.txt
	UV_FIND_LINKS= $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --generate-hashes \
		--all-extras --group dev pyproject.toml constraints.in -o constraints.txt
	sed -i -E '/^torch==/,/[^\\]$$/{/^ /d;s/ *\\$$//}' constraints.txt

clean: ## Remove what the targets made
	rm -rf $(VENV) .lowest-venv .fuzz-venv .fuzz-corpus .release-venv dist demo-output site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
