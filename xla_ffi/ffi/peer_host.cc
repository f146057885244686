#include "peer_host.h"

#include <string>
#include <string_view>

#include "../host/call_sites.h"
#include "site_numbers.h"

namespace jax_intranode {
namespace {

// The state that instantiate creates for execute.
struct HostPeerSite {
  static ffi::TypeId id;
  std::shared_ptr<HostPeerBuffers::Buffer> buffer;
  std::string name;
  uint64_t identity;
};
ffi::TypeId HostPeerSite::id = {};

ffi::ErrorOr<std::unique_ptr<HostPeerSite>> Instantiate(ffi::Dictionary attributes) {
  const auto name = attributes.get<std::string_view>("peer_buffer");
  if (!name.has_value()) return ffi::Unexpected(name.error());
  const auto site = attributes.get<std::string_view>("site");
  if (!site.has_value()) return ffi::Unexpected(site.error());
  const std::string buffer_name(*name), text(*site);
  std::shared_ptr<HostPeerBuffers::Buffer> buffer = HostPeerBuffers::Get().Find(buffer_name);
  if (!buffer) {
    return ffi::Unexpected(
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, NoPeerBuffer(buffer_name)));
  }
  const uint64_t description = Fnv1a(text, Fnv1a(buffer_name));
  const uint64_t identity =
      SiteNumbers::Identity(description, SiteNumbers::Get().Take(description));
  CallSites::Get().Name(identity, text);
  return std::make_unique<HostPeerSite>(
      HostPeerSite{std::move(buffer), PeerCallName(buffer_name, text), identity});
}

const char* Keep(std::string error) {
  static thread_local std::string kept;
  kept = std::move(error);
  return kept.c_str();
}

const char* Find(const void* xla, void* context, int32_t device, void** call, v1::Peers* peers) {
  host_handler_calls.fetch_add(1, std::memory_order_relaxed);
  ffi::DiagnosticEngine diagnostic;
  const auto site = ffi::CtxDecoding<ffi::State<HostPeerSite>>::Decode(
      static_cast<const XLA_FFI_Api*>(xla), static_cast<XLA_FFI_ExecutionContext*>(context),
      diagnostic);
  if (!site) return Keep("jax_intranode: " + diagnostic.Result());
  const HostPeerBuffers::Buffer& buffer = *(*site)->buffer;
  if (buffer.closed) return Keep(PeerBufferClosed(buffer.name));
  const auto member = buffer.members.find(device);
  if (member == buffer.members.end()) return Keep(NotInPeerBuffer(buffer.name, device));
  *call = *site;
  *peers = member->second;
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
