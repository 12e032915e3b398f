# Finds NCCL's headers for the nccl fabric; the library is loaded at run time.
#
# Sets TIDE_NCCL and defines tide_nccl_headers. Without the CUDA part or the headers (scripts/setup.sh
# keeps them in ~/.cache/tide) the fabric is left out.

set(TIDE_NCCL OFF)
if(NOT TIDE_CUDA)
  return()
endif()

file(GLOB wheels "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/nccl/include")
set(cache "$ENV{XDG_CACHE_HOME}")
if(NOT cache)
  set(cache "$ENV{HOME}/.cache")
endif()
find_path(TIDE_NCCL_INCLUDE_DIR nccl_device/host.h
  PATHS "${cache}/tide/nccl-headers" ${wheels} NO_DEFAULT_PATH)
if(NOT TIDE_NCCL_INCLUDE_DIR)
  message(STATUS "there are no headers of NCCL 2.31.2 or newer: the nccl fabric is left out; run "
    "`make setup`, or set TIDE_NCCL_INCLUDE_DIR")
  return()
endif()
file(STRINGS "${TIDE_NCCL_INCLUDE_DIR}/nccl.h" version_line REGEX "#define NCCL_VERSION_CODE ")
string(REGEX MATCH "[0-9]+" version "${version_line}")
if(version LESS 23102)
  message(STATUS "${TIDE_NCCL_INCLUDE_DIR} is older than NCCL 2.31.2 (${version}): the nccl fabric is "
    "left out")
  return()
endif()
set(TIDE_NCCL ON)
add_library(tide_nccl_headers INTERFACE)
target_include_directories(tide_nccl_headers SYSTEM INTERFACE "${TIDE_NCCL_INCLUDE_DIR}")
