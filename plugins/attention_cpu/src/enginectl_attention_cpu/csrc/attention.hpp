// Attention in place over pages.
//
// The rows of a tile are the queries of one sequence times the query heads of one KV head, so each key and value that
// is read serves all of them. Tiles of 64 keys begin at absolute positions that are multiples of 64, and the softmax
// runs along within segments of 512 keys, again at absolute positions, which are merged in order. Keys that a row does
// not see leave its sums untouched to the bit. So a row's result depends on its own position and keys only: not on the
// batch, on how its prompt was cut into chunks, on the threads, or on whether segments ran side by side.
#pragma once

#include "attention_tile.hpp"

namespace ectl {

constexpr int SEGMENT = 512;
constexpr int MAX_ROWS = 96;  // query rows of a tile
constexpr int MAX_SPLIT_ROWS = 16;

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

// First key that a query at a position sees.
inline int lowest_key(const Layer& layer, int position) {
  int lowest = 0;
  if (layer.window > 0) lowest = std::max(lowest, position - layer.window + 1);
  if (layer.chunk > 0) lowest = std::max(lowest, position / layer.chunk * layer.chunk);
  return lowest;
}

// Name the pages that this layer's attention will read, where products come between that are bound by arithmetic.
template <class T>
void announce(const Layer* layer, const Step& step) {
  if (layer == nullptr || step.num_tokens < ARITHMETIC_ROWS) return;
  Upcoming& upcoming = Upcoming::of_process();
  const size_t row = sizeof(T) * layer->block_size * layer->num_kv_heads;
  upcoming.begin(layer->keys, layer->values, row * layer->head_dim, row * layer->v_head_dim);
  bool more = true;
  for (int i = 0; i < step.num_seqs && more; ++i) {
    const int32_t* table = step.block_tables + layer->group * step.table_group + i * step.table_row;
    const int before = step.seq_lens[i] - (step.query_start[i + 1] - step.query_start[i]);
    for (int block = lowest_key(*layer, before) / layer->block_size; block * layer->block_size < before && more; ++block)
      more = upcoming.add(table[block]);
  }
  upcoming.end();
}

// What a step's layers of one geometry do: tiles of queries, (row, first query) each.
using Work = std::vector<std::pair<int32_t, int32_t>>;

template <class T>
class Attention {
 public:
  Attention(const Layer& layer, const Step& step, Team& team, const T* q, Strides strides, const float* sinks, T* out)
      : layer_(layer), step_(step), team_(team), q_(q), strides_(strides), sinks_(sinks), out_(out) {
    per_kv_ = layer.num_heads / layer.num_kv_heads;
    q_words_ = (layer.head_dim + per_word - 1) / per_word;
    columns_ = (layer.v_head_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
    tile_queries_ = std::max(1, MAX_ROWS / per_kv_);
  }

  // partial: room for segments that run side by side.
  void run(Scratch& partial, Work& work) {
    list(work);
    const int num_tiles = static_cast<int>(work.size()), threads = team_.num_threads;
    if (num_tiles == 0) return;
    // Memory is read in order when a thread takes all heads of a sequence; few sequences are shared by heads, and by
    // segments where they are long.
    heads_at_once_ = most_rows_ <= MAX_SPLIT_ROWS && num_tiles >= 4 * threads ? layer_.num_kv_heads : 1;
    heads_apart_ = layer_.num_kv_heads / heads_at_once_;
    const int num_items = num_tiles * heads_apart_;
    if (most_segments_ > 1 && most_rows_ <= MAX_SPLIT_ROWS && num_items < 4 * threads && threads > 1)
      return run_split(partial, work, num_items);
    each(num_items, [&](int thread, int i) {
      const Item next = i + 1 < num_items ? item(work, i + 1) : Item{};
      whole(thread, item(work, i), i + 1 < num_items ? &next : nullptr);
    });
  }

 private:
  static constexpr int per_word = Operand<T>::per_word;
  static constexpr bool paired = per_word == 2;

  // Queries [first, last) of a sequence, for `heads` KV heads.
  struct Item {
    int row, first, last, kv_head, heads;
    int before;       // position of the sequence's first query
    int start, stop;  // keys, from a tile's beginning
    int lowest;       // first key that any query sees
    int num_rows;     // a head
  };

  // One thread's room for one item.
  struct Room {
    uint32_t *q, *keys, *values;
    Sums all, segment;
  };

  template <class Fn>
  void each(int count, Fn&& fn) {
    const int per_chunk = (count + MAX_CHUNKS - 1) / MAX_CHUNKS;
    team_.run((count + per_chunk - 1) / per_chunk, [&](int thread, int chunk) {
      for (int i = chunk * per_chunk; i < std::min(count, (chunk + 1) * per_chunk); ++i) fn(thread, i);
    });
  }

  void list(Work& work) {
    work.clear();
    for (int row = 0; row < step_.num_seqs; ++row) {
      const int queries = step_.query_start[row + 1] - step_.query_start[row];
      for (int first = 0; first < queries; first += tile_queries_) {
        work.emplace_back(row, first);
        const Item it = make(row, first, 0, 1);
        most_rows_ = std::max(most_rows_, it.num_rows);
        most_segments_ = std::max(most_segments_, num_segments(it));
      }
    }
  }

  Item item(const Work& work, int i) const {
    const auto [row, first] = work[i / heads_apart_];
    return make(row, first, i % heads_apart_ * heads_at_once_, heads_at_once_);
  }

  Item make(int row, int first, int kv_head, int heads) const {
    const int queries = step_.query_start[row + 1] - step_.query_start[row];
    Item it{};
    it.row = row;
    it.first = first;
    it.last = std::min(queries, first + tile_queries_);
    it.kv_head = kv_head;
    it.heads = heads;
    it.before = step_.seq_lens[row] - queries;
    it.lowest = lowest_key(it.before + it.first);
    it.start = it.lowest / KEYS * KEYS;
    it.stop = it.before + it.last;
    it.num_rows = (it.last - it.first) * per_kv_;
    return it;
  }

  static int num_segments(const Item& it) { return (it.stop - 1) / SEGMENT - it.start / SEGMENT + 1; }
  static int segment_end(const Item& it, int from) { return std::min(it.stop, (from / SEGMENT + 1) * SEGMENT); }

  int lowest_key(int position) const { return ectl::lowest_key(layer_, position); }

  size_t sums_floats(int num_rows) const {
    return (static_cast<size_t>(num_rows) * (1 + LANES + columns_) + 15) / 16 * 16;
  }
  Sums sums_at(float* p, int num_rows) const { return {p + num_rows * (LANES + columns_), p, p + num_rows * LANES}; }
  void clear(const Sums& s, int num_rows) const {
    std::fill_n(s.top, num_rows, NOTHING);
    std::memset(s.total, 0, sizeof(float) * num_rows * LANES);
    std::memset(s.out, 0, sizeof(float) * num_rows * columns_);
  }

  Room room(int thread, int num_rows) {
    const size_t q = (static_cast<size_t>(num_rows) * q_words_ + 15) / 16 * 16,
                 keys = static_cast<size_t>(q_words_) * KEYS;
    const size_t values = KEYS / per_word * columns_, sums = sums_floats(num_rows);
    uint32_t* p = team_.scratch[thread].take<uint32_t>(q + keys + values + 2 * sums);
    float* s = reinterpret_cast<float*>(p + q + keys + values);
    return {p, p + q, p + q + keys, sums_at(s, num_rows), sums_at(s + sums, num_rows)};
  }

  void load_queries(const Item& it, uint32_t* to) const {
    for (int head = 0; head < it.heads; ++head)
      for (int i = 0; i < it.num_rows; ++i) {
        const int token = step_.query_start[it.row] + it.first + i / per_kv_;
        const T* from = q_ + token * strides_.token + ((it.kv_head + head) * per_kv_ + i % per_kv_) * strides_.head;
        copy_query(from, reinterpret_cast<operand<T>*>(to + static_cast<size_t>(head * it.num_rows + i) * q_words_));
      }
  }
  void copy_query(const T* from, operand<T>* to) const {
    const int d = layer_.head_dim;
    if (std::is_same_v<T, operand<T>>)
      std::memcpy(to, from, sizeof(T) * d);
    else
      for (int j = 0; j < d; ++j) to[j] = convert<T>(from[j]);
    if (d % per_word) to[d] = {};
  }

  // Where the keys and values at [tile, tile + KEYS) lie, for one KV head; keys outside [lowest, stop) read as zero.
  void locate(const Item& it, int tile, int kv_head, Source<T>& at) const {
    alignas(64) static constexpr T zeros[1024] = {};
    const int32_t* table = step_.block_tables + layer_.group * step_.table_group + it.row * step_.table_row;
    const size_t key_row = static_cast<size_t>(layer_.num_kv_heads) * layer_.head_dim;
    const size_t value_row = static_cast<size_t>(layer_.num_kv_heads) * layer_.v_head_dim;
    const T* k = static_cast<const T*>(layer_.keys) + kv_head * layer_.head_dim;
    const T* v = static_cast<const T*>(layer_.values) + kv_head * layer_.v_head_dim;
    const int bs = layer_.block_size;
    for (int i = 0; i < KEYS;) {
      const int position = tile + i;
      if (position < it.lowest || position >= it.stop) {
        at.keys[i] = at.values[i] = zeros;
        ++i;
        continue;
      }
      const int offset = position % bs, count = std::min({bs - offset, it.stop - position, KEYS - i});
      const size_t slot = static_cast<size_t>(table[position / bs]) * bs + offset;
      for (int j = 0; j < count; ++j) {
        at.keys[i + j] = k + (slot + j) * key_row;
        at.values[i + j] = v + (slot + j) * value_row;
      }
      i += count;
    }
  }

  // The same keys for the next KV head.
  void next_head(const Item& it, int tile, Source<T>& at) const {
    for (int i = std::max(0, it.lowest - tile); i < std::min(KEYS, it.stop - tile); ++i) {
      at.keys[i] += layer_.head_dim;
      at.values[i] += layer_.v_head_dim;
    }
  }

  // Keys [from, to) of one segment into `sums`. next: the item after this one.
  void segment(const Item& it, const Room& room, int from, int to, const Sums& sums, const Item* next) const {
    Source<T> here, there;
    locate(it, from, it.kv_head, here);
    for (int tile = from; tile < to; tile += KEYS) {
      bool more = true;
      if (tile + KEYS < it.stop)
        locate(it, tile + KEYS, it.kv_head, there);
      else if (next != nullptr)
        locate(*next, next->start, next->kv_head, there);
      else
        more = false;
      for (int head = 0; head < it.heads; ++head) {
        Ahead<T> ahead;
        if (more)
          ahead = {there, sizeof(T) * layer_.head_dim * it.heads, sizeof(T) * layer_.v_head_dim * it.heads,
                   KEYS * head / it.heads, KEYS * (head + 1) / it.heads};
        if (head > 0) next_head(it, tile, here);
        attend_tile(it, room, room.q + static_cast<size_t>(head * it.num_rows) * q_words_, tile, here,
                    sums.at(head * it.num_rows, columns_), ahead);
      }
      here = there;
    }
  }

  void attend_tile(const Item& it, const Room& room, const uint32_t* q, int tile, const Source<T>& source,
                   const Sums& sums, Ahead<T>& ahead) const {
    const bool direct = has_direct && it.num_rows <= DIRECT_ROWS;
    if (!direct) {
      for (int i = 0; i < KEYS; i += LANES) {
        ahead.parts(Ahead<T>::PARTS / KEY_VECTORS);
        pack_keys<T>(source.keys + i, layer_.head_dim, room.keys + i);
      }
      pack_values(source.values, layer_.v_head_dim, columns_, room.values);
    }
    for (int at = 0; at < it.num_rows;) {
      const int left = it.num_rows - at;
      const int count = left > ROWS_AT_ONCE && left < 2 * ROWS_AT_ONCE ? (left + 1) / 2 : std::min(left, ROWS_AT_ONCE);
      const int first = it.before + it.first + at / per_kv_, last = it.before + it.first + (at + count - 1) / per_kv_;
      if (tile <= last && tile + KEYS > lowest_key(first)) {
        const bool whole = tile >= lowest_key(last) && tile + KEYS <= first + 1;
        Range seen[ROWS_AT_ONCE];
        for (int r = 0; r < count && !whole; ++r) {
          const int position = it.before + it.first + (at + r) / per_kv_;
          seen[r] = {lowest_key(position) - tile, position + 1 - tile};
        }
        const uint32_t* rows = q + static_cast<size_t>(at) * q_words_;
        const Range* ranges = whole ? nullptr : seen;
        if constexpr (has_direct)
          if (direct) {
            attend_direct(count, layer_, rows, q_words_, source, std::min(KEYS, last + 1 - tile), columns_, ranges,
                          sums.at(at, columns_), ahead);
            return;
          }
        PACKED[count](layer_, rows, q_words_, room.keys, room.values, columns_, ranges, sums.at(at, columns_));
      }
      at += count;
    }
  }

  template <int R>
  using Kernels = RowKernels<paired, R>;
  static constexpr decltype(&Kernels<1>::packed) PACKED[ROWS_AT_ONCE + 1] = {nullptr,
                                                                             Kernels<1>::packed,
                                                                             Kernels<2>::packed,
                                                                             Kernels<3>::packed,
                                                                             Kernels<4>::packed,
                                                                             Kernels<5>::packed,
                                                                             Kernels<6>::packed};
  static constexpr bool has_direct = PAGES_DIRECT && paired;

  // all, then segment: what rows have seen of both.
  void merge(const Sums& all, const Sums& segment, int num_rows) const {
    for (int r = 0; r < num_rows; ++r) {
      const float top = std::max(all.top[r], segment.top[r]);
      const F a = exp2<paired>(set1(all.top[r] - top)), b = exp2<paired>(set1(segment.top[r] - top));
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
    for (int row = 0; row < it.num_rows * it.heads; ++row) {
      const int head = (it.kv_head + row / it.num_rows) * per_kv_ + row % it.num_rows % per_kv_;
      F factor = set1(1.0f);
      F total = set1(reduce_add(load(sums.total + row * LANES)));
      if (sinks_ != nullptr) {  // a logit that takes weight and has no value
        const float sink = sinks_[head] * LOG2E, top = std::max(sums.top[row], sink);
        factor = exp2<paired>(set1(sums.top[row] - top));
        total = fma(total, factor, exp2<paired>(set1(sink - top)));
      }
      const F scale = div(factor, total);
      const size_t token = step_.query_start[it.row] + it.first + row % it.num_rows / per_kv_;
      T* out = out_ + (token * layer_.num_heads + head) * dv;
      for (int i = 0; i < dv; i += COLUMNS) {
        F a = load(sums.out + row * columns_ + i), b = load(sums.out + row * columns_ + i + LANES);
        join_columns<T>(a, b);
        store(out + i, mul(a, scale), dv - i);
        if (dv - i > LANES) store(out + i + LANES, mul(b, scale), dv - i - LANES);
      }
    }
  }

  void whole(int thread, const Item& it, const Item* next) {
    const int num_rows = it.num_rows * it.heads;
    const Room mine = room(thread, num_rows);
    load_queries(it, mine.q);
    clear(mine.all, num_rows);
    for (int from = it.start; from < it.stop; from = segment_end(it, from)) {
      const Sums& sums = from == it.start ? mine.all : mine.segment;
      if (from != it.start) clear(sums, num_rows);
      segment(it, mine, from, segment_end(it, from), sums, next);
      if (from != it.start) merge(mine.all, sums, num_rows);
    }
    finish(it, mine.all);
  }

  // Few sequences with long contexts: segments side by side, then merged in the order in which `whole` does.
  void run_split(Scratch& partial, const Work& work, int num_items) {
    const size_t size = sums_floats(most_rows_ * heads_at_once_);
    float* sums = partial.take<float>(size * num_items * most_segments_);
    each(num_items * most_segments_, [&](int thread, int i) {
      const Item it = item(work, i / most_segments_);
      const int number = it.start / SEGMENT + i % most_segments_;
      const int from = std::max(it.start, number * SEGMENT), num_rows = it.num_rows * it.heads;
      if (from >= it.stop) return;
      const Room mine = room(thread, num_rows);
      load_queries(it, mine.q);
      const Sums into = sums_at(sums + size * i, num_rows);
      clear(into, num_rows);
      segment(it, mine, from, segment_end(it, from), into, nullptr);
    });
    for (int i = 0; i < num_items; ++i) {
      const Item it = item(work, i);
      const int num_rows = it.num_rows * it.heads;
      const Sums all = sums_at(sums + size * i * most_segments_, num_rows);
      for (int s = 1; s < num_segments(it); ++s)
        merge(all, sums_at(sums + size * (i * most_segments_ + s), num_rows), num_rows);
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
  int per_kv_ = 1, q_words_ = 0, tile_queries_ = 1, heads_at_once_ = 1, heads_apart_ = 1;
  size_t columns_ = 0;
  int most_rows_ = 0, most_segments_ = 0;
};

}  // namespace ectl
