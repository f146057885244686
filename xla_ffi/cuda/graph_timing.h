// Times an operation in a CUDA graph with nothing between the calls: the time of the kernels alone,
// for the benchmark and for the selection tables (table.py). No XLA, no Python.
#pragma once

#include <string>
#include <vector>

#include "collectives.h"

namespace jax_intranode {

struct GraphTiming {
  std::vector<double> microseconds;  // per call; one value for each launch of the graph
  std::string output;                // of the last call
};

// Launches a graph of `calls` operations `repetitions` times. `links` as in ffi/operands.h. Must be
// called for all devices of the group at the same time, while nothing else uses the group. Errors
// are thrown as std::runtime_error; the other devices wait for a failed one until their deadline.
GraphTiming TimeInGraph(int device, const DeviceGroup& group, const Links& links,
                        const DeviceOperation& operation, const std::string& input, int calls,
                        int repetitions);

}  // namespace jax_intranode
