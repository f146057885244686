// Random dispatches of mixtures of experts, with what they give, for tests of the protocols.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <tuple>
#include <vector>

#include "xla_ffi/kernels/experts_call.h"

namespace jax_intranode {

// The ids of all ranks, as words, which are also their weights; and the words of each rank's
// results one after another, behind the rows: weights, places, ranks, sizes, used, dropped.
struct RoutingTables {
  uint32_t tokens = 0, choices = 0, experts = 0, capacity = 0, row_words = 0;  // experts: of a rank
  std::vector<std::vector<uint32_t>> ids = {}, results = {};
  std::vector<std::vector<int64_t>> origins = {};  // of each row: the token, of all ranks; -1

  static RoutingTables Of(int ranks, std::mt19937* random) {
    const auto below = [random](uint32_t end) { return static_cast<uint32_t>((*random)() % end); };
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
    std::vector<std::tuple<uint32_t, uint32_t>> kept;  // expert, and where
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
    for (const std::vector<uint32_t>* part : std::initializer_list<const std::vector<uint32_t>*>{
             &places, &of_tokens, &sizes, &used, &dropped}) {
      result.insert(result.end(), part->begin(), part->end());
    }
    results.push_back(result);
    origins.push_back(origin);
  }
};

}  // namespace jax_intranode
