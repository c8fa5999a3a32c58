# make run   a virtual environment with everything, then the whole pipeline on the embedded model
# make test  the same environment, then linters and tests

PYTHON ?= python3
# For a smaller install without CUDA libraries on Linux: make run PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
BIN := .venv/bin

.PHONY: run test format

run: .venv/.installed
	$(BIN)/snakemake --cores 1

test: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest --numprocesses 2 --dist loadfile --max-worker-restart 0

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile rules

.venv/.installed: envs/requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -r envs/requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@
