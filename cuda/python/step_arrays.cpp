// A step's numbers on their way out of Python.
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "python/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo::python {
namespace {

using Vector = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

long value_of(PyObject* id) {
#if PY_VERSION_HEX >= 0x030C0000 && !defined(Py_LIMITED_API)
  const auto* number = reinterpret_cast<PyLongObject*>(id);
  if (PyLong_CheckExact(id) && PyUnstable_Long_IsCompact(number)) return PyUnstable_Long_CompactValue(number);
#endif
  const long value = PyLong_AsLong(id);
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

void copy_token_ids(const Vector& out, const nb::typed<nb::sequence, int>& ids, int64_t begin) {
  const auto count = static_cast<int64_t>(out.shape(0));
  const nb::object items = nb::steal(PySequence_Fast(ids.ptr(), "copy_token_ids: ids are no sequence"));
  if (!items.is_valid()) throw nb::python_error();
  if (begin < 0 || begin + count > static_cast<int64_t>(PySequence_Fast_GET_SIZE(items.ptr()))) {
    throw nb::index_error("copy_token_ids: there are fewer ids");
  }
  PyObject** from = PySequence_Fast_ITEMS(items.ptr()) + begin;
  int32_t* to = out.data();
  for (int64_t i = 0; i < count; ++i) {
    const long id = value_of(from[i]);
    if (id < std::numeric_limits<int32_t>::min() || id > std::numeric_limits<int32_t>::max()) {
      PyErr_SetString(PyExc_OverflowError, "copy_token_ids: an id does not fit 32 bits");
      throw nb::python_error();
    }
    to[i] = static_cast<int32_t>(id);
  }
}

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

void pack(const Bytes& out, const nb::list& arrays, const std::vector<int64_t>& offsets) {
  if (nb::len(arrays) != offsets.size()) throw std::invalid_argument("pack: arrays and offsets differ in length");
  for (size_t i = 0; i < offsets.size(); ++i) {
    const auto array = nb::cast<Array>(arrays[i]);
    if (offsets[i] < 0 || offsets[i] + array.nbytes() > out.nbytes()) throw nb::index_error("pack: no room");
    std::memcpy(out.data() + offsets[i], array.data(), array.nbytes());
  }
}

}  // namespace

void init_step_arrays(nb::module_& module) {
  module.def("pack", pack, "out"_a.noconvert(), "arrays"_a, "offsets"_a,
             nb::sig("def pack(out: NDArray[numpy.uint8], arrays: Sequence[object], offsets: list[int]) -> None"),
             "Copies each array to its place in `out`, offsets[i] bytes from its start. Raises IndexError.");
  module.def("copy_token_ids", copy_token_ids, "out"_a.noconvert(), "ids"_a, "begin"_a,
             "out[i] = ids[begin + i]. Raises IndexError, OverflowError, and TypeError for what is no integer.");
}

}  // namespace octavo::python
