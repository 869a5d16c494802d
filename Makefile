# `make demo` and `make test` do all set-up by themselves; everything lands in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two processes, a file at a time in one of them, slow ones first (tests/conftest.py).
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo serve test check soak wheel bench eval docs format clean

demo: $(STAMP)
	$(BIN)/longtake generate "a red ball bouncing over a green meadow" --seconds 5 --seed 7 -o demo.mp4
	@echo "demo.mp4 is in $(CURDIR)"

# Everything on this machine; SERVE="--port 9000 --data DIR" and the like.
serve: $(STAMP)
	@exec $(BIN)/longtake serve $(SERVE)

test: $(STAMP)
	$(PYTEST)

check: $(STAMP) wheel
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m longtake.video.capabilities --check docs/capabilities.md
	$(BIN)/python -m longtake.settings --check docs/settings.md
	$(BIN)/python -m longtake.api.openapi --check docs/openapi.json
	$(PYTEST)

# The long forms of the tests that kill, count and try at random, one after another.
soak: $(STAMP)
	LONGTAKE_SOAK=1 LONGTAKE_SOAK_JOBS=60 LONGTAKE_SOAK_KINDS=sqlite,postgresql \
		LONGTAKE_SOAK_MEMORY_JOBS=200 $(BIN)/pytest tests/soak -s
	LONGTAKE_PARALLEL_SHAPES=1000 $(BIN)/pytest tests/video/test_parallel.py -k random --timeout 0

# The installed package, not the clone, must hold the model and run from any folder.
wheel: $(STAMP)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m zipfile -e build/wheel/longtake-*.whl build/wheel/unpacked
	cd / && PYTHONPATH="$(CURDIR)/build/wheel/unpacked" "$(CURDIR)/$(BIN)/python" -m longtake \
		plan "a red ball" --json > /dev/null

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Quality of the bundled model; QUICK=1 makes 24 videos in place of 120.
eval: $(STAMP)
	@$(BIN)/python -m training.papercut.evaluate $(if $(QUICK),--quick)

docs: $(STAMP)
	$(BIN)/python -m longtake.video.capabilities --write docs/capabilities.md
	$(BIN)/python -m longtake.settings --write docs/settings.md
	$(BIN)/python -m longtake.api.openapi --write docs/openapi.json

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo.mp4 demo.json build dist *.egg-info

# A torch that is in .venv already (a GPU owner installs it first) is kept if it fits.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
