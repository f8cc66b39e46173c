# make demo    the four tutorial networks on eight devices in this one process, beside one device
# make test    the test suite, on all cores;  make test ARGS="-k layout -x"  hands arguments to pytest
# make venv    the environment in .venv, made once, brought up to date when pyproject.toml changes
# make clean   removes what runs leave behind;  make distclean  the environment too

# PYTHON makes the environment, TORCH is what pip installs before the package itself: TORCH=torch takes the newest
# build, and a build already inside the range of pyproject.toml is then kept. Both count only when .venv is made.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
ARGS   ?=

VENV  := .venv
STAMP := $(VENV)/.shardwright-installed
PIP   := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq

.PHONY: demo test venv clean distclean

demo: venv
	@$(VENV)/bin/python examples/demo.py

test: venv
	@$(VENV)/bin/python -m pytest tests -n auto --dist loadfile $(ARGS)

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	    || { echo "Shardwright needs Python 3.10 or newer: '$(PYTHON)' is not (make PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	    || { echo "'$(PYTHON)' lacks venv: install it (on Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "$(VENV): making the environment (some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@echo "$(VENV): installing $(TORCH)"
	@$(PIP) "$(TORCH)" \
	    || echo "$(VENV): no $(TORCH) to be had here, so the newest that pyproject.toml allows" >&2
	@echo "$(VENV): installing shardwright and its test and example requirements"
	@$(PIP) --editable '.[test,examples]'
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis log_output rank_*
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
