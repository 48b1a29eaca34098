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

float prefill_linear_efficiency(int32_t kind, int32_t num_tokens, int32_t out_features, int32_t in_features,
                                const std::string& dtype) {
  if (dtype != "bfloat16" && dtype != "float16") return 0.0f;
  return gpu::prefill_linear_efficiency(static_cast<PrefillLinear>(kind), num_tokens, out_features, in_features,
                                        dtype == "bfloat16" ? DType::kBFloat16 : DType::kFloat16);
}

}  // namespace

void init_prefill_linear(nb::module_& module) {
  module.def("prefill_linear", prefill_linear, "kind"_a, "out"_a, "x"_a, "weight"_a, "bias"_a.none(), "tile_columns"_a,
             "stream"_a, "pdl"_a = false);
  module.def("prefill_linear_efficiency", prefill_linear_efficiency, "kind"_a, "num_tokens"_a, "out_features"_a,
             "in_features"_a, "dtype"_a);
}

}  // namespace octavo::python
