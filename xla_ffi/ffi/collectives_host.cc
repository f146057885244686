#include "collectives_host.h"

#include <chrono>
#include <string>
#include <string_view>
#include <thread>

#include "../host/call_sites.h"

namespace jax_intranode {
namespace {

// How long a call polls for late peers before it returns a future. Continuing from a future costs
// tens of microseconds. A polling thread yields to others.
constexpr auto kPatience = std::chrono::microseconds(100);

uint64_t Fnv1a(std::string_view text, uint64_t hash = 0xCBF29CE484222325u) {
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001B3u;
  return hash;
}

// Numbers the call sites with the same description in the HLO, in the order of their instantiation
// since the last compilation ended.
//
// One lowered function can appear twice in a program, so a site's identity needs a number in
// addition to its description. All processes must give a site the same number. They do, because a
// program is instantiated in the same order everywhere. The count starts anew for each program, so
// that it depends neither on what else a process has compiled nor on when executables are freed.
// Sites of different programs may share an identity, because a device runs one program after the
// other. Programs must be compiled one at a time.
class SiteNumbers {
 public:
  static SiteNumbers& Get() {
    static SiteNumbers* const numbers = new SiteNumbers;
    return *numbers;
  }
  uint32_t Take(uint64_t description) {
    std::lock_guard lock(mutex_);
    return taken_[description]++;
  }
  void Restart() {
    std::lock_guard lock(mutex_);
    taken_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, uint32_t> taken_;
};

// The state that instantiate creates for execute.
struct HostSite {
  static ffi::TypeId id;

  HostSite(std::shared_ptr<HostCommunicator> communicator, Algorithm algorithm, uint32_t segments,
           uint64_t description)
      : communicator(std::move(communicator)),
        algorithm(algorithm),
        segments(segments),
        description(description),
        number(SiteNumbers::Get().Take(description)) {}

  // A hash of the description and the number: unique within the program.
  uint64_t identity() const {
    return Fnv1a(std::string_view(reinterpret_cast<const char*>(&number), sizeof(number)),
                 description);
  }

  const std::shared_ptr<HostCommunicator> communicator;
  const Algorithm algorithm;
  const uint32_t segments;
  const uint64_t description;
  const uint32_t number;
};
ffi::TypeId HostSite::id = {};

ffi::ErrorOr<std::unique_ptr<HostSite>> Instantiate(ffi::Span<const int64_t> device_ids,
                                                    int64_t group_size, int32_t algorithm,
                                                    int32_t segments, std::string_view site) {
  const Partition partition{{device_ids.begin(), device_ids.end()}, group_size};
  std::shared_ptr<HostCommunicator> communicator =
      Registry<HostCommunicator>::Get().Find(partition);
  if (!communicator) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, NoCommunicator(partition)));
  }
  ffi::Error error = CheckSegments(static_cast<Algorithm>(algorithm), segments);
  if (error.failure()) return ffi::Unexpected(std::move(error));
  const uint64_t kind = algorithm + (static_cast<uint64_t>(segments) << 32);
  const uint64_t description = Fnv1a(ToString(partition), Fnv1a(site) + kind);
  auto created = std::make_unique<HostSite>(
      std::move(communicator), static_cast<Algorithm>(algorithm), segments, description);
  CallSites::Get().Name(created->identity(), std::string(site));
  return created;
}

ffi::Future Ready(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  error.success() ? promise.SetAvailable() : promise.SetError(std::move(error));
  return future;
}

ffi::Future Execute(int32_t device, HostSite* site, ffi::RemainingArgs xs, ffi::RemainingRets ys,
                    ffi::Dictionary) {
  host_handler_calls.fetch_add(1, std::memory_order_relaxed);
  auto it = site->communicator->members.find(device);
  if (it == site->communicator->members.end()) {
    return Ready(ffi::Error::Internal("jax_intranode: a collective ran on device " +
                                      std::to_string(device) +
                                      ", which is in none of its groups."));
  }
  const auto& [group, rank] = it->second;
  ElementType type;
  Buffers buffers;
  ffi::Error error = CollectBuffers(site->algorithm, site->segments, group->size(),
                                    group->epoch_buffer_bytes(), xs, ys, &type, &buffers);
  if (error.failure()) return Ready(std::move(error));

  std::shared_ptr<Ticket> ticket =
      group->Arrive(rank, site->identity(), {site->algorithm, type, site->segments}, buffers);
  const auto start = std::chrono::steady_clock::now();
  while (!ticket->Done() && std::chrono::steady_clock::now() - start < kPatience) {
    std::this_thread::yield();
    group->Progress();
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  if (!ticket->Done()) group->KeepMoving();
  ticket->Then([promise](const std::string& error) mutable {
    error.empty() ? promise.SetAvailable() : promise.SetError(ffi::Error::Internal(error));
  });
  return future;
}

}  // namespace

std::atomic<uint64_t> host_handler_calls{0};

void EndCompilation() { SiteNumbers::Get().Restart(); }

XLA_FFI_Error* HostCollectiveInstantiate(XLA_FFI_CallFrame* frame) {
  RegisterStateType<HostSite>(frame->api, "jax_intranode_host_site");
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate,
                         ffi::Ffi::BindInstantiate()
                             .Attr<ffi::Span<const int64_t>>("device_ids")
                             .Attr<int64_t>("group_size")
                             .Attr<int32_t>("algorithm")
                             .Attr<int32_t>("segments")
                             .Attr<std::string_view>("site"));
  return (*handler)(frame);
}

XLA_FFI_Error* HostCollective(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, Execute,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::State<HostSite>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs());
  return (*handler)(frame);
}

}  // namespace jax_intranode
