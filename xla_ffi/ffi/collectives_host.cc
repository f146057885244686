#include "collectives_host.h"

#include <string>
#include <thread>

#include "../../jax_intranode/include/jax_intranode/peer_ffi.h"
#include "../health/call_sites.h"
#include "operands.h"
#include "site.h"
#include "site_numbers.h"

namespace jax_intranode {
namespace {

struct HostSite : CollectiveSite<HostCommunicator> {
  static constexpr char kName[] = "jax_intranode_host_site";
  inline static ffi::TypeId id = {};
  uint64_t identity;  // by which ranks match their calls
  uint64_t name;      // for messages

  ffi::Error Read(ffi::Dictionary attributes) {
    if (ffi::Error error = CollectiveSite::Read(attributes); error.failure()) return error;
    const uint64_t kind =
        static_cast<uint64_t>(algorithm) + (static_cast<uint64_t>(segments) << 32);
    const uint64_t description = SiteNumbers::DescriptionOf(partition, text);
    identity = SiteNumbers::Identity(description + kind, SiteNumbers::Get().Take(description));
    name = Fnv1a(text);
    CallSites::Get().Name(name, text);
    return ffi::Error::Success();
  }
};

// Polls for a while, and yields to other threads; then the future is what the program waits for.
ffi::Future Finish(HostGroup& group, const std::shared_ptr<Ticket>& ticket) {
  const auto start = Clock::now();
  while (!ticket->Done() && Clock::now() - start < kPollsFor) {
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

// The operations of one call end in the order in which its rank arrives at them, so the last ticket
// stands for all.
ffi::Future Execute(int32_t device, HostSite* site, ffi::RemainingArgs xs, ffi::RemainingRets ys,
                    ffi::Dictionary) {
  host_handler_calls.fetch_add(1, std::memory_order_relaxed);
  const auto member = site->communicator->members.find(device);
  if (member == site->communicator->members.end()) {
    return v1::Failed(
        Internal("a collective ran on device ", device, ", which is in none of its groups."));
  }
  const auto& [group_of_rank, rank, links] = member->second;
  HostGroup& group = *group_of_rank;
  std::shared_ptr<Ticket> last;
  ffi::Error error = ForEachOperation(
      *site, group.size(), rank, group.epoch_buffer_bytes(), links, xs, ys,
      [&, rank = rank](ElementType type, const auto& call) {
        if constexpr (std::is_same_v<decltype(call), const RaggedCall&>) {
          if (call.kept != nullptr) memcpy(call.out, call.kept, call.OutBytes());
        }
        last = group.Arrive(rank, site->identity,
                            {site->algorithm, type, site->segments, site->name}, call);
        return ffi::Error::Success();
      });
  return error.failure() ? v1::Failed(std::move(error)) : Finish(group, last);
}

}  // namespace

std::atomic<uint64_t> host_handler_calls{0};

XLA_FFI_Error* HostCollectiveInstantiate(XLA_FFI_CallFrame* frame) {
  return InstantiateHandler<HostSite>(frame);
}

XLA_FFI_Error* HostCollective(XLA_FFI_CallFrame* frame) {
  static auto* const handler = BindCall<HostSite>(ffi::Ffi::Bind()).To(Execute).release();
  return handler->Call(frame);
}

}  // namespace jax_intranode
