// What the models share: variants, arguments and the totals of all searches; regions of ranks whose
// words the machine knows; threads, groups and packets as they are or broken.
#pragma once

#include "atomics.h"
//
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "xla_ffi/kernels/group.h"
#include "xla_ffi/kernels/packets.h"
#include "xla_ffi/kernels/types.h"

namespace jax_intranode {

// Packets with half of the payload, for searches that are large otherwise: two words are enough to
// arrive in parts.
struct HalfPackets {
  static constexpr size_t kBytes = 8;
  static void Put(char* slot, size_t i, const Pack& p) {
    for (int k = 0; k < 2; ++k) Store(At(slot, i) + k, p.word[k]);
  }
  static bool TryGet(char* slot, size_t i, Pack* p) {
    *p = {};
    for (int k = 0; k < 2; ++k) p->word[k] = Load(At(slot, i) + k);
    return p->word[0] != kEmpty && p->word[1] != kEmpty;
  }
  static void Arm(char* slot, size_t i) {
    for (int k = 0; k < 2; ++k) Store(At(slot, i) + k, kEmpty);
  }
  static uint32_t* At(char* slot, size_t i) {
    return reinterpret_cast<uint32_t*>(slot + i * kBytes);
  }
};

}  // namespace jax_intranode

namespace model {

namespace jin = jax_intranode;

// A way to break the code, which the variant of this name takes.
class Flag {
 public:
  explicit Flag(const char* variant) : variant_(variant) { All().push_back(this); }
  Flag(const Flag&) = delete;
  operator bool() const { return set_; }  // NOLINT: used like a bool

  // Returns whether there is such a variant.
  static bool Set(const std::string& variant) {
    bool known = variant == "sound";
    for (Flag* flag : All()) known |= flag->set_ = variant == flag->variant_;
    return known;
  }

 private:
  static std::vector<Flag*>& All() {
    static std::vector<Flag*> all;
    return all;
  }

  const char* const variant_;
  bool set_ = false;
};

// Arguments of a model: [variant] [ranks] [operations] [more], and what its searches have found.
class Totals {
 public:
  Totals(int argc, char** argv, int operations)
      : variant(argc > 1 ? argv[1] : "sound"),
        ranks(argc > 2 ? atoi(argv[2]) : 2),
        operations(argc > 3 ? atoi(argv[3]) : operations),
        more(argc > 4 ? argv[4] : "") {}

  const std::string variant;
  const int ranks, operations;
  const std::string more;

  // Breaks what the variant breaks. Whether a model can run with these arguments; prints why not.
  bool Fit(int most_ranks, int most_operations) const {
    const bool fit = Flag::Set(variant) && ranks >= 2 && ranks <= most_ranks && operations >= 1 &&
                     operations <= most_operations;
    if (!fit) printf("unknown variant, not 2 to %d ranks, or too many operations\n", most_ranks);
    return fit;
  }

  // Adds a search. Prints what is wrong, and where. Returns whether anything is.
  bool IsWrong(const Machine::Result& result, const std::string& where) {
    ++sequences_;
    states_ += result.states;
    steps_ += result.steps;
    interleavings_ += result.interleavings;
    if (result.error.empty()) return false;
    printf("%s\n%s\n", result.error.c_str(), where.c_str());
    for (const std::string& line : result.trace) printf("  %s\n", line.c_str());
    printf("%s: ranks %d operations %d ends wrong, after %zu states\n", variant.c_str(), ranks,
           operations, states_);
    return true;
  }

  void Print() const {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began_;
    printf(
        "%s: ranks %d operations %d wrong 0 sequences %zu states %zu steps %zu "
        "interleavings %.3g, %.1f s\n",
        variant.c_str(), ranks, operations, sequences_, states_, steps_, interleavings_,
        seconds.count());
  }

 private:
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  size_t sequences_ = 0, states_ = 0, steps_ = 0;
  double interleavings_ = 0;
};

inline Flag one_epoch_buffer("one_epoch_buffer"), never_armed("never_armed"),
    first_word_only("first_word_only"), no_release("no_release"), no_acquire("no_acquire");

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
  int FirstUpdate() const { return 0; }
  bool Wait(size_t, int) {
    TheMachine().Wait();
    return true;
  }
  void Enter(uint32_t* busy, uint32_t*) {
    if (jin::Exchange(busy, 1) != 0) TheMachine().Fail("wrong: the region is busy");
  }
  void Arrived() const {}
  void Admit() const {}
  void Admit(uint32_t, uint32_t) const {}
  template <class... Any>
  void MeetsOther(Any...) {
    TheMachine().Fail("wrong: meets another operation");
  }
  template <class Fault>
  void Refuse(const Fault&) const {
    TheMachine().Fail("wrong: refuses");
  }
};

struct ModelGroup : jin::Group {
  char* EpochBuffer(int of_rank, uint32_t epoch) const {
    return jin::Group::EpochBuffer(of_rank, one_epoch_buffer ? 0 : epoch);
  }
};

template <class Packets>
struct MaybeBroken : Packets {
  static bool TryGet(char* slot, size_t i, jin::Pack* p) {
    const bool all = Packets::TryGet(slot, i, p);
    constexpr bool kFlagged = std::is_same_v<Packets, jin::FlaggedPackets>;
    return !kFlagged && first_word_only ? p->word[0] != jin::kEmpty : all;
  }
  static void Arm(char* slot, size_t i) {
    if (!never_armed) Packets::Arm(slot, i);
  }
};

// Words of each rank's header that others access: so many at this offset.
struct HeaderWords {
  std::string name;
  size_t offset, count;
  uint32_t initial = 0;
};

// The region of a rank: a header, of which the first bytes are the rank's own, and then words.
struct Layout {
  size_t header_bytes, own_bytes, data_bytes;
  uint32_t empty;  // what the words behind the header are at the begin and at the end
};

// A program of ranks, each of which has a region.
class RegionsModel {
 public:
  RegionsModel(int ranks, const Layout& layout, std::vector<HeaderWords> fields, size_t objects = 0)
      : ranks_(ranks),
        layout_(layout),
        fields_(std::move(fields)),
        header_words_(WordsOf(fields_)),
        words_of_rank_(header_words_ + layout.data_bytes / 4),
        machine_(ranks * words_of_rank_, layout.empty, objects) {
    for (int r = 0; r < ranks_; ++r) {
      const size_t bytes = layout.header_bytes + layout.data_bytes;
      memory_.push_back(std::make_unique<Aligned[]>(bytes / sizeof(Aligned) + 1));
      memset(Region(r), 0, bytes);
      if (layout.own_bytes > 0) machine_.AddLocalMemory(Region(r), layout.own_bytes);
      size_t word = r * words_of_rank_;
      for (const HeaderWords& field : fields_) {
        for (size_t i = 0; i < field.count; ++i) machine_.SetInitial(word++, field.initial);
      }
    }
    TheMemory() = {&machine_, [this](const void* at) { return WordAt(at); }};
    machine_.NameWords([this](size_t word) { return NameOf(word); });
  }
  RegionsModel(const RegionsModel&) = delete;

  Machine::Result Search() { return machine_.Search(); }

 protected:
  char* Region(int r) const { return reinterpret_cast<char*>(memory_[r].get()); }

  // So many threads of each rank run this, of a rank and a number.
  template <class Run>
  void AddThreads(int of_rank, Run run) {
    threads_of_rank_ = of_rank;
    machine_.AddBlocks(ranks_, of_rank, run);
  }

  // The end of a kernel of so many threads orders all that they did before all that the next
  // kernel does. On the CPU a fence does the same (host/host_group.cc).
  void EndKernel(int rank, int operation, int threads, bool acquires = true, bool releases = true) {
    if (acquires) machine_.AcquireFence();
    machine_.Barrier(operation * ranks_ + rank, threads);
    if (releases) machine_.ReleaseFence();
  }

  void FailResult(int operation, int rank, const std::string& name = "") {
    machine_.Fail("wrong: the result of operation " + std::to_string(operation) + name +
                  " on rank " + std::to_string(rank));
  }

  // All data have been cleared, and the words of all headers but so many.
  void CheckEmpty(size_t but_first = 0) {
    for (size_t word = 0; word < ranks_ * words_of_rank_; ++word) {
      const size_t in_rank = word % words_of_rank_;
      const uint32_t empty = in_rank < header_words_ ? 0 : layout_.empty;
      if (in_rank >= but_first && machine_.Newest(word) != empty) {
        machine_.Fail("wrong: left full: " + NameOf(word));
      }
    }
  }

  const int ranks_;

 private:
  struct alignas(64) Aligned {
    char bytes[64];
  };
  static size_t WordsOf(const std::vector<HeaderWords>& fields) {
    size_t words = 0;
    for (const HeaderWords& field : fields) words += field.count;
    return words;
  }

  long WordAt(const void* at) {
    for (int r = 0; r < ranks_; ++r) {
      const size_t offset = static_cast<const char*>(at) - Region(r);
      if (offset >= layout_.header_bytes + layout_.data_bytes) continue;
      long word = r * words_of_rank_;
      if (offset >= layout_.header_bytes) {
        return word + header_words_ + (offset - layout_.header_bytes) / 4;
      }
      for (const HeaderWords& field : fields_) {
        const size_t in_field = (offset - field.offset) / 4;
        if (offset >= field.offset && in_field < field.count) return word + in_field;
        word += field.count;
      }
      if (machine_.current() / threads_of_rank_ != r) {
        machine_.Fail("wrong: accesses a peer's header");
      }
      return -1;
    }
    machine_.Fail("wrong: an access outside of all regions");
    return -1;
  }
  std::string NameOf(size_t word) const {
    const std::string of_rank = " of rank " + std::to_string(word / words_of_rank_);
    size_t in_rank = word % words_of_rank_;
    for (const HeaderWords& field : fields_) {
      if (in_rank < field.count) return field.name + " " + std::to_string(in_rank) + of_rank;
      in_rank -= field.count;
    }
    return "word " + std::to_string(in_rank) + " of the data" + of_rank;
  }

  const Layout layout_;
  const std::vector<HeaderWords> fields_;
  const size_t header_words_, words_of_rank_;
  int threads_of_rank_ = 1;
  std::vector<std::unique_ptr<Aligned[]>> memory_;

 protected:
  Machine machine_;
};

// Operations of the kernels: a region has two epoch buffers. `first` is the first epoch.
class KernelModel : public RegionsModel {
 public:
  KernelModel(int ranks, size_t epoch_buffer_bytes, uint32_t first, std::vector<HeaderWords> fields)
      : RegionsModel(ranks,
                     {jin::kHeaderBytes, offsetof(jin::RegionHeader, peer_operation),
                      2 * epoch_buffer_bytes, jin::kEmpty},
                     std::move(fields)),
        epoch_buffer_bytes_(epoch_buffer_bytes) {
    for (int r = 0; r < ranks; ++r) {
      for (uint32_t& epoch : Header(r)->epoch) epoch = first;
      Header(r)->operations = first;
    }
  }

 protected:
  jin::RegionHeader* Header(int r) const { return reinterpret_cast<jin::RegionHeader*>(Region(r)); }
  template <class Group = ModelGroup>
  Group GroupOf(int rank) const {
    Group group{};
    for (int r = 0; r < ranks_; ++r) group.region[r] = Region(r);
    group.epoch_buffer_bytes = epoch_buffer_bytes_;
    group.rank = rank;
    group.size = ranks_;
    return group;
  }

  const size_t epoch_buffer_bytes_;
};

}  // namespace model
