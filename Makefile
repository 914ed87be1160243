# On a fresh machine with Python >= 3.11, `make demo` and `make test` are enough; both make the environment first.
# `make test PYTHON=python3.12` uses that Python, with its own environment folder.

# On a machine without a GPU, some package indexes offer a small CPU build of this version, others a CUDA build of several GB.
# To choose another build: make test TORCH="torch==2.12.1", or TORCH=path/to/a.whl
TORCH ?= torch==2.13.0
JOBS ?= 2
PYTEST_FLAGS ?=
# The files that a target of tests runs, if not all of its own: .ci/run names those that a change reaches.
TESTS ?=
PYTEST := "pytest>=9,<10" "pytest-timeout>=2.3,<3"

export PYTHON
ENVIRONMENT := tools/environment.sh
VERSION := $(if $(PYTHON),$(shell $(ENVIRONMENT) version $(PYTHON)),3.11+)
VENV ?= $(if $(PYTHON),.venv-$(VERSION),.venv)
# The second stack that the tests pass on: the newest JAX with the CUDA plugin, even if there is no GPU.
JAX_3.12 := jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2
JAX := $(if $(PYTHON),$(JAX_$(VERSION)))

# torch-xla works only with its own version of torch, so it has a separate environment.
XLA_VENV ?= .venv-xla
TORCH_XLA ?= torch-xla==2.9.0
# torch-tpu must not be installed in the other environments, where torch would load it at every import.
TORCH_TPU_VENV ?= .venv-torch-tpu

# The libraries that ring_attn.integrations is tried with, the newest first; older transformers lie in folders of their own, in front
# of the newest by PYTHONPATH, with the packages that they need in another version. setup.py's bounds are those tried here.
INTEGRATIONS_VENV ?= .venv-integrations
INTEGRATIONS := transformers==5.23.0 accelerate==1.15.0 trl==1.16.0 datasets==4.7.0 diffusers==0.42.1 flax==0.12.8 equinox==0.13.8 \
	torchtitan==0.3.0
OLDER_TRANSFORMERS := 4.53.0 4.57.6
BESIDE_4.53.0 := tokenizers==0.21.4 huggingface_hub==0.36.2
BESIDE_4.57.6 := tokenizers==0.22.2 huggingface_hub==0.36.2

PACKAGE_VENV ?= .venv-package
DOCS_VENV ?= .venv-docs
DOCS := "mkdocs-material>=9.6,<10" "mkdocs>=1.6,<2" "mkdocstrings[python]>=1,<2" "ruff>=0.17,<0.18"

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU_COMPILER := $(VENV)/gpu-compiler
# flash-attn-4 and NVIDIA's DSL, as setup.py pins them. A folder outside the environment's packages reads no .pth files, hence the path.
CUTE_DSL := $(GPU_COMPILER)/nvidia_cutlass_dsl/dsl_packages
FLASH_ATTN_4 := flash-attn-4==4.0.0b36 quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 "einops>=0.8,<1" "cuda-bindings>=13,<14" \
	"cuda-pathfinder>=1.3,<2" $(addsuffix ==4.8.1,nvidia-cutlass-dsl $(addprefix nvidia-cutlass-dsl-libs-,base core cu13))
# That of torch 2.11 on GPUs. It refuses constants that newer ones take.
OLDEST_TRITON := $(VENV)/oldest-triton
TPU_COMPILER := $(VENV)/tpu-compiler

OLDER_TRANSFORMERS_AT := $(OLDER_TRANSFORMERS:%=$(INTEGRATIONS_VENV)/transformers-%)

.PHONY: demo test test-cpu test-triton test-fast test-gpu test-gpu-aot test-oldest-triton test-tpu xla test-xla torch-tpu test-torch-tpu integrations test-integrations lint \
	format types examples examples-integrations docs docs-serve package env clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/python examples/train_lm.py

test: test-cpu test-triton

test-cpu: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS) $(PYTEST_FLAGS)

test-triton: $(STAMP)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) tests/jax_core/kernels/test_triton.py \
		tests/torch_bridge/attention/test_decoding.py tests/ring_attn/test_sums.py \
		tests/ring_attn/test_passes.py tests/jax_core/kernels/test_kernel_bounds.py $(PYTEST_FLAGS)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(TESTS) $(PYTEST_FLAGS)

# The ring as XLA schedules it for eight GPUs, compiled on a machine without any (Linux only). With PYTHON=python3.12 by the XLA that GPUs
# run: the second stack's. The first is older.
test-gpu-aot: $(GPU_COMPILER)/.installed
	PYTHONPATH=$(GPU_COMPILER):$(CUTE_DSL) JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TRITON_INTERPRET=0 RING_ATTN_CACHE_OF_TESTS=$(or $(RING_ATTN_PROGRAMS_OF_TESTS),$(CURDIR)/$(GPU_COMPILER))/kernels \
		$(BIN)/python -m pytest -n $(JOBS) tests/jax_core/strategies/test_gpu_program.py $(PYTEST_FLAGS)

# Triton's kernels alone, by the oldest Triton.
test-oldest-triton: $(OLDEST_TRITON)/.installed
	PYTHONPATH=$(OLDEST_TRITON) TRITON_INTERPRET=0 $(BIN)/python -m pytest -n $(JOBS) tests/jax_core/kernels/test_triton_compiles.py $(PYTEST_FLAGS)

# The ring as the TPU compiler schedules it, compiled on a machine without a TPU (Linux only).
test-tpu: $(TPU_COMPILER)/.installed
	PYTHONPATH=$(TPU_COMPILER) $(BIN)/python -m pytest -n $(JOBS) \
		tests/jax_core/strategies/test_tpu_program.py tests/jax_core/strategies/test_fused_ring.py -k "tpu or compiles" $(PYTEST_FLAGS)

# On a machine with GPUs and its own PyTorch, JAX and jax-triton; PYTHON names the interpreter that has them. All GPUs take part, and
# what is left out (for too few of them, or a kernel that cannot be called) is said at the end. In four parts:
# make test-gpu PART=1/4 and so on; but for the second, which counts memory, GPU_JOBS=4 runs four tests at a time.
# RANKS=4: that many ranks share the GPUs that there are (tests/gpu/shared.py).
# LIMIT=300: a job that is not done after so many seconds is ended, and says where it was (tests/gpu/jobs.py).
test-gpu:
	JAX_PLATFORMS=cuda,cpu $(or $(PYTHON),python3) -m pytest -p no:benchmark -m gpu -ra tests/gpu $(if $(PART),--part $(PART)) \
		$(if $(GPU_JOBS),-n $(GPU_JOBS)) $(PYTEST_FLAGS)

# The TorchTPU path without a TPU, in its own environment (Python 3.12, Linux only).
test-torch-tpu: torch-tpu
	$(TORCH_TPU_VENV)/bin/python -m pytest tests/torch_bridge/backends/test_torch_tpu.py $(PYTEST_FLAGS)

torch-tpu: $(TORCH_TPU_VENV)/.installed

# The torch-xla path: its environment (Python 3.11; 7.5 GB, mostly CUDA libraries that this torch loads), and its tests on
# four CPU devices. On a TPU VM: make xla TORCH_XLA="torch-xla[tpu]==2.9.0"
xla: $(XLA_VENV)/.installed

test-xla: $(XLA_VENV)/.installed
	PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 XLA_FLAGS="--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0" \
		$(XLA_VENV)/bin/python -m pytest tests/torch_bridge/backends/test_torch_xla.py $(PYTEST_FLAGS)

# transformers, accelerate, TRL, diffusers, flax, equinox and torchtitan in an environment of their own (3.5 GB); the tests of
# transformers' models on rings of one and two also with its older releases.
integrations: $(INTEGRATIONS_VENV)/.installed

TRANSFORMERS_TESTS := tests/integrations/test_transformers.py
README_TESTS := tests/integrations/test_readme.py
test-integrations: $(INTEGRATIONS_VENV)/.installed $(OLDER_TRANSFORMERS_AT:%=%/.installed)
	$(INTEGRATIONS_VENV)/bin/python -m pytest -n $(JOBS) --dist loadgroup $(or $(TESTS),tests/integrations) $(PYTEST_FLAGS)
	for older in $(if $(filter $(or $(TESTS),$(README_TESTS)),$(TRANSFORMERS_TESTS) $(README_TESTS)),$(OLDER_TRANSFORMERS_AT)); do \
		PYTHONPATH=$(CURDIR)/$$older $(INTEGRATIONS_VENV)/bin/python -m pytest -n $(JOBS) $(TRANSFORMERS_TESTS) \
			$(README_TESTS)::test_a_program_prints_what_the_page_says \
			--deselect "$(TRANSFORMERS_TESTS)::test_families_over_a_ring[4]" $(PYTEST_FLAGS) || exit 1; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

# All examples, the demo at a small size that only shows that it runs; `make demo` is the full one.
examples: $(STAMP)
	$(BIN)/python examples/jax_native.py
	$(BIN)/python examples/jax_hybrid.py --steps 3
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/torch_minimal.py
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		examples/train_on_tpu.py --device cpu --context 1022 --steps 2
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		examples/pretrain_fsdp2.py --cp 2 --context 254 --steps 2
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		examples/generate.py --prompt 1023 --new 16
	$(BIN)/python examples/train_lm.py --context 1022 --steps 3 --output demo_output/small

examples-integrations: $(INTEGRATIONS_VENV)/.installed
	for example in finetune_transformers packed_sft long_context; do \
		OMP_NUM_THREADS=1 $(INTEGRATIONS_VENV)/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
			examples/$$example.py --context 255 --steps 2 || exit 1; \
	done

# The site, with every link checked: site/index.html. docs-serve shows it while pages are written.
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict

docs-serve: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve

# Builds the package, its CITATION.cff validated, and tries it away from this repository. RESOLVE=1: pip finds releases for every extra, too.
package: $(PACKAGE_VENV)/.installed $(STAMP)
	rm -rf build/package
	$(PACKAGE_VENV)/bin/cffconvert --validate
	$(PACKAGE_VENV)/bin/python -m build --quiet --outdir build/package .
	$(PACKAGE_VENV)/bin/python -m twine check --strict build/package/*
	$(BIN)/python tools/try_package.py build/package $(if $(RESOLVE),--resolve)

env: $(STAMP)

$(STAMP): setup.py $(ENVIRONMENT)
	$(ENVIRONMENT) make $(VENV) $(VERSION) -- "$(TORCH)" -- --editable ".[dev]" $(JAX)

# torch-xla 2.9 has wheels up to Python 3.13; only 3.11 was tested.
$(XLA_VENV)/.installed: setup.py $(ENVIRONMENT)
	$(ENVIRONMENT) make $(XLA_VENV) 3.11 -- torch==2.9.0 "$(TORCH_XLA)" "jax>=0.10,<0.11" "numpy>=2,<3" $(PYTEST) -- --no-deps --editable .

$(TORCH_TPU_VENV)/.installed: setup.py $(ENVIRONMENT)
	$(ENVIRONMENT) make $(TORCH_TPU_VENV) 3.12 -- "$(TORCH)" -- --editable ".[torch-tpu]" $(PYTEST)

# It reads the sources and imports nothing of them.
$(DOCS_VENV)/.installed: $(ENVIRONMENT)
	$(ENVIRONMENT) make $(DOCS_VENV) $(VERSION) -- $(DOCS)

$(PACKAGE_VENV)/.installed: Makefile $(ENVIRONMENT)
	$(ENVIRONMENT) make $(PACKAGE_VENV) $(VERSION) -- "build>=1.3,<2" "twine>=6,<7" "cffconvert>=2,<3"

$(INTEGRATIONS_VENV)/.installed: setup.py $(ENVIRONMENT)
	$(ENVIRONMENT) make $(INTEGRATIONS_VENV) $(VERSION) -- "$(TORCH)" -- --editable ".[dev]" $(JAX) $(INTEGRATIONS)

$(INTEGRATIONS_VENV)/transformers-%/.installed: $(INTEGRATIONS_VENV)/.installed
	rm -rf $(@D)
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) transformers==$* $(BESIDE_$*)
	@touch $@

# XLA's compiler for GPUs and flash-attn-4 with its own (230 MB to download). It is installed outside the environment's packages: otherwise every program that
# starts JAX would look for CUDA and print a traceback if there is none.
$(GPU_COMPILER)/.installed: $(STAMP)
	rm -rf $(GPU_COMPILER)
	version=$$($(BIN)/python -c "import importlib.metadata as m; print(m.version('jax'))") && \
	$(BIN)/python -m pip install --quiet --no-deps --target $(GPU_COMPILER) \
		"jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" "jax-triton>=0.3.1,<0.5" "absl-py>=2,<3" $(FLASH_ATTN_4)
	@touch $@

$(OLDEST_TRITON)/.installed: $(STAMP)
	rm -rf $(OLDEST_TRITON)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLDEST_TRITON) triton==3.6.0
	@touch $@

# The TPU compiler (684 MB to download), outside the environment's packages for the same reason; this release matches jax 0.10.2.
$(TPU_COMPILER)/.installed: $(STAMP)
	rm -rf $(TPU_COMPILER)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TPU_COMPILER) "libtpu==0.0.42.*"
	@touch $@

clean:
	rm -rf $(VENV) $(wildcard .venv-3.*) $(XLA_VENV) $(TORCH_TPU_VENV) $(INTEGRATIONS_VENV) demo_output build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis $(DOCS_VENV) $(PACKAGE_VENV) site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
