// Checks how the fused kernel's chunks travel (cuda/fused_send.cuh), in all behaviours of few
// ranks: grants of rings, numbers of operations, flags, fences. CUDA's warps can't run here, so
// this file repeats what they do with shared memory, step by step:
//
//   the block that begins first   grants its ring to all peers (fused_kernel.cuh)
//   two sender warps              await a peer's grant, copy chunks, publish them with a fence and
//   a
//                                 flag each (ChunkSender)
//   or, if products are `direct`  a math warpgroup that stores chunks, and a sender warp that
//                                 publishes them (StoreForPeer, PublishProducts)
//   a warp that receives          awaits the flag of each slot and reads the chunk
//
//   fused_model [variant] [ranks] [operations] [copied|direct]
//
// Runs every sequence of so many operations on two groups that share their rings: all ranks, and
// the first two. Checked is that every chunk is the right one, that no two accesses of a slot race,
// and that no rank waits for ever. Variants other than "sound" break the protocol on purpose. Exit
// status: that of collectives_model.cc.
#include "totals.h"

using model::Machine;
using model::Order;

namespace {

constexpr int kMostRanks = 3;
constexpr int kGroups = 2;
constexpr int kChunks = 2;  // to each peer; one for each sender warp
constexpr int kThreads = 3;

struct Variant {
  bool flag_first, no_fence, no_acquire, no_grant, any_flag, any_grant, own_number, granted_early;
};
Variant broken;

class Run {
 public:
  Run(int ranks, std::vector<int> groups, bool direct)
      : ranks_(ranks),
        groups_(std::move(groups)),
        direct_(direct),
        machine_(Words(), 0, ranks * kSlots) {
    for (int r = 0; r < ranks_; ++r) {
      for (int t = 0; t < kThreads; ++t) {
        const char* const names[] = {" receives", " sends", " sends too"};
        machine_.AddThread("rank " + std::to_string(r) + names[t], [this, r, t] { RunWarp(r, t); });
      }
    }
    machine_.NameWords([this](size_t word) {
      if (word < FlagAt(0, 0)) return "a grant, word " + std::to_string(word);
      if (word < StoredAt(0)) {
        return "flag " + std::to_string((word - FlagAt(0, 0)) % kSlots) + " of rank " +
               std::to_string((word - FlagAt(0, 0)) / kSlots);
      }
      return "count of rank " + std::to_string(word - StoredAt(0));
    });
  }
  Machine::Result Search() { return machine_.Search(); }

 private:
  static constexpr int kSlots = (kMostRanks - 1) * kChunks;

  // Words: grants (64 bits) of each group, rank and peer; flags of each rank; counts of stored
  // chunks.
  size_t GrantAt(int group, int rank, int peer) const {
    return 2 * ((group * kMostRanks + rank) * kMostRanks + peer);
  }
  size_t FlagAt(int rank, int slot) const {
    return 2 * kGroups * kMostRanks * kMostRanks + rank * kSlots + slot;
  }
  size_t StoredAt(int rank) const { return FlagAt(ranks_, 0) + rank; }
  size_t Words() const { return StoredAt(ranks_); }
  size_t DataAt(int rank, int slot) const { return rank * kSlots + slot; }

  int SizeOf(int group) const { return group == 0 ? ranks_ : 2; }
  // The slot of a chunk at the receiver. Groups lay out the ring differently.
  int SlotOf(int group, int sender, int receiver, int chunk) const {
    const int size = SizeOf(group), step = (sender - receiver + size) % size - 1;
    return group == 0 ? step * kChunks + chunk : kChunks - 1 - chunk;
  }
  static uint64_t Value(int operation, int sender, int receiver, int chunk) {
    return 1 + operation * 1000 + sender * 100 + receiver * 10 + chunk;
  }

  // All warps of a rank's kernel see the numbers that the kernel before has left.
  void RunWarp(int rank, int thread) {
    uint32_t on_ring = 0;             // operations on this rank's ring so far
    uint32_t in_group[kGroups] = {};  // operations of each group so far
    for (size_t k = 0; k < groups_.size(); ++k) {
      const int group = groups_[k], size = SizeOf(group);
      if (rank >= size) continue;
      const uint32_t number = on_ring + 1, operations = in_group[group];
      if (thread == 0) {
        if (!broken.granted_early || k == 0) Grant(rank, group, number, operations);
        if (broken.granted_early && k + 1 < groups_.size() && rank < SizeOf(groups_[k + 1])) {
          Grant(rank, groups_[k + 1], number + 1,
                in_group[groups_[k + 1]] + (groups_[k + 1] == group));
        }
        Receive(static_cast<int>(k), rank, group, number);
      } else if (!direct_) {
        Send(static_cast<int>(k), rank, group, number, operations, thread - 1);
      } else if (thread == 1) {
        StoreDirectly(static_cast<int>(k), rank, group, operations);
      } else {
        PublishStored(static_cast<int>(k), rank, group, number, operations);
      }
      // The end of the kernel.
      machine_.AcquireFence();
      machine_.Barrier(static_cast<int>(k) * ranks_ + rank, kThreads);
      ++on_ring;
      ++in_group[group];
      machine_.Forget(k);
    }
  }

  void Grant(int rank, int group, uint32_t number, uint32_t operations) {
    machine_.Fence();
    for (int step = 1; step < SizeOf(group); ++step) {
      const int peer = (rank + step) % SizeOf(group);
      machine_.StorePair(GrantAt(group, peer, rank), uint64_t{number} << 32 | (operations + 1));
    }
  }

  uint32_t AwaitGrant(int rank, int group, int peer, uint32_t operations) {
    if (broken.no_grant) return operations + 1;
    for (;;) {
      const uint64_t grant = machine_.LoadPair(GrantAt(group, rank, peer), Order::kAcquire);
      const uint32_t granted = static_cast<uint32_t>(grant);
      if (broken.any_grant ? granted != 0 : granted == operations + 1) return grant >> 32;
      machine_.Wait();
    }
  }

  void Publish(int receiver, int slot, uint32_t number) {
    if (!broken.no_fence) machine_.Fence();
    machine_.Store(FlagAt(receiver, slot), number, Order::kRelaxed);
  }

  // A sender warp sends one chunk to each peer.
  void Send(int k, int rank, int group, uint32_t own, uint32_t operations, int chunk) {
    const int size = SizeOf(group);
    for (int step = 1; step < size; ++step) {
      const int peer = (rank - step + size) % size, slot = SlotOf(group, rank, peer, chunk);
      uint32_t number = AwaitGrant(rank, group, peer, operations);
      if (broken.own_number) number = own;
      if (broken.flag_first) Publish(peer, slot, number);
      machine_.Write(DataAt(peer, slot), Value(k, rank, peer, chunk));
      if (!broken.flag_first) Publish(peer, slot, number);
    }
  }

  // A math warpgroup stores all chunks for a peer, then counts them.
  void StoreDirectly(int k, int rank, int group, uint32_t operations) {
    const int size = SizeOf(group);
    for (int step = 1; step < size; ++step) {
      const int peer = (rank - step + size) % size;
      AwaitGrant(rank, group, peer, operations);
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        machine_.Write(DataAt(peer, SlotOf(group, rank, peer, chunk)), Value(k, rank, peer, chunk));
      }
      machine_.Store(StoredAt(rank), k * kMostRanks + step, Order::kRelease);
    }
  }
  void PublishStored(int k, int rank, int group, uint32_t own, uint32_t operations) {
    const int size = SizeOf(group);
    for (int step = 1; step < size; ++step) {
      const int peer = (rank - step + size) % size;
      while (machine_.Load(StoredAt(rank), broken.no_acquire ? Order::kRelaxed : Order::kAcquire) <
             static_cast<uint32_t>(k * kMostRanks + step)) {
        machine_.Wait();
      }
      uint32_t number = AwaitGrant(rank, group, peer, operations);
      if (broken.own_number) number = own;
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        Publish(peer, SlotOf(group, rank, peer, chunk), number);
      }
    }
  }

  void Receive(int k, int rank, int group, uint32_t number) {
    const int size = SizeOf(group);
    for (int step = 1; step < size; ++step) {
      const int sender = (rank + step) % size;
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int slot = SlotOf(group, sender, rank, chunk);
        const Order order = broken.no_acquire ? Order::kRelaxed : Order::kAcquire;
        for (;;) {
          const uint32_t flag = machine_.Load(FlagAt(rank, slot), order);
          if (broken.any_flag ? flag != 0 : flag == number) break;
          machine_.Wait();
        }
        if (machine_.Read(DataAt(rank, slot)) != Value(k, sender, rank, chunk)) {
          machine_.Fail("wrong: a chunk of operation " + std::to_string(k));
        }
      }
    }
  }

  const int ranks_;
  const std::vector<int> groups_;
  const bool direct_;
  Machine machine_;
};

}  // namespace

int main(int argc, char** argv) {
  model::Totals totals(argc, argv, 3);
  const int ranks = totals.ranks, operations = totals.operations;
  const bool known = model::Break<Variant>(&broken, totals.variant,
                                           {{"flag_first", {&Variant::flag_first}},
                                            {"no_fence", {&Variant::no_fence}},
                                            {"no_acquire", {&Variant::no_acquire}},
                                            {"no_grant", {&Variant::no_grant}},
                                            {"any_flag", {&Variant::any_flag}},
                                            {"any_grant", {&Variant::any_grant}},
                                            {"own_number", {&Variant::own_number}},
                                            {"granted_early", {&Variant::granted_early}}});
  if (!known || ranks < 2 || ranks > kMostRanks || operations < 1) return 2;
  for (int sequence = 0; sequence < 1 << operations; ++sequence) {
    std::vector<int> groups;
    for (int k = 0; k < operations; ++k) groups.push_back(sequence >> k & 1);
    const auto result = Run(ranks, groups, totals.more == "direct").Search();
    if (totals.IsWrong(result, "groups " + std::to_string(sequence))) return 1;
  }
  totals.Print();
  return 0;
}
