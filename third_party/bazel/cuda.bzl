"""Compiles and links CUDA code with the nvcc on PATH, as CMakeLists.txt does.

A macro of our own, because the rules for CUDA that there are must be downloaded.
"""

load("@rules_cc//cc:defs.bzl", "cc_library")

# "manual": `bazel build //...` leaves the targets out, as a machine without nvcc must.
_TAGS = ["cuda", "manual"]

# nvcc names its temporary files by process id. Bazel's sandboxes share /tmp, but each counts its
# processes from 1: without a directory of its own, one nvcc takes another's files.
_TEMPORARIES = """
export TMPDIR=$$(mktemp -d)
trap 'rm -r "$$TMPDIR"' EXIT
"""

# Compiled to PTX once and assembled for each generation. nvcc knows sm_100 since 12.8.
_GENCODE = """
codes=sm_80,sm_90,compute_80
case $$(nvcc --list-gpu-code) in *sm_100*) codes=sm_100,$$codes ;; esac
"""

def cuda_object(name, src, hdrs, gencode = "arch=compute_80,code=[$$codes]"):
    """NAME.o from one .cu or .cc file. The C++ standard is that of CMakeLists.txt."""
    native.genrule(
        name = name,
        srcs = [src] + hdrs,
        outs = [name + ".o"],
        cmd = _TEMPORARIES + _GENCODE + " ".join([
            "nvcc -c $(location %s) -o $@" % src,
            "-O3 -DNDEBUG -Xcompiler -fPIC",
            "-std=c++20",
            "-gencode=" + gencode,
        ]),
        tags = _TAGS,
    )

def cuda_library(name, objects, hdrs):
    """libjax_intranode_NAME.so from objects and the CUDA runtime, as a C++ library."""
    library = "libjax_intranode_%s.so" % name
    native.genrule(
        name = name + "_so",
        srcs = objects,
        outs = [library],
        # The objects need no linking on the device. No symbol may be left undefined.
        cmd = _TEMPORARIES + "nvcc -shared --no-device-link -Xlinker -z,defs $(SRCS) -o $@",
        tags = _TAGS,
    )
    cc_library(
        name = name,
        srcs = [library],
        hdrs = hdrs,
        tags = _TAGS,
    )
