// Sums along rows and over rows. Over rows they are the same for any number of threads: rows are cut into blocks by their number alone,
// a block is summed into a row of its own, and those rows are added in order.
#pragma once

#include "vec.h"

constexpr int64_t MAX_BLOCKS = 256;  // bounds scratch memory, feeds as many threads
constexpr int64_t MIN_BLOCK_ROWS = 32;

INLINE int64_t block_rows(int64_t rows) {
  const int64_t even = (rows + MAX_BLOCKS - 1) / MAX_BLOCKS;
  return even < MIN_BLOCK_ROWS ? MIN_BLOCK_ROWS : (even + 3) / 4 * 4;
}
INLINE int64_t num_blocks(int64_t rows) { return (rows + block_rows(rows) - 1) / block_rows(rows); }
INLINE int64_t padded(int64_t width) { return (width + TILE - 1) / TILE * TILE; }

// Calls body(block, first row, last row + 1) for every block, over the threads.
template <class Body>
inline void for_blocks(int64_t rows, int64_t width, Body body) {
  const int64_t blocks = num_blocks(rows), size = block_rows(rows);
#pragma omp parallel for schedule(static) if (rows * width > SERIAL_ELEMENTS)
  for (int64_t b = 0; b < blocks; ++b)
    body(b, b * size, (b + 1) * size < rows ? (b + 1) * size : rows);
}

// sums[k][c] = sum over blocks of partial[block][k][c], for k < num_sums; null sums are skipped.
inline void add_blocks(int64_t blocks, int64_t num_sums, int64_t width, const float* partial,
                       float* const* sums) {
  const int64_t stride = padded(width), tiles = stride / LANES;
#pragma omp parallel for schedule(static) if (blocks * num_sums * width > 4 * SERIAL_ELEMENTS)
  for (int64_t i = 0; i < num_sums * tiles; ++i) {
    const int64_t k = i / tiles, c = i % tiles * LANES;
    if (!sums[k] || c >= width) continue;
    double total[LANES] = {};  // hundreds of blocks: floats would lose what the blocks kept
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t j = 0; j < LANES; ++j) total[j] += partial[(b * num_sums + k) * stride + c + j];
    for (int64_t j = 0; j < LANES && c + j < width; ++j) sums[k][c + j] = total[j];
  }
}

// The sum over a row of term(column, lanes), in four chains: one would wait for each addition.
template <class Term>
INLINE F sum_row(int64_t width, Term term) {
  F s[4] = {};
  int64_t c = 0;
  for (; c + TILE <= width; c += TILE)
    UNROLL_4
    for (int j = 0; j < 4; ++j) s[j] += term(c + j * LANES, Full{});
  for (; c < width; c += LANES) s[0] += term(c, Part{width - c < LANES ? width - c : LANES});
  return (s[0] + s[1]) + (s[2] + s[3]);
}

// Lanes past the end of a row, which must not count where zero is not neutral.
INLINE F clear_past(F v, Full) { return v; }
INLINE F clear_past(F v, Part t) { return select(unpack_bits((1 << t.n) - 1), v); }
