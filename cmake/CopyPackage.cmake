# copy_package(PACKAGE FOLDER VARIABLE): copies a folder of a Python package of the build environment
# into the build, by content. VARIABLE: where the package's folder is now.
function(copy_package package folder variable)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; print(u.find_spec('${package}').submodule_search_locations[0])"
    OUTPUT_VARIABLE _from OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(_to ${CMAKE_BINARY_DIR}/copied/${package})
  file(GLOB_RECURSE _files RELATIVE ${_from} ${_from}/${folder}/*)
  list(FILTER _files EXCLUDE REGEX "\\.pyc$")
  foreach(_file IN LISTS _files)
    configure_file(${_from}/${_file} ${_to}/${_file} COPYONLY)
  endforeach()
  set(${variable} ${_to} PARENT_SCOPE)
endfunction()
