"""Occupies SMs of a GPU, as a collective of another stream would."""

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any

_SHARED_BYTES = 200 << 10  # per block, so that an SM holds only one
_BLOCKS_THAT_RUN, _END = 0, 4  # byte offsets of the kernel's two words
_KERNEL = b"""
.version 7.8
.target sm_80
.address_size 64
.visible .entry occupy(.param .u64 words) {
  .reg .u64 %words;
  .reg .u32 %word;
  .reg .pred %over;
  ld.param.u64 %words, [words];
  cvta.to.global.u64 %words, %words;
  red.global.add.u32 [%words], 1;
look:
  nanosleep.u32 1000;
  ld.volatile.global.u32 %word, [%words + 4];
  setp.ne.u32 %over, %word, 0;
  @!%over bra look;
  ret;
}
\0"""


def _call(function: Any, *arguments: Any) -> None:
    status = function(*arguments)
    assert status == 0, f"{function.__name__} returned CUresult {status}"


@contextlib.contextmanager
def occupied(ordinal: int, left: int) -> Iterator[None]:
    """Inside the context a kernel occupies all but `left` SMs of a GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, function, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    words, count = ctypes.c_uint64(), ctypes.c_int()
    _call(cuda.cuDeviceGet, ctypes.byref(device), ordinal)
    _call(cuda.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
    _call(cuda.cuCtxPushCurrent_v2, context)
    sm_count = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    _call(cuda.cuDeviceGetAttribute, ctypes.byref(count), sm_count, device)
    _call(cuda.cuModuleLoadData, ctypes.byref(module), _KERNEL)
    _call(cuda.cuModuleGetFunction, ctypes.byref(function), module, b"occupy")
    dynamic_shared_bytes = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _call(cuda.cuFuncSetAttribute, function, dynamic_shared_bytes, _SHARED_BYTES)
    _call(cuda.cuStreamCreate, ctypes.byref(stream), 1)  # CU_STREAM_NON_BLOCKING
    _call(cuda.cuMemAlloc_v2, ctypes.byref(words), ctypes.c_size_t(8))
    _call(cuda.cuMemsetD32_v2, words, 0, ctypes.c_size_t(2))

    def read(offset: int) -> int:
        word = ctypes.c_uint32()
        at = ctypes.c_uint64(words.value + offset)
        _call(cuda.cuMemcpyDtoH_v2, ctypes.byref(word), at, ctypes.c_size_t(4))
        return word.value

    blocks = count.value - left
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(words), ctypes.c_void_p))
    grid, block = (blocks, 1, 1), (1, 1, 1)
    _call(cuda.cuLaunchKernel, function, *grid, *block, _SHARED_BYTES, stream, arguments, None)
    try:
        give_up = time.monotonic() + 5
        while (running := read(_BLOCKS_THAT_RUN)) < blocks:
            assert time.monotonic() < give_up, f"{running} blocks of {blocks} run"
        _call(cuda.cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))
        try:
            yield
        finally:
            _call(cuda.cuCtxPushCurrent_v2, context)
    finally:
        end = ctypes.c_uint64(words.value + _END)
        _call(cuda.cuMemsetD32_v2, end, 1, ctypes.c_size_t(1))
        _call(cuda.cuStreamSynchronize, stream)
        _call(cuda.cuMemFree_v2, words)
        _call(cuda.cuStreamDestroy_v2, stream)
        _call(cuda.cuModuleUnload, module)
        _call(cuda.cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))
        _call(cuda.cuDevicePrimaryCtxRelease_v2, device)
