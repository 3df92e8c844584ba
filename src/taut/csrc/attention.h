// What both directions of attention share. See ops/attention.py for the formulas.
//
// Work is done on blocks of scores that have queries in the lanes and keys in the rows: sums and
// maxima over keys then need no shuffles, and weights become an operand of the next product as they
// leave the registers.
#pragma once

#include "exp.h"
#include "random.h"
#include "tile.h"

extern "C" struct Heads {  // (tokens, heads, width): features are side by side
  void* data;
  int64_t token, head;  // strides, in elements
};

extern "C" struct Attention {
  int64_t sequences, heads, kv_heads, width;
  const int32_t *cu_q, *cu_k;  // sequences + 1 offsets into the tokens
  Heads q, k, v, out, dout, dq, dk, dv;
  float* lse;  // (query tokens, heads), of powers of two
  float scale;
  int32_t causal;
  const int64_t* key_positions;  // of each key token, or null
  uint32_t first_head;
};

#if defined(__AMX_BF16__)
constexpr int64_t GROUP = 32, BLOCK = 64;  // queries and keys of a block
#else
constexpr int64_t GROUP = 64, BLOCK = 64;
#endif
constexpr int64_t SPAN = KEY_SPAN;  // keys that are packed together

INLINE Keep first_lanes(int64_t n) {  // of sixteen; n may be below 0 and above 16
  return unpack_bits(n <= 0 ? 0 : n >= LANES ? 0xffff : (1 << n) - 1);
}

// One sequence, and which keys its queries see: all, or those up to their own place, where the last
// query stands at the last key.
struct Sequence {
  int64_t index, first_q, first_k, q, k;
  bool causal;

  Sequence(const Attention& a, int64_t i)
      : index(i), first_q(a.cu_q[i]), first_k(a.cu_k[i]), q(a.cu_q[i + 1] - first_q),
        k(a.cu_k[i + 1] - first_k), causal(a.causal) {}
  int64_t keys_of(int64_t query) const {
    return causal ? std::min(std::max(query + 1 + k - q, (int64_t)0), k) : k;
  }
  int64_t first_query_of(int64_t key) const {
    return causal ? std::min(std::max(key - (k - q), (int64_t)0), q) : 0;
  }
};

// One head of one sequence.
template <class T>
struct View {
  T* data;
  int64_t stride;

  View(const Heads& of, int64_t token, int64_t head)
      : data((T*)of.data + token * of.token + head * of.head), stride(of.token) {}
  T* row(int64_t i) const { return data + i * stride; }
};

// The decisions of a group of queries for a span of keys: bit k % 32 of word k / 32 of each query.
struct Decisions {
  uint32_t words[SPAN / 32][GROUP];

  void draw(const Attention& a, const Dropout& d, const Sequence& s, int64_t head, int64_t first,
            int64_t count, const std::vector<KeyBlock>& keys) {
    uint32_t bits[SPAN / 32];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = s.first_q + first + i;
      // without positions and sample ids: the number of the query in its sequence, and of this one
      draw_keys(d, d.positions ? d.positions[row] : first + i, d.sample_ids ? d.sample_ids[row] : s.index,
                1 + a.first_head + head, keys, (uint16_t*)bits);
      for (int64_t w = 0; w < SPAN / 32; ++w) words[w][i] = bits[w];
    }
  }
  // Which of sixteen queries keep a key.
  INLINE Keep of(int64_t key, int64_t lane) const {
#if defined(__AVX512F__)
    const __m512i bit = _mm512_set1_epi32(1u << key % 32);
    return _mm512_test_epi32_mask(_mm512_load_si512(&words[key / 32][lane]), bit);
#else
    I v;
    std::memcpy(&v, &words[key / 32][lane], sizeof(v));
    return (v & (int32_t)(1u << key % 32)) != 0;
#endif
  }
};

// What one thread does alone. Costs decide the order, never the result.
struct Task {
  int64_t sequence, head, begin, end;  // of queries (forward) or keys (backward)
  int64_t cost;
};

// Longest first, so that the last ones to finish are short.
inline void sort_tasks(std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

// Calls body(lane) for each vector of `count` queries.
template <class Body>
INLINE void for_lanes(int64_t count, Body body) {
  for (int64_t lane = 0; lane < count; lane += LANES) body(lane);
}
