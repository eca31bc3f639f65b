PYTHON ?= python3
BIN := .venv/bin
# Where `make proto` puts the stubs; the test that compares them names another place.
STUBS ?= proto

.DELETE_ON_ERROR:

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile

.PHONY: venv
venv: .venv/installed ## Install everything into .venv, as pinned in constraints.txt

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install -c constraints.txt -e '.[worker,cuda,otel,dev]'
	touch $@

# Programs that tests start, each from Debian's package of its name.
PROGRAMS := prometheus chromium

.PHONY: programs
programs: ## Install the programs that tests start, where this runs as root on Debian
	.ci/programs $(PROGRAMS)

.PHONY: demo
demo: venv ## Serve the embedded model, ask it things, and show what the cache saved
	$(BIN)/python demo/demo.py

.PHONY: check
check: venv ## Lint, formatting, types, import walls
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .typing/prefixgate/* tests $(wildcard benchmarks/*.py demo/*.py)
	$(BIN)/lint-imports

.PHONY: test
test: venv programs check ## The checks and all tests
	$(BIN)/pytest --numprocesses=logical --maxprocesses=4 --dist=loadfile

.PHONY: soak
soak: venv programs ## The tests with their full counts; takes long
	PREFIXGATE_SOAK=1 $(BIN)/pytest --timeout=3600

.PHONY: cudastack
cudastack: ## Install constraints-cuda.txt into a fresh environment and run the tests on it; 7 GB
	rm -rf .cache/cudastack
	.ci/cuda-stack .cache/cudastack

# Where there is a card there may be no .venv, and nothing to make one from.
GPU_PYTHON ?= $(if $(wildcard .venv/installed),.venv/bin/python,python3)

.PHONY: gpu-check
gpu-check: ## Try and measure a CUDA device, in under eight minutes; figures in build/gpu.json
	$(GPU_PYTHON) benchmarks/gpu.py --json build/gpu.json

.PHONY: proto
proto: venv ## Make the Python stubs from the .proto files
	rm -rf build/stubs && mkdir -p build/stubs
	$(BIN)/python -m grpc_tools.protoc -Iprefixgate/proto=proto \
		--python_out=build/stubs --pyi_out=build/stubs proto/*.proto
	$(BIN)/python -m grpc_tools.protoc -Iprefixgate/proto=proto \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--grpc_python_out=build/stubs --mypy_grpc_out=build/stubs proto/gateway.proto proto/worker.proto
	cp build/stubs/prefixgate/proto/* $(STUBS)/

.PHONY: reference
reference: venv ## Write docs/configuration.md from the settings, and docs/api.md from the protocol
	$(BIN)/python -m prefixgate.gateway.reference > docs/configuration.md
	$(BIN)/python -m tests.project.api_page > docs/api.md

.PHONY: pictures
pictures: venv programs ## Take the pictures of the status page anew, docs/images/status-*.png
	$(BIN)/python -m tests.project.status_pictures

.PHONY: clean
clean: ## Remove all that make made, the environment and the converted model too
	rm -rf .venv .cache build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
