# For which GPUs the kernels are compiled. Include it before enable_language(CUDA).
#
# CMAKE_CUDA_ARCHITECTURES decides, if it is set. Else: machine code for the GPUs of this machine, or
# for Hopper if there are none, and PTX, which a driver assembles for other GPUs when a process loads
# the kernels.
#
# Sets JAX_INTRANODE_ARCHITECTURES, which `python -m jax_intranode info` shows, and
# JAX_INTRANODE_GENCODE, options for nvcc.
set(JAX_INTRANODE_GENCODE)
if(DEFINED CMAKE_CUDA_ARCHITECTURES)
  list(JOIN CMAKE_CUDA_ARCHITECTURES "," JAX_INTRANODE_ARCHITECTURES)
else()
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE _found RESULT_VARIABLE _failed ERROR_QUIET)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE _known)
  set(_codes)
  if(_failed EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" _found "${_found}")
    foreach(_capability IN LISTS _found)
      string(REPLACE "." "" _code "sm_${_capability}")
      if(_capability VERSION_GREATER_EQUAL 8.0 AND _known MATCHES "${_code}[^0-9a-z]")
        list(APPEND _codes ${_code})
      endif()
    endforeach()
    list(REMOVE_DUPLICATES _codes)
  endif()
  if(NOT _codes)
    set(_codes sm_90)
  endif()
  # The kernels ask for nothing that sm_80 lacks. So they are compiled to PTX once.
  list(APPEND _codes compute_80)
  list(JOIN _codes "," JAX_INTRANODE_ARCHITECTURES)
  set(JAX_INTRANODE_GENCODE -gencode=arch=compute_80,code=[${JAX_INTRANODE_ARCHITECTURES}])
  set(CMAKE_CUDA_ARCHITECTURES OFF)
endif()
