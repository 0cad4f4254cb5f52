# Two commands do everything: `make demo` and `make test`. PYTHON picks the interpreter for a new environment.
PYTHON ?= python3
BIN := .venv/bin
SEED ?= 0
EVERY := claude cline codex mini opencode openhands pi qwen terminus

.PHONY: help venv demo test containers harnesses check bench honesty locks clean

help:
	@echo "make demo    train a tiny policy in a real harness, on CPU (SEED=0)"
	@echo "make test    all tests that need no GPU"
	@echo "make containers  install Podman and Docker (Debian, as root) and test boxes in them"
	@echo "make harnesses   try every harness live, and write docs/harnesses.md"
	@echo "make check   lint, format, types, layers"
	@echo "make bench   the benchmarks of tools/bench"
	@echo "make honesty the demo with shuffled advantages: it must not learn"

venv: .venv/installed

.venv/installed: locks/cpu.txt locks/dev.txt pyproject.toml
	@rm -rf .venv
	$(PYTHON) -m venv .venv
	@# torch first, and not by hash: pip takes its CPU build where one is to be found, which is not on every index.
	$(BIN)/python -m pip install --no-compile --no-deps torch==2.13.0
	$(BIN)/python -m pip install --no-compile --no-deps --require-hashes -r locks/cpu.txt -r locks/dev.txt
	@# The usual build wants its CUDA libraries even to be imported; for the CPU build this does nothing.
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	@# Without bytecode each start of vLLM takes twice as long; a few files of other packages cannot be compiled.
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true
	@touch $@

demo: venv
	$(BIN)/python -m harnesses.fetch codex
	$(BIN)/python -m lego.train recipes/demo.py --seed $(SEED)

test: venv
	$(BIN)/python -m harnesses.fetch claude cline codex opencode pi qwen
	$(BIN)/python -m pytest -q

containers: venv
	sh tools/containers.sh
	$(BIN)/python -m pytest -q -m "podman or docker"

harnesses: venv
	$(BIN)/python -m harnesses.fetch $(EVERY)
	$(BIN)/python -m pytest -q -m harness tests/harnesses --chaos all
	$(BIN)/python -m lego.smoke $(EVERY) --write docs/harnesses.md

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_light.py

bench: venv
	$(BIN)/python tools/bench/harness_cost.py
	$(BIN)/python tools/bench/proxy.py
	$(BIN)/python tools/bench/heads.py
	$(BIN)/python tools/bench/boxes.py
	$(BIN)/python tools/bench/trainer.py
	$(BIN)/python tools/bench/weights.py
	$(BIN)/python tools/bench/async_sim.py

honesty: venv
	$(BIN)/python -m harnesses.fetch codex
	$(BIN)/python -m lego.train recipes/demo.py --seed $(SEED) --sabotage shuffle_advantages

locks:
	$(PYTHON) tools/lock.py

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache
