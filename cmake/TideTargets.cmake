# Helper functions that make every TIDE target the same way:
#
#   tide_library(<name> SRCS ... [DEPS ...])        static library tide_<name>, alias tide::<name>
#   tide_test(<name> SRCS ... [DEPS ...] [TIMEOUT seconds])
#                                                   gtest binary <name>_test, known to ctest
#   tide_bench(<name> SRCS ... [DEPS ...])          program <name>_bench that measures
#   tide_python_module(<name> SRCS ... [DEPS ...])  nanobind module tide.<name>
#
# Sources are listed one by one. Flags are set per target; nothing global is touched.

# Options of every target. `-ffp-contract=off`: sums are bitwise the same on every machine and fabric.
function(tide_target_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>" "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>")
  set_target_properties(${target} PROPERTIES
    POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
  set(cxx_flags -Wall -Wextra -Wconversion -Wshadow -ffp-contract=off
    $<$<BOOL:${TIDE_WERROR}>:-Werror>)
  set(cuda_flags -fmad=false -Xcompiler=-Wall,-Wextra,-ffp-contract=off
    $<$<BOOL:${TIDE_WERROR}>:--Werror=all-warnings>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # g++ 12 sees overlap in std::string's own operator+ (GCC bug 105651).
    list(APPEND cxx_flags -Wno-restrict)
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    # The portable baseline; wider instructions are chosen at run time, kernel by kernel.
    list(APPEND cxx_flags -march=x86-64-v2)
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:${cxx_flags}>" "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_flags}>")
  if(TIDE_SANITIZE)
    set(flags -fsanitize=${TIDE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1)
    target_compile_options(${target} PRIVATE ${flags})
    target_link_options(${target} PUBLIC ${flags})
  else()
    target_compile_options(${target} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<NOT:$<CONFIG:Debug>>>:-O3>)
  endif()
endfunction()

# Parses SRCS and DEPS into the caller's `arg_SRCS`, `arg_DEPS`; stops at a misspelt keyword.
macro(tide_parse kind name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SRCS;DEPS" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_SRCS)
    message(FATAL_ERROR "${kind}(${name}): expected SRCS <file>... [DEPS <target>...], "
      "got `${ARGN}`")
  endif()
endmacro()

function(tide_library name)
  tide_parse(tide_library ${name} ${ARGN})
  add_library(tide_${name} STATIC ${arg_SRCS})
  add_library(tide::${name} ALIAS tide_${name})
  tide_target_options(tide_${name})
  target_link_libraries(tide_${name} PUBLIC ${arg_DEPS})
  set_target_properties(tide_${name} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY TIDE_LIBRARIES tide_${name})
endfunction()

# TIMEOUT is the hard limit of the whole binary; scripts/run_tests.py reads it from ctest.
function(tide_test name)
  if(NOT TIDE_BUILD_TESTS)
    return()
  endif()
  tide_parse(tide_test ${name} ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  string(REGEX REPLACE "_test$" "" base ${name})
  set(target ${base}_test)
  add_executable(${target} ${arg_SRCS})
  tide_target_options(${target})
  set_target_properties(${target} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests/bin")
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_link_libraries(${target} PRIVATE ${arg_DEPS} GTest::gtest GTest::gtest_main Threads::Threads)
  add_test(NAME ${target} COMMAND ${target})
  set_tests_properties(${target} PROPERTIES TIMEOUT ${arg_TIMEOUT})
endfunction()

function(tide_bench name)
  if(NOT TIDE_BUILD_BENCH)
    return()
  endif()
  tide_parse(tide_bench ${name} ${ARGN})
  string(REGEX REPLACE "_bench$" "" base ${name})
  set(target ${base}_bench)
  add_executable(${target} ${arg_SRCS})
  tide_target_options(${target})
  set_target_properties(${target} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bench/bin")
  target_link_libraries(${target} PRIVATE ${arg_DEPS} Threads::Threads)
endfunction()

function(tide_python_module name)
  tide_parse(tide_python_module ${name} ${ARGN})
  nanobind_add_module(${name} NB_STATIC NB_SUPPRESS_WARNINGS ${arg_SRCS})
  tide_target_options(${name})
  target_link_libraries(${name} PRIVATE ${arg_DEPS})
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${TIDE_PYTHON_OUTPUT_DIR}")
  if(SKBUILD)
    install(TARGETS ${name} LIBRARY DESTINATION tide COMPONENT python)
  endif()
endfunction()
