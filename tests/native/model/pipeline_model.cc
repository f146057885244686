// Checks the cuBLASLt pipeline (cuda/pipelined_matmul.h) and its signals (cuda/signals.h) in all
// behaviours of few ranks. The code that enqueues operations is the real one, with a CUDA runtime
// that notes what is enqueued. What a stream then does is modelled here: copies, matmuls and sums
// access plain memory, row by row, and the kernels of signals.cu set, await and reset words.
//
//   pipeline_model [variant] [ranks] [operations] [streams|queue]
//
// Runs so many all-gathers and reduce-scatters one after another, of several shapes, on two groups
// that share their rings: all ranks, and the first two. Rings have only a few slots, which are used
// again and again.
//   streams   streams run at the same time. Checked is that every product is right, that no two
//             accesses of the same memory race, and that no rank waits for ever.
//   queue     each rank runs one thing at a time, in any order that the dependencies allow, and a
//             kernel that waits holds up all others. Checked is that no rank waits for ever.
// Variants other than "sound" break the protocol on purpose. Exit status: that of
// collectives_model.cc.
#include "totals.h"
//
#include <list>
#include <map>
#include <mutex>
#include <stdexcept>

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
constexpr int kMostOperations = 9;
constexpr int kGroups = 2;
constexpr int kSlots = 16;         // of signals, that the checker has words for
constexpr int64_t kColumns = 128;  // of every matrix: a row has kRow bytes
constexpr size_t kRow = 256;
constexpr size_t kDataBytes = 1024;  // of a ring: kMinSlots rows
constexpr int kMostTasks = 2048;

using model::Flag;
Flag no_release("no_release"), no_acquire("no_acquire"), never_reset("never_reset"),
    no_grant("no_grant"), no_arrival("no_arrival"), one_slot_fewer("one_slot_fewer"),
    no_event("no_event");

struct Task {
  int rank;
  std::string name;
  std::vector<int> after;
  std::function<void()> run;
  std::function<bool()> ready;
  bool waits = false;       // for a peer
  std::vector<int> before;  // all tasks that end before it begins, in order
};

// Plain memory: rows, each with a value that says what it holds.
struct Area {
  const char* begin;
  size_t bytes;
  size_t first_row;
  bool ring;
};

struct alignas(64) Aligned {
  char bytes[64];
};

// What is being built, and the state of its tasks.
struct Program {
  model::Machine* machine = nullptr;
  std::list<FakeStream> streams;
  std::vector<Task> tasks;
  std::vector<Area> areas;
  size_t rows = 0;
  std::vector<std::unique_ptr<Aligned[]>> memory;
  bool queue = false;
};
Program program;
struct Local {
  uint8_t done[kMostTasks];
  uint8_t busy[kMostRanks];
};
Local local;

char* Allocate(size_t bytes) {
  program.memory.push_back(std::make_unique<Aligned[]>(bytes / 64 + 8));
  const auto at = reinterpret_cast<uintptr_t>(program.memory.back().get());
  return reinterpret_cast<char*>((at + 255) & ~uintptr_t{255});
}
char* AllocateArea(size_t bytes) {
  char* const begin = Allocate(bytes);
  program.areas.push_back({begin, bytes, program.rows, false});
  program.rows += (bytes + kRow - 1) / kRow;
  return begin;
}
size_t RowAt(const void* at) {
  for (const Area& area : program.areas) {
    const long offset = static_cast<const char*>(at) - area.begin;
    if (offset < 0 || offset >= static_cast<long>(area.bytes)) continue;
    if (offset % kRow != 0) break;
    const size_t row = area.first_row + offset / kRow;
    const bool last_slot = area.ring && offset + kRow == area.bytes;
    return one_slot_fewer && last_slot ? row - 1 : row;
  }
  program.machine->Fail("wrong: an access outside of all buffers");
  return 0;
}
uint64_t Read(const char* at) { return program.machine->Read(RowAt(at)); }
void Write(char* at, uint64_t value) { program.machine->Write(RowAt(at), value); }

// A task that accesses plain memory. With "queue" it does nothing: the order is not checked then.
template <class Task>
std::function<void()> OnMemory(Task task) {
  if (program.queue) return [] {};
  return task;
}

int Enqueue(cudaStream_t stream, std::string name, std::function<void()> run) {
  const int number = static_cast<int>(program.tasks.size());
  Task task{stream->rank, std::move(name), stream->waits, std::move(run), nullptr, false, {}};
  if (stream->last >= 0) task.after.push_back(stream->last);
  for (const int last : task.after) {
    task.before.push_back(last);
    for (const int t : program.tasks[last].before) task.before.push_back(t);
  }
  std::sort(task.before.begin(), task.before.end());
  task.before.erase(std::unique(task.before.begin(), task.before.end()), task.before.end());
  task.ready = [after = task.after] {
    return std::all_of(after.begin(), after.end(), [](int t) { return local.done[t] != 0; });
  };
  program.tasks.push_back(std::move(task));
  stream->waits.clear();
  stream->tasks.push_back(number);
  return stream->last = number;
}

// The words of signals: those of each group, rank, kind, peer and slot.
std::map<const uint32_t*, size_t> words;
size_t WordAt(const uint32_t* at) {
  const auto found = words.find(at);
  if (found == words.end()) program.machine->Fail("wrong: no such signal");
  return found->second;
}

void Set(const jin::Words& posted) {
  if (posted.count == 0) return;
  if (!no_release) program.machine->Fence();
  for (int i = 0; i < posted.count; ++i) {
    program.machine->Store(WordAt(posted.word[i]), 1, model::Order::kRelaxed);
  }
}
// Each word has a thread of its own, which waits for it and resets it.
void Await(int task, const jin::Words& awaited) {
  uint64_t missing = (uint64_t{1} << awaited.count) - 1;
  while (missing != 0) {
    uint64_t arrived = 0;
    for (int i = 0; i < awaited.count; ++i) {
      if (missing >> i & 1 &&
          program.machine->Load(WordAt(awaited.word[i]), model::Order::kRelaxed) != 0) {
        arrived |= uint64_t{1} << i;
      }
    }
    if (arrived == 0) program.machine->Wait();
    for (int i = 0; i < awaited.count; ++i) {
      if (!(arrived >> i & 1) || never_reset) continue;
      program.machine->Store(WordAt(awaited.word[i]), 0, model::Order::kRelaxed);
    }
    if (!no_acquire) program.machine->AcquireFence();
    missing &= ~arrived;
    program.machine->Forget(task + missing * kMostTasks);
  }
}

}  // namespace

// The CUDA runtime.

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = *highest = 0;
  return cudaSuccess;
}
namespace {
int device_of_new_streams;
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
  event->task = stream->waits.empty() ? stream->last : Enqueue(stream, "nothing", [] {});
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (no_event && event->task >= 0 && program.tasks[event->task].waits) return cudaSuccess;
  if (event->task >= 0 && event->task != stream->last) stream->waits.push_back(event->task);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  Enqueue(stream, "copy", OnMemory([=] {
            for (size_t y = 0; y < height; ++y) {
              for (size_t x = 0; x < width; x += kRow) {
                Write(static_cast<char*>(to) + y * to_pitch + x,
                      Read(static_cast<const char*>(from) + y * from_pitch + x));
              }
            }
          }));
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
  Enqueue(stream, "open", [rank = stream->rank, words] {
    if (local.busy[rank]++ != 0) program.machine->Fail("wrong: the ring is busy");
    Set(words);
  });
  return cudaSuccess;
}
cudaError_t Post(const Words& words, cudaStream_t stream) {
  Enqueue(stream, "post", [words] { Set(words); });
  return cudaSuccess;
}
cudaError_t PostAndAwait(const DeviceGroup& group, Algorithm, const Words& posted,
                         const Words& awaited, cudaStream_t stream) {
  const Signals* const own = SignalsOf(group, group.rank);
  const auto* const word = awaited.count > 0 ? awaited.word[0] : nullptr;
  const bool grant = word >= &own->granted[0][0] && word < &own->arrived[0][0];
  const bool skipped = awaited.count > 0 && ((no_grant && grant) || (no_arrival && !grant));
  const int task =
      Enqueue(stream,
              awaited.count == 0 ? "post"
              : grant            ? "await grants"
                                 : "await arrivals",
              [task = static_cast<int>(program.tasks.size()), posted, awaited, skipped] {
                Set(posted);
                if (!skipped) Await(task, awaited);
              });
  program.tasks[task].waits = awaited.count > 0 && !skipped;
  return cudaSuccess;
}
cudaError_t CloseRing(const DeviceGroup&, Algorithm, RingHeader*, cudaStream_t stream) {
  Enqueue(stream, "close", [rank = stream->rank] { --local.busy[rank]; });
  return cudaSuccess;
}
cudaError_t SumPartials(ElementType, const Partials& partials, int size, void* sum, size_t packs,
                        cudaStream_t stream) {
  Enqueue(stream, "sum", OnMemory([partials, size, to = static_cast<char*>(sum), packs] {
            for (size_t at = 0; at < packs * sizeof(Pack); at += kRow) {
              uint64_t total = 0;
              for (int r = 0; r < size; ++r) {
                total = total * 1000 + Read(static_cast<const char*>(partials.of_rank[r]) + at);
              }
              Write(to + at, total);
            }
          }));
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
  ::Enqueue(stream, "multiply", OnMemory([a, d, shape = descriptors_->shape] {
              for (int64_t b = 0; b < shape.batch; ++b) {
                for (int64_t row = 0; row < shape.m; ++row) {
                  const int64_t from = (b * shape.a_stride + row * kColumns) * kMatmulElementBytes;
                  const int64_t to = (b * shape.d_stride + row * kColumns) * kMatmulElementBytes;
                  Write(static_cast<char*>(d) + to, Read(static_cast<const char*>(a) + from) * 3);
                }
              }
            }));
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
  Run(int ranks, const std::vector<Shape>& shapes, bool queue) : ranks_(ranks) {
    // A process has the side streams of a device for ever: forget what earlier runs enqueued.
    program = {};
    program.queue = queue;
    memset(&local, 0, sizeof local);
    words.clear();
    Build(shapes);
    if (program.tasks.size() > kMostTasks) {
      printf("too many tasks\n");
      std::exit(2);
    }
    machine_ = std::make_unique<model::Machine>(words.size(), 0, program.rows);
    program.machine = machine_.get();
    machine_->AddLocalMemory(local.done, program.tasks.size());
    machine_->AddLocalMemory(local.busy, sizeof local.busy);
    machine_->NameWords([](size_t word) {
      for (const auto& [at, number] : words) {
        if (number == word) return names_[word];
      }
      return std::string("?");
    });
    queue ? AddQueues() : AddStreams();
  }
  model::Machine::Result Search() { return machine_->Search(); }

 private:
  void Build(const std::vector<Shape>& shapes) {
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
    }
    const size_t ring_bytes = jin::RingDataOffset(kDataBytes) + kDataBytes;
    std::vector<char*> rings;
    for (int r = 0; r < ranks_; ++r) {
      rings.push_back(Allocate(ring_bytes));
      program.areas.push_back(
          {rings[r] + jin::RingDataOffset(ring_bytes), kDataBytes, program.rows, true});
      program.rows += kDataBytes / kRow;
    }
    names_.clear();
    for (int g = 0; g < kGroups; ++g) {
      std::vector<char*> regions;
      const int size = g == 0 ? ranks_ : 2;
      for (int r = 0; r < size; ++r) {
        regions.push_back(Allocate(jin::kHeaderBytes));
        auto* signals = reinterpret_cast<jin::Signals*>(regions[r] + jin::kHeaderBytes / 2);
        for (int peer = 0; peer < size; ++peer) {
          for (int slot = 0; slot < kSlots; ++slot) {
            for (bool granted : {true, false}) {
              words.emplace(granted ? &signals->granted[peer][slot] : &signals->arrived[peer][slot],
                            words.size());
              names_.push_back((granted ? "granted[" : "arrived[") + std::to_string(peer) + "][" +
                               std::to_string(slot) + "] of rank " + std::to_string(r) +
                               " in group " + std::to_string(g));
            }
          }
        }
      }
      regions_.push_back(regions);
    }
    for (size_t k = 0; k < shapes.size(); ++k) {
      const Shape& shape = shapes[k];
      const int size = static_cast<int>(regions_[shape.group].size());
      for (int r = 0; r < size; ++r) {
        EnqueueOperation(static_cast<int>(k), shape, size, r, rings, ring_bytes, main[r]);
      }
    }
    for (int r = 0; r < ranks_; ++r) {
      auto& side = jin::SideStreams::Of(r);
      streams_.push_back({main[r], side.copy.stream, side.signal.stream, side.local.stream});
    }
  }

  // The buffers that XLA gives to an operation are the same each time, so operations that went on
  // after their end would disturb the next one.
  struct Buffers {
    char *x, *product, *gathered, *scratch;
  };
  Buffers BuffersOf(int rank) {
    while (buffers_.size() <= static_cast<size_t>(rank)) {
      const size_t rows = (ranks_ == 2 ? 12 : 18) * kRow;
      Buffers buffers;
      buffers.x = AllocateArea(rows);
      buffers.product = AllocateArea(rows);
      buffers.gathered = AllocateArea(rows);
      // Aligned here, so that workspace and products lie where the call puts them.
      buffers.scratch = Allocate(jin::kMatmulWorkspaceBytes + rows);
      program.areas.push_back(
          {buffers.scratch + jin::kMatmulWorkspaceBytes, rows, program.rows, false});
      program.rows += rows / kRow;
      buffers_.push_back(buffers);
    }
    return buffers_[rank];
  }

  void EnqueueOperation(int k, const Shape& shape, int size, int rank,
                        const std::vector<char*>& rings, size_t ring_bytes, FakeStream* main) {
    jin::MatmulMember member{};
    member.device = rank;
    member.group.rank = rank;
    member.group.size = size;
    member.ring_bytes = ring_bytes;
    for (int r = 0; r < size; ++r) {
      member.group.region[r] = regions_[shape.group][r];
      member.ring[r] = rings[r];
    }
    const Buffers buffers = BuffersOf(rank);
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

    Enqueue(main, "write x", OnMemory([=] {
              for (int row = 0; row < in_rows; ++row)
                Write(at(buffers.x, row), Value(k, rank, row));
            }));
    jin::EnqueuePipeline(
        member,
        shape.gathers ? jin::Algorithm::kAllGatherMatmul : jin::Algorithm::kMatmulReduceScatter,
        shape.plan, call, main);
    Enqueue(main, "check the products", OnMemory([=] {
              for (int row = 0; row < out_rows; ++row) {
                uint64_t expected = 0;
                if (shape.gathers) {
                  const int outer = row / (size * shape.rows), in_outer = row % (size * shape.rows);
                  const int of_shard = outer * shape.rows + in_outer % shape.rows;
                  expected = Value(k, in_outer / shape.rows, of_shard);
                  if (shape.gathered && Read(at(buffers.gathered, row)) != expected) {
                    program.machine->Fail("wrong: the gathered x");
                  }
                  expected *= 3;
                } else {
                  const int outer = row / shape.rows;
                  const int of_all = (outer * size + rank) * shape.rows + row % shape.rows;
                  for (int r = 0; r < size; ++r)
                    expected = expected * 1000 + Value(k, r, of_all) * 3;
                }
                if (Read(at(buffers.product, row)) != expected) {
                  program.machine->Fail("wrong: a product of operation " + std::to_string(k));
                }
              }
            }));
  }

  static void RunTask(int number) {
    model::Machine& machine = *program.machine;
    machine.Note(program.tasks[number].name);
    if (program.queue) {
      program.tasks[number].run();
      local.done[number] = 1;
      machine.Forget(0);
      return;
    }
    for (const int before : program.tasks[number].after) machine.AcquireMark(before);
    program.tasks[number].run();
    local.done[number] = 1;
    machine.SetMark(number);
    machine.Forget(number);
  }

  // A thread for each stream.
  void AddStreams() {
    const char* const names[] = {"main", "copy", "signal", "local"};
    for (int r = 0; r < ranks_; ++r) {
      for (size_t s = 0; s < streams_[r].size(); ++s) {
        const FakeStream* const stream = streams_[r][s];
        machine_->AddThread("rank " + std::to_string(r) + " " + names[s], [this, stream] {
          for (const int number : stream->tasks) {
            machine_->Await(program.tasks[number].ready);
            RunTask(number);
          }
        });
      }
    }
  }

  // A thread for each rank. It begins a task that waits as soon as that may begin, so before all
  // tasks that need not come first. In any other order more has been done for the peers, so if
  // ranks wait for each other in that one, they do in this one.
  void AddQueues() {
    for (int r = 0; r < ranks_; ++r) {
      machine_->AddThread("rank " + std::to_string(r), [this, r] {
        for (int next; (next = PickTask(r)) >= 0;) {
          for (const int before : program.tasks[next].before) {
            if (local.done[before] == 0) RunTask(before);
          }
          RunTask(next);
        }
        for (size_t t = 0; t < program.tasks.size(); ++t) {
          if (program.tasks[t].rank == r && local.done[t] == 0) RunTask(static_cast<int>(t));
        }
      });
    }
  }
  // One of the tasks of a rank that may be the next one that waits; -1 if there is none.
  int PickTask(int rank) {
    const auto is_next = [rank](size_t number) {
      const Task& task = program.tasks[number];
      return task.rank == rank && task.waits && local.done[number] == 0 &&
             std::none_of(task.before.begin(), task.before.end(),
                          [](int t) { return program.tasks[t].waits && local.done[t] == 0; });
    };
    int count = 0;
    for (size_t t = 0; t < program.tasks.size(); ++t) count += is_next(t);
    if (count == 0) return -1;
    int picked = machine_->Pick(count);
    for (size_t t = 0;; ++t) {
      if (is_next(t) && picked-- == 0) return static_cast<int>(t);
    }
  }

  const int ranks_;
  std::vector<std::vector<char*>> regions_;
  std::vector<Buffers> buffers_;
  std::vector<std::vector<const FakeStream*>> streams_;
  inline static std::vector<std::string> names_;
  std::unique_ptr<model::Machine> machine_;
};

}  // namespace

int main(int argc, char** argv) {
  model::Totals totals(argc, argv, 3);
  const int ranks = totals.ranks, operations = totals.operations;
  if (!totals.Fit(kMostRanks, kMostOperations)) return 2;

  const auto plan = [](int first, int last) {
    jin::MatmulPlan plan;
    plan.first_pieces = first;
    plan.last_pieces = last;
    return plan;
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
  // Three ranks have many behaviours: two operations do without the first shape.
  const int first = ranks == 3 && operations > 1 ? 1 : 0;
  const int kinds = sizeof all / sizeof all[0] - first;
  // Every sequence of shapes.
  int combinations = 1;
  for (int k = 0; k < operations; ++k) combinations *= kinds;
  for (int combination = 0; combination < combinations; ++combination) {
    std::vector<Shape> shapes;
    std::string name = "shapes";
    for (int k = 0, c = combination; k < operations; ++k, c /= kinds) {
      shapes.push_back(all[first + c % kinds]);
      name += ' ';
      name += std::to_string(first + c % kinds);
    }
    if (totals.IsWrong(Run(ranks, shapes, totals.more == "queue").Search(), name)) return 1;
  }
  totals.Print();
  return 0;
}
