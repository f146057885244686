// The Python module _cuda: slabs and groups on GPUs.
#include <new>
#include <optional>
#include <stdexcept>

#include "cuda/few_rows.h"
#include "cuda/fused_matmul.h"
#include "cuda/graph_timing.h"
#include "cuda/launch.h"
#include "cuda/pipelined_matmul.h"
#include "cuda/slab.h"
#include "ffi/collectives_cuda.h"
#include "ffi/platform_cuda.h"
#include "module_common.h"
#include "text.h"

namespace jax_intranode {
namespace {

struct CudaBackend {
  using Slab = jax_intranode::Slab;
  using Communicator = DeviceCommunicator;
  static constexpr size_t kRecordBytes = sizeof(FailureRecord);
  static constexpr v1::Platform kPlatform = v1::kCuda;
  static constexpr const v1::Api* kPeerApi = &kDevicePeerApi;
  static constexpr auto* kPeerInstantiate = &CudaPeerInstantiate;
  static constexpr auto* kInstantiate = &CudaCollectiveInstantiate;
  static constexpr auto* kExecute = &CudaCollective;

  static constexpr auto* EnableAccess = &EnablePeerAccess;
  static constexpr auto* Fill = &jax_intranode::Fill;
  static constexpr auto* WriteWord = &jax_intranode::WriteWord;
  static constexpr auto* ReadWord = &jax_intranode::ReadWord;
  static constexpr auto* Copy = &jax_intranode::Copy;
  static void LoadAllKernels(int device) {
    CurrentDevice current(device);
    ThrowIfError(LoadListedKernels(), "loading the kernels");
    LoadFusedKernels();
    LoadFewRowsKernels();
  }

  static constexpr auto* CreateCommunicator = &CreateDeviceCommunicator;
  static constexpr auto* CloseCommunicators = &CloseDeviceCommunicators;
  static constexpr auto* Operations = &DeviceOperations;
  static CudaPlatform& ThePlatform() { return CudaPlatform::Get(); }
  static void AddPeerBuffer(std::shared_ptr<DevicePeerBuffer> buffer) {
    static_assert(sizeof(v1::PeerRecord) <= kRecordsBytes);
    for (const auto& [device, peers] : buffer->members) new (peers.record) v1::PeerRecord{};
    CudaPlatform::Get().AddNew([&] { return DevicePeerBuffers::Get().Add(buffer->name, buffer); });
  }
  static constexpr auto* ClosePeer = &ClosePeerBuffer;
  static void AddHandlers(nb::dict* all) {
    nb::dict of_matmul;
    of_matmul["instantiate"] = HandlerCapsule(&CudaCollectiveMatmulInstantiate);
    of_matmul["initialize"] = HandlerCapsule(&CudaCollectiveMatmulInitialize);
    of_matmul["execute"] = HandlerCapsule(&CudaCollectiveMatmul);
    (*all)["jax_intranode_collective_matmul"] = of_matmul;
    nb::dict of_layout;
    of_layout["instantiate"] = HandlerCapsule(&CudaLayoutInstantiate);
    of_layout["execute"] = HandlerCapsule(&CudaLayout);
    (*all)["jax_intranode_moe_layout"] = of_layout;
    nb::dict of_few_rows;
    of_few_rows["instantiate"] = HandlerCapsule(&CudaFewRowsInstantiate);
    of_few_rows["execute"] = HandlerCapsule(&CudaFewRows);
    (*all)["jax_intranode_few_rows"] = of_few_rows;
  }
};

nb::tuple TimeOnGroup(const std::vector<int64_t>& device_ids, int64_t group_size, int device,
                      int algorithm_number, uint32_t segments, int blocks, int threads,
                      nb::bytes data, const std::string& dtype, int calls, int repetitions) {
  const Algorithm algorithm = static_cast<Algorithm>(algorithm_number);
  const Partition partition{device_ids, group_size, HasOwnRegion(algorithm)};
  const auto communicator = Registry<DeviceCommunicator>::Get().Find(partition);
  if (!communicator || !communicator->members.contains(device)) {
    throw InvalidArgument("CUDA device ", device, " is in none of the groups ",
                          ToString(partition));
  }
  if (std::string failure = communicator->closed ? kShutDown : communicator->failure(device);
      !failure.empty()) {
    throw std::runtime_error(failure);
  }
  const std::optional<ElementType> type = ElementTypeNamed(algorithm, dtype);
  if (!type) throw InvalidArgument(dtype, " has no kernels");
  const std::string input(data.c_str(), data.size());
  GraphTiming timing;
  {
    nb::gil_scoped_release release;
    const DeviceCommunicator::Member& member = communicator->members.at(device);
    timing =
        TimeInGraph(device, member.group, member.links,
                    {algorithm, *type, segments, {blocks, threads}}, input, calls, repetitions);
  }
  return nb::make_tuple(timing.microseconds, BytesOf(timing.output));
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "Slabs and groups of jax_intranode on GPUs.";
  m.attr("CUDA_VERSION") = CUDART_VERSION;
  // As nvcc names them, with commas between them: PTX is "compute_80", for instance.
  m.attr("ARCHITECTURES") = JAX_INTRANODE_ARCHITECTURES;
  m.attr("MATMUL_SCRATCH_BYTES") = kPipelineScratchBytes;
  ExportCommon<CudaBackend>(m);
  m.def(
      "pci_bus_id",
      [](int device) {
        char id[32];
        ThrowIfError(cudaDeviceGetPCIBusId(id, sizeof(id), device), "reading a PCI bus id");
        return std::string(id);
      },
      nb::arg("device"));
  m.def(
      "add_rings",
      [](const std::vector<int64_t>& device_ids, int64_t group_size,
         const std::vector<std::pair<int64_t, std::vector<uintptr_t>>>& rings,
         size_t ring_bytes) { AddRings({device_ids, group_size}, rings, ring_bytes); },
      nb::arg("device_ids"), nb::arg("group_size"), nb::arg("rings"), nb::arg("ring_bytes"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Gives a communicator ring buffers, which collective matmuls need.");
  m.def("cublas_lt_version", &CublasLtVersion,
        "The version of the cuBLASLt library in use; 0 if there is none.");
  m.def("time_in_graph", &TimeOnGroup, nb::arg("device_ids"), nb::arg("group_size"),
        nb::arg("device"), nb::arg("algorithm"), nb::arg("segments"), nb::arg("blocks"),
        nb::arg("threads"), nb::arg("data"), nb::arg("dtype"), nb::arg("calls"),
        nb::arg("repetitions"),
        "Times operations of a group in a CUDA graph: (microseconds a call of each launch, the "
        "output's bytes). All devices of the group call it at once.");
  m.def("synchronize", &SynchronizeDevices, nb::call_guard<nb::gil_scoped_release>(),
        "Waits until nothing runs on the devices of this process.");
}

}  // namespace jax_intranode
