// Rows that top-k, top-p or min-p filter: from the list of a row's highest scores if that holds all they keep, else
// from the whole row, read several times.
#pragma once

#include "gpu/sample_draw.cuh"
#include "gpu/sample_list.cuh"

namespace octavo::gpu::sampling {

// All scores of a row but those that nobody can draw.
template <int kThreads, class T>
struct RowScores {
  const Logits<T>& logits;
  const Row& row;

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    logits.template for_each_eight<kThreads, 1>(0, logits.vocab, [&](float (&x)[8], int) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float score = row.score(x[k]);
        if (score > lowest()) f(score);
      }
    });
  }
};

// What is kept of a row.
struct Kept {
  float floor, highest, min_p;

  __device__ bool holds(float score) const {
    return score >= floor && (min_p <= 0.0f || exact_exp(score - highest) >= min_p);
  }
};

constexpr uint64_t kIncomplete = kUnusableScore - 1;  // no score with an id either

template <int kThreads, class T>
class Filter {
 public:
  __device__ Filter(Logits<T> logits, Row row) : logits_(logits), row_(row) {}

  // The winner, in all threads. kIncomplete: what is listed may not be all that is kept. `rough`: see Lister.
  __device__ __forceinline__ uint64_t draw_from_list(const List& list, const ListBound& bound, double rough) const {
    if (list.count() == 0) return bound.is_everything() ? 0 : kIncomplete;
    const ListedScores<kThreads> scores{list};
    const Range range = range_of<kThreads>(scores, [](float) { return true; });
    if (range.high == INFINITY) return kUnusableScore;
    Kept kept{lowest(), range.high, row_.min_p};
    if (!find_floor(scores, range, &bound, rough, kept.floor)) return kIncomplete;
    Draw draw(row_);
    for (int i = threadIdx.x; i < list.count(); i += kThreads) {
      if (kept.holds(list.scores()[i])) draw.offer(list.scores()[i], list.ids()[i]);
    }
    return block_max<kThreads>(draw.best());
  }

  __device__ __forceinline__ uint64_t draw_from_row() const {
    const RowScores<kThreads, T> scores{logits_, row_};
    const Range range = range_of<kThreads>(scores, [](float) { return true; });
    if (range.high == INFINITY) return kUnusableScore;
    if (range.high == lowest()) return 0;
    Kept kept{lowest(), range.high, row_.min_p};
    find_floor(scores, range, nullptr, 0.0, kept.floor);
    return sampling::draw_from_row<kThreads, 1>(logits_, 0, logits_.vocab, row_,
                                                [&](float score) { return kept.holds(score); });
  }

 private:
  // The lowest score that top-k and top-p keep; if that is not among `scores`, -inf where min-p keeps none below them
  // either, else false. `bound`: from where they are all of the row's; null: all there are.
  template <class Source>
  __device__ bool find_floor(const Source& scores, Range range, const ListBound* bound, double rough,
                             float& floor) const {
    bool complete = bound == nullptr || bound->is_everything();
    const float highest = range.high;
    if (row_.top_k > 0) {
      const Cutoff kth = find_cutoff<kThreads>(
          scores, range, [](float) { return 1u; }, [&](uint64_t) { return static_cast<uint64_t>(row_.top_k); });
      if (!kth.found && !complete) return false;
      if (kth.found) floor = range.low = kth.score;
      complete = true;
    }
    if (row_.top_p < 1.0f) {
      Rest rest{0, 0};
      if (!complete) rest = rough_rest(rough, rough_of(scores, *bound), *bound, highest, logits_.vocab);
      Cutoff nucleus;
      while (!find_nucleus(scores, range, highest, rest, nucleus)) {
        rest.least = rest.most = exact_rest<kThreads>(logits_, row_, *bound, highest);
      }
      if (nucleus.found) floor = nucleus.score;
      complete |= nucleus.found;
    }
    return complete || (row_.min_p > 0.0f && bound->score() < below_min_p(highest, row_.min_p) + 0.005f);
  }

  // False: it depends on what the rest weighs exactly.
  template <class Source>
  __device__ bool find_nucleus(const Source& scores, Range range, float highest, Rest rest, Cutoff& nucleus) const {
    uint64_t wanted_at_most = 0;
    nucleus = find_cutoff<kThreads>(
        scores, range, [&](float score) { return fixed_weight(score - highest); },
        [&](uint64_t total) {
          wanted_at_most = top_p_target(row_.top_p, total + rest.most);
          return top_p_target(row_.top_p, total + rest.least);
        });
    return !nucleus.found || wanted_at_most <= nucleus.through;
  }

  template <class Source>
  __device__ double rough_of(const Source& scores, const ListBound& bound) const {
    double sum = 0.0;
    scores.each([&](float score) { sum += static_cast<double>(rough_weight(bound.depth(score))); });
    return block_sum<kThreads>(sum);
  }

  Logits<T> logits_;
  Row row_;
};

// Functions of their own, or the kernel's loops had no registers left.
template <int kThreads, class T>
__device__ __noinline__ uint64_t draw_from_list(Filter<kThreads, T> filter, List list, ListBound bound, double rough) {
  return filter.draw_from_list(list, bound, rough);
}
template <int kThreads, class T>
__device__ __noinline__ uint64_t draw_from_row(Filter<kThreads, T> filter) {
  return filter.draw_from_row();
}

}  // namespace octavo::gpu::sampling
