// Vectors of float32 as wide as the machine's registers, through the vector extensions that GCC and Clang share.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace native {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Loads and stores through these types may be unaligned.
typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t BitsVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

inline Vec splat(float x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_set1_ps(x));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec>(_mm256_set1_ps(x));
#else
  Vec all;
  for (int i = 0; i < kLanes; ++i) all[i] = x;
  return all;
#endif
}

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }

// bfloat16 is the upper half of a float32.
inline Vec load(const uint16_t* p) {
#if defined(__AVX512F__)
  __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return reinterpret_cast<Vec>(_mm512_slli_epi32(words, 16));
#elif defined(__AVX2__)  // compilers make five instructions of the portable form
  __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<Vec>(_mm256_slli_epi32(words, 16));
#else
  return reinterpret_cast<Vec>(__builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), BitsVec) << 16);
#endif
}

inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }

// Eight float32, whatever the width of the registers: what a transposition is made of.
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

inline Eight load_eight(const float* p) { return *reinterpret_cast<const Eight*>(p); }

inline Eight load_eight(const uint16_t* p) {
#if defined(__AVX2__)
  __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<Eight>(_mm256_slli_epi32(words, 16));
#else
  Eight all;
  for (int i = 0; i < 8; ++i) {
    uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
    std::memcpy(reinterpret_cast<char*>(&all) + 4 * i, &bits, 4);
  }
  return all;
#endif
}

inline Eight splat_eight(float x) {
#if defined(__AVX2__)
  return reinterpret_cast<Eight>(_mm256_set1_ps(x));
#else
  return Eight{x, x, x, x, x, x, x, x};
#endif
}

// columns[j][i] = from[i * pitch + j] for i, j below 8.
template <typename W>
inline void transpose_eight(const W* from, int64_t pitch, Eight* columns) {
  Eight r[8], s[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = load_eight(from + i * pitch);
  for (int i = 0; i < 8; i += 2) {
    s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      t[i + 2 * j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      t[i + 2 * j + 1] = __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int j = 0; j < 4; ++j) {
    columns[j] = __builtin_shufflevector(t[j], t[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    columns[j + 4] = __builtin_shufflevector(t[j], t[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

inline float as_float(float x) { return x; }

inline float as_float(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

// What vectors do a lane at a time: fused where the machine can, in two roundings elsewhere. std::fma is always fused.
inline float multiply_add(float a, float b, float sum) { return a * b + sum; }

inline void put(float* p, float x) { *p = x; }

// To the nearest bfloat16, ties to even; a NaN stays one.
inline void put(uint16_t* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  *p = std::isnan(x) ? static_cast<uint16_t>((bits >> 16) | 0x40)
                     : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Of the lanes, by halves: the same order at each call.
inline float sum(Vec x) {
  typedef float Four __attribute__((vector_size(16)));
#if defined(__AVX512F__)
  Four four = (__builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7)) +
              (__builtin_shufflevector(x, x, 8, 9, 10, 11) + __builtin_shufflevector(x, x, 12, 13, 14, 15));
#elif defined(__AVX__)
  Four four = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
  Four four = x;
#endif
  four += __builtin_shufflevector(four, four, 2, 3, 0, 1);
  four += __builtin_shufflevector(four, four, 1, 0, 3, 2);
  return four[0];
}

inline float highest(Vec x) {
  float best = x[0];
  for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

inline Vec select(IntVec is_true, Vec a, Vec b) {
  return reinterpret_cast<Vec>((reinterpret_cast<IntVec>(a) & is_true) | (reinterpret_cast<IntVec>(b) & ~is_true));
}

inline Vec higher(Vec a, Vec b) { return select(reinterpret_cast<IntVec>(a > b), a, b); }

// e^x for x <= 0, to 2 ulp; 0 below -87.3, -inf included. Cephes' polynomial after x = n ln 2 + r.
inline Vec exp_of_negative(Vec x) {
  IntVec is_tiny = reinterpret_cast<IntVec>(x < splat(-87.33f));
  Vec bounded = select(is_tiny, splat(0.0f), x);
  Vec scaled = bounded * 1.44269504088896341f - 0.5f;
  IntVec n = __builtin_convertvector(scaled, IntVec);  // toward zero: the nearest, since scaled <= 0
  Vec whole = __builtin_convertvector(n, Vec);
  Vec r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Vec e = p * r * r + r + 1.0f;
  Vec power = reinterpret_cast<Vec>((n + 127) << 23);
  return select(is_tiny, splat(0.0f), e * power);
}

}  // namespace native
