// Which grid reads a decode batch fastest: times every way of launching decode attention, whatever decode_grid picks.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -Icuda -Icuda/include -gencode=arch=compute_90a,code=sm_90a
//     cuda/bench/decode_grid.cu cuda/gpu/{decode_plan,decode_attention_*,device}.cu -o decode_grid
//   ./decode_grid 12 2 128 64x2048 ...      query heads, KV heads, head_dim, then batch x context or batch r longest
//
// Layers follow each other in one graph with programmatic launches, over block tables that are random permutations; no
// layer finds its KV in the L2. Prints the fastest few, in us a layer, and what decode_grid picks.
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
  cudaStream_t stream;

  void run_layer(const Batch& batch, const DecodeGrid& grid, int set, int layer) const {
    const int group = heads.query / heads.kv, count = static_cast<int>(batch.lengths.size());
    const KvPool shape{pool, DType::kBFloat16, 0, batch.layers, heads.kv, 16, heads.dim};
    const DecodeWorkspace layout(grid, group, heads.dim);
    Decode args{};
    args.out = out;
    args.query = query;
    args.query_stride = int64_t{heads.query} * heads.dim;
    args.pool = pool + layer * shape.layer_stride();
    args.block_stride = shape.block_stride();
    args.value_offset = shape.kv_stride();
    args.block_tables = batch.tables + size_t(set) * count * batch.max_blocks;
    args.max_blocks = batch.max_blocks;
    args.plan = reinterpret_cast<const Split*>(workspace + layout.plan);
    args.capacity = grid.capacity;
    args.tickets = reinterpret_cast<int*>(workspace + layout.tickets);
    args.stats = reinterpret_cast<float2*>(workspace + layout.stats);
    args.outputs = reinterpret_cast<float4*>(workspace + layout.outputs);
    args.scale_log2 = 0.1f;
    args.q_heads = heads.query;
    args.kv_heads = heads.kv;
    args.group = group;
    const Launch launch{stream, true};
    if (heads.dim == 128) DecodeKernels<128>::launch(DType::kBFloat16, grid, args, launch);
    if (heads.dim == 64) DecodeKernels<64>::launch(DType::kBFloat16, grid, args, launch);
  }

  // Microseconds a layer.
  double time(const Batch& batch, const DecodeGrid& grid, int cut) const {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    plan_decode(grid, {batch.device_lengths,
                       static_cast<int>(batch.lengths.size()),
                       heads.query,
                       heads.kv,
                       heads.dim,
                       cut,
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

int resident(const Heads& heads, int warps, int cluster) {
  return heads.dim == 128 ? DecodeKernels<128>::resident_clusters(warps, cluster)
                          : DecodeKernels<64>::resident_clusters(warps, cluster);
}

struct Result {
  double time;
  DecodeGrid grid;
  int cut;
};

void sweep(const Bench& bench, const std::string& cell, size_t pool_bytes) {
  const Batch batch = make_batch(bench.heads, cell, pool_bytes);
  const int pairs = static_cast<int>(batch.lengths.size()) * bench.heads.kv;
  std::vector<Result> results;
  for (const auto& [warps, cluster] : {std::pair{8, 8}, {8, 4}, {8, 2}, {8, 1}, {4, 1}}) {
    const int fits = resident(bench.heads, warps, cluster);
    if (cluster > 1 && pairs > 4 * fits) continue;
    for (const int waves : {1, 2, 4}) {
      if (cluster > 1 && waves > 2) continue;
      const int clusters = cluster > 1 ? std::max(pairs, waves * fits) : fits * waves;
      const DecodeGrid grid{warps, cluster, clusters, cluster > 1 ? clusters : pairs + 3 * fits * waves};
      for (const int cut : {0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64}) {
        if (cut * pairs > grid.capacity) continue;
        results.push_back({bench.time(batch, grid, cut), grid, cut});
      }
    }
  }
  std::sort(results.begin(), results.end(), [](const Result& a, const Result& b) { return a.time < b.time; });
  const DecodeGrid chosen = decode_grid(static_cast<int>(batch.lengths.size()), bench.heads.kv, bench.heads.dim);
  const double ours = bench.time(batch, chosen, 0), floor = batch.kv_bytes / 4.23e6;
  std::printf("%d/%d/%d %s: floor %.2f us; chosen (%d warps, cluster %d, %d) %.2f |", bench.heads.query, bench.heads.kv,
              bench.heads.dim, cell.c_str(), floor, chosen.warps, chosen.cluster, chosen.clusters, ours);
  for (size_t i = 0; i < std::min<size_t>(7, results.size()); ++i) {
    const Result& r = results[i];
    std::printf(" %dw c%d x%d cut %d: %.2f |", r.grid.warps, r.grid.cluster, r.grid.clusters, r.cut, r.time);
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
              nullptr};
  check(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking), "stream");
  fill<<<2048, 512>>>(bench.pool, kPoolBytes / 2);
  fill<<<64, 512>>>(bench.query, 1 << 22);
  check(cudaDeviceSynchronize(), "fill");
  for (int i = 4; i < argc; ++i) sweep(bench, argv[i], kPoolBytes);
}
