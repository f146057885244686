#!/usr/bin/env bash
# Runs programs on two nodes of two processes each, by hand and as jobs of Slurm and Open MPI.
#
#     tools/nodes.sh [PYTHON]
#
# PYTHON (default: python) has the package. The nodes are two sets of network, UTS, IPC, PID and
# mount namespaces of this machine, each with a /dev/shm of its own; a pair of virtual network
# devices joins them. They, and all that runs in them, end with the script. It needs root. A part
# whose programs are missing is skipped by name; Debian has them in these packages:
#
#     apt-get install util-linux iproute2 openmpi-bin slurm-wlm munge
set -euo pipefail

# Whether one of these programs is missing; `absent` gets its name.
absent=()
missing() {
  local program found=1
  for program; do
    command -v "$program" >/dev/null || { absent+=("$program") && found=0; }
  done
  return $found
}

if [ "${1:-}" != inside ]; then
  if missing unshare nsenter ip; then echo "skipped all; missing: ${absent[*]}" && exit 0; fi
  unshare --mount true || { echo "skipped all: this user may not make namespaces" && exit 0; }
  PYTHON=$(command -v "${1:-python}") || { echo "there is no ${1:-python}" && exit 1; }
  here=$(cd "$(dirname "$0")" && pwd)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  sed -n '/^# process_per_gpu.py$/,/^```$/{/^```$/!p}' "$here/../docs/processes.md" >"$work/process_per_gpu.py"
  cp "$here/nodes_program.py" "$work"
  export PYTHON SLURM_CONF=$work/slurm.conf JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1
  unshare --mount --net --pid --fork --kill-child --mount-proc bash "$here/nodes.sh" inside "$work"
  exit
fi
work=$2
cd "$work"

# Makes the node NAME with the address 10.9.0.NUMBER.
declare -A first_process
make_node() {
  local name=$1 number=$2
  # shellcheck disable=SC2016
  unshare --net --uts --ipc --pid --mount --fork --kill-child --mount-proc bash -c '
    hostname "$0" && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && touch "$0.is_up"
    exec sleep infinity' "$name" &
  until [ -e "$name.is_up" ]; do sleep 0.1; done
  first_process[$name]=$(tr -d ' ' <"/proc/$!/task/$!/children")
  ip link set "veth$number" netns "${first_process[$name]}"
  on "$name" ip addr add "10.9.0.$number/24" dev "veth$number"
  on "$name" ip link set "veth$number" up
}

# Runs a command on a node.
on() { timeout -s KILL 100 nsenter --all --target "${first_process[$1]}" --wd="$work" "${@:2}"; }

# Runs a command whose output `expect` looks at.
run() {
  echo "\$ $*"
  "$@" >log 2>&1 || true
}

# Fails unless LINES lines of the output match PATTERN.
expect() {
  if [ "$(grep -cE "$2" log)" != "$1" ]; then
    cat log
    echo "FAILED: not $1 lines of the output are like $2"
    exit 1
  fi
  grep -E "$2" log
}

# Starts nodes_program.py by hand. A process that ends does not end the others.
by_hand() {
  local process processes=()
  for process in 0 1 2 3; do
    on "$( ((process < 2)) && echo one || echo two)" \
      "$PYTHON" nodes_program.py 10.9.0.1:5000 4 $process "$@" &
    processes+=($!)
  done
  wait "${processes[@]}"
}

# Starts munge and Slurm on both nodes.
start_slurm() {
  cat >slurm.conf <<END
ClusterName=check
SlurmctldHost=one
SlurmUser=root
AuthInfo=socket=$work/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation=$work
SlurmdSpoolDir=$work/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/%n.log
NodeName=one,two CPUs=2
PartitionName=all Nodes=ALL Default=YES
END
  (umask 077 && head -c 1024 /dev/urandom >munge.key)
  munged --force --socket="$work/munge.socket" --key-file=munge.key --log-file="$work/munge.log" \
    --pid-file="$work/munge.pid" --seed-file="$work/munge.seed" 2>&1
  on one slurmctld -c
  on one slurmd
  on two slurmd
  for _ in {1..100}; do
    if on one sinfo -h -t idle 2>&1 | grep -q one,two; then return; fi
    sleep 0.3
  done
  tail "$work"/*.log
  echo "FAILED: Slurm's nodes are not idle"
  exit 1
}

printf '127.0.0.1 localhost\n10.9.0.1 one\n10.9.0.2 two\n' >hosts
mount --bind hosts /etc/hosts
ip link add veth1 type veth peer name veth2
make_node one 1
make_node two 2

# What the processes print: see nodes_program.py, and docs/processes.md.
sums='process ([01] on one|[23] on two): (model: one_shot|(data|data, model): lax) '
printed='rank [01] has \(32, 64\): 1.0'
run by_hand
expect 12 "$sums"
passed=(by_hand)
echo "-- process 3, which is on node two, is killed"
run by_hand 3
expect 1 'process 2 on two: .*process 3 \(pid [0-9]+\) has exited without notice'
# "The following tasks are unhealthy: 3": JAX says it in the log of its service and of each process.
expect 4 '^3$'
expect 1 'process 1 on one: .*Connection closed by peer \[10.9.0.2\]'

if ! missing mpirun; then
  # An operation that falls back to jax.lax would be an error.
  run on one env JAX_INTRANODE_STRICT=1 \
    mpirun --allow-run-as-root -n 2 "$PYTHON" process_per_gpu.py
  expect 2 "$printed"
  passed+=(mpirun)
fi
if ! missing munged slurmctld slurmd srun; then
  start_slurm
  run on one srun -N2 "$PYTHON" process_per_gpu.py
  expect 2 "$printed"
  run on one env JAX_INTRANODE_STRICT=1 srun -N1 -n2 "$PYTHON" process_per_gpu.py
  expect 2 "$printed"
  run on one srun -N2 --ntasks-per-node=2 "$PYTHON" nodes_program.py
  expect 12 "$sums"
  passed+=(srun)
  if ! missing mpirun; then
    run on one salloc -N2 --ntasks-per-node=2 \
      mpirun --allow-run-as-root "$PYTHON" nodes_program.py
    expect 12 "$sums"
    passed+=("mpirun in salloc")
  fi
fi
echo "passed: ${passed[*]}; missing: ${absent[*]:-nothing}"
