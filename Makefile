# make demo   install, train a model on MovieLens, evaluate it, write a report
# make test   install what tests need, then lint, native tests under sanitizers, Python tests
# make bench  side-by-side speed against other libraries    make soak  slow tests
# make test-gpu  tests of the cuda engine on a GPU         make bench-gpu  its speed
# make native-module  the native module for another version of Python (NATIVE_PYTHON)
# make wheels sdist and wheels in dist/, each tested in a clean environment    make test-aarch64  native code for ARM
# make lint   ruff and mypy                                 make docs  the documentation as pages
# make test-integrations  Lightning, accelerate, TorchRec and clients of other serving systems, which it installs
# make protos descriptor sets from the .proto files

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
NATIVE := CMakeLists.txt $(wildcard native/*.* native/optimizers/*)

# ccache, if it is installed, keeps what was compiled: another clone of the same sources compiles nothing.
export CMAKE_CXX_COMPILER_LAUNCHER := $(shell command -v ccache)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

# A run that hangs is killed: pytest-timeout (pyproject.toml) ends the process of a test that runs too long,
# pytest-xdist stops when a worker is lost, and `timeout` ends everything else.
PYTEST := timeout --kill-after=30 3000 $(BIN)/python -m pytest

.PHONY: demo test test-python test-native test-aarch64 test-integrations test-gpu check-gpu-memory bench-gpu native-module lint bench soak protos docs wheels clean

demo: $(VENV)/installed
	$(BIN)/megalith train --data movielens --run runs/demo --start-over --fallback --device auto \
	  --comparison benchmarks/results/quality.json

# The quickest answer first: unit tests, which begin the Python tests.
test: test-python lint test-native

test-python: $(VENV)/dev
	$(PYTEST) -m "not soak" -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --ignore tests/integrations --durations 10

# On a machine with a GPU, offline: GPU_PYTHON is a Python with torch, triton, pytest and hypothesis. The native
# module is not needed. GPU_OPTIONS: see tests/gpu_parts.py, for example GPU_OPTIONS="--parts ops,ranks".
GPU_PYTHON ?= python3
GPU_OPTIONS ?=
test-gpu:
	PYTHONPATH=src:. $(GPU_PYTHON) tests/gpu_parts.py $(GPU_OPTIONS)

# Memory errors and races in every kernel; compute-sanitizer comes with the CUDA toolkit.
check-gpu-memory:
	PYTHONPATH=src:. $(GPU_PYTHON) tests/gpu_parts.py --memory $(GPU_OPTIONS)

# The native module for another version of Python, that of the machine with a GPU: there the cuda engine is then
# compared with the cpu engine too. The module is in src/megalith; take it along.
NATIVE_PYTHON ?= python3.12
native-module: $(VENV)/build-tools
	PYTHONPATH=$$($(BIN)/python -c 'import nanobind, pathlib; print(pathlib.Path(nanobind.__file__).parents[1])') \
	$(BIN)/cmake -S . -B build/native-module -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython_EXECUTABLE=$$(command -v $(NATIVE_PYTHON))
	$(BIN)/cmake --build build/native-module
	cp build/native-module/native/_native.*.so src/megalith/

bench-gpu:
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/table_gpu.py $(GPU_OPTIONS)
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/mixed_dims_gpu.py
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/published_gpu.py

test-integrations: $(VENV)/integrations build/clients/created
	$(PYTEST) tests/integrations

# The native core on its own, once for memory and undefined behaviour, once for data races.
test-native: build/address,undefined/tested build/thread/tested

build/%/tested: $(NATIVE) $(wildcard native/tests/*) $(VENV)/dev
	$(BIN)/cmake -S . -B build/$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DMEGALITH_PYTHON=OFF -DMEGALITH_TESTS=ON -DMEGALITH_SANITIZE=$*
	$(BIN)/cmake --build build/$*
	$(BIN)/ctest --test-dir build/$* --output-on-failure --parallel 2
	@touch $@

# The native core for ARM, compiled by Debian's cross-compiler and run by an emulator.
test-aarch64:
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && command -v cmake >/dev/null \
	  || (apt-get update && apt-get install -y --no-install-recommends g++-aarch64-linux-gnu qemu-user cmake make)
	cmake -S . -B build/aarch64 -DMEGALITH_PYTHON=OFF -DMEGALITH_TESTS=ON -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_CROSSCOMPILING_EMULATOR='qemu-aarch64;-L;/usr/aarch64-linux-gnu'
	cmake --build build/aarch64
	MEGALITH_EMULATED=1 ctest --test-dir build/aarch64 --output-on-failure --timeout 600

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/bench
	$(BIN)/megalith bench all

soak: $(VENV)/dev
	$(BIN)/python -m pytest -m soak
	MEGALITH_EXAMPLES=explore $(BIN)/python -m pytest -m "hypothesis and not soak"

# Compiles the .proto files of each package to one descriptor set. The compiler stays out of the project's
# environment; code of grpcio-tools 1.81.1 works with protobuf 6.33.5 up to 8.
PROTOS := src/megalith/serving/proto src/megalith/compat/monolith/proto

protos: build/protoc/created
	for folder in $(PROTOS); do (cd $$folder && files=$$(find . -name '*.proto' -printf '%P\n' | sort) \
	  && $(abspath build/protoc)/bin/python -m grpc_tools.protoc -I. --include_imports \
	    --descriptor_set_out=descriptors.binpb $$files \
	  && sha256sum descriptors.binpb $$files > descriptors.sha256) || exit 1; done

build/protoc/created:
	$(PYTHON) -m venv build/protoc
	build/protoc/bin/pip install -q grpcio-tools==1.81.1
	@touch $@

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

# Built with the compiler of ziglang, which links against an old glibc; aarch64 is tested as C++ under qemu.
wheels:
	$(PYTHON) release/build_wheels.py --output dist

clean:
	rm -rf build site dist $(VENV)

# ---- installs; each file under .venv stands for a step done

# A Debian Python without venv or headers gets them from apt.
$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11") \
	  if sys.version_info < (3, 11) else 0'
	@$(PYTHON) -c 'import ensurepip, os, sysconfig; \
	  assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null \
	  || (apt-get update && apt-get install -y --no-install-recommends python3-venv python3-dev)
	@command -v c++ >/dev/null || (apt-get update && apt-get install -y --no-install-recommends g++)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/build-tools: $(VENV)/created constraints.txt
	$(BIN)/pip install -q -c constraints.txt torch numpy scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/installed: $(VENV)/build-tools pyproject.toml $(NATIVE)
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e .
	@touch $@

# The report is rendered in a real browser; discovery is tested with a real ZooKeeper.
$(VENV)/dev: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt pytest pytest-xdist pytest-timeout hypothesis safetensors ruff mypy \
	  pyarrow pandas polars tensorboard obstore \
	  'moto[s3]' flask flask-cors protobuf kazoo ray \
	  grpcio grpcio-health-checking grpcio-reflection prometheus-client starlette uvicorn uvloop
	$(BIN)/pip install -q --no-deps triton==3.6.0  # its interpreter runs the kernels of the cuda engine
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || (apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core)
	@test -e /usr/share/java/zookeeper.jar && command -v java >/dev/null \
	  || (apt-get update && apt-get install -y --no-install-recommends zookeeper default-jre-headless)
	@touch $@

$(VENV)/integrations: $(VENV)/dev
	$(BIN)/pip install -q -c constraints.txt lightning accelerate wandb mlflow-skinny opentelemetry-sdk \
	  onnx onnxscript onnxruntime
	$(BIN)/pip install -q -c constraints.txt datasets torchdata
	$(BIN)/pip install -q -c constraints.txt nbclient ipykernel  # run the notebook
	$(BIN)/pip install -q -c constraints.txt fbgemm-gpu-cpu tensordict torchmetrics tqdm pyre-extensions iopath
	$(BIN)/pip install -q --no-deps torchrec==1.8.0  # it asks for fbgemm-gpu, the CUDA build
	$(BIN)/pip install -q -c constraints.txt check-jsonschema zizmor pre-commit  # lint the project's files
	@touch $@

# Clients of servers, in an environment of their own: they need another protobuf. tensorflow-serving-api asks for
# the package tensorflow, instead of tensorflow-cpu.
build/clients/created:
	$(PYTHON) -m venv build/clients
	build/clients/bin/pip install -q tensorflow-cpu==2.21.0 'tritonclient[grpc,http]==2.73.0' grpcio-reflection
	build/clients/bin/pip install -q --no-deps tensorflow-serving-api==2.21.0
	@touch $@

$(VENV)/bench: $(VENV)/installed benchmarks/requirements.txt
	$(BIN)/pip install -q -c constraints.txt -r benchmarks/requirements.txt
	$(BIN)/pip install -q --no-deps torchrec==1.8.0
	@touch $@

$(VENV)/docs: $(VENV)/installed docs/requirements.txt
	$(BIN)/pip install -q -r docs/requirements.txt
	@touch $@
