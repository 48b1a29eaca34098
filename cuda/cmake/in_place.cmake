# cmake -D BUILT=file -D PLACE=file -P in_place.cmake: copies through a temporary name and a rename, so that a running
# process never maps half a file. On every build, since another build folder may have put its own file there.
execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files ${BUILT} ${PLACE} RESULT_VARIABLE differs ERROR_QUIET)
if(differs)
  file(COPY_FILE ${BUILT} ${PLACE}.new)
  file(RENAME ${PLACE}.new ${PLACE})
endif()
