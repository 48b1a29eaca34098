// Decode matmuls: checks, cuts the work (decode_linear_plan.cu) and launches the kernel of decode_linear_kernel.cuh.
#include "octavo/decode_linear.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "gpu/decode_linear_launch.cuh"

namespace octavo::gpu {
namespace decode {
namespace {

// Of a later kernel's weights, on the whole GPU: what its blocks ask for first. More only delays others.
constexpr int64_t kAheadBytes = 4 << 20;
constexpr int kTensorSharedBytes = 160 * 1024;  // what the cuts for tensor copies count on; sm_120 has 99 KiB

bool is_16_bit(DType dtype) { return dtype != DType::kFloat32; }

bool serves_hidden(int hidden) {
  const int channels = square_sum_channels(hidden);
  return hidden % (4 * channels) == 0 && hidden / channels <= kMaxParts;
}

bool servable(const Shape& shape) {
  return shape.batch >= 1 && shape.batch <= kMaxDecodeBatch && shape.in_features > 0 &&
         shape.in_features % kBlock == 0 && shape.out_rows > 0 &&
         shape.out_rows % (shape.epilogue == Epilogue::kSiluMul ? 16 : 8) == 0 &&
         serves_hidden(shape.epilogue == Epilogue::kAddResidual ? shape.out_rows : shape.in_features);
}

Shape shape_of(Epilogue epilogue, int64_t out_features, int64_t in_features, int64_t batch) {
  const int64_t out_rows = epilogue == Epilogue::kSiluMul ? 2 * out_features : out_features;
  constexpr int64_t kMost = 1 << 24;
  if (out_rows > kMost || in_features > kMost || batch > kMaxDecodeBatch) return {epilogue, 0, 0, 0};
  return {epilogue, static_cast<int>(out_rows), static_cast<int>(in_features), static_cast<int>(batch)};
}

// ---- tensor maps

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

TensorMapEncoder encoder() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    require(found == cudaDriverEntryPointSuccess, "the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<TensorMapEncoder>(entry);
  }();
  return function;
}

template <int kRank>
CUtensorMap tensor_map(const void* data, DType dtype, const std::array<cuuint64_t, kRank>& sizes,
                       const std::array<cuuint64_t, kRank - 1>& byte_strides,
                       const std::array<cuuint32_t, kRank>& box) {
  std::array<cuuint32_t, kRank> every{};
  every.fill(1);
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                kRank, const_cast<void*>(data), sizes.data(), byte_strides.data(), box.data(), every.data(),
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw OpError("decode_linear: cuTensorMapEncodeTiled failed with " + std::to_string(result));
  }
  return map;
}

// Lines of 64 elements of a row-major matrix, in a box of `box_rows` rows by `box_blocks` k-blocks.
CUtensorMap line_map(const void* data, DType dtype, int rows, int columns, int box_rows, int box_blocks) {
  const cuuint64_t row_bytes = 2 * static_cast<cuuint64_t>(columns);
  return tensor_map<3>(data, dtype, {kBlock, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(columns / kBlock)},
                       {row_bytes, 2 * kBlock},
                       {kBlock, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_blocks)});
}

// The same for gate rows over up rows: eight of each in turn.
CUtensorMap gate_up_map(const void* data, DType dtype, int rows, int columns, int box_rows, int box_blocks) {
  const cuuint64_t row_bytes = 2 * static_cast<cuuint64_t>(columns);
  const cuuint64_t channels = rows / 2;
  return tensor_map<5>(data, dtype, {kBlock, 8, 2, channels / 8, static_cast<cuuint64_t>(columns / kBlock)},
                       {row_bytes, channels * row_bytes, 8 * row_bytes, 2 * kBlock},
                       {kBlock, 8, 2, static_cast<cuuint32_t>(box_rows / 16), static_cast<cuuint32_t>(box_blocks)});
}

// ---- launching

TensorWeights::Operand weight_map(const void* weight, const Shape& shape, const Plan& plan, DType dtype) {
  const auto map = shape.epilogue == Epilogue::kSiluMul ? gate_up_map : line_map;
  return {map(weight, dtype, shape.out_rows, shape.in_features, plan.rows, plan.stage_blocks)};
}

TensorActivations::Operand activation_map(const void* x, const Shape& shape, const Plan& plan, DType dtype) {
  return {line_map(x, dtype, shape.batch, shape.in_features, plan.columns, plan.stage_blocks)};
}

AsyncWeights::Operand weight_lines(const void* weight, const Shape& shape) {
  return {static_cast<const char*>(weight), shape.out_rows, shape.in_features / kBlock};
}

AsyncActivations::Operand activation_lines(const void* x, const Shape& shape) {
  return {static_cast<const char*>(x), shape.batch, shape.in_features / kBlock};
}

void require_aligned(const char* what, std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
      throw OpError(std::string(what) + ": tensors must be 16-byte aligned");
  }
}

// Evenly spread over all of it, since every block of the next kernel begins with rows of its own.
void set_ahead(KernelArgs& args, const Ahead& ahead, int blocks) {
  constexpr int64_t kLine = 128;
  const int64_t pieces = int64_t{blocks} * kAheadPieces;
  args.ahead = static_cast<const char*>(ahead.data);
  args.ahead_stride = static_cast<int>(ahead.bytes / pieces / kLine * kLine);
  args.ahead_bytes = static_cast<int>(std::min<int64_t>(kAheadBytes / pieces / kLine * kLine, args.ahead_stride));
}

}  // namespace

void allow_shared_memory(const void* kernel, int shared_bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> allowed;  // (device, kernel) -> bytes
  const std::lock_guard lock(mutex);
  int& most = allowed[{current_device().id, kernel}];
  if (shared_bytes <= most) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "decode_linear");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "decode_linear");
  most = shared_bytes;
}

Target target_of_device(bool portable) {
  const Device& device = current_device();
  int shared_bytes = 0;
  check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.id),
        "cudaDeviceGetAttribute");
  const bool tensor_copies = !portable && device.capability >= 90 && shared_bytes >= kTensorSharedBytes;
  return {device.multiprocessors, shared_bytes, tensor_copies, tensor_copies && device.capability == 90};
}

void launch_planned(const Shape& shape, const Plan& plan, const Target& target, const Matrices& matrices, DType dtype,
                    KernelArgs args, const Ahead& ahead, const Launch& launch) {
  args.plan = plan;
  args.epilogue = shape.epilogue;
  args.batch = shape.batch;
  set_ahead(args, ahead, plan.grid);
  require_aligned("decode_linear",
                  {matrices.weight, matrices.x, args.out, args.residual, args.scaled, args.norm_weight, args.ahead});
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    if (!target.tensor_copies) {
      launch_linear<T>(LinearCall<AsyncWeights, AsyncActivations>{weight_lines(matrices.weight, shape),
                                                                  activation_lines(matrices.x, shape), args, launch});
    } else if (plan.columns <= kFewColumns) {
      launch_linear<T>(LinearCall<TensorWeights, AsyncActivations>{weight_map(matrices.weight, shape, plan, dtype),
                                                                   activation_lines(matrices.x, shape), args, launch});
    } else {
      launch_linear<T>(LinearCall<TensorWeights, TensorActivations>{weight_map(matrices.weight, shape, plan, dtype),
                                                                    activation_map(matrices.x, shape, plan, dtype),
                                                                    args, launch});
    }
  });
}

namespace {

void launch_shape(const char* op, const Shape& shape, const Matrices& matrices, DType dtype, bool portable,
                  const KernelArgs& args, const Ahead& ahead, const Launch& launch) {
  const Target target = target_of_device(portable);
  Plan plan;
  if (!is_16_bit(dtype) || !servable(shape) || !find_plan(shape, target, plan)) {
    throw OpError(std::string(op) + ": this shape is not served; ask decode_linear_supported first");
  }
  if (args.best != nullptr && !plan.direct) {
    throw OpError(std::string(op) + ": no best for this shape; ask decode_head_finds_best first");
  }
  launch_planned(shape, plan, target, matrices, dtype, args, ahead, launch);
}

void launch_normed(const char* op, Epilogue epilogue, const DecodeNormLinearArgs& args) {
  KernelArgs kernel{};
  kernel.out_features = args.out_features;
  kernel.out = args.out;
  kernel.out_is_float = args.out_dtype == DType::kFloat32;
  if (!kernel.out_is_float && args.out_dtype != args.dtype) throw OpError(std::string(op) + ": out_dtype");
  kernel.square_sums_in = args.stream.square_sums;
  kernel.parts_in = decode_square_sum_parts(args.stream.hidden);
  kernel.hidden = args.stream.hidden;
  kernel.eps = args.eps;
  kernel.best = reinterpret_cast<unsigned long long*>(args.best);
  kernel.wanted = args.wanted;
  kernel.vocab = args.vocab;
  kernel.opens_step = args.opens_step;
  if (args.best != nullptr && !kernel.out_is_float) throw OpError(std::string(op) + ": the best of fp32 results only");
  launch_shape(op, shape_of(epilogue, args.out_features, args.stream.hidden, args.batch),
               {args.weight, args.stream.scaled}, args.dtype, args.portable, kernel, {}, args.launch);
}

}  // namespace
}  // namespace decode

bool decode_linear_supported(DecodeLinear op, int64_t out_features, int64_t in_features, int64_t batch, DType dtype) {
  const auto epilogue = op == DecodeLinear::kNormLinear   ? decode::Epilogue::kStore
                        : op == DecodeLinear::kNormGateUp ? decode::Epilogue::kSiluMul
                                                          : decode::Epilogue::kAddResidual;
  if (!decode::is_16_bit(dtype) || current_device().capability < 80) return false;
  const decode::Shape shape = decode::shape_of(epilogue, out_features, in_features, batch);
  decode::Plan plan;
  return decode::servable(shape) && decode::find_plan(shape, decode::target_of_device(false), plan);
}

bool decode_head_finds_best(int64_t out_features, int64_t in_features, int64_t batch, DType dtype) {
  if (!decode_linear_supported(DecodeLinear::kNormLinear, out_features, in_features, batch, dtype)) return false;
  decode::Plan plan;
  return decode::find_plan(decode::shape_of(decode::Epilogue::kStore, out_features, in_features, batch),
                           decode::target_of_device(false), plan) &&
         plan.direct;
}

int32_t decode_square_sum_parts(int32_t hidden) { return hidden / decode::square_sum_channels(hidden); }

void decode_norm_linear(const DecodeNormLinearArgs& args) {
  decode::launch_normed("decode_norm_linear", decode::Epilogue::kStore, args);
}

void decode_norm_gate_up(const DecodeNormLinearArgs& args) {
  require(args.out_dtype == args.dtype, "decode_norm_gate_up: out must have the weight's dtype");
  decode::launch_normed("decode_norm_gate_up", decode::Epilogue::kSiluMul, args);
}

void decode_linear_add(const DecodeLinearAddArgs& args) {
  decode::KernelArgs kernel{};
  kernel.out_features = args.stream.hidden;
  kernel.residual = args.stream.residual;
  kernel.scaled = args.stream.scaled;
  kernel.square_sums_out = args.stream.square_sums;
  kernel.parts_out = decode_square_sum_parts(args.stream.hidden);
  kernel.norm_weight = args.norm_weight;
  decode::launch_shape(
      "decode_linear_add",
      decode::shape_of(decode::Epilogue::kAddResidual, args.stream.hidden, args.in_features, args.batch),
      {args.weight, args.x}, args.dtype, args.portable, kernel, args.ahead, args.launch);
}

}  // namespace octavo::gpu
