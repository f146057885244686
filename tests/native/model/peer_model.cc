// Checks the protocol of peer buffers (jax_intranode/peer.h) in all its behaviours (machine.h), for
// few ranks. The code that runs is that of the header; only what std::atomic_ref does is replaced.
//
//   peer_model [variant] [ranks] [calls] [depth]
//
// Runs every sequence of so many calls, chosen among a ring shift, packets from rank 0 only, plain
// data around a barrier, and a call that sends nothing. The counts wrap on the way. `depth` is
// "full", or "quick", which runs some of the sequences.
//
// Checked are all results, that no rank waits for ever, that plain data have no race, that ranks
// store only where they may, and that no packet is left. Variants other than "sound" break the
// protocol on purpose. Exit status 0: all is right in every behaviour; 1: not; the steps that lead
// there are printed.
#include <thread>
//
#include "kernel_model.h"
//
#include "jax_intranode/include/jax_intranode/peer.h"

namespace peer = jax_intranode::v1;

namespace {

constexpr int kMostRanks = 3;
constexpr int kMostCalls = 8;
constexpr int kMostBlocks = 2;
constexpr int kMostPackets = 2;

enum class Kind { kShift, kFromZero, kBarrier, kNothing };
constexpr int kKinds = 4;
constexpr const char* kNames[] = {"shift", "from_zero", "barrier", "nothing"};

struct Plan {
  Kind kind;
  int packets;
  int blocks;
  bool wide = false;  // a packet has the values of two
};

using model::Flag;
Flag one_half("one_half"), no_end("no_end"), never_cleared("never_cleared"),
    idle_epochs("idle_epochs"), no_barrier("no_barrier");

uint32_t local[kMostRanks][kMostCalls][kMostRanks * kMostPackets];  // results; part of the state

struct ModelThread : model::ModelThread {
  bool Wait(int missing) { return model::ModelThread::Wait(0, missing); }
  void Admit(uint32_t busy, uint32_t closed) {
    if (busy != 0 || closed != 0) model::TheMachine().Fail("wrong: the buffer is busy");
  }
};

uint32_t Value(int rank, int call, size_t i) {
  const uint32_t v = rank * 100 + call * 1000 + static_cast<uint32_t>(i);
  return v % 3 == 0 ? 0 : v;  // a value may look like an empty word
}

class Sequence : public model::RegionsModel {
 public:
  Sequence(int ranks, std::vector<Plan> plans)
      : RegionsModel(
            ranks, {peer::kHeaderBytes, offsetof(peer::PeerHeader, peer_begun), kDataBytes, 0},
            {{"peer_begun", offsetof(peer::PeerHeader, peer_begun), kCounts, First(plans)},
             {"peer_barriers", offsetof(peer::PeerHeader, peer_barriers), kCounts, First(plans)}},
            ranks * 2 * kMostRanks * kMostBlocks),
        plans_(std::move(plans)) {
    for (int r = 0; r < ranks_; ++r) {
      for (int b = 0; b < peer::kMaxBlocks; ++b) {
        Header(r)->epoch[b] = Header(r)->begun[b] = Header(r)->barriers[b] = First(plans_);
      }
    }
    memset(local, 0, sizeof local);
    machine_.AddLocalMemory(local, sizeof local);
    model::TheMemory().no_acquire = model::no_acquire;
    model::TheMemory().no_release = model::no_release;
    for (const Plan& plan : plans_) blocks_ = std::max(blocks_, plan.blocks);
    AddThreads(blocks_, [this](int r, int b) { RunBlock(r, b); });
    machine_.OnEnd([this] { CheckEmpty(2 * kCounts); });
  }

 private:
  static constexpr size_t kDataBytes = 64, kCounts = kMostBlocks * peer::kMaxRanks;

  // The counts wrap in the middle.
  static uint32_t First(const std::vector<Plan>& plans) {
    return 0u - static_cast<uint32_t>(plans.size() / 2);
  }
  peer::PeerHeader* Header(int r) const { return reinterpret_cast<peer::PeerHeader*>(Region(r)); }

  // Plain data: one object for each rank's half, writer and block.
  size_t Object(int of_rank, uint32_t epoch, int writer, int block) const {
    return ((of_rank * 2 + (one_half ? 0 : epoch & 1)) * kMostRanks + writer) * kMostBlocks + block;
  }

  static char* Half(const peer::Peers& p, int rank, uint32_t epoch) {
    return peer::Half(p, rank, one_half ? 0 : epoch);
  }

  template <class T>
  void Take(ModelThread& t, const peer::Peers& p, uint32_t epoch, size_t i, T* value, int from) {
    peer::Take(t, Half(p, p.rank, epoch), i, value, from);
    if (never_cleared) peer::Put(Half(p, p.rank, epoch), i, *value);
  }

  // Packets of T, each with the next values.
  template <class T>
  void Shift(ModelThread& t, const peer::Peers& p, const Plan& plan, int k, uint32_t epoch) {
    constexpr size_t kWords = sizeof(T) / 4;
    const int to = (p.rank + 1) % p.size, from = (p.rank + p.size - 1) % p.size;
    for (size_t i = t.First(); i < static_cast<size_t>(plan.packets); i += t.Stride()) {
      uint32_t words[kWords];
      for (size_t w = 0; w < kWords; ++w) words[w] = Value(p.rank, k, i * kWords + w);
      peer::Put(Half(p, to, epoch), i, std::bit_cast<T>(words));
    }
    for (size_t i = t.First(); i < static_cast<size_t>(plan.packets); i += t.Stride()) {
      T value;
      Take(t, p, epoch, i, &value, from);
      memcpy(&local[p.rank][k][i * kWords], &value, sizeof value);
    }
  }

  void RunKernel(ModelThread& t, const peer::Peers& p, const Plan& plan, int k) {
    const uint32_t epoch = peer::Begin(t, p);
    const int n = p.size, me = p.rank;
    const size_t packets = plan.packets;
    switch (plan.kind) {
      case Kind::kShift:
        plan.wide ? Shift<uint64_t>(t, p, plan, k, epoch) : Shift<uint32_t>(t, p, plan, k, epoch);
        break;
      case Kind::kFromZero:
        for (size_t i = t.First(); i < packets; i += t.Stride()) {
          for (int r = 1; me == 0 && r < n; ++r) peer::Put(Half(p, r, epoch), i, Value(0, k, i));
          if (me != 0) Take(t, p, epoch, i, &local[me][k][i], 0);
        }
        break;
      case Kind::kBarrier:
        for (int r = 0; r < n; ++r) {
          machine_.Write(Object(r, epoch, me, t.Block()), Value(me, k, r));
        }
        if (!no_barrier) peer::Barrier(t, p);
        for (int r = 0; r < n; ++r) {
          if (machine_.Read(Object(me, epoch, r, t.Block())) != Value(r, k, me)) {
            machine_.Fail("wrong: plain data");
          }
        }
        break;
      case Kind::kNothing:
        break;
    }
    if (!no_end) {
      peer::End(t, p);
      return;
    }
    peer::Peers alone = p;
    alone.size = 0;
    peer::End(t, alone);
  }

  void RunBlock(int rank, int block) {
    peer::Peers p{};
    for (int r = 0; r < ranks_; ++r) p.memory[r] = Region(r);
    p.bytes = kDataBytes;
    p.rank = rank;
    p.size = ranks_;
    for (int k = 0; k < static_cast<int>(plans_.size()); ++k) {
      if (block < plans_[k].blocks) {
        ModelThread thread{block, plans_[k].blocks};
        RunKernel(thread, p, plans_[k], k);
      }
      EndKernel(rank, k, blocks_);
      if (block == 0) EndCall(rank, k);
    }
  }

  void EndCall(int rank, int k) {
    const Plan& plan = plans_[k];
    const bool shift = plan.kind == Kind::kShift;
    if (shift || (plan.kind == Kind::kFromZero && rank != 0)) {
      for (int i = 0; i < plan.packets * (shift && plan.wide ? 2 : 1); ++i) {
        const int from = shift ? (rank + ranks_ - 1) % ranks_ : 0;
        if (local[rank][k][i] != Value(from, k, i)) {
          FailResult(k, rank, std::string(" (") + kNames[static_cast<int>(plan.kind)] + ")");
        }
      }
    }
    if (!idle_epochs) return;
    // Blocks that a call does not launch keep their epoch.
    for (int b = plan.blocks; b < peer::kMaxBlocks; ++b) --Header(rank)->epoch[b];
  }

  const std::vector<Plan> plans_;
  int blocks_ = 1;
};

// How the calls of a sequence differ apart from their kind.
Plan PlanOf(int pattern, int k, Kind kind) {
  switch (pattern) {
    case 0:
      return {kind, 1, 1};
    case 1:
      return {kind, 1 + k % 2, 1, true};
    default:  // grids of two blocks and of one
      return {kind, 2, k % 3 == 1 ? 1 : 2};
  }
}
constexpr int kPatterns = 3;

}  // namespace

int main(int argc, char** argv) {
  model::Totals totals(argc, argv, 4);
  const int ranks = totals.ranks, calls = totals.operations;
  if (!totals.Fit(kMostRanks, kMostCalls)) return 2;
  int combinations = 1;
  for (int k = 0; k < calls; ++k) combinations *= kKinds;
  for (int pattern = 0; pattern < kPatterns; ++pattern) {
    for (int combination = 0; combination < combinations; ++combination) {
      if (totals.more == "quick" && combination % 7 != pattern) continue;
      std::vector<Plan> plans;
      std::string names = "pattern " + std::to_string(pattern);
      for (int k = 0, c = combination; k < calls; ++k, c /= kKinds) {
        plans.push_back(PlanOf(pattern, k, static_cast<Kind>(c % kKinds)));
        names += std::string(" ") + kNames[c % kKinds];
      }
      if (totals.IsWrong(Sequence(ranks, plans).Search(), names)) return 1;
    }
  }
  totals.Print();
  return 0;
}
