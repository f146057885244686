// What Python shares with the C++ code: names, numbers, limits and sizes.
#pragma once

#include <nanobind/nanobind.h>

namespace jax_intranode {

// Adds them to the module _host, from where jax_intranode/_src/native/definitions.py reads them.
// They describe the CUDA kernels, too: _host is always built, and these headers need no CUDA.
void ExportLimits(nanobind::module_& m);

}  // namespace jax_intranode
