// Checks the log of CPU groups (host/call_log.h) together with the operations that it orders, in
// all behaviours of few processes. Each process has one rank. The leader's calls arrive in any
// order, and the log has only two entries, which are used again and again.
//
//   log_model [variant] [ranks] [calls]
//
// Checked is that all processes run the same calls in the same order, with the right results, and
// that none waits for ever. Variants other than "sound" break the log on purpose. Exit status: that
// of collectives_model.cc.
#include "kernel_model.h"
//
#include "xla_ffi/host/call_log.h"
#include "xla_ffi/kernels/one_hop.h"

namespace jin = jax_intranode;

namespace {

constexpr int kMostRanks = 3;
constexpr int kMostCalls = 8;
constexpr int kSites = 2;
constexpr uint32_t kEntries = 2;
using Log = jin::CallLog<kEntries>;

using model::Flag;
Flag number_first("number_first"), one_entry_more("one_entry_more"), any_number("any_number"),
    no_fence("no_fence");

// What a process knows of its own. All of it belongs to the state.
struct Process {
  uint32_t ran[kMostCalls];  // its calls in order: site, count
};
struct Local {
  Process process[kMostRanks];
};
Local local;

class Run : public model::KernelModel {
 public:
  // The epoch wraps. (A log that is new has the number of operation 2^32 - 1 in all entries. By
  // then all have been used.)
  static constexpr uint32_t kFirst = 0u - kEntries - 1;

  Run(int ranks, int calls)
      : KernelModel(ranks, ranks * jin::HalfPackets::kBytes, kFirst,
                    {{"word of the log", kLogAt, kEntries * sizeof(Log::Entry) / 4}}),
        calls_(calls) {
    memset(&local, 0, sizeof local);
    machine_.AddLocalMemory(&local, sizeof local);
    model::TheMemory().no_release = model::no_release;
    model::TheMemory().no_acquire = model::no_acquire;
    AddThreads(1, [this](int r, int) { RunProcess(r); });
    machine_.OnEnd([this] {
      for (int r = 1; r < ranks_; ++r) {
        if (memcmp(&local.process[r], &local.process[0], sizeof(Process)) != 0) {
          machine_.Fail("wrong: processes ran different calls");
        }
      }
    });
  }

 private:
  static constexpr size_t kLogAt = jin::kHeaderBytes / 2;
  char* LogAt() const { return Region(0) + kLogAt; }

  void Append(Log& log, uint32_t number, const Log::Call& call) {
    if (!number_first) return log.Append(number, call);
    auto& entry = reinterpret_cast<Log::Entry*>(LogAt())[number % kEntries];
    std::atomic_ref(entry.sequence).store(number + 1, std::memory_order_release);
    std::atomic_ref(entry.count).store(call.count, std::memory_order_relaxed);
    std::atomic_ref(entry.site).store(call.site, std::memory_order_relaxed);
  }
  std::optional<Log::Call> Read(const Log& log, uint32_t number) {
    if (!any_number) return log.Read(number);
    auto& entry = reinterpret_cast<Log::Entry*>(LogAt())[number % kEntries];
    const uint32_t found = std::atomic_ref(entry.sequence).load(std::memory_order_acquire);
    if (found == 0) return std::nullopt;
    return log.Read(found - 1);
  }

  // As HostGroup::Progress does.
  void RunProcess(int rank) {
    const auto group = GroupOf<jin::Group>(rank);
    Log log(LogAt());
    uint32_t logged = kFirst, sequence = kFirst;
    uint32_t counts[kSites] = {};
    while (sequence - kFirst < static_cast<uint32_t>(calls_)) {
      while (rank == 0 && logged - kFirst < static_cast<uint32_t>(calls_) &&
             Log::HasRoom(logged - (one_entry_more ? 1 : 0), sequence)) {
        const int site = machine_.Pick(kSites);
        Append(log, logged++, {static_cast<uint64_t>(site + 1), counts[site]++});
      }
      std::optional<Log::Call> call;
      while (!(call = Read(log, sequence))) machine_.Wait();
      RunCall(group, *call, sequence);
      local.process[rank].ran[sequence - kFirst] = Code(*call);
      if (!no_fence) machine_.Fence();
      ++sequence;
    }
  }
  static uint32_t Code(const Log::Call& call) {
    return static_cast<uint32_t>(call.site * 100 + call.count);
  }

  void RunCall(const jin::Group& group, const Log::Call& call, uint32_t epoch) {
    if (call.site < 1 || call.site > kSites || call.count >= static_cast<uint32_t>(calls_)) {
      machine_.Fail("wrong: a call that nobody has made");
    }
    alignas(16) uint32_t in[4], out[4];
    float sum = 0;
    for (int r = 0; r < group.size; ++r) sum += Code(call) * 10 + r;
    const uint32_t expected = std::bit_cast<uint32_t>(sum);
    for (uint32_t& x : in) {
      x = std::bit_cast<uint32_t>(static_cast<float>(Code(call) * 10 + group.rank));
    }
    const jin::Buffer buffer{in, out, sizeof in};
    model::ModelThread thread{0, 1};
    using OneShot = jin::OneShot<jin::F32, 0, jin::HalfPackets>;
    OneShot::Send(thread, group, buffer, epoch);
    OneShot::Take(thread, group, buffer, epoch);
    if (out[0] != expected || out[1] != expected) machine_.Fail("wrong: the result of a call");
  }

  const int calls_;
};

}  // namespace

int main(int argc, char** argv) {
  model::Totals totals(argc, argv, 5);
  const int ranks = totals.ranks, calls = totals.operations;
  if (!totals.Fit(kMostRanks, kMostCalls)) return 2;
  if (totals.IsWrong(Run(ranks, calls).Search(), "")) return 1;
  totals.Print();
  return 0;
}
