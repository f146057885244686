#include "tensor_map.h"

#include <cudaTypedefs.h>

#include "../text.h"
#include "matmul_limits.h"
#include "slab.h"

namespace jax_intranode {

CUtensorMap TensorMap(ElementType type, const void* at, std::vector<uint64_t> dims,
                      std::vector<uint32_t> box, uint64_t pitch, CUtensorMapL2promotion promotion) {
  static const auto encode =
      reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(DriverFunction("cuTensorMapEncodeTiled"));
  const cuuint32_t rank = static_cast<cuuint32_t>(dims.size());
  std::vector<cuuint64_t> strides;  // bytes, of all dimensions but the fastest
  strides.push_back(kMatmulElementBytes * pitch);
  for (size_t d = 1; d + 1 < dims.size(); ++d) strides.push_back(strides.back() * dims[d]);
  const std::vector<cuuint32_t> steps(rank, 1);
  CUtensorMap map;
  const CUresult result =
      encode(&map,
             type == ElementType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             rank, const_cast<void*>(at), reinterpret_cast<const cuuint64_t*>(dims.data()),
             strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw RuntimeError("cuTensorMapEncodeTiled failed with CUresult ", result, " for ", dims[1],
                       " x ", dims[0]);
  }
  return map;
}

}  // namespace jax_intranode
