// The start of a decode step's residual stream, with what the first norm needs. Moves a few hundred KB at most: latency
// only.
#include "gpu/decode_linear_kernel.cuh"
#include "gpu/launch.cuh"
#include "octavo/decode_linear.h"

namespace octavo::gpu {
namespace decode {
namespace {

constexpr int kStartThreads = 128;

// A block a row, four channels a thread.
template <class T>
__global__ void __launch_bounds__(kStartThreads)
    start_kernel(const __grid_constant__ DecodeStartArgs args, int channels) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  const int row = blockIdx.x;
  const int hidden = args.stream.hidden;
  const T* x = static_cast<const T*>(args.x) + int64_t{row} * hidden;
  const T* norm = static_cast<const T*>(args.norm_weight);
  for (int first = 0; first < hidden; first += 4 * kStartThreads) {
    const int channel = first + 4 * threadIdx.x;
    float squares = 0.0f;
    if (channel < hidden) {
      const uint2 words = __ldcg(reinterpret_cast<const uint2*>(x + channel));
      KernelArgs stream{};
      stream.out_features = hidden;
      stream.residual = args.stream.residual;
      stream.scaled = args.stream.scaled;
      const ResidualPiece<T> piece{{0.0f, 0.0f, 0.0f, 0.0f}, *reinterpret_cast<const uint2*>(norm + channel)};
      squares = piece.finish(
          stream, row, channel,
          {Element<T>::low(words.x), Element<T>::high(words.x), Element<T>::low(words.y), Element<T>::high(words.y)});
    }
    // A part's channels lie in neighbouring lanes: 4 of them a lane, and a power of two of lanes.
    for (int offset = 1; 4 * offset < channels; offset *= 2) squares += __shfl_xor_sync(~0u, squares, offset);
    if (channel < hidden && channel % channels == 0) {
      args.stream.square_sums[row * (hidden / channels) + channel / channels] = squares;
    }
  }
}

}  // namespace
}  // namespace decode

void decode_start(const DecodeStartArgs& args) {
  const int hidden = args.stream.hidden;
  const int channels = decode::square_sum_channels(hidden);
  require(args.batch >= 1 && args.batch <= kMaxDecodeBatch, "decode_start: batch must be 1 to 64");
  require(hidden % 8 == 0 && hidden % channels == 0, "decode_start: hidden is not served");
  with_element(args.dtype, [&](auto element) {
    launch_kernel("decode_start", decode::start_kernel<decltype(element)>,
                  {dim3(args.batch), dim3(decode::kStartThreads)}, args.launch, args, channels);
  });
}

}  // namespace octavo::gpu
