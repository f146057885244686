#include "peer_host.h"

#include <string>
#include <string_view>

#include "../health/call_sites.h"
#include "collectives_host.h"
#include "site_numbers.h"

namespace jax_intranode {
namespace {

struct HostPeerSite : PeerSite<HostCommunicator> {
  static ffi::TypeId id;
  std::string name;
  uint64_t identity;
};
ffi::TypeId HostPeerSite::id = {};

ffi::ErrorOr<std::unique_ptr<HostPeerSite>> Instantiate(ffi::Dictionary attributes) {
  auto site = std::make_unique<HostPeerSite>();
  if (ffi::Error error = site->Read(attributes); error.failure()) {
    return ffi::Unexpected(std::move(error));
  }
  const uint64_t description = SiteNumbers::DescriptionOf(site->buffer->name, site->text);
  site->identity = SiteNumbers::Identity(description, SiteNumbers::Get().Take(description));
  site->name = PeerCallName(site->buffer->name, site->text);
  CallSites::Get().Name(site->identity, site->text);
  return {std::move(site)};
}

const char* Find(const void* xla, void* context, int32_t device, void** call, v1::Peers* peers) {
  host_handler_calls.fetch_add(1, std::memory_order_relaxed);
  std::string why;
  auto* const site = PeerSiteOf<HostPeerSite>(xla, context, &why);
  const v1::Peers* const found = site == nullptr ? nullptr : site->Find(device, &why);
  if (found == nullptr) return Keep(std::move(why));
  *call = site;
  *peers = *found;
  return nullptr;
}

void Run(void* call, int32_t device, void (*body)(void*, v1::HostWait*),
         void (*done)(void*, const char*), void* context) {
  const auto* site = static_cast<HostPeerSite*>(call);
  const auto& [group, rank] = site->buffer->communicator->members.at(device);
  // The body keeps the memory, should the program go while it runs.
  auto run = [body, context, memory = site->buffer](v1::HostWait* wait) { body(context, wait); };
  const std::shared_ptr<Ticket> ticket =
      group->Arrive(rank, site->identity, std::make_shared<HostBody>(site->name, std::move(run)));
  if (!ticket->Done()) group->KeepMoving();
  ticket->Then([done, context](const std::string& error) {
    done(context, error.empty() ? nullptr : error.c_str());
  });
}

}  // namespace

const v1::Api kHostPeerApi = {v1::kVersion, &Find, &Run, nullptr};

XLA_FFI_Error* HostPeerInstantiate(XLA_FFI_CallFrame* frame) {
  RegisterStateType<HostPeerSite>(frame->api, "jax_intranode_host_peer_site");
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
  return (*handler)(frame);
}

}  // namespace jax_intranode
