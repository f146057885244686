// What handlers of users' libraries need on any platform: peer buffers by name, and the libraries.
//
// A program holds a reference to its buffer, from instantiate on. So a buffer that was closed keeps
// its memory until the last program that may write into it is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../jax_intranode/include/jax_intranode/peer_types.h"
#include "../text.h"
#include "members.h"
#include "site.h"

namespace jax_intranode {

// A peer buffer has the groups of a communicator. Blocks are counted apart: users' kernels have
// grids of their own.
static_assert(v1::kMaxRanks == kMaxRanks);

// A peer buffer as the devices of this process see it.
template <class Communicator>
struct PeerBuffer {
  std::string name;
  Partition partition;
  std::shared_ptr<Communicator> communicator;  // of the same groups; it knows of failures
  std::map<int64_t, v1::Peers> members;        // by device, as handlers know it
  std::shared_ptr<void> memory;
  std::atomic<bool> closed{false};
};

template <class Communicator>
using PeerBuffers = Registry<PeerBuffer<Communicator>, std::string>;

template <class Communicator>
std::shared_ptr<PeerBuffer<Communicator>> MakePeerBuffer(const std::string& name,
                                                         const Partition& partition,
                                                         const std::vector<GroupMember>& members,
                                                         uint64_t bytes, double timeout_s,
                                                         std::shared_ptr<void> memory) {
  auto buffer = std::make_shared<PeerBuffer<Communicator>>();
  buffer->name = name;
  buffer->partition = partition;
  buffer->communicator = Registry<Communicator>::Get().Find(partition);
  if (!buffer->communicator) {
    throw std::invalid_argument("jax_intranode: a peer buffer without a communicator");
  }
  for (const GroupMember& member : members) {
    buffer->communicator->members.at(member.device);  // throws if it is in none of the groups
    v1::Peers& peers = buffer->members[member.device];
    CopyAddresses(member, partition.size, peers.memory);
    peers.bytes = bytes;
    peers.rank = member.rank;
    peers.size = static_cast<int32_t>(partition.size);
    peers.record = reinterpret_cast<v1::PeerRecord*>(member.record);
    peers.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  }
  buffer->memory = std::move(memory);
  return buffer;
}

// A text that is valid until the next call in the same thread, as v1::Api asks for.
inline const char* Keep(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

// The state of a call site, which instantiate creates for execute. All devices share it; read only.
template <class Communicator>
struct PeerSite {
  std::shared_ptr<PeerBuffer<Communicator>> buffer;
  std::string text;  // health/call_sites.h

  ffi::Error Read(ffi::Dictionary all) {
    Attributes attributes(all);
    const std::string name(attributes.Get<std::string_view>("peer_buffer"));
    text = attributes.Get<std::string_view>("site");
    if (ffi::Error error = attributes.TakeError(); error.failure()) return error;
    buffer = PeerBuffers<Communicator>::Get().Find(name);
    if (buffer) return ffi::Error::Success();
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "jax_intranode: there is no peer buffer \"" + name +
            "\". jax_intranode.peer_buffer makes it; that has to come before the program is "
            "compiled or loaded, in every process, and after jax_intranode.shutdown() again.");
  }

  // What the device's rank sees; null, and why, if the call can't run.
  const v1::Peers* Find(int32_t device, std::string* why) const {
    const std::string name = "jax_intranode: the peer buffer \"" + buffer->name + "\"";
    const auto member = buffer->members.find(device);
    if (member == buffer->members.end()) {
      *why = name + " was called on device " + std::to_string(device) +
             ", which is in none of its groups. Was the buffer made for another mesh?";
    } else if (buffer->closed) {
      *why = name +
             " was closed. Make it again with jax_intranode.peer_buffer, call "
             "jax.clear_caches(), and compile the program again.";
    } else {
      return &member->second;
    }
    return nullptr;
  }
};

// The site of the call that XLA executes; null, and why, if there is none. For v1::Api::find.
template <class State>
State* PeerSiteOf(const void* xla, void* context, std::string* why) {
  ffi::DiagnosticEngine diagnostic;
  const auto site = ffi::CtxDecoding<ffi::State<State>>::Decode(
      static_cast<const XLA_FFI_Api*>(xla), static_cast<XLA_FFI_ExecutionContext*>(context),
      diagnostic);
  if (site) return *site;
  *why = "jax_intranode: " + diagnostic.Result();
  return nullptr;
}

// The name of a call, for messages. `site` begins with the name of the FFI target.
inline std::string PeerCallName(const std::string& buffer, const std::string& site) {
  return site.substr(0, site.find(' ')) + " on the peer buffer \"" + buffer + "\"";
}

// The libraries of a platform.
class PeerLibraries {
 public:
  static PeerLibraries& Get() {
    static PeerLibraries* const libraries = new PeerLibraries;
    return *libraries;
  }

  // Hands `api` to the library whose function jax_intranode_peer_library has this address. Throws
  // if it was compiled for something else. `ffi_version` is that of the running XLA: it refuses
  // handlers that were compiled with newer headers.
  void Add(uintptr_t address, v1::Platform platform, const v1::Api* api,
           std::pair<uint32_t, uint32_t> ffi_version) {
    const v1::Library* library = reinterpret_cast<const v1::Library* (*)()>(address)();
    if (library->version != v1::kVersion) {
      throw std::invalid_argument(
          Join("it was compiled with version ", library->version,
               " of jax_intranode/peer.h, and this package has version ", v1::kVersion,
               "; compile it with the headers in jax_intranode.get_include()"));
    }
    if (library->platform != platform) {
      constexpr const char* kNames[] = {"CPU devices", "GPUs"};
      throw std::invalid_argument(Join("it was compiled for ",
                                       kNames[library->platform == v1::kCuda], ", not for ",
                                       kNames[platform == v1::kCuda]));
    }
    if (ffi_version < std::pair(library->ffi_major, library->ffi_minor)) {
      throw std::invalid_argument(Join(
          "it was compiled with version ", library->ffi_major, ".", library->ffi_minor,
          " of XLA's FFI headers, but the installed jaxlib has ", ffi_version.first, ".",
          ffi_version.second, "; compile it with the headers of this jaxlib, or an older one"));
    }
    library->use(api);
    std::lock_guard lock(mutex_);
    libraries_.push_back(library);
  }

  std::vector<const v1::Library*> All() const {
    std::lock_guard lock(mutex_);
    return libraries_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<const v1::Library*> libraries_;
};

}  // namespace jax_intranode
