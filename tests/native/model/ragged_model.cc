// Checks ragged all-to-alls (kernels/ragged.h), and dispatch and combine of experts
// (kernels/experts.h), which have the same windows, in all their behaviours (machine.h), for few
// ranks and small messages. The code that runs is that of the kernels and of the CPU backend; only
// what std::atomic_ref does is replaced.
//
//   ragged_model [variant] [ranks] [calls] [depth]
//
// Runs every sequence of so many calls, without a barrier between the ranks. In a call each rank
// sends 0, 1 or several packs to each other rank, in windows of one pack for each block. So streams
// have no window, one, or more than the epoch buffer has room for. 3 ranks have few streams in a
// call, and run a part of the sequences. The patterns: a block and packs
// of which half is sent; two blocks; and writes of all ranks into the same rows. The epoch wraps on
// the way. The check that all run the same operation is left to collectives_model.cc. `depth` is
// "quick", which runs some of the sequences, "full", or "experts": then each call is a dispatch or
// a combine, and the packs of a stream are the tokens that go to a rank.
//
// Checked are all results, that no rank waits for ever, that ranks access no words of a peer but
// packets and those by which blocks tell what they have taken, and that all of these have been
// cleared at the end. Variants other than "sound" break the protocol on purpose. Exit status: that
// of collectives_model.cc.
#include "kernel_model.h"
//
#include "xla_ffi/kernels/experts.h"
#include "xla_ffi/kernels/ragged.h"

namespace jin = jax_intranode;

namespace {

constexpr int kMostRanks = 3;
constexpr int kMostCalls = 3;
constexpr int kMostBlocks = 2;
constexpr int kMostPacks = 5;  // of a stream
constexpr int kRows = kMostRanks * kMostPacks;
constexpr int kTokens = 4;  // of a rank, with experts

enum class Kind { kRagged, kDispatch, kCombine };

// The packs that each rank sends to each other one; the first tokens, which have experts there.
struct Plan {
  int packs[kMostRanks][kMostRanks];
  bool overlaps;
  Kind kind = Kind::kRagged;
};

using model::Flag, model::ModelThread;
using Packets = model::MaybeBroken<jin::HalfPackets>;
Flag no_room("no_room"), room_a_window_early("room_a_window_early"), taken_early("taken_early"),
    no_fence("no_fence"), never_cleared("never_cleared");

// What threads access without the machine. All of it belongs to the state.
struct Local {
  uint32_t out[kMostRanks][kMostCalls][kRows][4];
};
Local local;

// A group as the protocol sees it, and the ways to break it: the functions below take the place of
// those of ragged.h.
struct ModelGroup : model::ModelGroup {};

bool HasTaken(const ModelGroup& g, int to, int block, uint32_t windows) {
  if (no_room) return true;
  return jin::HasTaken<ModelGroup>(g, to, block, windows - (room_a_window_early ? 1 : 0));
}
void TellTaken(const ModelGroup& g, int to, int block, uint32_t windows) {
  if (!no_fence) {
    model::TheMachine().AcquireFence();
    model::TheMachine().ReleaseFence();
  }
  jin::Store(jin::TakenOf(g, to, g.rank, block), windows + (taken_early ? 1 : 0));
}
void ClearTaken(const ModelGroup& g, int to, int block) {
  if (!never_cleared) jin::ClearTaken<ModelGroup>(g, to, block);
}
uint32_t Value(int rank, int call, int row, int word) {
  return 1 + rank * 10000 + call * 1000 + row * 10 + word;
}

// One sequence of calls.
class Sequence : public model::KernelModel {
 public:
  Sequence(int ranks, std::vector<Plan> plans, int blocks)
      : KernelModel(ranks,
                    jin::NoticeBytes(ranks, blocks, 1) +
                        2 * (ranks - 1) * blocks * jin::HalfPackets::kBytes,
                    0u - static_cast<uint32_t>(plans.size()) / 2,  // so the epoch wraps
                    Fields()),
        blocks_(blocks),
        plans_(std::move(plans)) {
    memset(&local, 0x5A, sizeof local);
    machine_.AddLocalMemory(&local, sizeof local);
    model::TheMemory().no_acquire = model::no_acquire;
    AddThreads(blocks_, [this](int r, int b) { RunBlock(r, b); });
    machine_.OnEnd([this] { CheckEmpty(); });
  }

 private:
  static std::vector<model::HeaderWords> Fields() {
    std::vector<model::HeaderWords> taken;
    for (int r = 0; r < kMostRanks; ++r) {
      taken.push_back({"taken of rank " + std::to_string(r),
                       offsetof(jin::RegionHeader, taken) + r * sizeof jin::RegionHeader{}.taken[0],
                       kMostBlocks});
    }
    return taken;
  }

  // A row is a pack. The rows for rank d are the first ones, so reads overlap.
  void RunBlock(int rank, int block) {
    const auto group = GroupOf<ModelGroup>(rank);
    for (size_t k = 0; k < plans_.size(); ++k) {
      ModelThread thread{block, blocks_};
      const uint32_t epoch = jin::Begin(thread, group);
      if (plans_[k].kind == Kind::kRagged) {
        RunRagged(thread, group, static_cast<int>(k), epoch);
      } else {
        RunExperts(thread, group, static_cast<int>(k), epoch);
      }
      jin::End(thread, group, epoch);
      EndKernel(rank, static_cast<int>(k), blocks_, true, !model::no_release);
      machine_.Forget(k);
      if (block == 0) CheckCall(rank, static_cast<int>(k));
    }
  }

  void RunRagged(ModelThread& thread, const ModelGroup& group, int k, uint32_t epoch) {
    const int rank = group.rank;
    alignas(16) uint32_t in[kMostPacks][4];
    int32_t tables[4][kMostRanks];
    for (int i = 0; i < kMostPacks; ++i) {
      for (int w = 0; w < 4; ++w) in[i][w] = Value(rank, k, i, w);
    }
    for (int r = 0; r < ranks_; ++r) {
      tables[0][r] = 0;
      tables[1][r] = plans_[k].packs[rank][r];
      tables[2][r] = PlaceOf(k, rank);
      tables[3][r] = plans_[k].packs[r][rank];
    }
    const auto window = static_cast<uint32_t>(blocks_);
    const jin::RaggedCall call{in, local.out[rank][k], tables[0], tables[1], tables[2], tables[3],
                               16, kMostPacks,         kRows,     1,         window};
    jin::RaggedTableOf<kMostRanks> table;
    uint32_t step = 0;
    jin::Ragged<jin::BF16, Packets>::Run(thread, group, call, table, epoch, &step);
  }

  // The row of token p of rank s is s * kTokens + p, on all ranks. Choice d of a token is of rank
  // d.
  void RunExperts(ModelThread& thread, const ModelGroup& group, int k, uint32_t epoch) {
    const int rank = group.rank;
    const bool combines = plans_[k].kind == Kind::kCombine;
    alignas(16) float in[kRows][4];
    float weights[kRows * kMostRanks];
    int32_t places[kRows * kMostRanks], ranks[kTokens] = {}, used = kRows;
    for (int row = 0; row < kRows; ++row) {
      for (int w = 0; w < 4; ++w) in[row][w] = static_cast<float>(Value(rank, k, row, w));
    }
    for (int i = 0; i < ranks_ * kTokens * ranks_; ++i) {
      const int s = i / ranks_ / kTokens, p = i / ranks_ % kTokens, d = i % ranks_;
      const bool goes = p < plans_[k].packs[s][d];
      places[i] = goes && d == rank ? s * kTokens + p : -1;
      weights[i] = 2;
      if (goes && s == rank) ranks[p] |= 1 << d;
    }
    const jin::ExpertsCall call{.in = in,
                                .out = local.out[rank][k],
                                .weights = weights,
                                .places = places,
                                .ranks = ranks,
                                .used = &used,
                                .row_bytes = 16,
                                .tokens = kTokens,
                                .choices = static_cast<uint32_t>(ranks_),
                                .capacity = kRows,
                                .window = static_cast<uint32_t>(blocks_),
                                .aligned = true};
    uint32_t step = 0;
    if (combines) {
      jin::Experts<jin::F32, 0, true, Packets>::Run(thread, group, call, epoch, &step);
    } else {
      jin::Experts<jin::F32, 0, false, Packets>::Run(thread, group, call, epoch, &step);
    }
  }

  // What a word of the result of a call with experts must be.
  uint32_t WantedOfExperts(int rank, int k, int row, int word) const {
    const int s = row / kTokens, p = row % kTokens;
    const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
    if (plans_[k].kind == Kind::kDispatch) {
      const bool came = s < ranks_ && p < plans_[k].packs[s][rank];
      return came ? bits(static_cast<float>(Value(s, k, p, word))) : 0x5A5A5A5A;
    }
    if (row >= kTokens) return 0x5A5A5A5A;
    float sum = 0;
    for (int d = 0; d < ranks_; ++d) {
      if (p < plans_[k].packs[rank][d]) {
        sum += 2 * static_cast<float>(Value(d, k, rank * kTokens + p, word));
      }
    }
    return bits(sum);
  }
  int PlaceOf(int k, int source) const { return plans_[k].overlaps ? 0 : source * kMostPacks; }

  void CheckCall(int rank, int k) {
    for (int row = 0; row < kRows; ++row) {
      int writer = -1;
      for (int r = 0; r < ranks_; ++r) {
        const int from = row - PlaceOf(k, r);
        if (from >= 0 && from < plans_[k].packs[r][rank]) writer = r;
      }
      for (int w = 0; w < 2; ++w) {  // of half packets
        const uint32_t wanted = plans_[k].kind != Kind::kRagged ? WantedOfExperts(rank, k, row, w)
                                : writer < 0 ? 0x5A5A5A5A
                                             : Value(writer, k, row - PlaceOf(k, writer), w);
        if (local.out[rank][k][row][w] != wanted) {
          FailResult(k, rank);
        }
      }
    }
  }

  const int blocks_;
  const std::vector<Plan> plans_;
};

// The `number`-th way to choose the lengths of all streams of a call.
Plan PlanOf(int ranks, size_t number, int longest, bool overlaps) {
  Plan plan{{}, overlaps};
  const int lengths[3] = {0, 1, longest};
  for (int r = 0; r < ranks; ++r) {
    for (int d = 0; d < ranks; ++d) {
      if (r == d) {
        plan.packs[r][d] = 1;
      } else {
        plan.packs[r][d] = lengths[number % 3];
        number /= 3;
      }
    }
  }
  return plan;
}

// Of three ranks: whether at most two streams of each call have packs, and one of 29 of these.
bool IsSmall(size_t number, size_t kinds, int calls) {
  if (number % 29 != 5) return false;
  for (int k = 0; k < calls; ++k, number /= kinds) {
    int streams = 0;
    for (size_t rest = number % kinds; rest > 0; rest /= 3) streams += rest % 3 != 0;
    if (streams > 2) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  model::Totals totals(argc, argv, 2);
  const int ranks = totals.ranks, calls = totals.operations;
  if (!totals.Fit(kMostRanks, kMostCalls)) return 2;
  const bool quick = totals.more == "quick", experts = totals.more == "experts";
  size_t kinds = 1;
  for (int k = 0; k < ranks * (ranks - 1); ++k) kinds *= 3;
  size_t sequences = 1;
  for (int k = 0; k < calls; ++k) sequences *= kinds;
  for (int pattern = 0; pattern < 3; ++pattern) {
    if (pattern > 0 && experts) continue;
    if (ranks > 2 && pattern == 1) continue;
    const int blocks = pattern == 1 ? 2 : 1;
    for (size_t number = 0; number < sequences; ++number) {
      if ((quick || pattern > 0) && number % 7 != static_cast<size_t>(pattern) % 7) continue;
      if (ranks > 2 && !IsSmall(number, kinds, calls)) continue;
      std::vector<Plan> plans;
      std::string names = "pattern " + std::to_string(pattern);
      for (int k = 0; k < calls; ++k) {
        size_t rest = number;
        for (int later = 0; later < k; ++later) rest /= kinds;
        const int longest = experts ? kTokens : blocks == 2 || ranks > 2 ? 3 : kMostPacks;
        plans.push_back(PlanOf(ranks, rest % kinds, longest, pattern == 2));
        if (experts) plans.back().kind = (number + k) % 2 == 0 ? Kind::kDispatch : Kind::kCombine;
        names += " " + std::to_string(rest % kinds);
      }
      if (totals.IsWrong(Sequence(ranks, plans, blocks).Search(), names)) return 1;
    }
  }
  totals.Print();
  return 0;
}
