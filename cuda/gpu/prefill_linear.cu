// Many-row matmuls: checks, the tile for a shape, tensor maps.
#include "gpu/prefill_linear.cuh"

#include <algorithm>
#include <bit>

#include "gpu/element.cuh"
#include "gpu/tensor_map.cuh"

namespace octavo::gpu {
namespace {

int ceil_divide(int a, int b) { return (a + b - 1) / b; }

int clusters() { return current_device().multiprocessors / kClusterBlocks; }

// What the busiest cluster takes: the first. In columns of a tile's one step; the constants are from timings on an
// H200, and only their ratios matter.
double cost(const PrefillTiles& tiles, int columns) {
  constexpr double kTileCost = 256, kLaunchCost = 1280, kNarrowStepCost = 226;
  const double step_cost = columns == 256 ? 256 : columns == 192 ? 200 : 150;
  const int rounds = ceil_divide(tiles.count(), clusters()), wide = ceil_divide(tiles.wide(), clusters());
  return wide * (tiles.steps * step_cost + kTileCost) + (rounds - wide) * (tiles.steps * kNarrowStepCost + kTileCost) +
         kLaunchCost;
}

// In as many rounds as with wide tiles alone, but all of them full; or the same tiles, where they are.
PrefillTiles with_narrow(const PrefillTiles& all_wide, int columns) {
  constexpr int kNarrow = kNarrowColumns / 2;
  const int wide = columns / 2, out_features = all_wide.out_features;
  const int most = ceil_divide(all_wide.count(), clusters()) * clusters() / all_wide.rows;  // columns of tiles
  PrefillTiles tiles = all_wide;
  tiles.columns = std::max(0, ceil_divide(out_features - most * kNarrow, wide - kNarrow));
  // A narrow tile must not reach beyond the last column: a wide one may.
  if (tiles.columns == 0 && out_features % kNarrow != 0) tiles.columns = 1;
  tiles.narrow_columns = std::max(0, ceil_divide(out_features - tiles.columns * wide, kNarrow));
  return cost(tiles, columns) < cost(all_wide, columns) ? tiles : all_wide;
}

PrefillTiles tiles_of(const PrefillLinearArgs& args, int columns) {
  const bool gate_up = args.kind == PrefillLinear::kGateUp;
  PrefillTiles tiles{};
  tiles.rows = ceil_divide(args.num_tokens, kTileRows * kClusterBlocks);
  tiles.columns = ceil_divide(args.out_features, gate_up ? columns / 2 : columns);
  tiles.steps = ceil_divide(args.in_features, 64);
  tiles.num_tokens = args.num_tokens;
  tiles.out_features = args.out_features;
  tiles.bias = args.bias;
  return gate_up && columns == 256 ? with_narrow(tiles, columns) : tiles;
}

// What part of the tensor cores' peak a launch with these tiles should reach: the products asked for over the time of
// the busiest cluster.
double efficiency(const PrefillLinearArgs& args, int columns) {
  const PrefillTiles tiles = tiles_of(args, columns);
  const double halves = args.kind == PrefillLinear::kGateUp ? 2 : 1;
  const double work = halves * args.num_tokens * args.out_features * tiles.steps / (kTileRows * kClusterBlocks);
  return work / clusters() / cost(tiles, columns);
}

// Tiles of kGateUp are of two parts, and those of kQkv hold whole heads, of a width that the kernel was compiled for.
bool is_tile(PrefillLinear kind, int columns, int head_dim) {
  if (columns != 128 && columns != 192 && columns != 256) return false;
  if (kind == PrefillLinear::kGateUp) return columns != 192;
  return kind != PrefillLinear::kQkv || (columns % head_dim == 0 && head_dim >= 64);
}

// 0: there are none.
int best_columns(const PrefillLinearArgs& args, int head_dim = 0) {
  int best = 0;
  for (const int columns : {256, 192, 128}) {
    if (!is_tile(args.kind, columns, head_dim)) continue;
    if (best == 0 || efficiency(args, columns) > efficiency(args, best)) best = columns;
  }
  return best;
}

bool served(const PrefillLinearArgs& args) {
  constexpr int kMost = 1 << 29;
  return args.dtype != DType::kFloat32 && args.out_features % 8 == 0 && args.in_features % 8 == 0 &&
         args.out_features < kMost && args.in_features < kMost && current_device().has_warpgroups;
}

CUtensorMap map_of(const void* data, DType dtype, int rows, int columns, int box_rows) {
  return swizzled_map<2>(data, dtype, {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)},
                         {static_cast<cuuint64_t>(columns) * 2}, {64, static_cast<cuuint32_t>(box_rows)});
}

}  // namespace

float prefill_linear_efficiency(PrefillLinear kind, int32_t num_tokens, int32_t out_features, int32_t in_features,
                                DType dtype) {
  PrefillLinearArgs args{};
  args.kind = kind;
  args.num_tokens = num_tokens;
  args.out_features = out_features;
  args.in_features = in_features;
  args.dtype = dtype;
  if (num_tokens == 0 || !served(args)) return 0.0f;
  return static_cast<float>(efficiency(args, best_columns(args)));
}

void prefill_linear(const PrefillLinearArgs& args) {
  require(served(args), "prefill_linear: this shape, dtype or device is not served");
  require(args.kind != PrefillLinear::kQkv, "prefill_linear: this kind is prefill_qkv's");
  require(args.bias == nullptr || args.kind == PrefillLinear::kPlain, "prefill_linear: a bias only without fusion");
  if (args.num_tokens == 0) return;
  const int columns = args.tile_columns != 0 ? args.tile_columns : best_columns(args);
  require(is_tile(args.kind, columns, 0), "prefill_linear: tiles have 128, 192 or 256 columns");
  const int weight_rows = args.kind == PrefillLinear::kGateUp ? 2 * args.out_features : args.out_features;
  const PrefillTiles tiles = tiles_of(args, columns);
  PrefillMaps maps{};
  maps.x = map_of(args.x, args.dtype, args.num_tokens, args.in_features, kTileRows);
  maps.weight = map_of(args.weight, args.dtype, weight_rows, args.in_features, columns / kClusterBlocks);
  maps.out = map_of(args.out, args.dtype, args.num_tokens, args.out_features, 64);
  if (tiles.narrow_columns > 0) {
    constexpr cuuint64_t kColumns = kNarrowColumns / 2;
    maps.narrow_weight =
        map_of(args.weight, args.dtype, weight_rows, args.in_features, kNarrowColumns / kClusterBlocks);
    maps.narrow_out = swizzled_map<3>(
        args.out, args.dtype,
        {kColumns, static_cast<cuuint64_t>(tiles.narrow_columns), static_cast<cuuint64_t>(args.num_tokens)},
        {2 * kColumns, static_cast<cuuint64_t>(args.out_features) * 2}, {64, 1, 64});
  }
  with_element(args.dtype,
               [&]<class T>(T) { PrefillLinearKernels<T>::launch(args.kind, columns, tiles, maps, args.launch); });
}

float prefill_qkv_efficiency(int32_t num_tokens, int32_t qkv_features, int32_t head_dim, int32_t in_features,
                             DType dtype) {
  PrefillLinearArgs args{};
  args.kind = PrefillLinear::kQkv;
  args.num_tokens = num_tokens;
  args.out_features = qkv_features;
  args.in_features = in_features;
  args.dtype = dtype;
  const int columns = best_columns(args, head_dim);
  if (num_tokens == 0 || columns == 0 || !served(args)) return 0.0f;
  return static_cast<float>(efficiency(args, columns));
}

void prefill_qkv(const PrefillQkvArgs& args) {
  const WriteKvArgs& heads = args.heads;
  const KvPool& pool = heads.pool;
  PrefillLinearArgs product{};
  product.kind = PrefillLinear::kQkv;
  product.num_tokens = heads.num_tokens;
  product.out_features = (heads.q_heads + 2 * pool.kv_heads) * pool.head_dim;
  product.in_features = args.in_features;
  product.bias = heads.bias;
  product.dtype = pool.dtype;
  require(served(product), "prefill_qkv: this shape, dtype or device is not served");
  require(heads.rotary_dim == pool.head_dim, "prefill_qkv: the whole head must rotate");
  require(std::has_single_bit(static_cast<unsigned>(pool.block_size)),
          "prefill_qkv: block_size must be a power of two");
  require(pool.num_blocks * pool.block_size < int64_t{1} << 31, "prefill_qkv: the pool has too many slots");
  if (heads.num_tokens == 0) return;
  const int columns = args.tile_columns != 0 ? args.tile_columns : best_columns(product, pool.head_dim);
  require(is_tile(product.kind, columns, pool.head_dim), "prefill_qkv: no tiles for this head_dim");
  PrefillTiles tiles = tiles_of(product, columns);
  tiles.heads = {heads.q_norm_weight,
                 heads.k_norm_weight,
                 heads.norm_eps,
                 heads.cos_sin,
                 heads.positions,
                 heads.slots,
                 static_cast<uint16_t*>(pool.data) + heads.layer * pool.layer_stride(),
                 pool.block_stride(),
                 std::countr_zero(static_cast<unsigned>(pool.block_size)),
                 pool.head_dim,
                 heads.q_heads,
                 pool.kv_heads};
  PrefillMaps maps{};
  maps.x = map_of(args.x, pool.dtype, heads.num_tokens, args.in_features, kTileRows);
  maps.weight = map_of(args.weight, pool.dtype, product.out_features, args.in_features, columns / kClusterBlocks);
  if (heads.q_heads > 0) {
    maps.out = map_of(heads.query_out, pool.dtype, heads.num_tokens, heads.q_heads * pool.head_dim, 64);
  }
  with_element(pool.dtype,
               [&]<class T>(T) { PrefillLinearKernels<T>::launch(product.kind, columns, tiles, maps, heads.launch); });
}

}  // namespace octavo::gpu
