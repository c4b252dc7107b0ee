# make demo and make test do all the set-up they need; the second call starts at once.
# Another interpreter: make test PYTHON=python3.12   Another place for what runs write: make demo AIM_RUNS=/big/disk/runs
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
READY := .venv/.ready
DATASET ?= glyphs
BUDGET ?= quick
export OMP_WAIT_POLICY ?= PASSIVE
export AIM_RUNS

.DEFAULT_GOAL := help
.PHONY: help setup demo test stress hooks lab docs docs-serve bench bench-check figures reproduce readme clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## the pinned environment in .venv (the other targets call it)

$(READY): constraints.txt settings.ini setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "aim_nb needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	@echo "setting up .venv with the pinned packages (a few minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

demo: $(READY) ## few-shot learning with SIB, SIB+Linear and SIB+AIM on glyphs, in minutes
	@OMP_NUM_THREADS=1 $(BIN)/aim-nb run nbs/20_fewshot.ipynb -p seeds 1 -p steps 600

test: $(READY) ## every check: notebooks, export, README, pytest (SUITES="clean export" picks some)
	@$(BIN)/python tests/run_suites.py $(SUITES)

stress: $(READY) ## the long tests (kills, faults, bombs, fuzz), and the table of all that was tried, kept in tests/data/faults.json
	@rm -f tests/data/faults.json
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider --stress --faults tests/data/faults.json tests

hooks: $(READY) ## git hooks of this clone: ruff and clean notebooks before a commit, notebooks merged cell by cell
	@git config core.hooksPath tools/hooks
	@git config merge.nbdev-merge.name "merge notebooks by cell"
	@git config merge.nbdev-merge.driver "$(BIN)/nbdev_merge %O %A %B %P"

lab: $(READY) ## JupyterLab on the notebooks, which are cleaned as they are saved
	@$(BIN)/jupyter lab --config=tools/jupyter_config.py --notebook-dir=nbs

docs: $(READY) ## the site in _docs/ (through Quarto where it is installed, else Sphinx)
	@$(BIN)/python tools/docs.py

docs-serve: docs ## the site in a browser
	@echo "http://127.0.0.1:8000 (Ctrl-C ends it)"
	@$(BIN)/python -m webbrowser http://127.0.0.1:8000 >/dev/null 2>&1 || true
	@$(BIN)/python -m http.server -b 127.0.0.1 -d _docs 8000

bench: $(READY) ## speed beside the plain reference, one thread, measured in one run (a quiet machine, please)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m benchmarks

bench-check: $(READY) ## the stored measurements against their bars
	@$(BIN)/python -m benchmarks --check

figures: $(READY) ## figures/ from code and from the kept records
	@$(BIN)/python tools/figures.py

reproduce: $(READY) ## every experiment, table and figure: make reproduce DATASET=glyphs BUDGET=smoke
	@$(BIN)/python tools/reproduce.py $(DATASET) $(BUDGET)

readme: $(READY) ## README.md from nbs/index.ipynb
	@$(BIN)/python tools/readme.py

clean: ## remove the environment, caches and built files (runs/ and data/ stay)
	rm -rf .venv _docs _proc _site build dist aim_nb.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
