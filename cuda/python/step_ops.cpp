// The ops around the layers of a step: embedding, advance, the attention plan, sampling.
#include <algorithm>
#include <string>

#include "octavo/embed.h"
#include "octavo/paged_attention.h"
#include "octavo/sample.h"
#include "python/bindings.h"
#include "python/tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo::python {
namespace {

Launch launch_on(uintptr_t stream, bool pdl) { return {reinterpret_cast<void*>(stream), pdl}; }

template <class Args>
void run(const View& view, const Args& args, void (*on_cpu)(const Args&), void (*on_gpu)(const Args&)) {
  nb::gil_scoped_release released;
  (view.on_cpu() ? on_cpu : on_gpu)(args);
}

// A vector argument's data, or null for None.
template <class T>
T* vector(const char* op, const char* name, const OptionalTensor& tensor, Scalar scalar, int64_t size,
          const View& like) {
  if (tensor.object.is_none()) return nullptr;
  View view(op, name, tensor);
  view.rank(1).of(scalar).contiguous().like(like);
  if (size >= 0) view.shape({size});
  return view.data<T>();
}

void plan_attention(const Tensor& context_lens, int32_t q_heads, int32_t kv_heads, int32_t head_dim,
                    const Tensor& workspace, uintptr_t stream, int32_t least_tokens, bool fixed, bool pdl) {
  const char* op = "plan_attention";
  View lens_view(op, "context_lens", context_lens);
  View workspace_view(op, "workspace", workspace);
  lens_view.rank(1).of(Scalar::kInt32).contiguous();
  if (lens_view.on_cpu()) lens_view.fail("must be on a GPU");
  if (kv_heads < 1 || q_heads % kv_heads != 0) throw OpError("plan_attention: q_heads must be a multiple of kv_heads");
  workspace_view.rank(1).of(Scalar::kUInt8).contiguous().like(lens_view);
  const PlanAttentionArgs args{lens_view.data<const int32_t>(),
                               static_cast<int32_t>(lens_view.size(0)),
                               q_heads,
                               kv_heads,
                               head_dim,
                               least_tokens,
                               fixed,
                               workspace_view.data(),
                               static_cast<size_t>(workspace_view.size(0)),
                               launch_on(stream, pdl)};
  nb::gil_scoped_release released;
  gpu::plan_attention(args);
}

void plan_prefill(const Tensor& query_start, const Tensor& context_lens, int32_t q_heads, int32_t kv_heads,
                  int32_t head_dim, const Tensor& workspace, uintptr_t stream, bool pdl) {
  const char* op = "plan_prefill";
  View start_view(op, "query_start", query_start);
  View lens_view(op, "context_lens", context_lens);
  View workspace_view(op, "workspace", workspace);
  lens_view.rank(1).of(Scalar::kInt32).contiguous();
  if (lens_view.on_cpu()) lens_view.fail("must be on a GPU");
  start_view.shape({lens_view.size(0) + 1}).of(Scalar::kInt32).contiguous().like(lens_view);
  if (kv_heads < 1 || q_heads % kv_heads != 0) throw OpError("plan_prefill: q_heads must be a multiple of kv_heads");
  workspace_view.rank(1).of(Scalar::kUInt8).contiguous().like(lens_view);
  const PlanPrefillArgs args{start_view.data<const int32_t>(),
                             lens_view.data<const int32_t>(),
                             static_cast<int32_t>(lens_view.size(0)),
                             q_heads,
                             kv_heads,
                             head_dim,
                             workspace_view.data(),
                             static_cast<size_t>(workspace_view.size(0)),
                             launch_on(stream, pdl)};
  nb::gil_scoped_release released;
  gpu::plan_prefill(args);
}

void decode_attention(const Tensor& out, const Tensor& qkv, const Tensor& kv_pool_, int32_t layer,
                      const Tensor& block_tables, const Tensor& context_lens, const Tensor& cos_sin, float scale,
                      const Tensor& workspace, const OptionalTensor& bias, const OptionalTensor& q_norm,
                      const OptionalTensor& k_norm, float norm_eps, uintptr_t stream, bool planned, bool fixed,
                      const OptionalTensor& ahead, bool pdl) {
  const char* op = "decode_attention";
  View pool_view(op, "kv_pool", kv_pool_);
  View out_view(op, "out", out);
  View qkv_view(op, "qkv", qkv);
  View tables_view(op, "block_tables", block_tables);
  View lens_view(op, "context_lens", context_lens);
  View rotation_view(op, "cos_sin", cos_sin);
  View workspace_view(op, "workspace", workspace);
  DecodeAttentionArgs args{};
  args.pool = kv_pool(pool_view);
  if (pool_view.on_cpu()) pool_view.fail("must be on a GPU");
  args.layer = layer;
  if (layer < 0 || layer >= args.pool.layers) pool_view.fail("has no layer " + std::to_string(layer));
  const int64_t dim = args.pool.head_dim;
  out_view.rank(3).of(args.pool.dtype).contiguous().like(pool_view);
  args.num_seqs = static_cast<int32_t>(out_view.size(0));
  args.q_heads = static_cast<int32_t>(out_view.size(1));
  if (out_view.size(2) != dim) out_view.fail("and kv_pool differ in head_dim");
  const int64_t width = (args.q_heads + 2 * args.pool.kv_heads) * dim;
  qkv_view.shape({args.num_seqs, width}).of(args.pool.dtype).like(pool_view);
  if (qkv_view.stride(1) != 1) qkv_view.fail("must have dense rows");
  tables_view.rank(2).of(Scalar::kInt32).contiguous().like(pool_view);
  if (tables_view.size(0) != args.num_seqs) tables_view.fail("must have a row a sequence");
  args.max_blocks_per_seq = static_cast<int32_t>(tables_view.size(1));
  lens_view.shape({args.num_seqs}).of(Scalar::kInt32).contiguous().like(pool_view);
  rotation_view.rank(2).of(Scalar::kFloat32).contiguous().like(pool_view);
  if (rotation_view.size(1) != dim) rotation_view.fail("must be as wide as a head: the whole head rotates");
  workspace_view.rank(1).of(Scalar::kUInt8).contiguous().like(pool_view);
  const auto optional = [&](const char* name, const OptionalTensor& tensor, int64_t size) -> const void* {
    if (tensor.object.is_none()) return nullptr;
    View view(op, name, tensor);
    return view.shape({size}).of(args.pool.dtype).contiguous().like(pool_view).data();
  };
  args.bias = optional("bias", bias, width);
  args.q_norm_weight = optional("q_norm", q_norm, dim);
  args.k_norm_weight = optional("k_norm", k_norm, dim);
  args.norm_eps = norm_eps;
  args.out = out_view.data();
  args.qkv = qkv_view.data();
  args.qkv_stride = qkv_view.stride(0);
  args.cos_sin = rotation_view.data<const float>();
  args.block_tables = tables_view.data<const int32_t>();
  args.context_lens = lens_view.data<const int32_t>();
  args.scale = scale;
  args.workspace = workspace_view.data();
  args.workspace_bytes = static_cast<size_t>(workspace_view.size(0));
  args.planned = planned;
  args.fixed = fixed;
  args.ahead = ahead_of(op, ahead, pool_view);
  args.launch = launch_on(stream, pdl);
  nb::gil_scoped_release released;
  gpu::decode_attention(args);
}

void embed(const Tensor& out, const Tensor& table, const Tensor& token_ids, const OptionalTensor& sources,
           const OptionalTensor& newest, uintptr_t stream, bool pdl) {
  const char* op = "embed";
  View out_view(op, "out", out);
  View table_view(op, "table", table);
  View ids_view(op, "token_ids", token_ids);
  EmbedArgs args{};
  args.dtype = table_view.rank(2).contiguous().dtype();
  args.vocab = static_cast<int32_t>(table_view.size(0));
  args.hidden = static_cast<int32_t>(table_view.size(1));
  args.num_tokens = static_cast<int32_t>(ids_view.rank(1).of(Scalar::kInt32).contiguous().like(table_view).size(0));
  out_view.shape({args.num_tokens, args.hidden}).of(args.dtype).contiguous().like(table_view);
  args.sources = vector<const int32_t>(op, "sources", sources, Scalar::kInt32, args.num_tokens, table_view);
  args.newest = vector<const int32_t>(op, "newest", newest, Scalar::kInt32, -1, table_view);
  if (args.sources != nullptr && args.newest == nullptr) throw OpError("embed: sources need newest");
  args.out = out_view.data();
  args.table = table_view.data();
  args.token_ids = ids_view.data<const int32_t>();
  args.launch = launch_on(stream, pdl);
  run(table_view, args, cpu::embed, gpu::embed);
}

void advance(const Tensor& out, const Tensor& table, const Tensor& newest, const Tensor& rows,
             const Tensor& context_lens, const Tensor& positions, const Tensor& slots, const Tensor& block_tables,
             int32_t block_size, uintptr_t stream, bool pdl) {
  const char* op = "advance";
  View out_view(op, "out", out);
  View table_view(op, "table", table);
  View newest_view(op, "newest", newest);
  View rows_view(op, "rows", rows);
  View lens_view(op, "context_lens", context_lens);
  View positions_view(op, "positions", positions);
  View slots_view(op, "slots", slots);
  View tables_view(op, "block_tables", block_tables);
  AdvanceArgs args{};
  args.dtype = table_view.rank(2).contiguous().dtype();
  args.vocab = static_cast<int32_t>(table_view.size(0));
  args.hidden = static_cast<int32_t>(table_view.size(1));
  tables_view.rank(2).of(Scalar::kInt32).contiguous().like(table_view);
  args.num_seqs = static_cast<int32_t>(tables_view.size(0));
  args.max_blocks_per_seq = static_cast<int32_t>(tables_view.size(1));
  if (block_size < 1) throw OpError("advance: block_size must be positive");
  args.block_size = block_size;
  out_view.shape({args.num_seqs, args.hidden}).of(args.dtype).contiguous().like(table_view);
  newest_view.rank(1).of(Scalar::kInt32).contiguous().like(table_view);
  for (View* view : {&rows_view, &lens_view, &positions_view}) {
    view->shape({args.num_seqs}).of(Scalar::kInt32).contiguous().like(table_view);
  }
  slots_view.shape({args.num_seqs}).of(Scalar::kInt64).contiguous().like(table_view);
  args.out = out_view.data();
  args.table = table_view.data();
  args.newest = newest_view.data<const int32_t>();
  args.rows = rows_view.data<const int32_t>();
  args.context_lens = lens_view.data<int32_t>();
  args.positions = positions_view.data<int32_t>();
  args.slots = slots_view.data<int64_t>();
  args.block_tables = tables_view.data<const int32_t>();
  args.launch = launch_on(stream, pdl);
  run(table_view, args, cpu::advance, gpu::advance);
}

void sample(const Tensor& tokens, const Tensor& logits, const OptionalTensor& temperature, const OptionalTensor& top_k,
            const OptionalTensor& top_p, const OptionalTensor& min_p, const OptionalTensor& seeds,
            const OptionalTensor& positions, const OptionalTensor& newest, const OptionalTensor& targets,
            const OptionalTensor& best, const OptionalTensor& workspace, uintptr_t stream, bool pdl) {
  const char* op = "sample";
  View tokens_view(op, "tokens", tokens);
  View logits_view(op, "logits", logits);
  SampleArgs args{};
  args.dtype = logits_view.rank(2).dtype();
  args.num_rows = static_cast<int32_t>(logits_view.size(0));
  args.vocab = static_cast<int32_t>(logits_view.size(1));
  args.logits_stride = logits_view.stride(0);
  if (logits_view.stride(1) != 1 || (args.num_rows > 1 && args.logits_stride < args.vocab)) {
    logits_view.fail("must have dense rows that do not overlap");
  }
  args.logits_stride = std::max<int64_t>(args.logits_stride, args.vocab);
  tokens_view.shape({args.num_rows}).of(Scalar::kInt32).contiguous().like(logits_view);
  const int64_t rows = args.num_rows;
  args.temperature = vector<const float>(op, "temperature", temperature, Scalar::kFloat32, rows, logits_view);
  args.top_k = vector<const int32_t>(op, "top_k", top_k, Scalar::kInt32, rows, logits_view);
  args.top_p = vector<const float>(op, "top_p", top_p, Scalar::kFloat32, rows, logits_view);
  args.min_p = vector<const float>(op, "min_p", min_p, Scalar::kFloat32, rows, logits_view);
  args.seeds = vector<const uint64_t>(op, "seeds", seeds, Scalar::kInt64, rows, logits_view);
  args.positions = vector<const int32_t>(op, "positions", positions, Scalar::kInt32, rows, logits_view);
  const bool complete = args.top_k != nullptr && args.top_p != nullptr && args.min_p != nullptr &&
                        args.seeds != nullptr && args.positions != nullptr;
  if (args.temperature != nullptr && !complete) {
    throw OpError("sample: temperature needs top_k, top_p, min_p, seeds and positions");
  }
  args.newest = vector<int32_t>(op, "newest", newest, Scalar::kInt32, -1, logits_view);
  args.targets = vector<const int64_t>(op, "targets", targets, Scalar::kInt64, rows, logits_view);
  if ((args.newest == nullptr) != (args.targets == nullptr)) throw OpError("sample: newest and targets go together");
  args.best = reinterpret_cast<uint64_t*>(vector<int64_t>(op, "best", best, Scalar::kInt64, rows, logits_view));
  if (args.best != nullptr && logits_view.on_cpu()) throw OpError("sample: best is for GPUs");
  if (!workspace.object.is_none()) {
    View view(op, "workspace", workspace);
    args.workspace = view.rank(1).of(Scalar::kUInt8).contiguous().like(logits_view).data();
    args.workspace_bytes = static_cast<size_t>(view.size(0));
  }
  args.tokens = tokens_view.data<int32_t>();
  args.logits = logits_view.data();
  args.launch = launch_on(stream, pdl);
  run(logits_view, args, cpu::sample, gpu::sample);
}

}  // namespace

void init_step_ops(nb::module_& module) {
  module.def("plan_attention", plan_attention, "context_lens"_a, "q_heads"_a, "kv_heads"_a, "head_dim"_a, "workspace"_a,
             "stream"_a, "least_tokens"_a = 0, "fixed"_a = false, "pdl"_a = false);
  module.def("plan_prefill", plan_prefill, "query_start"_a, "context_lens"_a, "q_heads"_a, "kv_heads"_a, "head_dim"_a,
             "workspace"_a, "stream"_a, "pdl"_a = false);
  module.def("decode_attention", decode_attention, "out"_a, "qkv"_a, "kv_pool"_a, "layer"_a, "block_tables"_a,
             "context_lens"_a, "cos_sin"_a, "scale"_a, "workspace"_a, "bias"_a.none(), "q_norm"_a.none(),
             "k_norm"_a.none(), "norm_eps"_a, "stream"_a, "planned"_a = false, "fixed"_a = false,
             "ahead"_a = nb::none(), "pdl"_a = false);
  module.def("embed", embed, "out"_a, "table"_a, "token_ids"_a, "sources"_a.none(), "newest"_a.none(), "stream"_a,
             "pdl"_a = false);
  module.def("advance", advance, "out"_a, "table"_a, "newest"_a, "rows"_a, "context_lens"_a, "positions"_a, "slots"_a,
             "block_tables"_a, "block_size"_a, "stream"_a, "pdl"_a = false);
  module.def("sample", sample, "tokens"_a, "logits"_a, "temperature"_a.none(), "top_k"_a.none(), "top_p"_a.none(),
             "min_p"_a.none(), "seeds"_a.none(), "positions"_a.none(), "newest"_a.none(), "targets"_a.none(),
             "best"_a.none(), "workspace"_a.none(), "stream"_a, "pdl"_a = false);
  module.def("sample_workspace_bytes", gpu::sample_workspace_bytes, "max_rows"_a);
}

}  // namespace octavo::python
