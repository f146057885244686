// Descriptions of arrays for Hopper's bulk copies (hopper.h).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "../kernels/algorithms.h"

namespace jax_intranode {

// Describes an array of 16-bit elements, its fastest dimension first, for bulk copies of boxes.
// `pitch` elements lie between one row of the fastest dimension and the next. What a box has past
// the array's end is read as zero, and not stored.
CUtensorMap TensorMap(ElementType type, const void* at, std::vector<uint64_t> dims,
                      std::vector<uint32_t> box, uint64_t pitch,
                      CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

}  // namespace jax_intranode
