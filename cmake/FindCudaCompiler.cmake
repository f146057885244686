# Looks for an nvcc that works. Sets JAX_INTRANODE_CUDA_FOUND, and JAX_INTRANODE_CUDA_REASON if not.
#
# JAX_INTRANODE_CUDA is AUTO (use CUDA if there is a compiler; fail without one if there are GPUs), ON
# (fail without a compiler) or OFF. Order: CMAKE_CUDA_COMPILER or CUDACXX, then nvcc in CUDA_HOME or
# CUDA_PATH, on PATH or in /usr/local/cuda. With JAX_INTRANODE_CUDA_WHEELS it is the nvcc of the
# wheels, whatever else there is.
if(JAX_INTRANODE_CUDA STREQUAL "")
  set(JAX_INTRANODE_CUDA AUTO) # an environment variable that is set, but empty
endif()
if(NOT JAX_INTRANODE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "JAX_INTRANODE_CUDA=${JAX_INTRANODE_CUDA}: use one of AUTO, ON, OFF.")
endif()
set(JAX_INTRANODE_CUDA_FOUND OFF)
set(NVIDIA_DEVICE /dev/nvidiactl CACHE FILEPATH "A file that is there if the machine has GPUs")
set(JAX_INTRANODE_CUDA_REASON "JAX_INTRANODE_CUDA=OFF")
if(NOT JAX_INTRANODE_CUDA STREQUAL "OFF")
  set(JAX_INTRANODE_CUDA_REASON
      "no nvcc was found that works; set CUDACXX, CUDA_HOME or JAX_INTRANODE_CUDA_WHEELS=1 to have it")
  if(JAX_INTRANODE_CUDA_WHEELS)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
              "import nvidia; print(';'.join(f'{path}/cu13/bin' for path in nvidia.__path__))"
      OUTPUT_VARIABLE _nvcc_dirs OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_program(_wheel_nvcc nvcc PATHS ${_nvcc_dirs} NO_DEFAULT_PATH)
    if(NOT _wheel_nvcc)
      message(FATAL_ERROR
        "JAX_INTRANODE_CUDA_WHEELS=1, but ${Python_EXECUTABLE} has no nvcc. Build without "
        "--no-build-isolation, or install the wheels that pyproject.toml names for it.")
    endif()
    set(ENV{CUDACXX} "${_wheel_nvcc}")
  elseif(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(_nvcc nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(_nvcc)
      # Not CMAKE_CUDA_COMPILER: check_language() does not try a compiler that is named there.
      set(ENV{CUDACXX} "${_nvcc}")
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE _nvcc_version)
    string(REGEX MATCH "release ([0-9.]+)" _nvcc_version "${_nvcc_version}")
    if(CMAKE_MATCH_1 VERSION_LESS 12.0)
      set(JAX_INTRANODE_CUDA_REASON
          "${CMAKE_CUDA_COMPILER} is of CUDA ${CMAKE_MATCH_1}; 12.0 is the oldest that will do")
    else()
      set(JAX_INTRANODE_CUDA_FOUND ON)
    endif()
  endif()
  if(NOT JAX_INTRANODE_CUDA_FOUND AND JAX_INTRANODE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "JAX_INTRANODE_CUDA=ON, but ${JAX_INTRANODE_CUDA_REASON}.")
  endif()
  if(NOT JAX_INTRANODE_CUDA_FOUND AND EXISTS "${NVIDIA_DEVICE}")
    message(FATAL_ERROR "This machine has NVIDIA GPUs (${NVIDIA_DEVICE}), but "
      "${JAX_INTRANODE_CUDA_REASON}. JAX_INTRANODE_CUDA=OFF builds for CPU devices only.")
  endif()
endif()
