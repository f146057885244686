#include "engine.h"

#include <cfenv>
#include <type_traits>
#include <utility>

#include "../kernels/experts.h"
#include "../kernels/norm_protocol.h"
#include "../kernels/one_hop.h"
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
  // For routed dispatches.
  static constexpr uint32_t kLanes = 1;
  SameLanes Same(uint32_t) const { return {0, 1}; }
  void SyncLanes() const {}
  void Add(uint32_t* sum, uint32_t v) const { *sum += v; }
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
  // For ragged all-to-alls. The first bad update ends the call with an error, when its packets have
  // been sent and taken.
  int FirstUpdate() const { return static_cast<int>(First()); }
  void Refuse(const UpdateFault& fault) const {
    if (error->empty()) *error = TextOf(fault);
  }

  // Ends a call that a list of kernels/algorithms.h has, and this file does not.
  bool EndWithoutBody(Algorithm algorithm, ElementType type) const {
    *error = std::string("CPU devices have no ") + AlgorithmName(algorithm) + " of element type " +
             std::to_string(static_cast<int>(type)) + " with such operands; please report it";
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
    if (IsAllReduce(algorithm)) return RunAllReduce<Type>(algorithm, t, g, c, epoch, step);
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

// Runs a call without segments from phase `*phase` on as far as possible.
template <class Body, class C>
bool RunPhases(ResumableThread& t, const Group& g, const C& c, uint32_t epoch, uint32_t* phase) {
  for (; *phase < Body::kPhases; ++*phase) {
    if (!Body::RunPhase(*phase, t, g, c, epoch)) return false;
  }
  return true;
}

template <class Type>
bool RunCall(Algorithm algorithm, ElementType type, ResumableThread& t, const Group& g,
             const LinkedBuffers& c, uint32_t epoch, uint32_t* phase) {
  if constexpr (!kIsUnsigned<Type>) {
    return RunPhases<HybridCubeMesh<Type, 0>>(t, WithoutUnlinked(g, c.links), c, epoch, phase);
  }
  return t.EndWithoutBody(algorithm, type);
}

// The element types of a norm are fewer (HasNorm).
template <class Type>
bool RunCall(Algorithm algorithm, ElementType type, ResumableThread& t, const Group& g,
             const NormCall& c, uint32_t epoch, uint32_t* phase) {
  if constexpr (Type::Packets::kBytes == sizeof(Pack)) {
    return RunPhases<Norm<Type, 0, false>>(t, g, c, epoch, phase);
  }
  return t.EndWithoutBody(algorithm, type);
}

// Permutes only copy.
template <class Type>
bool RunCall(Algorithm, ElementType, ResumableThread& t, const Group& g, const Permutes& c,
             uint32_t epoch, uint32_t* phase) {
  if (*phase == 0) {  // again where it is resumed: the number is the same
    for (int r = 0; r < g.size; ++r) {
      if (r != g.rank) TellBegun(g, r, epoch);
    }
  }
  return RunPhases<Permute<CopiedAs<Type>, 0, typename Type::Packets>>(t, g, c, epoch, phase);
}

template <class Type>
bool RunCall(Algorithm, ElementType, ResumableThread& t, const Group& g, const RaggedState& ragged,
             uint32_t epoch, uint32_t* step) {
  return Ragged<CopiedAs<Type>, typename Type::Packets>::Run(t, g, ragged.call, ragged.table, epoch,
                                                             step);
}

// The element types are those of a norm.
template <class Type>
bool RunCall(Algorithm algorithm, ElementType type, ResumableThread& t, const Group& g,
             const ExpertsCall& c, uint32_t epoch, uint32_t* step) {
  if constexpr (Type::Packets::kBytes == sizeof(Pack)) {
    return algorithm == Algorithm::kCombine
               ? Experts<Type, 0, true>::Run(t, g, c, epoch, step)
               : Experts<CopiedAs<Type>, 0, false>::Run(t, g, c, epoch, step);
  }
  return t.EndWithoutBody(algorithm, type);
}

template <class Type>
bool RunCall(Algorithm, ElementType, ResumableThread& t, const Group& g, const RoutedState& routed,
             uint32_t epoch, uint32_t* step) {
  return RoutedDispatch<0>::Run(t, g, routed.call, routed.table, epoch, step);
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

// Bytes of the elements of a call.
uint64_t BytesOf(const Buffer& c, ElementType) { return c.bytes; }
uint64_t BytesOf(const NormCall& c, ElementType type) {
  return uint64_t{c.rows} * c.hidden * ItemBytes(type);
}
uint64_t BytesOf(const ExpertsCall& c, ElementType) { return uint64_t{c.tokens} * c.row_bytes; }
uint64_t BytesOf(const RoutedState& c, ElementType type) { return BytesOf(c.call.rows, type); }
uint64_t BytesOf(const RaggedState& c, ElementType) { return c.call.in_rows * c.call.row_bytes; }
template <class Many>
uint64_t BytesOf(const Many& c, ElementType) {
  uint64_t bytes = 0;
  for (int b = 0; b < c.count; ++b) bytes += c.buffer[b].bytes;
  return bytes;
}

// Calls `with` with what a ResumableCall holds.
template <class Operands, class With>
auto WithCall(const Operands& operands, const With& with) {
  return std::visit(
      [&]<class Held>(const Held& held) {
        if constexpr (std::is_same_v<Held, Buffer>) {
          return with(held);
        } else {
          return with(*held);
        }
      },
      operands);
}

}  // namespace

ResumableCall::ResumableCall(const HostOperation& operation, const Buffers& buffers)
    : operation_(operation), operands_(buffers.buffer[0]) {
  if (buffers.count > 1) operands_ = std::make_unique<const Buffers>(buffers);
}

uint64_t ResumableCall::Bytes(int size) const {
  return InputShards(operation_.algorithm, size) *
         WithCall(operands_, [&](const auto& call) { return BytesOf(call, operation_.type); });
}

bool ResumableCall::Advance(const Group& view, uint32_t epoch, int* missing) {
  const KeepSubnormals keep_subnormals;
  ResumableThread thread{&cursor_, missing, &error_};
  const auto& [algorithm, type, segments, name] = operation_;
  return WithCall(operands_, [&]<class Call>(const Call& call) {
    if constexpr (std::is_same_v<Call, Buffer> || std::is_same_v<Call, Buffers>) {
      const size_t packs = SegmentPacks(algorithm, call.Packs(), view.size, segments);
      return RunCall(type, algorithm, thread, view, InSegments<Call>{call, packs, segments}, epoch,
                     &step_);
    } else {
      return RunCall(type, algorithm, thread, view, call, epoch, &step_);
    }
  });
}

}  // namespace jax_intranode
