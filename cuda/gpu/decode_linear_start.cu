// The start of a decode step's residual stream, with what the first norm needs; decode_begin also looks up the
// embeddings and plans the step's attention, side by side. Moves a few hundred KB at most: latency only.
#include "gpu/decode_linear_kernel.cuh"
#include "gpu/decode_plan_device.cuh"
#include "gpu/launch.cuh"
#include "octavo/decode_linear.h"

namespace octavo::gpu {
namespace decode {
namespace {

constexpr int kStartThreads = 128;

// Four channels a thread. `x`: the row of embeddings; null: zeros.
template <class T, int kThreads>
__device__ __forceinline__ void start_row(const DecodeStream& to, const T* x, const T* norm, int row, int channels) {
  const int hidden = to.hidden;
  for (int first = 0; first < hidden; first += 4 * kThreads) {
    const int channel = first + 4 * threadIdx.x;
    float squares = 0.0f;
    if (channel < hidden) {
      const uint2 words = x == nullptr ? uint2{} : __ldcg(reinterpret_cast<const uint2*>(x + channel));
      KernelArgs stream{};
      stream.out_features = hidden;
      stream.residual = to.residual;
      stream.scaled = to.scaled;
      const ResidualPiece<T> piece{{0.0f, 0.0f, 0.0f, 0.0f}, *reinterpret_cast<const uint2*>(norm + channel)};
      squares = piece.finish(
          stream, row, channel,
          {Element<T>::low(words.x), Element<T>::high(words.x), Element<T>::low(words.y), Element<T>::high(words.y)});
    }
    // A part's channels lie in neighbouring lanes: 4 of them a lane, and a power of two of lanes.
    for (int offset = 1; 4 * offset < channels; offset *= 2) squares += __shfl_xor_sync(~0u, squares, offset);
    if (channel < hidden && channel % channels == 0) {
      to.square_sums[row * (hidden / channels) + channel / channels] = squares;
    }
  }
}

// A block a row.
template <class T>
__global__ void __launch_bounds__(kStartThreads)
    start_kernel(const __grid_constant__ DecodeStartArgs args, int channels) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  const T* x = static_cast<const T*>(args.x) + int64_t{blockIdx.x} * args.stream.hidden;
  start_row<T, kStartThreads>(args.stream, x, static_cast<const T*>(args.norm_weight), blockIdx.x, channels);
}

// A block a row, and a last one for the plan. Its successor may start early, but lets no other do so: the plan is read
// early.
template <class T>
__global__ void __launch_bounds__(decode_plan::kThreads)
    begin_kernel(const __grid_constant__ DecodeBeginArgs args, const __grid_constant__ decode_plan::PlanInputs plan,
                 int channels) {
  extern __shared__ int seq_arrays[];
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  const int row = blockIdx.x;
  if (row == args.batch) return decode_plan::make_plan(plan, seq_arrays);
  const int id = args.token_ids[row], source = args.sources != nullptr ? args.sources[row] : -1;
  const int token = source >= 0 ? args.newest[source] : id;
  const bool known = token >= 0 && token < args.vocab;
  const T* x = static_cast<const T*>(args.table) + int64_t{token} * args.stream.hidden;
  start_row<T, decode_plan::kThreads>(args.stream, known ? x : nullptr, static_cast<const T*>(args.norm_weight), row,
                                      channels);
}

int checked_channels(const char* op, const DecodeStream& stream, int batch) {
  const int channels = square_sum_channels(stream.hidden);
  if (batch < 1 || batch > kMaxDecodeBatch) throw OpError(std::string(op) + ": batch must be 1 to 64");
  if (stream.hidden % 8 != 0 || stream.hidden % channels != 0)
    throw OpError(std::string(op) + ": hidden is not served");
  return channels;
}

}  // namespace
}  // namespace decode

void decode_start(const DecodeStartArgs& args) {
  const int channels = decode::checked_channels("decode_start", args.stream, args.batch);
  with_element(args.dtype, [&](auto element) {
    launch_kernel("decode_start", decode::start_kernel<decltype(element)>,
                  {dim3(args.batch), dim3(decode::kStartThreads)}, args.launch, args, channels);
  });
}

void decode_begin(const DecodeBeginArgs& args) {
  const int channels = decode::checked_channels("decode_begin", args.stream, args.batch);
  require(args.plan.num_seqs == args.batch, "decode_begin: a plan of other sequences");
  const decode_plan::PlanInputs plan =
      plan_inputs(decode_grid(args.batch, args.plan.kv_heads, args.plan.head_dim, args.plan.fixed), args.plan);
  with_element(args.dtype, [&](auto element) {
    launch_kernel("decode_begin", decode::begin_kernel<decltype(element)>,
                  {.grid = dim3(args.batch + 1),
                   .block = dim3(decode_plan::kThreads),
                   .shared_bytes = 2 * sizeof(int) * static_cast<size_t>(args.batch)},
                  args.launch, args, plan, channels);
  });
}

}  // namespace octavo::gpu
