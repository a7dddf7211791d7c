# CMake package of inductor_ext: the header-only C++ client of AOT packages.
#
# find_package(inductor_ext REQUIRED)
# target_link_libraries(program PRIVATE inductor_ext::client)
#
# Needs CMAKE_PREFIX_PATH with the folder that inductor_ext.cmake_prefix_path() returns, and that of
# torch (torch.utils.cmake_prefix_path), unless the project has found Torch before.
include(CMakeFindDependencyMacro)

if(NOT TARGET torch)
  find_dependency(Torch)
endif()

if(NOT TARGET inductor_ext::client)
  get_filename_component(
    _inductor_ext_include "${CMAKE_CURRENT_LIST_DIR}/../include" ABSOLUTE)
  add_library(inductor_ext::client INTERFACE IMPORTED)
  set_target_properties(
    inductor_ext::client
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_inductor_ext_include}"
               INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES};${CMAKE_DL_LIBS}"
               INTERFACE_COMPILE_FEATURES cxx_std_20)
  unset(_inductor_ext_include)
endif()
