# Defines hwy::hwy. Debian's hwy-config.cmake is not relocatable in every release, so Highway is
# found by its parts. Read by the build and by the installed package.
find_path(TIDE_HWY_INCLUDE_DIR hwy/highway.h REQUIRED)
find_library(TIDE_HWY_LIBRARY hwy REQUIRED)
if(NOT TARGET hwy::hwy)
  add_library(hwy::hwy UNKNOWN IMPORTED)
  set_target_properties(hwy::hwy PROPERTIES
    IMPORTED_LOCATION "${TIDE_HWY_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${TIDE_HWY_INCLUDE_DIR}"
    INTERFACE_COMPILE_DEFINITIONS HWY_SHARED_DEFINE)
endif()
