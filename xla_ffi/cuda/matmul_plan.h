// The plan of an overlapped matmul: how the work is divided. No CUDA, no XLA.
//
// Python chooses a plan (`Plan` in selection/overlap/plan.py has the same fields). It travels in
// the HLO as one dictionary attribute, is decoded by field name, and is the same on all ranks.
//
// To add a field: a member of MatmulPlan and its name in JIN_MATMUL_PLAN_FIELDS, a check in
// IsValid, the field of `Plan`, and the code that uses it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

#include "matmul_limits.h"

namespace jax_intranode {

struct MatmulPlan {
  // The cuBLASLt pipeline (pipelined_matmul.h) divides the rows that it sends first into
  // `first_pieces` pieces, the smallest first, and the rows that it sends last into `last_pieces`,
  // the smallest last.
  int32_t first_pieces = 1;
  int32_t last_pieces = 1;

  // The fused kernel (fused_matmul.h).
  int32_t tile_columns = 0;  // columns of a tile; 0: use the pipeline
  int32_t band_pairs = 8;    // row pairs of a band
  // Reduce-scatter: number of parts that each peer's tiles are divided into. The first parts of all
  // peers are multiplied before the second ones.
  int32_t parts = 1;
  // Reduce-scatter: math warpgroups store products straight into the peer's ring, not in scratch.
  bool direct = false;
  // Reduce-scatter: number of launches. Each computes a range of columns that fits the ring.
  int32_t rounds = 1;
  // The kernel also computes weight gradients.
  bool wgrad = false;
  // All-gather with weight gradients: arriving row pairs multiplied before the weight gradients.
  int32_t row_pairs_before_wgrad = 0;
  // All-gather with weight gradients: their cluster tiles computed after all arriving rows.
  int32_t wgrad_tiles_last = 0;

  bool fused() const { return tile_columns > 0; }
};

// All fields, in the order of MatmulPlan.
#define JIN_MATMUL_PLAN_FIELDS(FIELD)                                                            \
  FIELD(first_pieces), FIELD(last_pieces), FIELD(tile_columns), FIELD(band_pairs), FIELD(parts), \
      FIELD(direct), FIELD(rounds), FIELD(wgrad), FIELD(row_pairs_before_wgrad),                 \
      FIELD(wgrad_tiles_last)

template <class T>
struct PlanField {
  const char* name;
  T MatmulPlan::* member;
};
template <class T>
PlanField(const char*, T MatmulPlan::*) -> PlanField<T>;

#define JIN_PLAN_FIELD(name) \
  PlanField { #name, &MatmulPlan::name }
inline constexpr std::tuple kPlanFields{JIN_MATMUL_PLAN_FIELDS(JIN_PLAN_FIELD)};
#undef JIN_PLAN_FIELD

// The decoder of the attribute fills MatmulPlan in the order of the list.
#define JIN_PLAN_FIELD(name) offsetof(MatmulPlan, name)
inline constexpr std::array kPlanOffsets{JIN_MATMUL_PLAN_FIELDS(JIN_PLAN_FIELD)};
#undef JIN_PLAN_FIELD
static_assert(std::is_sorted(kPlanOffsets.begin(), kPlanOffsets.end()));
static_assert(kPlanOffsets.back() + sizeof(int32_t) == sizeof(MatmulPlan));

// "first_pieces=1,last_pieces=1,...", as `bench --plan` and the probe take it.
inline std::string ToString(const MatmulPlan& plan) {
  std::string text;
  const auto append = [&](const auto& field) {
    if (!text.empty()) text += ',';
    text += std::string(field.name) + '=' + std::to_string(plan.*field.member);
  };
  std::apply([&](const auto&... field) { (append(field), ...); }, kPlanFields);
  return text;
}

// Whether an operation can run by this plan. It may still be too large for the ring.
constexpr bool IsValid(Algorithm algorithm, const MatmulPlan& plan) {
  const auto is_piece_count = [](int pieces) { return pieces >= 1 && pieces <= kMaxPieces; };
  if (!is_piece_count(plan.first_pieces) || !is_piece_count(plan.last_pieces)) return false;
  if (plan.tile_columns == 0) return !plan.wgrad;
  return HasFusedKernel(algorithm, plan.tile_columns, plan.wgrad) && plan.band_pairs >= 1 &&
         plan.parts >= 1 && plan.rounds >= 1 && plan.row_pairs_before_wgrad >= 0 &&
         plan.wgrad_tiles_last >= 0;
}

}  // namespace jax_intranode
