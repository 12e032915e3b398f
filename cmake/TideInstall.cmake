# What `cmake --install` puts in place for C++ users: headers, static libraries and the package that
# find_package(tide CONFIG) reads. A wheel takes none of it.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/tide")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/tide" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")

get_property(libraries GLOBAL PROPERTY TIDE_LIBRARIES)
# Nothing that is installed uses the GPU part, and it would tie the package to this machine's CUDA.
list(REMOVE_ITEM libraries tide_kernels_cuda tide_fabric_nccl tide_fabric_nccl_cuda)
install(TARGETS ${libraries} EXPORT tide-targets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT tide-targets NAMESPACE tide:: DESTINATION "${package_dir}")

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/TideConfig.cmake.in" "${PROJECT_BINARY_DIR}/tide-config.cmake"
  INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/tide-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/tide-config.cmake" "${PROJECT_BINARY_DIR}/tide-config-version.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/TideHighway.cmake" DESTINATION "${package_dir}")
