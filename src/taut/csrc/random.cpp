// Decisions of the generator, a tile of 128 columns at a time. See random.h and ops/random.py.
#include "random.h"

constexpr uint32_t M0 = 0xD2511F53, M1 = 0xCD9E8D57, W0 = 0x9E3779B9, W1 = 0xBB67AE85;
constexpr int ROUNDS = 7, WORDS = 4, TILE_WORDS = DRAW_COLUMNS / LANES;

INLINE uint64_t wide(uint32_t a, uint32_t b) { return (uint64_t)a * b; }

// The counters of one row: of the first two rounds, what does not depend on the column is done here.
struct Row {
  uint32_t key0, key1, first, second0, second2, third;

  Row(const Dropout& d, uint32_t position, uint32_t sample, uint32_t plane)
      : key0(d.key0), key1(d.key1) {
    const uint64_t p1 = wide(plane, M1);
    const uint64_t p0 = wide((uint32_t)(p1 >> 32) ^ position ^ key0, M0);
    first = sample ^ key1;
    second0 = (uint32_t)p1 ^ (key0 + W0);
    second2 = (uint32_t)(p0 >> 32) ^ (key1 + W1);
    third = (uint32_t)p0;
  }

  // One counter, plainly.
  void words(uint32_t lane, uint32_t c[WORDS]) const {
    const uint64_t p0 = wide(lane, M0);
    const uint64_t p1 = wide((uint32_t)(p0 >> 32) ^ first, M1);
    c[0] = (uint32_t)(p1 >> 32) ^ second0;
    c[1] = p1;
    c[2] = (uint32_t)p0 ^ second2;
    c[3] = third;
    for (int round = 2; round < ROUNDS; ++round) {
      const uint64_t p0 = wide(c[0], M0), p1 = wide(c[2], M1);
      c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ (key0 + round * W0);
      c[1] = p1;
      c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ (key1 + round * W1);
      c[3] = p0;
    }
  }
};

// The lower halves of u for the two decisions of the word before this one.
INLINE uint32_t hash(uint32_t word) {
  word *= W0;
  return word ^ word >> 15;
}

// Where the upper half of u equals that of the threshold, one time in 2^16, the lower one decides.
__attribute__((noinline, cold)) static void break_ties(const Row& row, uint32_t threshold, int64_t tile,
                                                       uint16_t* bits) {
  for (uint32_t lane = 0; lane < LANES; ++lane) {
    uint32_t u[WORDS];
    row.words(16 * tile + lane, u);
    for (int w = 0; w < WORDS; ++w) {
      const uint32_t lower = hash(u[(w + 1) % WORDS]);
      for (int h = 0; h < 2; ++h) {
        const int column = 32 * w + 2 * lane + h;
        if ((u[w] >> 16 * h & 0xffff) == threshold >> 16 &&
            (lower >> 16 * h & 0xffff) < (threshold & 0xffff))
          bits[column / 16] &= ~(1 << column % 16);
      }
    }
  }
}

#if defined(__AVX512BW__)

// Each lane has a 64-bit slot, of which only the low half is read: no shuffles in the rounds. A round
// waits for the one before it, so CHAINS of eight counters go through them side by side.
template <int CHAINS>
INLINE void rounds(const Row& row, int64_t lane, __m512i c[CHAINS][WORDS]) {
  const __m512i m0 = _mm512_set1_epi64(M0), m1 = _mm512_set1_epi64(M1);
  const __m512i even = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
  for (int i = 0; i < CHAINS; ++i) {  // chains 2 k and 2 k + 1: even and odd lanes of tile k
    const __m512i lanes = _mm512_add_epi64(even, _mm512_set1_epi64(lane + i / 2 * 16 + i % 2));
    const __m512i p0 = _mm512_mul_epu32(lanes, m0);
    const __m512i c2 = _mm512_xor_si512(_mm512_srli_epi64(p0, 32), _mm512_set1_epi64(row.first));
    const __m512i p1 = _mm512_mul_epu32(c2, m1);
    c[i][0] = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), _mm512_set1_epi64(row.second0));
    c[i][1] = p1;
    c[i][2] = _mm512_xor_si512(p0, _mm512_set1_epi64(row.second2));
    c[i][3] = _mm512_set1_epi64(row.third);
  }
#pragma GCC unroll 8
  for (int round = 2; round < ROUNDS; ++round) {
    const __m512i k0 = _mm512_set1_epi64(row.key0 + round * W0);
    const __m512i k1 = _mm512_set1_epi64(row.key1 + round * W1);
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; ++i) {
      const __m512i p0 = _mm512_mul_epu32(c[i][0], m0), p1 = _mm512_mul_epu32(c[i][2], m1);
      const __m512i h0 = _mm512_srli_epi64(p0, 32), h1 = _mm512_srli_epi64(p1, 32);
      c[i][0] = _mm512_ternarylogic_epi64(h1, c[i][1], k0, 0x96);  // xor of three
      c[i][2] = _mm512_ternarylogic_epi64(h0, c[i][3], k1, 0x96);
      c[i][1] = p1;
      c[i][3] = p0;
    }
  }
}

// TILES tiles; true if there is a tie in one of them.
template <int TILES>
INLINE bool draw_tiles(const Row& row, uint32_t threshold, int64_t tile, uint16_t* bits) {
  const __m512i limit = _mm512_set1_epi16(threshold >> 16);
  __m512i c[2 * TILES][WORDS];
  rounds<2 * TILES>(row, 16 * tile, c);
  __m512i distance = _mm512_set1_epi16(-1);  // to the limit, at the nearest
#pragma GCC unroll 8
  for (int i = 0; i < TILES * WORDS; ++i) {
    const __m512i even = c[i / WORDS * 2][i % WORDS], odd = c[i / WORDS * 2 + 1][i % WORDS];
    const __m512i words = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    _store_mask32((__mmask32*)(bits + 2 * i), _mm512_cmpge_epu16_mask(words, limit));
    distance = _mm512_min_epu16(distance, _mm512_xor_si512(words, limit));
  }
  return _mm512_testn_epi16_mask(distance, distance);
}

#else

template <int TILES>
INLINE bool draw_tiles(const Row& row, uint32_t threshold, int64_t tile, uint16_t* bits) {
  const uint32_t limit = threshold >> 16;
  uint32_t ties = 0;
  for (int64_t end = tile + TILES; tile < end; ++tile) {
    uint32_t c[WORDS][LANES];
    for (int i = 0; i < LANES; ++i) {  // a loop that vectorises
      uint32_t words[WORDS];
      row.words(16 * tile + i, words);
      for (int w = 0; w < WORDS; ++w) c[w][i] = words[w];
    }
    for (int w = 0; w < WORDS; ++w) {
      uint32_t keep = 0;
      for (int i = 0; i < LANES; ++i) {
        const uint32_t low = c[w][i] & 0xffff, high = c[w][i] >> 16;
        keep |= (uint32_t)(low >= limit) << 2 * i | (uint32_t)(high >= limit) << (2 * i + 1);
        ties |= (low == limit) | (high == limit);
      }
      *bits++ = keep;
      *bits++ = keep >> 16;
    }
  }
  return ties;
}

#endif

static void draw_row(const Row& counters, uint32_t threshold, int64_t first_tile, int64_t tiles,
                     uint16_t* bits) {
  for (int64_t tile = 0; tile < tiles;) {
    const int64_t count = tiles - tile > 1 ? 2 : 1, at = first_tile + tile;
    uint16_t* to = bits + tile * TILE_WORDS;
    const bool ties = count == 2 ? draw_tiles<2>(counters, threshold, at, to)
                                 : draw_tiles<1>(counters, threshold, at, to);
    if (__builtin_expect(ties, 0))
      for (int64_t i = 0; i < count; ++i) break_ties(counters, threshold, at + i, to + i * TILE_WORDS);
    tile += count;
  }
}

void draw(const Dropout& d, int64_t row, int64_t width, uint16_t* bits) {
  if (!d.threshold) {
    std::memset(bits, 0xff, bits_size(width) * sizeof(*bits));
    return;
  }
  const Row counters(d, d.positions ? d.positions[row] : row, d.sample_ids ? d.sample_ids[row] : 0, 0);
  draw_row(counters, d.threshold, 0, bits_size(width) / TILE_WORDS, bits);
}

static bool are_consecutive(const int64_t* positions, int64_t count) {
  for (int64_t i = 1; i < count; ++i)
    if (positions[i] != positions[0] + i) return false;
  return true;
}

std::vector<KeyBlock> key_blocks(const int64_t* positions, int64_t index, int64_t count) {
  if (!positions) return {{(uint32_t)index, count, nullptr}};
  positions += index;
  if (are_consecutive(positions, count)) return {{(uint32_t)*positions, count, nullptr}};
  std::vector<KeyBlock> blocks;
  for (int64_t i = 0; i < count; i += DRAW_COLUMNS, positions += DRAW_COLUMNS) {
    const int64_t here = std::min(DRAW_COLUMNS, count - i);
    blocks.push_back({(uint32_t)*positions, here, are_consecutive(positions, here) ? nullptr : positions});
  }
  return blocks;
}

// Key by key: each takes a whole counter.
static void draw_scattered(const Row& counters, uint32_t threshold, const KeyBlock& keys, uint16_t* bits) {
  std::memset(bits, 0, bits_size(keys.count) * sizeof(*bits));
  for (int64_t i = 0; i < keys.count; ++i) {
    const uint32_t column = keys.positions[i], inside = column % DRAW_COLUMNS;
    uint32_t u[WORDS];
    counters.words(column / DRAW_COLUMNS * 16 + inside % 32 / 2, u);
    const int w = inside / 32, shift = 16 * (inside % 2);
    const uint32_t decision = (u[w] >> shift) << 16 | (hash(u[(w + 1) % WORDS]) >> shift & 0xffff);
    bits[i / LANES] |= (decision >= threshold) << i % LANES;
  }
}

void draw_keys(const Dropout& d, uint32_t position, uint32_t sample, uint32_t plane,
               const std::vector<KeyBlock>& keys, uint16_t* bits) {
  const Row counters(d, position, sample, plane);
  for (const KeyBlock& block : keys) {
    const int64_t words = bits_size(block.count), tiles = words / TILE_WORDS;
    const int64_t shift = block.first % DRAW_COLUMNS;
    if (block.positions) {
      draw_scattered(counters, d.threshold, block, bits);
    } else if (!shift) {
      draw_row(counters, d.threshold, block.first / DRAW_COLUMNS, tiles, bits);
    } else {
      uint16_t all[(KEY_SPAN / DRAW_COLUMNS + 1) * TILE_WORDS + 1];
      draw_row(counters, d.threshold, block.first / DRAW_COLUMNS, tiles + 1, all);
      for (int64_t w = 0; w < words; ++w) {  // the last word has bits of the first one past its end
        uint32_t two;
        std::memcpy(&two, all + shift / LANES + w, sizeof(two));
        bits[w] = two >> shift % LANES;
      }
    }
    bits += words;
  }
}
