// What the Python modules _host and _cuda have in common: slabs, communicators, peer buffers.
//
// `Backend` says how a platform does it: its memory (`Slab`), functions on memory of a device, the
// communicators and peer buffers, and its handlers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/members.h"
#include "ffi/operands.h"
#include "ffi/peer_buffers.h"
#include "health/platform.h"

namespace jax_intranode {

namespace nb = nanobind;

// A slab, owned by Python and by the communicators that use it.
template <class Slab>
struct Memory {
  std::shared_ptr<Slab> slab;
};

// (device, index of its group, its rank in the group, every rank's memory, address of its record)
using MemberTuples =
    std::vector<std::tuple<int64_t, int64_t, int, std::vector<uintptr_t>, uintptr_t>>;

inline std::vector<GroupMember> MembersOf(const MemberTuples& tuples) {
  std::vector<GroupMember> members;
  for (const auto& [device, group, rank, addresses, record] : tuples) {
    members.push_back({device, group, rank, addresses, record});
  }
  return members;
}

template <class Handler>
nb::capsule HandlerCapsule(Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

inline nb::bytes BytesOf(const std::string& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

template <class Backend>
void ExportMemory(nb::module_& m) {
  using Memory = Memory<typename Backend::Slab>;
  const auto without_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Memory>(m, "Memory")
      .def_prop_ro("address",
                   [](const Memory& m) { return reinterpret_cast<uintptr_t>(m.slab->address()); })
      .def_prop_ro(
          "records", [](const Memory& m) { return reinterpret_cast<uintptr_t>(m.slab->records()); },
          "Address of a page of host memory for failure records; 0 on CPU devices, whose handlers "
          "return their errors.")
      .def(
          "handle", [](const Memory& m) { return BytesOf(m.slab->Handle()); },
          "The bytes that another process needs to open this memory.")
      .def(
          "unlink", [](const Memory& m) { m.slab->Unlink(); },
          "Removes the memory's name, if it has one, after every peer has opened it.");
  m.def(
      "allocate",
      [](int device, size_t bytes, bool shared) {
        return Memory{Backend::Slab::Allocate(device, bytes, shared)};
      },
      nb::arg("device"), nb::arg("bytes"), nb::arg("shared"), without_gil,
      "Allocates zeroed memory.");
  m.def(
      "open",
      [](int device, nb::bytes handle, size_t bytes) {
        const std::string name(handle.c_str(), handle.size());
        nb::gil_scoped_release release;
        return Memory{Backend::Slab::Open(device, name, bytes)};
      },
      nb::arg("device"), nb::arg("handle"), nb::arg("bytes"), "Opens a peer's memory.");
  m.def("enable_peer_access", Backend::EnableAccess, nb::arg("device"), nb::arg("peer"),
        without_gil);
  m.def("fill", Backend::Fill, nb::arg("device"), nb::arg("address"), nb::arg("value"),
        nb::arg("bytes"), without_gil);
  m.def("write_word", Backend::WriteWord, nb::arg("device"), nb::arg("address"), nb::arg("value"),
        without_gil);
  m.def("read_word", Backend::ReadWord, nb::arg("device"), nb::arg("address"), without_gil);
  m.def(
      "read_bytes",
      [](int device, uintptr_t address, size_t bytes) {
        std::string data(bytes, 0);
        {
          nb::gil_scoped_release release;
          Backend::Copy(device, data.data(), reinterpret_cast<void*>(address), bytes);
        }
        return BytesOf(data);
      },
      nb::arg("device"), nb::arg("address"), nb::arg("bytes"));
  m.def(
      "write_bytes",
      [](int device, uintptr_t address, nb::bytes data) {
        const std::string copy(data.c_str(), data.size());
        nb::gil_scoped_release release;
        Backend::Copy(device, reinterpret_cast<void*>(address), copy.data(), copy.size());
      },
      nb::arg("device"), nb::arg("address"), nb::arg("data"));
  m.def("load_kernels", Backend::LoadAllKernels, nb::arg("device"), without_gil);
}

template <class Backend>
void ExportCommon(nb::module_& m) {
  using Memories = std::vector<Memory<typename Backend::Slab>>;
  using Ids = std::vector<int64_t>;
  const auto without_gil = nb::call_guard<nb::gil_scoped_release>();
  // The monitor and communicators live until the process ends: nothing is leaked.
  nb::set_leak_warnings(false);
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("PEER_HEADER_BYTES") = v1::kHeaderBytes;
  m.attr("RECORD_BYTES") = Backend::kRecordBytes;
  ExportMemory<Backend>(m);
  m.def(
      "create_communicator",
      [](const Ids& device_ids, int64_t group_size, const MemberTuples& members,
         size_t epoch_buffer_bytes, double timeout_s, const Memories& memory,
         const std::vector<LinksOfGroup>& links, bool permutes) {
        Backend::CreateCommunicator({device_ids, group_size, permutes}, MembersOf(members),
                                    epoch_buffer_bytes, timeout_s,
                                    std::make_shared<Memories>(memory), links);
      },
      nb::arg("device_ids"), nb::arg("group_size"), nb::arg("members"),
      nb::arg("epoch_buffer_bytes"), nb::arg("timeout_s"), nb::arg("memory"), nb::arg("links"),
      nb::arg("permutes"));
  m.def(
      "create_peer_buffer",
      [](const std::string& name, const Ids& device_ids, int64_t group_size,
         const MemberTuples& members, uint64_t bytes, double timeout_s, const Memories& memory) {
        Backend::AddPeerBuffer(MakePeerBuffer<typename Backend::Communicator>(
            name, {device_ids, group_size}, MembersOf(members), bytes, timeout_s,
            std::make_shared<Memories>(memory)));
      },
      nb::arg("name"), nb::arg("device_ids"), nb::arg("group_size"), nb::arg("members"),
      nb::arg("bytes"), nb::arg("timeout_s"), nb::arg("memory"),
      "Makes a buffer known to the handlers of libraries.");
  m.def("close_peer_buffer", Backend::ClosePeer, nb::arg("name"), without_gil,
        "Ends a buffer: programs that use it raise.");
  m.def(
      "add_peer_library",
      [](uintptr_t address, std::pair<uint32_t, uint32_t> ffi_version) {
        PeerLibraries::Get().Add(address, Backend::kPlatform, Backend::kPeerApi, ffi_version);
      },
      nb::arg("address"), nb::arg("ffi_version"),
      "Hands our functions to the library whose jax_intranode_peer_library is at this address.");
  m.def(
      "peer_instantiate", [] { return HandlerCapsule(Backend::kPeerInstantiate); },
      "The handler that instantiates calls on peer buffers.");
  m.def(
      "close",
      [] {
        Backend::CloseCommunicators();
        for (const auto& [name, _] : PeerBuffers<typename Backend::Communicator>::Get().All()) {
          Backend::ClosePeer(name);
        }
      },
      without_gil, "Ends all communicators: programs that use them raise.");
  m.def("operations", Backend::Operations, without_gil,
        "Operations that the devices of this process have executed.");
  m.def(
      "platform", [] { return nb::capsule(&Backend::ThePlatform(), kPlatformName); },
      "The communicators of this platform, for the monitor.");
  m.def(
      "handler_calls", [] { return Backend::ThePlatform().Calls(); },
      "Number of times that XLA has called a handler in this process.");
  m.def(
      "registrations",
      [] {
        nb::dict handlers, all;
        handlers["instantiate"] = HandlerCapsule(Backend::kInstantiate);
        handlers["execute"] = HandlerCapsule(Backend::kExecute);
        for (const std::string& name : CollectiveTargets()) all[name.c_str()] = handlers;
        Backend::AddHandlers(&all);
        return all;
      },
      "The FFI targets: handlers by stage, by name.");
}

}  // namespace jax_intranode
