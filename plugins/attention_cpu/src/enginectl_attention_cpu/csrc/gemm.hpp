// Rows times packed weights.
//
// Weights [n, k] lie in groups of 32 output columns: [n / 32][k][32], for bf16 with two k's in each 32-bit lane. Every
// output element is accumulated over k from first to last by one accumulator, whatever the number of rows, the tiling
// or the threads: a row's bits depend on that row alone.
#pragma once

#include <algorithm>

#include "memory.hpp"
#include "pool.hpp"
#include "simd.hpp"
#include "upcoming.hpp"

namespace ectl {

constexpr int GROUP = 2 * LANES;  // output columns that lie together
constexpr int MAX_TILE = 12;      // rows of a register tile: 24 accumulators
constexpr int MAX_SPAN = 8;       // groups of a chunk, unless a caller needs more together

// What rows are multiplied as: bf16 in pairs, everything else as fp32.
template <class T>
struct Operand {
  using type = float;
  static constexpr int per_word = 1;
};
template <>
struct Operand<bf16> {
  using type = bf16;
  static constexpr int per_word = 2;
};
template <class T>
using operand = typename Operand<T>::type;

template <class T>
inline operand<T> convert(T x) {
  return x;
}
template <>
inline float convert<f16>(f16 x) {
  return _cvtsh_ss(x.bits);
}

// 32-bit words between rows that are multiplied: never a multiple of a page, where twelve rows would fall into one
// cache set.
inline size_t padded_words(size_t words) { return (words + 15) / 16 * 16 + 16; }

// Weights: where they begin, and how they are cut.
struct Extent {
  const uint32_t* data = nullptr;
  int groups = 0;
  size_t group_words = 0;
  // Where a thread's share begins.
  const uint32_t* share(int thread, int num_threads) const {
    return data + static_cast<size_t>(thread) * groups / num_threads * group_words;
  }
};

struct Packed {
  int place = 0;  // in the order in which an op set's weights are used
  int n = 0;      // output columns
  int words = 0;  // 32-bit words along k
  int groups = 0;
  bool paired = false;
  uint32_t* data = nullptr;
  float* bias = nullptr;  // [groups * 32] or null
  size_t group_words() const { return static_cast<size_t>(words) * GROUP; }
  Extent extent() const { return {data, groups, group_words()}; }
};

// One word of weights and of rows at a time.
template <bool paired>
struct Multiply;
template <>
struct Multiply<true> {
  using vector = Pairs;
  static vector weights(const uint32_t* p) { return load_pairs(p); }
  static vector row(const uint32_t* p) { return set1_pair(*p); }
  static F step(vector a, vector w, F acc) { return dot(acc, a, w); }
};
template <>
struct Multiply<false> {
  using vector = F;
  static vector weights(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static vector row(const uint32_t* p) { return set1(*reinterpret_cast<const float*>(p)); }
  static F step(vector a, vector w, F acc) { return fma(a, w, acc); }
};

constexpr int UNROLL = 4;  // words between prefetches: eight lines of weights
constexpr int LINES_PER_UNROLL = 8;

// R rows times one group. a: first row's words. ahead: weights wanted next, of which `lines` lines are asked for every
// UNROLL words. upcoming: what else is, or null. out: [R][ld].
template <bool paired, int R>
[[gnu::noinline]] void multiply_tile(const uint32_t* a, size_t row_words, const uint32_t* w, int words, float* out,
                                     size_t ld, const char* ahead, int lines, UpcomingLines* upcoming) {
  using M = Multiply<paired>;
  F acc[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
  // Four pointers reach twelve rows by base + {0, 1, 2} * stride.
  const uint32_t* row[4] = {a, a + 3 * row_words, a + 6 * row_words, a + 9 * row_words};
  auto step = [&](int i) {
    const auto w0 = M::weights(w + i * GROUP), w1 = M::weights(w + i * GROUP + LANES);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const auto x = M::row(row[r / 3] + i + static_cast<size_t>(r % 3) * row_words);
      acc[r][0] = M::step(x, w0, acc[r][0]);
      acc[r][1] = M::step(x, w1, acc[r][1]);
    }
  };
  int k = 0;
  for (; k + UNROLL <= words; k += UNROLL) {
    for (int i = 0; i < lines; ++i, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    if (upcoming != nullptr) upcoming->ask();
#pragma GCC unroll 4
    for (int i = 0; i < UNROLL; ++i) step(i);
    w += UNROLL * GROUP;
#pragma GCC unroll 4
    for (auto& p : row) p += UNROLL;
  }
  for (; k < words; ++k) {
    step(0);
    w += GROUP;
#pragma GCC unroll 4
    for (auto& p : row) p += 1;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(out + r * ld, acc[r][0]);
    store(out + r * ld + LANES, acc[r][1]);
  }
}

using Tile = void (*)(const uint32_t*, size_t, const uint32_t*, int, float*, size_t, const char*, int, UpcomingLines*);
template <bool paired>
constexpr Tile TILES[MAX_TILE + 1] = {nullptr,
                                      multiply_tile<paired, 1>,
                                      multiply_tile<paired, 2>,
                                      multiply_tile<paired, 3>,
                                      multiply_tile<paired, 4>,
                                      multiply_tile<paired, 5>,
                                      multiply_tile<paired, 6>,
                                      multiply_tile<paired, 7>,
                                      multiply_tile<paired, 8>,
                                      multiply_tile<paired, 9>,
                                      multiply_tile<paired, 10>,
                                      multiply_tile<paired, 11>,
                                      multiply_tile<paired, 12>};

// The threads of an engine and what they work in.
struct Team {
  int num_threads = 1;
  std::vector<Scratch> scratch;
  explicit Team(int n) : num_threads(n < 1 ? 1 : n), scratch(num_threads) {}
  template <class Fn>
  void run(int num_chunks, Fn&& fn) const {
    Pool::of_process().run(num_threads, num_chunks, fn);
  }
};

constexpr int ARITHMETIC_ROWS = 32;  // a product of so many is bound by arithmetic, of fewer by memory
constexpr int ROW_BLOCK = 96;  // rows of a chunk: eight tiles, whose operands stay in the second-level cache

// How [num_rows, w.n] is cut into chunks: all row blocks of one span of groups follow each other.
struct Grid {
  int row_block, num_row_blocks, span, num_spans;
  Grid(int num_rows, const Packed& w, int num_threads, int unit) {
    row_block = num_rows <= ROW_BLOCK + ROW_BLOCK / 2 ? num_rows : ROW_BLOCK;
    num_row_blocks = (num_rows + row_block - 1) / row_block;
    span = unit;
    // Small enough that every thread gets several, even ones; large enough that taking one costs nothing.
    while (span + unit <= MAX_SPAN && count(w, span + unit) * num_row_blocks >= 12 * num_threads &&
           (num_row_blocks > 1 || count(w, span + unit) % num_threads == 0))
      span += unit;
    while (count(w, span) * num_row_blocks > MAX_CHUNKS) span += unit;
    num_spans = count(w, span);
  }
  static int count(const Packed& w, int span) { return (w.groups + span - 1) / span; }
  int num_chunks() const { return num_spans * num_row_blocks; }
};

// For every tile: epilogue(thread, first row, number of rows, first column, number of groups, sums, ld), where sums is
// [rows][ld] without bias. unit: groups that an epilogue needs together. next: what is multiplied by afterwards.
template <bool paired, class Epilogue>
void multiply(Team& team, const uint32_t* a, size_t row_words, int num_rows, const Packed& w, const Extent& next,
              int unit, Epilogue&& epilogue) {
  if (num_rows == 0) return;
  const Grid grid(num_rows, w, team.num_threads, unit);
  const size_t group_words = w.group_words(), group_bytes = group_words * sizeof(uint32_t);
  team.run(grid.num_chunks(), [&](int thread, int chunk) {
    const int first_group = chunk / grid.num_row_blocks * grid.span;
    const int num_groups = std::min(grid.span, w.groups - first_group);
    const int block_start = chunk % grid.num_row_blocks * grid.row_block;
    const int block_rows = std::min(grid.row_block, num_rows - block_start);
    const int num_tiles = (block_rows + MAX_TILE - 1) / MAX_TILE;
    const size_t ld = static_cast<size_t>(grid.span) * GROUP;
    float* sums = team.scratch[thread].take<float>(MAX_TILE * ld);
    // Each pass over this span asks for its part of what this thread multiplies by next.
    const uint32_t* wanted = nullptr;
    if (grid.num_row_blocks == 1) {
      const int num_threads = std::min(team.num_threads, grid.num_spans);
      const bool is_last = thread < num_threads && chunk + 1 == (thread + 1) * grid.num_spans / num_threads;
      wanted = is_last ? next.share(thread, num_threads) : w.data + (first_group + grid.span) * group_words;
    }
    const int lines = wanted ? (LINES_PER_UNROLL + num_tiles - 1) / num_tiles : 0;
    UpcomingLines* upcoming = nullptr;
    if (wanted && num_rows >= ARITHMETIC_ROWS) {
      upcoming = &UpcomingLines::of_thread();
      upcoming->start();
    }
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int from = tile * block_rows / num_tiles, to = (tile + 1) * block_rows / num_tiles;
      const uint32_t* rows = a + static_cast<size_t>(block_start + from) * row_words;
      for (int g = 0; g < num_groups; ++g) {
        const uint32_t* weights = w.data + (first_group + g) * group_words;
        const char* ahead =
            reinterpret_cast<const char*>(wanted + group_words * g) + group_bytes / num_tiles / 64 * 64 * tile;
        TILES<paired>[to - from](rows, row_words, weights, w.words, sums + g * GROUP, ld, ahead, lines,
                                 upcoming);
      }
      epilogue(thread, block_start + from, to - from, first_group * GROUP, num_groups, sums, ld);
    }
  });
}

// Lay out rows of `source` [., k] so that lane l of group g is row_of(g * 32 + l), or zero where that is negative.
template <class T, class RowOf>
Packed pack(Arena& arena, const Team& team, const T* source, int k, int n, RowOf&& row_of) {
  constexpr int per_word = Operand<T>::per_word;
  Packed w;
  w.n = n;
  w.words = (k + per_word - 1) / per_word;
  w.groups = (n + GROUP - 1) / GROUP;
  w.paired = per_word == 2;
  w.data = static_cast<uint32_t*>(arena.take(w.groups * w.group_words() * sizeof(uint32_t)));
  const int per_chunk = (w.groups + MAX_CHUNKS - 1) / MAX_CHUNKS;
  team.run((w.groups + per_chunk - 1) / per_chunk, [&](int, int chunk) {
    for (int g = chunk * per_chunk; g < std::min(w.groups, (chunk + 1) * per_chunk); ++g) {
      uint32_t* group = w.data + g * w.group_words();
      const T* row[GROUP];
      for (int lane = 0; lane < GROUP; ++lane) {
        const int at = row_of(g * GROUP + lane);
        row[lane] = at < 0 ? nullptr : source + static_cast<size_t>(at) * k;
      }
      for (int i = 0; i < w.words; ++i)
        for (int lane = 0; lane < GROUP; ++lane) {
          operand<T> word[per_word] = {};
          for (int j = 0; j < per_word && i * per_word + j < k && row[lane]; ++j)
            word[j] = convert<T>(row[lane][i * per_word + j]);
          std::memcpy(group + i * GROUP + lane, word, sizeof(uint32_t));
        }
    }
  });
  return w;
}

}  // namespace ectl
