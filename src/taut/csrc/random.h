// The generator of ops/random.py: Philox4x32-7 on (column group, position, plane, sample id).
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

extern "C" struct Dropout {
  uint32_t threshold;  // u below it drops; 0: no dropout
  uint32_t key0, key1;
  float scale;                // 1 / P(keep); 1 without dropout
  const int64_t* sample_ids;  // a row each, or null: 0
  const int64_t* positions;   // a row each, or null: the row's number
};

constexpr int64_t DRAW_COLUMNS = 128;  // a tile: what sixteen counters decide

// Words of decisions that a row of `width` columns takes, a bit a column, up to whole tiles.
constexpr int64_t bits_size(int64_t width) {
  return (width + DRAW_COLUMNS - 1) / DRAW_COLUMNS * (DRAW_COLUMNS / LANES);
}

// Sets bit c % 16 of bits[c / 16] where column c of the row is kept, for bits_size(width) words.
void draw(const Dropout& d, int64_t row, int64_t width, uint16_t* bits);

constexpr int64_t KEY_SPAN = 512;  // keys that an attention draws for at a time

// Keys of an attention, side by side in memory.
struct KeyBlock {
  uint32_t first;            // the position of the first one, if they are consecutive
  int64_t count;             // up to KEY_SPAN; of all blocks of a span but the last, whole tiles
  const int64_t* positions;  // of each, if they are not; else null
};

// `count` keys from `index` on; without positions a key's is its number in its sequence.
std::vector<KeyBlock> key_blocks(const int64_t* positions, int64_t index, int64_t count);

// The decisions of one query for the keys of a span, a bit a key; `plane` is 1 + its head.
void draw_keys(const Dropout& d, uint32_t position, uint32_t sample, uint32_t plane,
               const std::vector<KeyBlock>& keys, uint16_t* bits);
