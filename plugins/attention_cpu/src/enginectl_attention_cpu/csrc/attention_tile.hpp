// Query rows against a tile of 64 keys: scores, softmax, weighted values.
//
// A score is summed over words of the head in order, an output over keys in order, each by one accumulator, whether
// keys come straight from their pages (few rows) or from a transposed copy (many rows): both give the same bits.
#pragma once

#include "gemm.hpp"

namespace ectl {

constexpr int KEYS = 64;
constexpr int KEY_VECTORS = KEYS / LANES;
constexpr int ROWS_AT_ONCE = 6;     // query rows in registers: times four vectors of keys or columns
constexpr int DIRECT_ROWS = 4;      // at most this many are attended straight from the pages
constexpr int COLUMNS = 2 * LANES;  // outputs are padded to pairs of vectors
constexpr float NOTHING = -1e30f;   // the largest score of a row that has seen no key
constexpr float HIDDEN = -2e30f;    // the score of a key that a row does not see: its weight is 0 even beside NOTHING

struct Layer {
  int32_t num_heads, num_kv_heads, head_dim, v_head_dim, block_size, group;
  int32_t window, chunk;  // 0: none
  float scale, soft_cap;  // 0: none
  void *keys, *values;    // [num_blocks, block_size, num_kv_heads, ...]
  const Layer* next;      // the layer after this one, or null
};

// The running softmax of some rows.
struct Sums {
  float* top;    // [rows] largest score, times log2(e)
  float* total;  // [rows][LANES] weights
  float* out;    // [rows][columns] weighted values, columns in the order of `split_columns`
  Sums at(int row, size_t columns) const { return {top + row, total + row * LANES, out + row * columns}; }
};

// What a row sees of a tile: keys [first, last) of KEYS.
struct Range {
  int first, last;
};

// Where the keys and values of a tile lie.
template <class T>
struct Source {
  const T *keys[KEYS], *values[KEYS];
};

// Memory wanted soon, asked for little by little: requests beyond what a core keeps in flight are lost or hold it up.
template <class T>
class Ahead {
 public:
  Ahead() = default;
  // These bytes of keys and values [first, last) of a tile.
  Ahead(const Source<T>& source, size_t key_bytes, size_t value_bytes, int first, int last)
      : rows_{source.keys + first, source.values + first}, bytes_{key_bytes, value_bytes}, num_rows_(last - first) {
    const int lines = num_rows_ * static_cast<int>((key_bytes + 63) / 64 + (value_bytes + 63) / 64);
    left_ = lines;
    part_ = (lines + PARTS - 1) / PARTS;
  }

  static constexpr int PARTS = 16;

  void part() {
    const int count = std::min(part_, left_);
    left_ -= count;
    for (int n = 0; n < count; ++n) {
      _mm_prefetch(reinterpret_cast<const char*>(rows_[kind_][row_]) + byte_, _MM_HINT_T1);
      if ((byte_ += 64) < bytes_[kind_]) continue;
      byte_ = 0;
      if (++row_ < num_rows_) continue;
      row_ = 0;
      kind_ = 1;
    }
  }
  void parts(int n) {
    for (; n > 0; --n) part();
  }

 private:
  const T* const* rows_[2] = {nullptr, nullptr};
  size_t bytes_[2] = {0, 0};
  int num_rows_ = 0, left_ = 0, part_ = 0, kind_ = 0, row_ = 0;
  size_t byte_ = 0;
};

#if defined(ECTL_AVX512)
// Lane j of t[i] is lane i of r[j].
inline void transpose(__m512i (&r)[LANES], __m512i (&t)[LANES]) {
#pragma GCC unroll 8
  for (int i = 0; i < LANES; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < LANES; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 b + c]: 128-bit lane l holds word 4 l + c of rows 4 b … 4 b + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88),
                  e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
  }
}
inline __m512i load_words(const bf16* p, int n) {
  if (n >= 2 * LANES) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint32_t{1} << n) - 1), p);
}
inline __m512i load_words(const float* p, int n) { return _mm512_castps_si512(load(p, n)); }
inline __m512i load_words(const f16* p, int n) { return _mm512_castps_si512(load(p, n)); }

// Up to sixteen words of sixteen keys, from `word` on: lane j of t[i] is word i of key j.
template <class T>
inline void key_words(const T* const* keys, int head_dim, int word, __m512i (&t)[LANES]) {
  constexpr int per_word = Operand<T>::per_word;
  __m512i rows[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) rows[i] = load_words(keys[i] + word * per_word, head_dim - word * per_word);
  transpose(rows, t);
}
#endif

// Sixteen keys [head_dim] into lanes: out[word][KEYS].
template <class T>
void pack_keys(const T* const* keys, int head_dim, uint32_t* out) {
  constexpr int per_word = Operand<T>::per_word;
  const int words = (head_dim + per_word - 1) / per_word;
#if defined(ECTL_AVX512)
  for (int word = 0; word < words; word += LANES) {
    __m512i t[LANES];
    key_words(keys, head_dim, word, t);
    for (int i = 0; i < LANES && word + i < words; ++i)
      _mm512_storeu_si512(out + static_cast<size_t>(word + i) * KEYS, t[i]);
  }
#else
  for (int word = 0; word < words; ++word)
    for (int i = 0; i < LANES; ++i) {
      operand<T> x[per_word] = {};
      for (int j = 0; j < per_word && word * per_word + j < head_dim; ++j)
        x[j] = convert<T>(keys[i][word * per_word + j]);
      std::memcpy(out + static_cast<size_t>(word) * KEYS + i, x, sizeof(uint32_t));
    }
#endif
}

// COLUMNS values of one key or, in bf16, of two keys side by side, as two vectors. bf16 columns come in an order of
// their own, and `join_columns` puts sums over them right again. n: columns there are.
inline void value_words(const bf16* const* values, int column, int n, Pairs& first, Pairs& second) {
#if defined(ECTL_AVX512)
  const __m512i a = load_words(values[0] + column, n), b = load_words(values[1] + column, n);
  first = _mm512_unpacklo_epi16(a, b);
  second = _mm512_unpackhi_epi16(a, b);
#else
  first = interleave(values[0] + column, values[1] + column, n);
  second = interleave(values[0] + column + LANES, values[1] + column + LANES, n - LANES);
#endif
}
template <class T>
inline void value_words(const T* const* values, int column, int n, F& first, F& second) {
  first = load(values[0] + column, n);
  second = n > LANES ? load(values[0] + column + LANES, n - LANES) : zero();
}
template <class T>
inline void join_columns(F& a, F& b) {
#if defined(ECTL_AVX512)
  if constexpr (std::is_same_v<T, bf16>) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const F joined = _mm512_permutex2var_ps(a, first, b);
    b = _mm512_permutex2var_ps(a, second, b);
    a = joined;
  }
#else
  (void)a, (void)b;
#endif
}

// Values of a tile, laid out like weights: [KEYS or KEYS / 2][ld].
template <class T>
void pack_values(const T* const* values, int num_columns, size_t ld, uint32_t* out) {
  constexpr int per_word = Operand<T>::per_word;
  for (int key = 0; key < KEYS; key += per_word)
    for (int column = 0; column < num_columns; column += COLUMNS) {
      typename Multiply<per_word == 2>::vector first, second;
      value_words(values + key, column, num_columns - column, first, second);
      std::memcpy(out + key / per_word * ld + column, &first, sizeof(first));
      std::memcpy(out + key / per_word * ld + column + LANES, &second, sizeof(second));
    }
}

[[gnu::noinline]] inline F capped(F score, float cap) { return mul(tanh(div(score, set1(cap))), set1(cap)); }

// The kernels of R rows, in bf16 pairs or fp32. q: [R][q_words]; sums: of these rows.
template <bool paired, int R>
struct RowKernels {
  using W = std::conditional_t<paired, bf16, float>;
  static constexpr int per_word = paired ? 2 : 1;
  static constexpr int weight_words = KEYS / per_word;
  using M = Multiply<paired>;
  using Scores = F[R][KEY_VECTORS];
  struct alignas(64) Probabilities {
    W weight[R][KEYS];
    float shrink[R];  // what sums so far are worth under the new largest score
  };

  static void scale(const Layer& layer, Scores& score, const Range* seen) {
    const F factor = set1(layer.soft_cap > 0 ? layer.scale : layer.scale * LOG2E);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < KEY_VECTORS; ++j) score[r][j] = mul(score[r][j], factor);
    if (layer.soft_cap > 0)
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < KEY_VECTORS; ++j) score[r][j] = mul(capped(score[r][j], layer.soft_cap), set1(LOG2E));
    if (seen != nullptr)
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < KEY_VECTORS; ++j)
          score[r][j] = keep_range(score[r][j], seen[r].first - j * LANES, seen[r].last - j * LANES, set1(HIDDEN));
  }

  static void softmax(const Scores& score, const Sums& sums, Probabilities& p) {
    float top[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      top[r] = reduce_max(max(max(max(score[r][0], score[r][1]), max(score[r][2], score[r][3])), set1(sums.top[r])));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const F factor = exp2<paired>(set1(sums.top[r] - top[r])), base = set1(top[r]);
      F total = mul(load(sums.total + r * LANES), factor);
      F weight[KEY_VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < KEY_VECTORS; ++j) weight[j] = exp2<paired>(sub(score[r][j], base));
      keep(weight, p.weight[r], total);
      store(sums.total + r * LANES, total);
      sums.top[r] = top[r];
      p.shrink[r] = first_lane(factor);
    }
  }

  // Weights as they will be multiplied, and their sum.
  static void keep(const F (&weight)[KEY_VECTORS], float* to, F& total) {
#pragma GCC unroll 4
    for (int j = 0; j < KEY_VECTORS; ++j) {
      store(to + j * LANES, weight[j]);
      total = add(total, weight[j]);
    }
  }
  static void keep(const F (&weight)[KEY_VECTORS], bf16* to, F& total) {
    const Pairs ones = set1_pair(0x3f803f80);
#pragma GCC unroll 2
    for (int j = 0; j < KEY_VECTORS; j += 2) {
      const Pairs both = narrow(weight[j], weight[j + 1]);
      store_pairs(reinterpret_cast<uint32_t*>(to + j * LANES), both);
      total = dot(total, both, ones);
    }
  }

  // Outputs [at, at + NV * LANES): words(i, w) gives word i of their values.
  template <int NV, class Words>
  static void values_at(size_t at, size_t columns, const Sums& sums, const Probabilities& p, int num_words,
                        Words&& words) {
    F acc[R][NV];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[r][j] = mul(load(sums.out + r * columns + at + j * LANES), set1(p.shrink[r]));
    const uint32_t* weight = reinterpret_cast<const uint32_t*>(&p.weight[0][0]);
    for (int i = 0; i < num_words; ++i) {
      typename M::vector w[NV];
      words(i, w);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const auto x = M::row(weight + r * weight_words + i);
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) acc[r][j] = M::step(x, w[j], acc[r][j]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) store(sums.out + r * columns + at + j * LANES, acc[r][j]);
  }

  [[gnu::noinline]] static void packed(const Layer& layer, const uint32_t* q, int q_words, const uint32_t* keys,
                                       const uint32_t* values, size_t columns, const Range* seen, const Sums& sums) {
    Scores score;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < KEY_VECTORS; ++j) score[r][j] = zero();
    for (int i = 0; i < q_words; ++i) {
      typename M::vector k[KEY_VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < KEY_VECTORS; ++j) k[j] = M::weights(keys + i * KEYS + j * LANES);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const auto x = M::row(q + r * q_words + i);
#pragma GCC unroll 4
        for (int j = 0; j < KEY_VECTORS; ++j) score[r][j] = M::step(x, k[j], score[r][j]);
      }
    }
    scale(layer, score, seen);
    Probabilities p;
    softmax(score, sums, p);
    size_t at = 0;
    for (; at + 2 * COLUMNS <= columns; at += 2 * COLUMNS)
      values_at<4>(at, columns, sums, p, weight_words, [&](int i, typename M::vector(&w)[4]) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) w[j] = M::weights(values + i * columns + at + j * LANES);
      });
    if (at < columns)
      values_at<2>(at, columns, sums, p, weight_words, [&](int i, typename M::vector(&w)[2]) {
        w[0] = M::weights(values + i * columns + at);
        w[1] = M::weights(values + i * columns + at + LANES);
      });
  }

#if defined(ECTL_AVX512)
  // bf16 straight from the pages. used: keys of the tile that any row sees end here.
  [[gnu::noinline]] static void direct(const Layer& layer, const uint32_t* q, int q_words, const Source<bf16>& source,
                                       int used, size_t columns, const Range* seen, const Sums& sums,
                                       Ahead<bf16>& ahead) {
    static_assert(paired);
    Scores score;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < KEY_VECTORS; ++j) score[r][j] = zero();
    for (int word = 0; word < q_words; word += LANES) {
#pragma GCC unroll 4
      for (int j = 0; j < KEY_VECTORS; ++j) {
        if (j * LANES >= used) continue;
        ahead.part();
        __m512i t[LANES];
        key_words(source.keys + j * LANES, layer.head_dim, word, t);
        auto step = [&](int i) {
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) score[r][j] = M::step(M::row(q + r * q_words + word + i), t[i], score[r][j]);
        };
        if (q_words - word >= LANES) {
#pragma GCC unroll 16
          for (int i = 0; i < LANES; ++i) step(i);
        } else {
          for (int i = 0; i < q_words - word; ++i) step(i);
        }
      }
    }
    scale(layer, score, seen);
    Probabilities p;
    softmax(score, sums, p);
    const int num_words = (used + per_word - 1) / per_word, n = layer.v_head_dim;
    size_t at = 0;
    for (; at + 2 * COLUMNS <= columns; at += 2 * COLUMNS) {
      const int left = n - static_cast<int>(at);
      if (left >= 2 * COLUMNS)
        values_at<4>(at, columns, sums, p, num_words, [&](int i, typename M::vector(&w)[4]) {
          if (i % 4 == 0) ahead.part();
          value_words(source.values + i * per_word, at, COLUMNS, w[0], w[1]);
          value_words(source.values + i * per_word, at + COLUMNS, COLUMNS, w[2], w[3]);
        });
      else
        values_at<4>(at, columns, sums, p, num_words, [&](int i, typename M::vector(&w)[4]) {
          if (i % 4 == 0) ahead.part();
          value_words(source.values + i * per_word, at, COLUMNS, w[0], w[1]);
          value_words(source.values + i * per_word, at + COLUMNS, left - COLUMNS, w[2], w[3]);
        });
    }
    if (at < columns)
      values_at<2>(at, columns, sums, p, num_words, [&](int i, typename M::vector(&w)[2]) {
        if (i % 4 == 0) ahead.part();
        value_words(source.values + i * per_word, at, n - at, w[0], w[1]);
      });
  }
#endif
};

// `direct` for up to DIRECT_ROWS rows.
#if defined(ECTL_AVX512)
constexpr bool PAGES_DIRECT = true;
template <class... Arguments>
void attend_direct(int count, Arguments&&... arguments) {
  switch (count) {
    case 1:
      return RowKernels<true, 1>::direct(arguments...);
    case 2:
      return RowKernels<true, 2>::direct(arguments...);
    case 3:
      return RowKernels<true, 3>::direct(arguments...);
    default:
      return RowKernels<true, 4>::direct(arguments...);
  }
}
#else
constexpr bool PAGES_DIRECT = false;
template <class... Arguments>
void attend_direct(Arguments&&...) {}
#endif

}  // namespace ectl
