#include "gpu/decode_linear_plan.cuh"

#include <algorithm>

namespace octavo::gpu::decode {
namespace {

constexpr int kSwizzleBytes = 1024;
constexpr int kOneBlockPerMultiprocessor = 116 * 1024;  // more than half of sm_90's 227 KiB
constexpr int kInFlightBytes = 132 * 54 * 1024;         // on the whole GPU: what H200's memory wants, and no more

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

// The smallest cluster that leaves a block no more than `most` bytes of activations to fetch.
int cluster_for(const Shape& shape, int most, int least, int blocks, const Target& target) {
  if (!target.tensor_copies) return 1;
  int cluster = least;
  const int64_t bytes = int64_t{2} * columns_of(shape.batch) * shape.in_features;
  while (cluster < 8 && bytes / cluster > most) cluster *= 2;
  // A GPC's multiprocessors do not divide by 4 or 8: an eleventh of the GPU is out of reach for such clusters.
  if (cluster > 2 && blocks > target.multiprocessors * 10 / 11) cluster = 2;
  return cluster;
}

Cut cut_add_residual(const Shape& shape, const Target& target) {
  const int own = square_sum_channels(shape.out_rows);
  const int blocks = shape.out_rows / own;
  const bool deep = target.tensor_copies && own == 16 && shape.in_features >= 96 * kBlock;
  int cluster = cluster_for(shape, deep ? 320 * 1024 : 208 * 1024, deep ? 4 : 1, blocks, target);
  while (blocks % cluster != 0) cluster /= 2;
  Cut cut{};
  cut.rows = own * cluster;
  cut.cluster = cluster;
  cut.chains = deep ? 16 : own <= 32 ? 8 : 4;
  cut.row_tiles = deep || own > 16 ? 2 : 1;
  cut.window_bytes = kInFlightBytes * 3 / 2 / blocks;
  return cut;
}

Cut cut_store(const Shape& shape, const Target& target) {
  const int most = target.tensor_copies ? 192 : 64;
  Cut cut{};
  cut.rows = balanced_rows(shape.out_rows, 8, most, target.multiprocessors);
  const int tiles = ceil_div(cut.rows, 16);
  cut.row_tiles = tiles > 4 ? 2 : 1;
  cut.chains = std::min(8, power_of_two_up_to(std::max(1, 8 / ceil_div(tiles, cut.row_tiles))));
  cut.cluster = cut.chains >= 4 ? std::min(2, cluster_for(shape, 208 * 1024, 1, 0, target)) : 1;
  cut.rows *= cut.cluster;
  const bool many_tiles = ceil_div(shape.out_rows, cut.rows) > target.multiprocessors;
  cut.window_bytes = many_tiles ? 120 * 1024 : kInFlightBytes / target.multiprocessors;
  return cut;
}

Cut cut_silu_mul(const Shape& shape, const Target& target) {
  const int most = target.tensor_copies ? 192 : 64;
  Cut cut{};
  cut.rows = balanced_rows(shape.out_rows, 16, most, target.multiprocessors);
  const int tiles = cut.rows / 16;
  cut.row_tiles = tiles > 4 ? 2 : 1;
  cut.chains = tiles == 1 ? 8 : tiles <= 3 ? 4 : tiles <= 12 ? 2 : 1;
  cut.cluster = 1;
  cut.window_bytes = kInFlightBytes / target.multiprocessors;
  return cut;
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
  plan.cluster = cut.cluster;
  plan.row_tiles = cut.row_tiles;
  plan.row_warps = ceil_div(cut.rows, 16 * cut.row_tiles);
  plan.k_warps = cut.chains / cut.cluster;
  if (plan.k_warps < 1 || plan.consumer_warps() > kMaxConsumerWarps || cut.rows % (4 * cut.cluster) != 0) return false;
  plan.own_rows = cut.rows / cut.cluster;
  const int quads = plan.own_rows / (shape.epilogue == Epilogue::kSiluMul ? 8 : 4);
  while ((1 << plan.quad_bits) < quads) ++plan.quad_bits;
  plan.rounds = ceil_div(shape.in_features / kBlock, cut.chains);
  plan.tiles = ceil_div(shape.out_rows, cut.rows);
  plan.grid = std::min(plan.tiles, target.multiprocessors / cut.cluster) * cut.cluster;
  const bool one_tile = plan.tiles * cut.cluster <= plan.grid;
  if (cut.cluster > 1 && !one_tile) return false;  // the exchange happens once

  // Rows of the reduction buffer lie 4 modulo 16 words apart: fragments are then written without bank conflicts.
  plan.reduce_stride = round_up(cut.rows, 16) + 4;
  const int reduce_bytes = round_up(plan.k_warps * plan.columns * plan.reduce_stride * 4, kSwizzleBytes);
  const int exchange_bytes = cut.cluster > 1 ? cut.cluster * plan.columns * plan.own_rows * 4 : 0;
  // Warps of the last tile read up to 16 * row_tiles rows beyond it.
  const int overrun_bytes = round_up((16 * cut.row_tiles * plan.row_warps - cut.rows) * 2 * kBlock, kSwizzleBytes);
  const int ring_bytes =
      target.shared_bytes - kHeaderBytes - overrun_bytes - exchange_bytes - (one_tile ? 0 : reduce_bytes);

  const int line_bytes = 2 * kBlock;
  plan.stage_blocks = plan.k_warps;
  const auto stage_bytes = [&] { return plan.stage_blocks * (cut.rows + plan.columns) * line_bytes; };
  while (plan.stage_blocks > 1 &&
         (plan.stage_blocks * cut.rows * line_bytes > 20 * 1024 || 3 * stage_bytes() > ring_bytes)) {
    plan.stage_blocks /= 2;
  }
  const int all_stages = plan.rounds * (plan.k_warps / plan.stage_blocks) * (one_tile ? 1 : 2);
  plan.stages = std::min({ring_bytes / stage_bytes(), all_stages, kMaxStages});
  if (plan.stages < std::min(2, all_stages)) return false;
  const int weight_stage_bytes = plan.stage_blocks * cut.rows * line_bytes;
  plan.window = std::clamp(cut.window_bytes / weight_stage_bytes, std::min(2, plan.stages), plan.stages);

  const int ring = plan.stages * stage_bytes();
  plan.reduce_offset = one_tile ? kHeaderBytes : kHeaderBytes + ring + overrun_bytes;
  plan.exchange_offset =
      one_tile ? kHeaderBytes + std::max(ring + overrun_bytes, reduce_bytes) : plan.reduce_offset + reduce_bytes;
  plan.shared_bytes = plan.exchange_offset + exchange_bytes;
  if (plan.shared_bytes > target.shared_bytes) return false;
  if (target.tensor_copies) plan.shared_bytes = std::max(plan.shared_bytes, kOneBlockPerMultiprocessor);
  return true;
}

bool find_plan(const Shape& shape, const Target& target, Plan& plan) {
  for (Cut cut = choose_cut(shape, target);; cut.cluster /= 2, cut.rows /= 2) {
    if (make_plan(shape, cut, target, plan)) return true;
    if (cut.cluster == 1) return false;
  }
}

}  // namespace octavo::gpu::decode
