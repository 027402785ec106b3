# Every target creates the environment it needs. Variables that may be set on the command line:
#   PYTHON       interpreter for a new environment (default: the first Python >= 3.11 found)
#   VENV         where the environment lies (default .venv; one made by hand is used as it is)
#   PYTEST_ARGS  more arguments for pytest, e.g. PYTEST_ARGS="-x tests/routing"
#   FUZZ_INPUTS  how many damaged inputs `make fuzz` tries
#   KILLS        how many runs `make kill-test` kills
#   PYTHONS      interpreters that `make wheel` installs for (default: the environment's own)
#   DEVICELESS_ARGS  what to compile for an H200, e.g. DEVICELESS_ARGS="--num_tokens 1024 --rank 64"
VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=
FUZZ_INPUTS ?= 100000
KILLS ?= 20
PYTHONS ?=
DEVICELESS_ARGS ?=
ORACLES := tests/parity/requirements.txt
NOTEBOOKS := experiments/notebooks
PAGES := out/notebooks
CHECKED := run.py molora_jax pallas_kernels experiments

# The environment gets JAX for the CPU, so other platforms are not looked for: JAX stays quiet.
# Whoever installed the extra "cuda" runs `make demo JAX_PLATFORMS=cuda`.
JAX_PLATFORMS ?= cpu
export JAX_PLATFORMS

python := $(VENV)/bin/python
find_python := for candidate in $(PYTHON) $(if $(PYTHON),,python3 python3.11 python3.12 python3.13 python); do \
    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
      echo "$$candidate"; exit 0; fi; done; \
    echo "make: no Python >= 3.11 among: $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python)." \
      "Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1

# $(call install,ARGUMENTS): under the constraints, with uv where it is present (much faster). pip
# takes them from variables because older releases read only those for the build's own environment.
comma := ,
install = $(python) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { echo "make: $(VENV) has a Python older than 3.11; run 'make clean' first" >&2; exit 1; }; \
  echo "Installing $(1) into $(VENV)"; \
  if command -v uv >/dev/null; \
  then uv pip install --python $(python) -c constraints.txt --build-constraints constraints.txt $(1); \
  else PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    $(python) -m pip install --disable-pip-version-check --quiet $(1); fi

# Tests mostly wait for the compiler, which uses one core. A worker that crashes ends the run.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# What another Python or JAX may change: the maths and its programs, files, processes, command lines.
# Of many cases of the same programs these are some; experiments stand on them. The examples of
# test_public.py call all that is public.
VERSIONED := $(addprefix tests/,adapters display parallel generation/test_engine.py \
  $(addprefix models/test_,decoder.py export.py gguf.py lookup.py tokenizer.py weights.py) \
  $(addprefix routing/test_,reach.py routers.py select.py) $(addprefix serving/test_,clients.py command.py) \
  $(addprefix training/test_,checkpoint.py loop.py losses.py run_folder.py) \
  $(addprefix experiments/test_,launcher.py results.py settings.py) \
  pallas_kernels/test_kernels.py tools/test_main.py test_public.py test_run.py test_setup.py)

# markers of tests that need more than the extra "dev" installs
NEEDS_MORE := parity or gpu or deviceless

.PHONY: demo test test-versioned test-long kill-test fuzz parity deviceless notebooks wheel lint format constraints clean

demo: $(VENV)/.installed
	$(python) run.py --experiment=compose

test: $(VENV)/.installed-dev
	$(python) -m pytest $(PARALLEL) -m "not (long or $(NEEDS_MORE))" $(PYTEST_ARGS)

# The part of them for another Python: make test-versioned VENV=.venv-3.13 PYTHON=python3.13
test-versioned: $(VENV)/.installed-dev
	$(python) -m pytest $(PARALLEL) -m "not (long or model or browser or $(NEEDS_MORE))" $(VERSIONED) \
	  $(PYTEST_ARGS)

test-long: $(VENV)/.installed-dev
	$(python) -m pytest $(PARALLEL) -m "not ($(NEEDS_MORE))" $(PYTEST_ARGS)
	$(MAKE) fuzz
	$(MAKE) deviceless VENV=.venv-deviceless DEVICELESS_ARGS=--all

# Damaged, swapped and lying input of every kind; prints how many were refused and accepted.
fuzz: $(VENV)/.installed-dev
	$(python) -m tests.fuzz.run --inputs=$(FUZZ_INPUTS)

# Kills training at random moments, half of them while a checkpoint is written; all go on exactly.
kill-test: $(VENV)/.installed-dev
	$(python) -m tests.training.kill_and_resume --kills=$(KILLS)

# The two that install much more; give each an environment of its own: make parity VENV=.venv-parity
parity: $(VENV)/.installed-oracles
	$(python) -m pytest $(PARALLEL) -m parity $(PYTEST_ARGS)

deviceless: $(VENV)/.installed-deviceless
	$(python) -m pytest $(PARALLEL) --dist worksteal -m deviceless $(PYTEST_ARGS)
	$(python) -m pallas_kernels.deviceless $(DEVICELESS_ARGS)

# Runs the notebooks and writes them as pages into out/notebooks, with the packages of their own
# requirements.txt. `make notebooks MOLORA_SCALE=tiny` takes a minute, and its numbers mean nothing;
# NOTEBOOK=NAME runs one. MOLORA_BASE and MOLORA_ADAPTERS=PATH:PATH are a base and adapters of your own.
notebooks: $(VENV)/.installed-notebooks
	@mkdir -p $(PAGES)
	@ls $(NOTEBOOKS)/$(or $(NOTEBOOK),*).py >/dev/null 2>&1 || { echo "make: there is no notebook" \
	  "$(NOTEBOOK); there are: $(basename $(notdir $(wildcard $(NOTEBOOKS)/*.py)))" >&2; exit 1; }
	@set -e; for file in $(NOTEBOOKS)/$(or $(NOTEBOOK),*).py; do \
	  name=$$(basename $$file .py); echo "$$name"; \
	  MOLORA_OUT=$(CURDIR)/$(PAGES) $(python) -m jupytext --quiet --execute --run-path . \
	    --to ipynb --output $(PAGES)/$$name.ipynb $$file; \
	  $(python) -m nbconvert --to html --log-level WARN $(PAGES)/$$name.ipynb; done
	@echo "Written to $(PAGES)/*.html"

# Builds dist/ and checks what is in it; then installs the wheel alone into a fresh environment of each
# interpreter in PYTHONS, and uses `molora` there: make wheel PYTHONS="python3.11 python3.13"
wheel: $(VENV)/.installed-dev
	rm -rf dist
	$(python) -m uv build --quiet --build-constraints constraints.txt --out-dir dist
	$(python) -m tests.wheel dist $(PYTHONS)

lint: $(VENV)/.installed-dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy $(CHECKED)

format: $(VENV)/.installed-dev
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# Resolves constraints.txt anew around the JAX versions named in pyproject.toml. What is pinned stays
# unless it must move; `make constraints UPGRADE=--upgrade` takes the newest of everything.
constraints: $(VENV)/.installed-dev
	@printf '%s\n' hatchling editables | $(VENV)/bin/uv pip compile pyproject.toml - \
	  --universal --all-extras --python-version 3.11 --no-annotate --no-header --no-emit-index-url \
	  --quiet $(UPGRADE) --output-file constraints.txt >/dev/null
	@printf '%s\n' \
	  "# The exact versions that are tested, for pip and uv: Python 3.11 with JAX 0.10.2, Python 3.12" \
	  "# with JAX 0.11.2, Python 3.13 and later with JAX 0.12.0.1, told apart by markers." \
	  "# Made by \`make constraints\` from pyproject.toml; do not edit." | cat - constraints.txt >constraints.tmp
	@mv constraints.tmp constraints.txt

$(VENV)/pyvenv.cfg:
	@chosen="$$($(find_python))" && { "$$chosen" -m venv $(VENV) \
	  || uv venv --clear --seed --python "$$chosen" $(VENV); }

# Stamps: install once, and again when the requirements change.
$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@$(call install,-e .)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@$(call install,-e ".[dev]")
	@touch $(VENV)/.installed $@

$(VENV)/.installed-deviceless: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@$(call install,-e ".[dev$(comma)deviceless]")
	@touch $@

$(VENV)/.installed-notebooks: $(VENV)/.installed $(NOTEBOOKS)/requirements.txt
	@$(call install,-r $(NOTEBOOKS)/requirements.txt)
	@touch $@

# By pip alone, whose own settings say where a CPU build of torch lies (see the file).
$(VENV)/.installed-oracles: $(VENV)/.installed-dev $(ORACLES)
	PIP_CONSTRAINT=constraints.txt $(python) -m pip install --disable-pip-version-check --quiet -r $(ORACLES)
	@touch $@
