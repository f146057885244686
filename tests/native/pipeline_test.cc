// Checks the cuBLASLt pipeline (cuda/pipelined_matmul.h): the code that enqueues operations is the
// real one, with a CUDA runtime that notes what is enqueued. What a stream then does is played
// here, in many random orders: copies, matmuls and sums access rows of memory, and the kernels of
// signals.cu set, await and reset words. A missing order shows as a wrong product.
//
//   pipeline_test [variant] [ranks] [operations] [streams|queue] [orders]
//
// Runs so many all-gathers and reduce-scatters one after another, of several shapes, on two groups
// that share their rings: all ranks, and the first two. Rings have only a few slots, which are used
// again and again.
//   streams   streams run at the same time.
//   queue     each rank runs one thing at a time, in any order that the dependencies allow, and a
//             kernel that waits holds up all others.
// Checked is that every product is right and that no rank waits for ever. Variants other than
// "sound" break the order on purpose. Exit status 0: all is right; 1: not.
#include <algorithm>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>

#include "xla_ffi/cuda/pipelined_matmul.cc"

namespace jin = jax_intranode;

struct FakeStream {
  int rank;
  int last = -1;           // the number of its last task
  std::vector<int> waits;  // tasks that the next one waits for
  std::vector<int> tasks;
};
struct FakeEvent {
  int task = -1;
};

namespace {

constexpr int kMostRanks = 3;
constexpr int kGroups = 2;
constexpr int64_t kColumns = 128;  // of every matrix: a row has kRow bytes
constexpr size_t kRow = 256;
constexpr size_t kDataBytes = 1024;  // of a ring: kMinSlots rows

std::string variant = "sound";
int device_of_new_streams;
bool Is(const char* name) { return variant == name; }

struct Task {
  int rank;
  std::vector<int> after;
  std::function<void()> run;
  jin::Words awaited{};     // of peers
  std::vector<int> before;  // all tasks that end before it begins, in order
  bool done = false;

  bool Waits() const { return awaited.count > 0; }
  bool HasArrived() const {
    for (int i = 0; i < awaited.count; ++i) {
      if (*awaited.word[i] == 0) return false;
    }
    return true;
  }
};

struct alignas(256) Line {
  char bytes[kRow];
};

// What is being built.
struct Program {
  std::list<FakeStream> streams;
  std::vector<Task> tasks;
  std::vector<std::vector<Line>> memory;
  std::vector<const char*> rings;  // their data
  int busy[kMostRanks] = {};
  std::string error;

  void Fail(const std::string& what) {
    if (error.empty()) error = what;
  }
};
Program program;

char* Allocate(size_t bytes) {
  return program.memory.emplace_back((bytes + kRow - 1) / kRow).data()->bytes;
}
// A row has a value that says what it holds.
uint64_t* RowAt(const char* at) {
  for (const char* const ring : program.rings) {
    if (Is("one_slot_fewer") && at == ring + kDataBytes - kRow) at -= kRow;
  }
  return reinterpret_cast<uint64_t*>(const_cast<char*>(at));
}
uint64_t Read(const char* at) { return *RowAt(at); }
void Write(char* at, uint64_t value) { *RowAt(at) = value; }

int Enqueue(cudaStream_t stream, std::function<void()> run, const jin::Words& awaited = {}) {
  const int number = static_cast<int>(program.tasks.size());
  Task task{stream->rank, stream->waits, std::move(run), awaited};
  if (stream->last >= 0) task.after.push_back(stream->last);
  for (const int last : task.after) {
    task.before.push_back(last);
    const std::vector<int>& earlier = program.tasks[last].before;
    task.before.insert(task.before.end(), earlier.begin(), earlier.end());
  }
  std::sort(task.before.begin(), task.before.end());
  task.before.erase(std::unique(task.before.begin(), task.before.end()), task.before.end());
  program.tasks.push_back(std::move(task));
  stream->waits.clear();
  stream->tasks.push_back(number);
  return stream->last = number;
}

void Set(const jin::Words& posted) {
  for (int i = 0; i < posted.count; ++i) *posted.word[i] = 1;
}
void Reset(const jin::Words& awaited) {
  for (int i = 0; i < awaited.count && !Is("never_reset"); ++i) *awaited.word[i] = 0;
}

}  // namespace

// The CUDA runtime.

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = *highest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = new FakeStream{device_of_new_streams};
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new FakeEvent;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  // What the stream waits for is part of the event.
  event->task = stream->waits.empty() ? stream->last : Enqueue(stream, [] {});
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (Is("no_event") && event->task >= 0 && program.tasks[event->task].Waits()) return cudaSuccess;
  if (event->task >= 0 && event->task != stream->last) stream->waits.push_back(event->task);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  Enqueue(stream, [=] {
    for (size_t y = 0; y < height; ++y) {
      for (size_t x = 0; x < width; x += kRow) {
        Write(static_cast<char*>(to) + y * to_pitch + x,
              Read(static_cast<const char*>(from) + y * from_pitch + x));
      }
    }
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

namespace jax_intranode {

void ThrowIfError(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) throw std::runtime_error(what);
}
CurrentDevice::CurrentDevice(int device) { device_of_new_streams = device; }
CurrentDevice::~CurrentDevice() = default;

// Kernels of signals.cu.

cudaError_t OpenRing(const DeviceGroup& group, Algorithm, RingHeader*, const Words& words,
                     cudaStream_t stream) {
  Enqueue(stream, [rank = stream->rank, words] {
    if (program.busy[rank]++ != 0) program.Fail("the ring is busy");
    Set(words);
  });
  return cudaSuccess;
}
cudaError_t Post(const Words& words, cudaStream_t stream) {
  Enqueue(stream, [words] { Set(words); });
  return cudaSuccess;
}
cudaError_t PostAndAwait(const DeviceGroup& group, Algorithm, const Words& posted,
                         const Words& awaited, cudaStream_t stream) {
  if (posted.count > 0) Post(posted, stream);
  if (awaited.count == 0) return cudaSuccess;
  const Signals* const own = SignalsOf(group, group.rank);
  const auto* const word = awaited.word[0];
  const bool grant = word >= &own->granted[0][0] && word < &own->arrived[0][0];
  if (!Is(grant ? "no_grant" : "no_arrival")) {
    Enqueue(stream, [awaited] { Reset(awaited); }, awaited);
  }
  return cudaSuccess;
}
cudaError_t CloseRing(const DeviceGroup&, Algorithm, RingHeader*, cudaStream_t stream) {
  Enqueue(stream, [rank = stream->rank] { --program.busy[rank]; });
  return cudaSuccess;
}
cudaError_t SumPartials(ElementType, const Partials& partials, int size, void* sum, size_t packs,
                        cudaStream_t stream) {
  Enqueue(stream, [partials, size, to = static_cast<char*>(sum), packs] {
    for (size_t at = 0; at < packs * sizeof(Pack); at += kRow) {
      uint64_t total = 0;
      for (int r = 0; r < size; ++r) {
        total = total * 1000 + Read(static_cast<const char*>(partials.of_rank[r]) + at);
      }
      Write(to + at, total);
    }
  });
  return cudaSuccess;
}

// Matmuls.

struct Matmul::Descriptors {
  MatmulShape shape;
};
Matmul::Matmul(int, const MatmulShape& shape) : descriptors_(new Descriptors{shape}) {}
Matmul::~Matmul() = default;
const Matmul& Matmul::Of(int device, const MatmulShape& shape) {
  static std::map<MatmulShape, Matmul*> all;
  Matmul*& matmul = all[shape];
  if (matmul == nullptr) matmul = new Matmul(device, shape);
  return *matmul;
}
void Matmul::Enqueue(const void* a, const void*, void* d, void*, cudaStream_t stream) const {
  ::Enqueue(stream, [a, d, shape = descriptors_->shape] {
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t row = 0; row < shape.m; ++row) {
        const int64_t from = (b * shape.a_stride + row * kColumns) * kMatmulElementBytes;
        const int64_t to = (b * shape.d_stride + row * kColumns) * kMatmulElementBytes;
        Write(static_cast<char*>(d) + to, Read(static_cast<const char*>(a) + from) * 3);
      }
    }
  });
}

}  // namespace jax_intranode

namespace {

struct Shape {
  bool gathers;
  int outer, rows;
  bool gathered;
  jin::MatmulPlan plan;
  int group;
};

// What a row of x holds: other values in each operation, on each rank.
uint64_t Value(int operation, int rank, int row) {
  return 1 + operation * 10000 + rank * 100 + row;
}

class Run {
 public:
  Run(int ranks, const std::vector<Shape>& shapes) : ranks_(ranks) {
    // A process has the side streams of a device for ever: forget what earlier runs enqueued.
    program = {};
    std::vector<FakeStream*> main;
    for (int r = 0; r < ranks_; ++r) {
      jin::CreateSideStreams(r);
      auto& side = jin::SideStreams::Of(r);
      for (auto* stream : {&side.copy, &side.signal, &side.local}) {
        *stream->stream = FakeStream{r};
      }
      for (auto* stream : {&side.main, &side.copy, &side.signal, &side.local}) {
        stream->event->task = -1;
      }
      for (auto* events : {&side.sent, &side.arrived}) {
        for (cudaEvent_t event : *events) event->task = -1;
      }
      program.streams.push_back({r});
      main.push_back(&program.streams.back());
      rings_.push_back(Allocate(kRingBytes));
      program.rings.push_back(rings_[r] + jin::RingDataOffset(kRingBytes));
      // The buffers that XLA gives to an operation are the same each time, so operations that went
      // on after their end would disturb the next one.
      const size_t rows = (ranks_ == 2 ? 12 : 18) * kRow;
      buffers_.push_back({Allocate(rows), Allocate(rows), Allocate(rows),
                          Allocate(jin::kMatmulWorkspaceBytes + rows)});
    }
    for (int g = 0; g < kGroups; ++g) {
      regions_.emplace_back();
      for (int r = 0; r < (g == 0 ? ranks_ : 2); ++r) {
        regions_[g].push_back(Allocate(jin::kHeaderBytes));
      }
    }
    for (size_t k = 0; k < shapes.size(); ++k) {
      const int size = static_cast<int>(regions_[shapes[k].group].size());
      for (int r = 0; r < size; ++r) {
        EnqueueOperation(static_cast<int>(k), shapes[k], size, r, main[r]);
      }
    }
    for (int r = 0; r < ranks_; ++r) {
      auto& side = jin::SideStreams::Of(r);
      for (FakeStream* stream :
           {main[r], side.copy.stream, side.signal.stream, side.local.stream}) {
        lanes_.push_back(stream->tasks);
      }
    }
  }

  // Runs all tasks in a random order. Returns what is wrong.
  std::string RunInOrder(bool queue, std::mt19937* random) {
    std::vector<std::vector<int>> lanes = lanes_;
    if (queue) lanes = Queues(random);
    std::vector<size_t> next(lanes.size(), 0);
    for (Task& task : program.tasks) task.done = false;
    // Few lanes run often, so that others come late.
    std::vector<double> often(lanes.size()), weights(lanes.size());
    for (double& weight : often) weight = 1 << 2 * ((*random)() % 5);
    const auto weight_of = [&](size_t lane) {
      return next[lane] < lanes[lane].size() && CanRun(lanes[lane][next[lane]]) ? often[lane] : 0;
    };
    while (program.error.empty()) {
      for (size_t l = 0; l < lanes.size(); ++l) weights[l] = weight_of(l);
      if (std::all_of(weights.begin(), weights.end(), [](double w) { return w == 0; })) break;
      const size_t lane = std::discrete_distribution<>(weights.begin(), weights.end())(*random);
      Task& task = program.tasks[lanes[lane][next[lane]++]];
      task.run();
      task.done = true;
    }
    const auto is_done = [](const Task& task) { return task.done; };
    if (!std::all_of(program.tasks.begin(), program.tasks.end(), is_done)) {
      program.Fail("a wait without end");
    }
    return program.error;
  }

 private:
  inline static const size_t kRingBytes = jin::RingDataOffset(kDataBytes) + kDataBytes;

  static bool CanRun(int number) {
    const Task& task = program.tasks[number];
    const auto is_done = [](int t) { return program.tasks[t].done; };
    return std::all_of(task.after.begin(), task.after.end(), is_done) && task.HasArrived();
  }

  // A lane for each rank. It begins a task that waits as soon as that may begin, so before all
  // tasks that need not come first. In any other order more has been done for the peers, so if
  // ranks wait for each other in that one, they do in this one.
  std::vector<std::vector<int>> Queues(std::mt19937* random) const {
    std::vector<std::vector<int>> queues(ranks_);
    std::vector<bool> queued(program.tasks.size(), false);
    const auto add = [&](int rank, int task) {
      if (!queued[task]) queues[rank].push_back(task);
      queued[task] = true;
    };
    for (int r = 0; r < ranks_; ++r) {
      for (std::vector<int> waiting;; waiting.clear()) {
        for (size_t t = 0; t < program.tasks.size(); ++t) {
          const Task& task = program.tasks[t];
          const auto is_later = [&](int b) { return program.tasks[b].Waits() && !queued[b]; };
          const bool is_next = task.rank == r && task.Waits() && !queued[t] &&
                               std::none_of(task.before.begin(), task.before.end(), is_later);
          if (is_next) waiting.push_back(static_cast<int>(t));
        }
        if (waiting.empty()) break;
        const int next = waiting[(*random)() % waiting.size()];
        for (const int before : program.tasks[next].before) add(r, before);
        add(r, next);
      }
      for (size_t t = 0; t < program.tasks.size(); ++t) {
        if (program.tasks[t].rank == r) add(r, static_cast<int>(t));
      }
    }
    return queues;
  }

  void EnqueueOperation(int k, const Shape& shape, int size, int rank, FakeStream* main) {
    jin::MatmulMember member{};
    member.device = rank;
    member.group.rank = rank;
    member.group.size = size;
    member.ring_bytes = kRingBytes;
    for (int r = 0; r < size; ++r) {
      member.group.region[r] = regions_[shape.group][r];
      member.ring[r] = rings_[r];
    }
    const Buffers buffers = buffers_[rank];
    jin::MatmulCall call{};
    call.type = jin::ElementType::kBF16;
    call.outer = shape.outer;
    call.rows = shape.rows;
    call.xs = {buffers.x};
    call.ks = {kColumns};
    call.ws = {nullptr};
    call.ns = {kColumns};
    call.products = {buffers.product};
    call.gathered = shape.gathered ? buffers.gathered : nullptr;
    call.scratch = buffers.scratch;
    const int shard = shape.outer * shape.rows;
    const int in_rows = shape.gathers ? shard : size * shard;
    const int out_rows = shape.gathers ? size * shard : shard;
    const auto at = [](char* buffer, int row) { return buffer + row * kRow; };

    Enqueue(main, [=] {
      for (int row = 0; row < in_rows; ++row) Write(at(buffers.x, row), Value(k, rank, row));
    });
    jin::EnqueuePipeline(
        member,
        shape.gathers ? jin::Algorithm::kAllGatherMatmul : jin::Algorithm::kMatmulReduceScatter,
        shape.plan, call, main);
    Enqueue(main, [=] {
      for (int row = 0; row < out_rows; ++row) {
        uint64_t expected = 0;
        if (shape.gathers) {
          const int outer = row / (size * shape.rows), in_outer = row % (size * shape.rows);
          const int of_shard = outer * shape.rows + in_outer % shape.rows;
          expected = Value(k, in_outer / shape.rows, of_shard);
          if (shape.gathered && Read(at(buffers.gathered, row)) != expected) {
            program.Fail("wrong: the gathered x");
          }
          expected *= 3;
        } else {
          const int outer = row / shape.rows;
          const int of_all = (outer * size + rank) * shape.rows + row % shape.rows;
          for (int r = 0; r < size; ++r) expected = expected * 1000 + Value(k, r, of_all) * 3;
        }
        if (Read(at(buffers.product, row)) != expected) {
          program.Fail("wrong: a product of operation " + std::to_string(k));
        }
      }
    });
  }

  struct Buffers {
    char *x, *product, *gathered, *scratch;
  };
  const int ranks_;
  std::vector<char*> rings_;
  std::vector<std::vector<char*>> regions_;
  std::vector<Buffers> buffers_;
  std::vector<std::vector<int>> lanes_;  // the tasks of each stream
};

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) variant = argv[1];
  const int ranks = argc > 2 ? atoi(argv[2]) : 2, operations = argc > 3 ? atoi(argv[3]) : 3;
  const bool queue = argc > 4 && std::string(argv[4]) == "queue";
  const int orders = argc > 5 ? atoi(argv[5]) : 100;
  if (ranks < 2 || ranks > kMostRanks || operations < 1) return 2;

  const auto plan = [](int first, int last) {
    return jin::MatmulPlan{.first_pieces = first, .last_pieces = last};
  };
  // A ring holds 4 rows. So 6 rows come in 6 pieces, 2 of them through used slots.
  const Shape all[] = {
      {true, 1, ranks == 2 ? 6 : 3, true, plan(1, 1), 0},
      {false, 1, 4, false, plan(2, 2), 0},
      {true, 2, 3, true, plan(1, 2), 1},
      {false, 2, 3, false, plan(1, 1), 1},
      {true, 1, ranks == 2 ? 2 : 1, false, plan(1, 2), 0},
      {false, 1, 1, false, plan(1, 1), 0},
  };
  constexpr int kKinds = std::size(all);
  // Every sequence of shapes.
  int combinations = 1;
  for (int k = 0; k < operations; ++k) combinations *= kKinds;
  std::mt19937 random(1);
  for (int combination = 0; combination < combinations; ++combination) {
    std::vector<Shape> shapes;
    std::string name = "shapes";
    for (int k = 0, c = combination; k < operations; ++k, c /= kKinds) {
      shapes.push_back(all[c % kKinds]);
      name += ' ' + std::to_string(c % kKinds);
    }
    Run run(ranks, shapes);
    for (int order = 0; order < orders; ++order) {
      const std::string error = run.RunInOrder(queue, &random);
      if (error.empty()) continue;
      printf("%s\n%s, order %d\n", error.c_str(), name.c_str(), order);
      printf("%s: ranks %d operations %d ends wrong, \n", variant.c_str(), ranks, operations);
      return 1;
    }
  }
  printf("done\n");
}
