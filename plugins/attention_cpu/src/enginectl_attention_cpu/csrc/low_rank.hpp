// What adapters add to a linear, row by row: up[slot] (down[slot] row), for rows with a slot.
//
// The first product is made before the linear's own, the second is added to its sums before they are rounded. Both are
// accumulated in one order whatever shares the call, and a row reads its own slot only.
#pragma once

#include <vector>

#include "rows.hpp"

namespace ectl {

// T: the dtype of the linear. A fused linear has several parts, each with a `down` of its own.
template <class T>
class LowRank {
  static constexpr int per_word = Operand<T>::per_word;
  static constexpr bool paired = per_word == 2;
  using M = Multiply<paired>;

 public:
  // column_of(i): the linear's column in packed place i, or negative. ends: of each part's columns.
  template <class ColumnOf>
  LowRank(Arena& arena, int k, const Packed& w, int num_slots, int max_rank, std::vector<int> ends,
          ColumnOf&& column_of)
      : k_(k), words_(w.words), groups_(w.groups), ends_(std::move(ends)), rank_(num_slots, 0) {
    const int num_parts = static_cast<int>(ends_.size());
    const int most = (max_rank + per_word - 1) / per_word * per_word;
    h_words_ = static_cast<size_t>(num_parts) * most / per_word + LANES;
    down_words_ = static_cast<size_t>((num_parts * most + GROUP - 1) / GROUP) * words_ * GROUP;
    up_words_ = static_cast<size_t>(groups_) * (most / per_word) * GROUP;
    down_ = static_cast<uint32_t*>(arena.take(num_slots * down_words_ * sizeof(uint32_t)));
    up_ = static_cast<uint32_t*>(arena.take(num_slots * up_words_ * sizeof(uint32_t)));
    for (int i = 0; i < groups_ * GROUP; ++i) columns_.push_back(column_of(i));
    for (int i = 0; i < groups_ * GROUP; i += LANES) {
      int first = num_parts, last = 0;
      for (int lane = 0; lane < LANES; ++lane) {
        if (columns_[i + lane] < 0) continue;
        first = std::min(first, part_of(columns_[i + lane]));
        last = std::max(last, part_of(columns_[i + lane]));
      }
      parts_.push_back({first, last});
    }
  }

  // down: [parts * rank][k], up: [columns][rank]. The slot must not be in use.
  void write(int slot, int rank, const T* down, const T* up) {
    const int num_parts = static_cast<int>(ends_.size());
    const int wide = (rank + per_word - 1) / per_word * per_word;
    auto* to = reinterpret_cast<operand<T>*>(down_ + slot * down_words_);
    for (int g = 0; g * GROUP < num_parts * wide; ++g)
      for (int i = 0; i < words_; ++i)
        for (int lane = 0; lane < GROUP; ++lane)
          for (int e = 0; e < per_word; ++e, ++to) {
            const int row = g * GROUP + lane, at = i * per_word + e, part = row / wide, r = row % wide;
            const bool is_there = part < num_parts && r < rank && at < k_;
            *to = is_there ? convert(down[static_cast<size_t>(part * rank + r) * k_ + at]) : operand<T>{};
          }
    to = reinterpret_cast<operand<T>*>(up_ + slot * up_words_);
    for (int g = 0; g < groups_; ++g)
      for (int i = 0; i < wide / per_word; ++i)
        for (int lane = 0; lane < GROUP; ++lane)
          for (int e = 0; e < per_word; ++e, ++to) {
            const int column = columns_[g * GROUP + lane], r = i * per_word + e;
            *to = column >= 0 && r < rank ? convert(up[static_cast<size_t>(column) * rank + r]) : operand<T>{};
          }
    rank_[slot] = wide;
  }

  // The first products, [num_rows][h_words], of rows that are ready to be multiplied.
  const uint32_t* shrink(const Team& team, Scratch& room, const Rows& rows, int num_rows, const int32_t* slots) const {
    uint32_t* h = room.take<uint32_t>(h_words_ * num_rows);
    const int per_chunk = std::max((num_rows + MAX_CHUNKS - 1) / MAX_CHUNKS,
                                   std::clamp(num_rows / (4 * team.num_threads), 1, MAX_TILE));
    team.run((num_rows + per_chunk - 1) / per_chunk, [&](int, int chunk) {
      const int end = std::min(num_rows, (chunk + 1) * per_chunk);
      for (int row = chunk * per_chunk, next; row < end; row = next) {
        for (next = row + 1; next < end && next - row < MAX_TILE && slots[next] == slots[row];) ++next;
        if (slots[row] >= 0) shrink_run(rows, row, next - row, slots[row], h + row * h_words_);
      }
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
      const uint32_t* group = up_ + slot * up_words_ + static_cast<size_t>(first_group) * words * GROUP;
      for (int g = 0; g < num_groups; ++g, group += words * GROUP)
        for (int half = 0; half < 2; ++half) {
          const auto [first, last] = parts_[(first_group + g) * 2 + half];
          float* sum = sums + r * ld + g * GROUP + half * LANES;
          for (int part = first; part <= last; ++part) {
            F acc = zero();
            for (int i = 0; i < words; ++i)
              acc = M::step(M::row(row + part * words + i), M::weights(group + i * GROUP + half * LANES), acc);
            if (first != last) acc = own_lanes(acc, part, columns_[(first_group + g) * GROUP + half * LANES]);
            store(sum, add(load(sum), acc));
          }
        }
    }
  }

 private:
  void shrink_run(const Rows& rows, int first, int count, int slot, uint32_t* h) const {
    alignas(64) float sums[MAX_TILE * GROUP];
    const int width = static_cast<int>(ends_.size()) * rank_[slot];
    for (int column = 0; column < width; column += GROUP) {
      const uint32_t* w = down_ + slot * down_words_ + static_cast<size_t>(column) * words_;
      TILES<paired>[count](rows.data + first * rows.row_words, rows.row_words, w, words_, sums, GROUP,
                           reinterpret_cast<const char*>(w), 0);
      for (int r = 0; r < count; ++r)
        for (int i = 0; i < GROUP && column + i < width; i += LANES)
          store_operand(reinterpret_cast<operand<T>*>(h + r * h_words_) + column + i, load(sums + r * GROUP + i),
                        std::min(LANES, width - column - i), T{});
    }
  }

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
  int k_, words_, groups_;
  size_t h_words_, down_words_, up_words_;
  std::vector<int> ends_;
  std::vector<int> rank_;  // by slot, rounded up to whole words; 0 where it adds nothing
  std::vector<int> columns_;
  std::vector<Parts> parts_;  // of every sixteen columns
  uint32_t *down_, *up_;
};

}  // namespace ectl
