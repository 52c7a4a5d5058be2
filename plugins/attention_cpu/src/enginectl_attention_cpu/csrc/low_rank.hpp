// What adapters add to a linear, row by row: up[slot] (down[slot] row), for rows with a slot.
//
// The first product is made before the linear's own, over rows ordered by slot, so that an adapter's weights are read
// once; the second is added to the linear's sums before they are rounded. Both are accumulated in one order whatever
// shares the call, and a row reads its own slot only.
#pragma once

#include <vector>

#include "rows.hpp"

namespace ectl {

constexpr int MAX_RUN = 6;  // rows of one adapter that are multiplied together: 24 accumulators
constexpr int CHAINS = 4;   // sums of every fourth word, so that one row alone keeps the multipliers busy

// R rows times sixteen ranks.
template <bool paired, int R>
[[gnu::noinline]] void shrink_tile(const uint32_t* const* rows, const uint32_t* w, int words, F* out) {
  using M = Multiply<paired>;
  F acc[R][CHAINS];
  const uint32_t* row[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    row[r] = rows[r];
    for (auto& chain : acc[r]) chain = zero();
  }
  auto step = [&](int i, int chain) {
    const auto weights = M::weights(w + static_cast<size_t>(i) * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r][chain] = M::step(M::row(row[r] + i), weights, acc[r][chain]);
  };
  int i = 0;
  for (; i + CHAINS <= words; i += CHAINS)
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; ++chain) step(i + chain, chain);
  const int left = words - i;
  if (left > 0) step(i, 0);
  if (left > 1) step(i + 1, 1);
  if (left > 2) step(i + 2, 2);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) out[r] = add(add(acc[r][0], acc[r][1]), add(acc[r][2], acc[r][3]));
}

using ShrinkTile = void (*)(const uint32_t* const*, const uint32_t*, int, F*);
template <bool paired>
constexpr ShrinkTile SHRINK_TILES[MAX_RUN + 1] = {nullptr,
                                                  shrink_tile<paired, 1>,
                                                  shrink_tile<paired, 2>,
                                                  shrink_tile<paired, 3>,
                                                  shrink_tile<paired, 4>,
                                                  shrink_tile<paired, 5>,
                                                  shrink_tile<paired, 6>};

// The rows of a call ordered by slot, those without one left out, in runs of one adapter.
struct SlotOrder {
  struct Run {
    int32_t slot, first, count;
  };
  std::vector<int32_t> rows, ends;
  std::vector<Run> runs;

  void sort(const int32_t* slots, int num_rows, int num_slots) {
    ends.assign(num_slots + 1, 0);
    for (int i = 0; i < num_rows; ++i)
      if (slots[i] >= 0) ++ends[slots[i] + 1];
    runs.clear();
    for (int slot = 0; slot < num_slots; ++slot) {
      const int first = ends[slot], count = ends[slot + 1], pieces = (count + MAX_RUN - 1) / MAX_RUN;
      for (int i = 0; i < pieces; ++i) {
        const int from = count * i / pieces, to = count * (i + 1) / pieces;
        runs.push_back({slot, first + from, to - from});
      }
      ends[slot + 1] += first;
    }
    rows.resize(num_rows);
    for (int i = 0; i < num_rows; ++i)
      if (slots[i] >= 0) rows[ends[slots[i]]++] = i;
  }
};

// T: the dtype of the linear. A fused linear has several parts, each with a `down` of its own.
template <class T>
class LowRank {
  static constexpr int per_word = Operand<T>::per_word;
  static constexpr bool paired = per_word == 2;
  static constexpr int HELD = 8;  // words of a row that stay in registers while it meets the columns
  using M = Multiply<paired>;

 public:
  // column_of(i): the linear's column in packed place i, or negative. ends: of each part's columns.
  template <class ColumnOf>
  LowRank(Arena& arena, int k, const Packed& w, int num_slots, int max_rank, std::vector<int> ends,
          ColumnOf&& column_of)
      : k_(k), words_(w.words), ends_(std::move(ends)), rank_(num_slots, 0) {
    h_words_ = static_cast<size_t>(num_parts()) * rounded_up(max_rank) / per_word + LANES;
    for (int i = 0; i < w.groups * GROUP; ++i) columns_.push_back(column_of(i));
    for (int i = 0; i < w.groups * GROUP; i += LANES) {
      int first = num_parts(), last = 0;
      for (int lane = 0; lane < LANES; ++lane) {
        if (columns_[i + lane] < 0) continue;
        first = std::min(first, part_of(columns_[i + lane]));
        last = std::max(last, part_of(columns_[i + lane]));
      }
      parts_.push_back({first, last});
    }
    slot_words_ = packed_words(max_rank);
    weights_ = static_cast<uint32_t*>(arena.take(num_slots * slot_words_ * sizeof(uint32_t)));
  }

  // Of what `pack` makes.
  size_t packed_words(int rank) const { return down_words(rounded_up(rank)) + up_words(rounded_up(rank)); }

  // As the products read it. down: [parts * rank][k], up: [columns][rank]. Changes nothing here.
  void pack(int rank, const T* down, const T* up, uint32_t* out) const {
    const int wide = rounded_up(rank), width = num_parts() * wide;
    auto* to = reinterpret_cast<operand<T>*>(out);
    for (int first = 0; first < width; first += LANES)
      for (int i = 0; i < words_; ++i)
        for (int lane = 0; lane < LANES; ++lane)
          for (int e = 0; e < per_word; ++e, ++to) {
            const int at = i * per_word + e, part = (first + lane) / wide, r = (first + lane) % wide;
            const bool is_there = part < num_parts() && r < rank && at < k_;
            *to = is_there ? convert(down[static_cast<size_t>(part * rank + r) * k_ + at]) : operand<T>{};
          }
    for (size_t v = 0; v < parts_.size(); ++v)
      for (int i = 0; i < wide / per_word; ++i)
        for (int lane = 0; lane < LANES; ++lane)
          for (int e = 0; e < per_word; ++e, ++to) {
            const int column = columns_[v * LANES + lane], r = i * per_word + e;
            *to = column >= 0 && r < rank ? convert(up[static_cast<size_t>(column) * rank + r]) : operand<T>{};
          }
  }

  // packed: what `pack` made for this rank; nothing for rank 0. The slot must not be in use.
  void write(int slot, int rank, const uint32_t* packed) {
    rank_[slot] = rounded_up(rank);
    if (rank > 0) std::memcpy(weights_ + slot * slot_words_, packed, packed_words(rank) * sizeof(uint32_t));
  }

  // The first products, [num_rows][h_words], of rows that are ready to be multiplied.
  const uint32_t* shrink(const Team& team, Scratch& room, SlotOrder& order, const Rows& rows, int num_rows,
                         const int32_t* slots) const {
    order.sort(slots, num_rows, static_cast<int>(rank_.size()));
    uint32_t* h = room.take<uint32_t>(h_words_ * num_rows);
    const int num_runs = static_cast<int>(order.runs.size()), per_chunk = (num_runs + MAX_CHUNKS - 1) / MAX_CHUNKS;
    team.run(per_chunk ? (num_runs + per_chunk - 1) / per_chunk : 0, [&](int, int chunk) {
      for (int i = chunk * per_chunk; i < std::min(num_runs, (chunk + 1) * per_chunk); ++i)
        shrink_run(rows, order.runs[i], order.rows.data(), h);
    });
    return h;
  }

  // Add the second products to the sums of a tile.
  void expand(const uint32_t* h, const int32_t* slots, int from, int count, int first_group, int num_groups,
              float* sums, size_t ld) const {
    for (int r = 0; r < count; ++r) {
      const int slot = slots[from + r];
      if (slot < 0 || rank_[slot] == 0) continue;
      const int words = rank_[slot] / per_word;
      const uint32_t* row = h + (from + r) * h_words_;
      const uint32_t* up = weights_ + slot * slot_words_ + down_words(rank_[slot]);
      for (int part = 0; part < num_parts(); ++part, row += words)
        for (int i = 0; i < words; i += HELD)
          EXPAND[std::min(HELD, words - i)](*this, row + i, up + static_cast<size_t>(i) * LANES, words, part,
                                            first_group * 2, num_groups * 2, sums + r * ld);
    }
  }

 private:
  int num_parts() const { return static_cast<int>(ends_.size()); }
  static int rounded_up(int rank) { return (rank + per_word - 1) / per_word * per_word; }
  size_t down_words(int wide) const {
    return static_cast<size_t>((num_parts() * wide + LANES - 1) / LANES) * words_ * LANES;
  }
  size_t up_words(int wide) const { return parts_.size() * (wide / per_word) * LANES; }

  void shrink_run(const Rows& rows, SlotOrder::Run run, const int32_t* order, uint32_t* h) const {
    const uint32_t* row[MAX_RUN];
    F sums[MAX_RUN];
    for (int r = 0; r < run.count; ++r) row[r] = rows.data + order[run.first + r] * rows.row_words;
    const int width = num_parts() * rank_[run.slot];
    const uint32_t* w = weights_ + run.slot * slot_words_;
    for (int rank = 0; rank < width; rank += LANES, w += static_cast<size_t>(words_) * LANES) {
      SHRINK_TILES<paired>[run.count](row, w, words_, sums);
      for (int r = 0; r < run.count; ++r)
        store_operand(reinterpret_cast<operand<T>*>(h + order[run.first + r] * h_words_) + rank, sums[r],
                      std::min(LANES, width - rank), T{});
    }
  }

  // W words of one part of a row's first product, times the part's columns among `num_vectors` times sixteen.
  template <int W>
  static void expand_words(const LowRank& low, const uint32_t* row, const uint32_t* up, int words, int part, int first,
                           int num_vectors, float* sums) {
    typename M::vector x[W];
#pragma GCC unroll 8
    for (int i = 0; i < W; ++i) x[i] = M::row(row + i);
    for (int v = 0; v < num_vectors; ++v) {
      const Parts parts = low.parts_[first + v];
      if (part < parts.first || part > parts.last) continue;
      const uint32_t* w = up + static_cast<size_t>(first + v) * words * LANES;
      F acc = zero();
#pragma GCC unroll 8
      for (int i = 0; i < W; ++i) acc = M::step(x[i], M::weights(w + i * LANES), acc);
      if (parts.first != parts.last) acc = low.own_lanes(acc, part, low.columns_[(first + v) * LANES]);
      store(sums + v * LANES, add(load(sums + v * LANES), acc));
    }
  }

  using Expand = void (*)(const LowRank&, const uint32_t*, const uint32_t*, int, int, int, int, float*);
  static constexpr Expand EXPAND[HELD + 1] = {nullptr,         expand_words<1>, expand_words<2>,
                                              expand_words<3>, expand_words<4>, expand_words<5>,
                                              expand_words<6>, expand_words<7>, expand_words<8>};

  int part_of(int column) const {
    int part = 0;
    while (column >= ends_[part]) ++part;
    return part;
  }

  // Sixteen neighbouring columns of several parts: those of one.
  F own_lanes(F x, int part, int column) const {
    const int begin = part ? ends_[part - 1] : 0;
    return keep_range(x, std::max(0, begin - column), std::min(LANES, ends_[part] - column), zero());
  }

  struct Parts {
    int first, last;
  };
  int k_, words_;
  size_t h_words_, slot_words_;
  std::vector<int> ends_;
  std::vector<int> rank_;  // by slot, rounded up to whole words; 0 where it adds nothing
  std::vector<int> columns_;
  std::vector<Parts> parts_;  // of every sixteen columns
  uint32_t* weights_;         // by slot: down [ranks of all parts / 16][words][16], then up [columns / 16][words][16]
};

}  // namespace ectl
