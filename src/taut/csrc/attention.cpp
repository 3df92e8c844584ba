// softmax(scale q k^T) v over packed sequences, forward. See ops/attention.py and attention.h.
#include "attention.h"
#include "pages.h"

constexpr int64_t TASK_QUERIES = 8 * GROUP;  // which share the packed keys
// The weights of a query are powers of two relative to a base. It follows the highest score only
// when it must: a base 2^8 too low costs no digit, and raising it means rescaling what was summed.
constexpr float SLACK = 8;

template <class T, class Dot>
struct Forward {
  typedef typename Dot::Unit Unit;
  const Attention& a;
  const Dropout& d;
  const int64_t units, depth;  // of a row of features, as it lies and as it is multiplied
  const int64_t features, value_stride;
  const F factor;
  Scratch<Unit> keys, values, queries, weights, rows;
  Scratch<float> scores, totals;
  Scratch<Decisions> decisions;
  alignas(64) float base[TASK_QUERIES], sum[TASK_QUERIES];
  Tiles tiles;

  Forward(const Attention& a, const Dropout& d)
      : a(a), d(d), units(round_up((a.width + Dot::SIZE - 1) / Dot::SIZE, LANES)),
        depth(round_up((a.width + Dot::SIZE - 1) / Dot::SIZE, Dot::DEPTH)),
        features(round_up(a.width, LANES)), value_stride(SPAN / Dot::SIZE + LANES),
        factor(splat(a.scale * LOG2E)), keys(SPAN * units), values(features * value_stride),
        queries(TASK_QUERIES * units), weights(BLOCK / Dot::SIZE * GROUP),
        rows(std::max(GROUP * units, SPAN / Dot::SIZE * features)),
        scores(GROUP * std::max(BLOCK, features)), totals(TASK_QUERIES * features), decisions(1) {}

  void run(const Task& task) {
    const Sequence s(a, task.sequence);
    const int64_t kv_head = task.head / (a.heads / a.kv_heads), seen = s.keys_of(task.end - 1);
    const View<const T> q(a.q, s.first_q, task.head);
    const View<const T> k(a.k, s.first_k, kv_head), v(a.v, s.first_k, kv_head);
    for (int64_t i = task.begin; i < task.end; i += GROUP)
      pack_queries(q, i, std::min(GROUP, task.end - i), i - task.begin);
    std::memset(totals.data(), 0, round_up(task.end - task.begin, GROUP) * features * sizeof(float));
    for (int64_t i = 0; i < TASK_QUERIES; ++i) base[i] = -INFINITY, sum[i] = 0;
    for (int64_t j = 0; j < seen; j += SPAN) {
      const int64_t count = std::min(SPAN, seen - j);
      pack_keys(k, v, j, count);
      std::vector<KeyBlock> blocks;
      if (d.threshold) blocks = key_blocks(a.key_positions, a.key_positions ? s.first_k + j : j, count);
      for (int64_t i = task.begin; i < task.end; i += GROUP) {
        const int64_t queries_here = std::min(GROUP, task.end - i);
        const int64_t keys_here = std::min(count, s.keys_of(i + queries_here - 1) - j);
        if (keys_here <= 0) continue;
        if (d.threshold) decisions.data()->draw(a, d, s, task.head, i, queries_here, blocks);
        for (int64_t at = 0; at < keys_here; at += BLOCK) {
          const int64_t rows_here = std::min(BLOCK, keys_here - at);
          const bool hides = s.keys_of(i) < j + at + rows_here;
          block(s, i - task.begin, i, queries_here, j, at, rows_here, hides);
        }
      }
    }
    for (int64_t i = task.begin; i < task.end; i += GROUP)
      write(s, task.head, i - task.begin, i, std::min(GROUP, task.end - i));
  }

  void pack_queries(const View<const T>& q, int64_t first, int64_t count, int64_t group) {
    const int64_t padded = round_up(count, LANES);
    pack_rows<Dot, T>(q.row(first), q.stride, count, a.width, padded, units, rows.data());
    transpose(rows.data(), units, padded, units, queries.data() + group * units, GROUP);
  }

  // Keys as rows; values with features in the rows, summed over keys.
  void pack_keys(const View<const T>& k, const View<const T>& v, int64_t first, int64_t count) {
    pack_rows<Dot, T>(k.row(first), k.stride, count, a.width, round_up(count, Dot::ROWS), units, keys.data());
    const int64_t depth_of_keys = round_up((count + Dot::SIZE - 1) / Dot::SIZE, LANES);
    pack_sums<Dot, T>(v.row(first), v.stride, count, a.width, depth_of_keys, features, rows.data());
    transpose(rows.data(), features, depth_of_keys, features, values.data(), value_stride);
  }

  // Queries from `first` on, of which `group` is the number in the task, and `count` keys from
  // span + at on.
  void block(const Sequence& s, int64_t group, int64_t first, int64_t queries_here, int64_t span, int64_t at,
             int64_t count, bool hides) {
    const int64_t lanes = round_up(queries_here, LANES);
    multiply<Dot>(round_up(count, Dot::ROWS), lanes, keys.data() + at * units, units,
                  queries.data() + group * units, GROUP, depth, scores.data(), GROUP, false);
    for_lanes(queries_here, [&](int64_t lane) INLINE_LAMBDA {
      if (hides) {
        if (d.threshold) weigh<true, true>(s, group + lane, first + lane, lane, span + at, at, count);
        else weigh<true, false>(s, group + lane, first + lane, lane, span + at, at, count);
      } else {
        if (d.threshold) weigh<false, true>(s, group + lane, first + lane, lane, span + at, at, count);
        else weigh<false, false>(s, group + lane, first + lane, lane, span + at, at, count);
      }
    });
    const int64_t depth_of_keys = round_up((count + Dot::SIZE - 1) / Dot::SIZE, Dot::DEPTH);
    multiply<Dot>(features, lanes, values.data() + at / Dot::SIZE, value_stride, weights.data(), GROUP,
                  depth_of_keys, totals.data() + group * features, GROUP, true);
  }

  // Scores of sixteen queries to weights, of which those that are dropped become zero.
  template <bool HIDES, bool DROPS>
  void weigh(const Sequence& s, int64_t group, int64_t query, int64_t lane, int64_t key, int64_t at,
             int64_t count) {
    // where queries see the keys up to their own place, key + r hides from the first r - ahead lanes
    const int64_t ahead = query + s.k - s.q - key;
    const float* from = scores.data() + lane;
    const auto score = [&](int64_t r) INLINE_LAMBDA {
      const F v = load(from + r * GROUP, Full{});
      return HIDES ? blend(first_lanes(r - ahead), splat(-INFINITY), v) : v;
    };
    F highest[4] = {score(0), score(0), score(0), score(0)};
    int64_t r = 0;
    for (; r + 4 <= count; r += 4)
      UNROLL_4
      for (int i = 0; i < 4; ++i) highest[i] = max_(score(r + i), highest[i]);
    for (; r < count; ++r) highest[0] = max_(score(r), highest[0]);
    const F top = max_(max_(highest[0], highest[1]), max_(highest[2], highest[3])) * factor;
    const F was = load(base + group, Full{});
    F now = was;
    if (pack_bits(at_least(top, was + SLACK))) now = raise_base(group, lane, top, was);
    now = now == -INFINITY ? F{} : now;
    F total[2] = {};
    Unit* to = weights.data() + lane;
    const auto weight = [&](int64_t r, F& sum) INLINE_LAMBDA {
      F p = exp2_<Dot>(load(from + r * GROUP, Full{}) * factor - now);
      if (HIDES) p = blend(first_lanes(r - ahead), F{}, p);
      sum += p;
      return DROPS ? select(decisions.data()->of(at + r, lane), p) : p;
    };
    for (r = 0; r + 2 <= count; r += 2) {
      const F p0 = weight(r, total[0]), p1 = weight(r + 1, total[1]);
      if (Dot::SIZE == 2) {
        store_lanes<Dot>(to + r / 2 * GROUP, p0, p1);
      } else {
        store_lanes<Dot>(to + r * GROUP, p0, F{});
        store_lanes<Dot>(to + (r + 1) * GROUP, p1, F{});
      }
    }
    if (r < count) store_lanes<Dot>(to + r / Dot::SIZE * GROUP, weight(r, total[0]), F{});
    const int64_t used = (count + Dot::SIZE - 1) / Dot::SIZE;
    for (int64_t unit = used; unit < round_up(used, Dot::DEPTH); ++unit)
      store_lanes<Dot>(to + unit * GROUP, F{}, F{});
    store(sum + group, load(sum + group, Full{}) + (total[0] + total[1]), Full{});
  }

  // Rescales what was summed to a base at the highest score yet.
  __attribute__((noinline)) F raise_base(int64_t group, int64_t lane, F top, F was) {
    const F now = max_(top, was);
    store(base + group, now, Full{});
    const F factor = was == -INFINITY ? F{} : exp2_<Single>(was - now);
    store(sum + group, load(sum + group, Full{}) * factor, Full{});
    scale_totals(totals.data() + (group - lane) * features + lane, factor);
    return now;
  }

  void scale_totals(float* total, F factor) {
    for (int64_t f = 0; f < features; ++f, total += GROUP)
      store(total, load(total, Full{}) * factor, Full{});
  }

  void write(const Sequence& s, int64_t head, int64_t group, int64_t first, int64_t count) {
    const View<T> out(a.out, s.first_q + first, head);
    float* lse = a.lse + (s.first_q + first) * a.heads + head;
    float* by_query = scores.data();  // (queries, features)
    for_lanes(count, [&](int64_t lane) INLINE_LAMBDA {
      const F total = load(sum + group + lane, Full{});
      scale_totals(totals.data() + group * features + lane, total == 0.f ? F{} : d.scale / total);
    });
    for (int64_t f = 0; f < features; f += LANES)  // a strip of features at a time fits the scratch
      transpose(totals.data() + group * features + f * GROUP, GROUP, LANES, round_up(count, LANES),
                by_query + f, features);
    for (int64_t i = 0; i < count; ++i) {
      lse[i * a.heads] = base[group + i] + std::log2(sum[group + i]);
      for_columns(a.width, [&](int64_t c, auto n) INLINE_LAMBDA {
        store(out.row(i) + c, load(by_query + i * features + c, Full{}), n);
      });
    }
  }
};

template <class T>
static void attention_fwd(const Attention& a, const Dropout& d) {
  std::vector<Task> tasks;
  for (int64_t i = 0; i < a.sequences; ++i) {
    const Sequence s(a, i);
    for (int64_t begin = 0; begin < s.q; begin += TASK_QUERIES) {
      const int64_t end = std::min(begin + TASK_QUERIES, s.q);
      for (int64_t head = 0; head < a.heads; ++head)
        tasks.push_back({i, head, begin, end, (end - begin) * s.keys_of(end - 1)});
    }
  }
  sort_tasks(tasks);
#pragma omp parallel if (tasks.size() > 1)
  {
    Forward<T, typename DotOf<T>::type> forward(a, d);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < tasks.size(); ++i) forward.run(tasks[i]);
  }
}

EXPORT void taut_attention_fwd(int32_t dtype, const Attention* a, const Dropout* d) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    ask_for_huge_pages(a->out.data, a->cu_q[a->sequences] * a->heads * a->width * sizeof(T));
    attention_fwd<T>(*a, *d);
  });
}
