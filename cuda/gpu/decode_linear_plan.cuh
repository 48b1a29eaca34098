// How a decode matmul is cut into thread blocks, warps and pipeline stages. Host code only; the choices are all in
// decode_linear_plan.cu.
#pragma once

#include <cstdint>

namespace octavo::gpu::decode {

enum class Epilogue : int { kStore, kSiluMul, kAddResidual };

constexpr int kBlock = 64;          // elements of K in a k-block: a 128-byte line of each row
constexpr int kHeaderBytes = 1024;  // barriers and 1 / rms, in front of the ring
constexpr int kMaxStages = 24;
constexpr int kFewColumns = 16;  // up to here: smaller blocks of more registers, and activations by cp.async
constexpr int kMaxWarps = 17;    // of a block for few columns
constexpr int kMaxWarpsManyColumns = 26;
// Warps whose registers a multiprocessor has room for. For few columns so many that blocks of twelve warps leave room
// for the attention kernel's.
template <int kColumns>
constexpr int kRegisterWarps = kColumns <= kFewColumns ? 23 : kMaxWarpsManyColumns;
constexpr int kMaxParts = 128;  // of a row's square sum

struct Shape {
  Epilogue epilogue;
  int out_rows;  // rows of the weight matrix
  int in_features;
  int batch;
};

// What the choices depend on.
struct Target {
  int multiprocessors;
  int shared_bytes;    // that one block may have
  bool tensor_copies;  // bulk tensor copies and clusters (sm_90, sm_100); else cp.async, whole K in every block
  bool warpgroups;     // wgmma (sm_90a)

  constexpr int producer_warps(int columns) const { return !tensor_copies ? 5 : columns <= kFewColumns ? 4 : 2; }
};

// The free choices. `rows` of the weight are one tile, computed by a cluster whose blocks have a share of K each. K is
// cut into `chains` of k-blocks, dealt out in turn and each summed by one row of warps. The bits of a result depend on
// cluster, chains and row_tiles: these must not depend on the batch.
struct Cut {
  int rows;
  int cluster;  // power of two; above 1 for kAddResidual only
  int chains;
  int row_tiles;     // 16-row tiles of one warp: 1 (two accumulators: even and odd steps) or 2
  int window_bytes;  // weight bytes in flight in a block: a full memory queue would delay the activations
};

// Tiles that the kernel of decode_linear_warpgroup.cuh is compiled for; smaller ones behind a norm are served, too.
struct WarpgroupShape {
  Epilogue epilogue;
  int rows;
  int chains;  // of a block
  int row_tiles;
  int cluster;
  int warpgroup_rows;  // a warpgroup's share: as many as leave room for the sums of all chains
};
constexpr WarpgroupShape kWarpgroupShapes[] = {
    {Epilogue::kStore, 32, 4, 1, 1, 32},       {Epilogue::kStore, 144, 2, 2, 1, 80},
    {Epilogue::kStore, 192, 1, 2, 1, 192},     {Epilogue::kSiluMul, 32, 4, 1, 1, 32},
    {Epilogue::kSiluMul, 144, 2, 2, 1, 80},    {Epilogue::kSiluMul, 192, 2, 2, 1, 96},
    {Epilogue::kAddResidual, 64, 4, 2, 1, 64}, {Epilogue::kAddResidual, 32, 4, 2, 4, 32},
    {Epilogue::kAddResidual, 64, 4, 2, 4, 64},
};
constexpr int kNoWarpgroup = -1;

struct Plan {
  int columns;  // batch rounded up to 8, 16, 32 or 64
  int rows, cluster_bits, row_tiles;
  int chains;                   // of this block
  int warpgroup_shape;          // index in kWarpgroupShapes, or kNoWarpgroup: then the next three are of use
  bool row_groups;              // row_warps come in fours of 64 rows, which multiply together
  int row_warps, column_warps;  // of a chain
  int rounds;                   // k-blocks of a chain
  int stage_blocks;             // k-blocks of a stage: a power of two
  int stages, window;
  int tiles, grid;
  bool direct;             // one chain behind a norm: sums go to memory from registers
  int own_rows;            // rows of the tile that a block of the cluster finishes
  int quads;               // threads that finish a column's own rows, four rows (gate_up: channels) each
  uint32_t column_factor;  // 2^20 / quads, rounded up
  int reduce_stride, reduce_offset, exchange_offset;
  int best_offset;  // if direct: the best result of each column, for each warp
  int shared_bytes;

  constexpr int cluster() const { return 1 << cluster_bits; }
  constexpr int consumer_warps() const { return row_warps * column_warps * chains; }
  // The column of the i-th quad: i / quads, exact for as many quads as a tile has.
  constexpr int column_of(int i) const { return static_cast<int>(i * column_factor >> 20); }
};

// Channels whose squares a block sums: the rows that one block finishes of an output of the residual stream.
int square_sum_channels(int hidden);

Cut choose_cut(const Shape& shape, const Target& target);

// False if the cut does not fit the target.
bool make_plan(const Shape& shape, const Cut& cut, const Target& target, Plan& plan);

// The chosen cut's plan. False if it does not fit.
bool find_plan(const Shape& shape, const Target& target, Plan& plan);

}  // namespace octavo::gpu::decode
