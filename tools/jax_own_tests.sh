#!/usr/bin/env bash
# Runs JAX's own tests of shard_map, pmap and collectives without and with jax_intranode.install(),
# and prints the tests whose outcome differs:
#
#     tools/jax_own_tests.sh PATH [TEST_FILE...]
#
# PATH is a source tree of JAX, best of the version that is installed:
#
#     git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax PATH
#
# Tests run against the installed jax, not against the sources in PATH. They use all GPUs, or else 8
# CPU devices. TEST_FILE is a file of PATH/tests; the default is in `files` below. Logs and outcomes
# are left in the folder OUT, or else in build/jax_own_tests.
#
# The last line counts the differences. Exits with 1 if a test passes without install() and does not
# pass with it, unless tools/jax_own_tests_differ.txt lists it with a reason. Exits with 2 if no test
# ran the kernels of this package.
#
# Needs the package, pytest, pytest-xdist, pytest-timeout and absl-py. PYTHON names the interpreter;
# JAX_DISABLE_MOST_OPTIMIZATIONS=1 makes the tests faster on CPUs. Takes about 10 minutes on 2 cores.
set -uo pipefail
if [ $# -eq 0 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
  sed -n '2,/^[^#]/{ s/^# \{0,1\}//p }' "$0"
  exit 2
fi
tree=$(realpath "$1") found=()
shift
files=(shard_map_test.py pmap_test.py ragged_collective_test.py overlap_test.py)
if [ $# -gt 0 ]; then
  files=("$@")
else # not every version of JAX has all of them
  for file in "${files[@]}"; do [ -f "$tree/tests/$file" ] && found+=("$file"); done
  files=("${found[@]}")
fi
tools=$(realpath "$(dirname "$0")")
logs=$(realpath -m "${OUT:-$(dirname "$tools")/build/jax_own_tests}")
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# In a copy without the folder `jax`, Python imports the installed one.
cp -r "$tree/tests" "$work" || exit 2
mkdir -p "$logs"
cd "$work" || exit 2
workers=auto
if nvidia-smi -L 2>/dev/null | grep -q GPU; then workers=0; fi
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=8"
export JAX_INTRANODE_TIMEOUT_S=${JAX_INTRANODE_TIMEOUT_S:-60}
export PYTHONPATH=$tools${PYTHONPATH:+:$PYTHONPATH}

# Runs the tests: a name for the logs, and more arguments of pytest.
run_tests() {
  local name=$1
  shift
  echo "== ${files[*]} $name install(): $logs/$name.log"
  rm -f "$logs/$name.json"
  "$python" -P -m pytest -c /dev/null --rootdir . -q -p no:cacheprovider -p jax_own_tests \
    -n "$workers" --timeout 600 --outcomes "$logs/$name.json" "$@" "${files[@]/#/tests/}" \
    >"$logs/$name.log" 2>&1
}

# In a group, which bash reads before it runs it: a change of this file does no harm meanwhile.
{
  run_tests without
  run_tests with --install
  "$python" -P "$tools/jax_own_tests.py" "$logs/without.json" "$logs/with.json" \
    "$tools/jax_own_tests_differ.txt"
  exit
}
