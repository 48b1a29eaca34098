#include "octavo/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/element.h"
#include "cpu/thread_pool.h"
#include "octavo/random.h"

namespace octavo::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Rows that nobody can sample from: NaN, +inf, or all -inf.
bool usable(const std::vector<float>& scores) {
  bool any = false;
  for (const float score : scores) {
    if (std::isnan(score) || score == -kLowest) return false;
    any |= score != kLowest;
  }
  return any;
}

int32_t largest(const std::vector<float>& scores) {
  return static_cast<int32_t>(std::max_element(scores.begin(), scores.end()) - scores.begin());
}

// The lowest score that top-k and top-p keep.
float cutoff(const std::vector<float>& scores, float highest, int32_t top_k, float top_p) {
  std::vector<float> sorted = scores;
  float lowest = kLowest;
  if (top_k > 0 && top_k < static_cast<int32_t>(sorted.size())) {
    std::nth_element(sorted.begin(), sorted.begin() + top_k - 1, sorted.end(), std::greater<>());
    lowest = sorted[top_k - 1];
  }
  if (top_p >= 1.0f) return lowest;
  std::erase_if(sorted, [&](float score) { return score < lowest || fixed_weight(score - highest) == 0; });
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  uint64_t total = 0;
  for (const float score : sorted) total += fixed_weight(score - highest);
  const uint64_t target = top_p_target(top_p, total);
  uint64_t likelier = 0, equal = 0;  // weights strictly above, and at, the score looked at
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i > 0 && sorted[i] != sorted[i - 1]) {
      likelier += equal;
      equal = 0;
      if (likelier >= target) return sorted[i - 1];
    }
    equal += fixed_weight(sorted[i] - highest);
  }
  return sorted.empty() ? highest : sorted.back();
}

struct Draw {
  float lowest;   // of the scores kept by top-k and top-p
  float highest;  // of all scores
  float min_p;
  uint64_t seed;
  uint32_t position;

  int32_t from(const std::vector<float>& scores) const {
    const auto vocab = static_cast<int32_t>(scores.size());
    int32_t best = -1;
    float best_score = kLowest;
    FourWords words{};
    int32_t group = -1;
    for (int32_t id = 0; id < vocab; ++id) {
      const float score = scores[id];
      if (score < lowest || score == kLowest) continue;
      if (min_p > 0.0f && exact_exp(score - highest) < min_p) continue;
      if (id / 4 != group) words = philox(seed, position, group = id / 4);
      const float noisy = score + gumbel(words.word[id % 4]);
      if (noisy > best_score) {
        best = id;
        best_score = noisy;
      }
    }
    return best;
  }
};

template <class T>
int32_t sample_row(const SampleArgs& args, int64_t row) {
  const T* logits = static_cast<const T*>(args.logits) + row * args.logits_stride;
  std::vector<float> scores(args.vocab);
  for (int32_t id = 0; id < args.vocab; ++id) scores[id] = load(logits[id]);
  if (!usable(scores)) return -1;
  const float temperature = args.temperature != nullptr ? args.temperature[row] : 0.0f;
  if (temperature <= kGreedyTemperature) return largest(scores);
  const float inverse = 1.0f / temperature;
  for (float& score : scores) score *= inverse;
  const float highest = scores[largest(scores)];
  const Draw draw{cutoff(scores, highest, args.top_k[row], args.top_p[row]), highest, args.min_p[row], args.seeds[row],
                  static_cast<uint32_t>(args.positions[row])};
  return draw.from(scores);
}

}  // namespace

void sample(const SampleArgs& args) {
  with_element(args.dtype, [&]<class T>(T) {
    parallel_for(args.num_rows, [&](int64_t row) {
      args.tokens[row] = sample_row<T>(args, row);
      if (args.newest != nullptr) args.newest[args.targets[row]] = std::max(args.tokens[row], 0);
    });
  });
}

}  // namespace octavo::cpu
