// Tensors as they cross from Python: borrowed, never converted or copied, checked once per op.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <string>

#include "octavo/error.h"
#include "octavo/tensor.h"

namespace octavo::python {

// A tensor argument, not yet looked at. Holds None where the op allows it.
struct Tensor {
  nanobind::handle object;
};

// An argument that may be None: the same thing, typed so in the stub.
struct OptionalTensor : Tensor {};

enum class Scalar { kFloat32, kBFloat16, kFloat16, kInt32, kInt64, kUInt8 };

const char* name_of(Scalar scalar);
Scalar scalar_of(DType dtype);

// One tensor inside a call of one op. Every failed check throws an OpError that names op and argument.
class View {
 public:
  View(const char* op, const char* name, const Tensor& tensor);

  int64_t size(int axis) const { return tensor_.shape[axis]; }
  int64_t stride(int axis) const { return strides_[axis]; }
  bool on_cpu() const { return tensor_.device.device_type == nanobind::device::cpu::value; }
  DType dtype() const;  // one of the three that ops compute in

  View& rank(int expected);
  View& shape(std::initializer_list<int64_t> expected);
  View& of(Scalar expected);
  View& of(DType expected) { return of(scalar_of(expected)); }
  View& contiguous();
  View& like(const View& other);  // on the same device

  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(tensor_.data) + tensor_.byte_offset);
  }

  [[noreturn]] void fail(const std::string& what) const;

 private:
  std::string shape_text() const;
  bool has(Scalar scalar) const;

  const char* op_;
  const char* name_;
  nanobind::dlpack::dltensor tensor_;  // its shape belongs to the caller's tensor
  nanobind::ndarray<> owner_;          // keeps a fallback import alive; empty for torch tensors
  int64_t strides_[8];
};

// The six-axis, contiguous pool argument.
KvPool kv_pool(View& view);
// Weights that an op may bring into the L2: any contiguous matrix, or None.
Ahead ahead_of(const char* op, const OptionalTensor& tensor, const View& like);

}  // namespace octavo::python

namespace nanobind::detail {

template <>
struct type_caster<octavo::python::Tensor> {
  NB_TYPE_CASTER(octavo::python::Tensor, const_name("torch.Tensor"))
  bool from_python(handle source, uint32_t, cleanup_list*) noexcept {
    value.object = source;
    return !source.is_none();
  }
};

template <>
struct type_caster<octavo::python::OptionalTensor> {
  NB_TYPE_CASTER(octavo::python::OptionalTensor, const_name("torch.Tensor"))
  bool from_python(handle source, uint32_t, cleanup_list*) noexcept {
    value.object = source;
    return true;
  }
};

}  // namespace nanobind::detail
