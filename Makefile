# Meshwright's commands.  Each installs what it needs into .venv by itself; a second call finds it there.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONSAFEPATH := 1

.PHONY: help demo test matrix check format schemas clean
.DEFAULT_GOAL := help

help:  ## print these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/	/' | sed 's/^/  make /' | expand -t 20

demo: .venv/installed  ## profile this machine, plan, train a small model on real text, compare with the prediction
	$(BIN)/python -m meshwright.demo

test: .venv/installed  ## run the tests (no GPU needed)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

matrix: .venv/installed  ## train under every mesh of 2, 4 and 8 ranks, compared with one process and with transformers; writes docs/equality.md, and goes on where it stopped
	$(BIN)/python -m pytest -q -m matrix

check: .venv/installed  ## what CI asks for: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: .venv/installed  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: .venv/installed  ## regenerate docs/schemas from the document types
	$(BIN)/python -m planner.schemas

clean:  ## delete what these commands made
	rm -rf .venv demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt pip
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt \
		-e '.[torch]' --group test --group tools
	touch $@
