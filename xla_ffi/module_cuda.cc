// The Python module _cuda: slabs and groups on GPUs. It offers the same functions as _host.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "cuda/fused_matmul.h"
#include "cuda/graph_timing.h"
#include "cuda/norms.h"
#include "cuda/pipelined_matmul.h"
#include "cuda/slab.h"
#include "ffi/collective_matmul_cuda.h"
#include "ffi/collectives_cuda.h"
#include "ffi/norm_call.h"
#include "ffi/peer_cuda.h"
#include "ffi/platform_cuda.h"
#include "host/call_sites.h"
#include "host/cube_mesh.h"
#include "kernels/same_operation.h"

namespace nb = nanobind;

namespace jax_intranode {
namespace {

// A slab, owned by Python and by the communicators that use it.
struct DeviceMemory {
  std::shared_ptr<Slab> slab;
};

// (CUDA device ordinal, index of its group, its rank in the group, every rank's region, address of
// its failure record)
using Member = std::tuple<int64_t, int64_t, int, std::vector<uintptr_t>, uintptr_t>;

void CreateCommunicator(const std::vector<int64_t>& device_ids, int64_t group_size,
                        const std::vector<Member>& members, size_t epoch_buffer_bytes,
                        double timeout_s, const std::vector<DeviceMemory>& memory,
                        const std::vector<LinksOfGroup>& links) {
  auto communicator = std::make_shared<DeviceCommunicator>();
  communicator->is_cube_mesh = !links.empty();
  communicator->memory = std::make_shared<std::vector<DeviceMemory>>(memory);
  for (const auto& [device, group_number, rank, regions, record] : members) {
    if (group_size > kMaxRanks || regions.size() != static_cast<size_t>(group_size)) {
      throw std::invalid_argument("jax_intranode: a group of " + std::to_string(group_size) +
                                  " ranks with " + std::to_string(regions.size()) + " regions");
    }
    DeviceGroup group{};
    for (int64_t r = 0; r < group_size; ++r) group.region[r] = reinterpret_cast<char*>(regions[r]);
    group.epoch_buffer_bytes = epoch_buffer_bytes;
    group.rank = rank;
    group.size = static_cast<int>(group_size);
    const std::vector<Links> of_group = LinksOf(links, group_number, group_size);
    if (!of_group.empty()) group.links = of_group.at(rank);
    for (int64_t r = 0; r < group_size; ++r) {
      if (r != rank && !group.IsLinkedTo(static_cast<int>(r))) group.region[r] = nullptr;
    }
    group.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
    group.failure = new (reinterpret_cast<void*>(record)) FailureRecord{};
    if (communicator->members.size() <= static_cast<size_t>(device)) {
      communicator->members.resize(device + 1);
    }
    communicator->members[device] = group;
    communicator->groups.resize(communicator->members.size());
    const auto first = device_ids.begin() + group_number * group_size;
    communicator->groups[device].assign(first, first + group_size);
  }
  CudaPlatform::Get().AddNew([&] {
    Registry<DeviceCommunicator>::Get().Add({device_ids, group_size}, std::move(communicator));
  });
}

// (CUDA device ordinal, every rank's ring buffer)
using Rings = std::tuple<int64_t, std::vector<uintptr_t>>;

// Gives a communicator the ring buffers for collective matmuls, before any program uses it.
void AddRings(const std::vector<int64_t>& device_ids, int64_t group_size,
              const std::vector<Rings>& all, size_t ring_bytes) {
  const auto communicator = Registry<DeviceCommunicator>::Get().Find({device_ids, group_size});
  if (!communicator) throw std::invalid_argument("jax_intranode: rings without a communicator");
  communicator->matmul_members.resize(communicator->members.size());
  for (const auto& [device, rings] : all) {
    const DeviceGroup& group = communicator->members.at(device).value();
    MatmulMember member{static_cast<int>(device), group, {}, ring_bytes};
    for (int64_t r = 0; r < group_size; ++r) member.ring[r] = reinterpret_cast<char*>(rings.at(r));
    CreateSideStreams(member.device);
    communicator->matmul_members[device] = member;
  }
}

void CreatePeerBuffer(const std::string& name, const std::vector<int64_t>& device_ids,
                      int64_t group_size, const std::vector<PeerMember>& members, uint64_t bytes,
                      double timeout_s, const std::vector<DeviceMemory>& memory) {
  static_assert(sizeof(v1::PeerRecord) <= kRecordsBytes);
  auto buffer =
      MakePeerBuffer<DeviceCommunicator>(name, device_ids, group_size, members, bytes, timeout_s,
                                         std::make_shared<std::vector<DeviceMemory>>(memory));
  for (const auto& [device, peers] : buffer->members) new (peers.record) v1::PeerRecord{};
  CudaPlatform::Get().AddNew([&] { DevicePeerBuffers::Get().Add(std::move(buffer)); });
}

// Waits until nothing runs on the devices of this process.
void Synchronize() {
  std::set<int> devices;
  for (const auto& [partition, communicator] : Registry<DeviceCommunicator>::Get().Alive()) {
    for (size_t device = 0; device < communicator->members.size(); ++device) {
      if (communicator->members[device]) devices.insert(static_cast<int>(device));
    }
  }
  for (const int device : devices) {
    const CurrentDevice current(device);
    ThrowIfError(cudaDeviceSynchronize(), "waiting for a device");
  }
}

RegionHeader* HeaderOf(const DeviceGroup& group) {
  return reinterpret_cast<RegionHeader*>(group.region[group.rank]);
}

// Guards the count: an operation counts either for its communicator or as past.
std::mutex operations_mutex;
uint64_t past_operations = 0;  // of closed communicators

// The number of operations of a communicator on one device. The count has 32 bits: the sum is right
// if it is read at least once in 2^32 operations.
uint64_t OperationsNow(DeviceCommunicator& communicator, size_t device) {
  auto& [last, count] = communicator.counted[device];
  char* const word = reinterpret_cast<char*>(&HeaderOf(*communicator.members[device])->operations);
  const uint32_t now = ReadWord(static_cast<int>(device), word);
  count += static_cast<uint32_t>(now - last);
  last = now;
  return count;
}

// Operations that the devices of this process have executed, replayed ones included.
uint64_t Operations() {
  std::lock_guard lock(operations_mutex);
  uint64_t total = past_operations;
  for (const auto& [partition, communicator] : Registry<DeviceCommunicator>::Get().All()) {
    for (size_t device = 0; device < communicator->members.size(); ++device) {
      if (communicator->members[device]) total += OperationsNow(*communicator, device);
    }
  }
  return total;
}

// Ends all communicators. A graph that is replayed afterwards calls no handler, but its kernels
// find the region closed.
void Close() {
  std::lock_guard lock(operations_mutex);
  const auto communicators = Registry<DeviceCommunicator>::Get().All();
  for (const auto& [partition, communicator] : communicators) communicator->closed = true;
  for (const auto& [partition, communicator] : communicators) {
    for (size_t number = 0; number < communicator->members.size(); ++number) {
      if (!communicator->members[number]) continue;
      const int device = static_cast<int>(number);
      try {
        const CurrentDevice current(device);
        ThrowIfError(cudaDeviceSynchronize(), "waiting for a device");
        WriteWord(device,
                  reinterpret_cast<char*>(&HeaderOf(*communicator->members[number])->closed), 1);
        OperationsNow(*communicator, number);
      } catch (const std::runtime_error&) {
        // The CUDA context is lost, and nothing runs in it any more.
      }
      past_operations += communicator->counted[number].second;
    }
  }
  Registry<DeviceCommunicator>::Get().Clear();
  for (const std::string& name : DevicePeerBuffers::Get().Names()) ClosePeerBuffer(name);
}

nb::tuple TimeOnGroup(const std::vector<int64_t>& device_ids, int64_t group_size, int device,
                      int algorithm_number, uint32_t segments, int blocks, int threads,
                      nb::bytes data, const std::string& dtype, int calls, int repetitions) {
  const auto communicator = Registry<DeviceCommunicator>::Get().Find({device_ids, group_size});
  if (!communicator || device < 0 || static_cast<size_t>(device) >= communicator->members.size() ||
      !communicator->members[device]) {
    throw std::invalid_argument("jax_intranode: CUDA device " + std::to_string(device) +
                                " is in none of the groups " + ToString({device_ids, group_size}));
  }
  if (std::string failure = communicator->closed ? kShutDown : communicator->failure();
      !failure.empty()) {
    throw std::runtime_error(failure);
  }
  const Algorithm algorithm = static_cast<Algorithm>(algorithm_number);
  const std::optional<ElementType> type = ElementTypeNamed(algorithm, dtype);
  if (!type) throw std::invalid_argument("jax_intranode: " + dtype + " has no kernels");
  const std::string input(data.c_str(), data.size());
  GraphTiming timing;
  {
    nb::gil_scoped_release release;
    timing = TimeInGraph(device, *communicator->members[device], algorithm, *type, segments,
                         {blocks, threads}, input, calls, repetitions);
  }
  return nb::make_tuple(timing.microseconds, nb::bytes(timing.output.data(), timing.output.size()));
}

nb::dict Registrations() {
  nb::dict handlers, all;
  handlers["instantiate"] = nb::capsule(reinterpret_cast<void*>(CudaCollectiveInstantiate));
  handlers["execute"] = nb::capsule(reinterpret_cast<void*>(CudaCollective));
  for (const std::string& name : CollectiveTargets()) all[name.c_str()] = handlers;
  nb::dict of_norms;
  of_norms["instantiate"] = nb::capsule(reinterpret_cast<void*>(CudaNormInstantiate));
  of_norms["execute"] = nb::capsule(reinterpret_cast<void*>(CudaNorm));
  for (const std::string& name : NormTargets()) all[name.c_str()] = of_norms;
  nb::dict of_matmul;
  of_matmul["instantiate"] = nb::capsule(reinterpret_cast<void*>(CudaCollectiveMatmulInstantiate));
  of_matmul["initialize"] = nb::capsule(reinterpret_cast<void*>(CudaCollectiveMatmulInitialize));
  of_matmul["execute"] = nb::capsule(reinterpret_cast<void*>(CudaCollectiveMatmul));
  all["jax_intranode_collective_matmul"] = of_matmul;
  return all;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "Slabs and groups of jax_intranode on GPUs.";
  m.attr("FFI_API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("RECORD_BYTES") = sizeof(FailureRecord);
  m.attr("CUDA_VERSION") = CUDART_VERSION;
  // As nvcc names them, with commas between them: PTX is "compute_80", for instance.
  m.attr("ARCHITECTURES") = JAX_INTRANODE_ARCHITECTURES;

  nb::class_<DeviceMemory>(m, "Memory")
      .def_prop_ro(
          "address",
          [](const DeviceMemory& m) { return reinterpret_cast<uintptr_t>(m.slab->address()); })
      .def_prop_ro(
          "records",
          [](const DeviceMemory& m) { return reinterpret_cast<uintptr_t>(m.slab->records()); },
          "Address of a page of host memory for failure records.")
      .def(
          "handle",
          [](const DeviceMemory& m) {
            const std::string handle = m.slab->Handle();
            return nb::bytes(handle.data(), handle.size());
          },
          "The bytes that another process needs to open this memory.")
      .def("unlink", [](const DeviceMemory&) {}, "CUDA IPC handles have no name to remove.");
  m.def(
      "allocate",
      [](int device, size_t bytes, bool) { return DeviceMemory{Slab::Allocate(device, bytes)}; },
      nb::arg("device"), nb::arg("bytes"), nb::arg("shared"),
      nb::call_guard<nb::gil_scoped_release>(), "Allocates zeroed memory.");
  m.def(
      "open",
      [](int device, nb::bytes handle, size_t) {
        const std::string bytes(handle.c_str(), handle.size());
        nb::gil_scoped_release release;
        return DeviceMemory{Slab::Open(device, bytes)};
      },
      nb::arg("device"), nb::arg("handle"), nb::arg("bytes"), "Opens a peer's memory.");
  m.def("enable_peer_access", &EnablePeerAccess, nb::arg("device"), nb::arg("peer"),
        nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "fill",
      [](int device, uintptr_t address, int value, size_t bytes) {
        Fill(device, reinterpret_cast<char*>(address), value, bytes);
      },
      nb::arg("device"), nb::arg("address"), nb::arg("value"), nb::arg("bytes"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "write_word",
      [](int device, uintptr_t address, uint32_t value) {
        WriteWord(device, reinterpret_cast<char*>(address), value);
      },
      nb::arg("device"), nb::arg("address"), nb::arg("value"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "read_word",
      [](int device, uintptr_t address) {
        return ReadWord(device, reinterpret_cast<char*>(address));
      },
      nb::arg("device"), nb::arg("address"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "read_bytes",
      [](int device, uintptr_t address, size_t bytes) {
        std::string data(bytes, 0);
        {
          nb::gil_scoped_release release;
          ReadBytes(device, reinterpret_cast<const char*>(address), data.data(), bytes);
        }
        return nb::bytes(data.data(), data.size());
      },
      nb::arg("device"), nb::arg("address"), nb::arg("bytes"));
  m.def(
      "write_bytes",
      [](int device, uintptr_t address, nb::bytes data) {
        const std::string copy(data.c_str(), data.size());
        nb::gil_scoped_release release;
        WriteBytes(device, reinterpret_cast<char*>(address), copy.data(), copy.size());
      },
      nb::arg("device"), nb::arg("address"), nb::arg("data"));
  m.def(
      "load_kernels",
      [](int device) {
        CurrentDevice current(device);
        ThrowIfError(LoadKernels(), "loading the kernels");
        ThrowIfError(LoadNormKernels(), "loading the kernels of norms");
        ThrowIfError(LoadSignalKernels(), "loading the kernels");
        LoadFusedKernels();
      },
      nb::arg("device"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "pci_bus_id",
      [](int device) {
        char id[32];
        ThrowIfError(cudaDeviceGetPCIBusId(id, sizeof(id), device), "reading a PCI bus id");
        return std::string(id);
      },
      nb::arg("device"));
  m.def("create_communicator", &CreateCommunicator, nb::arg("device_ids"), nb::arg("group_size"),
        nb::arg("members"), nb::arg("epoch_buffer_bytes"), nb::arg("timeout_s"), nb::arg("memory"),
        nb::arg("links"));
  m.def("add_rings", &AddRings, nb::arg("device_ids"), nb::arg("group_size"), nb::arg("rings"),
        nb::arg("ring_bytes"), nb::call_guard<nb::gil_scoped_release>(),
        "Gives a communicator ring buffers, which collective matmuls need.");
  m.def("cublas_lt_version", &CublasLtVersion,
        "The version of the cuBLASLt library in use; 0 if there is none.");
  m.attr("MATMUL_SCRATCH_BYTES") = kPipelineScratchBytes;
  m.attr("PEER_HEADER_BYTES") = v1::kHeaderBytes;
  m.def("create_peer_buffer", &CreatePeerBuffer, nb::arg("name"), nb::arg("device_ids"),
        nb::arg("group_size"), nb::arg("members"), nb::arg("bytes"), nb::arg("timeout_s"),
        nb::arg("memory"), "Makes a buffer known to the handlers of libraries.");
  m.def("close_peer_buffer", &ClosePeerBuffer, nb::arg("name"),
        nb::call_guard<nb::gil_scoped_release>(), "Ends a buffer: programs that use it raise.");
  m.def(
      "add_peer_library",
      [](uintptr_t address, std::pair<uint32_t, uint32_t> ffi_version) {
        PeerLibraries::Get().Add(address, v1::kCuda, &kDevicePeerApi, ffi_version);
      },
      nb::arg("address"), nb::arg("ffi_version"),
      "Hands our functions to the library whose jax_intranode_peer_library is at this address.");
  m.def(
      "peer_instantiate", [] { return nb::capsule(reinterpret_cast<void*>(CudaPeerInstantiate)); },
      "The handler that instantiates calls on peer buffers.");
  m.def("close", &Close, nb::call_guard<nb::gil_scoped_release>(),
        "Ends all communicators: programs that use them raise.");
  m.def("operations", &Operations, nb::call_guard<nb::gil_scoped_release>(),
        "Operations that the devices of this process have executed.");
  m.def("time_in_graph", &TimeOnGroup, nb::arg("device_ids"), nb::arg("group_size"),
        nb::arg("device"), nb::arg("algorithm"), nb::arg("segments"), nb::arg("blocks"),
        nb::arg("threads"), nb::arg("data"), nb::arg("dtype"), nb::arg("calls"),
        nb::arg("repetitions"),
        "Times operations of a group in a CUDA graph: (microseconds a call of each launch, the "
        "output's bytes). All devices of the group call it at once.");
  m.def(
      "platform", [] { return nb::capsule(&CudaPlatform::Get(), kPlatformName); },
      "The communicators of this platform, for the monitor.");
  m.def("synchronize", &Synchronize, nb::call_guard<nb::gil_scoped_release>(),
        "Waits until nothing runs on the devices of this process.");
  m.def(
      "handler_calls", [] { return device_handler_calls.load(); },
      "Number of times that XLA has called a handler in this process.");
  m.def("registrations", &Registrations, "The FFI targets: handlers by stage, by name.");
}

}  // namespace jax_intranode
