// Sampling. Floor: each logit read once.
//
// A row is split over several thread blocks where there are few rows. Without filters each block finds its best
// (score, id); the row's best is an integer maximum, so order does not matter, and the last block to finish writes the
// token. Of a filtered row each block lists the highest scores; the last to finish takes all lists, finds where top-k
// and top-p cut off, and draws from what they keep.
#include "octavo/sample.h"

#include <algorithm>

#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "gpu/sample_draw.cuh"
#include "gpu/sample_filter.cuh"

namespace octavo::gpu {
namespace {

using namespace sampling;

constexpr int kMinPart = 8 * 1024;    // logits a thread block at least
constexpr int kMaxListed = 51 * 256;  // scores of a row: so two blocks fit in a Hopper's shared memory
constexpr int kMaxSplitRows = 64;     // more rows are not split: there is room for so many rows' lists

// Between a row's blocks; zero between launches.
struct RowState {
  uint64_t best;
  double rough;  // see Lister
  int listed;
  int tickets;
};

struct Sample {
  SampleArgs args;
  RowState* states;  // [num_rows]
  Listed* lists;     // [num_rows, list_capacity], of rows that are split
  int list_capacity;
  bool aligned;  // rows can be read 16 bytes at a time
};

__device__ __forceinline__ void deliver(const SampleArgs& args, int row, uint64_t best) {
  const int token = best == kUnusableScore || best == 0 ? -1 : id_of(best);
  args.tokens[row] = token;
  if (args.newest != nullptr) args.newest[args.targets[row]] = max(token, 0);
}

__device__ __forceinline__ uint64_t take(uint64_t* best) {
  return atomicExch(reinterpret_cast<unsigned long long*>(best), 0ull);
}

// Of one row, in one of the thread blocks that share it.
template <int kThreads, class T>
class RowSampler {
 public:
  __device__ RowSampler(const Sample& sample, Row row, int index)
      : sample_(sample),
        row_(row),
        index_(index),
        logits_{static_cast<const T*>(sample.args.logits) + index * sample.args.logits_stride, sample.args.vocab,
                sample.aligned} {
    const int eights = (logits_.vocab + 7) / 8, parts = gridDim.x;
    const int length = (eights + parts - 1) / parts * 8;
    begin_ = min(static_cast<int>(blockIdx.x) * length, logits_.vocab);
    end_ = min(begin_ + length, logits_.vocab);
  }

  __device__ void unfiltered() const {
    const uint64_t best = row_.greedy()
                              ? largest_logit<kThreads>(logits_, begin_, end_)
                              : draw_from_row<kThreads, 2>(logits_, begin_, end_, row_, [](float) { return true; });
    if (threadIdx.x > 0) return;
    if (gridDim.x == 1) return deliver(sample_.args, index_, best);
    atomicMax(reinterpret_cast<unsigned long long*>(&state().best), static_cast<unsigned long long>(best));
    if (ptx::take_ticket(&state().tickets) < gridDim.x - 1) return;
    state().tickets = 0;
    deliver(sample_.args, index_, take(&state().best));
  }

  __device__ void filtered() const {
    const List list{sample_.list_capacity};
    if (threadIdx.x == 0) list.count() = 0;
    __syncthreads();
    const ListBound bound = choose_bound<kThreads>(logits_, row_, list.capacity);
    uint64_t best = kIncomplete;
    if (!bound.is_nothing()) {
      double rough = block_sum<kThreads>(Lister<kThreads, T>(logits_, row_, bound, list).list(begin_, end_));
      if (gridDim.x > 1 && !gather(list, rough)) return;
      if (isnan(rough)) {
        best = kUnusableScore;
      } else if (list.count() <= list.capacity) {
        best = draw_from_list(Filter<kThreads, T>{logits_, row_}, list, bound, rough);
      }
    } else if (blockIdx.x > 0) {
      return;
    }
    if (best == kIncomplete) best = draw_from_row(Filter<kThreads, T>{logits_, row_});
    if (threadIdx.x == 0) deliver(sample_.args, index_, best);
  }

 private:
  __device__ RowState& state() const { return sample_.states[index_]; }

  // Adds the block's list to the row's; the last block gets all of it, with all of `rough`, the others false.
  __device__ bool gather(const List& list, double& rough) const {
    __shared__ int start;
    __shared__ bool last;
    Listed* const all = sample_.lists + static_cast<int64_t>(index_) * list.capacity;
    const int own = list.count();
    if (threadIdx.x == 0) {
      start = atomicAdd(&state().listed, own);
      atomicAdd(&state().rough, rough);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < min(own, list.capacity - start); i += kThreads) {
      all[start + i] = list.entries()[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) last = ptx::take_ticket(&state().tickets) == gridDim.x - 1;
    __syncthreads();
    if (!last) return false;
    const int count = __ldcg(&state().listed);
    rough = __ldcg(&state().rough);
    for (int i = threadIdx.x; i < min(count, list.capacity); i += kThreads) {
      const int2 listed = __ldcg(reinterpret_cast<const int2*>(all + i));
      list.entries()[i] = {static_cast<uint32_t>(listed.x), listed.y};
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      list.count() = count;
      state() = {};
    }
    __syncthreads();
    return true;
  }

  const Sample& sample_;
  Row row_;
  int index_;
  Logits<T> logits_;
  int begin_, end_;  // the block's part
};

// blockIdx.x: a part of the row; blockIdx.y: the row. Dynamic shared memory: the list.
template <int kThreads, class T>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) sample_kernel(const __grid_constant__ Sample sample) {
  ptx::let_next_kernel_start();
  const int index = blockIdx.y;
  const Row row(sample.args, index);
  ptx::wait_for_previous_kernel();
  if (sample.args.best != nullptr) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      // Of drawn rows, too: whatever the LM head left would beat the next step's in this row.
      const uint64_t best = take(sample.args.best + index);
      if (row.greedy()) deliver(sample.args, index, best);
    }
    if (row.greedy()) return;
  }
  const RowSampler<kThreads, T> sampler(sample, row, index);
  if (!row.filtered()) return sampler.unfiltered();
  sampler.filtered();
}

template <int kThreads, class T>
void launch(const Sample& sample, dim3 grid) {
  const size_t list_bytes = sample.list_capacity * sizeof(Listed);
  allow_shared_bytes<sample_kernel<kThreads, T>>(list_bytes, true);
  launch_kernel("sample", sample_kernel<kThreads, T>,
                {.grid = grid, .block = dim3(kThreads), .shared_bytes = list_bytes}, sample.args.launch, sample);
}

template <class F>
void with_logits(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) return f(float{});
  with_element(dtype, f);
}

// What the kernel's static shared memory leaves for a list.
int list_capacity() {
  constexpr size_t kStatic = 12 * 1024;
  return static_cast<int>(std::min<size_t>(kMaxListed, (current_device().shared_bytes - kStatic) / sizeof(Listed)));
}

}  // namespace

size_t sample_workspace_bytes(int32_t max_rows) {
  return static_cast<size_t>(max_rows) * sizeof(RowState) +
         std::min<size_t>(max_rows, kMaxSplitRows) * kMaxListed * sizeof(Listed);
}

void sample(const SampleArgs& args) {
  if (args.num_rows == 0) return;
  require(args.vocab > 0 && args.logits_stride >= args.vocab, "sample: rows of logits overlap");
  require(args.num_rows <= 65535, "sample: more than 65535 rows");
  require(args.workspace != nullptr && args.workspace_bytes >= sample_workspace_bytes(args.num_rows),
          "sample: workspace too small");
  const int64_t row_bytes = args.logits_stride * (args.dtype == DType::kFloat32 ? 4 : 2);
  const bool aligned = row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(args.logits) % 16 == 0;
  // States at the front and lists at the back of the workspace: one layout for every batch size.
  auto* const memory = static_cast<char*>(args.workspace);
  const size_t lists = std::min(args.num_rows, kMaxSplitRows) * kMaxListed * sizeof(Listed);
  const Sample sample{args, reinterpret_cast<RowState*>(memory),
                      reinterpret_cast<Listed*>(memory + (args.workspace_bytes - lists) / 8 * 8), list_capacity(),
                      aligned};
  // Up to a row a multiprocessor each gets all of one's threads; beyond that two rows share one.
  const int multiprocessors = current_device().multiprocessors;
  const bool crowded = args.num_rows > multiprocessors;
  const int wanted = args.num_rows > kMaxSplitRows ? 1 : std::max(1, multiprocessors / args.num_rows);
  const dim3 grid(std::clamp(args.vocab / kMinPart, 1, wanted), args.num_rows);
  with_logits(args.dtype, [&]<class T>(T) { crowded ? launch<512, T>(sample, grid) : launch<1024, T>(sample, grid); });
}

}  // namespace octavo::gpu
