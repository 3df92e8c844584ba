// GELU that keeps its output and one bit, and its backward pass by inversion. See ops/gelu.py.
#include "activation.h"

constexpr int64_t CHUNK = 64 * LANES;  // elements a task, whole bytes of bits

INLINE F sqrt_(F x) {
#if defined(__AVX512F__)
  return (F)_mm512_sqrt_ps((__m512)x);
#else
  for (int i = 0; i < LANES; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// ln(x) of a positive normal x to 1e-4: enough for a start.
INLINE F rough_log(F x) {
  const I exponent = ((I)x >> 23) - 127;
  const F m = (F)(((I)x & 0x7fffff) | 0x3f800000) - 1;
  F p = m * -0.0544f + 0.2164f;
  p = p * m - 0.4643f;
  p = p * m + 0.9954f;
  return p * m + __builtin_convertvector(exponent, F) * 0.693147f;
}

// GELU' as a function of GELU: x by two Halley steps from a start on its side of the minimum.
template <class Act>
INLINE F slope(F y, Keep right) {
  const F low = splat(Act::min_x), one = splat(1.f);
  const F near = sqrt_(max_((y - Act::min_y) * (2 / Act::curvature), F{}));
  const F density = min_(max_(y * -2.5066282746f, splat(1e-37f)), one);  // about exp(-x^2 / 2)
  const F tail = sqrt_(-2 * rough_log(density));
  const F start_right = y > 0.5f ? y : low + near;
  const F start_left = y > -0.1f ? -tail : low - near;
  F x = start_left + select(right, start_right - start_left);
  F g, dg, ddg;
#pragma GCC unroll 2
  for (int step = 0; step < 2; ++step) {
    Act::all(x, g, dg, ddg);
    const F f = g - y, scale = 2 * dg * dg - f * ddg;
    x -= abs_(scale) > 1e-30f ? 2 * f * dg / scale : F{};
    const F clamped_left = min_(x, low);
    x = clamped_left + select(right, max_(x, low) - clamped_left);
  }
  Act::all(x, g, dg, ddg);
  const F known = select(right, one) + (y < 0 ? one : F{});  // else the left tail underflowed
  return y > 10 ? one : known > 0 ? dg : y;
}

template <class T, class Act, class N>
INLINE void gelu_fwd(const T* x, T* y, uint8_t* side, N n) {
  const F v = load(x, n);
  store(y, value<Act>(v), n);
  const uint16_t bits = pack_bits(at_least(v, splat(Act::min_x))) & ((1 << n.n) - 1);
  std::memcpy(side, &bits, n.n > 8 ? 2 : 1);
}

template <class T, class Act, class N>
INLINE void gelu_bwd(const T* dy, const T* y, const uint8_t* side, T* dx, N n) {
  uint16_t bits = 0;
  std::memcpy(&bits, side, n.n > 8 ? 2 : 1);
  store(dx, load(dy, n) * slope<Act>(load(y, n), unpack_bits(bits)), n);
}

template <class Body>
INLINE void for_elements(int64_t size, Body body) {
#pragma omp parallel for schedule(static) if (size > SERIAL_ELEMENTS)
  for (int64_t begin = 0; begin < size; begin += CHUNK) {
    const int64_t end = begin + CHUNK < size ? begin + CHUNK : size;
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) body(i, Full{});
    if (i < end) body(i, Part{end - i});
  }
}

template <class Act>
static void gelu_fwd(int32_t dtype, int64_t size, const void* x, void* y, uint8_t* side) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    for_elements(size, [&](int64_t i, auto n) INLINE_LAMBDA {
      gelu_fwd<T, Act>((const T*)x + i, (T*)y + i, side + i / 8, n);
    });
  });
}

template <class Act>
static void gelu_bwd(int32_t dtype, int64_t size, const void* dy, const void* y, const uint8_t* side,
                     void* dx) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    for_elements(size, [&](int64_t i, auto n) INLINE_LAMBDA {
      gelu_bwd<T, Act>((const T*)dy + i, (const T*)y + i, side + i / 8, (T*)dx + i, n);
    });
  });
}

EXPORT void taut_gelu_fwd(int32_t dtype, int64_t size, const void* x, int32_t tanh, void* y,
                              uint8_t* side) {
  tanh ? gelu_fwd<GeluTanh>(dtype, size, x, y, side) : gelu_fwd<Gelu>(dtype, size, x, y, side);
}

EXPORT void taut_gelu_bwd(int32_t dtype, int64_t size, const void* dy, const void* y,
                              const uint8_t* side, int32_t tanh, void* dx) {
  tanh ? gelu_bwd<GeluTanh>(dtype, size, dy, y, side, dx)
       : gelu_bwd<Gelu>(dtype, size, dy, y, side, dx);
}
