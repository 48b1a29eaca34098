// How decode attention's keys and values lie in shared memory, and where a lane finds its share of them.
#pragma once

#include <cstdint>

#include "gpu/decode_plan.cuh"
#include "gpu/ptx.cuh"

namespace octavo::gpu {

constexpr unsigned kAllLanes = ~0u;

// How kLanes lanes share one row of kLanes * kWords * 2 elements: 16 bytes each, over again, then a narrower rest.
template <int kLanes, int kWords>
struct SharedRow {
  static constexpr int kWide = kWords / 4;
  static constexpr int kRest = kWords % 4;
  static_assert(kRest != 3);

  static __device__ __forceinline__ int element(int lane, int word) {
    if (word < 4 * kWide) return 8 * (kLanes * (word / 4) + lane) + 2 * (word % 4);
    return 8 * kLanes * kWide + 2 * (kRest * lane + word - 4 * kWide);
  }

  // Where the warp's lane finds its share in shared memory, 128 * kWords bytes for all lanes: the wide pieces of all
  // lanes, one after another, then what is left.
  static __device__ __forceinline__ uint32_t place(uint32_t landing, int warp_lane, int piece) {
    return landing + 512 * piece + (piece < kWide ? 16 : 4 * kRest) * warp_lane;
  }

  // Copies lane's share of `row` to `landing`, in the background.
  template <class T>
  static __device__ __forceinline__ void copy(uint32_t landing, int warp_lane, const T* row, int lane) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) ptx::copy_async<4>(place(landing, warp_lane, i), row + element(lane, 4 * i));
    if constexpr (kRest > 0) ptx::copy_async<kRest>(place(landing, warp_lane, kWide), row + element(lane, 4 * kWide));
  }
};

// Where a lane finds its share of one KV block of one head in shared memory. g = lane / 4 and c = lane % 4, as in the
// mma layouts: keys are rows g and g + 8, values rows value_token(0..3), in pieces of 16 bytes and perhaps a rest.
template <int kDim>
struct TileShape {
  static constexpr int kKeyWords = kDim / 8;
  static constexpr int kValueWords = kDim / 16;
  static constexpr int kKeyPieces = (kKeyWords + 3) / 4;
  static constexpr int kValuePieces = (kValueWords + 3) / 4;
  static constexpr int kKeyRest = kKeyWords % 4;  // words of the last piece, if it is not a whole one
  static constexpr int kValueRest = kValueWords % 4;
  static constexpr int kBytes = kBlockTokens * kDim * 2;  // of the keys, and of the values

  uint32_t keys, values;  // where they land
  int lane;

  __device__ __forceinline__ int g() const { return lane / 4; }
  __device__ __forceinline__ int c() const { return lane % 4; }
  __device__ __forceinline__ int value_token(int i) const { return 2 * c() + i % 2 + 8 * (i / 2); }
};

// As the lanes copy it: a lane's own, piece after piece.
template <int kDim>
struct LaneTile : TileShape<kDim> {
  using Shape = TileShape<kDim>;
  using KeyRow = SharedRow<4, Shape::kKeyWords>;
  using ValueRow = SharedRow<8, Shape::kValueWords>;
  static constexpr bool kTensorCopies = false;

  static __device__ __forceinline__ int key_element(int c, int piece) { return KeyRow::element(c, 4 * piece); }
  static __device__ __forceinline__ int value_element(int g, int word) { return ValueRow::element(g, word); }
  __device__ __forceinline__ uint32_t key(int half, int piece) const {
    return KeyRow::place(this->keys + half * 128 * Shape::kKeyWords, this->lane, piece);
  }
  __device__ __forceinline__ uint32_t value(int i, int piece) const {
    return ValueRow::place(this->values + i * 128 * Shape::kValueWords, this->lane, piece);
  }

  template <class T>
  __device__ __forceinline__ void copy_keys(const T* from) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      KeyRow::copy(this->keys + half * 128 * Shape::kKeyWords, this->lane, from + (this->g() + 8 * half) * kDim,
                   this->c());
    }
  }
  template <class T>
  __device__ __forceinline__ void copy_values(const T* from) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ValueRow::copy(this->values + i * 128 * Shape::kValueWords, this->lane, from + this->value_token(i) * kDim,
                     this->g());
    }
  }
};

// As tensor copies bring it: lines of 64 elements, all tokens' first lines, then their second ones. The 16-byte pieces
// of a line are permuted by the token modulo 8.
template <int kDim>
struct LineTile : TileShape<kDim> {
  using Shape = TileShape<kDim>;
  static constexpr bool kTensorCopies = true;
  static constexpr int kLines = kDim / 64;

  static __device__ __forceinline__ int key_element(int c, int piece) {
    return 64 * (piece / 2) + 16 * c + 8 * (piece % 2);
  }
  static __device__ __forceinline__ int value_element(int g, int word) {
    return 64 * (word / 4) + 8 * g + 2 * (word % 4);
  }
  __device__ __forceinline__ uint32_t key(int half, int piece) const {
    return place(this->keys, this->g() + 8 * half, piece / 2, 2 * this->c() + piece % 2);
  }
  __device__ __forceinline__ uint32_t value(int i, int piece) const {
    return place(this->values, this->value_token(i), piece, this->g());
  }

 private:
  static __device__ __forceinline__ uint32_t place(uint32_t at, int token, int line, int piece) {
    return at + (line * kBlockTokens + token) * 128 + (piece ^ token % 8) * 16;
  }
};

}  // namespace octavo::gpu
