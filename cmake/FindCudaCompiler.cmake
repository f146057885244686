# Looks for an nvcc that works. Sets JAX_INTRANODE_CUDA_FOUND, and JAX_INTRANODE_CUDA_REASON if not.
#
# JAX_INTRANODE_CUDA is AUTO (use CUDA if there is a compiler), ON (fail without one) or OFF. Order:
# CMAKE_CUDA_COMPILER or CUDACXX, then nvcc on PATH, in CUDA_HOME or in /usr/local/cuda.
set(JAX_INTRANODE_CUDA_FOUND OFF)
set(JAX_INTRANODE_CUDA_REASON "JAX_INTRANODE_CUDA=OFF")
if(NOT JAX_INTRANODE_CUDA STREQUAL "OFF")
  set(JAX_INTRANODE_CUDA_REASON "no nvcc was found that works; set CUDACXX or CUDA_HOME to have it")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(_nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(_nvcc)
      # Not CMAKE_CUDA_COMPILER: check_language() does not try a compiler that is named there.
      set(ENV{CUDACXX} "${_nvcc}")
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(JAX_INTRANODE_CUDA_FOUND ON)
  elseif(JAX_INTRANODE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "JAX_INTRANODE_CUDA=ON, but ${JAX_INTRANODE_CUDA_REASON}.")
  endif()
endif()
