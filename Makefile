# Every verb makes .venv itself. Extra arguments: make test ARGS="-k store -x"
PYTHON ?= python3
ARGS ?=
SEEDS ?= 2000
OPERATIONS ?= 1000000
FRAMES ?= 1000000
MUTANTS ?= 40000
KILLS ?= 200
SECONDS ?= 600
WORKERS ?= 4
GPU_PYTHON ?=
FAKE ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

# The tests start hundreds of interpreters: without bytecode each compiles the package anew, in as long as all else takes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest torch mpi page retest mistakes check bench prove sim soak multinode gpu clean

help:
	@echo "make demo       train on handwritten digits with 4 ranks"
	@echo "make test       run the tests"
	@echo "make test-rest  run what it leaves out for its time: tests of bench/, the proof of more worlds, long sweeps"
	@echo "make retest     run alone, five times each, the few tests that failed in it"
	@echo "make mistakes   plant one mistake after another in a copy of the tree: does a test of its room fail?"
	@echo "make check      lint, formatting, layers, types"
	@echo "make bench      measure beside the neighbors that are installed"
	@echo "make prove      verify every collective plan symbolically, and plant mistakes in them (MUTANTS=40000)"
	@echo "make sim        run the tests with every combination of their parameters, and thousands of random programs on"
	@echo "                simulated worlds, daemons and networks (SEEDS=2000)"
	@echo "make soak       run random operations on ranks that are stopped at random (OPERATIONS=1000000), kill ranks"
	@echo "                at random instants and ask the others (KILLS=200), run random programs on ranks"
	@echo "                that are killed, stopped or leave (SECONDS=600), cut hosts off (as root), send random messages"
	@echo "                of which many are withdrawn (SECONDS=600 on each transport), kill the store's daemon under"
	@echo "                load and judge every answer (KILLS=200)"
	@echo "                and fuzz both doors of the store daemon (FRAMES=1000000 at each)"
	@echo "make multinode  run jobs on several hosts, namespaces and containers, that are killed, stopped, cut off, late or"
	@echo "                wrong, docker-compose.yml, and a Slurm (as root; installs Debian's docker and Slurm when missing)"
	@echo "make gpu        test and measure on this machine's GPU in less than eight minutes: docs/benchmarks/gpu.md"
	@echo "make clean      remove .venv and everything else that was built"

demo: $(VENV)/.base
	$(BIN)/asyncdist run --nproc-per-node 4 examples/train_digits.py --compare $(ARGS)

# Four side by side on two cores, as most of them wait: they begin with those that start processes, and elsewhere. Of
# tests with three parameters or more they run every pair of values, make sim every combination (tests/fewer_cases.py).
# Those that interrupt the main thread need it for themselves. pytest's 1 means that tests failed; after anything worse
# there is nothing that retest could put right; one that hangs ends its process, and so leaves no name in the last run.
NO_LIMIT := -o faulthandler_timeout=0
LAST_FAILED := .pytest_cache/v/cache/lastfailed
test: $(VENV)/.dev
ifeq ($(strip $(ARGS)),)
	@rm -f $(LAST_FAILED) .pytest_cache/unsteady; worst=0; \
	ASYNCDIST_FEWER_CASES=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --ignore tests/unit/blocking tests || worst=$$?; \
	$(BIN)/python -m pytest -q tests/unit/blocking || { code=$$?; worst=$$((code > worst ? code : worst)); \
	  grep -qs tests/unit/blocking $(LAST_FAILED) || worst=2; }; \
	[ $$worst -le 1 ] || rm -f $(LAST_FAILED); exit $$worst
else
	$(BIN)/python -m pytest $(ARGS)
endif

# What make test puts off (markers bench and thorough); .ci/run runs both. pytest's 1: see above.
test-rest: $(VENV)/.dev
	@rm -f $(LAST_FAILED) .pytest_cache/unsteady; \
	ASYNCDIST_FEWER_CASES=rest $(BIN)/python -m pytest -q -n 3 --dist worksteal tests $(ARGS) || { code=$$?; \
	  [ $$code -le 1 ] || rm -f $(LAST_FAILED); exit $$code; }

# torch as pyproject.toml names it: for tests that compare with it, which are skipped where it is not installed.
torch: $(VENV)/.torch
$(VENV)/.torch: pyproject.toml | $(VENV)/.dev
	@echo "installing torch into $(VENV)"
	@$(PIP) install $$($(BIN)/python -c 'import tomllib; \
	  extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  print(*[one for one in extras["peers"] if one.startswith(("torch", "expecttest"))])')
	@touch $@

# mpi4py, for tests that need it and the system's MPI.
mpi: $(VENV)/.mpi
$(VENV)/.mpi: pyproject.toml | $(VENV)/.dev
	@echo "installing mpi4py into $(VENV)"
	@$(PIP) install $$($(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["mpi"])')
	@touch $@

# playwright, for tests of the page in the system's chromium.
page: $(VENV)/.page
$(VENV)/.page: pyproject.toml | $(VENV)/.dev
	@echo "installing playwright into $(VENV)"
	@$(PIP) install $$($(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["page"])')
	@touch $@

retest: $(VENV)/.dev
	$(BIN)/python tests/retest.py

mistakes: $(VENV)/.dev
	$(BIN)/python tests/tools/planted_mistakes.py $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m bench $(ARGS)

prove: $(VENV)/.dev
	$(BIN)/python tests/tools/prove_plans.py $(ARGS)
	ASYNCDIST_MUTANTS=$(MUTANTS) $(BIN)/python -m pytest $(NO_LIMIT) -q tests/unit/plan/proof/test_mutants.py

sim: $(VENV)/.dev
	ASYNCDIST_SIM_SEEDS=$(SEEDS) $(BIN)/python -m pytest $(NO_LIMIT) tests/sim $(ARGS)
	ASYNCDIST_MODEL_EXAMPLES=$(SEEDS) $(BIN)/python -m pytest $(NO_LIMIT) -q tests/property/test_engine_model.py
	$(BIN)/python tests/sim/simulate_store.py --seeds $(SEEDS)
	$(BIN)/python tests/sim/simulate_store.py --seeds $(SEEDS) --mode durable
	ASYNCDIST_EXAMPLES=20 $(BIN)/python -m pytest $(NO_LIMIT) -q -n 3 --dist worksteal --ignore tests/unit/blocking tests

soak: $(VENV)/.dev
	ASYNCDIST_LARGE=1 $(BIN)/python -m pytest $(NO_LIMIT) -q tests/integration/test_jobs.py -k beyond_four_gibibytes
	$(BIN)/python tests/soak/soak.py --operations $(OPERATIONS) $(ARGS)
	$(BIN)/python tests/soak/kill_soak.py --kills $(KILLS)
	$(BIN)/python tests/soak/checkpoint_soak.py --kills 50
	$(BIN)/python tests/soak/weights_soak.py --minutes 5 --servers 16
	$(BIN)/python tests/soak/rpc_soak.py
	for deaths in 1 2; do $(BIN)/python tests/soak/shrink_soak.py --trials 100 --deaths $$deaths || exit 1; done
	$(BIN)/python tests/soak/vanish_soak.py --trials 6
	$(BIN)/python tests/soak/spmd_soak.py --seconds $(SECONDS)
	for transport in shm unix tcp; do \
	  $(BIN)/python tests/soak/message_soak.py --seconds $(SECONDS) --transport $$transport || exit 1; done
	$(BIN)/python tests/soak/store_soak.py --kills $(KILLS)
	$(BIN)/python tests/soak/fuzz_doors.py --frames $(FRAMES)

multinode: $(VENV)/.dev
	bash tests/multinode/run.sh $(ARGS)

# Without a GPU this says so and fails. Without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=folder make gpu, or, where some
# interpreter has all of it: make gpu GPU_PYTHON=python3. make gpu FAKE=1 tries it on a fake device, and writes nothing.
# make gpu ARGS="--logs folder --only ipc" keeps all output, and runs the parts of that name.
gpu:
ifneq ($(strip $(FAKE)),)
	@$(MAKE) --no-print-directory $(VENV)/.dev
	@ASYNCDIST_TEST_FAKE_CUDA=$(FAKE) $(BIN)/python -m bench.gpu_proof --smoke $(ARGS)
else ifneq ($(strip $(GPU_PYTHON)),)
	@$(GPU_PYTHON) bench/cuda_extra.py --installed
	@PYTHONPATH=$(CURDIR):$(CURDIR)/server:$$PYTHONPATH $(GPU_PYTHON) -m bench.gpu_proof --write $(ARGS)
else
	@extra=$$($(PYTHON) bench/cuda_extra.py) && $(MAKE) --no-print-directory gpu-with-$$extra
endif

.PRECIOUS: $(VENV)/.gpu-%
gpu-with-%: $(VENV)/.gpu-%
	@$(BIN)/python -m bench.gpu_proof --write $(ARGS)

clean:
	rm -rf $(VENV) .multinode dist build .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis

# Stamps: installed again when pyproject.toml changes. The sources themselves are used in place.
$(VENV)/.base: pyproject.toml | $(BIN)/pip
	@echo "installing asyncdist into $(VENV)"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	@echo "installing asyncdist and its development tools into $(VENV)"
	@$(PIP) install --editable ".[dev]"
	@touch $@

# torch is a neighbor: where it cannot be had its column stays empty. It asks for an NCCL of its own, older than what
# lets two ranks share a GPU and perhaps for another CUDA, in the same place: so NCCL comes last, whatever is there.
$(VENV)/.gpu-%: pyproject.toml | $(VENV)/.dev
	@echo "installing asyncdist's extra $* into $(VENV)"
	@$(PIP) install --editable ".[dev,$*]"
	@$(PIP) install torch || echo "make gpu: no torch to compare with"
	@$(PIP) install --upgrade --force-reinstall --no-deps "nvidia-nccl-$(subst cuda,cu,$*)"
	@touch $@

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: $(PYTHON) not found. Debian, Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
	  echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V). Name another: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -c "import venv, ensurepip" 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments. Debian, Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
