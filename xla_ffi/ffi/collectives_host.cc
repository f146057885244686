#include "collectives_host.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>
#include <thread>

#include "../host/call_sites.h"
#include "norm_call.h"
#include "site_numbers.h"

namespace jax_intranode {
namespace {

// How long a call polls for late peers before it returns a future. Continuing from a future costs
// tens of microseconds. A polling thread yields to others.
constexpr auto kPatience = std::chrono::microseconds(100);

// The state that instantiate creates for execute.
struct HostSite {
  static ffi::TypeId id;

  HostSite(std::shared_ptr<HostCommunicator> communicator, Algorithm algorithm, uint32_t segments,
           uint64_t description, uint64_t name, float eps, float weight_offset)
      : communicator(std::move(communicator)),
        algorithm(algorithm),
        segments(segments),
        eps(eps),
        weight_offset(weight_offset),
        description(description),
        name(name),
        number(SiteNumbers::Get().Take(description)) {}

  uint64_t identity() const { return SiteNumbers::Identity(description, number); }

  const std::shared_ptr<HostCommunicator> communicator;
  const Algorithm algorithm;
  const uint32_t segments;
  const float eps, weight_offset;  // of a norm
  const uint64_t description;
  const uint64_t name;  // for messages
  const uint32_t number;
};
ffi::TypeId HostSite::id = {};

ffi::ErrorOr<std::unique_ptr<HostSite>> InstantiateNorm(ffi::Span<const int64_t> device_ids,
                                                        int64_t group_size, int32_t algorithm,
                                                        int32_t segments, std::string_view site,
                                                        float eps, float weight_offset) {
  const Partition partition{{device_ids.begin(), device_ids.end()}, group_size};
  std::shared_ptr<HostCommunicator> communicator =
      Registry<HostCommunicator>::Get().Find(partition);
  if (!communicator) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, NoCommunicator(partition)));
  }
  ffi::Error error = CheckSegments(static_cast<Algorithm>(algorithm), segments);
  if (error.failure()) return ffi::Unexpected(std::move(error));
  error = CheckLinks(static_cast<Algorithm>(algorithm), communicator->is_cube_mesh);
  if (error.failure()) return ffi::Unexpected(std::move(error));
  const uint64_t kind = algorithm + (static_cast<uint64_t>(segments) << 32);
  // What is computed, without the name of the program, with which the text begins: ranks may give
  // one program different names.
  const std::string_view computed = site.substr(std::min(site.find(' '), site.size()));
  const uint64_t description = Fnv1a(ToString(partition), Fnv1a(computed) + kind);
  auto created =
      std::make_unique<HostSite>(std::move(communicator), static_cast<Algorithm>(algorithm),
                                 segments, description, Fnv1a(site), eps, weight_offset);
  CallSites::Get().Name(created->name, std::string(site));
  return created;
}

ffi::ErrorOr<std::unique_ptr<HostSite>> Instantiate(ffi::Span<const int64_t> device_ids,
                                                    int64_t group_size, int32_t algorithm,
                                                    int32_t segments, std::string_view site) {
  return InstantiateNorm(device_ids, group_size, algorithm, segments, site, 0, 0);
}

ffi::Future Ready(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  error.success() ? promise.SetAvailable() : promise.SetError(std::move(error));
  return future;
}

// The group of a device, and its rank in it; null if the device is in none.
const HostCommunicator::Member* MemberOf(const HostSite& site, int32_t device) {
  host_handler_calls.fetch_add(1, std::memory_order_relaxed);
  const auto it = site.communicator->members.find(device);
  return it == site.communicator->members.end() ? nullptr : &it->second;
}

ffi::Future NoMember(int32_t device) {
  return Ready(ffi::Error::Internal("jax_intranode: a collective ran on device " +
                                    std::to_string(device) + ", which is in none of its groups."));
}

// Polls for a while; then the future is what the program waits for.
ffi::Future Finish(HostGroup& group, const std::shared_ptr<Ticket>& ticket) {
  const auto start = std::chrono::steady_clock::now();
  while (!ticket->Done() && std::chrono::steady_clock::now() - start < kPatience) {
    std::this_thread::yield();
    group.Progress();
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  if (!ticket->Done()) group.KeepMoving();
  ticket->Then([promise](const std::string& error) mutable {
    error.empty() ? promise.SetAvailable() : promise.SetError(ffi::Error::Internal(error));
  });
  return future;
}

ffi::Future Execute(int32_t device, HostSite* site, ffi::RemainingArgs xs, ffi::RemainingRets ys,
                    ffi::Dictionary) {
  const HostCommunicator::Member* member = MemberOf(*site, device);
  if (member == nullptr) return NoMember(device);
  const auto& [group, rank] = *member;
  ElementType type;
  Buffers buffers;
  ffi::Error error = CollectBuffers(site->algorithm, site->segments, group->size(),
                                    group->epoch_buffer_bytes(), xs, ys, &type, &buffers);
  if (error.failure()) return Ready(std::move(error));

  return Finish(*group,
                group->Arrive(rank, site->identity(),
                              {site->algorithm, type, site->segments, site->name}, buffers));
}

// The operations of one call end in the order in which its rank arrives at them, so the last ticket
// stands for all.
ffi::Future ExecuteNorm(int32_t device, HostSite* site, ffi::RemainingArgs xs,
                        ffi::RemainingRets ys, ffi::Dictionary) {
  const HostCommunicator::Member* member = MemberOf(*site, device);
  if (member == nullptr) return NoMember(device);
  const auto& [group, rank] = *member;
  ElementType type;
  NormCall call;
  ffi::Error error = CollectNorm(site->algorithm, group->size(), site->eps, site->weight_offset, xs,
                                 ys, &type, &call);
  if (error.failure()) return Ready(std::move(error));
  std::shared_ptr<Ticket> last;
  error = ForEachNormOperation(call, type, group->size(), group->epoch_buffer_bytes(),
                               [&, &group = group, rank = rank](const NormCall& part) {
                                 last = group->Arrive(
                                     rank, site->identity(),
                                     {site->algorithm, type, site->segments, site->name}, part);
                                 return ffi::Error::Success();
                               });
  if (error.failure()) return Ready(std::move(error));
  return Finish(*group, last);
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

XLA_FFI_Error* HostNormInstantiate(XLA_FFI_CallFrame* frame) {
  RegisterStateType<HostSite>(frame->api, "jax_intranode_host_site");
  XLA_FFI_DEFINE_HANDLER(handler, InstantiateNorm,
                         ffi::Ffi::BindInstantiate()
                             .Attr<ffi::Span<const int64_t>>("device_ids")
                             .Attr<int64_t>("group_size")
                             .Attr<int32_t>("algorithm")
                             .Attr<int32_t>("segments")
                             .Attr<std::string_view>("site")
                             .Attr<float>("eps")
                             .Attr<float>("weight_offset"));
  return (*handler)(frame);
}

XLA_FFI_Error* HostNorm(XLA_FFI_CallFrame* frame) {
  XLA_FFI_DEFINE_HANDLER(handler, ExecuteNorm,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::DeviceOrdinal>()
                             .Ctx<ffi::State<HostSite>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs());
  return (*handler)(frame);
}

}  // namespace jax_intranode
