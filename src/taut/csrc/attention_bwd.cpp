// The gradients of attention. See ops/attention.py for the formulas and attention.h for the form.
//
// A task works on the keys of a chunk, which it holds packed, and runs over the queries that see
// them. Gradients of keys and values are sums within a task. Those of queries are, too, where a
// sequence is one chunk; else each chunk leaves its share, in fp32, and shares are added in order.
// What is summed where follows from lengths and heads alone: the bits are those of every run.
#include "attention.h"
#include "pages.h"

constexpr int64_t MAX_CHUNKS = 8, WANTED_TASKS = 32;

struct Chunks {
  int64_t size, count;  // keys, up to whole spans

  Chunks(const Attention& a, int64_t keys) {
    const int64_t wanted = std::min(MAX_CHUNKS, (WANTED_TASKS + a.kv_heads - 1) / a.kv_heads);
    size = round_up(std::max((keys + wanted - 1) / wanted, (int64_t)1), SPAN);
    count = (keys + size - 1) / size;
  }
};

template <class T, class Dot>
struct Backward {
  typedef typename Dot::Unit Unit;
  const Attention& a;
  const Dropout& d;
  const int64_t units, depth;  // of a row of features, as it lies and as it is multiplied
  const int64_t features, key_stride, query_units;
  const F factor;
  Scratch<Unit> keys, values, key_columns;              // rows; rows; features in the rows
  Scratch<Unit> queries, douts, outs;                   // queries in the lanes
  Scratch<Unit> query_sums, dout_sums;                  // summed over queries
  Scratch<Unit> weights, dscores, dscore_lanes, rows;   // rows; rows; queries in the lanes
  Scratch<float> scores, dweights, dkeys, dvalues, dqueries;
  Scratch<Decisions> decisions;
  alignas(64) float lse[GROUP], mean[GROUP];  // mean: of the gradients of the weights
  Tiles tiles;

  Backward(const Attention& a, const Dropout& d)
      : a(a), d(d), units(round_up((a.width + Dot::SIZE - 1) / Dot::SIZE, LANES)),
        depth(round_up((a.width + Dot::SIZE - 1) / Dot::SIZE, Dot::DEPTH)),
        features(round_up(a.width, LANES)), key_stride(SPAN / Dot::SIZE + LANES),
        query_units(GROUP / Dot::SIZE), factor(splat(a.scale * LOG2E)), keys(SPAN * units),
        values(SPAN * units), key_columns(features * key_stride), queries(units * GROUP),
        douts(units * GROUP), outs(units * GROUP), query_sums(query_units * features), dout_sums(query_units * features),
        weights(BLOCK * query_units), dscores(BLOCK * query_units),
        dscore_lanes(BLOCK / Dot::SIZE * GROUP), rows(std::max(GROUP * units, SPAN / Dot::SIZE * features)),
        scores(GROUP * std::max(BLOCK, features)), dweights(BLOCK * GROUP), dkeys(SPAN * features),
        dvalues(SPAN * features), dqueries(GROUP * features), decisions(1) {}

  // `shares`: where the gradients of the queries of this chunk go, (heads, groups, features, GROUP);
  // null if they are whole.
  void run(const Task& task, float* shares) {
    const Sequence s(a, task.sequence);
    const View<const T> k(a.k, s.first_k, task.head), v(a.v, s.first_k, task.head);
    const int64_t heads = a.heads / a.kv_heads, groups = (s.q + GROUP - 1) / GROUP;
    for (int64_t j = task.begin; j < task.end; j += SPAN) {
      const int64_t count = std::min(SPAN, task.end - j);
      pack_keys(k, v, j, count);
      std::memset(dkeys.data(), 0, round_up(count, Dot::ROWS) * features * sizeof(float));
      std::memset(dvalues.data(), 0, round_up(count, Dot::ROWS) * features * sizeof(float));
      std::vector<KeyBlock> blocks;
      if (d.threshold) blocks = key_blocks(a.key_positions, a.key_positions ? s.first_k + j : j, count);
      for (int64_t head = task.head * heads; head < (task.head + 1) * heads; ++head)
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t i = group * GROUP, here = std::min(GROUP, s.q - i);
          float* share = shares ? shares + ((head % heads) * groups + group) * features * GROUP : nullptr;
          visit(s, head, i, here, j, count, blocks, share, j == task.begin);
        }
      write(a.dk, s.first_k + j, task.head, count, dkeys.data(), splat(a.scale * d.scale));
      write(a.dv, s.first_k + j, task.head, count, dvalues.data(), splat(d.scale));
    }
  }

  void pack_keys(const View<const T>& k, const View<const T>& v, int64_t first, int64_t count) {
    const int64_t padded = round_up(count, Dot::ROWS);
    pack_rows<Dot, T>(k.row(first), k.stride, count, a.width, padded, units, keys.data());
    pack_rows<Dot, T>(v.row(first), v.stride, count, a.width, padded, units, values.data());
    const int64_t depth_of_keys = round_up((count + Dot::SIZE - 1) / Dot::SIZE, LANES);
    pack_sums<Dot, T>(k.row(first), k.stride, count, a.width, depth_of_keys, features, rows.data());
    transpose(rows.data(), features, depth_of_keys, features, key_columns.data(), key_stride);
  }

  void pack_lanes(const View<const T>& q, int64_t first, int64_t count, Scratch<Unit>& lanes) {
    const int64_t padded = round_up(count, 2 * LANES);
    pack_rows<Dot, T>(q.row(first), q.stride, count, a.width, padded, units, rows.data());
    transpose(rows.data(), units, padded, units, lanes.data(), GROUP);
  }

  void pack_queries(const View<const T>& q, int64_t first, int64_t count, Scratch<Unit>& lanes,
                    Scratch<Unit>& sums) {
    pack_lanes(q, first, count, lanes);
    pack_sums<Dot, T>(q.row(first), q.stride, count, a.width, query_units, features, sums.data());
  }

  // The share of a group of queries in all gradients of a span of keys.
  void visit(const Sequence& s, int64_t head, int64_t first, int64_t queries_here, int64_t span,
             int64_t count, const std::vector<KeyBlock>& blocks, float* share, bool is_first) {
    const int64_t seen = std::min(count, s.keys_of(first + queries_here - 1) - span);
    float* total = share ? share : dqueries.data();
    if (is_first) std::memset(total, 0, features * GROUP * sizeof(float));
    if (seen > 0) {
      const View<const T> q(a.q, s.first_q, head), dout(a.dout, s.first_q, head);
      pack_queries(q, first, queries_here, queries, query_sums);
      pack_queries(dout, first, queries_here, douts, dout_sums);
      read_rows(s, head, first, queries_here);
      if (d.threshold) decisions.data()->draw(a, d, s, head, first, queries_here, blocks);
      for (int64_t at = 0; at < seen; at += BLOCK)
        block(s, first, queries_here, span, at, std::min(BLOCK, seen - at), total);
    }
    if (!share) write_queries(s, head, first, queries_here, total);
  }

  // What the forward pass found for each query, and sum(dout * out), of which dropout's scale is left
  // out. It is summed in the order of the gradients of the weights: where a query looks at one key
  // alone the two are one number, and their difference is the zero that it should be.
  void read_rows(const Sequence& s, int64_t head, int64_t first, int64_t count) {
    pack_lanes(View<const T>(a.out, s.first_q, head), first, count, outs);
    for (int64_t lane = 0; lane < round_up(count, 2 * LANES); lane += LANES) {
      F total{};
      for (int64_t k = 0; k < depth; k += CHAIN) {
        F chain{};
        for (int64_t unit = k; unit < std::min(k + CHAIN, depth); ++unit) {
          F out, dout;
          std::memcpy(&out, outs.data() + unit * GROUP + lane, sizeof(F));
          std::memcpy(&dout, douts.data() + unit * GROUP + lane, sizeof(F));
          chain = Dot::dot(chain, out, dout);
        }
        total += chain;
      }
      store(mean + lane, total / d.scale, Full{});
    }
    for (int64_t i = 0; i < count; ++i) {
      const float of_row = a.lse[(s.first_q + first + i) * a.heads + head];
      lse[i] = of_row == -INFINITY ? 0 : of_row;
    }
    for (int64_t i = count; i < GROUP; ++i) lse[i] = 0;
  }

  void block(const Sequence& s, int64_t first, int64_t queries_here, int64_t span, int64_t at, int64_t count,
             float* total) {
    const int64_t lanes = round_up(queries_here, 2 * LANES), padded = round_up(count, Dot::ROWS);
    multiply<Dot>(padded, lanes, keys.data() + at * units, units, queries.data(), GROUP, depth, scores.data(),
                  GROUP, false);
    multiply<Dot>(padded, lanes, values.data() + at * units, units, douts.data(), GROUP, depth,
                  dweights.data(), GROUP, false);
    const bool hides = s.keys_of(first) < span + at + count;
    for (int64_t lane = 0; lane < queries_here; lane += 2 * LANES) {
      if (hides) {
        if (d.threshold) differentiate<true, true>(s, first + lane, lane, span + at, at, count);
        else differentiate<true, false>(s, first + lane, lane, span + at, at, count);
      } else {
        if (d.threshold) differentiate<false, true>(s, first + lane, lane, span + at, at, count);
        else differentiate<false, false>(s, first + lane, lane, span + at, at, count);
      }
    }
    const int64_t of_queries = round_up((queries_here + Dot::SIZE - 1) / Dot::SIZE, Dot::DEPTH);
    const int64_t of_keys = round_up((count + Dot::SIZE - 1) / Dot::SIZE, Dot::DEPTH);
    multiply<Dot>(padded, features, weights.data(), query_units, dout_sums.data(), features, of_queries,
                  dvalues.data() + at * features, features, true);
    multiply<Dot>(padded, features, dscores.data(), query_units, query_sums.data(), features, of_queries,
                  dkeys.data() + at * features, features, true);
    multiply<Dot>(features, lanes, key_columns.data() + at / Dot::SIZE, key_stride, dscore_lanes.data(),
                  GROUP, of_keys, total, GROUP, true);
  }

  // Weights and the gradients of the scores of 32 queries, from the scores and the gradients of the
  // weights. Dropout's scale and that of the scores are left to the sums.
  template <bool HIDES, bool DROPS>
  void differentiate(const Sequence& s, int64_t query, int64_t lane, int64_t key, int64_t at,
                     int64_t count) {
    const int64_t ahead = query + s.k - s.q - key;  // as in the forward pass
    const F lse_[2] = {load(lse + lane, Full{}), load(lse + lane + LANES, Full{})};
    const F mean_[2] = {load(mean + lane, Full{}), load(mean + lane + LANES, Full{})};
    const auto pair = [&](int64_t r, F p[2], F ds[2]) INLINE_LAMBDA {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const int64_t offset = r * GROUP + lane + i * LANES;
        F weight = exp2_<Dot>(load(scores.data() + offset, Full{}) * factor - lse_[i]);
        if (HIDES) weight = blend(first_lanes(r - ahead - i * LANES), F{}, weight);
        F dweight = load(dweights.data() + offset, Full{});
        p[i] = weight;
        if (DROPS) {
          const Keep keep = decisions.data()->of(at + r, lane + i * LANES);
          p[i] = select(keep, weight);
          dweight = select(keep, dweight);
        }
        ds[i] = weight * (dweight - mean_[i]);
      }
      store_row<Dot>(weights.data() + r * query_units + lane / Dot::SIZE, p[0], p[1]);
      store_row<Dot>(dscores.data() + r * query_units + lane / Dot::SIZE, ds[0], ds[1]);
    };
    int64_t r = 0;
    for (; r + Dot::SIZE <= count; r += Dot::SIZE) {
      F p[2], ds[2], next[2] = {};
      pair(r, p, ds);
      if (Dot::SIZE == 2) pair(r + 1, p, next);
      Unit* to = dscore_lanes.data() + r / Dot::SIZE * GROUP + lane;
      store_lanes<Dot>(to, ds[0], next[0]);
      store_lanes<Dot>(to + LANES, ds[1], next[1]);
    }
    if (r < count) {
      F p[2], ds[2];
      pair(r, p, ds);
      Unit* to = dscore_lanes.data() + r / Dot::SIZE * GROUP + lane;
      store_lanes<Dot>(to, ds[0], F{});
      store_lanes<Dot>(to + LANES, ds[1], F{});
    }
    const int64_t used = (count + Dot::SIZE - 1) / Dot::SIZE;
    for (int64_t unit = used; unit < round_up(used, Dot::DEPTH); ++unit) {
      store_lanes<Dot>(dscore_lanes.data() + unit * GROUP + lane, F{}, F{});
      store_lanes<Dot>(dscore_lanes.data() + unit * GROUP + lane + LANES, F{}, F{});
    }
    for (r = count; r < round_up(count, Dot::ROWS); ++r) {
      store_row<Dot>(weights.data() + r * query_units + lane / Dot::SIZE, F{}, F{});
      store_row<Dot>(dscores.data() + r * query_units + lane / Dot::SIZE, F{}, F{});
    }
  }

  void write(const Heads& to, int64_t first, int64_t head, int64_t count, const float* from, F scale) {
    const View<T> rows_(to, first, head);
    for (int64_t i = 0; i < count; ++i)
      for_columns(a.width, [&](int64_t c, auto n) INLINE_LAMBDA {
        store(rows_.row(i) + c, load(from + i * features + c, Full{}) * scale, n);
      });
  }

  // Totals with the queries in the lanes.
  void write_queries(const Sequence& s, int64_t head, int64_t first, int64_t count, const float* from) {
    float* by_query = scores.data();
    for (int64_t f = 0; f < features; f += LANES)
      transpose(from + f * GROUP, GROUP, LANES, round_up(count, LANES), by_query + f, features);
    write(a.dq, s.first_q + first, head, count, by_query, splat(a.scale * d.scale));
  }
};

// Rows of sequences that have no keys, or no queries.
template <class T>
static void clear(const Heads& to, int64_t first, int64_t count, int64_t heads, int64_t width) {
  for (int64_t i = first; i < first + count; ++i)
    for (int64_t h = 0; h < heads; ++h)
      std::memset((void*)((T*)to.data + i * to.token + h * to.head), 0, width * sizeof(T));
}

template <class T>
static void attention_bwd(const Attention& a, const Dropout& d) {
  typedef Backward<T, typename DotOf<T>::type> Work;
  const int64_t features = round_up(a.width, LANES), heads = a.heads / a.kv_heads;
  std::vector<Task> tasks, sums;
  std::vector<int64_t> where(a.sequences);  // of the shares of a sequence
  int64_t size = 0;
  for (int64_t i = 0; i < a.sequences; ++i) {
    const Sequence s(a, i);
    if (!s.q || !s.k) {
      clear<T>(a.dq, s.first_q, s.q, a.heads, a.width);
      clear<T>(a.dk, s.first_k, s.k, a.kv_heads, a.width);
      clear<T>(a.dv, s.first_k, s.k, a.kv_heads, a.width);
      continue;
    }
    const Chunks chunks(a, s.k);
    for (int64_t begin = 0; begin < s.k; begin += chunks.size) {
      const int64_t end = std::min(begin + chunks.size, s.k);
      for (int64_t head = 0; head < a.kv_heads; ++head)
        tasks.push_back({i, head, begin, end, (end - begin) * (s.q - s.first_query_of(begin))});
    }
    if (s.k <= SPAN) continue;
    where[i] = size;
    size += chunks.count * a.heads * round_up(s.q, GROUP) * features;
    for (int64_t head = 0; head < a.heads; ++head)
      for (int64_t begin = 0; begin < s.q; begin += GROUP)
        sums.push_back({i, head, begin, std::min(begin + GROUP, s.q), 0});
  }
  sort_tasks(tasks);
  Scratch<float> shares(size);
  const auto share_of = [&](const Sequence& s, int64_t chunk, int64_t head) {
    return shares.data() + where[s.index] + (chunk * a.heads + head) * round_up(s.q, GROUP) * features;
  };
#pragma omp parallel if (tasks.size() > 1)
  {
    Work work(a, d);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); ++i) {
      const Sequence s(a, tasks[i].sequence);
      const int64_t chunk = tasks[i].begin / Chunks(a, s.k).size;
      work.run(tasks[i], s.k > SPAN ? share_of(s, chunk, tasks[i].head * heads) : nullptr);
    }
#pragma omp for schedule(static)
    for (size_t i = 0; i < sums.size(); ++i) {
      const Sequence s(a, sums[i].sequence);
      float* total = work.dqueries.data();
      const int64_t offset = sums[i].begin * features, n = GROUP * features;
      std::memcpy(total, share_of(s, 0, sums[i].head) + offset, n * sizeof(float));
      for (int64_t chunk = 1; chunk < Chunks(a, s.k).count; ++chunk) {
        const float* share = share_of(s, chunk, sums[i].head) + offset;
        for (int64_t c = 0; c < n; c += LANES)
          store(total + c, load(total + c, Full{}) + load(share + c, Full{}), Full{});
      }
      work.write_queries(s, sums[i].head, sums[i].begin, sums[i].end - sums[i].begin, total);
    }
  }
}

EXPORT void taut_attention_bwd(int32_t dtype, const Attention* a, const Dropout* d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    const int64_t keys = a->cu_k[a->sequences] * a->kv_heads * a->width * sizeof(T);
    ask_for_huge_pages(a->dq.data, a->cu_q[a->sequences] * a->heads * a->width * sizeof(T));
    ask_for_huge_pages(a->dk.data, keys);
    ask_for_huge_pages(a->dv.data, keys);
    attention_bwd<T>(*a, *d);
  });
}
