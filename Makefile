# The short names of everything a developer does here; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := build

PYTHON ?= python3
TORCH ?= torch>=2.13,<2.14
BUILD ?= build
BUILD_TYPE ?= RelWithDebInfo
WERROR ?= OFF
CUDA ?= AUTO
SANITIZE ?= address,undefined
JOBS ?= $(shell nproc)
TEST_ARGS ?=
export PYTHON TORCH BUILD JOBS CUDA

PY := .venv/bin/python
STORAGE := $(wildcard bindings/torch_storage.cc)
STORAGE_PY := $(wildcard python/tide/fsdp/storage.py)

CONFIGURE = cmake -G Ninja -S . -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DTIDE_BUILD_TESTS=ON \
	-DTIDE_WERROR=$(WERROR) -DTIDE_BUILD_CUDA=$(CUDA) -DPython_EXECUTABLE=$(CURDIR)/$(PY) \
	--log-level=WARNING

.PHONY: build setup configure module compile test test-all check sanitize lint format bench demo clean help

build: compile  ## install what is missing, compile everything (default)
ifneq ($(and $(STORAGE),$(STORAGE_PY)),)
build: $(BUILD)/torch_storage.stamp

# The one file that is compiled against torch; again when it, its loader or the venv changes.
$(BUILD)/torch_storage.stamp: $(STORAGE) $(STORAGE_PY) .venv/tide-setup.stamp | module
	@$(PY) -m tide.fsdp.storage --build >/dev/null
	@touch $@

.venv/tide-setup.stamp: | setup
endif

setup:  ## install Debian packages, .venv and Python packages if missing
	@scripts/setup.sh build

configure: setup
	@if [ ! -f $(BUILD)/build.ninja ] || [ "$$(cat $(BUILD)/configure.stamp)" != '$(CONFIGURE)' ]; \
	then $(CONFIGURE) -B $(BUILD) -DTIDE_BUILD_BENCH=OFF && echo '$(CONFIGURE)' >$(BUILD)/configure.stamp; fi

module: configure  # what Python needs, without tests
	@cmake --build $(BUILD) --parallel $(JOBS) --target _core

compile: configure
	@cmake --build $(BUILD) --parallel $(JOBS)

test: build  ## run every test; TEST_ARGS=word picks by name
	@$(PY) scripts/run_tests.py --build $(BUILD) $(TEST_ARGS)

test-all: build  ## run also the full products of options (hours)
	@$(PY) scripts/run_tests.py --build $(BUILD) --all --scale 20 $(TEST_ARGS)

check: build  ## run the fast tests only (under 3 minutes)
	@$(PY) scripts/run_tests.py --build $(BUILD) --fast $(TEST_ARGS)

sanitize: setup  ## run the C++ tests under SANITIZE=address,undefined (default) or thread
	@cmake -G Ninja -S . -B $(BUILD)/$(SANITIZE) -DTIDE_BUILD_TESTS=ON -DTIDE_BUILD_PYTHON=OFF \
		-DTIDE_SANITIZE=$(SANITIZE) -DTIDE_WERROR=$(WERROR) --log-level=WARNING
	@cmake --build $(BUILD)/$(SANITIZE) --parallel $(JOBS)
	@$(PY) scripts/run_tests.py --build $(BUILD)/$(SANITIZE) --cpp-only --scale 10 $(TEST_ARGS)

lint: compile  ## check format and style of C++ and Python
	@scripts/setup.sh lint
	@scripts/lint.sh

format: setup  ## repair format and style
	@scripts/setup.sh lint
	@scripts/lint.sh --fix

bench: build  ## compile and run the C++ micro-benchmarks, print the table of the bench
	@cmake -G Ninja -S . -B $(BUILD)/bench -DTIDE_BUILD_BENCH=ON -DTIDE_BUILD_TESTS=OFF \
		-DTIDE_BUILD_PYTHON=OFF -DTIDE_BUILD_CUDA=$(CUDA) --log-level=WARNING
	@cmake --build $(BUILD)/bench --parallel $(JOBS)
	@for binary in $$(find $(BUILD)/bench -name '*_bench' -type f -perm -u+x); do \
		"$$binary" $(BENCH_ARGS) || exit 1; done
	@[ ! -f python/tide/bench/__main__.py ] || $(PY) -m tide.bench

demo: module $(BUILD)/torch_storage.stamp  ## train a small model with and without TIDE; RANKS= STEPS= MODE= NODES= DEVICE=
	@if [ '$(DEVICE)' != cpu ] && nvidia-smi -L >/dev/null 2>&1; then \
		.venv/bin/tide nccl install --missing || true; fi
	@$(PY) -m tide.bench.demo $(if $(RANKS),--ranks $(RANKS)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(MODE),--mode $(MODE)) $(if $(NODES),--nodes $(NODES)) $(if $(DEVICE),--device $(DEVICE))

clean:  ## remove everything that was compiled; .venv stays
	rm -rf $(BUILD) python/tide/*.so

help:  ## this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /  make \1\t/' | expand -t 18
	@echo "Variables: PYTHON TORCH BUILD BUILD_TYPE WERROR CUDA JOBS TEST_ARGS BENCH_ARGS"
