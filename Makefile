# make demo    a small GPT on eight devices in this one process, beside one device
# make tutorials    the four tutorial networks, likewise
# make test    the test suite, on all cores;  make test ARGS="-k layout -x"  hands arguments to pytest
# make docs    the documentation site, from docs/ into build/docs
# make lint    ruff's format and rules, the layers of the package, and its types;  make format  mends what ruff can
# make venv    the environment, made once, brought up to date when pyproject.toml changes
# make clean   removes what runs leave behind;  make distclean  the environments too

# TORCH is what pip installs before the package itself, and PYTHON makes the environment. The default has .venv; every
# other TORCH has an environment of its own: make test TORCH=torch (the newest) has .venv-torch, and
# make test TORCH="torch==2.9.0" has .venv-torch-2.9.0. Whatever is installed later leaves torch as it is.
DEFAULT := torch==2.13.0
PYTHON  ?= python3
TORCH   ?= $(DEFAULT)
ARGS    ?=
# Half as many processes again as there are cores: some tests wait for workers, and their cores are free meanwhile.
CORES   := $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell expr $(CORES) + $(CORES) / 2)

VENV  := .venv$(if $(filter-out $(DEFAULT),$(TORCH)),-$(shell printf %s '$(TORCH)' | tr -cs 'A-Za-z0-9._' '-'))
STAMP := $(VENV)/.shardwright-installed
HELD  := $(VENV)/torch.txt
# Types are those of the default torch and of a numpy for Python 3.11 or newer: others declare some of their own functions
# otherwise. On Python 3.10 mypy also takes `x[(*a, b)]` for an error.
OLDER := $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 11))'
TYPES := $(if $(filter $(DEFAULT),$(TORCH)),$(OLDER) || $(VENV)/bin/mypy --no-error-summary,true)
PIP   := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq

.PHONY: demo tutorials test docs lint format venv clean distclean

demo: venv
	@$(VENV)/bin/python examples/demo.py

tutorials: venv
	@$(VENV)/bin/python examples/tutorials.py

test: lint
	@$(VENV)/bin/python -m pytest tests -n $(WORKERS) --dist loadfile --disable-warnings $(ARGS)

docs: venv
	@$(VENV)/bin/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs build/docs
	@echo "build/docs/index.html"

lint: venv
	@$(VENV)/bin/ruff format --quiet --check . && $(VENV)/bin/ruff check --quiet . && $(VENV)/bin/lint-imports >/dev/null \
	    || { $(VENV)/bin/lint-imports | tail -n 30; echo "make lint: see above; make format mends most of it" >&2; exit 1; }
	@$(TYPES)

format: venv
	@$(VENV)/bin/ruff check --quiet --fix . ; $(VENV)/bin/ruff format --quiet .

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	    || { echo "Shardwright needs Python 3.10 or newer: '$(PYTHON)' is not (make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	    || { echo "'$(PYTHON)' lacks venv: install it (on Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "$(VENV): making the environment (some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@echo "$(VENV): installing $(TORCH)"
	@$(PIP) "$(TORCH)" || { test '$(TORCH)' = '$(DEFAULT)' && $(PIP) --editable . \
	    && echo "$(VENV): no $(TORCH) to be had here, so the newest that pyproject.toml allows" >&2; }
	@$(VENV)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(HELD)
	@echo "$(VENV): installing shardwright and its test and example requirements, with $$(cat $(HELD))"
	@$(PIP) --constraint $(HELD) --editable '.[test,examples]'
	@$(VENV)/bin/python -c 'import torchao' >/dev/null 2>&1 || { $(VENV)/bin/python -m pip uninstall -qqy torchao; \
	    echo "$(VENV): torchao does not run on $$(cat $(HELD)): it is removed, and its tests are skipped"; }
	@$(VENV)/bin/python -c 'import torchvision' >/dev/null 2>&1 || { \
	    folder=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	    && cp tests/support/torchvision_operators.py "$$folder" && echo 'import torchvision_operators' >"$$folder/torchvision_operators.pth" \
	    && { $(VENV)/bin/python -c 'import torchvision' >/dev/null 2>&1 \
	        && echo "$(VENV): torchvision was built for another torch than $$(cat $(HELD)): its own operators (nms) have names here, and do not run" \
	        || { rm "$$folder"/torchvision_operators.*; echo "$(VENV): torchvision cannot be imported: shardwright doctor says why"; }; }; }
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .hypothesis log_output rank_*
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
