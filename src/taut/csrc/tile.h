// Small matrix products on packed operands, for attention. A product sums over units of 32 bits: a
// float, or where the CPU multiplies pairs of bfloat16, two of those side by side.
//
//   rows    A[row][unit]: what is summed lies side by side
//   lanes   B[unit][lane]: what is summed lies apart, and sixteen results side by side
//
// Both serve vectors (a unit of A is broadcast to the lanes) and the tiles of AMX, whose two operands
// have just these forms.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Single {  // a unit is one float
  typedef float Unit;
  static constexpr int64_t SIZE = 1;
  static constexpr int64_t ROWS = 4, DEPTH = 1;  // rows and units come in multiples of these
  INLINE static F dot(F total, F a, F b) { return total + a * b; }
  INLINE static F broadcast(const Unit* p) { return splat(*p); }
};

#if defined(__AVX512BF16__)
struct Pair {  // a unit is two bfloat16, the first in the low half
  typedef uint32_t Unit;
  static constexpr int64_t SIZE = 2;
#if defined(__AMX_BF16__)
  static constexpr int64_t ROWS = 16, DEPTH = 16;
#else
  static constexpr int64_t ROWS = 4, DEPTH = 1;
#endif
  INLINE static F dot(F total, F a, F b) {
    return (F)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
  }
  INLINE static F broadcast(const Unit* p) { return (F)_mm512_set1_epi32(*p); }
};
#endif

template <class T>
struct DotOf {
  typedef Single type;
};
#if defined(__AVX512BF16__)
template <>
struct DotOf<bf16> {
  typedef Pair type;
};
#endif

// While one lives its thread may use tiles, all of them of sixteen rows of 64 bytes.
struct Tiles {
#if defined(__AMX_BF16__)
  Tiles() {
    struct Shape {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    };
    alignas(64) static constexpr Shape shape = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
#endif
};

// ---- products: out[row][lane] = or += sum over units k < n of a[row][k] * b[k][lane]

// What is added to comes last: a chain of many products would gather more rounding.
template <class Dot, int R, int C>
INLINE void multiply_block(const typename Dot::Unit* a, int64_t a_stride, const typename Dot::Unit* b,
                           int64_t b_stride, int64_t n, float* out, int64_t out_stride, bool adds) {
  F total[R][C] = {};
  for (int64_t k = 0; k < n; ++k) {
    F lanes[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) std::memcpy(&lanes[c], b + k * b_stride + c * LANES, sizeof(F));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F row = Dot::broadcast(a + r * a_stride + k);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) total[r][c] = Dot::dot(total[r][c], row, lanes[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* to = out + r * out_stride + c * LANES;
      store(to, adds ? load(to, Full{}) + total[r][c] : total[r][c], Full{});
    }
}

#if defined(__AMX_BF16__)

// R x C tiles of results, in registers 0 to 3; two of A in 4 and 5, two of B in 6 and 7.
template <int R, int C>
INLINE void multiply_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                           int64_t n, float* out, int64_t out_stride, bool adds) {
  asm volatile("" ::: "memory");  // GCC does not know that a tile load reads memory
  const int64_t out_bytes = out_stride * 4, a_bytes = a_stride * 4, b_bytes = b_stride * 4;
  float *right = out + LANES, *below = out + 16 * out_stride, *across = below + LANES;
  if (adds) {
    _tile_loadd(0, out, out_bytes);
    if (C == 2) _tile_loadd(1, right, out_bytes);
    if (R == 2) _tile_loadd(2, below, out_bytes);
    if (R == 2 && C == 2) _tile_loadd(3, across, out_bytes);
  } else {
    _tile_zero(0);
    if (C == 2) _tile_zero(1);
    if (R == 2) _tile_zero(2);
    if (R == 2 && C == 2) _tile_zero(3);
  }
  for (int64_t k = 0; k < n; k += 16) {
    _tile_loadd(4, a + k, a_bytes);
    _tile_loadd(6, b + k * b_stride, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (C == 2) {
      _tile_loadd(7, b + k * b_stride + LANES, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (R == 2) {
      _tile_loadd(5, a + 16 * a_stride + k, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (R == 2 && C == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, out_bytes);
  if (C == 2) _tile_stored(1, right, out_bytes);
  if (R == 2) _tile_stored(2, below, out_bytes);
  if (R == 2 && C == 2) _tile_stored(3, across, out_bytes);
}

#endif

// Calls body(lane, vectors as a constant) with up to `most` vectors, halving, until `lanes` are done.
template <int most, class Body>
INLINE void for_vectors(int64_t lanes, Body body) {
  int64_t lane = 0;
  if constexpr (most >= 4)
    for (; lane + 4 * LANES <= lanes; lane += 4 * LANES) body(lane, std::integral_constant<int, 4>{});
  if constexpr (most >= 2)
    for (; lane + 2 * LANES <= lanes; lane += 2 * LANES) body(lane, std::integral_constant<int, 2>{});
  for (; lane < lanes; lane += LANES) body(lane, std::integral_constant<int, 1>{});
}

#if defined(__AVX512F__)
constexpr int VECTORS = 4;  // of a block: its 16 totals, in registers, hide the latency of a product
#else
constexpr int VECTORS = 1;
#endif

constexpr int64_t CHAIN = 32;  // products in a row: sums of sums gather less rounding

// rows and n are multiples of Dot::ROWS and Dot::DEPTH, lanes of a vector.
template <class Dot>
static void multiply(int64_t rows, int64_t lanes, const typename Dot::Unit* a, int64_t a_stride,
                     const typename Dot::Unit* b, int64_t b_stride, int64_t n, float* out,
                     int64_t out_stride, bool adds) {
#if defined(__AMX_BF16__)
  if constexpr (Dot::SIZE == 2) {
    for_vectors<2>(lanes, [&](int64_t lane, auto vectors) INLINE_LAMBDA {
      constexpr int C = decltype(vectors)::value;
      int64_t r = 0;
      for (; r + 32 <= rows; r += 32)
        multiply_tiles<2, C>(a + r * a_stride, a_stride, b + lane, b_stride, n, out + r * out_stride + lane,
                             out_stride, adds);
      if (r < rows)
        multiply_tiles<1, C>(a + r * a_stride, a_stride, b + lane, b_stride, n, out + r * out_stride + lane,
                             out_stride, adds);
    });
    return;
  }
#endif
  for_vectors<VECTORS>(lanes, [&](int64_t lane, auto vectors) INLINE_LAMBDA {
    constexpr int C = decltype(vectors)::value;
    for (int64_t r = 0; r < rows; r += 4)
      for (int64_t k = 0; k < n; k += CHAIN)
        multiply_block<Dot, 4, C>(a + r * a_stride + k, a_stride, b + k * b_stride + lane, b_stride,
                                  std::min(CHAIN, n - k), out + r * out_stride + lane, out_stride,
                                  adds || k > 0);
  });
}

// ---- vectors of units

// Sixteen lanes of a unit: elements of a row, or pairs of them with those of the next row.
template <class Dot>
INLINE void store_lanes(typename Dot::Unit* to, F row, F next) {
#if defined(__AVX512BF16__)
  if constexpr (Dot::SIZE == 2) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)next, (__m512)row);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
    return;
  }
#endif
  std::memcpy((void*)to, &row, sizeof(row));
}

// 32 elements side by side along a row of A.
template <class Dot>
INLINE void store_row(typename Dot::Unit* to, F a, F b) {
#if defined(__AVX512BF16__)
  if constexpr (Dot::SIZE == 2) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    std::memcpy((void*)to, &both, sizeof(both));
    return;
  }
#endif
  std::memcpy((void*)to, &a, sizeof(a));
  std::memcpy((void*)(to + LANES), &b, sizeof(b));
}

// ---- packing of matrices whose rows lie `stride` elements apart; what is past them becomes zero

constexpr int64_t AHEAD = 16;  // rows to prefetch: far apart in memory, they come from beyond the caches

// to[row][unit] for `padded` rows of `units`: A whose rows are the rows.
template <class Dot, class T>
static void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t width, int64_t padded,
                      int64_t units, typename Dot::Unit* to) {
  for (int64_t r = 0; r < rows; ++r, from += stride, to += units) {
    for (int64_t c = 0; c < width; c += 64 / sizeof(T)) __builtin_prefetch(from + AHEAD * stride + c);
    if constexpr (Dot::SIZE == 2) {
      H* words = (H*)to;  // sixteen elements
      for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
        store_words((uint16_t*)(words + c / LANES), load_words<H>(&from[c].bits, n), Full{});
      });
      for (int64_t c = round_up(width, LANES); c < 2 * units; c += LANES) words[c / LANES] = H{};
    } else {
      for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA { store(to + c, load(from + c, n), Full{}); });
      for (int64_t c = round_up(width, LANES); c < units; c += LANES) store(to + c, F{}, Full{});
    }
  }
  std::memset((void*)to, 0, (padded - rows) * units * sizeof(*to));
}

// to[unit of rows][lane] for `units`, features in the lanes: B that is summed over the rows.
template <class Dot, class T>
static void pack_sums(const T* from, int64_t stride, int64_t rows, int64_t width, int64_t units,
                      int64_t lanes, typename Dot::Unit* to) {
  const int64_t used = (rows + Dot::SIZE - 1) / Dot::SIZE;
  for (int64_t u = 0; u < used; ++u, to += lanes) {
    const T* row = from + u * Dot::SIZE * stride;
    const bool has_next = u * Dot::SIZE + 1 < rows;
    for (int64_t i = 0; i < Dot::SIZE; ++i)
      for (int64_t c = 0; c < width; c += 64 / sizeof(T))
        __builtin_prefetch(row + (AHEAD + i) * stride + c);
    for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
      const F next = Dot::SIZE == 2 && has_next ? load(row + stride + c, n) : F{};
      store_lanes<Dot>(to + c, load(row + c, n), next);
    });
    for (int64_t c = round_up(width, LANES); c < lanes; c += LANES) store_lanes<Dot>(to + c, F{}, F{});
  }
  std::memset((void*)to, 0, (units - used) * lanes * sizeof(*to));
}

#if defined(__AVX512F__)
// Sixteen rows of sixteen units, in registers.
INLINE void transpose_block(const void* from, int64_t stride, void* to, int64_t to_stride) {
  const float* in = (const float*)from;
  float* out = (float*)to;
  __m512i v[16], w[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = _mm512_loadu_si512(in + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // v[4 g + i] holds columns i, i + 4, .. of rows 4 g to 4 g + 3
    w[i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x88);
    w[4 + i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xdd);
    w[8 + i] = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0x88);
    w[12 + i] = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + i * to_stride, _mm512_shuffle_i32x4(w[i], w[8 + i], 0x88));
    _mm512_storeu_si512(out + (8 + i) * to_stride, _mm512_shuffle_i32x4(w[i], w[8 + i], 0xdd));
    _mm512_storeu_si512(out + (4 + i) * to_stride, _mm512_shuffle_i32x4(w[4 + i], w[12 + i], 0x88));
    _mm512_storeu_si512(out + (12 + i) * to_stride, _mm512_shuffle_i32x4(w[4 + i], w[12 + i], 0xdd));
  }
}
#else
INLINE void transpose_block(const void* from, int64_t stride, void* to, int64_t to_stride) {
  for (int64_t i = 0; i < LANES; ++i)
    for (int64_t j = 0; j < LANES; ++j)
      std::memcpy((char*)to + 4 * (j * to_stride + i), (const char*)from + 4 * (i * stride + j), 4);
}
#endif

// to[column][row] = from[row][column], of units; rows and columns are whole vectors.
template <class Unit>
static void transpose(const Unit* from, int64_t stride, int64_t rows, int64_t columns, Unit* to,
                      int64_t to_stride) {
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t c = 0; c < columns; c += LANES)
      transpose_block(from + r * stride + c, stride, to + c * to_stride + r, to_stride);
}
