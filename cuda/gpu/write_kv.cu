// Bias, QK-norm, RoPE, and the write of K and V into the pool. Floor: the qkv row read once and written once.
// Half a warp takes a head of a token, eight elements a lane; the other element of a rotated pair comes from the lane
// that holds it. Where there are many tokens it takes four heads of one at once: four times as much in flight, and
// angles, four times as many bytes as the elements that they turn, read once for all of them.
#include <bit>

#include "gpu/element.cuh"
#include "gpu/launch.cuh"
#include "gpu/ptx.cuh"
#include "octavo/write_kv.h"

namespace octavo::gpu {
namespace {

constexpr int kLanes = 16;  // of one head: head_dim up to 128
constexpr int kThreads = 256;
constexpr int kManyRows = 8192;  // (token, head) pairs from which on a half warp takes four heads
constexpr unsigned kAll = ~0u;

struct WriteKv {
  Eight* query_out;
  const Eight* qkv;
  int64_t row_pieces;  // 16-byte pieces between rows of qkv
  const Eight* bias;
  const Eight* q_norm_weight;
  const Eight* k_norm_weight;
  float norm_eps;
  const float4* cos_sin;
  int rotary_dim;
  const int* positions;
  const int64_t* slots;
  Eight* pool;  // at this layer
  int64_t block_pieces;
  int q_heads;
  int kv_heads;
  int block_shift;  // log2 of the block size: a division of 64-bit numbers takes a hundred instructions
  int pieces;       // of a head: head_dim / 8
};

// Of weights. In one load: of a reference's four words the compiler makes four.
template <class T>
__device__ __forceinline__ void load(float (&x)[8], const Eight* from) {
  const uint4 w = __ldg(reinterpret_cast<const uint4*>(from));
  unpack<T>(x, Eight{{w.x, w.y, w.z, w.w}});
}

template <class T>
__device__ void normalise(float (&x)[8], const Eight* weights, float eps, int head_dim, bool active) {
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) squares += active ? x[k] * x[k] : 0.0f;
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) squares += __shfl_xor_sync(kAll, squares, lane);
  const float scale = rsqrtf(squares / static_cast<float>(head_dim) + eps);
  if (!active || weights == nullptr) return;
  float weight[8];
  load<T>(weight, weights);
#pragma unroll
  for (int k = 0; k < 8; ++k) x[k] *= scale * weight[k];
}

// What a lane's elements are rotated by; its piece may lie behind those that are.
struct Angles {
  float cosine[8], sine[8];

  __device__ __forceinline__ Angles(const float4* cos_sin, int rotary_dim, int piece) {
    const int half = rotary_dim / 16;
    if (piece >= 2 * half) return;
    const int angle = 2 * (piece < half ? piece : piece - half);
    reinterpret_cast<float4&>(cosine[0]) = __ldg(cos_sin + angle);
    reinterpret_cast<float4&>(cosine[4]) = __ldg(cos_sin + angle + 1);
    reinterpret_cast<float4&>(sine[0]) = __ldg(cos_sin + rotary_dim / 8 + angle);
    reinterpret_cast<float4&>(sine[4]) = __ldg(cos_sin + rotary_dim / 8 + angle + 1);
  }

  // `piece` of the first half is rotated with the one rotary_dim / 16 lanes up, and the other way round.
  __device__ __forceinline__ void rotate(float (&x)[8], int rotary_dim, int piece) const {
    const int half = rotary_dim / 16;
    const bool first = piece < half;
    float other[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) other[k] = __shfl_sync(kAll, x[k], first ? piece + half : piece - half, kLanes);
    if (piece >= 2 * half) return;
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = x[k] * cosine[k] + (first ? -other[k] : other[k]) * sine[k];
  }
};

// A half warp has kRows heads of one token that follow each other.
template <class T, int kRows>
__global__ void __launch_bounds__(kThreads) write_kv_kernel(const __grid_constant__ WriteKv args, int num_tokens) {
  ptx::let_next_kernel_start();
  const int piece = threadIdx.x % kLanes;
  const int heads = args.q_heads + 2 * args.kv_heads;
  const int groups = (heads + kRows - 1) / kRows;
  const int group = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  // Half warps past the end go along to the shuffles, as both halves of a warp shuffle together.
  const int token = min(group / groups, num_tokens - 1);
  const int first = group / groups < num_tokens ? group % groups * kRows : heads;
  const int64_t slot = args.slots[token];
  const Angles angles(args.cos_sin + static_cast<int64_t>(args.positions[token]) * (args.rotary_dim / 4),
                      args.rotary_dim, piece);
  ptx::wait_for_previous_kernel();

  Eight raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool here = first + i < heads && piece < args.pieces;
    raw[i] = here ? args.qkv[token * args.row_pieces + (first + i) * args.pieces + piece] : Eight{};
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int head = first + i;
    const bool here = head < heads && piece < args.pieces;
    const bool is_query = head < args.q_heads;
    const bool is_value = head >= args.q_heads + args.kv_heads;
    float x[8];
    unpack<T>(x, raw[i]);
    if (here && args.bias != nullptr) {
      float bias[8];
      load<T>(bias, args.bias + head * args.pieces + piece);
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] += bias[k];
    }
    float turned[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) turned[k] = x[k];
    if (args.q_norm_weight != nullptr || args.k_norm_weight != nullptr) {
      const Eight* weight = is_query ? args.q_norm_weight : args.k_norm_weight;
      normalise<T>(turned, weight == nullptr ? nullptr : weight + piece, args.norm_eps, args.pieces * 8, here);
    }
    angles.rotate(turned, args.rotary_dim, piece);
    if (!here) continue;
    if (is_query) {
      args.query_out[(static_cast<int64_t>(token) * args.q_heads + head) * args.pieces + piece] = pack<T>(turned);
    } else if (slot >= 0) {
      // Keys and values of a layer lie head after head: [2][kv_heads][block_size][head_dim].
      const int64_t block = slot >> args.block_shift;
      const int64_t in_block =
          ((head - args.q_heads) << args.block_shift) + (slot & ((int64_t{1} << args.block_shift) - 1));
      args.pool[block * args.block_pieces + in_block * args.pieces + piece] = is_value ? pack<T>(x) : pack<T>(turned);
    }
  }
}

}  // namespace

void write_kv(const WriteKvArgs& args) {
  const KvPool& pool = args.pool;
  require(pool.head_dim % 8 == 0 && pool.head_dim <= 8 * kLanes,
          "write_kv: head_dim must be a multiple of 8 up to 128");
  require(args.rotary_dim % 16 == 0 && args.rotary_dim <= pool.head_dim,
          "write_kv: rotary_dim must be a multiple of 16 up to head_dim");
  require(std::has_single_bit(static_cast<unsigned>(pool.block_size)), "write_kv: block_size must be a power of two");
  require(args.qkv_stride % 8 == 0, "write_kv: the row stride of qkv must be a multiple of 8");
  if (args.num_tokens == 0) return;
  const WriteKv device_args{static_cast<Eight*>(args.query_out),
                            static_cast<const Eight*>(args.qkv),
                            args.qkv_stride / 8,
                            static_cast<const Eight*>(args.bias),
                            static_cast<const Eight*>(args.q_norm_weight),
                            static_cast<const Eight*>(args.k_norm_weight),
                            args.norm_eps,
                            reinterpret_cast<const float4*>(args.cos_sin),
                            args.rotary_dim,
                            args.positions,
                            args.slots,
                            static_cast<Eight*>(pool.data) + args.layer * pool.layer_stride() / 8,
                            pool.block_stride() / 8,
                            args.q_heads,
                            pool.kv_heads,
                            std::countr_zero(static_cast<unsigned>(pool.block_size)),
                            pool.head_dim / 8};
  const int64_t heads = args.q_heads + 2 * pool.kv_heads;
  require(args.num_tokens * heads < (int64_t{1} << 31), "write_kv: too many tokens");
  const int a_half_warp = args.num_tokens * heads >= kManyRows ? 4 : 1;
  const int64_t groups = args.num_tokens * ((heads + a_half_warp - 1) / a_half_warp);
  constexpr int kGroups = kThreads / kLanes;  // of a thread block
  with_element(pool.dtype, [&]<class T>(T) {
    launch_kernel("write_kv", a_half_warp == 4 ? write_kv_kernel<T, 4> : write_kv_kernel<T, 1>,
                  {.grid = dim3(static_cast<unsigned>((groups + kGroups - 1) / kGroups)), .block = dim3(kThreads)},
                  args.launch, device_args, args.num_tokens);
  });
}

}  // namespace octavo::gpu
