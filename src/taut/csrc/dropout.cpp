// y = x * keep / P(keep); its own backward pass. See ops/dropout.py.

#include "columns.h"
#include "random.h"

template <class T>
static void dropout(int64_t rows, int64_t width, const T* x, T* y, const Dropout& d) {
  const F scale = splat(d.scale);
  for_blocks(rows, width, [&](int64_t, int64_t begin, int64_t end) {
    Scratch<uint16_t> scratch(bits_size(width));
    uint16_t* bits = scratch.data();
    for (int64_t r = begin; r < end; ++r) {
      draw(d, r, width, bits);
      const T* from = x + r * width;
      T* to = y + r * width;
      for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
        store(to + c, select(unpack_bits(bits[c / LANES]), load(from + c, n) * scale), n);
      });
    }
  });
}

EXPORT void taut_dropout(int32_t dtype, int64_t rows, int64_t width, const void* x, void* y,
                         const Dropout* d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    dropout<T>(rows, width, (const T*)x, (T*)y, *d);
  });
}
