// What jax_intranode and a library of yours exchange: the memory of a peer buffer, the record of a
// kernel that gave up, and tables of functions. Plain data, the same in all versions with this
// number. peer.h has what kernels do with it, peer_ffi.h has the XLA handlers.
//
// A library is linked to nothing of jax_intranode. `jax_intranode.register_ffi_library` asks it for
// its `Library`, compares the versions, and hands it an `Api`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_intranode::v1 {

// Raised when something that this file declares changes. A new type does not raise it. The
// namespace has the same number.
constexpr uint32_t kVersion = 1;

constexpr int kMaxRanks = 8;     // of a group
constexpr int kMaxBlocks = 256;  // of a grid

// The first bytes of each rank's memory, zeroed in the beginning. peer.h says who writes a word.
struct PeerHeader {
  uint32_t epoch[kMaxBlocks];
  uint32_t busy[kMaxBlocks];
  uint32_t begun[kMaxBlocks];
  uint32_t barriers[kMaxBlocks];
  uint32_t peer_begun[kMaxBlocks][kMaxRanks];
  uint32_t peer_barriers[kMaxBlocks][kMaxRanks];
  uint32_t closed;  // the host sets it once: what is replayed afterwards gives up
};
constexpr size_t kHeaderBytes = 32 << 10;
static_assert(sizeof(PeerHeader) <= kHeaderBytes);

// What a kernel that gives up, or waits for long, writes to host memory. One per rank and buffer.
struct PeerRecord {
  uint32_t reason;   // 0: none; else one of the numbers below; written last
  int32_t missing;   // the rank that was waited for; -1: none
  uint32_t claimed;  // the first thread to give up sets it
  uint32_t abort;    // set by the host: every wait ends
  uint32_t site;     // the call
  uint32_t unused;
  // The last wait that was longer than a second, written again every 10 ms: the call in 32 bits,
  // the missing rank in 8, and the time in 24, in units of 10 ms.
  uint64_t wait;
};
constexpr uint32_t kTimedOut = 1, kAborted = 2, kBusy = 3, kClosed = 4;

// A peer buffer as one rank sees it. Kernels get it by value.
struct Peers {
  char* memory[kMaxRanks];  // of each rank, as this rank addresses it: the header, then the data
  uint64_t bytes;           // of each rank's data
  int32_t rank;             // this rank
  int32_t size;             // number of ranks: the world size
  PeerRecord* record;       // on GPUs; mapped host memory
  uint64_t timeout_ns;      // the limit of a wait on GPUs
  uint32_t site;            // the call, for the record
};

// How a body on the CPU learns that it has to give up, and tells whom it waits for. Atomics.
struct HostWait {
  uint32_t abort;
  int32_t missing;
};

// What jax_intranode offers to a library. Functions return null, or why they failed: a text that
// is valid until the next call in the same thread.
struct Api {
  uint32_t version;
  // The call that XLA executes, and what its rank sees. `xla` and `context` are what XLA hands to
  // the handler. The call is valid as long as its program.
  const char* (*find)(const void* xla, void* context, int32_t device, void** call, Peers* peers);
  // On the CPU: runs body(context, wait) in a thread of its own, when all ranks of this process
  // have come to the call and it is this call's turn. Then calls done(context, error) once, with
  // null if all went well. Returns at once. Null on GPUs.
  void (*run)(void* call, int32_t device, void (*body)(void* context, HostWait* wait),
              void (*done)(void* context, const char* error), void* context);
  // On GPUs: reports that a handler returns an error. This call was not launched, so no later call
  // may be: it would take what peers have sent for this one. `stream` is the handler's. Null on the
  // CPU.
  void (*failed)(void* call, int32_t device, void* stream, const char* error);
};

enum Platform : uint32_t { kCpu = 0, kCuda = 1 };

// What a library tells of itself.
struct Library {
  uint32_t version;    // comes first in every version
  uint32_t platform;   // for which it was compiled
  uint32_t ffi_major;  // the version of XLA's FFI headers that it was compiled with
  uint32_t ffi_minor;
  void (*use)(const Api* api);
  // Loads all kernels onto the current CUDA device; returns null, or why it failed. Loading may
  // wait for what runs on the GPU, so it must not happen while a peer's kernel waits. Null on CPU.
  const char* (*load)();
};

}  // namespace jax_intranode::v1
