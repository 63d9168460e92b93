# Every target works on a fresh checkout: the first one that needs packages makes .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GEN_VENV := .venv-gen
PIP_FLAGS := --disable-pip-version-check -q

.PHONY: demo test check unit p4 gen bench modelcheck rounds storms campaign fuzz soak clean

demo: $(VENV)/ready
	$(BIN)/p4reduce demo

test: check unit

unit: $(VENV)/ready
	$(BIN)/python -m pytest -q

check: $(VENV)/ready $(GEN_VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/gen_constants.py --check
	$(BIN)/python tools/compile_p4.py --check
	$(BIN)/python tools/compile_test_programs.py --check
	$(GEN_VENV)/bin/python tools/gen_proto.py --check

# Needs p4c; says so when it is missing.
p4:
	$(PYTHON) tools/compile_p4.py

gen: $(GEN_VENV)/ready
	$(PYTHON) tools/gen_constants.py
	$(GEN_VENV)/bin/python tools/gen_proto.py

bench: $(VENV)/ready
	$(BIN)/python tools/bench.py

# Explores every order of events for small jobs on the compiled program; a quarter of an hour.
modelcheck: $(VENV)/ready
	$(BIN)/python tools/modelcheck.py

# A million simulated rounds with loss, duplication and reordering; half an hour on two cores.
rounds: $(VENV)/ready
	$(BIN)/python tools/campaign_sim.py

# Whole systems in virtual time, while controllers crash, switches restart and paths change; some minutes.
storms: $(VENV)/ready
	$(BIN)/python tools/cut_world.py

# Training jobs, each with a random fault at a random moment: SEED, RUNS, SWITCH=embedded|bmv2.
campaign: $(VENV)/ready
	$(BIN)/python tools/campaign_faults.py --seed $(or $(SEED),0) --runs $(or $(RUNS),200) --switch $(or $(SWITCH),embedded)

fuzz: $(VENV)/ready
	$(BIN)/python tools/fuzz.py --seconds $(or $(SECONDS),600)

soak: $(VENV)/ready
	$(BIN)/python tools/soak.py --seconds $(or $(SECONDS),3600)

clean:
	rm -rf $(VENV) $(GEN_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing p4reduce and its development tools into $(VENV) (some minutes the first time)"
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@

# The generator's protobuf is newer than the one p4runtime-shell pins, so it has an environment of its own.
$(GEN_VENV)/ready: tools/requirements-gen.txt
	$(PYTHON) -m venv $(GEN_VENV)
	$(GEN_VENV)/bin/pip install $(PIP_FLAGS) -r tools/requirements-gen.txt
	touch $@
