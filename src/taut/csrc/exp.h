// Powers, inline: a call into libm would stop vectorisation.
#pragma once

#include "vec.h"

constexpr float LOG2E = 1.4426950408889634f;

// 2^x: to 3e-6 where the result becomes a bfloat16, else to 1e-7; 0 far below, and for -inf. Dot is
// what products are made of; its units hold two numbers where those are bfloat16. See tile.h.
template <class Dot>
INLINE F exp2_(F x) {
#if defined(__AVX512F__)
  const F r = (F)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
#else
  const I is_far = x < -126.f;
  x = is_far ? splat(-126.f) : x;
  const I whole = __builtin_convertvector(x, I);  // towards zero
  const I floor_x = whole + (x < __builtin_convertvector(whole, F));
  const F r = x - __builtin_convertvector(floor_x, F);
#endif
  F p;
  if constexpr (Dot::SIZE == 2) {
    p = r * 0.01353416806f + 0.0520114603f;
    p = p * r + 0.2414427571f;
    p = p * r + 0.6930038344f;
    p = p * r + 1.000002593f;
  } else {
    p = r * 2.170225568e-4f + 1.243968775e-3f;
    p = p * r + 9.678841007e-3f;
    p = p * r + 5.548334198e-2f;
    p = p * r + 2.402298363e-1f;
    p = p * r + 6.931469838e-1f;
    p = p * r + 1.f;
  }
#if defined(__AVX512F__)
  return (F)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
#else
  return (F)(((I)p + (floor_x << 23)) & ~is_far);
#endif
}
