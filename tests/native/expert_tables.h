// Random layouts of mixtures of experts, for tests of the protocols.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "xla_ffi/kernels/experts_call.h"

namespace jax_intranode {

// The layout of all ranks. Each rank has `rows` rows for what it receives, in no order.
struct ExpertTables {
  uint32_t rows = 0, tokens = 0, choices = 0, window = 0;
  std::vector<std::vector<int32_t>> places = {}, ranks = {};
  std::vector<int32_t> used = {};
  std::vector<float> weights = {};

  // At most `rows` tokens.
  static ExpertTables Of(int ranks, uint32_t rows, std::mt19937* random) {
    const auto below = [random](uint32_t end) { return static_cast<uint32_t>((*random)() % end); };
    ExpertTables t{rows, 1 + below(rows), 1 + below(10), 1 + below(20)};
    t.places.assign(ranks, std::vector<int32_t>(ranks * t.tokens * t.choices, -1));
    t.ranks.assign(ranks, std::vector<int32_t>(t.tokens));
    t.used.assign(ranks, 0);
    const uint32_t none = below(3) * ranks;  // more or fewer choices of no expert
    for (uint32_t i = 0; i < ranks * t.tokens * t.choices; ++i) {
      t.weights.push_back(static_cast<float>(1 + i % 3));
      const uint32_t d = below(ranks + none), token = i / t.choices;
      if (d >= static_cast<uint32_t>(ranks)) continue;
      t.ranks[token / t.tokens][token % t.tokens] |= 1 << d;
      t.places[d][i] = t.used[d] < static_cast<int32_t>(rows) ? t.used[d]++ : -2;
    }
    return t;
  }

  ExpertsCall CallOf(int rank, const void* in, void* out, uint32_t row_bytes) const {
    const auto addresses = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out);
    return {.in = in,
            .out = out,
            .weights = weights.data(),
            .places = places[rank].data(),
            .ranks = ranks[rank].data(),
            .used = &used[rank],
            .row_bytes = row_bytes,
            .tokens = tokens,
            .choices = choices,
            .capacity = rows,
            .window = window,
            .aligned = (addresses | row_bytes) % 16 == 0};
  }

  // The token, of all ranks in order, whose row it is; -1: nobody's.
  int64_t TokenOf(int rank, size_t row) const {
    for (size_t i = 0; i < places[rank].size(); ++i) {
      if (places[rank][i] == static_cast<int32_t>(row)) return i / choices;
    }
    return -1;
  }

  // The sum of a token's rows times their weights. `value(rank, row)` is exact, and so is the sum.
  template <class Value>
  float SumOf(int rank, size_t token, const Value& value) const {
    float sum = 0;
    for (size_t d = 0; d < places.size(); ++d) {
      for (size_t j = 0; j < choices; ++j) {
        const size_t i = (rank * tokens + token) * choices + j;
        if (places[d][i] >= 0) sum += weights[i] * value(static_cast<int>(d), places[d][i]);
      }
    }
    return sum;
  }
};

}  // namespace jax_intranode
