// The criterion on rows of logits, its gradient, and sums of weight gradients over chunks of rows. See
// ops/cross_entropy.py for the formulas.

#include <algorithm>
#include <vector>

#include "activation.h"
#include "columns.h"

extern "C" struct CrossEntropy {
  int64_t rows, classes, ignore_index;
  const void* logits;
  const int64_t* targets;
  const float* drows;  // null: no gradient
  void* grad;          // may be the logits themselves
  float* loss;         // null: the statistics are read, not made
  float* stats;        // of each row the maximum and the sum of exp(z - maximum); may be null
  uint8_t* correct;
  double on_target, on_all, z_loss;
};

constexpr int64_t BLOCK = 1024;  // columns that stay in the L1 cache between two sweeps

// Of one row. The exponentials of a block are relative to the largest logit up to its end.
struct Sums {
  float max;
  double exp, logits;  // sums of exp(z - max) and of z - max
};

// Lanes past the end of a row, which must not count.
INLINE F past_as(F v, F, Full) { return v; }
INLINE F past_as(F v, F other, Part t) { return blend(unpack_bits((1 << t.n) - 1), v, other); }

// Calls body(column, lanes, chain) over a row: four chains of sums hide the latency of an addition.
template <class Body>
INLINE void for_chains(int64_t width, Body body) {
  int64_t c = 0;
  for (; c + TILE <= width; c += TILE)
    UNROLL_4
    for (int j = 0; j < 4; ++j) body(c + j * LANES, Full{}, j);
  for (; c + LANES <= width; c += LANES) body(c, Full{}, 0);
  if (c < width) body(c, Part{width - c}, 0);
}

template <class T>
INLINE float largest(const T* z, int64_t width) {
  const F least = splat(-INFINITY);
  F most[4] = {least, least, least, least};
  for_chains(width, [&](int64_t c, auto n, int j) INLINE_LAMBDA {
    most[j] = max_(past_as(load(z + c, n), least, n), most[j]);
  });
  const F v = max_(max_(most[0], most[1]), max_(most[2], most[3]));
  float max = v[0];
  for (int i = 1; i < LANES; ++i) max = v[i] > max ? v[i] : max;
  return max;
}

// Fills exps, unless it is null, and refs, what the exponentials of each block are relative to.
template <class T>
static Sums sum_row(const T* z, int64_t classes, float* exps, float* refs) {
  Sums s{-3e38f, 0, 0};  // finite: the difference of two infinities would be NaN
  for (int64_t first = 0; first < classes; first += BLOCK) {
    const int64_t width = std::min(BLOCK, classes - first);
    const T* block = z + first;
    const float max = largest(block, width);
    if (max > s.max) {
      s.exp *= std::exp((double)s.max - max);
      s.logits += first * ((double)s.max - max);
      s.max = max;
    }
    refs[first / BLOCK] = s.max;
    const F ref = splat(s.max);
    F sum[4] = {}, distance[4] = {};
    for_chains(width, [&](int64_t c, auto n, int j) INLINE_LAMBDA {
      const F d = load(block + c, n) - ref, e = past_as(exp_(d), F{}, n);
      sum[j] += e;
      distance[j] += past_as(d, F{}, n);
      if (exps) store(exps + first + c, e, Full{});
    });
    s.exp += sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    s.logits += sum_lanes((distance[0] + distance[1]) + (distance[2] + distance[3]));
  }
  return s;
}

// dz = scale * exp(z - max) - down, from what sum_row left.
template <class T>
static void write_grad(T* grad, int64_t classes, const float* exps, const float* refs, float max,
                       float scale, float down) {
  float ref = max, factor = scale;
  for (int64_t first = 0; first < classes; first += BLOCK) {
    if (refs[first / BLOCK] != ref) {
      ref = refs[first / BLOCK];
      factor = scale * std::exp(ref - max);
    }
    for_columns(std::min(BLOCK, classes - first), [&](int64_t c, auto n) INLINE_LAMBDA {
      store(grad + first + c, load(exps + first + c, Full{}) * factor - down, n);
    });
  }
}

template <class T>
static void row(const CrossEntropy& a, int64_t r, float* exps, float* refs) {
  const int64_t target = a.targets[r];
  T* grad = a.grad ? (T*)a.grad + r * a.classes : nullptr;
  if (target == a.ignore_index) {
    if (grad) std::memset((void*)grad, 0, a.classes * sizeof(T));
    if (a.loss) a.loss[r] = 0, a.correct[r] = 0;
    if (a.loss && a.stats) a.stats[2 * r] = 0, a.stats[2 * r + 1] = 1;
    return;
  }
  const T* z = (const T*)a.logits + r * a.classes;
  const float own = load(z + target, Part{1})[0];
  float max, exp;
  if (a.loss) {
    const Sums s = sum_row(z, a.classes, grad ? exps : nullptr, refs);
    max = s.max, exp = s.exp;
    const double log_sum = std::log(s.exp), lse = s.max + log_sum;
    double loss = log_sum - a.on_target * ((double)own - s.max) + a.z_loss * lse * lse;
    if (a.on_all != 0) loss -= a.on_all * s.logits;  // where a logit is -inf, 0 times it is NaN
    a.loss[r] = loss;
    bool is_first = own == max;
    for (int64_t c = 0; is_first && c < target; ++c) is_first = load(z + c, Part{1})[0] != max;
    a.correct[r] = is_first;
    if (a.stats) a.stats[2 * r] = max, a.stats[2 * r + 1] = exp;
  } else {
    max = a.stats[2 * r], exp = a.stats[2 * r + 1];
  }
  if (!grad) return;
  const double up = a.drows[r], lse = max + std::log((double)exp);
  const double factor = up * (1 + 2 * a.z_loss * lse) / exp;
  const float scale = factor, down = up * a.on_all;
  const float at_target = std::exp((double)own - max) * factor - up * (a.on_all + a.on_target);
  if (a.loss)
    write_grad(grad, a.classes, exps, refs, max, scale, down);
  else
    for_columns(a.classes, [&](int64_t c, auto n) INLINE_LAMBDA {
      store(grad + c, exp_(load(z + c, n) - max) * scale - down, n);
    });
  store(grad + target, splat(at_target), Part{1});
}

EXPORT void taut_cross_entropy(int32_t dtype, const CrossEntropy* a) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel if (a->rows * a->classes > SERIAL_ELEMENTS)
    {
      Scratch<float> exps(a->grad && a->loss ? padded(a->classes) : 0);
      std::vector<float> refs(a->classes / BLOCK + 1);
#pragma omp for schedule(static)
      for (int64_t r = 0; r < a->rows; ++r) row<T>(*a, r, exps.data(), refs.data());
    }
  });
}

template <bool HAS_LOW, bool IS_LAST>
static void accumulate(int64_t size, const bf16* add, bf16* high, uint16_t* low) {
  constexpr int64_t piece = 4096;
#pragma omp parallel for schedule(static) if (size > SERIAL_ELEMENTS)
  for (int64_t first = 0; first < size; first += piece)
    for_columns(std::min(piece, size - first), [&](int64_t offset, auto n) INLINE_LAMBDA {
      const int64_t c = first + offset;
      U total = (U)load(high + c, n);
      if (HAS_LOW) total |= __builtin_convertvector(load_words<H>(low + c, n), U);
      const F sum = (F)total + load(add + c, n);
      if (IS_LAST) {
        store(high + c, sum, n);
      } else {
        store_words(&high[c].bits, __builtin_convertvector((U)sum >> 16, H), n);
        store_words(low + c, __builtin_convertvector((U)sum, H), n);
      }
    });
}

// Adds to floats whose upper halves are bfloat16 in `high` and whose lower halves lie in `low`; without
// has_low those are zero. The last sum is rounded to bfloat16 and leaves `low`, which may be null, alone.
EXPORT void taut_accumulate(int64_t size, const bf16* add, bf16* high, uint16_t* low, int32_t has_low,
                            int32_t is_last) {
  if (has_low && is_last) accumulate<true, true>(size, add, high, low);
  else if (has_low) accumulate<true, false>(size, add, high, low);
  else if (is_last) accumulate<false, true>(size, add, high, low);
  else accumulate<false, false>(size, add, high, low);
}
