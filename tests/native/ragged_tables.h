// Random ragged all-to-alls, for tests of the protocols and of the CPU groups.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "xla_ffi/kernels/ragged_call.h"

namespace jax_intranode {

// The tables of all ranks. Reads and writes overlap. Operands and results have equally many rows.
struct RaggedTables {
  uint32_t rows = 0, updates = 0, window = 0;
  std::vector<std::vector<int32_t>> starts = {}, sizes = {}, places = {}, received = {};

  static RaggedTables Of(int ranks, uint32_t rows, int most_updates, std::mt19937* random) {
    const auto below = [random](uint32_t end) { return static_cast<uint32_t>((*random)() % end); };
    RaggedTables t{rows, 1 + below(most_updates / ranks), 1 + below(20)};
    const size_t count = ranks * t.updates;
    for (auto* table : {&t.starts, &t.sizes, &t.places, &t.received}) {
      table->assign(ranks, std::vector<int32_t>(count));
    }
    for (int r = 0; r < ranks; ++r) {
      for (size_t i = 0; i < count; ++i) {
        const uint32_t size = below(3) == 0 ? 0 : below(rows + 1);
        t.sizes[r][i] = static_cast<int32_t>(size);
        t.starts[r][i] = static_cast<int32_t>(below(rows + 1 - size));
        t.places[r][i] = static_cast<int32_t>(below(rows + 1 - size));
        t.received[i / t.updates][r * t.updates + i % t.updates] = t.sizes[r][i];
      }
    }
    return t;
  }

  RaggedCall CallOf(int rank, const void* in, void* out, uint32_t row_bytes) const {
    return {in,
            out,
            starts[rank].data(),
            sizes[rank].data(),
            places[rank].data(),
            received[rank].data(),
            row_bytes,
            rows,
            rows,
            updates,
            window};
  }

  // Whose row a row of a rank's result is.
  struct Origin {
    int rank = -1;  // nobody's: it keeps its values
    size_t row = 0;
  };
  Origin OriginOf(int rank, size_t row) const {
    Origin last;
    for (int source = 0; source < static_cast<int>(sizes.size()); ++source) {
      for (size_t u = rank * updates; u < (rank + 1) * updates; ++u) {
        const int64_t after = static_cast<int64_t>(row) - places[source][u];
        if (after < 0 || after >= sizes[source][u]) continue;
        last = {source, static_cast<size_t>(starts[source][u] + after)};
      }
    }
    return last;
  }
};

}  // namespace jax_intranode
