#!/usr/bin/env bash
# Checks the collectives on the GPUs of this machine, then runs every bench, one after the other,
# within LIMIT seconds. What fails or takes too long does not stop the others.
#
#   bench/gpus.sh [PATTERN]    only what has PATTERN in its name: check, llama, train, parity, ...
#
# PYTHON  an interpreter with torch for CUDA (default .venv/bin/python, else python3); tide is
#         taken from this checkout, where python/tide/_core*.so must have been built for it
# OUT     where JSON and logs go (default build/out)
# LIMIT   seconds for everything (default 570)
# RANKS   processes (default: one a GPU, at least 2)
# TESTS   where nccl_gpu_test lies, for the checks (default build/tests/bin)
set -uo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
out="${OUT:-build/out}"
pattern="${1:-}"
deadline=$((SECONDS + ${LIMIT:-570}))
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}"

# As the user allows, else all.
IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index \
  --format=csv,noheader 2>/dev/null | paste -sd,)}"
gpus="${#visible[@]}"
if [ "$gpus" -eq 0 ]; then
  echo "gpus: expected nvidia-smi to list at least one GPU, it listed none" >&2
  exit 1
fi
"$python" -c 'import tide._core, torch' || {
  echo "gpus: $python cannot import torch and tide: set PYTHON, and build _core for it" >&2
  exit 1
}
ranks="${RANKS:-$((gpus > 1 ? gpus : 2))}"
mkdir -p "$out"
echo "gpus: $gpus GPUs, $ranks ranks, results in $out"

failed=()

# name, seconds at most, then a command.
step() {
  local name="$1" limit="$2" left=$((deadline - SECONDS)) start=$SECONDS status
  shift 2
  [[ "$name" == *"$pattern"* ]] || return 0
  if [ "$left" -lt 10 ]; then
    failed+=("$name (no time left)")
    return
  fi
  # Ends the ranks, too: they die with their parent.
  timeout -k 5 "$((limit < left ? limit : left))" "$@" 2>&1 | tee "$out/$name.log"
  status="${PIPESTATUS[0]}"
  echo "gpus: $name: status $status, $((SECONDS - start)) s"
  [ "$status" -eq 0 ] || failed+=("$name (status $status)")
}

# name, seconds at most, then the arguments of python -m tide.bench.gpu.
bench() {
  local name="$1-$ranks" limit="$2"
  shift 2
  step "$name" "$limit" "$python" -m tide.bench.gpu "$@" --ranks "$ranks" \
    --json "$out/$name.json"
}

# Ranks a GPU: every (M, L) with as many ranks as fit the GPUs and the test, byte for byte.
check() {
  local a_gpu="$1" count used topologies=""
  count=$((gpus * a_gpu > 8 ? 8 : gpus * a_gpu))
  used=$(((count + a_gpu - 1) / a_gpu))
  for ((nodes = 1; nodes <= count; ++nodes)); do
    [ $((count % nodes)) -ne 0 ] || topologies+="*/${nodes}x$((count / nodes)):"
  done
  CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${visible[*]:0:used}")" step "check-$count-on-$used" 240 \
    "${TESTS:-build/tests/bin}/nccl_gpu_test" --gtest_filter="$topologies" \
    --gtest_output="json:$out/check-$count-on-$used.json"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm --format=csv

check 1
check 2
step check-fsdp 300 "$python" -m pytest -q -rs -p no:cacheprovider tests/python/test_fsdp_gpu.py

bench all-gather-llama70b 90 all-gather --preset llama70b-layer
bench reduce-scatter-llama70b 90 reduce-scatter --preset llama70b-layer
bench sm-time-llama70b 120 sm-time --preset llama70b-layer
bench interference-llama70b 180 interference --preset llama70b-layer
bench all-gather-qwen3-30b-a3b 60 all-gather --preset qwen3-30b-a3b-layer
bench reduce-scatter-qwen3-30b-a3b 60 reduce-scatter --preset qwen3-30b-a3b-layer
bench all-gather-wan 60 all-gather --preset wan-block
bench reduce-scatter-wan 60 reduce-scatter --preset wan-block
# Two virtual nodes need two ranks each to differ from one node and from a rail.
if [ "$ranks" -ge 4 ]; then
  bench all-gather-llama70b-2-nodes 60 all-gather --preset llama70b-layer --nodes 2
  bench reduce-scatter-llama70b-2-nodes 60 reduce-scatter --preset llama70b-layer --nodes 2
fi
bench train-experts 300 train --preset moe
bench train-dense 300 train --preset dense --tokens 1024,2048,4096
# Beside the defaults: all multiprocessors for the sums, and a whole call as one chunk.
TIDE_SUM_CTAS=132 bench reduce-scatter-llama70b-132-ctas 60 reduce-scatter --preset llama70b-layer
TIDE_STAGING_SLOT=$((4 << 30)) \
  bench reduce-scatter-llama70b-one-chunk 60 reduce-scatter --preset llama70b-layer

# Last, since they are long: suites that compare a run on TIDE with one on torch's own path. Their
# refreshes are counted for two slots, as on CPUs.
TEST_DEVICE=cuda TIDE_LANDING_SLOTS=2 step parity-fsdp 400 "$python" -m pytest -q -rs \
  -p no:cacheprovider tests/python/test_fsdp_{random,parity,training,kept_landings,prefetch}.py

[ "${#failed[@]}" -eq 0 ] || {
  printf 'gpus: failed: %s\n' "${failed[@]}" >&2
  exit 1
}
