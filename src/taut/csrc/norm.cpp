// norm(residual + dropout(x + x_bias)), forward and backward. See ops/norm.py for the formulas.

#include "columns.h"
#include "random.h"

extern "C" struct NormFwd {
  int64_t rows, width;
  const void *x, *residual;            // residual may be null
  const float *x_bias, *weight, *bias;  // each may be null
  void *y, *xhat;
  float* rstd;
  void* sum;  // may be null
  float eps;
  int32_t is_rms;
};

extern "C" struct NormBwd {
  int64_t rows, width;
  const void *dy, *dsum, *xhat;  // dsum may be null
  const float *rstd, *weight;    // weight may be null
  void *dx, *dresidual;          // dresidual may be null: then it is dx
  float *dweight, *dbias, *dx_bias;  // each may be null
  int32_t is_rms;
};

// One row at a time: working on several at once, to hide the latency of reductions, was slower at
// every shape that leaves the cache, since it multiplies the streams of memory.

template <class T>
static void norm_fwd_row(const NormFwd& a, const Dropout& d, int64_t r, float* z, uint16_t* bits) {
  const int64_t width = a.width, first = r * width;
  const T *x = (const T*)a.x + first, *residual = a.residual ? (const T*)a.residual + first : nullptr;
  T *y = (T*)a.y + first, *xhat = (T*)a.xhat + first, *sum = a.sum ? (T*)a.sum + first : nullptr;
  const float *x_bias = a.x_bias, *weight = a.weight, *bias = a.bias;
  const F scale = splat(d.scale);
  draw(d, r, width, bits);
  const F total = sum_row(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    F v = load(x + c, n);
    if (x_bias) v += load(x_bias + c, n);
    v = select(unpack_bits(bits[c / LANES]), v * scale);
    if (residual) v += load(residual + c, n);
    if (sum) store(sum + c, v, n);
    store(z + c, v, Full{});
    return v;
  });
  // two passes: E[z^2] - E[z]^2 loses all digits where the mean is large
  const F centre = splat(a.is_rms ? 0 : sum_lanes(total) / width);
  const F squares = sum_row(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    const F v = clear_past(load(z + c, Full{}) - centre, n);
    return v * v;
  });
  const float rstd_r = 1 / std::sqrt(sum_lanes(squares) / width + a.eps);
  a.rstd[r] = rstd_r;
  const F rstd = splat(rstd_r);
  for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    F v = (load(z + c, Full{}) - centre) * rstd;
    store(xhat + c, v, n);
    if (weight) v *= load(weight + c, n);
    if (bias) v += load(bias + c, n);
    store(y + c, v, n);
  });
}

template <class T>
static void norm_bwd_row(const NormBwd& a, const Dropout& d, int64_t r, uint16_t* bits, float* sums) {
  const int64_t width = a.width, stride = padded(width), first = r * width;
  const T *dy = (const T*)a.dy + first, *xhat = (const T*)a.xhat + first;
  const T* dsum = a.dsum ? (const T*)a.dsum + first : nullptr;
  T *dx = (T*)a.dx + first, *dresidual = a.dresidual ? (T*)a.dresidual + first : nullptr;
  const float* weight = a.weight;
  const F scale = splat(d.scale), rstd = splat(a.rstd[r]);
  draw(d, r, width, bits);
  F total_gx[2] = {};
  const F total_g = sum_row(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    F g = load(dy + c, n);
    if (weight) g *= load(weight + c, n);
    total_gx[c / LANES % 2] += g * load(xhat + c, n);
    return g;
  });
  const F mean_g = splat(a.is_rms ? 0 : sum_lanes(total_g) / width);
  const F mean_gx = splat(sum_lanes(total_gx[0] + total_gx[1]) / width);
  for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    const F up = load(dy + c, n), xh = load(xhat + c, n);
    const F g = weight ? up * load(weight + c, n) : up;
    F dz = (g - mean_g - xh * mean_gx) * rstd;
    if (dsum) dz += load(dsum + c, n);
    const F down = select(unpack_bits(bits[c / LANES]), dz * scale);
    if (dresidual) store(dresidual + c, dz, n);
    store(dx + c, down, n);
    float *dweight = sums + c, *dbias = dweight + stride, *dx_bias = dbias + stride;
    store(dweight, load(dweight, Full{}) + up * xh, Full{});
    store(dbias, load(dbias, Full{}) + up, Full{});
    store(dx_bias, load(dx_bias, Full{}) + down, Full{});
  });
}

template <class T>
static void norm_fwd(const NormFwd& a, const Dropout& d) {
  for_blocks(a.rows, a.width, [&](int64_t, int64_t begin, int64_t end) {
    Scratch<float> z(padded(a.width));
    Scratch<uint16_t> bits(bits_size(a.width));
    for (int64_t r = begin; r < end; ++r) norm_fwd_row<T>(a, d, r, z.data(), bits.data());
  });
}

template <class T>
static void norm_bwd(const NormBwd& a, const Dropout& d) {
  const int64_t sums = 3 * padded(a.width);
  Scratch<float> partial(num_blocks(a.rows) * sums);
  for_blocks(a.rows, a.width, [&](int64_t b, int64_t begin, int64_t end) {
    Scratch<uint16_t> bits(bits_size(a.width));
    float* mine = partial.data() + b * sums;
    std::memset(mine, 0, sums * sizeof(float));
    for (int64_t r = begin; r < end; ++r) norm_bwd_row<T>(a, d, r, bits.data(), mine);
  });
  float* const out[] = {a.dweight, a.dbias, a.dx_bias};
  add_blocks(num_blocks(a.rows), 3, a.width, partial.data(), out);
}

EXPORT void taut_norm_fwd(int32_t dtype, const NormFwd* a, const Dropout* d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    norm_fwd<T>(*a, *d);
  });
}

EXPORT void taut_norm_bwd(int32_t dtype, const NormBwd* a, const Dropout* d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    norm_bwd<T>(*a, *d);
  });
}
