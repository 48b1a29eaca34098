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

void decode_begin(const Tensor& residual, const Tensor& scaled, const Tensor& square_sums, const Tensor& table,
                  const Tensor& token_ids, const OptionalTensor& sources, const OptionalTensor& newest,
                  const Tensor& norm_weight, const Tensor& context_lens, int32_t q_heads, int32_t kv_heads,
                  int32_t head_dim, const Tensor& workspace, bool fixed, uintptr_t stream, bool pdl) {
  const char* op = "decode_begin";
  View table_view(op, "table", table);
  View ids_view(op, "token_ids", token_ids);
  View norm_view(op, "norm_weight", norm_weight);
  View lens_view(op, "context_lens", context_lens);
  View workspace_view(op, "workspace", workspace);
  on_gpu(table_view.rank(2).contiguous());
  DecodeBeginArgs args{};
  args.batch = static_cast<int32_t>(ids_view.rank(1).of(Scalar::kInt32).contiguous().like(table_view).size(0));
  args.stream = decode_stream(op, &residual, scaled, square_sums, args.batch, table_view, args.dtype);
  if (table_view.of(args.dtype).size(1) != args.stream.hidden) table_view.fail("must have rows as the stream");
  args.table = table_view.data();
  args.vocab = static_cast<int32_t>(table_view.size(0));
  const auto integers = [&](const char* name, const OptionalTensor& tensor, int64_t size) -> const int32_t* {
    if (tensor.object.is_none()) return nullptr;
    View view(op, name, tensor);
    view.rank(1).of(Scalar::kInt32).contiguous().like(table_view);
    if (size >= 0) view.shape({size});
    return view.data<const int32_t>();
  };
  args.token_ids = ids_view.data<const int32_t>();
  args.sources = integers("sources", sources, args.batch);
  args.newest = integers("newest", newest, -1);
  if (args.sources != nullptr && args.newest == nullptr) throw OpError("decode_begin: sources need newest");
  args.norm_weight = norm_view.shape({args.stream.hidden}).of(args.dtype).contiguous().like(table_view).data();
  if (kv_heads < 1 || q_heads % kv_heads != 0) throw OpError("decode_begin: q_heads must be a multiple of kv_heads");
  args.plan.context_lens =
      lens_view.shape({args.batch}).of(Scalar::kInt32).contiguous().like(table_view).data<const int32_t>();
  args.plan.num_seqs = args.batch;
  args.plan.q_heads = q_heads;
  args.plan.kv_heads = kv_heads;
  args.plan.head_dim = head_dim;
  args.plan.fixed = fixed;
  args.plan.workspace = workspace_view.rank(1).of(Scalar::kUInt8).contiguous().like(table_view).data();
  args.plan.workspace_bytes = static_cast<size_t>(workspace_view.size(0));
  args.launch = launch_on(stream, pdl);
  nb::gil_scoped_release released;
  gpu::decode_begin(args);
}

// `halves`: rows of the weight for each column of `out`.
void run_normed(const char* op, void (*on_stream)(const DecodeNormLinearArgs&), int halves, const Tensor& out,
                const Tensor& scaled, const Tensor& square_sums, const Tensor& weight, float eps, uintptr_t stream,
                bool portable, bool pdl, DecodeNormLinearArgs args) {
  View out_view(op, "out", out);
  View weight_view(op, "weight", weight);
  on_gpu(out_view.rank(2).contiguous());
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
                        float eps, uintptr_t stream, bool portable, bool opens_step, bool pdl) {
  DecodeNormLinearArgs args{};
  args.opens_step = opens_step;
  run_normed("decode_norm_linear", gpu::decode_norm_linear, 1, out, scaled, square_sums, weight, eps, stream, portable,
             pdl, args);
}

void decode_head(const Tensor& out, const Tensor& scaled, const Tensor& square_sums, const Tensor& weight, float eps,
                 const Tensor& best, const Tensor& wanted, int32_t vocab, uintptr_t stream, bool pdl) {
  const char* op = "decode_head";
  View out_view(op, "out", out);
  View best_view(op, "best", best);
  View wanted_view(op, "wanted", wanted);
  on_gpu(out_view.rank(2).of(Scalar::kFloat32));
  if (vocab < 1 || vocab > out_view.size(1)) throw OpError("decode_head: vocab must be 1 to the columns of out");
  DecodeNormLinearArgs args{};
  args.best = best_view.shape({out_view.size(0)}).of(Scalar::kInt64).contiguous().like(out_view).data<uint64_t>();
  args.wanted =
      wanted_view.shape({out_view.size(0)}).of(Scalar::kInt32).contiguous().like(out_view).data<const int32_t>();
  args.vocab = vocab;
  run_normed(op, gpu::decode_norm_linear, 1, out, scaled, square_sums, weight, eps, stream, false, pdl, args);
}

bool decode_head_finds_best(int64_t out_features, int64_t in_features, int64_t batch, const std::string& dtype) {
  if (dtype != "bfloat16" && dtype != "float16") return false;
  return gpu::decode_head_finds_best(out_features, in_features, batch,
                                     dtype == "bfloat16" ? DType::kBFloat16 : DType::kFloat16);
}

void decode_norm_gate_up(const Tensor& out, const Tensor& scaled, const Tensor& square_sums, const Tensor& weight,
                         float eps, uintptr_t stream, bool portable, bool pdl) {
  run_normed("decode_norm_gate_up", gpu::decode_norm_gate_up, 2, out, scaled, square_sums, weight, eps, stream,
             portable, pdl, {});
}

void decode_linear_add(const Tensor& residual, const Tensor& scaled, const Tensor& square_sums, const Tensor& x,
                       const Tensor& weight, const Tensor& norm_weight, uintptr_t stream, bool portable,
                       const OptionalTensor& ahead, bool pdl) {
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
  args.ahead = ahead_of(op, ahead, x_view);
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
  module.def("decode_begin", decode_begin, "residual"_a, "scaled"_a, "square_sums"_a, "table"_a, "token_ids"_a,
             "sources"_a.none(), "newest"_a.none(), "norm_weight"_a, "context_lens"_a, "q_heads"_a, "kv_heads"_a,
             "head_dim"_a, "workspace"_a, "fixed"_a, "stream"_a, "pdl"_a = false);
  module.def("decode_head", decode_head, "out"_a, "scaled"_a, "square_sums"_a, "weight"_a, "eps"_a, "best"_a,
             "wanted"_a, "vocab"_a, "stream"_a, "pdl"_a = false);
  module.def("decode_head_finds_best", decode_head_finds_best, "out_features"_a, "in_features"_a, "batch"_a, "dtype"_a);
  module.def("decode_norm_linear", decode_norm_linear, "out"_a, "scaled"_a, "square_sums"_a, "weight"_a, "eps"_a,
             "stream"_a, "portable"_a = false, "opens_step"_a = false, "pdl"_a = false);
  module.def("decode_norm_gate_up", decode_norm_gate_up, "out"_a, "scaled"_a, "square_sums"_a, "weight"_a, "eps"_a,
             "stream"_a, "portable"_a = false, "pdl"_a = false);
  module.def("decode_linear_add", decode_linear_add, "residual"_a, "scaled"_a, "square_sums"_a, "x"_a, "weight"_a,
             "norm_weight"_a, "stream"_a, "portable"_a = false, "ahead"_a = nb::none(), "pdl"_a = false);
}

}  // namespace octavo::python
