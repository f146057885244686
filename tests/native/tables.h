// Random operations with tables, and what they give, for tests of the protocols and of the CPU
// groups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "xla_ffi/kernels/experts_call.h"
#include "xla_ffi/kernels/permute.h"
#include "xla_ffi/kernels/ragged_call.h"

namespace jax_intranode {

inline uint32_t Below(uint32_t end, std::mt19937* random) { return (*random)() % end; }

// The source of each rank, or -1: it gets the operand of another rank, its own, or none's.
using Permutation = std::vector<int>;

inline Permutation RandomPermutation(int ranks, std::mt19937* random) {
  Permutation sources(ranks);
  for (int r = 0; r < ranks; ++r) sources[r] = r;
  std::shuffle(sources.begin(), sources.end(), *random);
  const uint32_t missing = (*random)() % 4;
  for (int& source : sources) source = (*random)() % 4 < missing ? -1 : source;
  return sources;
}

// Adds a member of a permute, as a rank sees it.
inline void AddMember(Permutes* members, const Buffer& buffer, const Permutation& sources,
                      int rank) {
  const auto to = std::find(sources.begin(), sources.end(), rank);
  members->Append(buffer, sources[rank],
                  to == sources.end() ? -1 : static_cast<int>(to - sources.begin()));
}

// The tables of all ranks of a ragged all-to-all. Reads and writes overlap. Operands and results
// have equally many rows.
struct RaggedTables {
  uint32_t rows = 0, updates = 0, window = 0;
  std::vector<std::vector<int32_t>> starts = {}, sizes = {}, places = {}, received = {};

  static RaggedTables Of(int ranks, uint32_t rows, int most_updates, std::mt19937* random) {
    const auto below = [random](uint32_t end) { return Below(end, random); };
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

// The layout of a mixture of experts. Each rank has `rows` rows for what it receives, in no order.
struct ExpertTables {
  uint32_t rows = 0, tokens = 0, choices = 0, window = 0;
  std::vector<std::vector<int32_t>> places = {}, ranks = {};
  std::vector<int32_t> used = {};
  std::vector<float> weights = {};

  // At most `rows` tokens.
  static ExpertTables Of(int ranks, uint32_t rows, std::mt19937* random) {
    const auto below = [random](uint32_t end) { return Below(end, random); };
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

// A dispatch of a mixture of experts: the ids of all ranks, as words, which are also their weights;
// and the words of each rank's results one after another, behind the rows: weights, places, ranks,
// sizes, used, dropped.
struct RoutingTables {
  uint32_t tokens = 0, choices = 0, experts = 0, capacity = 0, row_words = 0;  // experts: of a rank
  std::vector<std::vector<uint32_t>> ids = {}, results = {};
  std::vector<std::vector<int64_t>> origins = {};  // of each row: the token, of all ranks; -1

  static RoutingTables Of(int ranks, std::mt19937* random) {
    const auto below = [random](uint32_t end) { return Below(end, random); };
    RoutingTables t{1 + below(30), below(4) == 0 ? 8 : 1 + below(4),
                    below(4) == 0 ? 250 + below(5) : 1 + below(5)};
    const uint32_t of_rank = t.tokens * t.choices, all = ranks * t.experts;
    t.capacity = 1 + below(below(2) == 0 ? ranks * of_rank : 1 + of_rank / 2);
    t.row_words = 1 + below(9);
    const uint32_t used = below(2) == 0 ? all : 1 + below(all);  // others have no token
    for (int r = 0; r < ranks; ++r) {
      t.ids.emplace_back(of_rank);
      for (uint32_t& id : t.ids[r]) id = below(4) == 0 ? ~0u - below(3) : below(used + 2);
    }
    for (int r = 0; r < ranks; ++r) t.Compute(r);
    return t;
  }

  // Words of the operands and of the results of a rank.
  size_t In() const { return size_t{tokens} * row_words + ids[0].size(); }
  size_t Rows() const { return size_t{capacity} * row_words; }
  size_t Out() const { return Rows() + results[0].size(); }

  RoutedCall CallOf(const void* in, void* out) const {
    const auto* const words = static_cast<const uint32_t*>(in) + size_t{tokens} * row_words;
    auto* const at = static_cast<int32_t*>(out) + Rows();
    const size_t of_rank = ids[0].size(), of_all = ids.size() * of_rank;
    const auto addresses = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out);
    return {.rows = {.in = in,
                     .out = out,
                     .row_bytes = 4 * row_words,
                     .tokens = tokens,
                     .choices = choices,
                     .capacity = capacity,
                     .aligned = (addresses | 4 * row_words) % 16 == 0},
            .ids = {words, at + of_all, of_rank * sizeof(int32_t)},
            .weights = {words, at, of_rank * sizeof(float)},
            .ranks = at + 2 * of_all,
            .sizes = at + 2 * of_all + tokens,
            .used = at + 2 * of_all + tokens + experts,
            .dropped = at + 2 * of_all + tokens + experts + 1,
            .experts = experts};
  }

 private:
  void Compute(uint32_t rank) {
    const auto n = static_cast<uint32_t>(ids.size()), of_rank = tokens * choices;
    std::vector<uint32_t> result;
    for (const auto& of_one : ids) {  // a NaN that can't travel becomes another one
      for (uint32_t id : of_one) result.push_back(id == ~0u ? 0x7FFF7FFF : id);
    }
    std::vector<uint32_t> places(n * of_rank, ~0u), of_tokens(tokens), sizes(experts), dropped(n);
    std::vector<std::pair<uint32_t, uint32_t>> kept;  // expert, and where
    for (uint32_t p = 0; p < tokens; ++p) {
      for (uint32_t r = 0; r < n; ++r) {
        for (uint32_t j = 0; j < choices; ++j) {
          const uint32_t id = ids[r][p * choices + j], at = r * of_rank + p * choices + j;
          if (r == rank && id < n * experts) of_tokens[p] |= 1u << id / experts;
          if (id / experts != rank) continue;
          if (kept.size() < capacity) {
            kept.emplace_back(id % experts, at);
          } else {
            ++dropped[r];
            places[at] = static_cast<uint32_t>(-2);
          }
        }
      }
    }
    std::sort(kept.begin(), kept.end());
    std::vector<int64_t> origin(capacity, -1);
    for (uint32_t row = 0; row < kept.size(); ++row) {
      const auto [expert, at] = kept[row];
      places[at] = row;
      origin[row] = at / choices;
      ++sizes[expert];
    }
    const std::vector<uint32_t> used{static_cast<uint32_t>(kept.size())};
    for (const auto* part : {&std::as_const(places), &std::as_const(of_tokens),
                             &std::as_const(sizes), &used, &std::as_const(dropped)}) {
      result.insert(result.end(), part->begin(), part->end());
    }
    results.push_back(result);
    origins.push_back(origin);
  }
};

}  // namespace jax_intranode
