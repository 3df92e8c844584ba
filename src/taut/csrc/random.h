// The generator of ops/random.py: Philox4x32-7 on (column group, position, plane, sample id).
#pragma once

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
void draw(const Dropout& d, int64_t row, int64_t width, uint16_t* bits, uint32_t plane = 0);
