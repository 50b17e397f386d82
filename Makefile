# `make demo` and `make test` need nothing but Python 3.11 and a network for pip; each makes .venv if it is not there.
PYTHON ?= python3
BIN := .venv/bin

# Benchmarks that need no model, in the small; `make bench BENCH="gram kmeans" ARGS=` runs those two in their full size.
BENCH ?= factorize folding gram kmeans moefied packing
ARGS ?= --quick

.PHONY: demo test test-all test-vllm check bench league docs text clean

demo: .venv/ready
	$(BIN)/moetool demo

# Modules are compiled once, even where the environment forbids it: tests start processes, which would all do it again.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

test: .venv/ready
	$(TEST)

# Every parameter of every test, and longer fuzzing; `make test` takes a sample of both.
test-all: .venv/ready
	MOETOOL_TEST_DAMAGES=100 MOETOOL_TEST_KILLS=6 $(TEST) -m ''

# The plug-in in vLLM itself, on a processor, in an environment of its own of about 2 GB.
test-vllm:
	scripts/with_vllm.sh --tests

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy moetool

bench: .venv/ready
	@for name in $(BENCH); do echo "== $$name $(ARGS)"; $(BIN)/python scripts/benchmarks/$$name.py $(ARGS) || exit; done

# Other tools beside moetool in as many bytes: `make league TEXT=valid.txt TESTS=test.txt,other.txt`, in hours.
league: .venv/ready
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/league.sh $(TEXT) $(TESTS) $(MODELS)

# What is generated in docs/: the tables of options and of families, and the picture from committed results. Then all pages
# as a website in build/site; a broken link fails.
docs: .venv/ready
	$(BIN)/python scripts/docs/options.py
	$(BIN)/python scripts/docs/families.py
	$(BIN)/python scripts/docs/chart.py
	$(BIN)/python scripts/docs/site.py

# The calibration text that comes with the package, packed from scripts/text.
text: .venv/ready
	$(BIN)/python scripts/text/pack.py

# torch comes first and alone, pinned to the tested build, so that nothing else decides which one is taken.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache demo
