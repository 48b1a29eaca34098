// The many-row matmuls. GPU only: on the CPU the plain ops serve.
#include "octavo/prefill_linear.h"

#include <nanobind/stl/string.h>

#include <string>

#include "python/bindings.h"
#include "python/tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo::python {
namespace {

void prefill_linear(int32_t kind, const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                    int32_t tile_columns, uintptr_t stream, bool pdl) {
  const char* op = "prefill_linear";
  View x_view(op, "x", x);
  View out_view(op, "out", out);
  View weight_view(op, "weight", weight);
  if (x_view.on_cpu()) x_view.fail("must be on a GPU");
  PrefillLinearArgs args{};
  args.kind = static_cast<PrefillLinear>(kind);
  args.dtype = x_view.rank(2).contiguous().dtype();
  args.num_tokens = static_cast<int32_t>(x_view.size(0));
  args.in_features = static_cast<int32_t>(x_view.size(1));
  args.out_features = static_cast<int32_t>(out_view.rank(2).size(1));
  const int64_t rows = (args.kind == PrefillLinear::kGateUp ? 2 : 1) * static_cast<int64_t>(args.out_features);
  out_view.shape({args.num_tokens, args.out_features}).of(args.dtype).contiguous().like(x_view);
  weight_view.shape({rows, args.in_features}).of(args.dtype).contiguous().like(x_view);
  if (!bias.object.is_none()) {
    View view(op, "bias", bias);
    args.bias = view.shape({args.out_features}).of(args.dtype).contiguous().like(x_view).data();
  }
  args.out = out_view.data();
  args.x = x_view.data();
  args.weight = weight_view.data();
  args.tile_columns = tile_columns;
  args.launch = {reinterpret_cast<void*>(stream), pdl};
  nb::gil_scoped_release released;
  gpu::prefill_linear(args);
}

void prefill_qkv(const Tensor& query_out, const Tensor& x, const Tensor& weight, const Tensor& kv_pool_, int32_t layer,
                 const Tensor& positions, const Tensor& slots, const Tensor& cos_sin, const OptionalTensor& bias,
                 const OptionalTensor& q_norm, const OptionalTensor& k_norm, float norm_eps, int32_t tile_columns,
                 uintptr_t stream, bool pdl) {
  const char* op = "prefill_qkv";
  View pool_view(op, "kv_pool", kv_pool_);
  View out_view(op, "query_out", query_out);
  View x_view(op, "x", x);
  View weight_view(op, "weight", weight);
  View positions_view(op, "positions", positions);
  View slots_view(op, "slots", slots);
  View rotation_view(op, "cos_sin", cos_sin);
  if (pool_view.on_cpu()) pool_view.fail("must be on a GPU");

  PrefillQkvArgs args{};
  WriteKvArgs& heads = args.heads;
  heads.pool = kv_pool(pool_view);
  heads.layer = layer;
  if (layer < 0 || layer >= heads.pool.layers) pool_view.fail("has no such layer");
  const int64_t dim = heads.pool.head_dim;
  const DType dtype = heads.pool.dtype;
  out_view.rank(3).of(dtype).contiguous().like(pool_view);
  heads.num_tokens = static_cast<int32_t>(out_view.size(0));
  heads.q_heads = static_cast<int32_t>(out_view.size(1));
  if (out_view.size(2) != dim) out_view.fail("and kv_pool differ in head_dim");
  const int64_t width = (heads.q_heads + 2 * heads.pool.kv_heads) * dim;
  args.in_features = static_cast<int32_t>(x_view.rank(2).size(1));
  x_view.shape({heads.num_tokens, args.in_features}).of(dtype).contiguous().like(pool_view);
  weight_view.shape({width, args.in_features}).of(dtype).contiguous().like(pool_view);
  positions_view.shape({heads.num_tokens}).of(Scalar::kInt32).contiguous().like(pool_view);
  slots_view.shape({heads.num_tokens}).of(Scalar::kInt64).contiguous().like(pool_view);
  rotation_view.rank(2).of(Scalar::kFloat32).contiguous().like(pool_view);
  heads.max_positions = static_cast<int32_t>(rotation_view.size(0));
  heads.rotary_dim = static_cast<int32_t>(rotation_view.size(1));
  const auto optional = [&](const char* name, const OptionalTensor& tensor, int64_t size) -> const void* {
    if (tensor.object.is_none()) return nullptr;
    View view(op, name, tensor);
    return view.shape({size}).of(dtype).contiguous().like(pool_view).data();
  };
  heads.bias = optional("bias", bias, width);
  heads.q_norm_weight = optional("q_norm", q_norm, dim);
  heads.k_norm_weight = optional("k_norm", k_norm, dim);
  heads.norm_eps = norm_eps;
  heads.query_out = out_view.data();
  heads.cos_sin = rotation_view.data<const float>();
  heads.positions = positions_view.data<const int32_t>();
  heads.slots = slots_view.data<const int64_t>();
  heads.launch = {reinterpret_cast<void*>(stream), pdl};
  args.x = x_view.data();
  args.weight = weight_view.data();
  args.tile_columns = tile_columns;
  nb::gil_scoped_release released;
  gpu::prefill_qkv(args);
}

DType half_dtype(const std::string& name) {
  return name == "bfloat16" ? DType::kBFloat16 : name == "float16" ? DType::kFloat16 : DType::kFloat32;
}

float prefill_linear_efficiency(int32_t kind, int32_t num_tokens, int32_t out_features, int32_t in_features,
                                const std::string& dtype) {
  return gpu::prefill_linear_efficiency(static_cast<PrefillLinear>(kind), num_tokens, out_features, in_features,
                                        half_dtype(dtype));
}

float prefill_qkv_efficiency(int32_t num_tokens, int32_t qkv_features, int32_t head_dim, int32_t in_features,
                             const std::string& dtype) {
  return gpu::prefill_qkv_efficiency(num_tokens, qkv_features, head_dim, in_features, half_dtype(dtype));
}

}  // namespace

void init_prefill_linear(nb::module_& module) {
  module.def("prefill_linear", prefill_linear, "kind"_a, "out"_a, "x"_a, "weight"_a, "bias"_a.none(), "tile_columns"_a,
             "stream"_a, "pdl"_a = false);
  module.def("prefill_linear_efficiency", prefill_linear_efficiency, "kind"_a, "num_tokens"_a, "out_features"_a,
             "in_features"_a, "dtype"_a);
  module.def("prefill_qkv", prefill_qkv, "query_out"_a, "x"_a, "weight"_a, "kv_pool"_a, "layer"_a, "positions"_a,
             "slots"_a, "cos_sin"_a, "bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), "norm_eps"_a,
             "tile_columns"_a, "stream"_a, "pdl"_a = false);
  module.def("prefill_qkv_efficiency", prefill_qkv_efficiency, "num_tokens"_a, "qkv_features"_a, "head_dim"_a,
             "in_features"_a, "dtype"_a);
}

}  // namespace octavo::python
