# Meshwright's commands.  Each installs what it needs into .venv by itself; a second call finds it there.
PYTHON ?= python3
BIN := .venv/bin
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
OLDEST := .venv-oldest
export PYTHONSAFEPATH := 1
# What is imported is compiled once and kept, for the hundreds of ranks that tests start, and most of
# it by the installation; what never is (most of what the packages have) is not compiled at all, which
# halves the installation.
export PYTHONDONTWRITEBYTECODE :=
QUIETLY := -q --no-compile --disable-pip-version-check

.PHONY: help demo test oldest matrix check format docs schemas hashes sbom install-matrix clean
.DEFAULT_GOAL := help

help:  ## print these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/	/' | sed 's/^/  make /' | expand -t 20

demo: .venv/installed  ## profile this machine, plan, train a small model on real text, compare with the prediction
	$(BIN)/python -m meshwright.cli.demo

# Sources are compiled by one process: both workers would do it otherwise.
# Assertions are not rewritten, which takes a quarter of collection in a clean clone; what fails runs
# again with them, and shows its values.
test: .venv/installed  ## run the tests (no GPU needed)
	$(BIN)/python -m compileall -q meshwright planner runtime profiler tests benchmarks examples
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --assert=plain \
		|| { $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none; exit 1; }

oldest: $(OLDEST)/installed  ## run the tests of the runtime that torch's version could break, with the oldest that is allowed
	$(OLDEST)/bin/python -m pytest -q -n 2 --dist loadfile $(addprefix tests/runtime/test_,torch_internals.py \
		pipeline.py schedules.py stale_pipeline.py branches.py rehearsal.py gradient_compression.py activations.py \
		experts.py context.py lora.py checkpoint.py train.py)

matrix: .venv/installed  ## train under every mesh of 2, 4 and 8 ranks, compared with one process and with transformers; pages in Chromium; writes docs/results/equality.md, and goes on where it stopped
	if command -v npm > /dev/null; then npm install --prefix benchmarks/page_check --no-audit --no-fund; fi
	$(BIN)/python -m pytest -q -m matrix

check: .venv/installed  ## what CI asks for: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: .venv/installed  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/docs-installed  ## build the documentation site into site/ and check its links
	$(BIN)/python -m meshwright.cli.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q tests/test_docs.py

schemas: .venv/installed  ## regenerate meshwright/schemas from the document types
	$(BIN)/python -m meshwright.planner.schemas

hashes: .venv/installed  ## write hashes.txt: every package of an installation, with the hash of its archive
	$(BIN)/python -m pip install -q --dry-run --ignore-installed --report - -c constraints.txt \
		--build-constraint constraints.txt '.[torch]' editables hatchling hatch-fancy-pypi-readme pip \
		| $(BIN)/python .ci/hashes.py > hashes.part
	mv hashes.part hashes.txt

sbom: .venv/installed  ## write sbom.json (CycloneDX): every package of an installation, with the hash of its archive
	$(BIN)/python -m pip install -q --dry-run --ignore-installed --report - -c constraints.txt \
		--build-constraint constraints.txt '.[torch]' \
		| $(BIN)/python .ci/hashes.py --bill > sbom.part
	mv sbom.part sbom.json

install-matrix: .venv/installed  ## install a wheel with the oldest and the newest allowed packages, per Python of PYTHONS; each plans, and trains with torch
	rm -rf .install-matrix
	$(BIN)/python -m pip wheel -q --no-deps -c constraints.txt --build-constraint constraints.txt -w .install-matrix .
	$(BIN)/python .ci/install_matrix.py .install-matrix/*.whl .install-matrix $(PYTHONS)
	$(BIN)/python .ci/install_matrix.py "$$(echo .install-matrix/*.whl)[torch]" .install-matrix/torch $(PYTHON)

clean:  ## delete what these commands made
	rm -rf .venv $(OLDEST) .install-matrix dist demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt pip
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt \
		--build-constraint constraints.txt -e '.[torch]' --group test --group tools
	$(BIN)/python -c "import torch._dynamo, torch.distributed.checkpoint, transformers.modeling_utils"
	touch $@

.venv/docs-installed: .venv/installed
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt --group docs
	touch $@

$(OLDEST)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	grep -v '^torch==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install $(QUIETLY) -c constraints.txt pip
	$(OLDEST)/bin/python -m pip install $(QUIETLY) -c $(OLDEST)/constraints.txt \
		--build-constraint constraints.txt -e '.[torch]' --group test torch==2.11.0
	touch $@
