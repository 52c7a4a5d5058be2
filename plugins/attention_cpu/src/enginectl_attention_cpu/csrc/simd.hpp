// Sixteen floats at a time: AVX-512, or two halves of AVX2. Every kernel is written in these few functions, so that
// both compute in the same order. The build turns contraction off: a fused multiply-add happens where it is written.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define ECTL_AVX512 1
#endif
#if defined(ECTL_AVX512) && defined(__AVX512BF16__)
#define ECTL_BF16_DOT 1
#endif

namespace ectl {

constexpr int LANES = 16;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#if defined(ECTL_AVX512)

using F = __m512;
using Pairs = __m512i;  // sixteen pairs of bf16

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F round_even(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F scale_by_power(F a, F n) { return _mm512_scalef_ps(a, n); }  // a * 2^n, n whole
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
inline float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
inline F copy_sign(F magnitude, F sign) {
  const __m512 mask = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(mask, magnitude), _mm512_and_ps(mask, sign));
}
// Lanes [first, last) of a, elsewhere other.
inline F keep_range(F a, int first, int last, F other) {
  const uint32_t below_last = last >= LANES ? 0xffffu : last <= 0 ? 0u : (1u << last) - 1;
  const uint32_t below_first = first >= LANES ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1;
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below_last & ~below_first), a);
}

// The first lane that holds x, or LANES.
inline int lane_equal(F a, float x) {
  const uint32_t mask = _mm512_cmp_ps_mask(a, _mm512_set1_ps(x), _CMP_EQ_OQ);
  return mask ? __builtin_ctz(mask) : LANES;
}

inline __mmask16 first_lanes(int n) { return n >= LANES ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline F load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline F load(const bf16* p, int n) {
  const __m256i half = _mm256_maskz_loadu_epi16(first_lanes(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline F load(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }

inline __m256i to_bf16(F a) {
#if defined(ECTL_BF16_DOT)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a));
#else
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline __m256i to_f16(F a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline void store(bf16* p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a)); }
inline void store(f16* p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_f16(a)); }
inline void store(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
inline void store(bf16* p, F a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), to_bf16(a)); }
inline void store(f16* p, F a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), to_f16(a)); }

inline Pairs load_pairs(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Pairs set1_pair(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline void store_pairs(uint32_t* p, Pairs a) { _mm512_storeu_si512(p, a); }
// Two rows of sixteen bf16 as pairs (a[i], b[i]).
inline Pairs interleave(const bf16* a, const bf16* b, int n) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), a));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), b));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
// Two vectors, rounded, next to each other; and as pairs.
inline Pairs narrow(F a, F b) {
#if defined(ECTL_BF16_DOT)
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(a)), to_bf16(b), 1);
#endif
}
inline F dot(F acc, Pairs a, Pairs b) {
#if defined(ECTL_BF16_DOT)
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)),
                        acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)),
                         acc);
#endif
}

#else  // AVX2

struct F {
  __m256 lo, hi;
};
struct Pairs {
  __m256i lo, hi;
};

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F round_even(F a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 scale_by_power(__m256 a, __m256 n) {
  // Below the smallest normal number the result is zero; n never exceeds 127 here.
  const __m256 clamped = _mm256_max_ps(n, _mm256_set1_ps(-127.0f));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(clamped), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline F scale_by_power(F a, F n) { return {scale_by_power(a.lo, n.lo), scale_by_power(a.hi, n.hi)}; }
inline void store(float* p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline float reduce_max(F a) {
  float x[LANES];
  store(x, a);
  float best = x[0];
  for (int i = 1; i < LANES; ++i) best = x[i] > best ? x[i] : best;
  return best;
}
inline float reduce_add(F a) {
  float x[LANES];
  store(x, a);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}
inline F copy_sign(F magnitude, F sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(mask, magnitude.lo), _mm256_and_ps(mask, sign.lo)),
          _mm256_or_ps(_mm256_andnot_ps(mask, magnitude.hi), _mm256_and_ps(mask, sign.hi))};
}
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F keep_range(F a, int first, int last, F other) {
  float x[LANES], y[LANES];
  store(x, a);
  store(y, other);
  for (int i = 0; i < LANES; ++i) y[i] = i >= first && i < last ? x[i] : y[i];
  return load(y);
}
inline int lane_equal(F a, float x) {
  float values[LANES];
  store(values, a);
  int lane = 0;
  while (lane < LANES && values[lane] != x) ++lane;
  return lane;
}
inline F widen(__m256i half) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(half)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(half, 1)), 16))};
}
inline F load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F load(const f16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
template <class T>
inline F load(const T* p, int n) {
  if (n >= LANES) return load(p);
  T x[LANES] = {};
  if (n > 0) std::memcpy(x, p, sizeof(T) * n);
  return load(x);
}
inline __m128i to_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  const __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x400000)));
  const __m256i chosen = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, nan));
  const __m256i top = _mm256_srli_epi32(chosen, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
}
inline void store(bf16* p, F a) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, to_bf16(a.lo));
  _mm_storeu_si128(q + 1, to_bf16(a.hi));
}
inline void store(f16* p, F a) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
template <class T>
inline void store(T* p, F a, int n) {
  T x[LANES];
  store(x, a);
  if (n > 0) std::memcpy(p, x, sizeof(T) * (n < LANES ? n : LANES));
}
inline Pairs load_pairs(const uint32_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline Pairs set1_pair(uint32_t x) {
  return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))};
}
inline void store_pairs(uint32_t* p, Pairs a) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, a.lo);
  _mm256_storeu_si256(q + 1, a.hi);
}
inline Pairs interleave(const bf16* a, const bf16* b, int n) {
  uint32_t x[LANES] = {};
  for (int i = 0; i < (n < LANES ? n : LANES); ++i) x[i] = a[i].bits | static_cast<uint32_t>(b[i].bits) << 16;
  return load_pairs(x);
}
inline __m256i join(__m128i lo, __m128i hi) { return _mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1); }
inline Pairs narrow(F a, F b) { return {join(to_bf16(a.lo), to_bf16(a.hi)), join(to_bf16(b.lo), to_bf16(b.hi))}; }
inline __m256 dot(__m256 acc, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high)),
                        acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)),
                         acc);
}
inline F dot(F acc, Pairs a, Pairs b) { return {dot(acc.lo, a.lo, b.lo), dot(acc.hi, a.hi, b.hi)}; }

#endif

inline float first_lane(F a) {
#if defined(ECTL_AVX512)
  return _mm512_cvtss_f32(a);
#else
  return _mm256_cvtss_f32(a.lo);
#endif
}

// a as T stores it.
template <class T>
inline F rounded(F a) {
  T x[LANES];
  store(x, a);
  return load(x);
}
template <>
inline F rounded<float>(F a) {
  return a;
}
#if defined(ECTL_AVX512)
template <>
inline F rounded<bf16>(F a) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(a)), 16));
}
template <>
inline F rounded<f16>(F a) {
  return _mm512_cvtph_ps(to_f16(a));
}
#endif

// 2^x for x up to 127, within two units of fp32's last place, or one sixtieth of bf16's; 0 for any x below -200.
template <bool coarse>
inline F exp2(F x) {
  const F whole = round_even(x);
  const F r = sub(x, whole);  // [-0.5, 0.5]
  F p = set1(9.6181291e-3f);
  if (!coarse) p = fma(fma(set1(1.5403530e-4f), r, set1(1.3333558e-3f)), r, p);
  p = fma(p, r, set1(5.5504109e-2f));
  p = fma(p, r, set1(2.4022651e-1f));
  p = fma(p, r, set1(6.9314718e-1f));
  p = fma(p, r, set1(1.0f));
  return scale_by_power(p, whole);
}

constexpr float LOG2E = 1.44269504088896f;

// e^x, the product with log2(e) split so that large arguments keep their precision.
inline F exp(F x) {
  x = min(max(x, set1(-126.0f)), set1(88.0f));
  const F whole = round_even(mul(x, set1(LOG2E)));
  F r = fma(whole, set1(-0.693145751953125f), x);
  r = fma(whole, set1(-1.42860682030941723e-6f), r);
  F p = set1(1.9875691e-4f);
  p = fma(p, r, set1(1.3981999e-3f));
  p = fma(p, r, set1(8.3334519e-3f));
  p = fma(p, r, set1(4.1665795e-2f));
  p = fma(p, r, set1(1.6666665e-1f));
  p = fma(p, r, set1(5.0000001e-1f));
  p = add(fma(mul(p, r), r, r), set1(1.0f));
  return scale_by_power(p, whole);
}

// 1 / x to fp32's precision, for ordinary x.
inline F reciprocal(F x) {
#if defined(ECTL_AVX512)
  const F guess = _mm512_rcp14_ps(x);
  return mul(guess, sub(set1(2.0f), mul(x, guess)));
#else
  return div(set1(1.0f), x);
#endif
}

inline F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }
// To bf16's precision, at half the cost.
inline F coarse_silu(F x) {
  const F e = exp2<true>(min(mul(x, set1(-LOG2E)), set1(126.0f)));
  return mul(x, reciprocal(add(set1(1.0f), e)));
}

// tanh by its exponential, and by a series near zero where that would cancel.
inline F tanh(F x) {
  const F magnitude = copy_sign(x, set1(1.0f));
  const F t = exp(mul(min(magnitude, set1(20.0f)), set1(-2.0f)));
  const F far = div(sub(set1(1.0f), t), add(set1(1.0f), t));
  const F x2 = mul(x, x);
  F near = set1(0.021869488f);
  near = fma(near, x2, set1(-0.053968254f));
  near = fma(near, x2, set1(0.13333333f));
  near = fma(near, x2, set1(-0.33333333f));
  near = fma(mul(near, x2), magnitude, magnitude);
  // Blend without a comparison type: both are exact enough at 0.25, so choose by lane.
  float a[LANES], b[LANES], m[LANES];
  store(a, far);
  store(b, near);
  store(m, magnitude);
  for (int i = 0; i < LANES; ++i) a[i] = m[i] < 0.25f ? b[i] : a[i];
  return copy_sign(load(a), x);
}

inline F gelu_tanh(F x) {
  const F inner = mul(set1(0.7978845608028654f), fma(mul(mul(x, x), x), set1(0.044715f), x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

}  // namespace ectl
