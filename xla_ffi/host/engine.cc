#include "engine.h"

#include <cfenv>
#include <type_traits>
#include <utility>

#include "../kernels/hybrid_cube_mesh.h"
#include "../kernels/norm_protocol.h"
#include "../kernels/one_hop.h"
#include "../kernels/permute.h"
#include "../kernels/segments.h"
#include "../kernels/two_shot.h"

namespace jax_intranode {
namespace {

// The thread context of group.h for a caller that must not block. One thread works on all packs of
// a rank. A wait ends the phase, which resumes later at the same pack.
struct ResumableThread {
  size_t* cursor;
  int* missing;
  std::string* error;
  size_t First() const { return std::exchange(*cursor, 0); }
  size_t Stride() const { return 1; }
  // For norms (kernels/norm_protocol.h).
  static constexpr int kRowThreads = 1;
  uint32_t Thread() const { return 0; }
  uint32_t Threads() const { return 1; }
  int Block() const { return 0; }
  int Blocks() const { return 1; }
  size_t FirstUnit() const { return First(); }
  template <uint32_t kMost>
  float Total(float (&v)[kMost], uint32_t count) const {
    return TotalOfPairs(v, count);
  }
  bool Wait(size_t i, int rank) {
    *cursor = i;
    *missing = rank;
    return false;
  }
  // Nothing to check: a group begins one operation at a time, and handlers refuse closed groups.
  void Admit() const {}
  void Arrived() const {}
  void Sync() const {}
  void FenceSegment() const { Fence(); }

  // Ends a call that a list of kernels/algorithms.h has, and this file does not.
  bool EndWithoutBody(Algorithm algorithm, ElementType type) const {
    *error = std::string("jax_intranode: CPU devices have no ") + AlgorithmName(algorithm) +
             " of element type " + std::to_string(static_cast<int>(type)) +
             " with such operands. Please report it.";
    return true;
  }
};

// XLA:CPU calls handlers with flush-to-zero switched on. Sums keep subnormals.
class KeepSubnormals {
 public:
  KeepSubnormals() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~KeepSubnormals() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

template <class Type, class C>
bool RunAllReduce(Algorithm algorithm, ResumableThread& t, const Group& g, const InSegments<C>& c,
                  uint32_t epoch, uint32_t* step) {
  return IsTwoShot(algorithm) ? RunSteps<TwoShot<Type, 0>>(t, g, c, epoch, step)
                              : RunSteps<OneShot<Type, 0>>(t, g, c, epoch, step);
}

// Runs a call from step `*step` on as far as possible; returns whether it has ended.
template <class Type, class C>
bool RunCall(Algorithm algorithm, ElementType type, ResumableThread& t, const Group& g,
             const InSegments<C>& c, uint32_t epoch, uint32_t* step) {
  switch (ReductionOf(algorithm)) {
    case Reduction::kMax:
      return RunAllReduce<Extreme<Type, true>>(algorithm, t, g, c, epoch, step);
    case Reduction::kMin:
      return RunAllReduce<Extreme<Type, false>>(algorithm, t, g, c, epoch, step);
    case Reduction::kSum:
      break;
  }
  if constexpr (!kIsUnsigned<Type>) {  // sums take the signed type
    if (IsAllReduce(algorithm)) {
      return algorithm == Algorithm::kHybridCubeMesh
                 ? RunSteps<HybridCubeMesh<Type, 0>>(t, g, c, epoch, step)
                 : RunAllReduce<Type>(algorithm, t, g, c, epoch, step);
    }
    // CollectBuffers (ffi/operands.h) allows only one buffer for these three.
    if constexpr (std::is_same_v<C, Buffer>) {
      switch (algorithm) {
        case Algorithm::kReduceScatter:
          return RunSteps<ReduceScatter<Type, 0>>(t, g, c, epoch, step);
        case Algorithm::kAllGather:
          return RunSteps<AllGather<CopiedAs<Type>, 0>>(t, g, c, epoch, step);
        case Algorithm::kAllToAll:
          return RunSteps<AllToAll<CopiedAs<Type>, 0>>(t, g, c, epoch, step);
        default:
          break;
      }
    }
  }
  return t.EndWithoutBody(algorithm, type);  // matmuls run only on GPUs
}

// The element types of a norm are fewer (HasNorm).
template <class Type>
bool RunCall(Algorithm algorithm, ElementType type, ResumableThread& t, const Group& g,
             const NormCall& c, uint32_t epoch, uint32_t* phase) {
  if constexpr (Type::Packets::kBytes == sizeof(Pack)) {
    using Body = Norm<Type, 0, false>;
    for (; *phase < Body::kPhases; ++*phase) {
      if (!Body::RunPhase(*phase, t, g, c, epoch)) return false;
    }
    return true;
  }
  return t.EndWithoutBody(algorithm, type);
}

// Permutes only copy.
template <class Type>
bool RunCall(Algorithm, ElementType, ResumableThread& t, const Group& g, const Permutes& c,
             uint32_t epoch, uint32_t* phase) {
  using Body = Permute<CopiedAs<Type>, 0, typename Type::Packets>;
  if (*phase == 0) {  // again where it is resumed: the number is the same
    for (int r = 0; r < g.size; ++r) {
      if (r != g.rank) TellBegun(g, r, epoch);
    }
  }
  for (; *phase < Body::kPhases; ++*phase) {
    if (!Body::RunPhase(*phase, t, g, c, epoch)) return false;
  }
  return true;
}

template <class C>
bool RunCall(ElementType type, Algorithm algorithm, ResumableThread& t, const Group& g, const C& c,
             uint32_t epoch, uint32_t* step) {
  switch (type) {
#define JIN_X(type, item_bytes, packet_bytes) \
  case ElementType::k##type:                  \
    return RunCall<type>(algorithm, ElementType::k##type, t, g, c, epoch, step);
    JIN_ELEMENT_TYPES(JIN_X)
#undef JIN_X
  }
  return t.EndWithoutBody(algorithm, type);
}

}  // namespace

ResumableCall::ResumableCall(const HostOperation& operation, const Buffers& buffers)
    : operation_(operation), operands_(buffers.buffer[0]) {
  if (buffers.count > 1) operands_ = std::make_unique<const Buffers>(buffers);
}

uint64_t ResumableCall::Bytes(int size) const {
  const size_t shards = InputShards(operation_.algorithm, size);
  if (const auto* norm = std::get_if<std::unique_ptr<const NormCall>>(&operands_)) {
    return uint64_t{(*norm)->rows} * (*norm)->hidden * ItemBytes(operation_.type) * shards;
  }
  uint64_t bytes = 0;
  if (const auto* permutes = std::get_if<std::unique_ptr<const Permutes>>(&operands_)) {
    for (int m = 0; m < (*permutes)->count; ++m) bytes += (*permutes)->buffer[m].bytes;
    return bytes;
  }
  const auto* many = std::get_if<std::unique_ptr<const Buffers>>(&operands_);
  if (many == nullptr) return std::get<Buffer>(operands_).bytes * shards;
  for (int b = 0; b < (*many)->count; ++b) bytes += (*many)->buffer[b].bytes * shards;
  return bytes;
}

bool ResumableCall::Advance(const Group& view, uint32_t epoch, int* missing) {
  const KeepSubnormals keep_subnormals;
  ResumableThread thread{&cursor_, missing, &error_};
  const auto& [algorithm, type, segments, name] = operation_;
  const auto run = [&](const auto& call) {
    return RunCall(type, algorithm, thread, view, call, epoch, &step_);
  };
  const auto run_cut = [&]<class Call>(const Call& call) {
    const size_t packs = SegmentPacks(algorithm, call.Packs(), view.size, segments);
    return run(InSegments<Call>{call, packs, segments});
  };
  if (const auto* norm = std::get_if<std::unique_ptr<const NormCall>>(&operands_)) {
    return run(**norm);
  }
  if (const auto* permutes = std::get_if<std::unique_ptr<const Permutes>>(&operands_)) {
    return run(**permutes);
  }
  const auto* many = std::get_if<std::unique_ptr<const Buffers>>(&operands_);
  return many == nullptr ? run_cut(std::get<Buffer>(operands_)) : run_cut(**many);
}

}  // namespace jax_intranode
