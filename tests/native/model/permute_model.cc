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
// has CPU devices only; "quick", which runs some of the sequences; or "every_access", which has CPU
// devices and one member only, and leaves out no interleaving (machine.h). Of kernels of two blocks
// some sequences run. 3 ranks run fewer patterns, and with two members at most 2 calls.
//
// Checked are all results, that no rank meets another operation, that no rank waits for ever, that
// ranks access no words of a peer but packets and those by which ranks tell each other, and that
// all packets and all words of an operation have been cleared at the end. Variants other than
// "sound" break the protocol on purpose. Exit status: that of collectives_model.cc.
#include "atomics.h"
//
#include "half_packets.h"
#include "totals.h"
#include "xla_ffi/kernels/permute.h"
#include "xla_ffi/kernels/segments.h"
#include "xla_ffi/kernels/types.h"

namespace jin = jax_intranode;

namespace {

constexpr int kMostRanks = 3;
constexpr int kMostCalls = 4;
constexpr int kMostMembers = 2;
constexpr int kMostBlocks = 2;
constexpr int kMostPacks = 2;  // of a member

// The source of each rank, or -1.
using Permutation = std::vector<int>;

enum class Packets { kHalf, kBare, kFlagged };

struct Plan {
  std::vector<Permutation> members;
  int packs[kMostMembers];
  Packets packets;
  int blocks = 1;
};

struct Variant {
  bool room_a_call_early, no_room, begun_early, begun_late, no_release, no_acquire;
  bool one_epoch_buffer, never_armed, first_word_only, unsigned_room;
  bool told_without_room, told_to_all, one_operation_word;
};
Variant broken;

// What threads access without the machine. All of it belongs to the state.
struct Local {
  uint32_t out[kMostRanks][kMostCalls][kMostMembers][kMostPacks * 4];
};
Local local;

struct ModelThread {
  int block, blocks;
  int thread = 0;
  int Thread() const { return thread; }
  int Threads() const { return 1; }
  int Block() const { return block; }
  int Blocks() const { return blocks; }
  void Sync() const {}
  size_t First() const { return block; }
  size_t Stride() const { return blocks; }
  bool Wait(size_t, int) {
    model::TheMachine().Wait();
    return true;
  }
  void Enter(uint32_t* busy, uint32_t*) {
    if (jin::Exchange(busy, 1) != 0) model::TheMachine().Fail("wrong: the region is busy");
  }
  void Arrived() const {}
  void Admit() const {}
  void Admit(uint32_t, uint32_t) const {}
  void MeetsOther(int, uint64_t) { model::TheMachine().Fail("wrong: meets another operation"); }
};

// A group as the protocol sees it, and the ways to break it: the functions below take the place of
// those of permute.h and same_operation.h.
struct ModelGroup : jin::Group {
  uint64_t operation;
  bool begins = false;        // this thread only begins the calls
  uint32_t destinations = 0;  // of the call; bit r: rank r
  uint64_t* OperationOf(int of, int to, uint32_t count) const {
    return jin::Group::OperationOf(of, to, broken.one_operation_word ? 0 : count);
  }
  char* EpochBuffer(int of_rank, uint32_t epoch) const {
    return jin::Group::EpochBuffer(of_rank, broken.one_epoch_buffer ? 0 : epoch);
  }
};

bool HasRoom(const ModelGroup& g, int to, uint32_t epoch) {
  if (broken.no_room || (broken.told_without_room && g.begins)) return true;
  if (broken.unsigned_room) return jin::LoadAcquire(jin::BegunOf(g, to, g.rank)) >= epoch - 1;
  return jin::HasRoom<ModelGroup>(g, to, broken.room_a_call_early ? epoch - 1 : epoch);
}
void TellBegun(const ModelGroup& g, int peer, uint32_t epoch) {
  if (!broken.begun_late) jin::TellBegun<ModelGroup>(g, peer, epoch + (broken.begun_early ? 1 : 0));
  if (broken.told_to_all && g.begins && (g.destinations >> peer & 1) == 0) {
    jin::TellOperation(g, peer, epoch);
  }
}
// Packets as they are, or broken.
template <class Packets>
struct MaybeBroken : Packets {
  static bool TryGet(char* slot, size_t i, jin::Pack* p) {
    const bool all = Packets::TryGet(slot, i, p);
    constexpr bool kFlagged = std::is_same_v<Packets, jin::FlaggedPackets>;
    return !kFlagged && broken.first_word_only ? p->word[0] != jin::kEmpty : all;
  }
  static void Arm(char* slot, size_t i) {
    if (!broken.never_armed) Packets::Arm(slot, i);
  }
};

uint32_t Value(int rank, int call, int member, size_t i) {
  return 1 + rank * 1000 + call * 100 + member * 10 + static_cast<uint32_t>(i);
}

// One sequence of calls.
class Sequence {
 public:
  Sequence(int ranks, std::vector<Plan> plans, bool together, bool every_access)
      : ranks_(ranks),
        plans_(std::move(plans)),
        together_(together),
        epoch_buffer_bytes_(EpochBufferBytes(plans_)),
        words_(ranks * (kHeaderWords + 2 * epoch_buffer_bytes_ / 4)),
        machine_(words_, jin::kEmpty, 0, {every_access}) {
    const size_t region_bytes = jin::kHeaderBytes + 2 * epoch_buffer_bytes_;
    memset(&local, 0x5A, sizeof local);
    machine_.AddLocalMemory(&local, sizeof local);
    for (const Plan& plan : plans_) blocks_ = std::max(blocks_, plan.blocks);
    for (int r = 0; r < ranks_; ++r) {
      memory_.push_back(std::make_unique<Aligned[]>(region_bytes / sizeof(Aligned) + 1));
      regions_.push_back(reinterpret_cast<char*>(memory_[r].get()));
      jin::RegionHeader* const header = Header(r);
      memset(static_cast<void*>(header), 0, jin::kHeaderBytes);
      // All calls but those of the ranks' own blocks look at the first ones only.
      for (uint32_t& epoch : header->epoch) epoch = First();
      header->operations = First();
      machine_.AddLocalMemory(header->epoch, sizeof header->epoch);
      machine_.AddLocalMemory(header->busy, sizeof header->busy);
      machine_.AddLocalMemory(&header->operations, sizeof header->operations);
      for (size_t word = 0; word < kHeaderWords; ++word) {
        machine_.SetInitial(r * WordsOfRank() + word, word < kBegunWords ? First() : 0);
      }
    }
    model::TheMemory().machine = &machine_;
    model::TheMemory().shared = [this](const void* at) { return WordAt(at); };
    // On GPUs nothing releases but the end of a kernel. (On CPU devices TellBegun does so, too.)
    model::TheMemory().no_release = true;
    for (int r = 0; r < ranks_; ++r) {
      const std::string rank = "rank " + std::to_string(r);
      if (together_) {
        machine_.AddThread(rank, [this, r] { RunTogether(r); });
        continue;
      }
      machine_.AddThread(rank + " check", [this, r] { RunBlock(r, -1); });
      for (int b = 0; b < blocks_; ++b) {
        machine_.AddThread(rank + " block " + std::to_string(b), [this, r, b] { RunBlock(r, b); });
      }
    }
    machine_.OnEnd([this] { CheckEnd(); });
    machine_.NameWords([this](size_t word) { return NameOf(word); });
  }

  model::Machine::Result Search() { return machine_.Search(); }

 private:
  struct alignas(64) Aligned {
    char bytes[64];
  };
  // What peers write in a header: begun, and peer_operation.
  static constexpr size_t kBegunWords = kMostRanks;
  static constexpr size_t kHeaderWords = kBegunWords + 2 * 2 * kMostRanks;

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
  uint32_t First() const { return 0u - static_cast<uint32_t>(plans_.size()) / 2; }
  size_t WordsOfRank() const { return kHeaderWords + 2 * epoch_buffer_bytes_ / 4; }
  jin::RegionHeader* Header(int r) const {
    return reinterpret_cast<jin::RegionHeader*>(regions_[r]);
  }
  int CurrentRank() const { return machine_.current() / (together_ ? 1 : blocks_ + 1); }

  long WordAt(const void* at) {
    const char* const address = static_cast<const char*>(at);
    for (int r = 0; r < ranks_; ++r) {
      const auto within = [address](const void* begin, size_t bytes) {
        const long offset = address - static_cast<const char*>(begin);
        return offset >= 0 && offset < static_cast<long>(bytes) ? offset : -1;
      };
      const long first = r * WordsOfRank();
      for (int p = 0; p < ranks_; ++p) {
        jin::RegionHeader* const header = Header(r);
        if (address == reinterpret_cast<char*>(&header->begun[p])) return first + p;
        for (int parity = 0; parity < 2; ++parity) {
          if (address != reinterpret_cast<char*>(&header->peer_operation[parity][p])) continue;
          return first + kBegunWords + 2 * (parity * kMostRanks + p);
        }
      }
      const long at_packet = within(regions_[r] + jin::kHeaderBytes, 2 * epoch_buffer_bytes_);
      if (at_packet >= 0) return first + kHeaderWords + at_packet / 4;
      if (within(regions_[r], jin::kHeaderBytes) >= 0) {
        if (CurrentRank() != r) machine_.Fail("wrong: accesses a peer's header");
        return -1;
      }
    }
    machine_.Fail("wrong: an access outside of all regions");
    return -1;
  }
  std::string NameOf(size_t word) const {
    const std::string of_rank = " of rank " + std::to_string(word / WordsOfRank());
    size_t in_rank = word % WordsOfRank();
    if (in_rank < kBegunWords) return "begun[" + std::to_string(in_rank) + "]" + of_rank;
    if (in_rank < kHeaderWords) {
      const size_t pair = (in_rank - kBegunWords) / 2;
      return "peer_operation[" + std::to_string(pair / kMostRanks) + "][" +
             std::to_string(pair % kMostRanks) + "]" + of_rank;
    }
    in_rank -= kHeaderWords;
    const size_t of_buffer = epoch_buffer_bytes_ / 4;
    return "word " + std::to_string(in_rank % of_buffer) + " of epoch buffer " +
           std::to_string(in_rank / of_buffer) + of_rank;
  }

  ModelGroup GroupOf(int rank) const {
    ModelGroup group;
    for (int r = 0; r < ranks_; ++r) group.region[r] = regions_[r];
    group.epoch_buffer_bytes = epoch_buffer_bytes_;
    group.rank = rank;
    group.size = ranks_;
    return group;
  }
  struct alignas(16) Input {
    uint32_t words[kMostMembers][kMostPacks * 4];
  };
  // A call as a rank sees it. `input` must live as long.
  jin::Permutes CallOf(int rank, int k, Input* input) const {
    const Plan& plan = plans_[k];
    jin::Permutes call;
    for (size_t m = 0; m < plan.members.size(); ++m) {
      const Permutation& sources = plan.members[m];
      for (int i = 0; i < plan.packs[m] * 4; ++i) input->words[m][i] = Value(rank, k, m, i);
      const auto to = std::find(sources.begin(), sources.end(), rank);
      call.Append({input->words[m], local.out[rank][k][m], static_cast<size_t>(16 * plan.packs[m])},
                  sources[rank], to == sources.end() ? -1 : static_cast<int>(to - sources.begin()));
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
    ModelGroup group = GroupOf(rank);
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
        if (broken.begun_late && block == 0) TellAllBegun(group, First() + k + 1);
      }
      EndKernel(rank, static_cast<int>(k));
      if (block == 0) CheckCall(rank, static_cast<int>(k));
    }
  }

  // A CPU device, as engine.cc and host_group.cc do.
  void RunTogether(int rank) {
    ModelGroup group = GroupOf(rank);
    for (size_t k = 0; k < plans_.size(); ++k) {
      Input input;
      const jin::Permutes call = CallOf(rank, k, &input);
      const uint32_t epoch = First() + static_cast<uint32_t>(k);
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
      if (broken.begun_late) TellAllBegun(group, epoch + 1);
      CheckCall(rank, static_cast<int>(k));
      machine_.AcquireFence();
      if (!broken.no_release) machine_.ReleaseFence();
      machine_.Forget(k);
    }
  }

  void TellAllBegun(const ModelGroup& group, uint32_t epoch) const {
    for (int r = 0; r < ranks_; ++r) {
      if (r == group.rank) continue;
      jin::Store(jin::BegunOf(group, group.rank, r), epoch);
    }
  }

  // The end of a kernel orders all that its blocks did before all that the next kernel does.
  void EndKernel(int rank, int call) {
    machine_.AcquireFence();
    machine_.Barrier(call * ranks_ + rank, blocks_ + 1);
    if (!broken.no_release) machine_.ReleaseFence();
    machine_.Forget(call);
  }

  void CheckCall(int rank, int k) {
    const Plan& plan = plans_[k];
    for (size_t m = 0; m < plan.members.size(); ++m) {
      const int source = plan.members[m][rank];
      for (int i = 0; i < plan.packs[m] * 4; ++i) {
        if (plan.packets == Packets::kHalf && i % 4 >= 2 && source != rank && source >= 0) continue;
        const uint32_t expected = source < 0 ? 0 : Value(source, k, m, i);
        if (local.out[rank][k][m][i] != expected) {
          machine_.Fail("wrong: the result of call " + std::to_string(k) + " on rank " +
                        std::to_string(rank));
        }
      }
    }
  }

  void CheckEnd() {
    for (int r = 0; r < ranks_; ++r) {
      const size_t first = r * WordsOfRank();
      for (size_t word = kBegunWords; word < WordsOfRank(); ++word) {
        const uint32_t empty = word < kHeaderWords ? 0 : jin::kEmpty;
        if (machine_.Newest(first + word) != empty) {
          machine_.Fail("wrong: left full: " + NameOf(first + word));
        }
      }
      const uint32_t epoch = First() + static_cast<uint32_t>(plans_.size());
      if (!together_ && (Header(r)->operations != epoch || Header(r)->epoch[0] != epoch)) {
        machine_.Fail("wrong: the epoch");
      }
    }
  }

  const int ranks_;
  const std::vector<Plan> plans_;
  const bool together_;
  const size_t epoch_buffer_bytes_, words_;
  int blocks_ = 1;
  std::vector<std::unique_ptr<Aligned[]>> memory_;
  std::vector<char*> regions_;
  model::Machine machine_;
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
  const bool known =
      model::Break<Variant>(&broken, totals.variant,
                            {{"room_a_call_early", {&Variant::room_a_call_early}},
                             {"no_room", {&Variant::no_room}},
                             {"unsigned_room", {&Variant::unsigned_room}},
                             {"begun_early", {&Variant::begun_early}},
                             {"begun_late", {&Variant::begun_late}},
                             {"no_release", {&Variant::no_release}},
                             {"no_acquire", {&Variant::no_acquire}},
                             {"one_epoch_buffer", {&Variant::one_epoch_buffer}},
                             {"never_armed", {&Variant::never_armed}},
                             {"first_word_only", {&Variant::first_word_only}},
                             {"told_without_room", {&Variant::told_without_room}},
                             {"told_to_all", {&Variant::told_to_all}},
                             {"one_operation_word", {&Variant::one_operation_word}}});
  if (!totals.Fit(known, kMostRanks, kMostCalls)) return 2;
  model::TheMemory().no_acquire = broken.no_acquire;
  const bool quick = totals.more == "quick", every_access = totals.more == "every_access";
  const std::vector<Permutation> all = PermutationsOf(ranks);
  const size_t kinds = all.size();
  const int first = totals.more == "together" || every_access ? kTogether : 0;
  const int end = every_access ? kTogether + 1 : kPatterns;
  for (int pattern = first; pattern < end; ++pattern) {
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
      const bool wrong = totals.IsWrong(
          Sequence(ranks, plans, pattern >= kTogether, every_access).Search(), names);
      if (wrong) return 1;
    }
  }
  totals.Print();
  return 0;
}
