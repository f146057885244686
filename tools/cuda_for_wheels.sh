#!/usr/bin/env bash
# Installs what the CUDA part needs of CUDA 12.9 in the image in which cibuildwheel builds the wheels
# (AlmaLinux 8). Runs as root, in the container.
set -euo pipefail
dnf install -y dnf-plugins-core
dnf config-manager --add-repo \
  https://developer.download.nvidia.com/compute/cuda/repos/rhel8/x86_64/cuda-rhel8.repo
dnf install -y cuda-nvcc-12-9 cuda-cudart-devel-12-9 cuda-cccl-12-9 cuda-driver-devel-12-9
