// Checks the protocols of xla_ffi/kernels in all their behaviours (machine.h), for few ranks and
// small messages. The code that runs is that of the CPU backend and of the kernels; only what
// std::atomic_ref does is replaced.
//
//   collectives_model [variant] [ranks] [operations] [depth]
//
// Runs every sequence of so many operations, chosen among one-shot, two-shot, reduce-scatter,
// all-gather and all-to-all, without a barrier between the ranks. In some sequences the first three
// are norms (kernels/norm_protocol.h), of rows of one pack. Some run in segments. Of both,
// sequences of 3 ranks have at most 3 operations. The epoch wraps on the way. `depth` is "full";
// "quick", which runs some of the sequences; "mesh": 2 or 4 ranks are a hybrid cube mesh with quads
// of 1 or 2 ranks, and all operations are of that algorithm; or "few_rows": sums of products of few
// rows (kernels/few_rows.h), alone and mixed with the other operations. Their first kernel is a
// block that runs beside those of the second one.
//
// Checked are all results, that no rank waits for ever, that ranks write only into slabs of peers
// and that all slabs are empty at the end. Variants other than "sound" break the protocol on
// purpose. Exit status 0: all is right in every behaviour; 1: not; the steps that lead there are
// printed.
#include "kernel_model.h"
//
#include "tests/native/kernel_of.h"
#include "xla_ffi/kernels/few_rows.h"
#include "xla_ffi/kernels/hybrid_cube_mesh.h"
#include "xla_ffi/kernels/norm_protocol.h"
#include "xla_ffi/kernels/segments.h"

namespace jin = jax_intranode;

namespace {

constexpr int kMostRanks = 4;
constexpr int kMostOperations = 8;
constexpr int kMostBlocks = 2;
constexpr int kMostPacks = 7;

using jin::kCollectives;
constexpr int kKinds = std::size(kCollectives);

struct Plan {
  jin::Algorithm algorithm;
  bool floating;
  int packs;
  int blocks;
  uint32_t segments = 1;
  bool norm = false;  // unless it is an all-gather
};

using model::Flag, model::no_acquire, model::no_release;
Flag idle_epochs("idle_epochs"), wrong_epoch("wrong_epoch"),
    no_segment_release("no_segment_release"), no_segment_acquire("no_segment_acquire"),
    short_segment("short_segment"), sent_early("sent_early"), no_reduce_fence("no_reduce_fence"),
    odd_segments("odd_segments"), wrong_relay("wrong_relay"), one_not_awaited("one_not_awaited"),
    cleared_early("cleared_early"), ended_by_first("ended_by_first"), first_early("first_early");

// What threads access without the machine. All of it belongs to the state.
struct Local {
  uint32_t out[kMostRanks][kMostOperations][kMostRanks * kMostPacks * 4];
  uint32_t started[kMostRanks];  // first kernels of few rows: the operation of the last one, plus 1
};
Local local;

struct ModelThread : model::ModelThread {
  static constexpr int kRowThreads = jin::kMaxHidden / 4;  // a thread has one pack of a row
  size_t FirstUnit() const { return 0; }
  template <uint32_t kMost>
  float Total(float (&v)[kMost], uint32_t count) const {
    return jin::TotalOfPairs(v, count);
  }
  void FenceSegment() {
    if (!no_segment_acquire) model::TheMachine().AcquireFence();
    if (!no_segment_release) model::TheMachine().ReleaseFence();
  }
};

// A thread of the second kernel of few rows: the first one has marked the operation as begun.
struct TakingThread : ModelThread {
  void Enter(uint32_t*, uint32_t*) {}
};

struct ModelGroup : model::ModelGroup {
  char* EpochBuffer(int of_rank, uint32_t epoch) const {
    return model::ModelGroup::EpochBuffer(of_rank, epoch + (wrong_epoch && of_rank == rank));
  }
};

// Packets as they are, or broken.
template <class Packets>
struct MaybeBroken : model::MaybeBroken<Packets> {
  static bool TryGet(char* slot, size_t i, jin::Pack* p) {
    const bool all = model::MaybeBroken<Packets>::TryGet(slot, i, p);
    // Epoch buffers have 32 words or 64, and slot 0 is the first of them.
    return all || (one_not_awaited && model::TheMemory().shared(slot) % 32 == 0);
  }
};

// Segments as they are, or broken: the last one has the packs that are left (or one), and not as
// many as the others.
struct MaybeShort : jin::InSegments<jin::Buffer> {
  jin::Segment<jin::Buffer> At(uint32_t k) const {
    const size_t begin = k * packs, end = std::max(call.Packs(), begin + 1);
    return {call, begin, short_segment ? std::min(packs, end - begin) : packs};
  }
};

// The steps of an operation in segments as they are, or broken.
struct MaybeBrokenSchedule {
  static jin::Step At(int phases, uint32_t segments, uint32_t i) {
    jin::Step step = jin::Schedule::At(phases, segments, i);
    if (no_reduce_fence && phases == 3 && step.phase == 1) step.fence = false;
    if (!sent_early || i == 0 || i + 1 >= phases * segments) return step;
    // A segment is sent before the fence, and before the step that makes room for it.
    const jin::Step next = jin::Schedule::At(phases, segments, i + 1);
    if (next.fence) return next;
    return step.fence ? jin::Schedule::At(phases, segments, i - 1) : step;
  }
};

uint32_t EpochsOf(const Plan& plan) {
  const int phases = jin::PhasesOf(plan.algorithm);
  const uint32_t half_filled = phases == 2 && plan.segments > 1 ? plan.segments % 2 : 0;
  return jin::Epochs(phases, plan.segments) + half_filled;
}

uint32_t Value(int rank, int operation, size_t i, bool floating) {
  const uint32_t v = 1 + rank * 100 + operation * 1000 + static_cast<uint32_t>(i);
  if (!floating) return v % 5 == 0 ? 0xFFFFFFFFu : v;  // integers may look like an empty word
  const float f = static_cast<float>(v);
  return std::bit_cast<uint32_t>(f);
}

uint32_t Sum(int ranks, int operation, size_t i, bool floating) {
  uint32_t integer = 0;
  float real = 0;
  for (int r = 0; r < ranks; ++r) {
    const uint32_t v = Value(r, operation, i, floating);
    real += std::bit_cast<float>(v);
    integer += v;
  }
  return floating ? std::bit_cast<uint32_t>(real) : integer;
}

// One sequence of operations.
class Sequence : public model::KernelModel {
 public:
  Sequence(int ranks, std::vector<Plan> plans)
      : KernelModel(ranks, 128 * (ranks - 1), First(plans), {}), plans_(std::move(plans)) {
    memset(&local, 0, sizeof local);
    machine_.AddLocalMemory(local.out, sizeof local.out);
    machine_.AddLocalMemory(local.started, sizeof local.started);
    for (int r = 0; r < ranks_; ++r) {
      for (size_t k = 0; k < plans_.size(); ++k) {
        const Plan& plan = plans_[k];
        blocks_ = std::max(blocks_, plan.blocks);
        if (jin::EpochBufferBytesNeeded(plan.algorithm, jin::ElementType::kI32, plan.packs, ranks_,
                                        plan.segments) > epoch_buffer_bytes_) {
          machine_.Fail("the plan does not fit");
        }
        const size_t n = plan.packs * 4 * jin::InputShards(plan.algorithm, ranks_);
        for (size_t i = 0; i < n; ++i) inputs_[r][k].words[i] = Value(r, k, i, plan.floating);
      }
    }
    for (const Plan& plan : plans_) few_rows_ |= plan.algorithm == jin::Algorithm::kFewRows;
    blocks_ += few_rows_;  // the last one is the first kernel's
    AddThreads(blocks_, [this](int r, int b) { RunBlock(r, b); });
    machine_.OnEnd([this] { CheckEnd(); });
  }

 private:
  struct alignas(16) Input {
    uint32_t words[kMostRanks * kMostPacks * 4];
  };

  static uint32_t Epochs(const std::vector<Plan>& plans) {
    uint32_t epochs = 0;
    for (const Plan& plan : plans) epochs += EpochsOf(plan);
    return epochs;
  }
  // The first epoch. It wraps in the middle.
  static uint32_t First(const std::vector<Plan>& plans) { return 0u - Epochs(plans) / 2; }

  // Runs a kernel: that of one epoch, or that of several segments.
  template <class Body>
  void RunAs(ModelThread& t, const ModelGroup& g, const jin::Buffer& call, const Plan& plan) {
    if (plan.segments == 1) {
      jin::RunOperation<Body>(t, g, call);
      return;
    }
    const size_t packs = jin::SegmentPacks(plan.algorithm, plan.packs, ranks_, plan.segments);
    const uint32_t first = jin::Begin(t, g);
    const MaybeShort cut{{call, packs, plan.segments}};
    uint32_t step = 0;
    jin::RunSteps<Body, MaybeBrokenSchedule>(t, g, cut, first, &step);
    jin::End(t, g, first + EpochsOf(plan) - 1);
  }

  template <class Type, int N, class PacketsOfType = typename Type::Packets>
  void RunKernel(ModelThread& t, const ModelGroup& g, const jin::Buffer& call, const Plan& plan) {
    using Packets = MaybeBroken<PacketsOfType>;
    if (plan.algorithm == jin::Algorithm::kHybridCubeMesh) {
      // What a rank has no link to, it has no address of: an access would be outside of all
      // regions.
      jin::Linked<jin::Buffer> linked{call, jin::LinksOf(g.rank, ranks_)};
      const ModelGroup group = jin::WithoutUnlinked(g, linked.links);
      if (wrong_relay && ranks_ == 4 && g.rank == 0) linked.links.relay = 3;
      jin::RunOperation<jin::HybridCubeMesh<Type, N, Packets>>(t, group, linked);
      return;
    }
    jin::WithKernel<Type, N, Packets>(
        plan.algorithm, [&](auto body) { RunAs<typename decltype(body)::type>(t, g, call, plan); });
  }

  // Rows of one pack, with a residual of zeros. The normalized rows are not looked at.
  template <int N>
  void RunNorm(ModelThread& t, const ModelGroup& g, const jin::Buffer& call, const Plan& plan) {
    static const Input zeros{};
    static Input normed;
    const auto protocol = static_cast<jin::NormProtocol>(static_cast<int>(plan.algorithm) + 1);
    const jin::NormCall norm{
        .x = call.in,
        .residual = zeros.words,
        .weight = zeros.words,
        .bias = nullptr,
        .normed = normed.words,
        .new_residual = call.out,
        .shard_bytes = plan.algorithm == jin::Algorithm::kReduceScatter ? call.bytes : 0,
        .rows = static_cast<size_t>(plan.packs),
        .hidden = 4,
        .eps = 1,
        .weight_offset = 0,
        .algorithm = plan.algorithm,
        .protocol = protocol,
        .layer_norm = false,
        .float32_parameters = true,
        .aligned = true};
    jin::Norm<jin::F32, N, true, MaybeBroken<jin::BarePackets>>::Run(t, g, norm);
  }
  static_assert(static_cast<int>(jin::NormProtocol::kOneShot) ==
                    static_cast<int>(jin::Algorithm::kOneShot) + 1 &&
                static_cast<int>(jin::NormProtocol::kReduceScatter) ==
                    static_cast<int>(jin::Algorithm::kReduceScatter) + 1);

  // Both kernels of few rows, which run at the same time. The product is the input.
  template <class Type, int N>
  void RunFewRows(int block, const ModelGroup& g, const jin::Buffer& call, int k) {
    using Body = jin::FewRows<Type, N, MaybeBroken<jin::HalfPackets>>;
    TakingThread t{{block, plans_[k].blocks}};
    jin::RegionHeader* const h = g.Header();
    const uint32_t operation = k + 1;
    if (block == blocks_ - 1) {
      for (int b = 0; b < t.blocks; ++b) t.ModelThread::Enter(&h->busy[b], &h->closed);
      const uint32_t epoch = jin::Load(&h->epoch[0]);
      if (ended_by_first) jin::Store(&h->epoch[0], epoch + 1);
      local.started[g.rank] = operation;
      for (size_t i = call.Packs(); i-- > 0;) {
        Body::Send(g, epoch, call.Packs() * Body::Packets::kBytes, i, call.Load(i));
      }
    } else if (block < t.blocks) {
      machine_.Await([&] { return local.started[g.rank] == operation; });
      const uint32_t epoch = jin::Begin(t, g);
      if (cleared_early) jin::End(t, g, epoch);
      Body::Take(t, g, call, epoch);
      if (jin::Load(&h->busy[block]) != 1) machine_.Fail("wrong: runs, but is not marked as begun");
      jin::End(t, g, epoch);
    }
  }

  void RunBlock(int rank, int block) {
    const auto group = GroupOf<ModelGroup>(rank);
    for (size_t k = 0; k < plans_.size(); ++k) {
      const Plan& plan = plans_[k];
      const jin::Buffer call{inputs_[rank][k].words, local.out[rank][k],
                             static_cast<size_t>(16 * plan.packs)};
      if (plan.algorithm == jin::Algorithm::kFewRows) {
        ranks_ == 2 ? RunFewRows<jin::F32, 2>(block, group, call, static_cast<int>(k))
                    : RunFewRows<jin::F32, 0>(block, group, call, static_cast<int>(k));
      } else if (block < plan.blocks) {
        ModelThread thread{block, plan.blocks};
        if (plan.norm && !jin::OnlyCopies(plan.algorithm)) {
          ranks_ == 2 ? RunNorm<2>(thread, group, call, plan)
                      : RunNorm<0>(thread, group, call, plan);
        } else if (few_rows_) {
          RunKernel<jin::F32, 0, jin::HalfPackets>(thread, group, call, plan);
        } else if (ranks_ == 2 && plan.floating) {
          RunKernel<jin::F32, 2>(thread, group, call, plan);
        } else if (plan.floating) {
          RunKernel<jin::F32, 0>(thread, group, call, plan);
        } else {
          RunKernel<jin::I32, 0>(thread, group, call, plan);
        }
      }
      // Broken: a first kernel begins while the second one before it runs.
      const bool first = few_rows_ && block == blocks_ - 1, early = few_rows_ && first_early;
      if (!(early && first))
        EndKernel(rank, static_cast<int>(k), blocks_ - early, !no_acquire, !no_release);
      if (block == 0) EndOperation(rank, static_cast<int>(k));
    }
  }

  void EndOperation(int rank, int k) {
    const Plan& plan = plans_[k];
    const size_t shard = 4 * plan.packs;
    const jin::Algorithm algorithm = plan.algorithm;
    const size_t n = shard * jin::OutputShards(algorithm, ranks_);
    for (size_t i = 0; i < n; ++i) {
      const bool part = jin::InputShards(algorithm, ranks_) > 1;
      const size_t in = (part ? rank * shard : 0) + i % shard;
      const uint32_t expected = jin::OnlyCopies(algorithm)
                                    ? Value(static_cast<int>(i / shard), k, in, plan.floating)
                                    : Sum(ranks_, k, in, plan.floating);
      if (few_rows_ && i % 4 >= 2) continue;  // of half packets
      if (local.out[rank][k][i] != expected) {
        FailResult(k, rank, std::string(" (") + jin::AlgorithmName(algorithm) + ")");
      }
    }
    if (!idle_epochs) return;
    // Blocks that an operation does not launch keep their epoch.
    for (int b = plan.blocks; b < jin::kMaxBlocks; ++b) Header(rank)->epoch[b] -= EpochsOf(plan);
  }

  void CheckEnd() {
    CheckEmpty();
    for (int r = 0; r < ranks_ && !idle_epochs; ++r) {
      for (uint32_t epoch : Header(r)->epoch) {
        if (epoch != First(plans_) + Epochs(plans_)) machine_.Fail("wrong: the epoch");
      }
    }
  }

  const std::vector<Plan> plans_;
  int blocks_ = 1;
  bool few_rows_ = false;
  Input inputs_[kMostRanks][kMostOperations];
};

// How the operations of a sequence differ apart from their kind.
Plan PlanOf(int pattern, int k, jin::Algorithm algorithm) {
  const bool cut = jin::RunsInSegments(algorithm);
  switch (pattern) {
    case 0:
      return {algorithm, true, 1, 1};
    case 1:
      return {algorithm, false, 1, 1};
    case 2:  // both kinds of packets and other layouts in the same memory
      return {algorithm, k % 3 == 0, 1 + k % 2, 1};
    case 3:  // kernels of two blocks and of one
      return {algorithm, k % 4 < 2, 2, k % 3 == 1 ? 1 : 2};
    case 4:  // one, two or four segments
      return {algorithm, k % 2 == 0, 2, 1, cut ? 1u << (k + 1) % 3 : 1u};
    case 6:  // norms of one row and of two; kernels of two blocks and of one
      return {algorithm, true, 1 + (k + 1) % 2, k % 3 == 1 ? 1 : 2, 1, true};
    default:  // first four segments (broken: three), of which the last is not full; kernels of two
              // blocks and of one
      if (cut && k == 0)
        return odd_segments ? Plan{algorithm, true, 5, 2, 3} : Plan{algorithm, true, 7, 2, 4};
      return {algorithm, true, 4, k % 3 == 1 ? 1 : 2};
  }
}
constexpr int kPatterns = 7;
// Segments and norms: operations with many states.
bool IsLong(int pattern) { return pattern >= 4; }

}  // namespace

int main(int argc, char** argv) {
  model::Totals totals(argc, argv, 4);
  const int ranks = totals.ranks, operations = totals.operations;
  const bool mesh = totals.more == "mesh";
  const bool few_rows = totals.more == "few_rows";
  if (!totals.Fit(mesh ? 4 : 3, kMostOperations) || (mesh && ranks % 2 != 0)) return 2;
  // A hybrid cube mesh runs neither segments nor norms, and nor do sums of few rows.
  const int patterns = few_rows ? 1 : mesh ? 4 : kPatterns;
  const int kinds = few_rows ? 2 : kKinds;  // few rows, or one of the others
  for (int pattern = 0; pattern < patterns; ++pattern) {
    const int length = ranks > 2 && !mesh && IsLong(pattern) ? std::min(operations, 3) : operations;
    int combinations = 1;
    for (int k = 0; k < length && !mesh; ++k) combinations *= kinds;
    for (int combination = 0; combination < combinations; ++combination) {
      // The quick check takes sequences of one kind, and some others.
      const bool same = mesh || few_rows || combination % ((combinations - 1) / (kKinds - 1)) == 0;
      if (totals.more == "quick" && !same && combination % 11 != pattern) continue;
      std::vector<Plan> plans;
      std::string names = "pattern " + std::to_string(pattern);
      for (int k = 0, c = combination; k < length; ++k, c /= kinds) {
        const jin::Algorithm kind = mesh         ? jin::Algorithm::kHybridCubeMesh
                                    : !few_rows  ? kCollectives[c % kKinds]
                                    : c % 2 == 0 ? jin::Algorithm::kFewRows
                                                 : kCollectives[(combination + k) % kKinds];
        plans.push_back(PlanOf(pattern, k, kind));
        names += std::string(" ") + jin::AlgorithmName(kind);
      }
      if (totals.IsWrong(Sequence(ranks, plans).Search(), names)) return 1;
    }
  }
  totals.Print();
  return 0;
}
