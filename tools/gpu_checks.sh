#!/usr/bin/env bash
# Runs the checks that a change of the kernels has to pass on a machine with GPUs:
#
#     tools/gpu_checks.sh OUT [STEP...]
#
# Writes logs to the folder OUT. Steps, by default all of them: tests (both process modes, with two
# GPUs and with all of them), probe (the fused kernel alone, among 2 to 8 ranks), and the tools of
# compute-sanitizer: memcheck, racecheck, initcheck, synccheck. If they are named, also: soak (8
# minutes of random programs on two GPUs), faults (40 jobs on two GPUs in which a process fails).
# The package has to be installed.
# CUDA_VISIBLE_DEVICES chooses the GPUs. Each step has a time limit; one that fails does not keep the
# next one from running. tools/measure.sh measures.
set -uo pipefail
mkdir -p "$1"
out=$(realpath "$1")
shift
steps=" ${*:-tests probe memcheck racecheck initcheck synccheck} "
cd "$(dirname "$0")/.."
visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
gpus=$(awk -F, '{ print NF }' <<<"$visible")
failed=0

# Returns whether a step was asked for.
runs() { [[ $steps == *" $1 "* ]]; }

# Prints pytest's summary, or the log's last line if there is none.
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
  CUDA_VISIBLE_DEVICES=$devices JAX_INTRANODE_REQUIRE_GPUS=$count JAX_INTRANODE_TIMEOUT_S=20 timeout -s KILL "$seconds" \
    python3 -P -m pytest --full -q -p no:cacheprovider "$@" >"$out/$name.log" 2>&1
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

# The fused kernel among any number of ranks; a GPU stands for several where there are fewer GPUs.
if runs probe && ! command -v nvcc >/dev/null; then
  echo "probe: not run, nvcc is not on PATH"
elif runs probe; then
  (cd xla_ffi/cuda && timeout -s KILL 300 nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -I . \
    -o "$out/fused_probe" ../../tools/fused_probe.cu fused_matmul.cu slab.cu cublas_lt.cc -ldl) || failed=1
  for ranks in 2 3 4 5 6 7 8; do
    timeout -s KILL 60 "$out/fused_probe" "$ranks" check || failed=1
  done
  # Eight ranks on four GPUs. With four GPUs or fewer, the loop has just checked that.
  [ "$gpus" -le 4 ] || CUDA_VISIBLE_DEVICES=$(cut -d, -f1-4 <<<"$visible") timeout -s KILL 60 \
    "$out/fused_probe" 8 check || failed=1
  timeout -s KILL 300 nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -DJIN_TYPE=BF16 \
    -DJIN_ELEMENT_TYPE=kBF16 -o "$out/collectives_probe" tools/collectives_probe.cu \
    xla_ffi/cuda/{collectives.cu,collectives.cc,slab.cu} -ldl || failed=1
  for ranks in 2 3 4 8; do
    timeout -s KILL 120 "$out/collectives_probe" "$ranks" check || failed=1
  done
  timeout -s KILL 120 "$out/collectives_probe" 8 check-mesh || failed=1
fi

for tool in memcheck racecheck initcheck synccheck; do
  runs "$tool" || continue
  if ! command -v compute-sanitizer >/dev/null; then
    echo "$tool: not run, compute-sanitizer is not on PATH"
    continue
  fi
  CUDA_VISIBLE_DEVICES=$two timeout -s KILL 300 tools/compute_sanitizer.sh "$tool" \
    >"$out/$tool.log" 2>&1 || failed=1
  echo "$tool: $(summary "$tool"); $(grep -oE '(ERROR|RACECHECK) SUMMARY.*' "$out/$tool.log")"
done

# `python -m jax_intranode soak` with options, on two GPUs: name, seconds, options.
soak_on_two() {
  local name=$1 seconds=$2
  shift 2
  CUDA_VISIBLE_DEVICES=$two timeout "$seconds" python3 -P -m jax_intranode soak --platform gpu \
    --devices 2 --json "$out/$name.json" "$@" >"$out/$name.log" 2>&1 || failed=1
  echo "$name: $(grep -E 'elements compared|as they must be' "$out/$name.log" | tail -n 2 | paste -sd' ')"
}
if runs soak; then soak_on_two soak 1100 --minutes 8; fi
if runs faults; then soak_on_two faults 1500 --faults --cases 40; fi

exit "$failed"
