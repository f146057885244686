#!/usr/bin/env bash
# What a change of the kernels has to pass on a machine with GPUs: the tests in both process modes,
# with two GPUs and with all of them, then the figures of docs/benchmarks.md. Takes the folder for logs
# and JSON files, and which steps to run: tests, probe, memcheck, psum, pair, types, matmuls,
# programs; all of them where none is named. The package has to be installed. CUDA_VISIBLE_DEVICES chooses the GPUs. Each
# step has a time limit, and one that fails does not keep the next from running.
set -uo pipefail
out=$(realpath "$1")
shift
steps=" ${*:-tests probe memcheck psum pair types matmuls programs} "
cd "$(dirname "$0")/.."
visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
gpus=$(awk -F, '{ print NF }' <<<"$visible")
failed=0

# Whether a step was asked for.
runs() { [[ $steps == *" $1 "* ]]; }

# What pytest came to, or else the log's last line.
summary() {
  local found
  found=$(grep -E '[0-9]+ (passed|failed|errors?|skipped).* in [0-9.]+s' "$out/$1.log" | tail -n 1)
  echo "${found:-$(tail -n 1 "$out/$1.log")}"
}

# Runs pytest on some GPUs: name, seconds, GPUs separated by commas, tests.
pytest_on() {
  local name=$1 seconds=$2 devices=$3
  shift 3
  local count
  count=$(awk -F, '{ print NF }' <<<"$devices")
  CUDA_VISIBLE_DEVICES=$devices JAX_INTRANODE_REQUIRE_GPUS=$count JAX_INTRANODE_TIMEOUT_S=20 timeout "$seconds" \
    python3 -P -m pytest -q -p no:cacheprovider "$@" >"$out/$name.log" 2>&1
  local status=$?
  echo "$name: $(summary "$name")"
  return "$status"
}

two=$(cut -d, -f1,2 <<<"$visible")
if runs tests; then
  single=(tests/test_{psum,contract,life_cycle,explain,collective_matmul,overlap}.py)
  if [ "$gpus" -ge 4 ]; then
    pytest_on processes_2 300 "$two" tests/multiprocess &
    one=$!
    pytest_on single_2 300 "$(cut -d, -f3,4 <<<"$visible")" "${single[@]}" || failed=1
    wait "$one" || failed=1
    pytest_on "processes_$gpus" 300 "$visible" tests/multiprocess/test_{psum,overlap}_processes.py \
      -k "${gpus}_processes" || failed=1
    pytest_on "single_$gpus" 200 "$visible" tests/test_{psum,overlap}.py || failed=1
  else
    pytest_on processes_2 300 "$two" tests/multiprocess || failed=1
    pytest_on single_2 300 "$two" "${single[@]}" || failed=1
  fi
fi

# The kernel of collective matmuls, for as many ranks as there may be, by the GPUs that there are.
if runs probe && ! command -v nvcc >/dev/null; then
  echo "probe: not run, nvcc is not on PATH"
elif runs probe; then
  (cd xla_ffi/cuda && timeout 300 nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I . \
    -o "$out/fused_probe" ../../tools/fused_probe.cu fused_matmul.cu slab.cu cublas_lt.cc -ldl) || failed=1
  for ranks in 2 3 4 5 6 7 8; do
    timeout 60 "$out/fused_probe" "$ranks" check || failed=1
  done
  # Four that stand for eight: on no more GPUs the loop has done that.
  [ "$gpus" -le 4 ] || CUDA_VISIBLE_DEVICES=$(cut -d, -f1-4 <<<"$visible") timeout 60 \
    "$out/fused_probe" 8 check || failed=1
fi

if runs memcheck && ! command -v compute-sanitizer >/dev/null; then
  echo "memcheck: not run, compute-sanitizer is not on PATH"
elif runs memcheck; then
  CUDA_VISIBLE_DEVICES=$two timeout 300 tools/memcheck.sh >"$out/memcheck.log" 2>&1 || failed=1
  echo "memcheck: $(summary memcheck); $(grep -o 'ERROR SUMMARY.*' "$out/memcheck.log")"
fi

# Runs the benchmark: name of the files, seconds, options.
bench() {
  local name=$1 seconds=$2
  shift 2
  (cd "$out" && timeout "$seconds" python3 -P -m jax_intranode bench "$@" \
    --json "$name.json" >"$name.log" 2>&1) || { echo "$name: failed, see $name.log"; failed=1; }
  grep -E '^(#|  )' "$out/$name.log"
}

# Fails if our kernels did not run at all.
ours_ran() {
  grep -q '"algorithm": "one_shot"' "$out/$1.json" || { echo "$1: everything fell back to lax"; failed=1; }
}

if runs psum; then
  for count in $(printf '%s\n' 2 4 8 | awk -v n="$gpus" '$1 <= n' | sort -rn); do
    bench "psum_$count" 200 psum --devices "$count" -b 1K -e 16M -f 4 -n 25 -w 4
    ours_ran "psum_$count"
  done
fi
if runs pair; then
  bench pair 200 psum_scatter+all_gather --mode process-per-device -b 1K -e 16M -f 4 -n 25 -w 4
fi
if runs types; then
  bench types 400 psum -d float32,int32,float64,float16 -b 4K -e 4M -f 8 -n 9 -w 2
fi
if runs matmuls; then
  for operation in all_gather_matmul matmul_reduce_scatter; do
    bench "$operation" 300 "$operation" --preset reference --chain 12 -n 5 -w 1 --peers torch
    bench "${operation}_backward" 300 "$operation" --preset reference --chain 8 -n 5 -w 1 --backward
  done
  bench mlp_block 200 mlp_block --chain 4 -n 5 -w 1
fi
if runs programs; then
  for program in decode_scanned decode_unrolled train_step train_step_sequence_parallel; do
    for hiding in on off; do
      bench "${program}_$hiding" 100 "$program" --mode process-per-device --latency-hiding "$hiding" \
        -n 9 -w 2
    done
  done
fi
exit "$failed"
