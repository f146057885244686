// The Python module _host: slabs and groups on CPU devices, and what all platforms share: limits,
// call sites, the watch over peers.
#include <cstring>

#include "ffi/collectives_host.h"
#include "ffi/platform_host.h"
#include "ffi/site_numbers.h"
#include "health/call_sites.h"
#include "health/monitor.h"
#include "host/exit_message.h"
#include "host/segment.h"
#include "module_common.h"

namespace jax_intranode {

// module_limits.cc
void ExportLimits(nb::module_& m);

namespace {

struct HostBackend {
  using Slab = SharedMemory;
  using Communicator = HostCommunicator;
  static constexpr size_t kRecordBytes = 0;
  static constexpr v1::Platform kPlatform = v1::kCpu;
  static constexpr const v1::Api* kPeerApi = &kHostPeerApi;
  static constexpr auto* kPeerInstantiate = &HostPeerInstantiate;
  static constexpr auto* kInstantiate = &HostCollectiveInstantiate;
  static constexpr auto* kExecute = &HostCollective;

  static void EnableAccess(int, int) {}
  static void Fill(int, uintptr_t address, int value, size_t bytes) {
    memset(reinterpret_cast<void*>(address), value, bytes);
  }
  static void WriteWord(int, uintptr_t address, uint32_t value) {
    Store(reinterpret_cast<uint32_t*>(address), value);
  }
  static uint32_t ReadWord(int, uintptr_t address) {
    return Load(reinterpret_cast<uint32_t*>(address));
  }
  static void Copy(int, void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
  static void LoadAllKernels(int) {}

  static constexpr auto* CreateCommunicator = &CreateHostCommunicator;
  static constexpr auto* CloseCommunicators = &CloseHostCommunicators;
  static uint64_t Operations() { return host_operations; }
  static HostPlatform& ThePlatform() { return HostPlatform::Get(); }
  static void AddPeerBuffer(std::shared_ptr<PeerBuffer<HostCommunicator>> buffer) {
    HostPeerBuffers::Get().Add(buffer->name, buffer);
  }
  static void ClosePeer(const std::string& name) {
    if (const auto buffer = HostPeerBuffers::Get().Remove(name)) buffer->closed = true;
  }
  static void AddHandlers(nb::dict*) {}
};

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
    all.append(nb::make_tuple(s.process, s.pid, kStates[static_cast<int>(s.state)], s.ended, s.what,
                              s.in_barrier));
  }
  return all;
}

}  // namespace

NB_MODULE(_host, m) {
  m.doc() = "Slabs and groups of jax_intranode on the CPU.";
  ExportLimits(m);
  ExportCommon<HostBackend>(m);
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
      .def("go_on", &PeerWatch::GoOn, nb::call_guard<nb::gil_scoped_release>(),
           "Tells the peers that this process runs after all.")
      .def("fail", &PeerWatch::Fail, nb::arg("text"), nb::call_guard<nb::gil_scoped_release>(),
           "Tells the peers that this process ends because of a failure.")
      .def("set_in_barrier", &PeerWatch::SetInBarrier, nb::arg("is_in_barrier"),
           nb::call_guard<nb::gil_scoped_release>(),
           "Tells the peers that this process waits in JAX's last barrier, or no more.")
      .def("close", &PeerWatch::Close, nb::call_guard<nb::gil_scoped_release>(),
           "Says goodbye and ends the watch.")
      .def("peers", &PeersOf,
           "One entry for each peer: (process, pid, state, whether it has ended, why, whether it "
           "waits in JAX's last barrier).");
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
  m.def(
      "lower_site",
      [](const std::string& site, const std::vector<int64_t>& device_ids, int64_t group_size) {
        SiteNumbers::Get().Lower(SiteNumbers::DescriptionOf({device_ids, group_size}, site));
      },
      nb::arg("site"), nb::arg("device_ids"), nb::arg("group_size"),
      "To be called when a thread lowers a collective of CPU devices, in that thread.");
  m.def(
      "lower_peer_site",
      [](const std::string& site, const std::string& buffer) {
        SiteNumbers::Get().Lower(SiteNumbers::DescriptionOf(buffer, site));
      },
      nb::arg("site"), nb::arg("buffer"), "The same for a call on a peer buffer.");
  m.def(
      "end_compilation", [] { SiteNumbers::Get().EndCompilation(); },
      "To be called whenever a thread has compiled a program, in that thread.");
}

}  // namespace jax_intranode
