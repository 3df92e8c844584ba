// a = dropout(act(u)) between the two linears of ops/mlp.py, and its backward pass.

#include "activation.h"
#include "columns.h"
#include "random.h"

extern "C" struct Activation {
  int64_t rows, width;  // width of a; u is twice as wide where gated: [gate | up]
  const void *u, *da;   // da: backward only
  void *a, *du;         // du: backward only, may be da itself where not gated
  float* du_sum;        // the sum of the rows of du
  int32_t code, gated;  // code as in ops/mlp.py
};

template <class T, class Act, bool GATED>
static void activation_fwd(const Activation& p, const Dropout& d) {
  const int64_t width = p.width, u_width = GATED ? 2 * width : width;
  const F scale = splat(d.scale);
  for_blocks(p.rows, width, [&](int64_t, int64_t begin, int64_t end) {
    Scratch<uint16_t> scratch(bits_size(width));
    uint16_t* bits = scratch.data();
    for (int64_t r = begin; r < end; ++r) {
      draw(d, r, width, bits);
      const T* u = (const T*)p.u + r * u_width;
      T* a = (T*)p.a + r * width;
      for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
        F y = value<Act>(load(u + c, n));
        if (GATED) y *= load(u + width + c, n);
        store(a + c, select(unpack_bits(bits[c / LANES]), y * scale), n);
      });
    }
  });
}

template <class T, class Act, bool GATED>
static void activation_bwd_row(const Activation& p, float factor, int64_t r, const uint16_t* bits,
                               float* sums) {
  const int64_t width = p.width, u_width = GATED ? 2 * width : width, stride = padded(width);
  const T *u = (const T*)p.u + r * u_width, *da = (const T*)p.da + r * width;
  T *a = (T*)p.a + r * width, *du = (T*)p.du + r * u_width;
  const F scale = splat(factor);
  for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    F y, dy, unused;
    Act::all(load(u + c, n), y, dy, unused);
    const Keep keep = unpack_bits(bits[c / LANES]);
    const F up = select(keep, load(da + c, n) * scale);
    if (GATED) {
      const F v = load(u + width + c, n), dv = up * y;
      store(a + c, select(keep, y * v * scale), n);
      store(du + width + c, dv, n);
      store(sums + stride + c, load(sums + stride + c, Full{}) + dv, Full{});
      dy *= v;
    } else {
      store(a + c, select(keep, y * scale), n);
    }
    const F g = up * dy;
    store(du + c, g, n);
    store(sums + c, load(sums + c, Full{}) + g, Full{});
  });
}

template <class T, class Act, bool GATED>
static void activation_bwd(const Activation& p, const Dropout& d) {
  const int64_t num_sums = GATED ? 2 : 1, sums = num_sums * padded(p.width);
  Scratch<float> partial(num_blocks(p.rows) * sums);
  for_blocks(p.rows, p.width, [&](int64_t b, int64_t begin, int64_t end) {
    Scratch<uint16_t> bits(bits_size(p.width));
    float* mine = partial.data() + b * sums;
    std::memset(mine, 0, sums * sizeof(float));
    for (int64_t r = begin; r < end; ++r) {
      draw(d, r, p.width, bits.data());
      activation_bwd_row<T, Act, GATED>(p, d.scale, r, bits.data(), mine);
    }
  });
  float* const out[] = {p.du_sum, p.du_sum + p.width};
  add_blocks(num_blocks(p.rows), num_sums, p.width, partial.data(), out);
}

template <class Act, bool GATED, bool BACKWARD>
static void run(int32_t dtype, const Activation& p, const Dropout& d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    BACKWARD ? activation_bwd<T, Act, GATED>(p, d) : activation_fwd<T, Act, GATED>(p, d);
  });
}

template <bool BACKWARD>
static void choose(int32_t dtype, const Activation& p, const Dropout& d) {
  switch (p.code) {
    case 0: return p.gated ? run<Gelu, true, BACKWARD>(dtype, p, d) : run<Gelu, false, BACKWARD>(dtype, p, d);
    case 1: return run<GeluTanh, false, BACKWARD>(dtype, p, d);
    case 2: return run<Relu, false, BACKWARD>(dtype, p, d);
    case 3: return p.gated ? run<Silu, true, BACKWARD>(dtype, p, d) : run<Silu, false, BACKWARD>(dtype, p, d);
  }
}

EXPORT void taut_activation_fwd(int32_t dtype, const Activation* p, const Dropout* d) {
  choose<false>(dtype, *p, *d);
}

EXPORT void taut_activation_bwd(int32_t dtype, const Activation* p, const Dropout* d) {
  choose<true>(dtype, *p, *d);
}
