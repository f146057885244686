// A ring shift with element-wise work fused in: rank r sends scale * x + offset to rank r + shift.
// nvcc makes kernels for GPUs of this file, and a C++ compiler makes functions for CPU devices.
#include <jax_intranode/peer_ffi.h>

#include <algorithm>

namespace ffi = ::xla::ffi;
namespace peer = ::jax_intranode::v1;

namespace {

// One element travels in one packet, so nobody needs a flag or a barrier for the data.
struct RingShift {
  const float* x;
  float* y;
  size_t count;
  int shift;  // 0 to world size - 1
  float scale, offset;

  template <class Thread>
  JAX_INTRANODE_FN void operator()(Thread& t, const peer::Peers& p) const {
    const int to = (p.rank + shift) % p.size, from = (p.rank + p.size - shift) % p.size;
    const uint32_t epoch = peer::Begin(t, p);
    char* sent = peer::Half(p, to, epoch);
    char* received = peer::Half(p, p.rank, epoch);
    for (size_t i = t.First(); i < count; i += t.Stride()) {
      peer::Put(sent, i, scale * x[i] + offset);  // your own work goes here
    }
    for (size_t i = t.First(); i < count; i += t.Stride()) {
      if (!peer::Take(t, received, i, &y[i], from)) return;
    }
    peer::End(t, p);
  }
};

peer::Result Run(peer::Call call, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y,
                 int64_t shift, float scale, float offset) {
  const size_t count = x.element_count();
  const int size = call.peers().size;
  const size_t room = peer::HalfBytes(call.peers()) / peer::kPacketBytes<float>;
  if (count > room || y->element_count() != count) {
    return call.Error("ring_shift: an array of " + std::to_string(count) +
                      " elements; half of the buffer has room for " + std::to_string(room));
  }
  const RingShift body{x.typed_data(), y->typed_data(),
                       count,          static_cast<int>((shift % size + size) % size),
                       scale,          offset};
  const int threads = 256;
  const size_t blocks = std::clamp<size_t>((count + threads - 1) / threads, 1, 32);
  return call.Run(body, static_cast<int>(blocks), threads);
}

}  // namespace

JAX_INTRANODE_PEER_HANDLER(RingShiftHandler, Run,
                           peer::Bind()
                               .Arg<ffi::Buffer<ffi::F32>>()
                               .Ret<ffi::Buffer<ffi::F32>>()
                               .Attr<int64_t>("shift")
                               .Attr<float>("scale")
                               .Attr<float>("offset"));
JAX_INTRANODE_PEER_LIBRARY();
