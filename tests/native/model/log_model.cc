// Checks the log of CPU groups (host/call_log.h) together with the operations that it orders, in
// all behaviours of few processes. Each process has one rank. The leader's calls arrive in any
// order, and the log has only two entries, which are used again and again.
//
//   log_model [variant] [ranks] [calls]
//
// Checked is that all processes run the same calls in the same order, with the right results, and
// that none waits for ever. Variants other than "sound" break the log on purpose. Exit status: that
// of collectives_model.cc.
#include "atomics.h"
//
#include "half_packets.h"
#include "totals.h"
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
    no_fence("no_fence"), no_release("no_release"), no_acquire("no_acquire");

struct ModelThread {
  size_t First() const { return 0; }
  size_t Stride() const { return 1; }
  bool Wait(size_t, int) {
    model::TheMachine().Wait();
    return true;
  }
  void Admit() const {}
};

// What a process knows of its own. All of it belongs to the state.
struct Process {
  uint32_t ran[kMostCalls];  // its calls in order: site, count
};
struct Local {
  Process process[kMostRanks];
};
Local local;

class Run {
 public:
  Run(int ranks, int calls)
      : ranks_(ranks),
        calls_(calls),
        log_words_(kEntries * sizeof(Log::Entry) / 4),
        buffer_bytes_(ranks * jin::HalfPackets::kBytes),
        words_(log_words_ + ranks * 2 * buffer_bytes_ / 4),
        machine_(words_, jin::kEmpty, 0) {
    for (size_t word = 0; word < log_words_; ++word) machine_.SetInitial(word, 0);
    memset(&local, 0, sizeof local);
    machine_.AddLocalMemory(&local, sizeof local);
    for (int r = 0; r < ranks_; ++r) {
      memory_.push_back(std::make_unique<Aligned[]>(Bytes() / sizeof(Aligned)));
      machine_.AddThread("process " + std::to_string(r), [this, r] { RunProcess(r); });
    }
    model::TheMemory().machine = &machine_;
    model::TheMemory().shared = [this](const void* at) { return WordAt(at); };
    machine_.OnEnd([this] {
      for (int r = 1; r < ranks_; ++r) {
        if (memcmp(&local.process[r], &local.process[0], sizeof(Process)) != 0) {
          machine_.Fail("wrong: processes ran different calls");
        }
      }
    });
    machine_.NameWords([this](size_t word) { return NameOf(word); });
  }
  model::Machine::Result Search() { return machine_.Search(); }

 private:
  struct alignas(64) Aligned {
    char bytes[64];
  };
  size_t Bytes() const { return jin::kHeaderBytes + 128; }
  char* Region(int r) const { return reinterpret_cast<char*>(memory_[r].get()); }
  char* LogAt() const { return Region(0) + jin::kHeaderBytes / 2; }

  long WordAt(const void* at) {
    const char* const address = static_cast<const char*>(at);
    const long in_log = address - LogAt();
    if (in_log >= 0 && in_log < static_cast<long>(4 * log_words_)) return in_log / 4;
    for (int r = 0; r < ranks_; ++r) {
      const long offset = address - Region(r) - jin::kHeaderBytes, bytes = 2 * buffer_bytes_;
      if (offset >= 0 && offset < bytes) return log_words_ + (r * bytes + offset) / 4;
    }
    machine_.Fail("wrong: an access outside of all regions");
    return -1;
  }
  std::string NameOf(size_t word) const {
    if (word < log_words_) {
      const char* const fields[] = {"number", "count", "site", "site, upper half,"};
      return std::string(fields[word % 4]) + " of entry " + std::to_string(word / 4);
    }
    const size_t of_rank = 2 * buffer_bytes_ / 4, in_all = word - log_words_;
    return "word " + std::to_string(in_all % of_rank) + " of the buffers of rank " +
           std::to_string(in_all / of_rank);
  }

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
    jin::Group group;
    for (int r = 0; r < ranks_; ++r) group.region[r] = Region(r);
    group.epoch_buffer_bytes = buffer_bytes_;
    group.rank = rank;
    group.size = ranks_;
    Log log(LogAt());
    // The epoch wraps. (A log that is new has the number of operation 2^32 - 1 in all entries. By
    // then all have been used.)
    const uint32_t first = 0u - kEntries - 1;
    uint32_t logged = first, sequence = first;
    uint32_t counts[kSites] = {};
    while (sequence - first < static_cast<uint32_t>(calls_)) {
      while (rank == 0 && logged - first < static_cast<uint32_t>(calls_) &&
             Log::HasRoom(logged - (one_entry_more ? 1 : 0), sequence)) {
        const int site = machine_.Pick(kSites);
        Append(log, logged++, {static_cast<uint64_t>(site + 1), counts[site]++});
      }
      std::optional<Log::Call> call;
      while (!(call = Read(log, sequence))) machine_.Wait();
      RunCall(group, *call, sequence);
      local.process[rank].ran[sequence - first] = Code(*call);
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
    ModelThread thread;
    using OneShot = jin::OneShot<jin::F32, 0, jin::HalfPackets>;
    OneShot::Send(thread, group, buffer, epoch);
    OneShot::Take(thread, group, buffer, epoch);
    if (out[0] != expected || out[1] != expected) machine_.Fail("wrong: the result of a call");
  }

  const int ranks_, calls_;
  const size_t log_words_, buffer_bytes_, words_;
  std::vector<std::unique_ptr<Aligned[]>> memory_;
  model::Machine machine_;
};

}  // namespace

int main(int argc, char** argv) {
  model::Totals totals(argc, argv, 5);
  const int ranks = totals.ranks, calls = totals.operations;
  if (!totals.Fit(kMostRanks, kMostCalls)) return 2;
  model::TheMemory().no_release = no_release;
  model::TheMemory().no_acquire = no_acquire;
  if (totals.IsWrong(Run(ranks, calls).Search(), "")) return 1;
  totals.Print();
  return 0;
}
