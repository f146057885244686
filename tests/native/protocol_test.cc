// Runs the protocols of xla_ffi/kernels on host threads, one for each thread of each block of each
// rank. Meant for ThreadSanitizer, too. Calls of random size, type, algorithm and number of
// segments follow each other without a barrier between the ranks, and threads pause at random
// places. Results lie at any address, with guard bytes before and after. The epoch wraps in the
// middle of the calls.
//
//   protocol_test sound [ranks] [calls] [patience] [mesh|permutes|ragged|experts]
//   protocol_test offsets
//
// "offsets" runs the last segment of messages of more than 4 GiB, of which no other part exists.
//
// A thread that waits longer than `patience` seconds ends the test. Permutes have regions of their
// own; with "permutes", "ragged" or "experts" there are no other calls. With "mesh" the ranks are a
// hybrid cube mesh, in a shuffled order, and all calls are of that algorithm. A rank has no address
// of the regions of those that it is not linked to, so a byte that it sends them ends the program.
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
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/expert_tables.h"
#include "tests/native/kernel_of.h"
#include "tests/native/permutations.h"
#include "tests/native/protocol_thread.h"
#include "tests/native/ragged_tables.h"
#include "tests/native/regions.h"
#include "tests/native/routing_tables.h"
#include "xla_ffi/ffi/members.h"
#include "xla_ffi/kernels/few_rows.h"
#include "xla_ffi/kernels/same_operation.h"
#include "xla_ffi/kernels/segments.h"

namespace jin = jax_intranode;

namespace {

using namespace protocol_test;

constexpr int kMaxBlocksHere = 3;
constexpr size_t kMaxBytes = 1500;
constexpr size_t kEpochBufferBytes = 64 << 10;

// The ranks' links in a hybrid cube mesh: quads of the first and of the last ranks, then shuffled.
std::vector<jin::Links> CubeMesh(int ranks) {
  std::vector<int> at(ranks);
  for (int r = 0; r < ranks; ++r) at[r] = r;
  std::shuffle(at.begin(), at.end(), std::mt19937(7));
  std::vector<jin::Links> links(ranks);
  const int quad = ranks / 2;
  for (int r = 0; r < ranks; ++r) {
    jin::Links& of = links[at[r]];
    of = {0, at[(r + quad) % ranks]};
    for (int p = 0; p < ranks; ++p) {
      if (p != r && (p / quad == r / quad || p % quad == r % quad)) of.peers |= 1u << at[p];
    }
  }
  return links;
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
  const auto below = [random](uint32_t end) { return static_cast<uint32_t>((*random)() % end); };
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
  if (mode == "mesh") return {kHybridCubeMesh};
  if (mode == "permutes") return {kPermute};
  if (mode == "experts") return {kDispatch, kCombine, kRoutedDispatch, kRoutedDispatch};
  if (mode == "ragged") return {kRagged};
  std::vector<jin::Algorithm> kinds{kPermute,        kPermute,  kPermute, kRagged,
                                    kRagged,         kDispatch, kCombine, kRoutedDispatch,
                                    kRoutedDispatch, kFewRows};
  kinds.insert(kinds.end(), std::begin(jin::kCollectives), std::end(jin::kCollectives));
  return kinds;
}

// Runs a kernel: that of one epoch, or that of several segments.
template <class Body, class Call>
bool RunBody(HostThread& t, const TestGroup& g, const Call& call, const Plan& plan) {
  if (plan.segments == 1) return jin::RunOperation<Body>(t, g, call);
  const size_t packs = jin::SegmentPacks(plan.algorithm, call.Packs(), g.size, plan.segments);
  return jin::RunOperation<Body>(t, g, jin::InSegments<Call>{call, packs, plan.segments});
}

// The sum of products of few rows, as one kernel of two phases. The product is the input.
template <class Type, int N, class Packets>
struct SentAndTaken : jin::FewRows<Type, N, Packets> {
  static constexpr int kPhases = 2;
  template <class Thread, class G, class C>
  static bool RunPhase(int phase, Thread& t, const G& g, const C& c, uint32_t epoch) {
    if (phase == 1) return SentAndTaken::Take(t, g, c, epoch);
    const size_t packs = c.Packs();
    // Other threads than those that await pack i may send it.
    for (size_t i = t.First(); i < packs; i += t.Stride()) {
      const size_t sent = packs - 1 - i;
      const jin::Pack product = c.Load(sent);
      t.Admit();
      SentAndTaken::Send(g, epoch, packs * Packets::kBytes, sent, product);
    }
    return true;
  }
};

template <class Type, int N, class Packets, class Call>
bool RunKernel(HostThread& t, const TestGroup& g, const Call& call, const Plan& plan) {
  if (plan.algorithm == jin::Algorithm::kFewRows) {
    return RunBody<SentAndTaken<Type, N, Packets>>(t, g, call, plan);
  }
  return jin::WithKernel<Type, N, Packets>(plan.algorithm, [&](auto body) {
    return RunBody<typename decltype(body)::type>(t, g, call, plan);
  });
}

template <class Type, class Packets>
bool RunAs(HostThread& t, const TestGroup& g, const jin::Buffers& call, const Plan& plan) {
  return jin::WithAllReduce<Type, 0, Packets>(plan.algorithm, [&](auto body) {
    return RunBody<typename decltype(body)::type>(t, g, call, plan);
  });
}

template <class Type, class Packets>
bool RunAs(HostThread& t, const TestGroup& g, const jin::LinkedBuffers& call, const Plan&) {
  return g.size == 8 ? jin::RunOperation<jin::HybridCubeMesh<Type, 8, Packets>>(t, g, call)
                     : jin::RunOperation<jin::HybridCubeMesh<Type, 0, Packets>>(t, g, call);
}

template <class Type, class Packets>
bool RunAs(HostThread& t, const TestGroup& g, const jin::Buffer& call, const Plan& plan) {
  return RunKernel<Type, 0, Packets>(t, g, call, plan);
}

// As on GPUs, some sizes have kernels of their own.
template <class Type, class Packets>
bool RunAs(HostThread& t, const TestGroup& g, const jin::AlignedBuffer& call, const Plan& plan) {
  return g.size == 2   ? RunKernel<Type, 2, Packets>(t, g, call, plan)
         : g.size == 4 ? RunKernel<Type, 4, Packets>(t, g, call, plan)
                       : RunKernel<Type, 0, Packets>(t, g, call, plan);
}

template <class Call>
bool RunCall(HostThread& t, const TestGroup& g, const Call& call, const Plan& plan) {
  return plan.floating ? RunAs<jin::F32, jin::BarePackets>(t, g, call, plan)
                       : RunAs<jin::I32, jin::FlaggedPackets>(t, g, call, plan);
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

template <class Call>
bool RunPermute(HostThread& t, const TestGroup& g, const Call& call, const Plan& plan) {
  using Bare = jin::Permute<jin::BF16, 0, jin::BarePackets>;
  using Flagged = jin::Permute<jin::I8, 0, jin::FlaggedPackets>;
  return plan.floating ? jin::RunOperation<Bare>(t, g, call)
                       : jin::RunOperation<Flagged>(t, g, call);
}

template <class Body>
bool RunRagged(HostThread& t, const TestGroup& g, const jin::Buffer& whole, const Plan& plan) {
  const auto row_bytes = static_cast<uint32_t>(plan.bytes / plan.tables.rows);
  const jin::RaggedCall call = plan.tables.CallOf(g.rank, whole.in, whole.out, row_bytes);
  const uint32_t epoch = jin::Begin(t, g);
  uint32_t step = 0;
  if (!Body::Run(t, g, call, *t.table, epoch, &step)) return false;
  jin::End(t, g, epoch);
  return true;
}

bool RunExperts(HostThread& t, const TestGroup& g, const jin::Buffer& whole, const Plan& plan) {
  using Packets = jin::BarePackets;
  const auto row_bytes = static_cast<uint32_t>(plan.bytes / plan.experts.rows);
  const jin::ExpertsCall call = plan.experts.CallOf(g.rank, whole.in, whole.out, row_bytes);
  const uint32_t epoch = jin::Begin(t, g);
  uint32_t step = 0;
  const auto run = [&](auto body) { return body.Run(t, g, call, epoch, &step); };
  if (plan.algorithm == jin::Algorithm::kDispatch) {
    if (!run(jin::Experts<jin::BF16, 0, false, Packets>{})) return false;
  } else if (g.size == 2) {
    if (!run(jin::Experts<jin::F32, 2, true, Packets>{})) return false;
  } else if (!run(jin::Experts<jin::F32, 0, true, Packets>{})) {
    return false;
  }
  jin::End(t, g, epoch);
  return true;
}

template <class Thread>
bool RunRouted(Thread& t, const TestGroup& g, const jin::Buffer& whole, const Plan& plan) {
  const jin::RoutedCall call = plan.routing.CallOf(whole.in, whole.out);
  const uint32_t epoch = jin::Begin(t, g);
  uint32_t step = 0;
  const auto run = [&](auto body) { return body.Run(t, g, call, t.routing->table, epoch, &step); };
  if (g.size == 2 ? !run(jin::RoutedDispatch<2>{}) : !run(jin::RoutedDispatch<0>{})) return false;
  jin::End(t, g, epoch);
  return true;
}

bool RunPlan(HostThread& t, const TestGroup& g, const jin::Buffer& whole, const Plan& plan) {
  if (plan.tables.updates > 0) {
    using Bare = jin::Ragged<jin::BF16, jin::BarePackets>;
    using One = jin::Ragged<jin::BF16, jin::BarePackets, 2, 1>;
    using Flagged = jin::Ragged<jin::I8, jin::FlaggedPackets>;
    if (plan.floating && g.size == 2 && plan.tables.updates == 1) {
      return RunRagged<One>(t, g, whole, plan);
    }
    return plan.floating ? RunRagged<Bare>(t, g, whole, plan)
                         : RunRagged<Flagged>(t, g, whole, plan);
  }
  if (plan.experts.tokens > 0) return RunExperts(t, g, whole, plan);
  if (plan.routing.tokens > 0) {
    if (plan.routing.tokens % 2 == 0) return RunRouted(t, g, whole, plan);
    LanesThread lanes(t);
    return RunRouted(lanes, g, whole, plan);
  }
  if (plan.Permutes()) {
    const jin::Permutes members = MembersOf(g.rank, whole, plan);
    // Ranks may use different kinds of calls.
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
  if (plan.algorithm == jin::Algorithm::kHybridCubeMesh) {
    return RunCall(t, g, jin::LinkedBuffers{PiecesOf(whole, plan), g.links}, plan);
  }
  if (plan.buffers == 1) {
    // Ranks may use different kinds of buffers.
    const size_t multiple = (jin::IsTwoShot(plan.algorithm) ? g.size : 1) * plan.segments;
    if (g.rank % 2 == 0 && jin::AlignedBuffer::Is(whole, multiple)) {
      return RunCall(t, g, jin::AlignedBuffer{whole.in, whole.out, whole.bytes}, plan);
    }
    return RunCall(t, g, whole, plan);
  }
  return RunCall(t, g, PiecesOf(whole, plan), plan);
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
  uint32_t integer = 0;
  float real = 0;
  for (int r = 0; r < ranks; ++r) {
    const uint32_t v = Value(r, call, i, floating);
    real = r == 0 ? std::bit_cast<float>(v) : real + std::bit_cast<float>(v);
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
  const size_t shard = plan.bytes / 4;
  if (plan.tables.updates > 0) {
    const size_t row_words = shard / plan.tables.rows;
    const auto [source, row] = plan.tables.OriginOf(rank, i / row_words);
    if (source < 0) return 0x5A5A5A5A;  // of the guards
    return Value(source, call, row * row_words + i % row_words, plan.floating);
  }
  if (plan.routing.tokens > 0) {
    const jin::RoutingTables& routing = plan.routing;
    if (i >= routing.Rows()) return routing.results[rank][i - routing.Rows()];
    const int64_t token = routing.origins[rank][i / routing.row_words];
    if (token < 0) return 0;
    return Value(static_cast<int>(token / routing.tokens), call,
                 token % routing.tokens * routing.row_words + i % routing.row_words, true);
  }
  if (plan.experts.tokens > 0) {
    const jin::ExpertTables& experts = plan.experts;
    const size_t row_words = shard / experts.rows, row = i / row_words, column = i % row_words;
    if (plan.algorithm == jin::Algorithm::kDispatch) {
      const int64_t token = experts.TokenOf(rank, row);
      if (token < 0) return 0;
      return Value(static_cast<int>(token / experts.tokens), call,
                   token % experts.tokens * row_words + column, true);
    }
    if (row >= experts.tokens) return 0x5A5A5A5A;  // of the guards
    const float sum = experts.SumOf(rank, row, [&](int at, size_t its_row) {
      return std::bit_cast<float>(Value(at, call, its_row * row_words + column, true));
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
class Sparse {
 public:
  explicit Sparse(size_t bytes) : bytes_(bytes) {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
      printf("no address space\n");
      std::_Exit(1);
    }
    data_ = static_cast<char*>(at);
  }
  ~Sparse() { munmap(data_, bytes_); }
  Sparse(const Sparse&) = delete;
  char* data() const { return data_; }

 private:
  size_t bytes_;
  char* data_;
};

// Two ranks run the last segment of a message. Returns the number of wrong words.
template <class Body, class Call>
long LastSegment(jin::Algorithm algorithm, size_t bytes, const jin::Regions& regions) {
  constexpr int kRanks = 2;
  constexpr uint32_t kSegments = 1 << 20;
  const Plan plan{.algorithm = algorithm, .floating = true, .bytes = bytes, .segments = kSegments};
  const size_t packs = jin::SegmentPacks(plan.algorithm, jin::PacksOf(bytes), kRanks, kSegments);
  const uint32_t last = static_cast<uint32_t>((jin::PacksOf(bytes) - 1) / packs);
  const size_t first_word = last * packs * 4, words = bytes / 4;
  const size_t in_shards = jin::InputShards(plan.algorithm, kRanks);
  const size_t out_shards = jin::OutputShards(plan.algorithm, kRanks);
  std::vector<std::unique_ptr<Sparse>> in, out;
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  for (int r = 0; r < kRanks; ++r) {
    in.push_back(std::make_unique<Sparse>(in_shards * bytes));
    out.push_back(std::make_unique<Sparse>(out_shards * bytes));
    barriers.push_back(std::make_unique<std::barrier<>>(kThreads));
    for (size_t s = 0; s < in_shards; ++s) {
      for (size_t i = first_word; i < words; ++i) {
        const uint32_t value = Value(r, 0, s * words + i, true);
        memcpy(in[r]->data() + s * bytes + 4 * i, &value, 4);
      }
    }
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, r, t] {
        Jitter jitter(r * 10 + t);
        TestGroup group;
        regions.GiveTo(&group);
        group.rank = r;
        HostThread thread{t, 0, 1, barriers[r].get(), &jitter};
        const jin::InSegments<Call> call{{in[r]->data(), out[r]->data(), bytes}, packs, kSegments};
        const uint32_t epoch = jin::Begin(thread, group);
        for (int phase = 0; phase < Body::kPhases; ++phase) {
          Body::RunPhase(phase, thread, group, call.At(last), epoch);
        }
        jin::End(thread, group, epoch);
      });
    }
  }
  for (std::thread& t : threads) t.join();
  long wrong = 0;
  for (int r = 0; r < kRanks; ++r) {
    for (size_t s = 0; s < out_shards; ++s) {
      for (size_t i = first_word; i < words; ++i) {
        const uint32_t word = WordAt(out[r]->data() + s * bytes, i);
        wrong += word != Expected(plan, kRanks, r, 0, s * words + i);
      }
    }
  }
  return wrong;
}

int Offsets() {
  const jin::Regions regions(2, kEpochBufferBytes);
  // Not a multiple of a pack; and one of everything, for the buffers that need it.
  constexpr size_t kAny = (size_t{6} << 30) + 20, kWhole = size_t{6} << 30;
  using enum jin::Algorithm;
  using jin::F32, jin::Buffer, jin::AlignedBuffer;
  const long wrong =
      LastSegment<jin::TwoShot<F32, 2>, Buffer>(kTwoShot, kAny, regions) +
      LastSegment<jin::TwoShot<F32, 0>, AlignedBuffer>(kTwoShot, kWhole, regions) +
      LastSegment<jin::ReduceScatter<F32, 2>, AlignedBuffer>(kReduceScatter, kWhole, regions) +
      LastSegment<jin::ReduceScatter<F32, 0>, Buffer>(kReduceScatter, kAny, regions) +
      LastSegment<jin::AllGather<F32, 2>, AlignedBuffer>(kAllGather, kWhole, regions) +
      LastSegment<jin::AllGather<F32, 0>, Buffer>(kAllGather, kAny, regions) +
      LastSegment<jin::AllToAll<F32, 2>, Buffer>(kAllToAll, kAny, regions);
  printf("offsets: wrong %ld\n", wrong);
  return wrong != 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string variant = argc > 1 ? argv[1] : "sound";
  if (variant == "offsets") return Offsets();
  const int ranks = argc > 2 ? atoi(argv[2]) : 4;
  const int calls = argc > 3 ? atoi(argv[3]) : 200;
  const std::string mode = argc > 5 ? argv[5] : "";
  const bool mesh = mode == "mesh";
  if (argc > 4) patience = std::chrono::duration<double>(atof(argv[4]));

  std::mt19937 random(20);
  std::vector<Plan> plans;
  uint32_t epochs = 0, permutes = 0;
  const std::vector<jin::Algorithm> kinds = KindsOf(mode);
  for (int k = 0; k < calls; ++k) {
    const Plan& plan =
        plans.emplace_back(RandomPlan(kinds[random() % kinds.size()], ranks, &random));
    const bool is_kernel =
        plan.experts.tokens == 0 && plan.routing.tokens == 0 && plan.tables.updates == 0;
    permutes += plan.Permutes();
    epochs += !is_kernel        ? 1
              : plan.Permutes() ? 0
                                : jin::Epochs(jin::PhasesOf(plan.algorithm), plan.segments);
  }
  const uint32_t first_epoch = 0u - epochs / 2;
  const jin::Regions regions(ranks, kEpochBufferBytes, first_epoch);
  for (int r = 0; r < ranks; ++r) regions.Header(r)->operations = 0u - calls / 2;
  // Permutes have regions of their own.
  const jin::Regions of_permutes(ranks, kEpochBufferBytes, 0u - permutes / 2);

  std::atomic<long> wrong{0};
  std::vector<std::thread> threads;
  std::vector<Table> tables(ranks * kMaxBlocksHere);
  std::vector<RoutingTable> routing_tables(ranks * kMaxBlocksHere);
  std::vector<std::vector<std::vector<uint32_t>>> inputs(ranks);
  std::vector<std::vector<jin::Guarded>> outputs(ranks);
  std::vector<std::unique_ptr<std::barrier<>>> block_barriers, rank_barriers, check_barriers;
  for (int r = 0; r < ranks; ++r) {
    rank_barriers.push_back(std::make_unique<std::barrier<>>(kMaxBlocksHere * kThreads + ranks));
    check_barriers.push_back(std::make_unique<std::barrier<>>(ranks));
    for (int b = 0; b < kMaxBlocksHere; ++b) {
      block_barriers.push_back(std::make_unique<std::barrier<>>(kThreads));
    }
    for (int k = 0; k < calls; ++k) {
      const size_t n = plans[k].In(ranks);
      inputs[r].emplace_back(n);
      for (size_t i = 0; i < n; ++i) inputs[r][k][i] = Input(plans[k], r, k, i);
      outputs[r].emplace_back(4 * plans[k].Out(ranks), plans[k].shift);
      if (plans[k].in_place) memcpy(outputs[r][k].data(), inputs[r][k].data(), 4 * n);
    }
  }

  const std::vector<jin::Links> links = CubeMesh(ranks);
  if (mesh && !jin::IsCubeMesh(links)) return 2;
  const auto group_of = [&](int rank, bool permutes) {
    TestGroup group;
    (permutes ? of_permutes : regions).GiveTo(&group);
    group.rank = rank;
    if (!mesh) return group;
    group = jin::WithoutUnlinked(group, links[rank]);
    group.links = links[rank];
    return group;
  };
  for (int r = 0; r < ranks; ++r) {
    // The block that checks that all ranks run the same operation.
    for (int t = 0; t < ranks; ++t) {
      threads.emplace_back([&, r, t] {
        Jitter jitter(r * 100 + 50 + t);
        TestGroup groups[] = {group_of(r, false), group_of(r, true)};
        for (int k = 0; k < calls; ++k) {
          TestGroup& group = groups[plans[k].Permutes()];
          HostThread thread{t, 0, 1, check_barriers[r].get(), &jitter};
          jitter.Pause();
          group.operation =
              jin::OperationWord(plans[k].algorithm, jin::ElementType::kF32, plans[k].bytes);
          if (plans[k].Permutes()) {
            const jin::Buffer none{inputs[r][k].data(), outputs[r][k].data(), plans[k].bytes};
            jin::BeginPermute(thread, group, MembersOf(r, none, plans[k]));
          } else {
            jin::CheckSameOperation(thread, group, mesh ? group.links.peers : ~0u);
          }
          rank_barriers[r]->arrive_and_wait();
        }
      });
    }
    for (int b = 0; b < kMaxBlocksHere; ++b) {
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, r, b, t] {
          Jitter jitter(r * 100 + b * 10 + t);
          TestGroup groups[] = {group_of(r, false), group_of(r, true)};
          for (int k = 0; k < calls; ++k) {
            const Plan& plan = plans[k];
            TestGroup& group = groups[plan.Permutes()];
            if (b < plan.blocks) {
              const int block = r * kMaxBlocksHere + b;
              HostThread thread{t,
                                b,
                                plan.blocks,
                                block_barriers[block].get(),
                                &jitter,
                                &tables[block],
                                &routing_tables[block]};
              jitter.Pause();
              char* const out = outputs[r][k].data();
              const void* const in = inputs[r][k].data();
              const jin::Buffer call{plan.in_place ? out : in, out, plan.bytes};
              RunPlan(thread, group, call, plan);
            }
            // A kernel ends when all its blocks have ended; only then does the next one begin.
            rank_barriers[r]->arrive_and_wait();
          }
        });
      }
    }
  }
  for (std::thread& t : threads) t.join();

  for (int r = 0; r < ranks; ++r) {
    for (int k = 0; k < calls; ++k) {
      for (size_t i = 0; i < outputs[r][k].size() / 4; ++i) {
        wrong += WordAt(outputs[r][k].data(), i) != Expected(plans[k], ranks, r, k, i);
      }
      wrong += outputs[r][k].Hit();
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
  wrong += others_met;
  const long full = static_cast<long>(regions.BytesLeft() + of_permutes.BytesLeft());
  printf("%s: ranks %d calls %d wrong %ld bytes left %ld busy %d\n", variant.c_str(), ranks, calls,
         wrong.load(), full, was_busy.load());
  return wrong != 0 || full != 0 || was_busy;
}
