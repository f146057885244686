// The Python module _host: slabs and groups on the CPU. It offers the same functions as _cuda.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>

#include "ffi/collectives_host.h"
#include "ffi/norm_call.h"
#include "ffi/peer_host.h"
#include "ffi/site_numbers.h"
#include "health/monitor.h"
#include "host/call_sites.h"
#include "host/cube_mesh.h"
#include "host/exit_message.h"
#include "host/segment.h"
#include "kernels/memory.h"
#include "module_limits.h"

namespace nb = nanobind;

namespace jax_intranode {
namespace {

// A slab, owned by Python and by the communicators that use it.
struct HostMemory {
  std::shared_ptr<Segment> segment;
};

// The groups of this process, for the monitor.
class HostPlatform final : public Platform {
 public:
  static HostPlatform& Get() {
    static HostPlatform* const platform = new HostPlatform;
    return *platform;
  }

  // A communicator that is new.
  void Add(const Partition& partition, std::shared_ptr<HostCommunicator> communicator) {
    std::lock_guard lock(mutex_);
    for (const auto& [device, member] : communicator->members) member.group->SetAbsent(absent_);
    Registry<HostCommunicator>::Get().Add(partition, std::move(communicator));
  }

  bool OnGpu() const override { return false; }

  void SetAbsent(const AbsentDevices& absent) override {
    std::lock_guard lock(mutex_);
    absent_ = absent;
    for (const auto& [group, name] : Groups()) group->SetAbsent(absent);
  }
  std::vector<Wait> Look(Clock::time_point now, Clock::duration stopped) override {
    std::vector<Wait> waits;
    for (const auto& [group, name] : Groups()) {
      const size_t first = waits.size();
      group->Look(now, stopped, &waits);
      for (size_t i = first; i < waits.size(); ++i) waits[i].group = name;
    }
    return waits;
  }
  bool HasCalled(const Wait& wait, uint64_t site, uint64_t count) override {
    return GroupOf(wait)->HasCalled(wait.rank, site, count);
  }
  void GiveUp(const Wait& wait, Failure failure) override {
    std::const_pointer_cast<HostGroup>(GroupOf(wait))->GiveUp(wait, std::move(failure));
  }
  std::vector<Failure> TakeFailures() override {
    std::vector<Failure> failures;
    for (const auto& [group, name] : Groups()) {
      for (Failure& failure : group->TakeFailures()) failures.push_back(std::move(failure));
    }
    return failures;
  }
  uint64_t Calls() override { return host_handler_calls.load(); }
  void FailAll(const std::string& message) override {
    for (const auto& [group, name] : Groups()) group->Fail(message);
  }

 private:
  static std::shared_ptr<const HostGroup> GroupOf(const Wait& wait) {
    return std::static_pointer_cast<const HostGroup>(wait.owner);
  }
  // All groups, with the names of their partitions.
  static std::map<std::shared_ptr<HostGroup>, uint64_t> Groups() {
    std::map<std::shared_ptr<HostGroup>, uint64_t> groups;
    for (const auto& [partition, communicator] : Registry<HostCommunicator>::Get().Alive()) {
      for (const auto& [device, member] : communicator->members) {
        groups[member.group] = Fnv1a(ToString(partition));
      }
    }
    return groups;
  }

  std::mutex mutex_;
  AbsentDevices absent_;
};

// (device, index of its group, its rank in the group, every rank's region, unused)
using Member = std::tuple<int64_t, int64_t, int, std::vector<uintptr_t>, uintptr_t>;

void CreateCommunicator(const std::vector<int64_t>& device_ids, int64_t group_size,
                        const std::vector<Member>& members, size_t epoch_buffer_bytes,
                        double timeout_s, const std::vector<HostMemory>& memory,
                        const std::vector<LinksOfGroup>& links) {
  const auto keep_alive = std::make_shared<std::vector<HostMemory>>(memory);
  std::map<int64_t, std::vector<int>> local_ranks;
  for (const auto& [device, group, rank, regions, unused] : members)
    local_ranks[group].push_back(rank);
  auto communicator = std::make_shared<HostCommunicator>();
  communicator->is_cube_mesh = !links.empty();
  std::map<int64_t, std::shared_ptr<HostGroup>> groups;
  for (const auto& [device, group_number, rank, regions, unused] : members) {
    if (group_size > kMaxRanks || regions.size() != static_cast<size_t>(group_size)) {
      throw std::invalid_argument("jax_intranode: a group of " + std::to_string(group_size) +
                                  " ranks with " + std::to_string(regions.size()) + " regions");
    }
    auto& group = groups[group_number];
    if (!group) {
      Group layout{};
      for (int64_t r = 0; r < group_size; ++r)
        layout.region[r] = reinterpret_cast<char*>(regions[r]);
      layout.epoch_buffer_bytes = epoch_buffer_bytes;
      layout.size = static_cast<int>(group_size);
      std::vector<int>& ranks = local_ranks[group_number];
      std::sort(ranks.begin(), ranks.end());
      const auto first = device_ids.begin() + group_number * group_size;
      const std::vector<Links> of_group = LinksOf(links, group_number, group_size);
      group = std::make_shared<HostGroup>(
          layout, ranks, std::vector<int64_t>(first, first + group_size),
          std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9)), keep_alive, of_group);
    }
    communicator->members[device] = {group, rank};
  }
  HostPlatform::Get().Add({device_ids, group_size}, std::move(communicator));
}

void CreatePeerBuffer(const std::string& name, const std::vector<int64_t>& device_ids,
                      int64_t group_size, const std::vector<PeerMember>& members, uint64_t bytes,
                      double timeout_s, const std::vector<HostMemory>& memory) {
  HostPeerBuffers::Get().Add(
      MakePeerBuffer<HostCommunicator>(name, device_ids, group_size, members, bytes, timeout_s,
                                       std::make_shared<std::vector<HostMemory>>(memory)));
}

// Guards the count: an operation counts either for its communicator or as past.
std::mutex operations_mutex;
uint64_t past_operations = 0;  // of closed communicators

uint64_t OperationsNow() {
  uint64_t total = 0;
  for (const auto& [partition, communicator] : Registry<HostCommunicator>::Get().All()) {
    std::set<HostGroup*> groups;
    for (const auto& [device, member] : communicator->members) groups.insert(member.group.get());
    for (HostGroup* group : groups) total += group->operations();
  }
  return total;
}

// Operations that the devices of this process have executed.
uint64_t Operations() {
  std::lock_guard lock(operations_mutex);
  return past_operations + OperationsNow();
}

void Close() {
  std::lock_guard lock(operations_mutex);
  for (const auto& [partition, communicator] : Registry<HostCommunicator>::Get().All()) {
    for (const auto& [device, member] : communicator->members) member.group->Fail(kShutDown);
  }
  past_operations += OperationsNow();
  Registry<HostCommunicator>::Get().Clear();
  for (const std::string& name : HostPeerBuffers::Get().Names())
    HostPeerBuffers::Get().Remove(name);
}

// As fields of Python's Failure, by name.
nb::list TakeFailures() {
  std::vector<Failure> failures;
  {
    nb::gil_scoped_release release;
    failures = Monitor::Get().TakeFailures();
  }
  nb::list all;
  for (const Failure& failure : failures) {
    nb::dict fields;
    fields["message"] = failure.message;
    fields["reason"] = static_cast<uint32_t>(failure.reason);
    fields["platform"] = failure.on_gpu ? "gpu" : "cpu";
    fields["operation"] = failure.operation;
    fields["nbytes"] = failure.bytes;
    fields["site"] = failure.site;
    fields["shared"] = failure.shared;
    fields["calls"] = failure.calls;
    fields["rank"] = failure.rank;
    fields["missing_rank"] = failure.missing;
    fields["missing_process"] = failure.process;
    fields["device_ids"] = nb::cast(failure.device_ids);
    all.append(fields);
  }
  return all;
}

nb::list TakeWarnings() {
  nb::list all;
  for (const Monitor::Warning& warning : Monitor::Get().TakeWarnings()) {
    all.append(nb::make_tuple(warning.is_wait, warning.text));
  }
  return all;
}

// (process, address, its device ids)
using Address = std::tuple<int, std::string, std::vector<int64_t>>;

void ConnectPeers(PeerWatch& watch, const std::vector<Address>& peers, nb::bytes secret,
                  double timeout_s) {
  std::vector<PeerAddress> all;
  for (const auto& [process, address, ids] : peers) all.push_back({process, address, ids});
  const std::string key(secret.c_str(), secret.size());
  nb::gil_scoped_release release;
  watch.Connect(all, key, timeout_s);
}

nb::list PeersOf(const PeerWatch& watch) {
  std::vector<PeerWatch::Status> peers;
  {
    nb::gil_scoped_release release;
    peers = watch.Peers();
  }
  nb::list all;
  for (const PeerWatch::Status& s : peers) {
    constexpr const char* kStates[] = {"unheard", "running", "silent", "finished",
                                       "left",    "failed",  "lost"};
    all.append(
        nb::make_tuple(s.process, s.pid, kStates[static_cast<int>(s.state)], s.ended, s.what));
  }
  return all;
}

nb::dict Registrations() {
  nb::dict handlers, all;
  handlers["instantiate"] = nb::capsule(reinterpret_cast<void*>(HostCollectiveInstantiate));
  handlers["execute"] = nb::capsule(reinterpret_cast<void*>(HostCollective));
  for (const std::string& name : CollectiveTargets()) all[name.c_str()] = handlers;
  nb::dict of_norms;
  of_norms["instantiate"] = nb::capsule(reinterpret_cast<void*>(HostNormInstantiate));
  of_norms["execute"] = nb::capsule(reinterpret_cast<void*>(HostNorm));
  for (const std::string& name : NormTargets()) all[name.c_str()] = of_norms;
  return all;
}

}  // namespace

NB_MODULE(_host, m) {
  m.doc() = "Slabs and groups of jax_intranode on the CPU.";
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("RECORD_BYTES") = 0;
  ExportLimits(m);

  nb::class_<HostMemory>(m, "Memory")
      .def_prop_ro(
          "records", [](const HostMemory&) { return uintptr_t{0}; },
          "Unused: handlers on the CPU return their errors.")
      .def_prop_ro(
          "address",
          [](const HostMemory& m) { return reinterpret_cast<uintptr_t>(m.segment->address()); })
      .def(
          "handle",
          [](const HostMemory& m) {
            return nb::bytes(m.segment->name().data(), m.segment->name().size());
          },
          "The bytes that another process needs to open this memory.")
      .def(
          "unlink", [](const HostMemory& m) { m.segment->Unlink(); },
          "Removes the name, after every peer has opened the memory.");
  m.def(
      "allocate",
      [](int, size_t bytes, bool shared) {
        return HostMemory{shared ? Segment::Create(bytes) : Segment::Private(bytes)};
      },
      nb::arg("device"), nb::arg("bytes"), nb::arg("shared"), "Allocates zeroed memory.");
  m.def(
      "open",
      [](int, nb::bytes handle, size_t bytes) {
        return HostMemory{Segment::Open(std::string(handle.c_str(), handle.size()), bytes)};
      },
      nb::arg("device"), nb::arg("handle"), nb::arg("bytes"), "Opens a peer's memory.");
  m.def("enable_peer_access", [](int, int) {}, nb::arg("device"), nb::arg("peer"));
  m.def(
      "fill",
      [](int, uintptr_t address, int value, size_t bytes) {
        memset(reinterpret_cast<void*>(address), value, bytes);
      },
      nb::arg("device"), nb::arg("address"), nb::arg("value"), nb::arg("bytes"));
  m.def(
      "write_word",
      [](int, uintptr_t address, uint32_t value) {
        StoreWord(reinterpret_cast<uint32_t*>(address), value);
      },
      nb::arg("device"), nb::arg("address"), nb::arg("value"));
  m.def(
      "read_word",
      [](int, uintptr_t address) { return LoadWord(reinterpret_cast<uint32_t*>(address)); },
      nb::arg("device"), nb::arg("address"));
  m.def(
      "read_bytes",
      [](int, uintptr_t address, size_t bytes) {
        return nb::bytes(reinterpret_cast<const char*>(address), bytes);
      },
      nb::arg("device"), nb::arg("address"), nb::arg("bytes"));
  m.def(
      "write_bytes",
      [](int, uintptr_t address, nb::bytes data) {
        memcpy(reinterpret_cast<void*>(address), data.c_str(), data.size());
      },
      nb::arg("device"), nb::arg("address"), nb::arg("data"));
  m.def("load_kernels", [](int) {}, nb::arg("device"));
  m.def("create_communicator", &CreateCommunicator, nb::arg("device_ids"), nb::arg("group_size"),
        nb::arg("members"), nb::arg("epoch_buffer_bytes"), nb::arg("timeout_s"), nb::arg("memory"),
        nb::arg("links"));
  m.attr("PEER_HEADER_BYTES") = v1::kHeaderBytes;
  m.def("create_peer_buffer", &CreatePeerBuffer, nb::arg("name"), nb::arg("device_ids"),
        nb::arg("group_size"), nb::arg("members"), nb::arg("bytes"), nb::arg("timeout_s"),
        nb::arg("memory"), "Makes a buffer known to the handlers of libraries.");
  m.def(
      "close_peer_buffer", [](const std::string& name) { HostPeerBuffers::Get().Remove(name); },
      nb::arg("name"), "Ends a buffer: programs that use it raise.");
  m.def(
      "add_peer_library",
      [](uintptr_t address, std::pair<uint32_t, uint32_t> ffi_version) {
        PeerLibraries::Get().Add(address, v1::kCpu, &kHostPeerApi, ffi_version);
      },
      nb::arg("address"), nb::arg("ffi_version"),
      "Hands our functions to the library whose jax_intranode_peer_library is at this address.");
  m.def(
      "peer_instantiate", [] { return nb::capsule(reinterpret_cast<void*>(HostPeerInstantiate)); },
      "The handler that instantiates calls on peer buffers.");
  m.def("close", &Close, nb::call_guard<nb::gil_scoped_release>(),
        "Ends all communicators: programs that use them raise.");
  m.def("operations", &Operations, nb::call_guard<nb::gil_scoped_release>(),
        "Operations that the devices of this process have executed.");
  m.def(
      "describe_site",
      [](const std::string& site, const std::string& operation, uint64_t bytes,
         const std::string& label) { CallSites::Get().Describe(site, operation, bytes, label); },
      nb::arg("site"), nb::arg("operation"), nb::arg("nbytes"), nb::arg("label"),
      "What messages say of a call site.");
  m.def("set_exit_message", &SetExitMessage, nb::arg("message"), nb::arg("always"),
        "What the process prints last if it fails, or always; empty for nothing.");
  m.def("begin_exit", &BeginExit,
        "From now on a thread that comes back from C++ too late does not abort the process.");
  m.def("print_exit_message", &PrintExitMessage,
        "Prints the exit message now, before os._exit, and not again.");

  nb::class_<PeerWatch>(m, "PeerWatch")
      .def(nb::init<int>(), nb::arg("process"),
           "The watch of this process over its peers on this host (health/monitor.h).")
      .def_prop_ro("address", &PeerWatch::address)
      .def("connect", &ConnectPeers, nb::arg("peers"), nb::arg("secret"), nb::arg("timeout_s"),
           "Connects with all peers, given as (process, address, device ids).")
      .def(
          "arm",
          [](PeerWatch& watch, nb::capsule capsule, double silent_s) {
            auto* const platform = static_cast<Platform*>(capsule.data(kPlatformName));
            nb::gil_scoped_release release;
            watch.Arm(platform, silent_s);
          },
          nb::arg("platform"), nb::arg("silent_s"), "Begins to watch.")
      .def("finish", &PeerWatch::Finish, nb::call_guard<nb::gil_scoped_release>(),
           "Tells the peers that the program has come to its end, and that nothing of it runs.")
      .def("fail", &PeerWatch::Fail, nb::arg("text"), nb::call_guard<nb::gil_scoped_release>(),
           "Tells the peers that this process ends because of a failure.")
      .def("set_in_barrier", &PeerWatch::SetInBarrier, nb::arg("is_in_barrier"),
           nb::call_guard<nb::gil_scoped_release>(),
           "Tells the peers that this process waits in JAX's last barrier, or no more.")
      .def("close", &PeerWatch::Close, nb::call_guard<nb::gil_scoped_release>(),
           "Says goodbye and ends the watch.")
      .def("peers", &PeersOf,
           "One entry for each peer: (process, pid, state, whether it has ended, why).");
  m.def(
      "platform", [] { return nb::capsule(&HostPlatform::Get(), kPlatformName); },
      "The communicators of this platform, for the monitor.");
  m.def(
      "monitor",
      [](nb::capsule capsule, double patience_s) {
        auto* const platform = static_cast<Platform*>(capsule.data(kPlatformName));
        nb::gil_scoped_release release;
        Monitor::Get().Add(platform, patience_s);
      },
      nb::arg("platform"), nb::arg("patience_s"),
      "Watches the calls of a platform; a wait is reported after `patience_s`.");
  m.def("take_failures", &TakeFailures, "The failures that have not been taken yet.");
  m.def("take_warnings", &TakeWarnings,
        "What has not been taken yet: (whether it tells of a wait, text).");
  m.def(
      "await_news", [](double timeout_s) { Monitor::Get().AwaitNews(timeout_s); },
      nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>(),
      "Waits until there may be something to take.");
  m.def(
      "end_news", [] { Monitor::Get().EndNews(); }, nb::call_guard<nb::gil_scoped_release>(),
      "Ends all calls of await_news, now and later.");
  m.def("end_compilation", &EndCompilation, "To be called whenever a program has been compiled.");
  m.def(
      "handler_calls", [] { return host_handler_calls.load(); },
      "Number of times that XLA has called a handler in this process.");
  m.def("registrations", &Registrations, "The FFI targets: handlers by stage, by name.");
}

}  // namespace jax_intranode
