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

  // The winner, in all threads. kIncomplete: what is listed may not be all that is kept. `rough`: see Lister. Leaves
  // nothing of the list.
  __device__ __forceinline__ uint64_t draw_from_list(const List& list, const ListBound& bound, double rough) const {
    const int count = list.count();
    if (count == 0) return bound.is_everything() ? 0 : kIncomplete;
    const ListedScores<kThreads> scores{list};
    Range range{lowest(), INFINITY};
    float listed_rough = 0.0f;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      Listed& listed = list.entries()[i];
      const float score = row_.score(logit_of<T>(listed.word, listed.id));
      listed.word = bits_of(score);
      range.high = fmaxf(range.high, score);
      range.low = fminf(range.low, score);
      listed_rough += rough_weight(bound.depth(score));
    }
    range = block_range<kThreads>(range);
    if (range.high == INFINITY) return kUnusableScore;
    const bool all = bound.is_everything();
    Rest rest{0, 0};
    if (!all && row_.nucleus_of_all()) {
      const double sum = block_sum<kThreads>(static_cast<double>(listed_rough));
      rest = rough_rest(rough, sum, count / kThreads + 1, bound, range.high, logits_.vocab);
    }
    const bool min_p_drops_rest = row_.min_p > 0.0f && bound.score() < below_min_p(range.high, row_.min_p) + 0.005f;
    Floor floor{lowest(), lowest()};
    if (!find_floor(scores, range, rest, all, min_p_drops_rest, floor)) return kIncomplete;
    const uint64_t best = draw_from_kept(list, {floor.possible, range.high, row_.min_p});
    // What the rest weighs exactly matters to a token between the two floors only.
    const bool sure = best == 0 || floor.possible == floor.certain || row_.score(logits_[id_of(best)]) >= floor.certain;
    return sure ? best : kIncomplete;
  }

  __device__ __forceinline__ uint64_t draw_from_row() const {
    const RowScores<kThreads, T> scores{logits_, row_};
    const Range range = range_of<kThreads>(scores, [](float) { return true; });
    if (range.high == INFINITY) return kUnusableScore;
    if (range.high == lowest()) return 0;
    Floor floor{lowest(), lowest()};
    find_floor(scores, range, {0, 0}, true, true, floor);
    const Kept kept{floor.certain, range.high, row_.min_p};
    return sampling::draw_from_row<kThreads, 1>(logits_, 0, logits_.vocab, row_,
                                                [&](float score) { return kept.holds(score); });
  }

 private:
  // Top-k and top-p keep the scores from `certain` on, and perhaps some between the two.
  struct Floor {
    float possible, certain;
  };

  // False: some of the rest, which is below all of these, may be kept too. `all`: there is no rest.
  template <class Source>
  __device__ bool find_floor(const Source& scores, Range range, Rest rest, bool all, bool min_p_drops_rest,
                             Floor& floor) const {
    const float highest = range.high;
    if (row_.top_k > 0) {
      const Cutoff kth = find_cutoff<kThreads>(
          scores, range, [](float) { return 1u; }, [&](uint64_t) { return Target(static_cast<uint64_t>(row_.top_k)); });
      if (kth.state == Cutoff::kFound) {
        floor = {kth.score, kth.score};
        range.low = kth.score;
        all = true;
      } else if (!all) {
        return false;
      }
    }
    if (!(row_.top_p < 1.0f)) return all || min_p_drops_rest;
    const Cutoff nucleus = find_cutoff<kThreads>(
        scores, range, [&](float score) { return fixed_weight(score - highest); },
        [&](uint64_t total) {
          return Target(top_p_target(row_.top_p, total + rest.least), top_p_target(row_.top_p, total + rest.most));
        });
    if (nucleus.state == Cutoff::kUnsure) return false;
    if (nucleus.state == Cutoff::kFound) floor = {nucleus.low, nucleus.score};
    return all || nucleus.state == Cutoff::kFound || min_p_drops_rest;
  }

  // Noise costs most here: every warp first moves the kept of its part of the list together.
  __device__ uint64_t draw_from_kept(const List& list, const Kept& kept) const {
    const int lane = threadIdx.x % 32, part = (list.count() + kThreads / 32 - 1) / (kThreads / 32);
    const int begin = static_cast<int>(threadIdx.x) / 32 * part, end = min(begin + part, list.count());
    int kept_end = begin;
    for (int first = begin; first < end; first += 32) {
      const int i = first + lane;
      const Listed listed = i < end ? list.entries()[i] : Listed{};
      const bool keep = i < end && kept.holds(listed.score());
      const uint32_t keeping = __ballot_sync(kAll, keep);
      __syncwarp();
      if (keep) list.entries()[kept_end + __popc(keeping & ((1u << lane) - 1))] = listed;
      kept_end += __popc(keeping);
    }
    __syncwarp();
    Draw draw(row_);
    for (int i = begin + lane; i < kept_end; i += 32) {
      const Listed listed = list.entries()[i];
      draw.offer(listed.score(), listed.id);
    }
    return block_max<kThreads>(draw.best());
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
