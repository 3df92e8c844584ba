// exp and the activations with their derivatives, sixteen at a time, to about 2 ulp. Inline, since a
// call into libm would stop vectorisation.
#pragma once

#include "vec.h"

// exp, zero below the normal range.
LARGE F exp_(F x) {
  const F low = splat(-87.33f), high = splat(88.72f);
  const F clamped = x < low ? low : x > high ? high : x;  // keeps NaN
  const F magic = splat(12582912.f);                      // 1.5 * 2^23: adding it rounds to integer
  const F shifted = clamped * 1.44269504f + magic;
  const F n = shifted - magic;
  const F r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  F p = r * 1.3814521953463554e-3f + 8.368698880076408e-3f;
  p = p * r + 0.04166838899254799f;
  p = p * r + 0.1666652113199234f;
  p = p * r + 0.4999999403953552f;
  p = p * (r * r) + r + 1;
#if defined(__AVX512F__)
  const F y = (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // 2^n in two factors: n reaches 128, one more than a float's exponent
  const I e = (I)shifted - (I)magic, half = e >> 1;
  const F y = p * (F)((half + 127) << 23) * (F)((e - half + 127) << 23);
#endif
  return x < low ? F{} : y;
}

// sigmoid(x) and 1 - sigmoid(x), each to its own relative accuracy.
INLINE F sigmoid(F x, F& rest) {
  const F e = exp_(-abs_(x)), near = 1 / (1 + e), far = e * near;
  rest = x < 0 ? near : far;
  return x < 0 ? far : near;
}

// The normal distribution: cdf(x) and pdf(x). The tail is exp(-x^2/2) P(|x| - 2): it keeps its relative
// accuracy, 2e-7 down to -5.5, where 1 + erf would cancel. Past 5.5 it is at most 1e-9 off.
LARGE void normal(F x, F& cdf, F& pdf) {
  constexpr float P[] = {
      0.168102011f, -0.062738277f, 0.0213126205f, -0.00670430716f,
      0.00197639153f, -0.000550355879f, 0.000145426558f, -3.70170892e-05f,
      9.24816322e-06f, -2.10581038e-06f, 4.01060532e-07f, -9.59232906e-08f,
      3.29348886e-08f, -7.25560856e-09f, 6.21165175e-10f};
  const F t = min_(abs_(x), splat(5.5f)) - 2;
  const F e = exp_(-0.5f * x * x);
  F p = splat(P[14]);
#pragma GCC unroll 14
  for (int i = 13; i >= 0; --i) p = p * t + P[i];
  const F tail = e * p;
  cdf = x > 0 ? 1 - tail : tail;
  pdf = e * 0.3989422804f;
}

// Each activation gives its value and its first derivative; GELUs, which are inverted, the second too.
struct Gelu {
  static constexpr float min_x = -0.7517915247f, min_y = -0.1699712075f, curvature = 0.431493992f;
  INLINE static void all(F x, F& y, F& dy, F& ddy) {
    F cdf, pdf;
    normal(x, cdf, pdf);
    y = x * cdf;
    dy = cdf + x * pdf;
    ddy = pdf * (2 - x * x);
  }
};

struct GeluTanh {
  static constexpr float min_x = -0.7524614221f, min_y = -0.1700407506f, curvature = 0.430400091f;
  INLINE static void all(F x, F& y, F& dy, F& ddy) {
    constexpr float k = 1.5957691216f, c = 0.044715f;  // 2 sqrt(2 / pi)
    const F t = x < -30.f ? splat(-30.f) : x > 30.f ? splat(30.f) : x;  // its cube would overflow
    const F xx = t * t;
    F rest;
    const F s = sigmoid(t * (k + k * c * xx), rest);  // (1 + tanh) / 2 without its cancellation
    const F dv = k + 3 * k * c * xx, ss = s * rest, ds = ss * dv;
    y = x * s;
    dy = s + x * ds;
    ddy = 2 * ds + t * (ss * (6 * k * c) * t + ds * (rest - s) * dv);
  }
};

struct Relu {
  INLINE static void all(F x, F& y, F& dy, F&) {
    y = x <= 0 ? F{} : x;  // keeps NaN
    dy = x > 0 ? splat(1.f) : F{};
  }
};

struct Silu {
  INLINE static void all(F x, F& y, F& dy, F&) {
    F rest;
    const F s = sigmoid(x, rest);
    y = x * s;
    dy = s * (1 + x * rest);
  }
};

template <class Act>
INLINE F value(F x) {
  F y, dy, ddy;
  Act::all(x, y, dy, ddy);
  return y;
}
