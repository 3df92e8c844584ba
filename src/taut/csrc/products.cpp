// out[m] = scale * a[m] b[m] of many small float matrices. PyTorch leaves them to MKL, which takes a
// slow path on AMD and may cut sums among threads on Intel; here a sum is cut by its place alone.
#include "tile.h"

struct Matrices {
  const float* data;
  int64_t matrix, row, column;  // strides, in elements

  const float* at(int64_t m, int64_t r, int64_t c) const { return data + m * matrix + r * row + c * column; }
};

constexpr int64_t PANEL = 64, DEPTH = 64;  // columns and rows of b that are worked on: in a first-level cache
constexpr int64_t ROWS = 128;              // of a, which share them

// totals[r][c] += sum over k < depth of a[r][k] * panel[k][c]
template <int R, int C>
INLINE void add_block(const float* a, int64_t row, int64_t column, const float* panel, int64_t depth,
                      float* totals) {
  F total[R][C] = {};
  for (int64_t k = 0; k < depth; ++k) {
    F lanes[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) lanes[c] = load(panel + k * PANEL + c * LANES, Full{});
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F x = splat(a[r * row + k * column]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) total[r][c] += x * lanes[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* to = totals + r * PANEL + c * LANES;
      store(to, load(to, Full{}) + total[r][c], Full{});
    }
}

// panel[k][c] = b[k][c], zero past the columns up to a whole vector.
static void pack(const Matrices& b, const float* from, int64_t depth, int64_t columns, float* panel) {
  if (b.column == 1) {
    for (int64_t k = 0; k < depth; ++k)
      for_columns(columns, [&](int64_t c, auto n) INLINE_LAMBDA {
        store(panel + k * PANEL + c, load(from + k * b.row + c, n), Full{});
      });
    return;
  }
  for (int64_t c = 0; c < columns; c += LANES)
    for (int64_t k = 0; k < depth; k += LANES) {
      const float* block = from + k * b.row + c * b.column;
      float* to = panel + k * PANEL + c;
      if (b.row == 1 && c + LANES <= columns && k + LANES <= depth) {
        transpose_block(block, b.column, to, PANEL);
        continue;
      }
      for (int64_t i = 0; i < std::min(LANES, depth - k); ++i)
        for (int64_t j = 0; j < LANES; ++j)
          to[i * PANEL + j] = c + j < columns ? block[i * b.row + j * b.column] : 0;
    }
}

EXPORT void taut_products(int64_t matrices, int64_t rows, int64_t columns, int64_t depth, const float* a_data,
                          int64_t a_matrix, int64_t a_row, int64_t a_column, const float* b_data,
                          int64_t b_matrix, int64_t b_row, int64_t b_column, float* out, float scale) {
  const Matrices a{a_data, a_matrix, a_row, a_column}, b{b_data, b_matrix, b_row, b_column};
  const int64_t blocks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel if (matrices * rows * columns * depth > 32 * SERIAL_ELEMENTS)
  {
    Scratch<float> panel(DEPTH * PANEL), totals(ROWS * PANEL);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < matrices * blocks; ++task) {
      const int64_t m = task / blocks, first = task % blocks * ROWS, count = std::min(ROWS, rows - first);
      for (int64_t c = 0; c < columns; c += PANEL) {
        const int64_t width = std::min(PANEL, columns - c);
        std::memset(totals.data(), 0, count * PANEL * sizeof(float));
        for (int64_t k = 0; k < depth; k += DEPTH) {
          const int64_t here = std::min(DEPTH, depth - k);
          pack(b, b.at(m, k, c), here, width, panel.data());
          for_vectors<VECTORS>(round_up(width, LANES), [&](int64_t lane, auto vectors) INLINE_LAMBDA {
            constexpr int C = decltype(vectors)::value;
            int64_t r = 0;
            for (; r + 4 <= count; r += 4)
              add_block<4, C>(a.at(m, first + r, k), a.row, a.column, panel.data() + lane, here,
                              totals.data() + r * PANEL + lane);
            for (; r < count; ++r)
              add_block<1, C>(a.at(m, first + r, k), a.row, a.column, panel.data() + lane, here,
                              totals.data() + r * PANEL + lane);
          });
        }
        for (int64_t r = 0; r < count; ++r) {
          const float* total = totals.data() + r * PANEL;
          float* to = out + (m * rows + first + r) * columns + c;
          for_columns(width, [&](int64_t i, auto n) INLINE_LAMBDA {
            store(to + i, load(total + i, Full{}) * scale, n);
          });
        }
      }
    }
  }
}
