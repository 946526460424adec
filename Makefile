# Everything runs in .venv, made on first use with a Python of 3.11 or newer (PYTHON=… chooses another).

VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup
# The pinned files name every package with its hash: there is nothing to resolve, and Python compiles what it imports.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-compile
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command "make lock" $(LOCK)

.DEFAULT_GOAL := help
.PHONY: help run demo-cloud demo-gpus demo-slurm demo-dask demo-ray demo-progress login test test-slow test-nightly test-gpu mutations chaos load audit lint docs fmt lock bench screenshots messages clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.server ## start the server on http://127.0.0.1:8000; Ctrl-C stops it
	@exec $(BIN)/python manage.py up

demo-cloud: $(VENV)/.dev ## the same with a local stand-in for AWS: no network, no cost
	@exec $(BIN)/python tools/demo_cloud.py

demo-gpus: $(VENV)/.dev ## the same with eight simulated GPUs, some busy, some idle (needs gcc)
	@exec $(BIN)/python tools/demo_gpus.py

demo-slurm: $(VENV)/.dev ## the same with a Slurm cluster of two nodes (needs root and Debian's Slurm)
	@exec $(BIN)/python tools/demo_slurm.py

demo-dask: $(VENV)/.dev ## the same with a Dask cluster of two workers
	@exec $(BIN)/python tools/demo_dask.py

demo-ray: $(VENV)/.ray ## the same with a Ray cluster of one node
	@exec $(BIN)/python tools/demo_ray.py

demo-progress: $(VENV)/.dev ## the same with a run that reports half a million simulated tasks
	@exec $(BIN)/python tools/demo_progress.py

.env: ## the passwords of compose.yaml's PostgreSQL and Redis, if there are none yet
	@random() { od -An -tx1 -N24 /dev/urandom | tr -d ' \n'; }; postgres=$$(random); redis=$$(random); umask 077; \
	 printf '%s\n' "# Further settings: docs/settings.md. compose.yaml sets the two addresses itself." "POSTGRES_PASSWORD=$$postgres" "REDIS_PASSWORD=$$redis" \
	 "DATABASE_URL=postgresql://dstackweb:$$postgres@127.0.0.1:5432/dstackweb" \
	 "REDIS_URL=redis://:$$redis@127.0.0.1:6379/0" > $@

login: $(VENV)/.server ## print a fresh one-time sign-in link for the admin
	@$(BIN)/python manage.py login_link

# What fails beside other tests runs once more by itself, and is named as it did.
tests = { $(PYTEST) -m "$(1)" || \
 { [ $$? = 1 ] && $(BIN)/python -m pytest -q -rA --show-capture=no --last-failed --last-failed-no-failures=none -m "$(1)"; }; }
# Both sides run, even if the first fails.
define both_sides
@export DSTACKWEB_TEST_SIDE; \
 DSTACKWEB_TEST_SIDE=sqlite; $(call tests,$(1)); sqlite=$$?; \
 DSTACKWEB_TEST_SIDE=postgres; $(call tests,both_sides and ($(1))); postgres=$$?; \
 [ $$sqlite = 0 ] && [ $$postgres = 0 ]
endef

test: $(VENV)/.dev ## the quick tests on SQLite, then those of SQL, cache and broker on PostgreSQL with Redis
	$(call both_sides,not slow and not nightly and not gpu)

test-slow: $(VENV)/.dev ## tests with real processes, browsers and longer stories, on SQLite
	@export DSTACKWEB_TEST_SIDE=sqlite; $(call tests,slow and not nightly)

test-nightly: export DSTACKWEB_TEST_NIGHTLY = 1
test-nightly: $(VENV)/.ray ## all other tests, an hour of them: clusters, clouds, upgrades, chaos, more examples, slow ones on PostgreSQL
	$(call both_sides,nightly or deeper)

test-gpu: $(VENV)/.dev ## readings of this machine's GPU with and without load, what a poll costs, and runs on it
	@$(BIN)/python -m pytest -q -m gpu tests/gpu

mutations: $(VENV)/.dev ## break the core in a copy, and see whether the tests fail (takes long)
	@$(BIN)/python tools/mutations.py --jobs $(WORKERS)

chaos: $(VENV)/.dev ## kill, cut off and fill up parts of a deployment under load; RUNS=1000 MINUTES=10 SEED=…
	@$(BIN)/python -m tools.chaos

load: $(VENV)/.dev ## 500 open pages, 50 log tails, submits and reports of tasks on a real server for a minute
	@$(BIN)/python bench/load.py postgres

audit: $(BIN)/python ## look the pinned packages up in the public list of vulnerabilities (needs the network)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check pip-audit==2.10.1
	@$(BIN)/pip-audit --require-hashes --disable-pip --requirement requirements.txt

lint: $(VENV)/.dev ## ruff, djLint, mypy --strict, import contracts, missing migrations, outdated mutations
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@$(BIN)/djlint templates --check --quiet || $(BIN)/djlint templates --check
	@$(BIN)/djlint templates --lint --quiet
	@DSTACKWEB_HOME=$$(mktemp -d) $(BIN)/python manage.py makemigrations --check --dry-run
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/mutations.py --check

docs: $(VENV)/.docs ## the documentation as a site in build/docs; a broken link is an error
	@DSTACKWEB_LANGUAGE=en NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

fmt: $(VENV)/.dev ## format the code and the templates
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .
	@$(BIN)/djlint templates --reformat --quiet || true

# Keeps the versions that are pinned already. LOCK=--upgrade-package=django (or --upgrade) raises one (or all).
lock: $(BIN)/python ## pin what pyproject.toml asks for, with hashes, in requirements*.txt
	@$(INSTALL) -qq uv==0.13.8
	@$(COMPILE) pyproject.toml --extra server --output-file requirements.txt
	@$(COMPILE) --group dev --constraint requirements.txt --output-file requirements-dev.txt
	@$(COMPILE) --group docs --constraint requirements-dev.txt --constraint requirements.txt --output-file requirements-docs.txt
	@$(COMPILE) --group ray --constraint requirements-dev.txt --constraint requirements.txt --output-file requirements-ray.txt

bench: $(VENV)/.dev ## the benchmarks
	@for bench in bench/*.py; do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

screenshots: $(VENV)/.dev ## take the documentation's pictures of pages, in both themes (needs Chromium)
	@SCREENSHOTS_OF_DOCS=docs/images $(BIN)/python -m pytest -q tests/browser/test_screenshots.py

messages: $(VENV)/.dev ## bring the catalogues of translations up to date with the texts in the code (needs GNU gettext)
	@$(BIN)/python -m tools.messages
	@DSTACKWEB_LANGUAGE=en $(BIN)/python -m tools.cli_messages

clean: ## remove the virtual environment and caches; var/ (the database, logs, keys) stays
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@sh tools/venv $(VENV)

$(VENV)/.server: $(BIN)/python requirements.txt pyproject.toml
	@echo "Installing what the server needs, which takes about a minute …"
	@sh tools/install requirements.txt $(INSTALL)
	@$(INSTALL) -qq -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.server requirements-dev.txt
	@echo "Installing what the tests need …"
	@sh tools/install requirements-dev.txt $(INSTALL)
	@touch $@

$(VENV)/.docs: $(VENV)/.dev requirements-docs.txt
	@echo "Installing what makes the documentation's site …"
	@sh tools/install requirements-docs.txt $(INSTALL)
	@touch $@

$(VENV)/.ray: $(VENV)/.dev requirements-ray.txt
	@echo "Installing Ray …"
	@sh tools/install requirements-ray.txt $(INSTALL)
	@touch $@
