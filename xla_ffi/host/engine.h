// Runs the protocols of xla_ffi/kernels for a caller that must not block: a call advances until a
// peer's data are missing, and goes on from there later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <variant>

#include "../kernels/algorithms.h"
#include "../kernels/buffers.h"
#include "../kernels/experts_call.h"
#include "../kernels/group.h"
#include "../kernels/hybrid_cube_mesh.h"
#include "../kernels/norm.h"
#include "../kernels/permute.h"
#include "../kernels/ragged.h"
#include "../kernels/routed_dispatch.h"

namespace jax_intranode {

struct HostOperation {
  Algorithm algorithm;
  ElementType type;
  uint32_t segments = 1;
  // For messages: the number of the text of the call site (health/call_sites.h). 0: that of the
  // site. Programs with different names may have one site, because ranks match what is computed.
  uint64_t name = 0;
};

// A ragged all-to-all, and what its steps know of the updates.
struct RaggedState {
  RaggedCall call;
  mutable RaggedTable table;
};

// A dispatch that finds who goes where, and what it has found.
struct RoutedState {
  RoutedCall call;
  mutable RoutingTable table;
};

// One rank's part in an operation. The memory that the operands point to must stay valid.
class ResumableCall {
 public:
  ResumableCall() = default;
  ResumableCall(const HostOperation& operation, const Buffers& buffers);
  template <class Call>  // LinkedBuffers, Permutes, RaggedState, ExpertsCall or NormCall
  ResumableCall(const HostOperation& operation, const Call& call)
      : operation_(operation), operands_(std::make_unique<const Call>(call)) {}
  ResumableCall(const HostOperation& operation, const RaggedCall& call)
      : ResumableCall(operation, RaggedState{call, {}}) {}
  ResumableCall(const HostOperation& operation, const RoutedCall& call)
      : operation_(operation), operands_(std::make_unique<const RoutedState>(call)) {}

  // Bytes of the rank's operands in a group of `size` ranks.
  uint64_t Bytes(int size) const;

  // Advances as far as possible; returns whether the call has ended. If not, `missing` is the rank
  // whose data have not arrived. `view` is the group as the rank sees it.
  bool Advance(const Group& view, uint32_t epoch, int* missing);

  uint32_t step() const { return step_; }
  // Why the call has ended without a result; empty if it has one.
  const std::string& error() const { return error_; }

 private:
  template <class... Calls>
  using OneOf = std::variant<Buffer, std::unique_ptr<const Calls>...>;

  HostOperation operation_{};
  OneOf<Buffers, ExpertsCall, LinkedBuffers, NormCall, Permutes, RaggedState, RoutedState>
      operands_;
  uint32_t step_ = 0;  // of the operation (segments.h)
  size_t cursor_ = 0;  // in the step
  std::string error_;
};

}  // namespace jax_intranode
