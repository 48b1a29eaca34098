#include "python/tensor.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace octavo::python {
namespace {

constexpr int kMaxRank = 8;

// The part of DLPack 1.3's exchange table that is used here. A framework's type carries it as a capsule; through it a
// tensor is looked at in a few nanoseconds, where `__dlpack__` costs microseconds of Python.
struct ExchangeTable {
  uint32_t major;
  uint32_t minor;
  const ExchangeTable* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*view_of_object)(void* object, nb::dlpack::dltensor* out);
};

constexpr uint32_t kExchangeMajor = 1;

const ExchangeTable* find_exchange_table(PyTypeObject* type) {
  nb::object capsule =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  if (!capsule.is_valid()) {
    PyErr_Clear();
    return nullptr;
  }
  const void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (pointer == nullptr) PyErr_Clear();
  const auto* table = static_cast<const ExchangeTable*>(pointer);
  while (table != nullptr && table->major != kExchangeMajor) table = table->previous;
  return table != nullptr && table->view_of_object != nullptr ? table : nullptr;
}

// Guarded by the GIL. Types are kept alive, so that an address never comes to mean another type.
const ExchangeTable* exchange_table(PyTypeObject* type) {
  static std::vector<std::pair<PyTypeObject*, const ExchangeTable*>> known;
  for (const auto& [seen, table] : known) {
    if (seen == type) return table;
  }
  const ExchangeTable* table = find_exchange_table(type);
  if (table != nullptr) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    known.emplace_back(type, table);
  }
  return table;
}

std::pair<nb::dlpack::dtype_code, int> code_of(Scalar scalar) {
  using Code = nb::dlpack::dtype_code;
  switch (scalar) {
    case Scalar::kFloat32:
      return {Code::Float, 32};
    case Scalar::kBFloat16:
      return {Code::Bfloat, 16};
    case Scalar::kFloat16:
      return {Code::Float, 16};
    case Scalar::kInt32:
      return {Code::Int, 32};
    case Scalar::kInt64:
      return {Code::Int, 64};
    case Scalar::kUInt8:
      break;
  }
  return {Code::UInt, 8};
}

}  // namespace

const char* name_of(Scalar scalar) {
  switch (scalar) {
    case Scalar::kFloat32:
      return "float32";
    case Scalar::kBFloat16:
      return "bfloat16";
    case Scalar::kFloat16:
      return "float16";
    case Scalar::kInt32:
      return "int32";
    case Scalar::kInt64:
      return "int64";
    case Scalar::kUInt8:
      break;
  }
  return "uint8";
}

Scalar scalar_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return Scalar::kFloat32;
    case DType::kBFloat16:
      return Scalar::kBFloat16;
    case DType::kFloat16:
      break;
  }
  return Scalar::kFloat16;
}

View::View(const char* op, const char* name, const Tensor& tensor) : op_(op), name_(name) {
  const nb::handle object = tensor.object;
  if (const ExchangeTable* table = exchange_table(Py_TYPE(object.ptr()))) {
    if (table->view_of_object(object.ptr(), &tensor_) != 0) throw nb::python_error();
  } else {
    if (!nb::try_cast(object, owner_, false)) fail("is not a writable tensor on a device that can be shared");
    tensor_ = {
        owner_.data_handle(), {owner_.device_type(), owner_.device_id()}, static_cast<int32_t>(owner_.ndim()),
        owner_.dtype(),       const_cast<int64_t*>(owner_.shape_ptr()),   const_cast<int64_t*>(owner_.stride_ptr()),
        owner_.byte_offset()};
  }
  if (tensor_.ndim > kMaxRank) fail("has more than 8 axes");
  int64_t dense = 1;
  for (int axis = tensor_.ndim - 1; axis >= 0; --axis) {
    strides_[axis] = tensor_.strides == nullptr ? dense : tensor_.strides[axis];
    dense *= tensor_.shape[axis];
  }
  const int device = tensor_.device.device_type;
  if (device != nb::device::cpu::value && device != nb::device::cuda::value)
    fail("is neither on the CPU nor on a CUDA GPU");
}

void View::fail(const std::string& what) const { throw OpError(std::string(op_) + ": " + name_ + " " + what); }

bool View::has(Scalar scalar) const {
  const auto [code, bits] = code_of(scalar);
  return tensor_.dtype.code == static_cast<uint8_t>(code) && tensor_.dtype.bits == bits && tensor_.dtype.lanes == 1;
}

DType View::dtype() const {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (has(scalar_of(dtype))) return dtype;
  }
  fail("must be float32, bfloat16 or float16");
}

View& View::rank(int expected) {
  if (tensor_.ndim != expected) fail("must have " + std::to_string(expected) + " axes, got shape " + shape_text());
  return *this;
}

View& View::shape(std::initializer_list<int64_t> expected) {
  rank(static_cast<int>(expected.size()));
  int axis = 0;
  for (const int64_t size : expected) {
    if (tensor_.shape[axis] != size) {
      fail("must have size " + std::to_string(size) + " on axis " + std::to_string(axis) + ", got shape " +
           shape_text());
    }
    ++axis;
  }
  return *this;
}

View& View::of(Scalar expected) {
  if (!has(expected)) fail(std::string("must be ") + name_of(expected));
  return *this;
}

View& View::contiguous() {
  const bool empty = std::any_of(tensor_.shape, tensor_.shape + tensor_.ndim, [](int64_t size) { return size == 0; });
  int64_t dense = 1;
  for (int axis = tensor_.ndim - 1; axis >= 0 && !empty; --axis) {
    if (tensor_.shape[axis] != 1 && strides_[axis] != dense) fail("must be contiguous");
    dense *= tensor_.shape[axis];
  }
  return *this;
}

View& View::like(const View& other) {
  if (tensor_.device.device_type != other.tensor_.device.device_type ||
      tensor_.device.device_id != other.tensor_.device.device_id) {
    fail(std::string("must be on the device of ") + other.name_);
  }
  return *this;
}

std::string View::shape_text() const {
  std::string text = "[";
  for (int axis = 0; axis < tensor_.ndim; ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(tensor_.shape[axis]);
  }
  return text + "]";
}

Ahead ahead_of(const char* op, const OptionalTensor& tensor, const View& like) {
  if (tensor.object.is_none()) return {};
  View view(op, "ahead", tensor);
  view.rank(2).contiguous().like(like);
  return {view.data(), view.size(0) * view.size(1) * (view.dtype() == DType::kFloat32 ? 4 : 2)};
}

KvPool kv_pool(View& view) {
  view.rank(6).contiguous();
  KvPool pool;
  pool.data = view.data();
  pool.dtype = view.dtype();
  pool.num_blocks = view.size(0);
  pool.layers = static_cast<int32_t>(view.size(1));
  pool.kv_heads = static_cast<int32_t>(view.size(3));
  pool.block_size = static_cast<int32_t>(view.size(4));
  pool.head_dim = static_cast<int32_t>(view.size(5));
  if (view.size(2) != 2) view.fail("must have size 2 (keys, values) on axis 2");
  return pool;
}

}  // namespace octavo::python
