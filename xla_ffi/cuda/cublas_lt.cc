#include "cublas_lt.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "../text.h"
#include "owned.h"

namespace jax_intranode {

// From cublasLt.h. Not in the anonymous namespace, because Matmul::Descriptors is not, either.
struct CublasLtAlgo {
  uint64_t data[8];
};

namespace {

// From cublasLt.h. The values are the same in CUDA 12 and 13.
using Status = int;
using Handle = void*;
using Descriptor = void*;
struct HeuristicResult {
  CublasLtAlgo algo;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
constexpr int kCompute32F = 68;
constexpr int kR32F = 0, kR16F = 2, kR16BF = 14;
constexpr int kOpT = 1;
constexpr int kDescTransA = 3;
constexpr int kLayoutBatchCount = 5, kLayoutStridedBatchOffset = 6;
constexpr int kPrefMaxWorkspaceBytes = 1, kPrefReductionSchemeMask = 3;
constexpr int kPrefMinAlignmentA = 5, kPrefMinAlignmentB = 6, kPrefMinAlignmentC = 7,
              kPrefMinAlignmentD = 8;

struct Library {
  size_t (*GetVersion)();
  Status (*Create)(Handle*);
  Status (*DescCreate)(Descriptor*, int compute_type, int scale_type);
  Status (*DescDestroy)(Descriptor);
  Status (*DescSet)(Descriptor, int attribute, const void*, size_t);
  Status (*LayoutCreate)(Descriptor*, int type, uint64_t rows, uint64_t columns, int64_t leading);
  Status (*LayoutDestroy)(Descriptor);
  Status (*LayoutSet)(Descriptor, int attribute, const void*, size_t);
  Status (*PreferenceCreate)(Descriptor*);
  Status (*PreferenceDestroy)(Descriptor);
  Status (*PreferenceSet)(Descriptor, int attribute, const void*, size_t);
  Status (*Heuristic)(Handle, Descriptor desc, Descriptor a, Descriptor b, Descriptor c,
                      Descriptor d, Descriptor preference, int asked, HeuristicResult*, int* found);
  Status (*Multiply)(Handle, Descriptor desc, const void* alpha, const void* a, Descriptor a_layout,
                     const void* b, Descriptor b_layout, const void* beta, const void* c,
                     Descriptor c_layout, void* d, Descriptor d_layout, const CublasLtAlgo*,
                     void* workspace, size_t workspace_bytes, cudaStream_t);
};

// The library, or null if there is none. Never destroyed, because matmuls aren't, either.
const Library* Lt() {
  static const Library* const library = []() -> const Library* {
    void* file = nullptr;
    // The library that JAX has loaded, wherever it lies; else the one that the loader finds.
    for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
      for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
        if (file == nullptr) file = dlopen(name, flags);
      }
    }
    if (file == nullptr) return nullptr;
    Library* const found = new Library;
    bool all = true;
    const auto look_up = [&](const char* name, auto* function) {
      *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(file, name));
      all = all && *function != nullptr;
    };
    look_up("cublasLtGetVersion", &found->GetVersion);
    look_up("cublasLtCreate", &found->Create);
    look_up("cublasLtMatmulDescCreate", &found->DescCreate);
    look_up("cublasLtMatmulDescDestroy", &found->DescDestroy);
    look_up("cublasLtMatmulDescSetAttribute", &found->DescSet);
    look_up("cublasLtMatrixLayoutCreate", &found->LayoutCreate);
    look_up("cublasLtMatrixLayoutDestroy", &found->LayoutDestroy);
    look_up("cublasLtMatrixLayoutSetAttribute", &found->LayoutSet);
    look_up("cublasLtMatmulPreferenceCreate", &found->PreferenceCreate);
    look_up("cublasLtMatmulPreferenceDestroy", &found->PreferenceDestroy);
    look_up("cublasLtMatmulPreferenceSetAttribute", &found->PreferenceSet);
    look_up("cublasLtMatmulAlgoGetHeuristic", &found->Heuristic);
    look_up("cublasLtMatmul", &found->Multiply);
    return all ? found : nullptr;
  }();
  return library;
}

std::string Text(const MatmulShape& shape) {
  return std::to_string(shape.batch) + " x " + std::to_string(shape.m) + " x " +
         std::to_string(shape.k) + " x " + std::to_string(shape.n);
}

void Check(Status status, const char* what) {
  if (status != 0) {
    throw RuntimeError(what, " failed with cublasStatus_t ", status);
  }
}

// One handle per device. Never destroyed: that would wait for the device.
Handle HandleOf(int device) {
  static std::mutex mutex;
  static std::map<int, Handle> handles;
  std::lock_guard lock(mutex);
  Handle& handle = handles[device];
  if (handle == nullptr) {
    const CurrentDevice current(device);
    Check(Lt()->Create(&handle), "cublasLtCreate");
  }
  return handle;
}

// The largest power of two that divides `bytes`, up to the alignment of XLA's buffers.
uint32_t Alignment(int64_t bytes) {
  return static_cast<uint32_t>(std::min<int64_t>(128, bytes & -bytes));
}

// The number of candidates that are timed.
constexpr int kCandidates = 16;

// An algorithm with a workspace clears it first. Candidates are timed in a stream; in a graph,
// clearing takes this much longer.
constexpr float kMillisecondsOfMemset = 6e-3;

class TimedStream {
 public:
  cudaStream_t get() const { return stream_.get(); }
  void Start() const { ThrowIfError(cudaEventRecord(start_.get(), get()), "recording an event"); }
  float Stop() const {
    float milliseconds;
    ThrowIfError(cudaEventRecord(stop_.get(), get()), "recording an event");
    ThrowIfError(cudaEventSynchronize(stop_.get()), "timing a matmul");
    ThrowIfError(cudaEventElapsedTime(&milliseconds, start_.get(), stop_.get()), "timing a matmul");
    return milliseconds;
  }

 private:
  const Owned<CUstream_st> stream_ = NewStream();
  const Owned<CUevent_st> start_ = NewEvent(), stop_ = NewEvent();
};

// Stream-ordered memory. Neither allocating nor freeing it waits for the device, on which kernels
// may be waiting for peers.
class StreamMemory {
 public:
  StreamMemory(size_t bytes, cudaStream_t stream) : stream_(stream) {
    ThrowIfError(cudaMallocAsync(&memory_, bytes, stream),
                 "allocating " + std::to_string(bytes) + " bytes to time matmuls with");
  }
  ~StreamMemory() { cudaFreeAsync(memory_, stream_); }
  void* get() const { return memory_; }

 private:
  void* memory_ = nullptr;
  cudaStream_t stream_;
};

}  // namespace

size_t CublasLtVersion() { return Lt() == nullptr ? 0 : Lt()->GetVersion(); }

struct Matmul::Descriptors {
  Handle handle = nullptr;
  Descriptor desc = nullptr, w = nullptr, a = nullptr, d = nullptr;
  CublasLtAlgo algo;

  ~Descriptors() {
    if (desc != nullptr) Lt()->DescDestroy(desc);
    for (Descriptor layout : {w, a, d}) {
      if (layout != nullptr) Lt()->LayoutDestroy(layout);
    }
  }

  void Enqueue(const void* a_at, const void* w_at, void* d_at, void* workspace,
               cudaStream_t stream) const {
    const float one = 1, zero = 0;
    Check(Lt()->Multiply(handle, desc, &one, w_at, w, a_at, a, &zero, d_at, d, d_at, d, &algo,
                         workspace, kMatmulWorkspaceBytes, stream),
          "cublasLtMatmul");
  }

  // Times each candidate: one launch to load it, then the shorter of two. Skips those that fail. If
  // all fail, or if there is no memory, the first one stays, and reports the error when it is used.
  void TakeFastest(const HeuristicResult* results, int found, size_t a_bytes, size_t w_bytes,
                   size_t d_bytes) {
    algo = results[0].algo;
    try {
      const TimedStream stream;
      const StreamMemory a_at(a_bytes, stream.get()), w_at(w_bytes, stream.get()),
          d_at(d_bytes, stream.get()), workspace(kMatmulWorkspaceBytes, stream.get());
      CublasLtAlgo best = algo;
      float shortest = 0;
      for (int k = 0; k < found; ++k) {
        if (results[k].state != 0) continue;
        algo = results[k].algo;
        try {
          Enqueue(a_at.get(), w_at.get(), d_at.get(), workspace.get(), stream.get());
          for (int repetition = 0; repetition < 2; ++repetition) {
            stream.Start();
            Enqueue(a_at.get(), w_at.get(), d_at.get(), workspace.get(), stream.get());
            const float milliseconds =
                stream.Stop() + (results[k].workspace_bytes > 0 ? kMillisecondsOfMemset : 0);
            if (shortest == 0 || milliseconds < shortest) {
              shortest = milliseconds;
              best = algo;
            }
          }
        } catch (const std::runtime_error&) {
        }
      }
      algo = best;
    } catch (const std::runtime_error&) {
    }
  }
};

// cuBLASLt's matrices are column-major. A row-major matrix is the transpose of a column-major one,
// so this computes d^T = w^T a^T.
Matmul::Matmul(int device, const MatmulShape& shape)
    : descriptors_(std::make_unique<Descriptors>()) {
  const CurrentDevice current(device);
  const Library* lt = Lt();
  if (lt == nullptr) throw std::runtime_error("jax_intranode: cuBLASLt was not found");
  Descriptors& it = *descriptors_;
  it.handle = HandleOf(device);
  const int type = shape.type == ElementType::kBF16 ? kR16BF : kR16F;
  Check(lt->DescCreate(&it.desc, kCompute32F, kR32F), "cublasLtMatmulDescCreate");
  if (shape.transposed) {
    const int32_t op = kOpT;
    Check(lt->DescSet(it.desc, kDescTransA, &op, sizeof(op)), "cublasLtMatmulDescSetAttribute");
  }
  const auto layout = [&](Descriptor* of, int64_t rows, int64_t columns, int64_t stride) {
    Check(lt->LayoutCreate(of, type, rows, columns, rows), "cublasLtMatrixLayoutCreate");
    if (shape.batch > 1) {
      const int32_t count = static_cast<int32_t>(shape.batch);
      Check(lt->LayoutSet(*of, kLayoutBatchCount, &count, sizeof(count)),
            "cublasLtMatrixLayoutSetAttribute");
      Check(lt->LayoutSet(*of, kLayoutStridedBatchOffset, &stride, sizeof(stride)),
            "cublasLtMatrixLayoutSetAttribute");
    }
  };
  shape.transposed ? layout(&it.w, shape.k, shape.n, 0) : layout(&it.w, shape.n, shape.k, 0);
  layout(&it.a, shape.k, shape.m, shape.a_stride);
  layout(&it.d, shape.n, shape.m, shape.d_stride);

  Descriptor preference = nullptr;
  Check(lt->PreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const std::unique_ptr<void, Status (*)(Descriptor)> owned(preference, lt->PreferenceDestroy);
  const auto prefer = [&](int attribute, auto value) {
    Check(lt->PreferenceSet(preference, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(kPrefMaxWorkspaceBytes, static_cast<uint64_t>(kMatmulWorkspaceBytes));
  prefer(kPrefMinAlignmentA, Alignment(kMatmulElementBytes * shape.k * shape.n));
  prefer(kPrefMinAlignmentB, Alignment(kMatmulElementBytes * shape.k));
  prefer(kPrefMinAlignmentC, Alignment(kMatmulElementBytes * shape.n));
  prefer(kPrefMinAlignmentD, Alignment(kMatmulElementBytes * shape.n));
  prefer(kPrefReductionSchemeMask, uint32_t{0});
  HeuristicResult results[kCandidates];
  int found = 0;
  const Status status = lt->Heuristic(it.handle, it.desc, it.w, it.a, it.d, it.d, preference,
                                      kCandidates, results, &found);
  if (status != 0 || found == 0) {
    throw RuntimeError("cuBLASLt has no algorithm for a matmul of ", Text(shape),
                       " (cublasStatus_t ", status, ")");
  }
  const auto bytes_of = [&](int64_t stride, int64_t items) {
    return kMatmulElementBytes * ((shape.batch > 1 ? shape.batch - 1 : 0) * stride + items);
  };
  it.TakeFastest(results, found, bytes_of(shape.a_stride, shape.m * shape.k),
                 bytes_of(0, shape.k * shape.n), bytes_of(shape.d_stride, shape.m * shape.n));
}

const Matmul& Matmul::Of(int device, const MatmulShape& shape) {
  struct OfDevice {
    std::mutex mutex;
    std::map<MatmulShape, std::unique_ptr<const Matmul>> matmuls;
  };
  static std::mutex mutex;
  static std::map<int, OfDevice>* const devices = new std::map<int, OfDevice>;
  OfDevice& of_device = [&]() -> OfDevice& {
    std::lock_guard lock(mutex);
    return (*devices)[device];
  }();
  std::lock_guard lock(of_device.mutex);
  std::unique_ptr<const Matmul>& matmul = of_device.matmuls[shape];
  if (!matmul) matmul.reset(new Matmul(device, shape));
  return *matmul;
}

Matmul::~Matmul() = default;

void Matmul::Enqueue(const void* a, const void* w, void* d, void* workspace,
                     cudaStream_t stream) const {
  descriptors_->Enqueue(a, w, d, workspace, stream);
}

}  // namespace jax_intranode
