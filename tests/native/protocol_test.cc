// Runs the protocols of xla_ffi/kernels on host threads, one for each thread of each block of each
// rank. Meant for ThreadSanitizer, too. Calls of random size, type, algorithm and number of
// segments follow each other without a barrier between the ranks, and threads pause at random
// places. Results lie at any address, with guard bytes before and after. The epoch wraps in the
// middle of the calls.
//
//   protocol_test [RANKS CALLS [permutes|ragged|experts]]
//   protocol_test offsets
//
// "offsets" moves the last words of messages of more than 4 GiB, of which no other part exists.
// Permutes have regions of their own; with "permutes", "ragged" or "experts" there are no other
// calls. Hybrid cube meshes and sums of few rows, whose threads do not wait for each other, are
// left to collectives_model.cc and host_group_test.cc.
//
// Exit status 0: every result right, every guard whole and every slab empty at the end; 1: a wrong
// result or a byte outside of it written, a slab left full, an endless wait, a busy region or a
// wrong epoch. The models (tests/native/model) and tools/mutants break the protocols.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/kernel_of.h"
#include "tests/native/regions.h"
#include "tests/native/tables.h"
#include "xla_ffi/ffi/members.h"
#include "xla_ffi/kernels/experts.h"
#include "xla_ffi/kernels/ragged.h"
#include "xla_ffi/kernels/routed_dispatch.h"
#include "xla_ffi/kernels/same_operation.h"
#include "xla_ffi/kernels/segments.h"

namespace jin = jax_intranode;

namespace {

constexpr int kThreads = 2;
constexpr int kMaxBlocksHere = 3;
constexpr int kMaxUpdatesHere = 32;  // of a rank in a ragged all-to-all
constexpr size_t kMaxBytes = 1500;
constexpr size_t kEpochBufferBytes = 64 << 10;
constexpr std::chrono::seconds kPatience(30);  // a wait that lasts longer is without end

// What is wrong.
std::atomic<long> wrong{0}, others_met{0}, was_busy{0};

// Pauses a thread now and then, so that ranks run apart.
class Jitter {
 public:
  explicit Jitter(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  void Pause() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    if (state_ % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(state_ % 97));
  }

 private:
  uint64_t state_;
};

// What the threads of a block share.
struct BlockMemory {
  std::barrier<> barrier{kThreads};
  jin::RaggedTableOf<kMaxUpdatesHere> table;
  jin::RoutingTable routing;
  uint32_t of_lane[kThreads];
};

struct HostThread {
  int thread, block, blocks;
  Jitter* jitter;
  BlockMemory* shared;
  std::barrier<>* barrier = &shared->barrier;
  std::chrono::steady_clock::time_point started{};
  bool met = false;

  int Thread() const { return thread; }
  int Threads() const { return kThreads; }
  int Block() const { return block; }
  int Blocks() const { return blocks; }
  void Sync() const { barrier->arrive_and_wait(); }
  size_t First() const { return block * kThreads + thread; }
  size_t Stride() const { return blocks * kThreads; }
  int FirstUpdate() const { return thread; }
  // For routed dispatches. LanesThread has a warp of more than one thread.
  static constexpr uint32_t kLanes = 1;
  jin::SameLanes Same(uint32_t) const { return {0, 1}; }
  void SyncLanes() const {}
  void Add(uint32_t* sum, uint32_t v) const {
    std::atomic_ref<uint32_t>(*sum).fetch_add(v, std::memory_order_relaxed);
  }
  bool Wait(size_t, int) {
    const auto now = std::chrono::steady_clock::now();
    if (started == std::chrono::steady_clock::time_point()) started = now;
    if (now - started > kPatience) {
      printf("a wait without end\n");
      fflush(stdout);
      std::_Exit(1);
    }
    jitter->Pause();
    std::this_thread::yield();
    return true;
  }
  void Enter(uint32_t* busy, uint32_t*) {
    if (thread == 0 && jin::Exchange(busy, 1) != 0) met = true;
  }
  void Arrived() { started = {}; }
  void FenceSegment() {
    jin::Fence();
    jitter->Pause();
  }
  void Admit() { was_busy += met; }
  void Admit(uint32_t, uint32_t) {}
  void MeetsOther(int, uint64_t) { ++others_met; }
  void Refuse(const jin::UpdateFault&) { ++others_met; }
};

// The threads of a block are a warp.
struct LanesThread : HostThread {
  static constexpr uint32_t kLanes = kThreads;
  jin::SameLanes Same(uint32_t v) const {
    uint32_t* const of_lane = shared->of_lane;
    of_lane[thread] = v;
    Sync();
    jin::SameLanes same = {};
    for (int i = 0; i < kThreads; ++i) {
      same.before += i < thread && of_lane[i] == v;
      same.all += of_lane[i] == v;
    }
    Sync();
    return same;
  }
  void SyncLanes() const { Sync(); }
};

struct TestGroup : jin::Group {
  uint64_t operation;
};

TestGroup GroupOf(const jin::Regions& regions, int rank) {
  TestGroup group{};
  regions.GiveTo(&group);
  group.rank = rank;
  return group;
}

// Runs this in so many threads of each rank.
template <class Run>
void InThreads(int ranks, int threads, const Run& run) {
  std::vector<std::thread> all;
  for (int i = 0; i < ranks * threads; ++i) {
    all.emplace_back([&run, i, threads] { run(i / threads, i % threads); });
  }
  for (std::thread& t : all) t.join();
}

struct Plan {
  jin::Algorithm algorithm;
  bool floating;
  size_t bytes = 0;
  int blocks = 1, buffers = 1;
  size_t shift = 0;  // of the result from an address that is a multiple of 16
  uint32_t segments = 1;
  bool in_place = false;  // the result is the input
  // Of a permute: of each buffer the source of each rank, or -1.
  std::vector<jin::Permutation> sources = {};
  jin::RaggedTables tables = {};
  jin::ExpertTables experts = {};
  jin::RoutingTables routing = {};

  bool Permutes() const { return algorithm == jin::Algorithm::kPermute; }
  bool InWindows() const { return experts.tokens > 0 || routing.tokens > 0 || tables.updates > 0; }
  uint32_t Epochs() const {
    if (Permutes()) return 0;
    return InWindows() ? 1 : jin::Epochs(jin::PhasesOf(algorithm), segments);
  }
  // Words of the input and of the output of each rank.
  size_t In(int ranks) const {
    return routing.tokens > 0 ? routing.In() : bytes / 4 * jin::InputShards(algorithm, ranks);
  }
  size_t Out(int ranks) const {
    return routing.tokens > 0 ? routing.Out() : bytes / 4 * jin::OutputShards(algorithm, ranks);
  }
};

// A random call of an algorithm.
Plan RandomPlan(jin::Algorithm algorithm, int ranks, std::mt19937* random) {
  const auto below = [random](uint32_t end) { return jin::Below(end, random); };
  Plan plan{algorithm, below(2) == 0};
  plan.blocks = static_cast<int>(1 + below(kMaxBlocksHere));
  plan.shift = below(2) == 0 ? 0 : below(16);
  const uint32_t rows = 1 + below(40), row_words = 1 + below(9);
  plan.bytes = size_t{4} * rows * row_words;
  if (jin::IsOfExperts(algorithm)) {
    plan.floating = true;
    plan.experts = jin::ExpertTables::Of(ranks, rows, random);
  } else if (algorithm == jin::Algorithm::kRoutedDispatch) {
    plan.floating = true;
    plan.routing = jin::RoutingTables::Of(ranks, random);
    plan.bytes = 4 * plan.routing.In();
    plan.shift = plan.shift / 4 * 4;  // results of int32 are aligned
  } else if (algorithm == jin::Algorithm::kRagged) {
    plan.tables = jin::RaggedTables::Of(ranks, rows, kMaxUpdatesHere, random);
  } else {
    const bool is_permute = plan.Permutes(), has_many = jin::IsAllReduce(algorithm) || is_permute;
    const bool may_be_in_place = algorithm == jin::Algorithm::kAllToAll || is_permute;
    plan.bytes = 4 * (1 + below(kMaxBytes / 4));
    if (below(3) == 0) plan.bytes = 16 * ranks * (1 + plan.bytes / (16 * ranks));
    if (has_many && below(3) == 0) plan.buffers = static_cast<int>(1 + below(9));
    if (jin::RunsInSegments(algorithm) && below(2) == 0) plan.segments = 2 + 2 * below(3);
    plan.in_place = may_be_in_place && below(2) == 0;
    for (int m = 0; m < plan.buffers && is_permute; ++m) {
      plan.sources.push_back(jin::RandomPermutation(ranks, random));
    }
  }
  return plan;
}

// The algorithms to choose from: some come more often than others.
std::vector<jin::Algorithm> KindsOf(const std::string& mode) {
  using enum jin::Algorithm;
  if (mode == "permutes") return {kPermute};
  if (mode == "experts") return {kDispatch, kCombine, kRoutedDispatch, kRoutedDispatch};
  if (mode == "ragged") return {kRagged};
  std::vector<jin::Algorithm> kinds{kPermute,  kPermute, kPermute,        kRagged,        kRagged,
                                    kDispatch, kCombine, kRoutedDispatch, kRoutedDispatch};
  kinds.insert(kinds.end(), std::begin(jin::kCollectives), std::end(jin::kCollectives));
  return kinds;
}

// Runs a collective: the kernel of one epoch, or that of several segments.
template <class Type, class Packets, int N, class Call>
void RunKernel(HostThread& t, const TestGroup& g, const Call& call, const Plan& plan) {
  const auto run = [&](auto body) {
    using Body = typename decltype(body)::type;
    if (plan.segments == 1) {
      jin::RunOperation<Body>(t, g, call);
    } else {
      const size_t packs = jin::SegmentPacks(plan.algorithm, call.Packs(), g.size, plan.segments);
      jin::RunOperation<Body>(t, g, jin::InSegments<Call>{call, packs, plan.segments});
    }
  };
  if constexpr (std::is_same_v<Call, jin::Buffers>) {
    jin::WithAllReduce<Type, N, Packets>(plan.algorithm, run);
  } else {
    jin::WithKernel<Type, N, Packets>(plan.algorithm, run);
  }
}

template <int N, class Call>
void RunSized(HostThread& t, const TestGroup& g, const Call& call, const Plan& plan) {
  plan.floating ? RunKernel<jin::F32, jin::BarePackets, N>(t, g, call, plan)
                : RunKernel<jin::I32, jin::FlaggedPackets, N>(t, g, call, plan);
}

template <class Call>
void RunPermute(HostThread& t, const TestGroup& g, const Call& call, const Plan& plan) {
  using Bare = jin::Permute<jin::BF16, 0, jin::BarePackets>;
  using Flagged = jin::Permute<jin::I8, 0, jin::FlaggedPackets>;
  plan.floating ? jin::RunOperation<Bare>(t, g, call) : jin::RunOperation<Flagged>(t, g, call);
}

// Pieces of equal size except the last one. Some are empty if the whole is small.
jin::Buffers PiecesOf(const jin::Buffer& whole, const Plan& plan) {
  jin::Buffers pieces;
  const size_t words = plan.bytes / 4, each = (words + plan.buffers - 1) / plan.buffers;
  for (int k = 0; k < plan.buffers; ++k) {
    const size_t begin = std::min(words, k * each), end = std::min(words, begin + each);
    pieces.Append({static_cast<const uint32_t*>(whole.in) + begin,
                   static_cast<char*>(whole.out) + 4 * begin, 4 * (end - begin)});
  }
  return pieces;
}

// The members of a permute, as a rank sees them.
jin::Permutes MembersOf(int rank, const jin::Buffer& whole, const Plan& plan) {
  const jin::Buffers pieces = PiecesOf(whole, plan);
  jin::Permutes members;
  for (int k = 0; k < plan.buffers; ++k) {
    jin::AddMember(&members, pieces.buffer[k], plan.sources[k], rank);
  }
  return members;
}

// An operation in windows: `run(body)` with the one of these that the plan needs.
void RunInWindows(HostThread& t, const TestGroup& g, const jin::Buffer& whole, const Plan& plan) {
  using Packets = jin::BarePackets;
  const uint32_t epoch = jin::Begin(t, g);
  uint32_t step = 0;
  if (plan.tables.updates > 0) {
    const auto row_bytes = static_cast<uint32_t>(plan.bytes / plan.tables.rows);
    const jin::RaggedCall call = plan.tables.CallOf(g.rank, whole.in, whole.out, row_bytes);
    const auto run = [&](auto body) { body.Run(t, g, call, t.shared->table, epoch, &step); };
    if (!plan.floating) {
      run(jin::Ragged<jin::I8, jin::FlaggedPackets>{});
    } else if (g.size == 2 && plan.tables.updates == 1) {
      run(jin::Ragged<jin::BF16, Packets, 2, 1>{});
    } else {
      run(jin::Ragged<jin::BF16, Packets>{});
    }
  } else if (plan.experts.tokens > 0) {
    const auto row_bytes = static_cast<uint32_t>(plan.bytes / plan.experts.rows);
    const jin::ExpertsCall call = plan.experts.CallOf(g.rank, whole.in, whole.out, row_bytes);
    const auto run = [&](auto body) { body.Run(t, g, call, epoch, &step); };
    if (plan.algorithm == jin::Algorithm::kDispatch) {
      run(jin::Experts<jin::BF16, 0, false, Packets>{});
    } else if (g.size == 2) {
      run(jin::Experts<jin::F32, 2, true, Packets>{});
    } else {
      run(jin::Experts<jin::F32, 0, true, Packets>{});
    }
  } else {
    const jin::RoutedCall call = plan.routing.CallOf(whole.in, whole.out);
    const auto run = [&](auto thread) {
      g.size == 2 ? jin::RoutedDispatch<2>::Run(thread, g, call, t.shared->routing, epoch, &step)
                  : jin::RoutedDispatch<0>::Run(thread, g, call, t.shared->routing, epoch, &step);
    };
    plan.routing.tokens % 2 == 0 ? run(t) : run(LanesThread{t});
  }
  jin::End(t, g, epoch);
}

// Ranks may use different kinds of calls and of buffers.
void RunPlan(HostThread& t, const TestGroup& g, const jin::Buffer& whole, const Plan& plan) {
  if (plan.InWindows()) return RunInWindows(t, g, whole, plan);
  if (plan.Permutes()) {
    const jin::Permutes members = MembersOf(g.rank, whole, plan);
    if (g.rank % 2 != 0 || plan.buffers > 1 || !jin::AlignedBuffer::Is(whole, 1)) {
      return RunPermute(t, g, members, plan);
    }
    return RunPermute(t, g,
                      jin::AlignedPermute{{whole.in, whole.out, whole.bytes},
                                          {members.source[0]},
                                          {members.destination[0]},
                                          members.sources,
                                          members.destinations},
                      plan);
  }
  if (plan.buffers > 1) return RunSized<0>(t, g, PiecesOf(whole, plan), plan);
  const size_t multiple = (jin::IsTwoShot(plan.algorithm) ? g.size : 1) * plan.segments;
  if (g.rank % 2 != 0 || !jin::AlignedBuffer::Is(whole, multiple)) {
    return RunSized<0>(t, g, whole, plan);
  }
  // As on GPUs, some sizes have kernels of their own.
  const jin::AlignedBuffer aligned{whole.in, whole.out, whole.bytes};
  g.size == 2   ? RunSized<2>(t, g, aligned, plan)
  : g.size == 4 ? RunSized<4>(t, g, aligned, plan)
                : RunSized<0>(t, g, aligned, plan);
}

uint32_t Value(int rank, int call, size_t i, bool floating) {
  const uint32_t v = (rank * 7919u + call * 104729u + static_cast<uint32_t>(i) * 31u) % 1000u;
  if (!floating) return v % 5 == 0 ? 0xFFFFFFFFu : v;  // integers may look like an empty word
  return std::bit_cast<uint32_t>(static_cast<float>(v) - 500.0f);
}

// Word i of a rank's input.
uint32_t Input(const Plan& plan, int rank, int call, size_t i) {
  const size_t rows = size_t{plan.routing.tokens} * plan.routing.row_words;
  if (plan.routing.tokens > 0 && i >= rows) return plan.routing.ids[rank][i - rows];
  return Value(rank, call, i, plan.floating);
}

uint32_t Sum(int ranks, int call, size_t i, bool floating) {
  uint32_t integer = Value(0, call, i, floating);
  auto real = std::bit_cast<float>(integer);
  for (int r = 1; r < ranks; ++r) {
    const uint32_t v = Value(r, call, i, floating);
    real += std::bit_cast<float>(v);
    integer += v;
  }
  return floating ? std::bit_cast<uint32_t>(real) : integer;
}

uint32_t WordAt(const char* words, size_t i) {
  uint32_t word;
  memcpy(&word, words + 4 * i, 4);
  return word;
}

// Word i of a rank's output.
uint32_t Expected(const Plan& plan, int ranks, int rank, int call, size_t i) {
  constexpr uint32_t kKept = jin::Guarded::kGuard * 0x01010101u;
  const size_t shard = plan.bytes / 4;
  // A word of the row of a token, of all ranks in order, each of which has so many; -1: of none.
  const auto of_token = [&](int64_t token, uint32_t tokens, size_t row_words) {
    if (token < 0) return 0u;
    return Value(static_cast<int>(token / tokens), call, token % tokens * row_words + i % row_words,
                 true);
  };
  if (plan.tables.updates > 0) {
    const size_t row_words = shard / plan.tables.rows;
    const auto [source, row] = plan.tables.OriginOf(rank, i / row_words);
    if (source < 0) return kKept;
    return Value(source, call, row * row_words + i % row_words, plan.floating);
  }
  if (plan.routing.tokens > 0) {
    const jin::RoutingTables& routing = plan.routing;
    if (i >= routing.Rows()) return routing.results[rank][i - routing.Rows()];
    const int64_t token = routing.origins[rank][i / routing.row_words];
    return of_token(token, routing.tokens, routing.row_words);
  }
  if (plan.experts.tokens > 0) {
    const jin::ExpertTables& experts = plan.experts;
    const size_t row_words = shard / experts.rows, row = i / row_words;
    if (plan.algorithm == jin::Algorithm::kDispatch) {
      return of_token(experts.TokenOf(rank, row), experts.tokens, row_words);
    }
    if (row >= experts.tokens) return kKept;
    const float sum = experts.SumOf(rank, row, [&](int at, size_t its_row) {
      return std::bit_cast<float>(Value(at, call, its_row * row_words + i % row_words, true));
    });
    return std::bit_cast<uint32_t>(sum);
  }
  if (plan.Permutes()) {
    const size_t each = (shard + plan.buffers - 1) / plan.buffers;
    const int source = plan.sources[i / each][rank];
    return source < 0 ? 0 : Value(source, call, i, plan.floating);
  }
  const bool part = jin::InputShards(plan.algorithm, ranks) > 1;
  const size_t in = (part ? rank * shard : 0) + i % shard;
  if (jin::OnlyCopies(plan.algorithm)) {
    return Value(static_cast<int>(i / shard), call, in, plan.floating);
  }
  return Sum(ranks, call, in, plan.floating);
}

// Address space without memory: a page exists from the first store on.
std::shared_ptr<char> Sparse(size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    printf("no address space\n");
    std::_Exit(1);
  }
  return {static_cast<char*>(at), [bytes](char* memory) { munmap(memory, bytes); }};
}

// The last words of a message, in each of two shards, go through its last segment.
template <class Call>
void LastSegment(size_t bytes) {
  constexpr uint32_t kSegments = 1 << 20;
  const auto in = Sparse(2 * bytes), out = Sparse(2 * bytes);
  const size_t all = jin::PacksOf(bytes);
  const size_t packs = jin::SegmentPacks(jin::Algorithm::kTwoShot, all, 2, kSegments);
  const auto last = static_cast<uint32_t>((all - 1) / packs);
  const jin::InSegments<Call> call{{in.get(), out.get(), bytes}, packs, kSegments};
  const auto segment = call.At(last);
  const size_t pack = all - 1 - last * packs;
  for (const int shard : {0, 1}) {
    const size_t word = (shard + 1) * bytes / 4 - 1;
    const uint32_t value = 7 + shard;
    memcpy(in.get() + 4 * word, &value, 4);
    segment.OutputOf(shard).Store(pack, segment.InputOf(shard).Load(pack));
    wrong += WordAt(out.get(), word) != value;
  }
  segment.Store(pack - 1, segment.Load(pack));
  wrong += WordAt(out.get(), (all - 2) * 4 + (bytes / 4 - 1) % 4) != 7;
}

void Sound(int ranks, int calls, const std::string& mode) {
  std::mt19937 random(20);
  std::vector<Plan> plans;
  uint32_t epochs = 0, permutes = 0;
  const std::vector<jin::Algorithm> kinds = KindsOf(mode);
  for (int k = 0; k < calls; ++k) {
    plans.push_back(RandomPlan(kinds[random() % kinds.size()], ranks, &random));
    permutes += plans[k].Permutes();
    epochs += plans[k].Epochs();
  }
  const uint32_t first_epoch = 0u - epochs / 2;
  const jin::Regions regions(ranks, kEpochBufferBytes, first_epoch);
  for (int r = 0; r < ranks; ++r) regions.Header(r)->operations = 0u - calls / 2;
  // Permutes have regions of their own.
  const jin::Regions of_permutes(ranks, kEpochBufferBytes, 0u - permutes / 2);

  // What a rank has. Behind its blocks, one checks that all ranks run the same operation.
  struct Rank {
    std::vector<std::vector<uint32_t>> inputs;
    std::vector<jin::Guarded> outputs;
    BlockMemory blocks[kMaxBlocksHere];
    std::barrier<> of_check, of_all;
    explicit Rank(int ranks) : of_check(ranks), of_all(kMaxBlocksHere * kThreads + ranks) {}
  };
  std::deque<Rank> memory;
  for (int r = 0; r < ranks; ++r) {
    auto& [inputs, outputs, blocks, of_check, of_all] = memory.emplace_back(ranks);
    for (int k = 0; k < calls; ++k) {
      const size_t n = plans[k].In(ranks);
      inputs.emplace_back(n);
      for (size_t i = 0; i < n; ++i) inputs[k][i] = Input(plans[k], r, k, i);
      outputs.emplace_back(4 * plans[k].Out(ranks), plans[k].shift);
      if (plans[k].in_place) memcpy(outputs[k].data(), inputs[k].data(), 4 * n);
    }
  }
  InThreads(ranks, kMaxBlocksHere * kThreads + ranks, [&](int r, int number) {
    Jitter jitter(r * 100 + number);
    auto& [inputs, outputs, blocks, of_check, of_all] = memory[r];
    TestGroup groups[] = {GroupOf(regions, r), GroupOf(of_permutes, r)};
    const int block = number / kThreads, in_check = number - kMaxBlocksHere * kThreads;
    for (int k = 0; k < calls; ++k) {
      const Plan& plan = plans[k];
      TestGroup& group = groups[plan.Permutes()];
      char* const out = outputs[k].data();
      const void* const in = inputs[k].data();
      const jin::Buffer whole{plan.in_place ? out : in, out, plan.bytes};
      jitter.Pause();
      if (in_check >= 0) {
        HostThread thread{in_check, 0, 1, &jitter, nullptr, &of_check};
        group.operation = jin::OperationWord(plan.algorithm, jin::ElementType::kF32, plan.bytes);
        if (plan.Permutes()) {
          jin::BeginPermute(thread, group, MembersOf(r, whole, plan));
        } else {
          jin::CheckSameOperation(thread, group, ~0u);
        }
      } else if (block < plan.blocks) {
        HostThread thread{number % kThreads, block, plan.blocks, &jitter, &blocks[block]};
        RunPlan(thread, group, whole, plan);
      }
      // A kernel ends when all its blocks have ended; only then does the next one begin.
      of_all.arrive_and_wait();
    }
  });

  for (int r = 0; r < ranks; ++r) {
    for (int k = 0; k < calls; ++k) {
      const jin::Guarded& output = memory[r].outputs[k];
      for (size_t i = 0; i < output.size() / 4; ++i) {
        wrong += WordAt(output.data(), i) != Expected(plans[k], ranks, r, k, i);
      }
      wrong += output.Hit();
    }
    const auto* header = regions.Header(r);
    for (uint32_t epoch : header->epoch) wrong += epoch != first_epoch + epochs;
    wrong += header->operations != static_cast<uint32_t>(calls - calls / 2) - permutes;
    for (const auto& of_rank : header->taken) {
      for (uint32_t windows : of_rank) wrong += windows != 0;
    }
    header = of_permutes.Header(r);
    for (uint32_t epoch : header->epoch) wrong += epoch != permutes - permutes / 2;
    wrong += header->operations != permutes - permutes / 2;
    for (const auto& of_parity : header->peer_operation) {
      for (uint64_t word : of_parity) wrong += word != 0;
    }
  }
  wrong += static_cast<long>(regions.BytesLeft() + of_permutes.BytesLeft());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[argc - 1] : "";
  if (mode == "offsets") {
    LastSegment<jin::Buffer>((size_t{6} << 30) + 20);  // the last pack is not full
    LastSegment<jin::AlignedBuffer>(size_t{6} << 30);
  } else {
    Sound(argc > 2 ? atoi(argv[1]) : 4, argc > 2 ? atoi(argv[2]) : 200, mode);
  }
  if (wrong + others_met + was_busy == 0) {
    printf("done\n");
    return 0;
  }
  printf("wrong %ld, others met %ld, busy %ld\n", wrong.load(), others_met.load(), was_busy.load());
  return 1;
}
