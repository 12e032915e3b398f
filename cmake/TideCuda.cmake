# Finds nvcc and enables CUDA, as TIDE_BUILD_CUDA asks: ON, OFF, or AUTO (if nvcc is there).
#
# Sets TIDE_CUDA and defines tide_cuda_runtime: headers and the static runtime. libcuda is never
# linked, so everything builds, and runs up to the first device call, without a driver.
# nvcc is CMAKE_CUDA_COMPILER or comes from PATH, /usr/local/cuda or the Python packages nvidia-* in
# .venv (scripts/requirements-cuda.txt), in this order.

set(TIDE_CUDA OFF)

# Explains why there is no CUDA part, as an error if it was asked for.
function(tide_without_cuda reason)
  if(TIDE_BUILD_CUDA STREQUAL AUTO)
    message(STATUS "${reason}: the CUDA part is left out")
  else()
    message(FATAL_ERROR "TIDE_BUILD_CUDA=${TIDE_BUILD_CUDA} expects nvcc 12.1 or newer, but "
      "${reason}: run `make setup CUDA=ON`, set CMAKE_CUDA_COMPILER to another nvcc, or configure "
      "with -DTIDE_BUILD_CUDA=OFF")
  endif()
endfunction()

if(NOT TIDE_BUILD_CUDA)
  return()
endif()
if(TIDE_SANITIZE)
  message(STATUS "TIDE_SANITIZE=${TIDE_SANITIZE}: the CUDA part is left out")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  file(GLOB wheels "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu*")
  find_program(TIDE_NVCC nvcc PATHS /usr/local/cuda ${wheels} PATH_SUFFIXES bin)
  if(NOT TIDE_NVCC)
    tide_without_cuda("there is no nvcc in PATH, /usr/local/cuda or .venv")
    return()
  endif()
  set(CMAKE_CUDA_COMPILER "${TIDE_NVCC}")
endif()

# 32 KiB of kernel parameters came with 12.1.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE version_text)
if(NOT version_text MATCHES "release ([0-9]+\\.[0-9]+)" OR CMAKE_MATCH_1 VERSION_LESS 12.1)
  tide_without_cuda("${CMAKE_CUDA_COMPILER} is not nvcc 12.1 or newer")
  return()
endif()

# Machine code for each family that has kernels of its own, and PTX for what comes later.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code OUTPUT_VARIABLE gpu_codes)
  if(gpu_codes MATCHES "sm_100")
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 100)
  else()
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 90-virtual)
  endif()
endif()

# The Python packages keep libraries in lib/, where nvcc does not look by itself.
execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" -dryrun -x cu /dev/null -o /dev/null
  ERROR_VARIABLE dry_run)
string(REGEX MATCH "TOP=([^\n]+)" _ "${dry_run}")
file(REAL_PATH "${CMAKE_MATCH_1}" toolkit)
if(EXISTS "${toolkit}/lib/libcudart_static.a")
  set(CMAKE_CUDA_FLAGS_INIT "-L${toolkit}/lib")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
enable_language(CUDA)
set(TIDE_CUDA ON)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake 3.25 does not know that nvcc 12 and newer compile C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()

find_library(TIDE_CUDART_STATIC cudart_static REQUIRED
  HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} "${toolkit}/lib" "${toolkit}/lib64"
    "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}/../lib"
  NO_DEFAULT_PATH)
add_library(tide_cuda_runtime INTERFACE)
target_include_directories(tide_cuda_runtime SYSTEM INTERFACE
  ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(tide_cuda_runtime INTERFACE
  "${TIDE_CUDART_STATIC}" Threads::Threads ${CMAKE_DL_LIBS} rt)
