#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "octavo/copy_blocks.h"
#include "octavo/linear.h"
#include "octavo/norm.h"
#include "octavo/paged_attention.h"
#include "octavo/silu_mul.h"
#include "octavo/write_kv.h"
#include "python/bindings.h"
#include "python/tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo::python {
namespace {

Launch launch_on(uintptr_t stream, bool pdl = false) { return {reinterpret_cast<void*>(stream), pdl}; }

void check_layer(const KvPool& pool, int32_t layer, const View& view) {
  if (layer < 0 || layer >= pool.layers) view.fail("has no layer " + std::to_string(layer));
}

// The cpu or the gpu twin, by the device of `view`, without the GIL.
template <class Args>
void run(const View& view, const Args& args, void (*on_cpu)(const Args&), void (*on_gpu)(const Args&)) {
  nb::gil_scoped_release released;
  (view.on_cpu() ? on_cpu : on_gpu)(args);
}

void paged_attention(const Tensor& out, const Tensor& query, const Tensor& kv_pool_, int32_t layer,
                     const Tensor& block_tables, const Tensor& query_start, const Tensor& context_lens,
                     int32_t max_query_len, float scale, const OptionalTensor& workspace, uintptr_t stream,
                     bool planned, bool fixed, bool pdl) {
  const char* op = "paged_attention";
  View pool_view(op, "kv_pool", kv_pool_);
  View out_view(op, "out", out);
  View query_view(op, "query", query);
  View tables_view(op, "block_tables", block_tables);
  View start_view(op, "query_start", query_start);
  View lens_view(op, "context_lens", context_lens);

  PagedAttentionArgs args{};
  args.pool = kv_pool(pool_view);
  args.layer = layer;
  check_layer(args.pool, layer, pool_view);
  query_view.rank(3).of(args.pool.dtype).contiguous().like(pool_view);
  args.num_tokens = static_cast<int32_t>(query_view.size(0));
  args.q_heads = static_cast<int32_t>(query_view.size(1));
  if (args.q_heads % args.pool.kv_heads != 0) query_view.fail("must have a multiple of the pool's KV heads");
  if (query_view.size(2) != args.pool.head_dim) query_view.fail("and kv_pool differ in head_dim");
  out_view.shape({args.num_tokens, args.q_heads, args.pool.head_dim}).of(args.pool.dtype).contiguous().like(pool_view);
  tables_view.rank(2).of(Scalar::kInt32).contiguous().like(pool_view);
  args.num_seqs = static_cast<int32_t>(tables_view.size(0));
  args.max_blocks_per_seq = static_cast<int32_t>(tables_view.size(1));
  start_view.shape({args.num_seqs + 1}).of(Scalar::kInt32).contiguous().like(pool_view);
  lens_view.shape({args.num_seqs}).of(Scalar::kInt32).contiguous().like(pool_view);
  if (!workspace.object.is_none()) {
    View view(op, "workspace", workspace);
    view.rank(1).of(Scalar::kUInt8).contiguous().like(pool_view);
    args.workspace = view.data();
    args.workspace_bytes = static_cast<size_t>(view.size(0));
  }
  args.out = out_view.data();
  args.query = query_view.data();
  args.block_tables = tables_view.data<const int32_t>();
  args.query_start = start_view.data<const int32_t>();
  args.context_lens = lens_view.data<const int32_t>();
  args.max_query_len = max_query_len;
  args.scale = scale;
  args.planned = planned;
  args.fixed = fixed;
  args.launch = launch_on(stream, pdl);
  run(pool_view, args, cpu::paged_attention, gpu::paged_attention);
}

void write_kv(const Tensor& query_out, const Tensor& qkv, const Tensor& kv_pool_, int32_t layer,
              const Tensor& positions, const Tensor& slots, const Tensor& cos_sin, const OptionalTensor& bias,
              const OptionalTensor& q_norm, const OptionalTensor& k_norm, float norm_eps, uintptr_t stream, bool pdl) {
  const char* op = "write_kv";
  View pool_view(op, "kv_pool", kv_pool_);
  View out_view(op, "query_out", query_out);
  View qkv_view(op, "qkv", qkv);
  View positions_view(op, "positions", positions);
  View slots_view(op, "slots", slots);
  View rotation_view(op, "cos_sin", cos_sin);

  WriteKvArgs args{};
  args.pool = kv_pool(pool_view);
  args.layer = layer;
  check_layer(args.pool, layer, pool_view);
  const int64_t dim = args.pool.head_dim;
  out_view.rank(3).of(args.pool.dtype).contiguous().like(pool_view);
  args.num_tokens = static_cast<int32_t>(out_view.size(0));
  args.q_heads = static_cast<int32_t>(out_view.size(1));
  if (out_view.size(2) != dim) out_view.fail("and kv_pool differ in head_dim");
  const int64_t width = (args.q_heads + 2 * args.pool.kv_heads) * dim;
  qkv_view.shape({args.num_tokens, width}).of(args.pool.dtype).like(pool_view);
  if (qkv_view.stride(1) != 1 || (args.num_tokens > 1 && qkv_view.stride(0) < width)) {
    qkv_view.fail("must have dense rows that do not overlap");
  }
  positions_view.shape({args.num_tokens}).of(Scalar::kInt32).contiguous().like(pool_view);
  slots_view.shape({args.num_tokens}).of(Scalar::kInt64).contiguous().like(pool_view);
  rotation_view.rank(2).of(Scalar::kFloat32).contiguous().like(pool_view);
  args.max_positions = static_cast<int32_t>(rotation_view.size(0));
  args.rotary_dim = static_cast<int32_t>(rotation_view.size(1));
  if (args.rotary_dim > dim || args.rotary_dim % 2 != 0) rotation_view.fail("must have an even width up to head_dim");
  const auto optional = [&](const char* name, const OptionalTensor& tensor, int64_t size) -> const void* {
    if (tensor.object.is_none()) return nullptr;
    View view(op, name, tensor);
    return view.shape({size}).of(args.pool.dtype).contiguous().like(pool_view).data();
  };
  args.bias = optional("bias", bias, width);
  args.q_norm_weight = optional("q_norm", q_norm, dim);
  args.k_norm_weight = optional("k_norm", k_norm, dim);
  args.query_out = out_view.data();
  args.qkv = qkv_view.data();
  args.qkv_stride = qkv_view.stride(0);
  args.norm_eps = norm_eps;
  args.cos_sin = rotation_view.data<const float>();
  args.positions = positions_view.data<const int32_t>();
  args.slots = slots_view.data<const int64_t>();
  args.launch = launch_on(stream, pdl);
  run(pool_view, args, cpu::write_kv, gpu::write_kv);
}

void copy_blocks(const Tensor& kv_pool_, const Tensor& pairs, uintptr_t stream) {
  View pool_view("copy_blocks", "kv_pool", kv_pool_);
  View pairs_view("copy_blocks", "pairs", pairs);
  CopyBlocksArgs args{};
  args.pool = kv_pool(pool_view);
  pairs_view.rank(2).of(Scalar::kInt64).contiguous().like(pool_view);
  if (pairs_view.size(1) != 2) pairs_view.fail("must have size 2 (source, destination) on axis 1");
  args.pairs = pairs_view.data<const int64_t>();
  args.num_pairs = static_cast<int32_t>(pairs_view.size(0));
  args.launch = launch_on(stream);
  run(pool_view, args, cpu::copy_blocks, gpu::copy_blocks);
}

void rms_norm(const Tensor& out, const Tensor& x, const OptionalTensor& residual, const Tensor& weight, float eps,
              uintptr_t stream, bool pdl) {
  const char* op = "rms_norm";
  View x_view(op, "x", x);
  View out_view(op, "out", out);
  View weight_view(op, "weight", weight);
  RmsNormArgs args{};
  args.dtype = x_view.rank(2).contiguous().dtype();
  args.num_tokens = static_cast<int32_t>(x_view.size(0));
  args.hidden = static_cast<int32_t>(x_view.size(1));
  out_view.shape({args.num_tokens, args.hidden}).of(args.dtype).contiguous().like(x_view);
  weight_view.shape({args.hidden}).of(args.dtype).contiguous().like(x_view);
  if (!residual.object.is_none()) {
    View view(op, "residual", residual);
    args.residual = view.shape({args.num_tokens, args.hidden}).of(args.dtype).contiguous().like(x_view).data();
  }
  args.out = out_view.data();
  args.x = x_view.data();
  args.weight = weight_view.data();
  args.eps = eps;
  args.launch = launch_on(stream, pdl);
  run(x_view, args, cpu::rms_norm, gpu::rms_norm);
}

void silu_mul(const Tensor& out, const Tensor& gate_up, uintptr_t stream, bool pdl) {
  View out_view("silu_mul", "out", out);
  View gate_up_view("silu_mul", "gate_up", gate_up);
  SiluMulArgs args{};
  args.dtype = out_view.rank(2).contiguous().dtype();
  args.num_tokens = static_cast<int32_t>(out_view.size(0));
  args.inter = static_cast<int32_t>(out_view.size(1));
  gate_up_view.shape({args.num_tokens, 2 * out_view.size(1)}).of(args.dtype).contiguous().like(out_view);
  args.out = out_view.data();
  args.gate_up = gate_up_view.data();
  args.launch = launch_on(stream, pdl);
  run(out_view, args, cpu::silu_mul, gpu::silu_mul);
}

constexpr std::pair<const char*, WeightFormat> kWeightFormats[] = {{"float32", WeightFormat::kFloat32},
                                                                   {"bfloat16", WeightFormat::kBFloat16},
                                                                   {"Q4_0", WeightFormat::kQ4_0},
                                                                   {"Q4_1", WeightFormat::kQ4_1},
                                                                   {"Q8_0", WeightFormat::kQ8_0}};

WeightFormat weight_format(const View& weight, const std::string& block_type) {
  for (const auto& [name, format] : kWeightFormats) {
    if (block_type == name && row_bytes(format, 1) == 0) return format;
  }
  if (!block_type.empty()) weight.fail("has block type " + block_type + "; linear takes Q4_0, Q4_1 and Q8_0");
  const DType dtype = weight.dtype();
  if (dtype == DType::kFloat16) weight.fail("must be float32, bfloat16 or blocks");
  return dtype == DType::kFloat32 ? WeightFormat::kFloat32 : WeightFormat::kBFloat16;
}

LinearWeight pack_linear(const Tensor& weight, const std::string& block_type) {
  View view("pack_linear", "weight", weight);
  if (!view.on_cpu()) view.fail("must be on the CPU");
  view.rank(2).contiguous();
  const WeightFormat format = weight_format(view, block_type);
  int64_t in_features = view.size(1);
  if (!block_type.empty()) {
    const int64_t block_bytes = row_bytes(format, kBlockWeights);
    if (view.of(Scalar::kUInt8).size(1) % block_bytes != 0) {
      view.fail("must have rows of whole blocks, " + std::to_string(block_bytes) + " bytes each");
    }
    in_features = in_features / block_bytes * kBlockWeights;
  }
  const auto out_features = static_cast<int32_t>(view.size(0));
  nb::gil_scoped_release released;
  return LinearWeight(format, view.data(), out_features, static_cast<int32_t>(in_features));
}

void linear(const Tensor& out, const Tensor& x, const LinearWeight& weight, const OptionalTensor& bias) {
  const char* op = "linear";
  View x_view(op, "x", x);
  View out_view(op, "out", out);
  if (!x_view.on_cpu()) x_view.fail("must be on the CPU");
  LinearArgs args{};
  args.weight = &weight;
  args.dtype = x_view.rank(2).contiguous().dtype();
  args.num_tokens = static_cast<int32_t>(x_view.size(0));
  x_view.shape({args.num_tokens, weight.in_features()});
  out_view.shape({args.num_tokens, weight.out_features()}).of(args.dtype).contiguous().like(x_view);
  if (!bias.object.is_none()) {
    View view(op, "bias", bias);
    args.bias = view.shape({weight.out_features()}).of(args.dtype).contiguous().like(x_view).data();
  }
  args.out = out_view.data();
  args.x = x_view.data();
  nb::gil_scoped_release released;
  cpu::linear(args);
}

}  // namespace

void init_ops(nb::module_& module) {
  nb::exception<OpError>(module, "OpError", PyExc_RuntimeError);
  module.def("paged_attention", paged_attention, "out"_a, "query"_a, "kv_pool"_a, "layer"_a, "block_tables"_a,
             "query_start"_a, "context_lens"_a, "max_query_len"_a, "scale"_a, "workspace"_a.none(), "stream"_a,
             "planned"_a = false, "fixed"_a = false, "pdl"_a = false);
  module.def("paged_attention_workspace_bytes", gpu::paged_attention_workspace_bytes, "max_seqs"_a, "q_heads"_a,
             "kv_heads"_a, "head_dim"_a, "fixed"_a = false);
  module.def("write_kv", write_kv, "query_out"_a, "qkv"_a, "kv_pool"_a, "layer"_a, "positions"_a, "slots"_a,
             "cos_sin"_a, "bias"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(), "norm_eps"_a, "stream"_a,
             "pdl"_a = false);
  module.def("copy_blocks", copy_blocks, "kv_pool"_a, "pairs"_a, "stream"_a);
  nb::class_<LinearWeight>(module, "LinearWeight", "A weight matrix in the order in which linear reads it.")
      .def_prop_ro("out_features", &LinearWeight::out_features)
      .def_prop_ro("in_features", &LinearWeight::in_features)
      .def_prop_ro("format",
                   [](const LinearWeight& weight) {
                     const auto* found =
                         std::find_if(std::begin(kWeightFormats), std::end(kWeightFormats),
                                      [&](const auto& entry) { return entry.second == weight.format(); });
                     return std::string(found->first);
                   })
      .def_prop_ro("nbytes", &LinearWeight::size);
  module.def("pack_linear", pack_linear, "weight"_a, "block_type"_a);
  module.def("linear", linear, "out"_a, "x"_a, "weight"_a, "bias"_a.none());
  module.def("rms_norm", rms_norm, "out"_a, "x"_a, "residual"_a.none(), "weight"_a, "eps"_a, "stream"_a,
             "pdl"_a = false);
  module.def("silu_mul", silu_mul, "out"_a, "gate_up"_a, "stream"_a, "pdl"_a = false);
}

}  // namespace octavo::python
