// Sixteen floats at a time: storage types, loads, stores, selection. The vector types are GCC's and
// Clang's own, so one source serves every instruction set; intrinsics stand where those fall short.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#if defined(__AVX512F__)  // elsewhere a vector is several registers, and unrolling only grows the code
#define UNROLL_4 _Pragma("GCC unroll 4")
#define LARGE INLINE
#else
#define UNROLL_4 _Pragma("GCC unroll 1")
#define LARGE inline __attribute__((noinline))
#endif

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));  // sixteen 16-bit storage words

constexpr int64_t LANES = 16;

// Scratch memory, not initialised. Its lines are a cache's lines: a vector that straddles two costs two.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t size) : lines(new F[(size * sizeof(T) + sizeof(F) - 1) / sizeof(F)]) {}
  T* data() { return (T*)lines.get(); }

 private:
  std::unique_ptr<F[]> lines;
};
constexpr int64_t TILE = 4 * LANES;        // four chains of additions hide their latency
constexpr int64_t SERIAL_ELEMENTS = 8192;  // below it waking threads costs more than the work

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

struct Full {
  static constexpr int64_t n = LANES;
};
struct Part {
  int64_t n;  // 0 < n <= LANES; lanes past it load as zero and are not stored
};

INLINE F splat(float x) { return F{} + x; }
INLINE F max_(F a, F b) { return a > b ? a : b; }
INLINE F min_(F a, F b) { return a < b ? a : b; }
INLINE F abs_(F a) { return (F)((I)a & 0x7fffffff); }

INLINE float sum_lanes(F v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
#endif
}

// ---- words of 16 and 32 bits

template <class V, class W>
INLINE V load_words(const W* p, Full) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class W>
INLINE V load_words(const W* p, Part t) {
#if defined(__AVX512BW__)
  const uint32_t lanes = (1u << t.n) - 1;
  if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_loadu_epi32(lanes, p);
  else return (V)_mm256_maskz_loadu_epi16(lanes, p);
#else
  V v{};
  std::memcpy(&v, p, t.n * sizeof(W));
  return v;
#endif
}
template <class V, class W>
INLINE void store_words(W* p, V v, Full) {
  std::memcpy(p, &v, sizeof(V));
}
template <class V, class W>
INLINE void store_words(W* p, V v, Part t) {
#if defined(__AVX512BW__)
  const uint32_t lanes = (1u << t.n) - 1;
  if constexpr (sizeof(V) == 64) _mm512_mask_storeu_epi32(p, lanes, (__m512i)v);
  else _mm256_mask_storeu_epi16(p, lanes, (__m256i)v);
#else
  std::memcpy(p, &v, t.n * sizeof(W));
#endif
}

// ---- storage to float and back

INLINE F from_bf16(H h) { return (F)(__builtin_convertvector(h, U) << 16); }
INLINE H to_bf16(F v) {  // to nearest even
#if defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)v);
#else
  const U u = (U)v;
  const U rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : U{} + 0x7fc0, H);
#endif
}

#if defined(__AVX512F__)
INLINE F from_f16(H h) { return (F)_mm512_cvtph_ps((__m256i)h); }
INLINE H to_f16(F v) { return (H)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__F16C__)
INLINE F from_f16(H h) {
  __m128i half[2];
  __m256 single[2];
  F v;
  std::memcpy(half, &h, sizeof(h));
  for (int i = 0; i < 2; ++i) single[i] = _mm256_cvtph_ps(half[i]);
  std::memcpy(&v, single, sizeof(v));
  return v;
}
INLINE H to_f16(F v) {
  __m256 single[2];
  __m128i half[2];
  H h;
  std::memcpy(single, &v, sizeof(v));
  for (int i = 0; i < 2; ++i) half[i] = _mm256_cvtps_ph(single[i], _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(&h, half, sizeof(h));
  return h;
}
#else
INLINE F from_f16(H h) {
  const U u = __builtin_convertvector(h, U);
  const U sign = (u & 0x8000) << 16, magnitude = (u & 0x7fff) << 13;
  // the exponent is rebased by a product, which also normalises subnormals; inf and NaN are patched
  const F scaled = (F)magnitude * 0x1p112f;
  const U finite = (U)scaled, special = magnitude | 0x7f800000;
  return (F)(sign | (magnitude >= (0x7c00u << 13) ? special : finite));
}
INLINE H to_f16(F v) {  // to nearest even
  const U u = (U)v, sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  const U normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const U subnormal = (U)((F)magnitude + 0.5f) - 0x3f000000;  // ulp of 0.5 is the smallest half
  U h = magnitude < (113u << 23) ? subnormal : normal;
  h = h > 0x7c00 || magnitude >= 0x7f800000 ? U{} + 0x7c00 : h;
  h = magnitude > 0x7f800000 ? U{} + 0x7e00 : h;
  return __builtin_convertvector(sign | h, H);
}
#endif

template <class N>
INLINE F load(const float* p, N n) {
  return load_words<F>(p, n);
}
template <class N>
INLINE F load(const bf16* p, N n) {
  return from_bf16(load_words<H>(&p->bits, n));
}
template <class N>
INLINE F load(const f16* p, N n) {
  return from_f16(load_words<H>(&p->bits, n));
}
template <class N>
INLINE void store(float* p, F v, N n) {
  store_words(p, v, n);
}
template <class N>
INLINE void store(bf16* p, F v, N n) {
  store_words(&p->bits, to_bf16(v), n);
}
template <class N>
INLINE void store(f16* p, F v, N n) {
  store_words(&p->bits, to_f16(v), n);
}

// ---- one decision a lane

#if defined(__AVX512F__)
typedef __mmask16 Keep;
INLINE F select(Keep keep, F v) { return (F)_mm512_maskz_mov_ps(keep, (__m512)v); }
INLINE F blend(Keep keep, F v, F other) { return (F)_mm512_mask_mov_ps((__m512)other, keep, (__m512)v); }
INLINE Keep at_least(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
INLINE uint16_t pack_bits(Keep keep) { return keep; }
INLINE Keep unpack_bits(uint16_t bits) { return bits; }
#else
typedef I Keep;
INLINE F select(Keep keep, F v) { return (F)((I)v & keep); }
INLINE F blend(Keep keep, F v, F other) { return (F)(((I)v & keep) | ((I)other & ~keep)); }
INLINE Keep at_least(F a, F b) { return a >= b; }
INLINE uint16_t pack_bits(Keep keep) {
  uint16_t bits = 0;
  for (int i = 0; i < LANES; ++i) bits |= (keep[i] & 1) << i;
  return bits;
}
INLINE Keep unpack_bits(uint16_t bits) {
  I lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = 1 << i;
  return ((I{} + bits) & lanes) != 0;
}
#endif

// Calls body(column, lanes) over a row of `width` columns.
template <class Body>
INLINE void for_columns(int64_t width, Body body) {
  int64_t c = 0;
  for (; c + LANES <= width; c += LANES) body(c, Full{});
  if (c < width) body(c, Part{width - c});
}

// Calls body(kernel type tag) for the storage type that `dtype` names: 0 float, 1 bf16, 2 f16.
template <class Body>
INLINE void with_storage(int32_t dtype, Body body) {
  if (dtype == 0) body(float{});
  else if (dtype == 1) body(bf16{});
  else body(f16{});
}
