// The decode matmuls. GPU only: on the CPU the plain ops serve decode steps as they do all others.
#include "octavo/decode_linear.h"

#include <nanobind/stl/string.h>

#include <string>

#include "python/bindings.h"
#include "python/tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo::python {
namespace {

Launch launch_on(uintptr_t stream, bool pdl) { return {reinterpret_cast<void*>(stream), pdl}; }

View& on_gpu(View& view) {
  if (view.on_cpu()) view.fail("must be on a GPU");
  return view;
}

// The buffers of a stream with room for `batch` rows. `residual` is null where an op needs only what the norms read.
DecodeStream decode_stream(const char* op, const Tensor* residual, const Tensor& scaled, const Tensor& square_sums,
                           int64_t batch, const View& like, DType& dtype) {
  View scaled_view(op, "scaled", scaled);
  View sums_view(op, "square_sums", square_sums);
  DecodeStream stream{};
  dtype = scaled_view.rank(2).contiguous().like(like).dtype();
  stream.hidden = static_cast<int32_t>(scaled_view.size(1));
  sums_view.shape({scaled_view.size(0), gpu::decode_square_sum_parts(stream.hidden)})
      .of(Scalar::kFloat32)
      .contiguous()
      .like(like);
  if (scaled_view.size(0) < batch) scaled_view.fail("has fewer rows than the batch");
  stream.scaled = scaled_view.data();
  stream.square_sums = sums_view.data<float>();
  if (residual != nullptr) {
    View view(op, "residual", *residual);
    view.shape({scaled_view.size(0), scaled_view.size(1)}).of(Scalar::kFloat32).contiguous().like(like);
    stream.residual = view.data<float>();
  }
  return stream;
}

void decode_start(const Tensor& residual, const Tensor& scaled, const Tensor& square_sums, const Tensor& x,
                  const Tensor& norm_weight, uintptr_t stream, bool pdl) {
  const char* op = "decode_start";
  View x_view(op, "x", x);
  View norm_view(op, "norm_weight", norm_weight);
  on_gpu(x_view.rank(2).contiguous());
  DecodeStartArgs args{};
  args.batch = static_cast<int32_t>(x_view.size(0));
  args.stream = decode_stream(op, &residual, scaled, square_sums, args.batch, x_view, args.dtype);
  x_view.shape({args.batch, args.stream.hidden}).of(args.dtype);
  args.norm_weight = norm_view.shape({args.stream.hidden}).of(args.dtype).contiguous().like(x_view).data();
  args.x = x_view.data();
  args.launch = launch_on(stream, pdl);
  nb::gil_scoped_release released;
  gpu::decode_start(args);
}

// `halves`: rows of the weight for each column of `out`.
void run_normed(const char* op, void (*on_stream)(const DecodeNormLinearArgs&), int halves, const Tensor& out,
                const Tensor& scaled, const Tensor& square_sums, const Tensor& weight, float eps, uintptr_t stream,
                bool portable, bool pdl) {
  View out_view(op, "out", out);
  View weight_view(op, "weight", weight);
  on_gpu(out_view.rank(2).contiguous());
  DecodeNormLinearArgs args{};
  args.batch = static_cast<int32_t>(out_view.size(0));
  args.out_features = static_cast<int32_t>(out_view.size(1));
  args.out_dtype = out_view.dtype();
  args.stream = decode_stream(op, nullptr, scaled, square_sums, args.batch, out_view, args.dtype);
  weight_view.shape({halves * out_view.size(1), args.stream.hidden}).of(args.dtype).contiguous().like(out_view);
  if (args.out_dtype != args.dtype && args.out_dtype != DType::kFloat32) out_view.fail("must be float32 or as weight");
  args.out = out_view.data();
  args.weight = weight_view.data();
  args.eps = eps;
  args.portable = portable;
  args.launch = launch_on(stream, pdl);
  nb::gil_scoped_release released;
  on_stream(args);
}

void decode_norm_linear(const Tensor& out, const Tensor& scaled, const Tensor& square_sums, const Tensor& weight,
                        float eps, uintptr_t stream, bool portable, bool pdl) {
  run_normed("decode_norm_linear", gpu::decode_norm_linear, 1, out, scaled, square_sums, weight, eps, stream, portable,
             pdl);
}

void decode_norm_gate_up(const Tensor& out, const Tensor& scaled, const Tensor& square_sums, const Tensor& weight,
                         float eps, uintptr_t stream, bool portable, bool pdl) {
  run_normed("decode_norm_gate_up", gpu::decode_norm_gate_up, 2, out, scaled, square_sums, weight, eps, stream,
             portable, pdl);
}

void decode_linear_add(const Tensor& residual, const Tensor& scaled, const Tensor& square_sums, const Tensor& x,
                       const Tensor& weight, const Tensor& norm_weight, uintptr_t stream, bool portable, bool pdl) {
  const char* op = "decode_linear_add";
  View x_view(op, "x", x);
  View weight_view(op, "weight", weight);
  View norm_view(op, "norm_weight", norm_weight);
  on_gpu(x_view.rank(2).contiguous());
  DecodeLinearAddArgs args{};
  args.batch = static_cast<int32_t>(x_view.size(0));
  args.in_features = static_cast<int32_t>(x_view.size(1));
  args.stream = decode_stream(op, &residual, scaled, square_sums, args.batch, x_view, args.dtype);
  x_view.of(args.dtype);
  weight_view.shape({args.stream.hidden, args.in_features}).of(args.dtype).contiguous().like(x_view);
  args.norm_weight = norm_view.shape({args.stream.hidden}).of(args.dtype).contiguous().like(x_view).data();
  args.x = x_view.data();
  args.weight = weight_view.data();
  args.portable = portable;
  args.launch = launch_on(stream, pdl);
  nb::gil_scoped_release released;
  gpu::decode_linear_add(args);
}

bool decode_linear_supported(int32_t kind, int64_t out_features, int64_t in_features, int64_t batch,
                             const std::string& dtype) {
  if (dtype != "bfloat16" && dtype != "float16") return false;
  return gpu::decode_linear_supported(static_cast<DecodeLinear>(kind), out_features, in_features, batch,
                                      dtype == "bfloat16" ? DType::kBFloat16 : DType::kFloat16);
}

}  // namespace

void init_decode_linear(nb::module_& module) {
  module.def("decode_linear_supported", decode_linear_supported, "kind"_a, "out_features"_a, "in_features"_a, "batch"_a,
             "dtype"_a);
  module.def("decode_square_sum_parts", gpu::decode_square_sum_parts, "hidden"_a);
  module.def("decode_start", decode_start, "residual"_a, "scaled"_a, "square_sums"_a, "x"_a, "norm_weight"_a,
             "stream"_a, "pdl"_a = false);
  module.def("decode_norm_linear", decode_norm_linear, "out"_a, "scaled"_a, "square_sums"_a, "weight"_a, "eps"_a,
             "stream"_a, "portable"_a = false, "pdl"_a = false);
  module.def("decode_norm_gate_up", decode_norm_gate_up, "out"_a, "scaled"_a, "square_sums"_a, "weight"_a, "eps"_a,
             "stream"_a, "portable"_a = false, "pdl"_a = false);
  module.def("decode_linear_add", decode_linear_add, "residual"_a, "scaled"_a, "square_sums"_a, "x"_a, "weight"_a,
             "norm_weight"_a, "stream"_a, "portable"_a = false, "pdl"_a = false);
}

}  // namespace octavo::python
