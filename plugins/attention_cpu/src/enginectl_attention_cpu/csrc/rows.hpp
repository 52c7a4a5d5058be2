// What is done to whole rows: norms, activations, rotary turns. Each reads its own row only.
#pragma once

#include <cmath>

#include "gemm.hpp"

namespace ectl {

// A value of T where the next product reads it.
inline void store_operand(bf16* p, F a, int n, bf16) { store(p, a, n); }
inline void store_operand(float* p, F a, int n, float) { store(p, a, n); }
inline void store_operand(float* p, F a, int n, f16) { store(p, rounded<f16>(a), n); }

// RMSNorm weights as fp32, one added where the model says so.
struct Norm {
  const float* weight = nullptr;  // null: no norm
  float eps = 0;
};

// 1 / sqrt(mean of squares + eps).
template <class T>
F inverse_rms(const T* x, int n, float eps) {
  F sum[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) {
      const F v = load(x + i + j * LANES);
      sum[j] = fma(v, v, sum[j]);
    }
  for (; i < n; i += LANES) {
    const F v = load(x + i, n - i);
    sum[0] = fma(v, v, sum[0]);
  }
  const float total = reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  return set1(1.0f / std::sqrt(total / static_cast<float>(n) + eps));
}

// put(i, values, count) for the normalised row, sixteen at a time.
template <class T, class Put>
void norm_row(const T* x, int n, const Norm& norm, Put&& put) {
  const F inverse = inverse_rms(x, n, norm.eps);
  for (int i = 0; i < n; i += LANES) {
    const int count = n - i < LANES ? n - i : LANES;
    put(i, mul(mul(load(x + i, count), inverse), load(norm.weight + i, count)), count);
  }
}

// Turn the first rotary_dim elements of a head by (cos, sin), pairs half a rotary_dim apart.
inline void rotate(float* head, int rotary_dim, const float* cos, const float* sin) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i += LANES) {
    const int n = half - i < LANES ? half - i : LANES;
    const F x = load(head + i, n), y = load(head + half + i, n);
    const F left = sub(mul(x, load(cos + i, n)), mul(y, load(sin + i, n)));
    const F right = add(mul(y, load(cos + half + i, n)), mul(x, load(sin + half + i, n)));
    store(head + i, left, n);
    store(head + half + i, right, n);
  }
}

// Work on rows: the caller alone for a few, which costs less than meeting the others.
template <class Fn>
void for_rows(const Team& team, int num_rows, Fn&& fn) {
  if (num_rows <= 4 || team.num_threads == 1) {
    for (int row = 0; row < num_rows; ++row) fn(row);
    return;
  }
  int per_chunk = std::max(2, num_rows / (8 * team.num_threads));
  per_chunk = std::max(per_chunk, (num_rows + MAX_CHUNKS - 1) / MAX_CHUNKS);
  team.run((num_rows + per_chunk - 1) / per_chunk, [&](int, int chunk) {
    for (int row = chunk * per_chunk; row < std::min(num_rows, (chunk + 1) * per_chunk); ++row) fn(row);
  });
}

// Rows ready to be multiplied: first word, and words from one row to the next.
struct Rows {
  const uint32_t* data;
  size_t row_words;
};

// x [num_rows, k] as it is where that is possible and harmless, else copied.
template <class T>
Rows operand_rows(const Team& team, Scratch& scratch, const T* x, int num_rows, int k) {
  constexpr int per_word = Operand<T>::per_word;
  const size_t words = (k + per_word - 1) / per_word;
  const bool in_place = sizeof(T) == sizeof(operand<T>) && k % per_word == 0;
  if (in_place && (num_rows <= 4 || words % 256 != 0)) return {reinterpret_cast<const uint32_t*>(x), words};
  const size_t row_words = padded_words(words);
  uint32_t* rows = scratch.take<uint32_t>(row_words * num_rows);
  for_rows(team, num_rows, [&](int row) {
    auto* to = reinterpret_cast<operand<T>*>(rows + row * row_words);
    if (k % per_word) to[k] = {};
    for (int i = 0; i < k; i += LANES)
      store_operand(to + i, load(x + static_cast<size_t>(row) * k + i, k - i), k - i, T{});
  });
  return {rows, row_words};
}

// Normalised rows ready to be multiplied.
template <class T>
Rows normed_rows(const Team& team, Scratch& scratch, const T* x, int num_rows, int k, const Norm& norm) {
  constexpr int per_word = Operand<T>::per_word;
  const size_t row_words = padded_words((k + per_word - 1) / per_word);
  uint32_t* rows = scratch.take<uint32_t>(row_words * num_rows);
  for_rows(team, num_rows, [&](int row) {
    auto* to = reinterpret_cast<operand<T>*>(rows + row * row_words);
    if (k % per_word) to[k] = {};
    norm_row(x + static_cast<size_t>(row) * k, k, norm, [&](int i, F y, int n) { store_operand(to + i, y, n, T{}); });
  });
  return {rows, row_words};
}

}  // namespace ectl
