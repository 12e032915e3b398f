#!/usr/bin/env bash
# Builds, tests and measures the CUDA kernels on a machine with a GPU; nothing is downloaded.
#
#   bench/gpu_run.sh [STEP...]     build, test, bench (these three by default), sanitize
#
# CARRY  the folder that bench/gpu_carry.sh made (default build/carry); may be absent where the
#        libraries are installed
# BUILD  build folder (default build/gpu)
# OUT    where logs and JSON go (default BUILD/out)
# ARCH   CUDA architectures (default 90a-real: the H100's and H200's alone compile fastest)
set -euo pipefail
cd "$(dirname "$0")/.."

carry="$PWD/${CARRY:-build/carry}"
build="${BUILD:-build/gpu}"
out="${OUT:-$build/out}"
mkdir -p "$out"

configure() {
  local folder="$1"
  shift
  cmake -G Ninja -S . -B "$folder" --log-level=WARNING -DTIDE_BUILD_CUDA=ON \
    -DTIDE_BUILD_PYTHON=OFF -DTIDE_BUILD_TESTS=ON -DTIDE_BUILD_BENCH=ON \
    -DCMAKE_PREFIX_PATH="$carry/usr" -DCMAKE_LIBRARY_ARCHITECTURE="$(uname -m)-linux-gnu" \
    -DCMAKE_CUDA_ARCHITECTURES="${ARCH:-90a-real}" "$@"
}

build_step() {
  # One chain: in an `if`, a failing command does not end the function.
  configure "$build" && cmake --build "$build" --target \
    kernels_cuda_table_test kernels_cuda_cast_test kernels_cuda_sum_test \
    kernels_cuda_refresh_test cuda_kernels_bench
}

test_step() {
  local name status=0
  # Without a GPU the cases skip themselves, which must not pass here.
  nvidia-smi -L || return 1
  for name in table cast sum refresh; do
    "$build/tests/bin/kernels_cuda_${name}_test" --gtest_brief=1 \
      --gtest_output="json:$out/${name}_test.json" || status=1
  done
  return "$status"
}

bench_step() { "$build/bench/bin/cuda_kernels_bench" --json="$out/cuda_kernels.json"; }

# The cases that reach every branch without taking minutes under the tools. What racecheck needs is
# said in src/kernels/cuda/sum_bulk.cu.
sanitize_step() {
  local cases='*SmallSizes:*NeverAligned*:*EdgesOfTiles' status=0
  compute-sanitizer --tool memcheck --error-exitcode 1 "$build/tests/bin/kernels_cuda_sum_test" \
    --gtest_brief=1 --gtest_filter="$cases" || status=1
  compute-sanitizer --tool memcheck --error-exitcode 1 \
    "$build/tests/bin/kernels_cuda_refresh_test" --gtest_brief=1 || status=1
  configure "$build-racecheck" -DCMAKE_CUDA_FLAGS=-DTIDE_RACECHECK &&
    cmake --build "$build-racecheck" --target kernels_cuda_sum_test || return 1
  compute-sanitizer --tool racecheck --error-exitcode 1 \
    "$build-racecheck/tests/bin/kernels_cuda_sum_test" \
    --gtest_brief=1 --gtest_filter="$cases" || status=1
  return "$status"
}

[ $# -gt 0 ] || set -- build test bench
failed=()
for step in "$@"; do
  case "$step" in
    build | test | bench | sanitize) ;;
    *)
      echo "gpu_run: expected build, test, bench or sanitize, got '$step'" >&2
      exit 2
      ;;
  esac
  echo "gpu_run: $step"
  if ! ("${step}_step") 2>&1 | tee "$out/$step.log"; then
    failed+=("$step")
    # Nothing runs without the build; a failed test does not stop the bench.
    [ "$step" != build ] || break
  fi
done
[ "${#failed[@]}" -eq 0 ] || { echo "gpu_run: failed: ${failed[*]}" >&2; exit 1; }
