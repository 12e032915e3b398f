# Finds what TIDE builds on. Everything is a Debian package or a Python package of the
# interpreter in use; nothing is downloaded here.

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
include(TideHighway)

if(TIDE_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(TIDE_BUILD_BENCH)
  find_package(benchmark REQUIRED)
endif()

if(TIDE_BUILD_PYTHON)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
    OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE nanobind_status ERROR_QUIET)
  if(NOT nanobind_status EQUAL 0)
    message(FATAL_ERROR "expected the Python package nanobind in ${Python_EXECUTABLE}, which does "
      "not have it: run `make setup`, or configure with -DTIDE_BUILD_PYTHON=OFF")
  endif()
  find_package(nanobind CONFIG REQUIRED)
endif()
