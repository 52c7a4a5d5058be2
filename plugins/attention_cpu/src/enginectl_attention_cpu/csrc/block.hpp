// A decoder layer around its attention, a linear on its own, and the head.
//
// Values are rounded to T where a layer made of separate operations rounds them: after each product, norm, activation
// and addition; norms of heads and their turn are one operation.
#pragma once

#include <limits>
#include <numeric>

#include "low_rank.hpp"
#include "rows.hpp"

namespace ectl {

struct Shape {
  int32_t hidden, intermediate, num_heads, num_kv_heads, head_dim, rotary_dim;
  int32_t gelu, plus_one;  // flags
  float eps, residual_scale;
};

// Pointers to contiguous tensors of the block's dtype; null where the structure has none.
struct Weights {
  const void *qkv, *qkv_bias, *output, *output_bias, *gate_up, *gate_up_bias, *down, *down_bias;
  const void *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm, *q_norm, *k_norm;
};

// Everything one op set shares: threads, packed weights, room for a step's rows.
struct OpSet {
  Team team;
  Arena arena;
  Scratch normed, activated, copied, added, partial, low_rank;
  SlotOrder order;
  std::vector<Extent> weights;  // as they were packed, which is the order in which a step comes to them
  std::mutex busy;  // one call at a time
  explicit OpSet(int num_threads) : team(num_threads) {}

  // What comes after w; after the last, the next step's first.
  const Extent& after(const Packed& w) const { return weights[(w.place + 1) % weights.size()]; }

  // x as fp32, something added.
  template <class T>
  const float* floats(const T* x, int n, float plus = 0.0f) {
    if (x == nullptr) return nullptr;
    float* out = static_cast<float*>(arena.take(sizeof(float) * n));
    for (int i = 0; i < n; i += LANES) store(out + i, add(load(x + i, n - i), set1(plus)), std::min(LANES, n - i));
    return out;
  }
};

template <class T, class RowOf>
Packed pack_with_bias(OpSet& set, const T* weight, const T* bias, int k, int n, RowOf&& row_of, int num_biases = 0) {
  Packed w = pack<T>(set.arena, set.team, weight, k, n, row_of);
  w.place = static_cast<int>(set.weights.size());
  set.weights.push_back(w.extent());
  if (bias != nullptr) {
    w.bias = static_cast<float*>(set.arena.take(sizeof(float) * w.groups * GROUP));
    const float* flat = set.floats(bias, num_biases ? num_biases : n);
    for (int i = 0; i < w.groups * GROUP; ++i) w.bias[i] = row_of(i) < 0 ? 0.0f : flat[row_of(i)];
  }
  return w;
}

template <class T, class Epilogue>
void multiply_rows(OpSet& set, Rows rows, int num_rows, const Packed& w, int unit, Epilogue&& epilogue) {
  multiply<Operand<T>::per_word == 2>(set.team, rows.data, rows.row_words, num_rows, w, set.after(w), unit,
                                      epilogue);
}

// One row of one tile, sixteen columns at a time: put(column, rounded sum with bias, count).
template <class T, class Put>
void each_column(const Packed& w, const float* sums, int first, int num_groups, Put&& put) {
  for (int i = 0; i < num_groups * GROUP && first + i < w.n; i += LANES) {
    F x = load(sums + i);
    if (w.bias != nullptr) x = add(x, load(w.bias + first + i));
    put(first + i, rounded<T>(x), std::min(LANES, w.n - first - i));
  }
}

template <class T>
class Linear {
 public:
  Linear(OpSet& set, const T* weight, const T* bias, int k, int n) : set_(set), k_(k) {
    w_ = pack_with_bias(set, weight, bias, k, n, [n](int i) { return i < n ? i : -1; });
  }

  void run(const T* x, int num_rows, T* out) {
    const Rows rows = operand_rows(set_.team, set_.copied, x, num_rows, k_);
    multiply_rows<T>(set_, rows, num_rows, w_, 1,
                     [&](int, int from, int count, int first, int groups, const float* sums, size_t ld) {
                       for (int r = 0; r < count; ++r)
                         each_column<T>(w_, sums + r * ld, first, groups, [&](int column, F y, int n) {
                           store(out + static_cast<size_t>(from + r) * w_.n + column, y, n);
                         });
                     });
  }

 private:
  OpSet& set_;
  int k_;
  Packed w_;
};

constexpr int CACHED_ROWS = 8 * ROW_BLOCK;

template <class T>
class Block {
 public:
  Block(OpSet& set, const Shape& shape, const Weights& from) : set_(set), s_(shape) {
    const int h = s_.hidden, m = s_.intermediate, d = s_.head_dim, heads = s_.num_heads + 2 * s_.num_kv_heads;
    auto t = [](const void* p) { return static_cast<const T*>(p); };
    qkv_ = pack_with_bias(set, t(from.qkv), t(from.qkv_bias), h, heads * d, straight(heads * d));
    output_ = pack_with_bias(set, t(from.output), t(from.output_bias), s_.num_heads * d, h, straight(h));
    const int padded = (m + LANES - 1) / LANES * GROUP;
    gate_up_ = pack_with_bias(set, t(from.gate_up), t(from.gate_up_bias), h, padded, gate_up_column(), 2 * m);
    down_ = pack_with_bias(set, t(from.down), t(from.down_bias), m, h, straight(h));
    attention_norm_ = norm(t(from.attention_norm), h);
    attention_post_norm_ = norm(t(from.attention_post_norm), h);
    mlp_norm_ = norm(t(from.mlp_norm), h);
    mlp_post_norm_ = norm(t(from.mlp_post_norm), h);
    q_norm_ = norm(t(from.q_norm), d);
    k_norm_ = norm(t(from.k_norm), d);
    head_unit_ = std::lcm(d, GROUP) / GROUP;
  }

  enum Product { QKV, OUTPUT, GATE_UP, DOWN, NUM_LINEARS };

  // Room for adapters of one linear, whose parts end at these columns.
  void make_low_rank(int linear, int num_slots, int max_rank, std::vector<int> ends) {
    const Packed* of[] = {&qkv_, &output_, &gate_up_, &down_};
    const int k[] = {s_.hidden, s_.num_heads * s_.head_dim, s_.hidden, s_.intermediate};
    const Packed& w = *of[linear];
    if (linear == GATE_UP)
      low_rank_[linear].reset(new LowRank<T>(set_.arena, k[linear], w, num_slots, max_rank, ends, gate_up_column()));
    else
      low_rank_[linear].reset(new LowRank<T>(set_.arena, k[linear], w, num_slots, max_rank, ends, straight(w.n)));
  }
  LowRank<T>& low_rank(int linear) { return *low_rank_[linear]; }

  // qkv [num_rows, (heads + 2 kv heads) * head_dim]: normalised, projected, normalised by head, turned. slots: of each
  // row's adapter, or null.
  void before(const T* hidden, const float* cos, const float* sin, int num_rows, T* qkv, const int32_t* slots) {
    for_cached_rows(num_rows, [&](int from, int count) {
      const size_t turn = static_cast<size_t>(from) * s_.rotary_dim;
      project(hidden + static_cast<size_t>(from) * s_.hidden, cos + turn, sin + turn, count,
              qkv + static_cast<size_t>(from) * qkv_.n, slots ? slots + from : nullptr);
    });
  }

  // hidden [num_rows, hidden] becomes the rows after this layer.
  void after(T* hidden, const T* attended, int num_rows, const int32_t* slots) {
    for_cached_rows(num_rows, [&](int from, int count) {
      add_halves(hidden + static_cast<size_t>(from) * s_.hidden,
                 attended + static_cast<size_t>(from) * s_.num_heads * s_.head_dim, count,
                 slots ? slots + from : nullptr);
    });
  }

 private:
  // Many rows go through a half of the layer a few at a time: what one product leaves is in the cache for the next.
  template <class Fn>
  static void for_cached_rows(int num_rows, Fn&& fn) {
    const int parts = std::max(1, (num_rows + CACHED_ROWS / 2) / CACHED_ROWS);
    const int each = (num_rows / parts + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
    for (int from = 0; from < num_rows; from += each) fn(from, std::min(each, num_rows - from));
  }

  void project(const T* hidden, const float* cos, const float* sin, int num_rows, T* qkv, const int32_t* slots) {
    const Rows rows = normed_rows(set_.team, set_.normed, hidden, num_rows, s_.hidden, attention_norm_);
    multiply_adapted(QKV, rows, num_rows, qkv_, head_unit_, slots,
                     [&](int, int from, int count, int first, int groups, float* sums, size_t ld) {
                       const int last = std::min(qkv_.n, first + groups * GROUP);
                       for (int r = 0; r < count; ++r) {
                         float* row = sums + r * ld;
                         const size_t at = static_cast<size_t>(from + r);
                         each_column<T>(qkv_, row, first, groups,
                                        [&](int column, F y, int) { store(row + column - first, y); });
                         for (int column = first; column < last; column += s_.head_dim)
                           finish_head(row + column - first, column / s_.head_dim, cos + at * s_.rotary_dim,
                                       sin + at * s_.rotary_dim);
                         T* out = qkv + at * qkv_.n;
                         for (int column = first; column < last; column += LANES)
                           store(out + column, load(row + column - first), last - column);
                       }
                     });
  }

  void add_halves(T* hidden, const T* attended, int num_rows, const int32_t* slots) {
    const int h = s_.hidden;
    add_half(operand_rows(set_.team, set_.copied, attended, num_rows, s_.num_heads * s_.head_dim), output_, hidden,
             num_rows, attention_post_norm_, OUTPUT, slots);
    const Rows rows = normed_rows(set_.team, set_.normed, hidden, num_rows, h, mlp_norm_);
    add_half(activated_rows(rows, num_rows, slots), down_, hidden, num_rows, mlp_post_norm_, DOWN, slots);
  }

  static auto straight(int n) {
    return [n](int i) { return i < n ? i : -1; };
  }

  // A group is sixteen gates and the sixteen ups that belong to them.
  auto gate_up_column() const {
    return [m = s_.intermediate](int i) {
      const int column = i / GROUP * LANES + i % LANES;
      return column >= m ? -1 : i % GROUP < LANES ? column : m + column;
    };
  }

  // Products with what adapters add, where rows have slots.
  template <class Epilogue>
  void multiply_adapted(int linear, const Rows& rows, int num_rows, const Packed& w, int unit, const int32_t* slots,
                        Epilogue&& epilogue) {
    const LowRank<T>* low = low_rank_[linear].get();
    const uint32_t* h = nullptr;
    if (slots != nullptr && low != nullptr)
      h = low->shrink(set_.team, set_.low_rank, set_.order, rows, num_rows, slots);
    multiply_rows<T>(set_, rows, num_rows, w, unit,
                     [&](int thread, int from, int count, int first, int groups, float* sums, size_t ld) {
                       if (h != nullptr) low->expand(h, slots, from, count, first / GROUP, groups, sums, ld);
                       epilogue(thread, from, count, first, groups, sums, ld);
                     });
  }

  Norm norm(const T* weight, int n) { return {set_.floats(weight, n, s_.plus_one ? 1.0f : 0.0f), s_.eps}; }

  void finish_head(float* head, int index, const float* cos, const float* sin) {
    if (index >= s_.num_heads + s_.num_kv_heads) return;
    const int d = s_.head_dim;
    const Norm& norm = index < s_.num_heads ? q_norm_ : k_norm_;
    if (norm.weight != nullptr) norm_row(head, d, norm, [&](int i, F y, int n) { store(head + i, y, n); });
    if (s_.rotary_dim > 0) rotate(head, s_.rotary_dim, cos, sin);
  }

  // Activation of the gates times the ups, ready to be multiplied.
  Rows activated_rows(Rows rows, int num_rows, const int32_t* slots) {
    constexpr int per_word = Operand<T>::per_word;
    const int m = s_.intermediate;
    const size_t row_words = padded_words((m + per_word - 1) / per_word);
    uint32_t* out = set_.activated.take<uint32_t>(row_words * num_rows);
    multiply_adapted(GATE_UP, rows, num_rows, gate_up_, 1, slots,
                     [&](int, int from, int count, int first, int groups, const float* sums, size_t ld) {
                       for (int r = 0; r < count; ++r) {
                         auto* to = reinterpret_cast<operand<T>*>(out + static_cast<size_t>(from + r) * row_words);
                         for (int g = 0; g < groups; ++g) {
                           const float* pair = sums + r * ld + g * GROUP;
                           const int column = first / 2 + g * LANES;
                           F gate = load(pair), up = load(pair + LANES);
                           if (gate_up_.bias != nullptr) {
                             gate = add(gate, load(gate_up_.bias + first + g * GROUP));
                             up = add(up, load(gate_up_.bias + first + g * GROUP + LANES));
                           }
                           gate = rounded<T>(gate);
                           const F active = rounded<T>(s_.gelu                   ? gelu_tanh(gate)
                                                       : std::is_same_v<T, bf16> ? coarse_silu(gate)
                                                                                 : silu(gate));
                           store_operand(to + column, mul(active, rounded<T>(up)), m - column, T{});
                         }
                         if (m % per_word && first == 0) to[m] = {};
                       }
                     });
    return {out, row_words};
  }

  // hidden += scale * norm(rows * w), the norm where there is one.
  void add_half(Rows rows, const Packed& w, T* hidden, int num_rows, const Norm& post, int linear,
                const int32_t* slots) {
    const int h = s_.hidden;
    const bool direct = post.weight == nullptr;
    T* product = direct ? nullptr : set_.added.take<T>(static_cast<size_t>(num_rows) * h);
    multiply_adapted(linear, rows, num_rows, w, 1, slots,
                     [&](int, int from, int count, int first, int groups, const float* sums, size_t ld) {
                       for (int r = 0; r < count; ++r) {
                         const size_t at = static_cast<size_t>(from + r) * h;
                         each_column<T>(w, sums + r * ld, first, groups, [&](int column, F y, int n) {
                           if (direct)
                             add_to(hidden + at + column, y, n);
                           else
                             store(product + at + column, y, n);
                         });
                       }
                     });
    if (direct) return;
    for_rows(set_.team, num_rows, [&](int row) {
      const size_t at = static_cast<size_t>(row) * h;
      norm_row(product + at, h, post, [&](int i, F y, int n) { add_to(hidden + at + i, rounded<T>(y), n); });
    });
  }

  void add_to(T* x, F y, int n) { store(x, fma(y, set1(s_.residual_scale), load(x, n)), n); }

  OpSet& set_;
  Shape s_;
  int head_unit_ = 1;
  Packed qkv_, output_, gate_up_, down_;
  Norm attention_norm_, attention_post_norm_, mlp_norm_, mlp_post_norm_, q_norm_, k_norm_;
  std::unique_ptr<LowRank<T>> low_rank_[NUM_LINEARS];
};

template <class T>
class Head {
 public:
  Head(OpSet& set, const T* norm, const T* weight, int k, int n, float eps, bool plus_one) : set_(set), k_(k) {
    w_ = pack_with_bias<T>(set, weight, nullptr, k, n, [n](int i) { return i < n ? i : -1; });
    norm_ = {set.floats(norm, k, plus_one ? 1.0f : 0.0f), eps};
  }

  void logits(const T* hidden, int num_rows, float* out) {
    multiply_rows<T>(set_, rows(hidden, num_rows), num_rows, w_, 1,
                     [&](int, int from, int count, int first, int groups, const float* sums, size_t ld) {
                       for (int r = 0; r < count; ++r)
                         each_column<float>(w_, sums + r * ld, first, groups, [&](int column, F y, int n) {
                           store(out + static_cast<size_t>(from + r) * w_.n + column, y, n);
                         });
                     });
  }

  // The lowest id among the largest logits. NaN never wins.
  void greedy(const T* hidden, int num_rows, int64_t* ids) {
    struct Best {
      float value;
      int32_t id;
    };
    // One place a group: a span writes the place of its first group.
    const size_t n = num_rows;
    Best* best = set_.partial.take<Best>(w_.groups * n);
    for (size_t i = 0; i < w_.groups * n; ++i) best[i].id = -1;
    multiply_rows<T>(set_, rows(hidden, num_rows), num_rows, w_, 1,
                     [&](int, int from, int count, int first, int groups, const float* sums, size_t ld) {
                       for (int r = 0; r < count; ++r) {
                         const int width = std::min(groups * GROUP, w_.n - first);
                         best[first / GROUP * n + from + r] = {0.0f, 0};
                         Best& mine = best[first / GROUP * n + from + r];
                         mine.value = largest(sums + r * ld, width);
                         mine.id = first + first_equal(sums + r * ld, width, mine.value);
                       }
                     });
    for (size_t row = 0; row < n; ++row) {
      Best top = best[row];
      for (int g = 1; g < w_.groups; ++g)
        if (best[g * n + row].id >= 0 && best[g * n + row].value > top.value) top = best[g * n + row];
      ids[row] = top.id;
    }
  }

 private:
  Rows rows(const T* hidden, int num_rows) {
    return norm_.weight ? normed_rows(set_.team, set_.normed, hidden, num_rows, k_, norm_)
                        : operand_rows(set_.team, set_.copied, hidden, num_rows, k_);
  }

  static float largest(const float* x, int n) {
    const F lowest = set1(-std::numeric_limits<float>::infinity());
    F best = lowest;
    for (int i = 0; i < n; i += LANES) best = max(keep_range(load(x + i), 0, n - i, lowest), best);
    return reduce_max(best);
  }

  static int first_equal(const float* x, int n, float value) {
    for (int i = 0; i < n; i += LANES) {
      const int lane = lane_equal(load(x + i), value);
      if (lane < LANES && i + lane < n) return i + lane;
    }
    return 0;
  }

  OpSet& set_;
  int k_;
  Packed w_;
  Norm norm_;
};

}  // namespace ectl
