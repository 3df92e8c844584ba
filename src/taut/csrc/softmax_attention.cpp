// Softmax and dropout of attention scores, forward and backward, around products that PyTorch makes.
// See ops/softmax_attention.py for the formulas.

#include "columns.h"
#include "exp.h"
#include "random.h"
#include "tile.h"

extern "C" struct Softmax {
  int64_t first, matrices;       // of all matrices, which are (sequences, heads), these are worked on
  int64_t heads, queries, keys;  // all matrices are (queries, keys)
  const void* scores;
  void *p, *dropped;  // dropped, without the scale, is null where there is no dropout
  const void* dp;      // what comes back to p as an output; may be null
  void* ds;            // comes in as the gradient of dropped, goes out as that of the scores
  const int64_t* key_positions;  // (sequences, keys), or null: a key's number
  uint32_t first_head;
};

// The decisions for one row after another.
class Draws {
 public:
  Draws(const Softmax& a, const Dropout& d) : a(a), d(d), bits(bits_size(a.keys)) {}

  // A bit for each key of a row of these matrices.
  const uint16_t* of(int64_t r) {
    const int64_t matrix = a.first + r / a.queries, query = r % a.queries;
    const int64_t sequence = matrix / a.heads, row = sequence * a.queries + query;
    if (sequence != drawn_for) look_at_keys(sequence);
    for (size_t i = 0; i < spans.size(); ++i)
      draw_keys(d, d.positions ? d.positions[row] : query, d.sample_ids ? d.sample_ids[row] : sequence,
                1 + a.first_head + matrix % a.heads, spans[i], bits.data() + i * (KEY_SPAN / LANES));
    return bits.data();
  }

 private:
  const Softmax& a;
  const Dropout& d;
  Scratch<uint16_t> bits;
  int64_t drawn_for = -1;
  std::vector<std::vector<KeyBlock>> spans;

  void look_at_keys(int64_t sequence) {
    drawn_for = sequence;
    spans.clear();
    for (int64_t k = 0; k < a.keys; k += KEY_SPAN)
      spans.push_back(key_blocks(a.key_positions, a.key_positions ? sequence * a.keys + k : k,
                                 std::min(KEY_SPAN, a.keys - k)));
  }
};

// Lanes past the end of a row, which no maximum may see.
INLINE F hide_past(F v, Full) { return v; }
INLINE F hide_past(F v, Part t) { return blend(unpack_bits((1 << t.n) - 1), v, splat(-INFINITY)); }

template <class T>
INLINE float row_max(int64_t width, const T* from) {
  F highest[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  int64_t c = 0;
  for (; c + TILE <= width; c += TILE)
    UNROLL_4
    for (int j = 0; j < 4; ++j) highest[j] = max_(load(from + c + j * LANES, Full{}), highest[j]);
  for (; c < width; c += LANES) {
    const Part part{std::min(LANES, width - c)};
    highest[0] = max_(hide_past(load(from + c, part), part), highest[0]);
  }
  const F all = max_(max_(highest[0], highest[1]), max_(highest[2], highest[3]));
  float top = all[0];
  for (int i = 1; i < LANES; ++i) top = all[i] > top ? all[i] : top;
  return top;
}

// A row without a visible key becomes zero.
template <class T, bool DROPS>
static void softmax_row(int64_t width, const T* scores, T* p, T* dropped, const uint16_t* bits,
                        float* powers) {
  const float highest = row_max(width, scores);
  const F top = splat(highest == -INFINITY ? 0 : highest), log2e = splat(LOG2E);
  const float total = sum_lanes(sum_row(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    // the difference first: it is exact where it matters, a scaled score is not
    const F power = exp2_<typename DotOf<T>::type>((load(scores + c, n) - top) * log2e);
    store(powers + c, power, Full{});
    return clear_past(power, n);
  }));
  const F factor = splat(total == 0 ? 0 : 1 / total);
  for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    const F v = load(powers + c, Full{}) * factor;
    store(p + c, v, n);
    if (DROPS) store(dropped + c, select(unpack_bits(bits[c / LANES]), v), n);
  });
}

template <class T, bool DROPS>
static void gradient_row(int64_t width, const T* p, const T* dp, T* ds, T* dropped, const uint16_t* bits) {
  // all that comes back to p
  const auto gradient = [&](int64_t c, auto n) INLINE_LAMBDA {
    F v = load(ds + c, n);
    if (DROPS) v = select(unpack_bits(bits[c / LANES]), v);
    return dp ? v + load(dp + c, n) : v;
  };
  const F mean = splat(sum_lanes(sum_row(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    return gradient(c, n) * load(p + c, n);
  })));
  for_columns(width, [&](int64_t c, auto n) INLINE_LAMBDA {
    const F v = load(p + c, n);
    store(ds + c, v * (gradient(c, n) - mean), n);
    if (DROPS) store(dropped + c, select(unpack_bits(bits[c / LANES]), v), n);
  });
}

template <class T, class Void>
INLINE T* row_of(Void* data, int64_t at) {
  return data ? (T*)data + at : nullptr;
}

template <class T, bool DROPS>
static void softmax_fwd(const Softmax& a, const Dropout& d) {
  for_blocks(a.matrices * a.queries, a.keys, [&](int64_t, int64_t begin, int64_t end) {
    Draws draws(a, d);
    Scratch<float> powers(padded(a.keys));
    for (int64_t r = begin; r < end; ++r) {
      const int64_t at = r * a.keys;
      softmax_row<T, DROPS>(a.keys, (const T*)a.scores + at, (T*)a.p + at, row_of<T>(a.dropped, at),
                            DROPS ? draws.of(r) : nullptr, powers.data());
    }
  });
}

template <class T, bool DROPS>
static void softmax_bwd(const Softmax& a, const Dropout& d) {
  for_blocks(a.matrices * a.queries, a.keys, [&](int64_t, int64_t begin, int64_t end) {
    Draws draws(a, d);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t at = r * a.keys;
      gradient_row<T, DROPS>(a.keys, (const T*)a.p + at, row_of<const T>(a.dp, at), (T*)a.ds + at,
                             row_of<T>(a.dropped, at), DROPS ? draws.of(r) : nullptr);
    }
  });
}


EXPORT void taut_softmax_fwd(int32_t dtype, const Softmax* a, const Dropout* d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    d->threshold ? softmax_fwd<T, true>(*a, *d) : softmax_fwd<T, false>(*a, *d);
  });
}

EXPORT void taut_softmax_bwd(int32_t dtype, const Softmax* a, const Dropout* d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    d->threshold ? softmax_bwd<T, true>(*a, *d) : softmax_bwd<T, false>(*a, *d);
  });
}
