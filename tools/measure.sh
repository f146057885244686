#!/usr/bin/env bash
# Measures the figures of docs/performance.md on the GPUs that CUDA_VISIBLE_DEVICES names:
#
#     tools/measure.sh OUT [STEP...]
#
# Writes one JSON file and one log for each step to the folder OUT. The default steps are psum,
# gather, scatter, gather_backward, scatter_backward, pair and programs; they take at most
# BUDGET_S seconds together (default 360) on two H200s. Steps that no longer fit are skipped and
# named; run these again by name. Other steps: decode, types, norms, peers. The package has to be
# installed. To publish the figures, copy the JSON files to docs/measurements and run
# tools/performance_page.py.
set -uo pipefail
mkdir -p "$1"
out=$(realpath "$1")
shift
steps=("$@")
[ $# -gt 0 ] || steps=(psum gather scatter gather_backward scatter_backward pair programs)
source_dir=$(realpath "$(dirname "$0")/..")
python=${PYTHON:-python3}
deadline=$((SECONDS + ${BUDGET_S:-360}))
failed=0
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$source_dir/tools # what `bench` has there only
cd "$out" # not where the source tree would be imported

# The files' names end with the number and the kind of the GPUs: psum_2_h200.json.
visible=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
kind=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | awk '{ print tolower($NF) }')
suffix=$(awk -F, '{ print NF }' <<<"$visible")_$kind

# Runs a command with a time limit and a log: name, seconds, command.
limited() {
  local name=$1 seconds=$2 left=$((deadline - SECONDS)) start=$SECONDS
  shift 2
  if [ "$left" -lt 15 ]; then
    echo "$name: skipped, no time left"
    failed=1
    return 1
  fi
  [ "$seconds" -le "$left" ] || seconds=$left
  if timeout -s KILL "$seconds" "$@" >"$name.log" 2>&1; then
    echo "$name: $((SECONDS - start)) s"
  else
    echo "$name: failed or not done within $seconds s, see $name.log"
    failed=1
    return 1
  fi
}

# Runs the benchmark and prints its table: name, seconds, options.
bench() {
  local name=$1_$suffix seconds=$2
  shift 2
  limited "$name" "$seconds" "$python" -P -m jax_intranode bench "$@" --json "$name.json"
  [ ! -f "$name.log" ] || grep -E '^(#|  )' "$name.log"
}

matmuls=(--preset reference --mode process-per-device -n 3 -w 1)
for step in "${steps[@]}"; do
  case $step in
    psum) bench psum 100 psum -b 1K -e 16M -f 4 -n 25 -w 4 ;;
    gather) bench all_gather_matmul 90 all_gather_matmul "${matmuls[@]}" ;;
    scatter) bench matmul_reduce_scatter 60 matmul_reduce_scatter "${matmuls[@]}" ;;
    gather_backward)
      bench all_gather_matmul_backward 100 all_gather_matmul "${matmuls[@]}" --backward
      ;;
    scatter_backward)
      bench matmul_reduce_scatter_backward 70 matmul_reduce_scatter "${matmuls[@]}" --backward
      ;;
    pair)
      bench psum_scatter_all_gather 60 psum_scatter+all_gather --mode process-per-device \
        -b 1K -e 16M -f 4 -n 25 -w 4
      ;;
    programs)
      for program in transformer mlp_block train_step train_step_sequence_parallel decode_8b_1 \
        decode_8b_16 decode_scanned decode_unrolled; do
        bench "$program" 80 "$program" --mode process-per-device -n 9 -w 2
      done
      ;;
    decode)
      for size in 8B 70B; do
        for batch in 1 16; do
          name=decode_${size,,}_$batch
          bench "$name" 90 "$name" --mode process-per-device -n 9 -w 2
          name=${name}_torch_$suffix
          limited "$name" 90 torchrun --nproc-per-node "${suffix%%_*}" \
            "$source_dir/tools/decode_in_torch.py" --size "$size" --layers 8 --batch "$batch" \
            --json "$name.json"
          grep -h "tokens/s" "$name.log" 2>/dev/null
        done
      done
      ;;
    types)
      bench psum_types 200 psum -d float32,int32,float64,float16 -b 4K -e 4M -f 8 -n 9 -w 2
      ;;
    norms)
      for rows in 1 6 16 64 1024 4096; do
        bench "norms_$rows" 100 "norms_$rows" --mode process-per-device -n 9 -w 2
      done
      ;;
    peers)
      bench psum_peers 150 psum --mode process-per-device -b 1K -e 1M -f 32 -n 9 -w 2 --peers all
      for operation in all_gather_matmul matmul_reduce_scatter; do
        bench "${operation}_peers" 200 "$operation" "${matmuls[@]}" --peers torch
      done
      ;;
    *)
      echo "$step: no such step"
      failed=1
      ;;
  esac
done
exit "$failed"
