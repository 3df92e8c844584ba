// Rows of tables, their sum, norm and dropout, and the sums of gradients by id. See ops/embedding.py.

#include <vector>

#include "columns.h"
#include "pages.h"
#include "random.h"

extern "C" struct Embedding {
  int64_t rows, width;
  const int64_t *ids, *positions, *types;  // the last two may be null
  const void *weight, *position_weight, *type_weight;
  const float *sinusoids, *norm_weight, *norm_bias;  // without norm_weight there is no norm
  const void* dy;
  void *y, *xhat;
  float *rstd, *dz, *dnorm_weight, *dnorm_bias;  // the last two may be null
  float scale, eps;
};

// The row of a table that an index names; null without a table.
template <class T>
INLINE const T* row_of(const T* table, const int64_t* index, int64_t r, int64_t width) {
  return table ? table + index[r] * width : nullptr;
}

// The next token's row is anywhere in a table larger than the caches: a wait that arithmetic can fill.
template <class T>
INLINE void prefetch(const T* row, int64_t width) {
  const int64_t line = 64 / sizeof(T);
  for (int64_t c = 0; c < width; c += line) __builtin_prefetch(row + c);
}

template <class T>
static void fwd_row(const Embedding& a, const Dropout& d, int64_t r, float* z, uint16_t* bits) {
  const int64_t width = a.width;
  const T* token = row_of((const T*)a.weight, a.ids, r, width);
  const T* position = row_of((const T*)a.position_weight, a.positions, r, width);
  const T* type = row_of((const T*)a.type_weight, a.types, r, width);
  const float* sinusoid = row_of(a.sinusoids, a.positions, r, width);
  T* y = (T*)a.y + r * width;
  const F scale = splat(a.scale), drop_scale = splat(d.scale);
  const auto sum = [&](int64_t c, auto n) INLINE_LAMBDA {
    F v = load(token + c, n) * scale;
    if (position) v += load(position + c, n);
    if (sinusoid) v += load(sinusoid + c, n);
    if (type) v += load(type + c, n);
    return v;
  };
  if (r + 1 < a.rows) prefetch((const T*)a.weight + a.ids[r + 1] * width, width);
  draw(d, r, width, bits);
  if (!a.norm_weight) {
    for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
      store(y + c, select(unpack_bits(bits[c / LANES]), sum(c, n) * drop_scale), n);
    });
    return;
  }
  const F total = sum_row(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    const F v = sum(c, n);
    store(z + c, v, Full{});
    return v;
  });
  const F centre = splat(sum_lanes(total) / width);
  const F squares = sum_row(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    const F v = clear_past(load(z + c, Full{}) - centre, n);
    return v * v;
  });
  const float rstd_r = 1 / std::sqrt(sum_lanes(squares) / width + a.eps);
  a.rstd[r] = rstd_r;
  const F rstd = splat(rstd_r);
  T* xhat = (T*)a.xhat + r * width;
  for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    F v = (load(z + c, Full{}) - centre) * rstd;
    store(xhat + c, v, n);
    v *= load(a.norm_weight + c, n);
    if (a.norm_bias) v += load(a.norm_bias + c, n);
    store(y + c, select(unpack_bits(bits[c / LANES]), v * drop_scale), n);
  });
}

template <class T>
static void bwd_row(const Embedding& a, const Dropout& d, int64_t r, uint16_t* bits, float* g,
                    float* sums) {
  const int64_t width = a.width, stride = padded(width);
  const T *dy = (const T*)a.dy + r * width, *xhat = (const T*)a.xhat + r * width;
  float* dz = a.dz + r * width;
  const F scale = splat(d.scale);
  const auto kept = [&](int64_t c, auto n) INLINE_LAMBDA {
    return select(unpack_bits(bits[c / LANES]), load(dy + c, n) * scale);
  };
  draw(d, r, width, bits);
  if (!a.norm_weight) {
    for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA { store(dz + c, kept(c, n), n); });
    return;
  }
  F total_hx[2] = {};
  const F total_h = sum_row(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    const F up = kept(c, n), xh = load(xhat + c, n), h = up * load(a.norm_weight + c, n);
    total_hx[c / LANES % 2] += h * xh;
    store(g + c, h, Full{});
    float *dweight = sums + c, *dbias = dweight + stride;
    store(dweight, load(dweight, Full{}) + up * xh, Full{});
    store(dbias, load(dbias, Full{}) + up, Full{});
    return h;
  });
  const F mean_h = splat(sum_lanes(total_h) / width), rstd = splat(a.rstd[r]);
  const F mean_hx = splat(sum_lanes(total_hx[0] + total_hx[1]) / width);
  for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    store(dz + c, (load(g + c, Full{}) - mean_h - load(xhat + c, n) * mean_hx) * rstd, n);
  });
}

EXPORT void taut_embedding_fwd(int32_t dtype, const Embedding* a, const Dropout* d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    ask_for_huge_pages(a->y, a->rows * a->width * sizeof(T));
    if (a->norm_weight) ask_for_huge_pages(a->xhat, a->rows * a->width * sizeof(T));
    for_blocks(a->rows, a->width, [&](int64_t, int64_t begin, int64_t end) {
      Scratch<float> z(padded(a->width));
      Scratch<uint16_t> bits(bits_size(a->width));
      for (int64_t r = begin; r < end; ++r) fwd_row<T>(*a, *d, r, z.data(), bits.data());
    });
  });
}

EXPORT void taut_embedding_bwd(int32_t dtype, const Embedding* a, const Dropout* d) {
  const int64_t blocks = num_blocks(a->rows), sums = 2 * padded(a->width);
  Scratch<float> partial(blocks * sums);
  ask_for_huge_pages(a->dz, a->rows * a->width * sizeof(float));
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    for_blocks(a->rows, a->width, [&](int64_t b, int64_t begin, int64_t end) {
      Scratch<float> g(padded(a->width));
      Scratch<uint16_t> bits(bits_size(a->width));
      float* mine = partial.data() + b * sums;
      std::memset(mine, 0, sums * sizeof(float));
      for (int64_t r = begin; r < end; ++r) bwd_row<T>(*a, *d, r, bits.data(), g.data(), mine);
    });
  });
  float* const out[] = {a->dnorm_weight, a->dnorm_bias};
  add_blocks(blocks, 2, a->width, partial.data(), out);
}

// ---- the gradient of a table

extern "C" struct TableGrad {
  int64_t rows, width, size;  // of dz, of both, of the table
  const int64_t* ids;         // a row of dz each
  const void* dz;
  void* out;
  int64_t padding;  // this row is not written to
  float scale;
  int32_t is_added;  // to what is in out, where a row has a gradient
};

constexpr int64_t CHUNK = 32;        // rows summed in order by one thread: a frequent id has many
constexpr int64_t TABLE_BLOCK = 64;  // rows of a table that a thread takes on at a time

// The rows of dz by id, those of one id in their order.
struct Sorted {
  std::vector<int64_t> starts, rows;  // id i has rows[starts[i]] to rows[starts[i + 1]]

  explicit Sorted(const TableGrad& a) : starts(a.size + 2), rows(a.rows) {
    for (int64_t r = 0; r < a.rows; ++r) ++starts[a.ids[r] + 2];
    for (int64_t i = 2; i < a.size + 2; ++i) starts[i] += starts[i - 1];
    for (int64_t r = 0; r < a.rows; ++r) rows[starts[a.ids[r] + 1]++] = r;
  }
  int64_t count(int64_t id) const { return starts[id + 1] - starts[id]; }
  const int64_t* of(int64_t id) const { return rows.data() + starts[id]; }
};

// Calls emit(column, sum over these rows, lanes).
template <class S, class Emit>
INLINE void sum_rows(const S* dz, int64_t width, const int64_t* rows, int64_t count, Emit emit) {
  const auto strip = [&](int64_t c, auto n, auto vectors) INLINE_LAMBDA {
    F total[decltype(vectors)::value] = {};
    for (int64_t i = 0; i < count; ++i)
      UNROLL_4
      for (int j = 0; j < decltype(vectors)::value; ++j)
        total[j] += load(dz + rows[i] * width + c + j * LANES, n);
    for (int j = 0; j < decltype(vectors)::value; ++j) emit(c + j * LANES, total[j], n);
  };
  int64_t c = 0;
  for (; c + TILE <= width; c += TILE) strip(c, Full{}, std::integral_constant<int, 4>{});
  for (; c < width; c += LANES)
    strip(c, Part{width - c < LANES ? width - c : LANES}, std::integral_constant<int, 1>{});
}

template <class S, class T>
static void table_grad(const TableGrad& a) {
  const int64_t width = a.width, stride = padded(width);
  const S* dz = (const S*)a.dz;
  T* out = (T*)a.out;
  const bool is_large = a.rows * width > SERIAL_ELEMENTS;
  const F scale = splat(a.scale);
  const Sorted sorted(a);
  if (!a.is_added) ask_for_huge_pages(out, a.size * width * sizeof(T));
  const auto finish = [&](int64_t id, int64_t c, F total, auto n) INLINE_LAMBDA {
    T* to = out + id * width + c;
    total *= scale;
    store(to, a.is_added ? load(to, n) + total : total, n);
  };

  // Ids with more rows than a chunk: chunks first, each into a row of its own.
  struct Piece {
    const int64_t* rows;
    int64_t count;
  };
  std::vector<Piece> pieces;
  std::vector<int64_t> frequent, first_piece;
  for (int64_t id = 0; id < a.size; ++id) {
    const int64_t count = sorted.count(id);
    if (count <= CHUNK || id == a.padding) continue;
    frequent.push_back(id);
    first_piece.push_back(pieces.size());
    for (int64_t i = 0; i < count; i += CHUNK)
      pieces.push_back({sorted.of(id) + i, count - i < CHUNK ? count - i : CHUNK});
  }
  first_piece.push_back(pieces.size());
  const int64_t num_pieces = pieces.size(), num_frequent = frequent.size();
  Scratch<float> partial(num_pieces * stride);
#pragma omp parallel for schedule(dynamic) if (is_large)
  for (int64_t p = 0; p < num_pieces; ++p)
    sum_rows(dz, width, pieces[p].rows, pieces[p].count, [&](int64_t c, F total, auto) INLINE_LAMBDA {
      store(partial.data() + p * stride + c, total, Full{});
    });
  const int64_t tiles = stride / LANES;
#pragma omp parallel for schedule(static) if (is_large)
  for (int64_t i = 0; i < num_frequent * tiles; ++i) {
    const int64_t f = i / tiles, c = i % tiles * LANES;
    if (c >= width) continue;
    double total[LANES] = {};  // many chunks: floats would lose what the chunks kept
    for (int64_t p = first_piece[f]; p < first_piece[f + 1]; ++p)
      for (int64_t j = 0; j < LANES; ++j) total[j] += partial.data()[p * stride + c + j];
    F rounded;
    for (int64_t j = 0; j < LANES; ++j) rounded[j] = total[j];
    if (width - c >= LANES) finish(frequent[f], c, rounded, Full{});
    else finish(frequent[f], c, rounded, Part{width - c});
  }

  // All others. Rows without a gradient are set to zero, as many at a time as lie side by side.
  const int64_t blocks = (a.size + TABLE_BLOCK - 1) / TABLE_BLOCK;
  const auto block = [&](int64_t b) {
    const int64_t end = (b + 1) * TABLE_BLOCK < a.size ? (b + 1) * TABLE_BLOCK : a.size;
    int64_t written = b * TABLE_BLOCK;
    const auto clear_to = [&](int64_t id) {
      if (!a.is_added) std::memset((void*)(out + written * width), 0, (id - written) * width * sizeof(T));
      written = id + 1;
    };
    for (int64_t id = written; id < end; ++id) {
      const int64_t count = sorted.count(id);
      if (!count || id == a.padding) continue;
      clear_to(id);
      if (count > CHUNK) continue;
      sum_rows(dz, width, sorted.of(id), count,
               [&](int64_t c, F total, auto n) INLINE_LAMBDA { finish(id, c, total, n); });
    }
    clear_to(end);
  };
  const bool is_shared = a.size * width > SERIAL_ELEMENTS;
  if (a.is_added) {
#pragma omp parallel for schedule(dynamic) if (is_large)
    for (int64_t b = 0; b < blocks; ++b) block(b);
  } else {  // halves of the table, not turns: of two threads that touch a fresh page both clear it
#pragma omp parallel for schedule(static) if (is_shared)
    for (int64_t b = 0; b < blocks; ++b) block(b);
  }
}

EXPORT void taut_table_grad(int32_t dz_dtype, int32_t dtype, const TableGrad* a) {
  with_storage(dz_dtype, [&](auto source) {
    with_storage(dtype, [&](auto target) { table_grad<decltype(source), decltype(target)>(*a); });
  });
}
