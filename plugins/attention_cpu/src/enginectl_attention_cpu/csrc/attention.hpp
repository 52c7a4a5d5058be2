// Attention in place over pages.
//
// The rows of a tile are the queries of one sequence times the query heads of one KV head, so each key and value that is
// read serves all of them. Keys are taken 64 at a time from absolute positions that are multiples of 64, transposed so
// that a lane is a key; values are laid out so that a lane is a column. The softmax runs along within segments of 512
// keys, again at absolute positions, and segments are merged in order. Keys that a row does not see leave its sums
// untouched to the bit. So a row's result depends on its own position and keys only: not on the batch, on how its prompt
// was cut into chunks, on the threads, or on whether segments ran side by side.
#pragma once

#include "gemm.hpp"

namespace ectl {

constexpr int KEYS = 64;
constexpr int SEGMENT = 512;
constexpr int MAX_ROWS = 96;    // query rows of a tile
constexpr int ROWS_AT_ONCE = 6; // query rows in registers: times four vectors of keys
constexpr int KEY_VECTORS = KEYS / LANES;
constexpr int MAX_SPLIT_ROWS = 16;

struct Layer {
  int32_t num_heads, num_kv_heads, head_dim, v_head_dim, block_size, group;
  int32_t window, chunk;  // 0: none
  float scale, soft_cap;  // 0: none
  void *keys, *values;    // [num_blocks, block_size, num_kv_heads, ...]
};

struct Step {
  int32_t num_seqs, num_tokens;
  const int32_t *query_start, *seq_lens, *block_tables;
  const int64_t* slots;
  int64_t table_group, table_row, slot_group;  // elements between groups, rows, groups
};

struct Strides {
  int64_t token, head;
};

template <class T>
void write_kv(const Layer& layer, const Step& step, const Team& team, const T* k, Strides ks, const T* v, Strides vs) {
  const int64_t* slots = step.slots + layer.group * step.slot_group;
  const int heads = layer.num_kv_heads;
  const size_t key_bytes = sizeof(T) * layer.head_dim, value_bytes = sizeof(T) * layer.v_head_dim;
  auto put = [&](int from, int to) {
    for (int token = from; token < to; ++token) {
      char* key = static_cast<char*>(layer.keys) + slots[token] * heads * key_bytes;
      char* value = static_cast<char*>(layer.values) + slots[token] * heads * value_bytes;
      for (int head = 0; head < heads; ++head) {
        std::memcpy(key + head * key_bytes, k + token * ks.token + head * ks.head, key_bytes);
        std::memcpy(value + head * value_bytes, v + token * vs.token + head * vs.head, value_bytes);
      }
    }
  };
  const size_t bytes = step.num_tokens * heads * (key_bytes + value_bytes);
  if (bytes < (size_t{64} << 10)) return put(0, step.num_tokens);
  const int num_chunks = 4 * team.num_threads;
  team.run(num_chunks, [&](int, int chunk) {
    put(static_cast<int64_t>(chunk) * step.num_tokens / num_chunks,
        static_cast<int64_t>(chunk + 1) * step.num_tokens / num_chunks);
  });
}

// Sixteen rows of up to sixteen words become up to sixteen rows of sixteen, `KEYS` words apart.
#if defined(ECTL_AVX512)
inline void transpose(__m512i (&r)[LANES], int count, uint32_t* out) {
  __m512i t[LANES];
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
    const __m512i d = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
  }
  if (count >= LANES) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) _mm512_storeu_si512(out + i * KEYS, t[i]);
  } else {
    for (int i = 0; i < count; ++i) _mm512_storeu_si512(out + i * KEYS, t[i]);
  }
}
inline __m512i load_words(const bf16* p, int n) {
  if (n >= 2 * LANES) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint32_t{1} << n) - 1), p);
}
inline __m512i load_words(const float* p, int n) { return _mm512_castps_si512(load(p, n)); }
inline __m512i load_words(const f16* p, int n) { return _mm512_castps_si512(load(p, n)); }
#endif

// Sixteen keys [head_dim] into lanes: out[word][KEYS].
template <class T>
void pack_keys(const T* const* keys, int head_dim, uint32_t* out) {
  constexpr int per_word = Operand<T>::per_word;
  const int words = (head_dim + per_word - 1) / per_word;
#if defined(ECTL_AVX512)
  for (int word = 0; word < words; word += LANES) {
    __m512i rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) rows[i] = load_words(keys[i] + word * per_word, head_dim - word * per_word);
    transpose(rows, words - word, out + static_cast<size_t>(word) * KEYS);
  }
#else
  for (int word = 0; word < words; ++word)
    for (int i = 0; i < LANES; ++i) {
      operand<T> x[per_word] = {};
      for (int j = 0; j < per_word && word * per_word + j < head_dim; ++j) x[j] = convert<T>(keys[i][word * per_word + j]);
      std::memcpy(out + static_cast<size_t>(word) * KEYS + i, x, sizeof(uint32_t));
    }
#endif
}

// Values [KEYS][columns]: bf16 with two keys in each word, everything else as fp32, one key a row.
inline void pack_values(const bf16* const* values, int columns, size_t ld, uint32_t* out) {
  for (int key = 0; key < KEYS; key += 2)
    for (int i = 0; i < columns; i += LANES)
      store_pairs(out + key / 2 * ld + i, interleave(values[key] + i, values[key + 1] + i, columns - i));
}
template <class T>
void pack_values(const T* const* values, int columns, size_t ld, uint32_t* out) {
  for (int key = 0; key < KEYS; ++key)
    for (int i = 0; i < columns; i += LANES)
      store(reinterpret_cast<float*>(out) + key * ld + i, load(values[key] + i, columns - i));
}

// R rows of `words` words times NV vectors: acc[r][j] += sum over words of a[r][word] * b[word][j].
template <bool paired, int R, int NV>
inline void accumulate(const uint32_t* a, size_t row_words, const uint32_t* b, size_t ld, int words, F (&acc)[R][NV]) {
  using M = Multiply<paired>;
  for (int i = 0; i < words; ++i) {
    typename M::vector w[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) w[j] = M::weights(b + i * ld + j * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const auto x = M::row(a + r * row_words + i);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[r][j] = M::step(x, w[j], acc[r][j]);
    }
  }
}

// The running softmax of a tile's rows.
struct Sums {
  float* top;    // [rows] largest score
  float* total;  // [rows][LANES] weights
  float* out;    // [rows][columns] weighted values
};
constexpr float NOTHING = -1e30f;  // the largest score of a row that has seen no key

// What a row sees of a tile of keys: [first, last) of KEYS.
struct Range {
  int first, last;
};

template <class T, int R>
[[gnu::noinline]] void attend_rows(const Layer& layer, const uint32_t* q, int q_words, const uint32_t* keys,
                                   const uint32_t* values, size_t columns, const Range* seen, const Sums& sums) {
  constexpr bool paired = Operand<T>::per_word == 2;
  constexpr int weight_words = KEYS / Operand<T>::per_word;
  F score[R][KEY_VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < KEY_VECTORS; ++j) score[r][j] = zero();
  accumulate<paired, R, KEY_VECTORS>(q, q_words, keys, KEYS, q_words, score);

  alignas(64) operand<T> weight[R][KEYS];
  float shrink[R];
  for (int r = 0; r < R; ++r) {
    F best = set1(sums.top[r]);
    for (int j = 0; j < KEY_VECTORS; ++j) {
      F s = mul(score[r][j], set1(layer.scale));
      if (layer.soft_cap > 0) s = mul(tanh(div(s, set1(layer.soft_cap))), set1(layer.soft_cap));
      s = mul(s, set1(LOG2E));
      if (seen != nullptr)
        s = keep_range(s, seen[r].first - j * LANES, seen[r].last - j * LANES, set1(-std::numeric_limits<float>::infinity()));
      score[r][j] = s;
      best = max(s, best);
    }
    const float top = reduce_max(best);
    const F factor = exp2(set1(sums.top[r] - top));
    sums.top[r] = top;
    F total = mul(load(sums.total + r * LANES), factor);
    for (int j = 0; j < KEY_VECTORS; ++j) {
      const F w = rounded<operand<T>>(exp2(sub(score[r][j], set1(top))));
      total = add(total, w);
      store(&weight[r][j * LANES], w);
    }
    store(sums.total + r * LANES, total);
    float lanes[LANES];
    store(lanes, factor);
    shrink[r] = lanes[0];
  }

  const uint32_t* w = reinterpret_cast<const uint32_t*>(&weight[0][0]);
  auto columns_at = [&](size_t at, auto width) {
    constexpr int NV = decltype(width)::value;
    F acc[R][NV];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[r][j] = mul(load(sums.out + r * columns + at + j * LANES), set1(shrink[r]));
    accumulate<paired, R, NV>(w, weight_words, values + at, columns, weight_words, acc);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) store(sums.out + r * columns + at + j * LANES, acc[r][j]);
  };
  size_t at = 0;
  for (; at + 4 * LANES <= columns; at += 4 * LANES) columns_at(at, std::integral_constant<int, 4>{});
  for (; at < columns; at += LANES) columns_at(at, std::integral_constant<int, 1>{});
}

template <class T>
class Attention {
 public:
  Attention(const Layer& layer, const Step& step, Team& team, const T* q, Strides strides, const float* sinks, T* out)
      : layer_(layer), step_(step), team_(team), q_(q), strides_(strides), sinks_(sinks), out_(out) {
    per_kv_ = layer.num_heads / layer.num_kv_heads;
    q_words_ = (layer.head_dim + per_word - 1) / per_word;
    columns_ = (layer.v_head_dim + LANES - 1) / LANES * LANES;
    tile_queries_ = std::max(1, MAX_ROWS / per_kv_);
  }

  // partial: room for segments that run side by side.
  void run(Scratch& partial, std::vector<int32_t>& work) {
    list_items(work);
    const int num_items = static_cast<int>(work.size() / 2) * layer_.num_kv_heads;
    if (num_items == 0) return;
    if (most_segments_ > 1 && most_rows_ <= MAX_SPLIT_ROWS && num_items < 4 * team_.num_threads && team_.num_threads > 1)
      return run_split(partial, work, num_items);
    const int per_chunk = (num_items + MAX_CHUNKS - 1) / MAX_CHUNKS;
    team_.run((num_items + per_chunk - 1) / per_chunk, [&](int thread, int chunk) {
      for (int i = chunk * per_chunk; i < std::min(num_items, (chunk + 1) * per_chunk); ++i) whole(thread, item(work, i));
    });
  }

 private:
  static constexpr int per_word = Operand<T>::per_word;

  // Queries [first, last) of a sequence, for one KV head.
  struct Item {
    int row, kv_head, first, last;
    int start, stop;  // keys
    int num_rows;
  };

  // One thread's room for one item.
  struct Room {
    uint32_t *q, *keys, *values;
    Sums all, segment;
  };

  void list_items(std::vector<int32_t>& work) {
    work.clear();
    for (int row = 0; row < step_.num_seqs; ++row) {
      const int queries = step_.query_start[row + 1] - step_.query_start[row];
      for (int first = 0; first < queries; first += tile_queries_) {
        work.push_back(row);
        work.push_back(first);
        const Item it = make(row, first, 0);
        most_rows_ = std::max(most_rows_, it.num_rows);
        most_segments_ = std::max(most_segments_, (it.stop - 1) / SEGMENT - it.start / SEGMENT + 1);
      }
    }
  }

  Item item(const std::vector<int32_t>& work, int i) const {
    const int at = i / layer_.num_kv_heads;
    return make(work[2 * at], work[2 * at + 1], i % layer_.num_kv_heads);
  }

  Item make(int row, int first, int kv_head) const {
    const int queries = step_.query_start[row + 1] - step_.query_start[row];
    Item it{row, kv_head, first, std::min(queries, first + tile_queries_), 0, 0, 0};
    const int before = step_.seq_lens[row] - queries;
    it.start = lowest_key(before + it.first) / KEYS * KEYS;
    it.stop = before + it.last;
    it.num_rows = (it.last - it.first) * per_kv_;
    return it;
  }

  int lowest_key(int position) const {
    int lowest = 0;
    if (layer_.window > 0) lowest = std::max(lowest, position - layer_.window + 1);
    if (layer_.chunk > 0) lowest = std::max(lowest, position / layer_.chunk * layer_.chunk);
    return lowest;
  }

  size_t sums_floats(int num_rows) const { return static_cast<size_t>(num_rows) * (1 + LANES + columns_); }
  Sums sums_at(float* p, int num_rows) const {
    return {p + num_rows * (LANES + columns_), p, p + num_rows * LANES};
  }
  void clear(const Sums& s, int num_rows) const {
    std::fill_n(s.top, num_rows, NOTHING);
    std::memset(s.total, 0, sizeof(float) * num_rows * LANES);
    std::memset(s.out, 0, sizeof(float) * num_rows * columns_);
  }

  Room room(int thread, int num_rows) {
    const size_t q = (static_cast<size_t>(num_rows) * q_words_ + 15) / 16 * 16, keys = static_cast<size_t>(q_words_) * KEYS;
    const size_t values = KEYS / per_word * columns_, sums = (sums_floats(num_rows) + 15) / 16 * 16;
    uint32_t* p = team_.scratch[thread].take<uint32_t>(q + keys + values + 2 * sums);
    float* s = reinterpret_cast<float*>(p + q + keys + values);
    return {p, p + q, p + q + keys, sums_at(s, num_rows), sums_at(s + sums, num_rows)};
  }

  void load_queries(const Item& it, uint32_t* to) const {
    const int d = layer_.head_dim;
    for (int i = 0; i < it.num_rows; ++i) {
      const int token = step_.query_start[it.row] + it.first + i / per_kv_;
      const T* from = q_ + token * strides_.token + (it.kv_head * per_kv_ + i % per_kv_) * strides_.head;
      auto* x = reinterpret_cast<operand<T>*>(to + static_cast<size_t>(i) * q_words_);
      for (int j = 0; j < d; ++j) x[j] = convert<T>(from[j]);
      if (d % per_word) x[d] = {};
    }
  }

  // Where the keys and values at [tile, tile + KEYS) lie; those outside [first, last) read as zero.
  void locate(const Item& it, int tile, int first, int last, const T** keys, const T** values) const {
    alignas(64) static constexpr T zeros[1024] = {};
    const int32_t* table = step_.block_tables + layer_.group * step_.table_group + it.row * step_.table_row;
    const size_t key_row = static_cast<size_t>(layer_.num_kv_heads) * layer_.head_dim;
    const size_t value_row = static_cast<size_t>(layer_.num_kv_heads) * layer_.v_head_dim;
    const T* k = static_cast<const T*>(layer_.keys) + it.kv_head * layer_.head_dim;
    const T* v = static_cast<const T*>(layer_.values) + it.kv_head * layer_.v_head_dim;
    const int bs = layer_.block_size;
    for (int i = 0; i < KEYS;) {
      const int position = tile + i;
      if (position < first || position >= last) {
        keys[i] = values[i] = zeros;
        ++i;
        continue;
      }
      const int offset = position % bs, count = std::min({bs - offset, last - position, KEYS - i});
      const size_t slot = static_cast<size_t>(table[position / bs]) * bs + offset;
      for (int j = 0; j < count; ++j) {
        keys[i + j] = k + (slot + j) * key_row;
        values[i + j] = v + (slot + j) * value_row;
      }
      i += count;
    }
  }

  void prefetch(const T* const* keys, const T* const* values) const {
    const size_t key_bytes = sizeof(T) * layer_.head_dim, value_bytes = sizeof(T) * layer_.v_head_dim;
    for (int i = 0; i < KEYS; ++i) {
      for (size_t b = 0; b < key_bytes; b += 64) _mm_prefetch(reinterpret_cast<const char*>(keys[i]) + b, _MM_HINT_T0);
      for (size_t b = 0; b < value_bytes; b += 64) _mm_prefetch(reinterpret_cast<const char*>(values[i]) + b, _MM_HINT_T0);
    }
  }

  // Keys [from, to) of one segment into `sums`.
  void segment(const Item& it, const Room& room, int from, int to, const Sums& sums) const {
    const T *keys[2][KEYS], *values[2][KEYS];
    const int before = step_.seq_lens[it.row] - (step_.query_start[it.row + 1] - step_.query_start[it.row]);
    const int lowest = lowest_key(before + it.first);
    int turn = 0;
    locate(it, from, lowest, it.stop, keys[0], values[0]);
    for (int tile = from; tile < to; tile += KEYS, turn ^= 1) {
      if (tile + KEYS < to) {
        locate(it, tile + KEYS, lowest, it.stop, keys[turn ^ 1], values[turn ^ 1]);
        prefetch(keys[turn ^ 1], values[turn ^ 1]);
      }
      for (int i = 0; i < KEYS && tile + i < to; i += LANES)
        pack_keys<T>(keys[turn] + i, layer_.head_dim, room.keys + i);
      pack_values(values[turn], layer_.v_head_dim, columns_, room.values);
      attend_tile(it, room, tile, before, sums);
    }
  }

  void attend_tile(const Item& it, const Room& room, int tile, int before, const Sums& sums) const {
    for (int at = 0; at < it.num_rows;) {
      const int left = it.num_rows - at, count = left > ROWS_AT_ONCE && left < 2 * ROWS_AT_ONCE ? (left + 1) / 2 : std::min(left, ROWS_AT_ONCE);
      const int first = before + it.first + at / per_kv_, last = before + it.first + (at + count - 1) / per_kv_;
      if (tile <= last && tile + KEYS > lowest_key(first)) {
        const bool whole = tile >= lowest_key(last) && tile + KEYS <= first + 1;
        Range seen[ROWS_AT_ONCE];
        if (!whole)
          for (int r = 0; r < count; ++r) {
            const int position = before + it.first + (at + r) / per_kv_;
            seen[r] = {lowest_key(position) - tile, position + 1 - tile};
          }
        const Sums mine{sums.top + at, sums.total + at * LANES, sums.out + at * columns_};
        ROWS[count](layer_, room.q + static_cast<size_t>(at) * q_words_, q_words_, room.keys, room.values, columns_,
                    whole ? nullptr : seen, mine);
      }
      at += count;
    }
  }

  using AttendRows = void (*)(const Layer&, const uint32_t*, int, const uint32_t*, const uint32_t*, size_t, const Range*,
                              const Sums&);
  static constexpr AttendRows ROWS[ROWS_AT_ONCE + 1] = {nullptr,           attend_rows<T, 1>, attend_rows<T, 2>,
                                                        attend_rows<T, 3>, attend_rows<T, 4>, attend_rows<T, 5>,
                                                        attend_rows<T, 6>};

  // all, then segment: what a row has seen of both.
  void merge(const Sums& all, const Sums& segment, int num_rows) const {
    for (int r = 0; r < num_rows; ++r) {
      const float top = std::max(all.top[r], segment.top[r]);
      const F a = exp2(set1(all.top[r] - top)), b = exp2(set1(segment.top[r] - top));
      all.top[r] = top;
      float* total = all.total + r * LANES;
      store(total, fma(load(segment.total + r * LANES), b, mul(load(total), a)));
      for (size_t i = 0; i < columns_; i += LANES) {
        float* out = all.out + r * columns_ + i;
        store(out, fma(load(segment.out + r * columns_ + i), b, mul(load(out), a)));
      }
    }
  }

  void finish(const Item& it, const Sums& sums) const {
    const int dv = layer_.v_head_dim;
    for (int r = 0; r < it.num_rows; ++r) {
      const int head = it.kv_head * per_kv_ + r % per_kv_;
      F factor = set1(1.0f);
      float total = reduce_add(load(sums.total + r * LANES));
      if (sinks_ != nullptr) {  // a logit that takes weight and has no value
        const float sink = sinks_[head] * LOG2E, top = std::max(sums.top[r], sink);
        float lanes[LANES];
        factor = exp2(set1(sums.top[r] - top));
        store(lanes, fma(set1(total), factor, exp2(set1(sink - top))));
        total = lanes[0];
      }
      const F scale = div(factor, set1(total));
      const size_t token = step_.query_start[it.row] + it.first + r / per_kv_;
      T* out = out_ + (token * layer_.num_heads + head) * dv;
      for (int i = 0; i < dv; i += LANES) store(out + i, mul(load(sums.out + r * columns_ + i), scale), dv - i);
    }
  }

  int segment_end(const Item& it, int from) const { return std::min(it.stop, (from / SEGMENT + 1) * SEGMENT); }

  void whole(int thread, const Item& it) {
    const Room mine = room(thread, it.num_rows);
    load_queries(it, mine.q);
    clear(mine.all, it.num_rows);
    for (int from = it.start; from < it.stop; from = segment_end(it, from)) {
      const Sums& sums = from == it.start ? mine.all : mine.segment;
      if (from != it.start) clear(sums, it.num_rows);
      segment(it, mine, from, segment_end(it, from), sums);
      if (from != it.start) merge(mine.all, sums, it.num_rows);
    }
    finish(it, mine.all);
  }

  // Few sequences with long contexts: segments side by side, then merged in the order in which `whole` does.
  void run_split(Scratch& partial, const std::vector<int32_t>& work, int num_items) {
    const size_t each = (sums_floats(most_rows_) + 15) / 16 * 16;
    float* sums = partial.take<float>(each * num_items * most_segments_);
    const int per_chunk = (num_items * most_segments_ + MAX_CHUNKS - 1) / MAX_CHUNKS;
    team_.run((num_items * most_segments_ + per_chunk - 1) / per_chunk, [&](int thread, int chunk) {
      for (int i = chunk * per_chunk; i < std::min(num_items * most_segments_, (chunk + 1) * per_chunk); ++i) {
        const Item it = item(work, i / most_segments_);
        const int number = it.start / SEGMENT + i % most_segments_;
        const int from = std::max(it.start, number * SEGMENT);
        if (from >= it.stop) continue;
        const Room mine = room(thread, it.num_rows);
        load_queries(it, mine.q);
        const Sums into = sums_at(sums + each * i, it.num_rows);
        clear(into, it.num_rows);
        segment(it, mine, from, segment_end(it, from), into);
      }
    });
    for (int i = 0; i < num_items; ++i) {
      const Item it = item(work, i);
      const int num_segments = (it.stop - 1) / SEGMENT - it.start / SEGMENT + 1;
      const Sums all = sums_at(sums + each * i * most_segments_, it.num_rows);
      for (int s = 1; s < num_segments; ++s)
        merge(all, sums_at(sums + each * (i * most_segments_ + s), it.num_rows), it.num_rows);
      finish(it, all);
    }
  }

  const Layer& layer_;
  const Step& step_;
  Team& team_;
  const T* q_;
  Strides strides_;
  const float* sinks_;
  T* out_;
  int per_kv_ = 1, q_words_ = 0, tile_queries_ = 1;
  size_t columns_ = 0;
  int most_rows_ = 0, most_segments_ = 0;
};

}  // namespace ectl
