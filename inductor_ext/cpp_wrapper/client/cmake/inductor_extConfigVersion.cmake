# The version of the Python package. A program that asks for another minor version is refused.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../../__init__.py" _inductor_ext_line
     REGEX "^__version__ = ")
string(REGEX REPLACE ".*\"([0-9.]+).*\"" "\\1" PACKAGE_VERSION "${_inductor_ext_line}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _inductor_ext_minor "${PACKAGE_VERSION}")
unset(_inductor_ext_line)

if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION
   AND PACKAGE_FIND_VERSION VERSION_GREATER_EQUAL _inductor_ext_minor)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
unset(_inductor_ext_minor)
