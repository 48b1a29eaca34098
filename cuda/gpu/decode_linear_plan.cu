#include "gpu/decode_linear_plan.cuh"

#include <algorithm>
#include <iterator>

#include "octavo/decode_linear.h"

namespace octavo::gpu::decode {
namespace {

constexpr int kSwizzleBytes = 1024;
constexpr int kInFlightBytes = 132 * 76 * 1024;  // on the whole GPU: what H200's memory wants, and no more

int ceil_div(int a, int b) { return (a + b - 1) / b; }
int round_up(int a, int to) { return ceil_div(a, to) * to; }

int columns_of(int batch) { return batch <= 8 ? 8 : batch <= 16 ? 16 : batch <= 32 ? 32 : 64; }

int power_of_two_up_to(int limit) {
  int power = 1;
  while (2 * power <= limit) power *= 2;
  return power;
}

// Rows for at most one tile a multiprocessor, in steps of `step`; large outputs take several tiles of the size that
// leaves the busiest multiprocessor least to do.
int balanced_rows(int out_rows, int step, int most, int multiprocessors) {
  const int rows = round_up(ceil_div(out_rows, multiprocessors), step);
  if (rows <= most) return rows;
  int best = most;
  const auto busiest = [&](int size) { return ceil_div(ceil_div(out_rows, size), multiprocessors) * size; };
  for (int size = most - 16; size >= most / 2; size -= 16) {
    if (busiest(size) < busiest(best)) best = size;
  }
  return best;
}

Cut cut_add_residual(const Shape& shape, const Target& target) {
  const int own = square_sum_channels(shape.out_rows);
  const int blocks = shape.out_rows / own;
  // A block that took all of a long K would have too many activations to fetch.
  const bool deep = target.tensor_copies && own <= 16 && shape.in_features > 2 * shape.out_rows && blocks % 4 == 0;
  Cut cut{};
  cut.cluster = deep ? 4 : 1;
  cut.rows = own * cut.cluster;
  cut.chains = deep ? 16 : own <= 32 ? 8 : 4;
  cut.row_tiles = deep || own > 16 ? 2 : 1;
  cut.window_bytes = kInFlightBytes / blocks;
  return cut;
}

Cut cut_store(const Shape& shape, const Target& target) {
  const int most = target.tensor_copies ? 192 : 64;
  Cut cut{};
  cut.rows = balanced_rows(shape.out_rows, 16, most, target.multiprocessors);
  const int tiles = ceil_div(cut.rows, 16);
  cut.row_tiles = tiles > 4 ? 2 : 1;
  cut.chains = std::min(8, power_of_two_up_to(std::max(1, 8 / ceil_div(tiles, cut.row_tiles))));
  cut.cluster = 1;
  const bool many_tiles = ceil_div(shape.out_rows, cut.rows) > target.multiprocessors;
  cut.window_bytes = many_tiles ? 72 * 1024 : kInFlightBytes / target.multiprocessors;
  return cut;
}

Cut cut_silu_mul(const Shape& shape, const Target& target) {
  const int most = target.tensor_copies ? 192 : 64;
  Cut cut{};
  cut.rows = balanced_rows(shape.out_rows, 16, most, target.multiprocessors);
  const int tiles = cut.rows / 16;
  cut.row_tiles = tiles > 4 ? 2 : 1;
  cut.chains = tiles == 1 ? 8 : tiles == 2 || (tiles == 3 && target.tensor_copies) ? 4 : tiles <= 12 ? 2 : 1;
  cut.cluster = 1;
  cut.window_bytes = kInFlightBytes / target.multiprocessors;
  return cut;
}

// The narrowest that serves such tiles.
int warpgroup_shape(Epilogue epilogue, const Cut& cut, int chains) {
  int found = kNoWarpgroup;
  for (int i = 0; i < static_cast<int>(std::size(kWarpgroupShapes)); ++i) {
    const WarpgroupShape& shape = kWarpgroupShapes[i];
    const bool fits = epilogue == Epilogue::kAddResidual ? shape.rows == cut.rows : shape.rows >= cut.rows;
    if (shape.epilogue != epilogue || !fits || shape.chains != chains || shape.row_tiles != cut.row_tiles ||
        shape.cluster != cut.cluster) {
      continue;
    }
    if (found == kNoWarpgroup || shape.rows < kWarpgroupShapes[found].rows) found = i;
  }
  return found;
}

}  // namespace

int square_sum_channels(int hidden) { return hidden < 1024 ? 8 : hidden <= 2048 ? 16 : hidden <= 4096 ? 32 : 64; }

Cut choose_cut(const Shape& shape, const Target& target) {
  switch (shape.epilogue) {
    case Epilogue::kStore:
      return cut_store(shape, target);
    case Epilogue::kSiluMul:
      return cut_silu_mul(shape, target);
    case Epilogue::kAddResidual:
      break;
  }
  return cut_add_residual(shape, target);
}

bool make_plan(const Shape& shape, const Cut& cut, const Target& target, Plan& plan) {
  plan = {};
  plan.columns = columns_of(shape.batch);
  plan.rows = cut.rows;
  while (plan.cluster() < cut.cluster) ++plan.cluster_bits;
  plan.row_tiles = cut.row_tiles;
  plan.chains = cut.chains / cut.cluster;
  if (plan.chains < 1) return false;
  plan.warpgroup_shape = target.warpgroups && plan.columns == kMaxDecodeBatch
                             ? warpgroup_shape(shape.epilogue, cut, plan.chains)
                             : kNoWarpgroup;
  const bool by_warpgroup = plan.warpgroup_shape != kNoWarpgroup;
  const int most_warps =
      (plan.columns <= kFewColumns ? kMaxWarps : kMaxWarpsManyColumns) - target.producer_warps(plan.columns);
  plan.row_groups = target.warpgroups && plan.columns == 32 && cut.row_tiles == 2 &&
                    4 * ceil_div(cut.rows, 64) * plan.chains <= most_warps;
  plan.row_warps = plan.row_groups ? 4 * ceil_div(cut.rows, 64) : ceil_div(cut.rows, 16 * cut.row_tiles);
  plan.column_warps = plan.columns > 32 ? 2 : 1;
  if (!by_warpgroup && plan.consumer_warps() > most_warps) return false;
  if (cut.rows % (4 * cut.cluster) != 0) return false;
  plan.own_rows = cut.rows / cut.cluster;
  plan.quads = plan.own_rows / (shape.epilogue == Epilogue::kSiluMul ? 8 : 4);
  plan.column_factor = (1 << 20) / plan.quads + 1;
  plan.rounds = ceil_div(shape.in_features / kBlock, cut.chains);
  plan.tiles = ceil_div(shape.out_rows, cut.rows);
  plan.grid = std::min(plan.tiles, target.multiprocessors / cut.cluster) * cut.cluster;
  const bool one_tile = plan.tiles * cut.cluster <= plan.grid;
  if (cut.cluster > 1 && !one_tile) return false;  // the exchange happens once

  // Rows of the reduction buffer lie 4 modulo 16 words apart: fragments are then written without bank conflicts.
  plan.reduce_stride = round_up(cut.rows, 16) + 4;
  plan.direct = shape.epilogue == Epilogue::kStore && cut.chains == 1;
  const int reduce_bytes =
      plan.direct || by_warpgroup ? 0 : round_up(plan.chains * plan.columns * plan.reduce_stride * 4, kSwizzleBytes);
  const int exchange_bytes = cut.cluster > 1 ? cut.cluster * plan.columns * plan.own_rows * 4 : 0;
  // What lies behind a tile, or behind the activations, is multiplied, too, where an instruction takes more.
  const int lines_behind =
      by_warpgroup ? std::max(kWarpgroupShapes[plan.warpgroup_shape].rows - cut.rows, kMaxDecodeBatch - plan.columns)
                   : plan.row_warps * 16 * (plan.row_groups ? 1 : cut.row_tiles) - cut.rows;
  const int overrun_bytes = round_up(lines_behind * 2 * kBlock, kSwizzleBytes);
  const int best_bytes = plan.direct && !by_warpgroup ? plan.consumer_warps() * plan.columns * 8 : 0;
  const int ring_bytes =
      target.shared_bytes - kHeaderBytes - overrun_bytes - exchange_bytes - best_bytes - (one_tile ? 0 : reduce_bytes);

  const int line_bytes = 2 * kBlock;
  plan.stage_blocks = plan.chains;
  const auto stage_bytes = [&] { return plan.stage_blocks * (cut.rows + plan.columns) * line_bytes; };
  while (plan.stage_blocks > 1 &&
         (plan.stage_blocks * cut.rows * line_bytes > 20 * 1024 || 3 * stage_bytes() > ring_bytes)) {
    plan.stage_blocks /= 2;
  }
  const int all_stages = plan.rounds * (plan.chains / plan.stage_blocks) * (one_tile ? 1 : 2);
  plan.stages = std::min({ring_bytes / stage_bytes(), all_stages, kMaxStages});
  if (plan.stages < std::min(2, all_stages)) return false;
  const int weight_stage_bytes = plan.stage_blocks * cut.rows * line_bytes;
  plan.window = std::clamp(cut.window_bytes / weight_stage_bytes, std::min(2, plan.stages), plan.stages);

  const int ring = plan.stages * stage_bytes();
  plan.reduce_offset = one_tile ? kHeaderBytes : kHeaderBytes + ring + overrun_bytes;
  plan.exchange_offset =
      one_tile ? kHeaderBytes + std::max(ring + overrun_bytes, reduce_bytes) : plan.reduce_offset + reduce_bytes;
  plan.best_offset = plan.exchange_offset + exchange_bytes;
  plan.shared_bytes = plan.best_offset + best_bytes;
  return plan.shared_bytes <= target.shared_bytes;
}

bool find_plan(const Shape& shape, const Target& target, Plan& plan) {
  return make_plan(shape, choose_cut(shape, target), target, plan);
}

}  // namespace octavo::gpu::decode
