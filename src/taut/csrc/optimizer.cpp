// Steps of optimizers over lists of tensors in one pass: gradient in, weight and moments out. See
// ops/optimizer.py for the formulas. Work is cut into blocks of a size of their own, so that neither
// the number of threads nor that of the tensors shows in a result.

#include <algorithm>
#include <vector>

#include "vec.h"

extern "C" struct Step {
  int64_t tensors;
  const int64_t* sizes;
  void* const* weights;   // float, or bf16 with the lower halves of floats in lows
  int16_t* const* lows;   // null for float weights, and for bf16 without them
  void* const* grads;
  float* const* first;    // moments; null where the optimizer has none
  float* const* second;
  const float* decays;    // of each tensor: lr * weight decay, or weight decay where it is added
  double lr, beta1, beta2, eps, correction1, correction2, grad_scale;
  int32_t kind;           // as in ops/optimizer.py
  int32_t is_nesterov, is_first;  // of SGD: is_first, the momentum is the gradient
};

namespace {  // other files have a Task of their own, and std::vector<Task> is one for the linker

constexpr int64_t BLOCK_SIZE = 1 << 14;
enum Kind { ADAMW, ADAM, SGD, LAMB_MOMENTS, LAMB_UPDATE };

// A weight in fp32. Its upper half is rounded to nearest, ties away from zero, so that the lower half,
// taken as a signed number, gives back what was there: bits = (upper << 16) + lower.
template <class T>
struct Master {
  T* weight;
  int16_t* low;
};
template <class N>
INLINE F read(Master<float> m, int64_t i, N n) {
  return load(m.weight + i, n);
}
template <class N>
INLINE void write(Master<float> m, int64_t i, F w, N n) {
  store(m.weight + i, w, n);
}
typedef int16_t S __attribute__((vector_size(32)));
template <class N>
INLINE F read(Master<bf16> m, int64_t i, N n) {
  const U upper = __builtin_convertvector(load_words<H>(&m.weight[i].bits, n), U) << 16;
  if (!m.low) return (F)upper;
  return (F)(upper + (U)__builtin_convertvector(load_words<S>(m.low + i, n), I));
}
template <class N>
INLINE void write(Master<bf16> m, int64_t i, F w, N n) {
  if (!m.low) return store(m.weight + i, w, n);
  const U bits = (U)w;
  store_words(&m.weight[i].bits, __builtin_convertvector((bits + 0x8000) >> 16, H), n);
  store_words(m.low + i, (S)__builtin_convertvector(bits & 0xffff, H), n);
}
template <class N>
INLINE F read(Master<f16> m, int64_t i, N n) {
  return load(m.weight + i, n);
}
template <class N>
INLINE void write(Master<f16> m, int64_t i, F w, N n) {
  store(m.weight + i, w, n);
}

INLINE F root(F v) {
#if defined(__AVX512F__)
  return (F)_mm512_sqrt_ps((__m512)v);
#else
  for (int i = 0; i < LANES; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

// Adam's direction, without the step size.
struct Direction {
  F inverse1, root2, eps;
  explicit Direction(const Step& p)
      : inverse1(splat(1 / p.correction1)), root2(splat(1 / std::sqrt(p.correction2))), eps(splat(p.eps)) {}
  INLINE F operator()(F m, F v) const { return m * inverse1 / (root(v) * root2 + eps); }
};

// Norms of a block of a tensor, for LAMB.
struct Norms {
  double weight, update;
};

template <class T, class G, int KIND>
static Norms run_block(const Step& p, int64_t t, int64_t begin, int64_t end, float ratio) {
  const Master<T> master{(T*)p.weights[t], p.lows ? p.lows[t] : nullptr};
  const G* grad = (const G*)p.grads[t];
  float* first = p.first ? p.first[t] : nullptr;
  float* second = p.second ? p.second[t] : nullptr;
  const F scale = splat(p.grad_scale), beta1 = splat(p.beta1), beta2 = splat(p.beta2);
  const F rest1 = splat(1 - p.beta1), rest2 = splat(1 - p.beta2), lr = splat(p.lr);
  const F decay = splat(p.decays[t]);
  const Direction direction(p);
  F weights{}, updates{};
  for_columns(end - begin, [&](int64_t c, auto n) INLINE_LAMBDA {
    const int64_t i = begin + c;
    F w = read(master, i, n);
    if constexpr (KIND == LAMB_UPDATE) {
      const F u = direction(load(first + i, n), load(second + i, n)) + decay * w;
      write(master, i, w - splat(ratio) * u, n);
      return;
    }
    F g = load(grad + i, n) * scale;
    if constexpr (KIND == SGD) {
      g += decay * w;
      if (first) {
        const F m = p.is_first ? g : load(first + i, n) * beta1 + g;
        store(first + i, m, n);
        g = p.is_nesterov ? g + beta1 * m : m;
      }
      write(master, i, w - lr * g, n);
      return;
    }
    if constexpr (KIND == ADAM) g += decay * w;
    if constexpr (KIND == ADAMW) w -= decay * w;
    const F m = load(first + i, n) * beta1 + g * rest1;
    const F v = load(second + i, n) * beta2 + g * g * rest2;
    store(first + i, m, n);
    store(second + i, v, n);
    if constexpr (KIND == LAMB_MOMENTS) {
      const F u = direction(m, v) + decay * w;
      weights += w * w;
      updates += u * u;
      return;
    }
    write(master, i, w - lr * direction(m, v), n);
  });
  return {sum_lanes(weights), sum_lanes(updates)};
}

struct Task {
  int64_t tensor, begin, end;
};

static std::vector<Task> tasks_of(int64_t tensors, const int64_t* sizes) {
  std::vector<Task> tasks;
  for (int64_t t = 0; t < tensors; ++t)
    for (int64_t begin = 0; begin < sizes[t]; begin += BLOCK_SIZE)
      tasks.push_back({t, begin, std::min(begin + BLOCK_SIZE, sizes[t])});
  return tasks;
}

template <class T, class G, int KIND>
static void run(const Step& p, const std::vector<Task>& tasks, const float* ratios, Norms* norms) {
#pragma omp parallel for schedule(static)
  for (size_t i = 0; i < tasks.size(); ++i) {
    const Task& task = tasks[i];
    const float ratio = ratios ? ratios[task.tensor] : 0;
    const Norms made = run_block<T, G, KIND>(p, task.tensor, task.begin, task.end, ratio);
    if (norms) norms[i] = made;
  }
}

template <class T, class G>
static void lamb(const Step& p, const std::vector<Task>& tasks) {
  std::vector<Norms> norms(tasks.size()), totals(p.tensors, Norms{0, 0});
  run<T, G, LAMB_MOMENTS>(p, tasks, nullptr, norms.data());
  for (size_t i = 0; i < tasks.size(); ++i) {
    totals[tasks[i].tensor].weight += norms[i].weight;
    totals[tasks[i].tensor].update += norms[i].update;
  }
  std::vector<float> ratios(p.tensors);
  for (int64_t t = 0; t < p.tensors; ++t) {
    const bool both = totals[t].weight > 0 && totals[t].update > 0;
    ratios[t] = p.lr * (both ? std::sqrt(totals[t].weight / totals[t].update) : 1);
  }
  run<T, G, LAMB_UPDATE>(p, tasks, ratios.data(), nullptr);
}

}  // namespace

EXPORT void taut_optimizer_step(int32_t weight_dtype, int32_t grad_dtype, const Step* p) {
  const std::vector<Task> tasks = tasks_of(p->tensors, p->sizes);
  with_storage(weight_dtype, [&](auto w) {
    with_storage(grad_dtype, [&](auto g) {
      using T = decltype(w);
      using G = decltype(g);
      switch (p->kind) {
        case ADAMW: return run<T, G, ADAMW>(*p, tasks, nullptr, nullptr);
        case ADAM: return run<T, G, ADAM>(*p, tasks, nullptr, nullptr);
        case SGD: return run<T, G, SGD>(*p, tasks, nullptr, nullptr);
        case LAMB_MOMENTS: return lamb<T, G>(*p, tasks);
      }
    });
  });
}

// The sum of the squares of all gradients, blocks in fp32 and their sum in double.
EXPORT void taut_sum_of_squares(int32_t dtype, int64_t tensors, const int64_t* sizes,
                                const void* const* grads, double* out) {
  const std::vector<Task> tasks = tasks_of(tensors, sizes);
  std::vector<double> sums(tasks.size());
  with_storage(dtype, [&](auto tag) {
    using G = decltype(tag);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < tasks.size(); ++i) {
      const Task& task = tasks[i];
      const G* grad = (const G*)grads[task.tensor] + task.begin;
      F total[4] = {};
      int64_t c = 0;
      const int64_t size = task.end - task.begin;
      for (; c + TILE <= size; c += TILE)
        UNROLL_4
        for (int j = 0; j < 4; ++j) {
          const F g = load(grad + c + j * LANES, Full{});
          total[j] += g * g;
        }
      for_columns(size - c, [&](int64_t k, auto n) INLINE_LAMBDA {
        const F g = load(grad + c + k, n);
        total[0] += g * g;
      });
      sums[i] = sum_lanes((total[0] + total[1]) + (total[2] + total[3]));
    }
  });
  *out = 0;
  for (const double sum : sums) *out += sum;
}
