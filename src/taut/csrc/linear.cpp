// The sum of the rows of a matrix: the bias gradient of a linear. See ops/linear.py.

#include "columns.h"

template <class T>
static void column_sum(int64_t rows, int64_t width, const T* x, float* out) {
  const int64_t stride = padded(width);
  Scratch<float> partial(num_blocks(rows) * stride);
  for_blocks(rows, width, [&](int64_t b, int64_t begin, int64_t end) {
    float* mine = partial.data() + b * stride;
    for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
      F total{};
      for (int64_t r = begin; r < end; ++r) total += load(x + r * width + c, n);
      store(mine + c, total, Full{});
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
