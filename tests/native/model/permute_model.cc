// Checks permutes (kernels/permute.h) in all their behaviours (machine.h), for few ranks and small
// messages. The code that runs is that of the kernels and of the CPU backend; only what
// std::atomic_ref does is replaced.
//
//   permute_model [variant] [ranks] [calls] [depth]
//
// Runs every sequence of so many calls, without a barrier between the ranks. A call is any partial
// permutation: a rank may send to itself, send nothing or get nothing. Sequences that differ only
// in the names of the ranks count as one. The epoch wraps on the way. The patterns differ in what
// else a call has: one member or two with permutations of their own, packets of both kinds, blocks,
// and whether a rank is a GPU or a CPU device. A GPU has a thread that begins the calls
// (BeginPermute) beside those that work on the data. It stands for the threads of one block, which
// run one after another. On a CPU device one thread does all. `depth` is "full"; "together", which
// has CPU devices only; or "quick", which runs some of the sequences. Of kernels of two blocks
// some sequences run. 3 ranks run fewer patterns, and with two members at most 2 calls.
//
// Checked are all results, that no rank meets another operation, that no rank waits for ever, that
// ranks access no words of a peer but packets and those by which ranks tell each other, and that
// all packets and all words of an operation have been cleared at the end. Variants other than
// "sound" break the protocol on purpose. Exit status: that of collectives_model.cc.
#include "kernel_model.h"
//
#include "tests/native/tables.h"
#include "xla_ffi/kernels/segments.h"

namespace jin = jax_intranode;

namespace {

constexpr int kMostRanks = 3;
constexpr int kMostCalls = 4;
constexpr int kMostMembers = 2;
constexpr int kMostBlocks = 2;
constexpr int kMostPacks = 2;  // of a member

using jin::Permutation;

enum class Packets { kHalf, kBare, kFlagged };

struct Plan {
  std::vector<Permutation> members;
  int packs[kMostMembers];
  Packets packets;
  int blocks = 1;
};

using model::Flag, model::MaybeBroken, model::ModelThread;
Flag room_a_call_early("room_a_call_early"), no_room("no_room"), unsigned_room("unsigned_room"),
    begun_early("begun_early"), begun_late("begun_late"), told_without_room("told_without_room"),
    told_to_all("told_to_all"), one_operation_word("one_operation_word");

// What threads access without the machine. All of it belongs to the state.
struct Local {
  uint32_t out[kMostRanks][kMostCalls][kMostMembers][kMostPacks * 4];
};
Local local;

// A group as the protocol sees it, and the ways to break it: the functions below take the place of
// those of permute.h and same_operation.h.
struct ModelGroup : model::ModelGroup {
  uint64_t operation;
  bool begins = false;        // this thread only begins the calls
  uint32_t destinations = 0;  // of the call; bit r: rank r
  uint64_t* OperationOf(int of, int to, uint32_t count) const {
    return jin::Group::OperationOf(of, to, one_operation_word ? 0 : count);
  }
};

bool HasRoom(const ModelGroup& g, int to, uint32_t epoch) {
  if (no_room || (told_without_room && g.begins)) return true;
  if (unsigned_room) return jin::LoadAcquire(jin::BegunOf(g, to, g.rank)) >= epoch - 1;
  return jin::HasRoom<ModelGroup>(g, to, room_a_call_early ? epoch - 1 : epoch);
}
void TellBegun(const ModelGroup& g, int peer, uint32_t epoch) {
  if (!begun_late) jin::TellBegun<ModelGroup>(g, peer, epoch + (begun_early ? 1 : 0));
  if (told_to_all && g.begins && (g.destinations >> peer & 1) == 0) {
    jin::TellOperation(g, peer, epoch);
  }
}
uint32_t Value(int rank, int call, int member, size_t i) {
  return 1 + rank * 1000 + call * 100 + member * 10 + static_cast<uint32_t>(i);
}

// One sequence of calls.
class Sequence : public model::KernelModel {
 public:
  Sequence(int ranks, std::vector<Plan> plans, bool together)
      : KernelModel(ranks, EpochBufferBytes(plans), First(plans), Fields(First(plans))),
        plans_(std::move(plans)),
        together_(together) {
    memset(&local, 0x5A, sizeof local);
    machine_.AddLocalMemory(&local, sizeof local);
    for (const Plan& plan : plans_) blocks_ = std::max(blocks_, plan.blocks);
    // On GPUs nothing releases but the end of a kernel. (On CPU devices TellBegun does so, too.)
    model::TheMemory().no_release = true;
    model::TheMemory().no_acquire = model::no_acquire;
    AddThreads(together_ ? 1 : blocks_ + 1,
               [this](int r, int b) { together_ ? RunTogether(r) : RunBlock(r, b - 1); });
    machine_.OnEnd([this] { CheckEnd(); });
  }

 private:
  static std::vector<model::HeaderWords> Fields(uint32_t first) {
    constexpr size_t kTold = offsetof(jin::RegionHeader, peer_operation);
    constexpr size_t kOfParity = sizeof(jin::RegionHeader::peer_operation) / 2;
    return {{"begun", offsetof(jin::RegionHeader, begun), kMostRanks, first},
            {"peer_operation[0], half", kTold, 2 * kMostRanks},
            {"peer_operation[1], half", kTold + kOfParity, 2 * kMostRanks}};
  }
  static size_t PacketBytes(const Plan& plan) {
    return plan.packets == Packets::kHalf   ? jin::HalfPackets::kBytes
           : plan.packets == Packets::kBare ? jin::BarePackets::kBytes
                                            : jin::FlaggedPackets::kBytes;
  }
  static size_t EpochBufferBytes(const std::vector<Plan>& plans) {
    size_t most = 0;
    for (const Plan& plan : plans) {
      size_t packs = 0;
      for (size_t m = 0; m < plan.members.size(); ++m) packs += plan.packs[m];
      most = std::max(most, packs * PacketBytes(plan));
    }
    return most;
  }
  // The first epoch. It wraps in the middle.
  static uint32_t First(const std::vector<Plan>& plans) {
    return 0u - static_cast<uint32_t>(plans.size()) / 2;
  }
  struct alignas(16) Input {
    uint32_t words[kMostMembers][kMostPacks * 4];
  };
  // A call as a rank sees it. `input` must live as long.
  jin::Permutes CallOf(int rank, int k, Input* input) const {
    const Plan& plan = plans_[k];
    jin::Permutes call;
    for (size_t m = 0; m < plan.members.size(); ++m) {
      for (int i = 0; i < plan.packs[m] * 4; ++i) input->words[m][i] = Value(rank, k, m, i);
      const jin::Buffer buffer{input->words[m], local.out[rank][k][m],
                               static_cast<size_t>(16 * plan.packs[m])};
      jin::AddMember(&call, buffer, plan.members[m], rank);
    }
    return call;
  }

  template <class Run>
  static void WithPackets(Packets packets, Run run) {
    switch (packets) {
      case Packets::kHalf:
        return run(std::type_identity<jin::Permute<jin::BF16, 0, MaybeBroken<jin::HalfPackets>>>());
      case Packets::kBare:
        return run(std::type_identity<jin::Permute<jin::BF16, 0, MaybeBroken<jin::BarePackets>>>());
      case Packets::kFlagged:
        return run(
            std::type_identity<jin::Permute<jin::I8, 0, MaybeBroken<jin::FlaggedPackets>>>());
    }
  }

  // A block of a kernel on GPUs; -1: the one that begins the calls.
  void RunBlock(int rank, int block) {
    auto group = GroupOf<ModelGroup>(rank);
    for (size_t k = 0; k < plans_.size(); ++k) {
      const Plan& plan = plans_[k];
      Input input;
      const jin::Permutes call = CallOf(rank, k, &input);
      group.operation = 100 + k;
      group.begins = block < 0;
      group.destinations = 0;
      for (int m = 0; m < call.count; ++m) {
        if (call.destination[m] >= 0) group.destinations |= 1u << call.destination[m];
      }
      if (block < 0) {
        // Thread 0 comes last: it ends the operation, after all others have read the count.
        for (int t = ranks_ - 1; t >= 0; --t) {
          ModelThread thread{0, 1, t};
          jin::BeginPermute(thread, group, call);
        }
      } else if (block < plan.blocks) {
        ModelThread thread{block, plan.blocks};
        WithPackets(plan.packets, [&](auto body) {
          jin::RunOperation<typename decltype(body)::type>(thread, group, call);
        });
        // In the kernel that has armed, so nothing orders it.
        if (begun_late && block == 0) TellAllBegun(group, First(plans_) + k + 1);
      }
      EndKernel(rank, static_cast<int>(k), blocks_ + 1, true, !model::no_release);
      machine_.Forget(k);
      if (block == 0) CheckCall(rank, static_cast<int>(k));
    }
  }

  // A CPU device, as engine.cc and host_group.cc do.
  void RunTogether(int rank) {
    auto group = GroupOf<ModelGroup>(rank);
    for (size_t k = 0; k < plans_.size(); ++k) {
      Input input;
      const jin::Permutes call = CallOf(rank, k, &input);
      const uint32_t epoch = First(plans_) + static_cast<uint32_t>(k);
      for (int r = 0; r < ranks_; ++r) {
        if (r != rank) TellBegun(group, r, epoch);
      }
      ModelThread thread{0, 1};
      WithPackets(plans_[k].packets, [&](auto body) {
        using Body = typename decltype(body)::type;
        for (int phase = 0; phase < Body::kPhases; ++phase) {
          Body::RunPhase(phase, thread, group, call, epoch);
        }
      });
      if (begun_late) TellAllBegun(group, epoch + 1);
      CheckCall(rank, static_cast<int>(k));
      machine_.AcquireFence();
      if (!model::no_release) machine_.ReleaseFence();
      machine_.Forget(k);
    }
  }

  void TellAllBegun(const ModelGroup& group, uint32_t epoch) const {
    for (int r = 0; r < ranks_; ++r) {
      if (r == group.rank) continue;
      jin::Store(jin::BegunOf(group, group.rank, r), epoch);
    }
  }

  void CheckCall(int rank, int k) {
    const Plan& plan = plans_[k];
    for (size_t m = 0; m < plan.members.size(); ++m) {
      const int source = plan.members[m][rank];
      for (int i = 0; i < plan.packs[m] * 4; ++i) {
        if (plan.packets == Packets::kHalf && i % 4 >= 2 && source != rank && source >= 0) continue;
        const uint32_t expected = source < 0 ? 0 : Value(source, k, m, i);
        if (local.out[rank][k][m][i] != expected) {
          FailResult(k, rank);
        }
      }
    }
  }

  void CheckEnd() {
    CheckEmpty(kMostRanks);  // all but `begun`
    const uint32_t epoch = First(plans_) + static_cast<uint32_t>(plans_.size());
    for (int r = 0; r < ranks_ && !together_; ++r) {
      if (Header(r)->operations != epoch || Header(r)->epoch[0] != epoch) {
        machine_.Fail("wrong: the epoch");
      }
    }
  }

  const std::vector<Plan> plans_;
  const bool together_;
  int blocks_ = 1;
};

// All partial permutations of so many ranks: the sources of each.
std::vector<Permutation> PermutationsOf(int ranks) {
  std::vector<Permutation> all{{}};
  for (int r = 0; r < ranks; ++r) {
    std::vector<Permutation> longer;
    for (const Permutation& begin : all) {
      for (int source = -1; source < ranks; ++source) {
        if (source >= 0 && std::find(begin.begin(), begin.end(), source) != begin.end()) continue;
        longer.push_back(begin);
        longer.back().push_back(source);
      }
    }
    all = std::move(longer);
  }
  return all;
}

// Whether no other names of the ranks give a smaller sequence. Those have the same behaviours.
bool IsFirstOfItsKind(const std::vector<Permutation>& sequence, int ranks) {
  std::vector<int> name(ranks);
  for (int r = 0; r < ranks; ++r) name[r] = r;
  while (std::next_permutation(name.begin(), name.end())) {
    std::vector<Permutation> renamed;
    for (const Permutation& sources : sequence) {
      renamed.emplace_back(ranks);
      for (int r = 0; r < ranks; ++r) {
        renamed.back()[name[r]] = sources[r] < 0 ? -1 : name[sources[r]];
      }
    }
    if (renamed < sequence) return false;
  }
  return true;
}

// Those from kTogether on have one thread for each rank, which does all but the operation check.
constexpr int kPatterns = 6, kTogether = 4;
constexpr int kBlocks = 3;

// How the calls of a sequence differ apart from their permutation. `other` is another one.
Plan PlanOf(int pattern, int k, const Permutation& permutation, const Permutation& other) {
  switch (pattern) {
    case 0:
      return {{permutation}, {1}, Packets::kHalf};
    case 1:  // both kinds of packets, whole, in the same memory
      return {{permutation}, {1}, k % 2 == 0 ? Packets::kBare : Packets::kFlagged};
    case 2:  // two members, of one pack or two
      return {{permutation, other}, {1 + k % 2, 1}, Packets::kHalf};
    case kBlocks:  // kernels of two blocks and of one
      return {{permutation}, {2}, Packets::kHalf, k % 3 == 1 ? 1 : 2};
    case 4:
      return {{permutation}, {1}, Packets::kHalf};
    default:
      return {{permutation, other}, {1, 1}, Packets::kHalf};
  }
}

}  // namespace

int main(int argc, char** argv) {
  model::Totals totals(argc, argv, 3);
  const int ranks = totals.ranks, calls = totals.operations;
  if (!totals.Fit(kMostRanks, kMostCalls)) return 2;
  const bool quick = totals.more == "quick";
  const std::vector<Permutation> all = PermutationsOf(ranks);
  const size_t kinds = all.size();
  const int first = totals.more == "together" ? kTogether : 0;
  for (int pattern = first; pattern < kPatterns; ++pattern) {
    if (ranks > 2 && pattern > 0 && pattern < kTogether) continue;
    const int length = ranks > 2 && pattern > kTogether ? std::min(calls, 2) : calls;
    size_t sequences = 1;
    for (int k = 0; k < length; ++k) sequences *= kinds;
    for (size_t number = 0; number < sequences; ++number) {
      if (quick && number % 97 != static_cast<size_t>(pattern)) continue;
      std::vector<Permutation> sequence, with_others;
      for (size_t k = 0, rest = number; k < static_cast<size_t>(length); ++k, rest /= kinds) {
        sequence.push_back(all[rest % kinds]);
      }
      if (!quick && !IsFirstOfItsKind(sequence, ranks)) continue;
      if (pattern == kBlocks && length > 2 && number % 11 != 3) continue;
      std::vector<Plan> plans;
      std::string names = "pattern " + std::to_string(pattern);
      for (int k = 0; k < length; ++k) {
        const Permutation& other = all[(number / 7 + number * 5 + k * 3) % kinds];
        plans.push_back(PlanOf(pattern, k, sequence[k], other));
        for (const Permutation& member : plans.back().members) {
          names += " [";
          for (int source : member) names += source < 0 ? "-" : std::to_string(source);
          names += "]";
        }
      }
      const bool wrong =
          totals.IsWrong(Sequence(ranks, plans, pattern >= kTogether).Search(), names);
      if (wrong) return 1;
    }
  }
  totals.Print();
  return 0;
}
