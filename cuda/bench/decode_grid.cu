// Which grid reads a decode batch fastest: times every way of launching decode attention, whatever decode_grid picks.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -Icuda -Icuda/include -gencode=arch=compute_90a,code=sm_90a
//     cuda/bench/decode_grid.cu cuda/gpu/{decode_plan,decode_attention_*,prefill_plan,device}.cu -o decode_grid
//   ./decode_grid 12 2 128 64x2048 ...      query heads, KV heads, head_dim, then batch x context or batch r longest
//
// Layers follow each other in one graph with programmatic launches, over block tables that are random permutations; no
// layer finds its KV in the L2. Prints us a layer for each size of cluster, for more single blocks than run at once,
// and what decode_grid picks.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gpu/decode_plan.cuh"
#include "gpu/launch.cuh"

using namespace octavo;
using namespace octavo::gpu;

namespace {

constexpr size_t kColdBytes = 400'000'000;
constexpr int kLayers = 28;

template <class T>
T* device_array(size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

// Small finite bf16 numbers of both signs.
__global__ void fill(uint16_t* data, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const auto hash = static_cast<uint32_t>(i * 2654435761u ^ i >> 13);
    data[i] = static_cast<uint16_t>(0x3c00 + (hash >> 8 & 0x3ff) + (hash >> 31 << 15));
  }
}

struct Heads {
  int query, kv, dim;
};

struct Batch {
  std::vector<int> lengths;
  int layers = kLayers, sets = 1, max_blocks = 0;
  size_t kv_bytes = 0;  // of a layer
  int* device_lengths = nullptr;
  int* tables = nullptr;  // [sets][batch][max_blocks]
};

Batch make_batch(const Heads& heads, const std::string& cell, size_t pool_bytes) {
  Batch batch;
  std::mt19937 random(5);
  const size_t mark = cell.find_first_of("xr");
  const int count = std::stoi(cell.substr(0, mark)), length = std::stoi(cell.substr(mark + 1));
  std::uniform_int_distribution<int> any(100, length);
  for (int s = 0; s < count; ++s) batch.lengths.push_back(cell[mark] == 'x' ? length : any(random));
  size_t blocks = 0;
  for (const int l : batch.lengths) {
    blocks += (l + 15) / 16;
    batch.max_blocks = std::max(batch.max_blocks, (l + 15) / 16);
  }
  const size_t block_bytes = size_t{2} * heads.kv * 16 * heads.dim * 2;
  batch.kv_bytes = std::accumulate(batch.lengths.begin(), batch.lengths.end(), size_t{0}) * block_bytes / 16;
  while (batch.layers > 1 && blocks * block_bytes * batch.layers > pool_bytes) batch.layers /= 2;
  const size_t a_set = blocks * block_bytes * batch.layers;
  batch.sets =
      static_cast<int>(std::clamp<size_t>(kColdBytes / a_set + 1, 1, std::min<size_t>(16, pool_bytes / a_set)));
  std::vector<int> ids(blocks * batch.sets), tables(size_t(batch.sets) * count * batch.max_blocks, 0);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  size_t next = 0;
  for (int row = 0; row < batch.sets * count; ++row) {
    for (int i = 0; i < (batch.lengths[row % count] + 15) / 16; ++i)
      tables[size_t(row) * batch.max_blocks + i] = ids[next++];
  }
  batch.device_lengths = device_array<int>(count);
  batch.tables = device_array<int>(tables.size());
  check(cudaMemcpy(batch.device_lengths, batch.lengths.data(), count * sizeof(int), cudaMemcpyHostToDevice), "copy");
  check(cudaMemcpy(batch.tables, tables.data(), tables.size() * sizeof(int), cudaMemcpyHostToDevice), "copy");
  return batch;
}

struct Bench {
  Heads heads;
  uint16_t* pool;
  uint16_t *query, *out;
  char* workspace;
  size_t workspace_bytes;
  size_t pool_bytes;
  cudaStream_t stream;

  void run_layer(const Batch& batch, const DecodeGrid& grid, int set, int layer) const {
    const int group = heads.query / heads.kv, count = static_cast<int>(batch.lengths.size());
    KvPool shape{pool, DType::kBFloat16, 0, batch.layers, heads.kv, 16, heads.dim};
    shape.num_blocks = static_cast<int64_t>(pool_bytes / (2 * shape.block_stride()));
    const DecodeWorkspace layout(grid, count, heads.kv, group, heads.dim);
    Decode args{};
    args.out = out;
    args.query = query;
    args.query_stride = int64_t{heads.query} * heads.dim;
    args.pool = pool + layer * shape.layer_stride();
    args.block_stride = shape.block_stride();
    args.value_offset = shape.kv_stride();
    args.block_tiles = 2 * batch.layers * heads.kv;
    args.reads_early = true;
    args.block_tables = batch.tables + size_t(set) * count * batch.max_blocks;
    args.max_blocks = batch.max_blocks;
    args.plan = reinterpret_cast<const Split*>(workspace + layout.plan);
    args.empties = reinterpret_cast<const int*>(workspace + layout.empties);
    args.tickets = reinterpret_cast<int*>(workspace + layout.tickets);
    args.taken = reinterpret_cast<int*>(workspace + layout.taken);
    args.stats = reinterpret_cast<float2*>(workspace + layout.stats);
    args.outputs = reinterpret_cast<float4*>(workspace + layout.outputs);
    args.scale_log2 = 0.1f;
    args.q_heads = heads.query;
    args.kv_heads = heads.kv;
    args.group = group;
    const Launch launch{stream, true};
    if (heads.dim == 128) DecodeKernels<128>::launch(shape, grid, args, launch);
    if (heads.dim == 64) DecodeKernels<64>::launch(shape, grid, args, launch);
  }

  // Microseconds a layer.
  double time(const Batch& batch, const DecodeGrid& grid, int least_tokens) const {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    plan_decode(grid, {batch.device_lengths,
                       static_cast<int>(batch.lengths.size()),
                       heads.query,
                       heads.kv,
                       heads.dim,
                       least_tokens,
                       false,
                       workspace,
                       workspace_bytes,
                       {stream, false}});
    for (int set = 0; set < batch.sets; ++set) {
      for (int layer = 0; layer < batch.layers; ++layer) run_layer(batch, grid, set, layer);
    }
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    constexpr int kReplays = 7;
    cudaEvent_t events[kReplays + 1];
    for (auto& event : events) check(cudaEventCreate(&event), "event");
    check(cudaGraphLaunch(executable, stream), "launch");
    for (int i = 0; i <= kReplays; ++i) {
      check(cudaEventRecord(events[i], stream), "record");
      if (i < kReplays) check(cudaGraphLaunch(executable, stream), "launch");
    }
    check(cudaStreamSynchronize(stream), "run");
    std::vector<float> times(kReplays);
    for (int i = 0; i < kReplays; ++i) check(cudaEventElapsedTime(&times[i], events[i], events[i + 1]), "time");
    for (auto& event : events) cudaEventDestroy(event);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    return times[kReplays / 2] * 1e3 / (batch.sets * batch.layers);
  }
};

int resident(const Heads& heads, int cluster) {
  return heads.dim == 128 ? DecodeKernels<128>::resident_clusters(cluster)
                          : DecodeKernels<64>::resident_clusters(cluster);
}

// For each size of cluster: the time as planned on the device, then the best with blocks held to read more or less.
void sweep(const Bench& bench, const std::string& cell, size_t pool_bytes) {
  const Batch batch = make_batch(bench.heads, cell, pool_bytes);
  const int count = static_cast<int>(batch.lengths.size()), pairs = count * bench.heads.kv;
  const DecodeGrid chosen = decode_grid(count, bench.heads.kv, bench.heads.dim, false);
  std::printf("%d/%d/%d %-8s floor %6.2f us; cluster of %d chosen: %6.2f", bench.heads.query, bench.heads.kv,
              bench.heads.dim, cell.c_str(), batch.kv_bytes / 4.23e6, chosen.cluster, bench.time(batch, chosen, 0));
  for (const int cluster : {8, 4, 2, 1}) {
    const int fits = resident(bench.heads, cluster);
    if (cluster > 1 && pairs > 2 * fits) continue;
    const int warps = cluster == 1 && bench.heads.dim == 64 ? 4 : 8;
    const int clusters = cluster > 1 ? std::max(pairs, fits) : fits / bench.heads.kv * bench.heads.kv;
    const DecodeGrid grid{warps, cluster, clusters, 0, key_steps_of(cluster, bench.heads.dim, count)};
    double best = 1e9;
    int best_tokens = 0;
    for (const int tokens : {128, 256, 512, 1024, 2048, 4096, 1 << 20}) {
      const double time = bench.time(batch, grid, tokens);
      if (time < best) {
        best = time;
        best_tokens = tokens;
      }
    }
    std::printf(" | %d: %6.2f, %6.2f at %d", cluster, bench.time(batch, grid, 0), best, best_tokens);
  }
  for (const int times : {2, 3, 4, 6}) {
    const int blocks = times * resident(bench.heads, 1) / bench.heads.kv * bench.heads.kv;
    std::printf(" | %d x single: %6.2f", times, bench.time(batch, {bench.heads.dim == 64 ? 4 : 8, 1, blocks}, 0));
  }
  std::printf("\n");
  std::fflush(stdout);
  cudaFree(batch.device_lengths);
  cudaFree(batch.tables);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return std::fprintf(stderr, "usage: decode_grid Q_HEADS KV_HEADS HEAD_DIM CELL...\n"), 2;
  const Heads heads{std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3])};
  constexpr size_t kPoolBytes = 34'000'000'000;
  Bench bench{heads,
              device_array<uint16_t>(kPoolBytes / 2),
              device_array<uint16_t>(1 << 22),
              device_array<uint16_t>(1 << 22),
              device_array<char>(64 << 20),
              64 << 20,
              kPoolBytes,
              nullptr};
  check(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking), "stream");
  fill<<<2048, 512>>>(bench.pool, kPoolBytes / 2);
  fill<<<64, 512>>>(bench.query, 1 << 22);
  check(cudaDeviceSynchronize(), "fill");
  for (int i = 4; i < argc; ++i) sweep(bench, argv[i], kPoolBytes);
}
