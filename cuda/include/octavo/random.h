// The arithmetic of sampling, the same bits on every processor: Philox, noise, weights. Only operations that IEEE 754
// rounds exactly are used, and a product is added to something by an explicit fma only, so that no compiler can round
// differently; a draw is the same token on the CPU and on any GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define OCTAVO_BOTH __host__ __device__ __forceinline__
#else
#define OCTAVO_BOTH inline
#endif

namespace octavo {

OCTAVO_BOTH uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

OCTAVO_BOTH float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Order of unsigned integers = order of floats; -0 counts as 0. Of finite values only 0 has two encodings.
OCTAVO_BOTH uint32_t ordered_key(float x) {
  const uint32_t bits = bits_of(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

OCTAVO_BOTH float value_of_key(uint32_t key) { return float_of((key >> 31) != 0 ? key & 0x7fffffffu : ~key); }

// A score and its token id in one integer: the larger score wins, and of equal ones the lower id. 0: no token yet.
OCTAVO_BOTH uint64_t packed_score(float score, int32_t id) {
  return static_cast<uint64_t>(ordered_key(score)) << 32 | static_cast<uint32_t>(~id);
}
OCTAVO_BOTH int32_t id_of(uint64_t packed) { return static_cast<int32_t>(~static_cast<uint32_t>(packed)); }
constexpr uint64_t kUnusableScore = ~0ull;  // above every score: a logit is NaN or +inf

// One instruction on a GPU, which the compiler makes two of in the C++.
OCTAVO_BOTH uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0,%1,%2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

struct FourWords {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon et al., SC 2011). key = seed, low word first; counter = (group, position, 0, 0). Word i belongs
// to token id 4 * group + i.
OCTAVO_BOTH FourWords philox(uint64_t seed, uint32_t position, uint32_t group) {
  uint32_t c0 = group, c1 = position, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = wide_product(0xD2511F53u, c0), p1 = wide_product(0xCD9E8D57u, c2);
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// (word + 1/2) / 2^32, at most 1 - 2^-24: never 0 and never 1, and fine-grained near 0.
OCTAVO_BOTH float uniform(uint32_t word) {
  const float v = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  return v < 0x1.fffffep-1f ? v : 0x1.fffffep-1f;
}

// log(x) of a normal positive x, within 2 ulp: x = 2^e * (1 + f), sqrt(1/2) <= 1 + f < sqrt(2), then a polynomial in f.
OCTAVO_BOTH float exact_log(float x) {
  const uint32_t shifted = bits_of(x) + (0x3f800000u - 0x3f3504f3u);
  const float e = static_cast<float>(static_cast<int32_t>(shifted >> 23) - 127);
  const float f = float_of((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const float f2 = f * f;
  float q = -0x1.4bd7d4p-4f;
  q = fmaf(q, f, 0x1.0459a4p-3f);
  q = fmaf(q, f, -0x1.09abfap-3f);
  q = fmaf(q, f, 0x1.22dc3cp-3f);
  q = fmaf(q, f, -0x1.54d54cp-3f);
  q = fmaf(q, f, 0x1.99a14ep-3f);
  q = fmaf(q, f, -0x1.0000c8p-2f);
  q = fmaf(q, f, 0x1.555552p-2f);
  const float tail = fmaf(q, f2 * f, -0.5f * f2);
  const float rest = f + fmaf(e, 0x1.7f7d1cp-20f, tail);  // ln 2 = 0x1.62e4p-1 + 0x1.7f7d1cp-20
  return fmaf(e, 0x1.62e4p-1f, rest);
}

// exp(x) of x <= 0, within 2 ulp; 0 below -80.
OCTAVO_BOTH float exact_exp(float x) {
  if (!(x > -80.0f)) return 0.0f;
  const float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p23f);  // so that it is rounded to an integer
  const float n = shifted - 0x1.8p23f;
  const float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, x));
  float p = 0x1.6d7544p-10f;
  p = fmaf(p, r, 0x1.123d92p-7f);
  p = fmaf(p, r, 0x1.5554acp-5f);
  p = fmaf(p, r, 0x1.55547cp-3f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  return p * float_of((bits_of(shifted) + 127) << 23);  // p * 2^n
}

// -log(1 - v): exponential noise of a uniform v. The smallest of many wins a draw, so small ones are exact.
OCTAVO_BOTH float exponential(float v) {
  if (v >= 0.25f) return -exact_log(1.0f - v);
  float p = 0x1.2f348cp-2f;
  p = fmaf(p, v, 0x1.2da68p-4f);
  p = fmaf(p, v, 0x1.6f8b1p-3f);
  p = fmaf(p, v, 0x1.9730a4p-3f);
  p = fmaf(p, v, 0x1.000d4ap-2f);
  p = fmaf(p, v, 0x1.55551ep-2f);
  p = fmaf(p, v, 0.5f);
  return fmaf(p, v * v, v);
}

// Standard Gumbel noise of a Philox word: -log(-log(u)) with u = 1 - uniform(word).
OCTAVO_BOTH float gumbel(uint32_t word) { return -exact_log(exponential(uniform(word))); }

// A probability's weight in fixed point: sums do not depend on their order. x <= 0 is score - highest score.
OCTAVO_BOTH uint64_t fixed_weight(float x) { return static_cast<uint64_t>(exact_exp(x) * 0x1p40f); }

// The weight below which top-p's kept tokens start: a token stays while less than this much is strictly likelier.
OCTAVO_BOTH uint64_t top_p_target(float top_p, uint64_t total) {
  const auto target = static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
  return target > 0 ? target : 1;  // the likeliest always stays
}

}  // namespace octavo
