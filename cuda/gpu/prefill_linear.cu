// Many-row matmuls: checks, the tile for a shape, tensor maps.
#include "gpu/prefill_linear.cuh"

#include "gpu/element.cuh"
#include "gpu/tensor_map.cuh"

namespace octavo::gpu {
namespace {

int ceil_divide(int a, int b) { return (a + b - 1) / b; }

PrefillTiles tiles_of(const PrefillLinearArgs& args, int columns) {
  const int out_columns = args.kind == PrefillLinear::kGateUp ? columns / 2 : columns;
  PrefillTiles tiles{};
  tiles.rows = ceil_divide(args.num_tokens, kTileRows * kClusterBlocks);
  tiles.columns = ceil_divide(args.out_features, out_columns);
  tiles.count = tiles.rows * tiles.columns;
  tiles.steps = ceil_divide(args.in_features, 64);
  tiles.out_features = args.out_features;
  tiles.bias = args.bias;
  return tiles;
}

// What part of the tensor cores' peak a launch with these tiles should reach: the products asked for over the time of
// the busiest cluster, in columns of a tile's one step. The constants are from timings on an H200; only their ratios
// matter.
double efficiency(const PrefillLinearArgs& args, int columns) {
  constexpr double kTileCost = 256, kLaunchCost = 1280;  // beside the products
  const double step_cost = columns == 256 ? 256 : columns == 192 ? 200 : 150;
  const PrefillTiles tiles = tiles_of(args, columns);
  const int clusters = current_device().multiprocessors / kClusterBlocks;
  const double rounds = ceil_divide(tiles.count, clusters);
  const double halves = args.kind == PrefillLinear::kGateUp ? 2 : 1;
  const double work = halves * args.num_tokens * args.out_features * tiles.steps / (kTileRows * kClusterBlocks);
  return work / clusters / (rounds * (tiles.steps * step_cost + kTileCost) + kLaunchCost);
}

int best_columns(const PrefillLinearArgs& args) {
  int best = 0;
  for (const int columns : {256, 192, 128}) {
    if (args.kind == PrefillLinear::kGateUp && columns == 192) continue;
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
  require(args.bias == nullptr || args.kind == PrefillLinear::kPlain, "prefill_linear: a bias only without fusion");
  if (args.num_tokens == 0) return;
  const int columns = args.tile_columns != 0 ? args.tile_columns : best_columns(args);
  require(columns == 128 || columns == 256 || (columns == 192 && args.kind != PrefillLinear::kGateUp),
          "prefill_linear: tiles have 128, 192 or 256 columns");
  const int weight_rows = args.kind == PrefillLinear::kGateUp ? 2 * args.out_features : args.out_features;
  const PrefillMaps maps{
      map_of(args.x, args.dtype, args.num_tokens, args.in_features, kTileRows),
      map_of(args.weight, args.dtype, weight_rows, args.in_features, columns / kClusterBlocks),
      map_of(args.out, args.dtype, args.num_tokens, args.out_features, 64),
  };
  with_element(args.dtype, [&]<class T>(T) {
    PrefillLinearKernels<T>::launch(args.kind, columns, tiles_of(args, columns), maps, args.launch);
  });
}

}  // namespace octavo::gpu
