// The sum of the rows of a matrix: the bias gradient of a linear. See ops/linear.py.

#include "columns.h"

template <class T>
static void column_sum(int64_t rows, int64_t width, const T* x, float* out) {
  const int64_t stride = padded(width);
  Scratch<float> partial(num_blocks(rows) * stride);
  for_blocks(rows, width, [&](int64_t b, int64_t begin, int64_t end) {
    float* mine = partial.data() + b * stride;
    for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
      F total[4] = {};  // shorter chains round less
      int64_t r = begin;
      for (; r + 4 <= end; r += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) total[j] += load(x + (r + j) * width + c, n);
      for (; r < end; ++r) total[0] += load(x + r * width + c, n);
      store(mine + c, (total[0] + total[1]) + (total[2] + total[3]), Full{});
    });
  });
  float* const sums[] = {out};
  add_blocks(num_blocks(rows), 1, width, partial.data(), sums);
}

EXPORT void taut_column_sum(int32_t dtype, int64_t rows, int64_t width, const void* x,
                                float* out) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    column_sum<T>(rows, width, (const T*)x, out);
  });
}
