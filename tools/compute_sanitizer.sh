#!/usr/bin/env bash
# Runs some GPU tests of the installed package under compute-sanitizer:
#
#     tools/compute_sanitizer.sh TOOL [ARGUMENTS]
#
# TOOL is one of
#     memcheck   loads and stores of our kernels outside of their buffers
#     racecheck  threads of a block that race for shared memory
#     initcheck  loads of device memory that nothing has written
#     synccheck  barriers that not all threads reach
# No tool looks at races between GPUs: tests/native/model does. ARGUMENTS replace the selection of
# tests here and go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not on PATH (CUDA toolkit, or \`pip install nvidia-cuda-sanitizer-api\`)"
  exit 1
fi
case "${1:-}" in
  memcheck | racecheck | initcheck | synccheck) tool=$1 ;;
  *)
    sed -n '2,/^[^#]/{ s/^# \{0,1\}//p }' "$0"
    exit 2
    ;;
esac
shift
if [ $# -eq 0 ]; then
  set -- tests/test_psum.py -k "every_world_size or special_values or amid or random_program-0"
fi
# The sanitizer slows kernels down, so peers wait longer. JAX's memory pool would hide overruns.
export JAX_INTRANODE_REQUIRE_GPUS=2 JAX_INTRANODE_TIMEOUT_S=${JAX_INTRANODE_TIMEOUT_S:-900}
export XLA_PYTHON_CLIENT_ALLOCATOR=platform
# Checks our kernels only, and ignores errors of API calls, because XLA causes some on purpose.
options=(--tool "$tool" --target-processes all --error-exitcode 1 --kernel-name kns=jax_intranode)
if [ "$tool" = memcheck ]; then options+=(--report-api-errors no); fi
exec compute-sanitizer "${options[@]}" \
  python3 -P -m pytest -q --full -p no:cacheprovider -o timeout=1800 "$@"
