// C += A B for a panel of B: the inner loop that the matmul and prefill attention share.
#pragma once

#include "simd.h"

namespace native {

constexpr int kPanel = 2 * kLanes;  // columns of a panel
constexpr int kRows = 6;            // rows of A at once: 12 sums, 2 vectors of B and one of A are in registers

// C [M, kPanel] (+)= A [M, K] B [K, kPanel]. Each element is one chain of fused multiply-adds over k, ascending, from
// zero or from what is there: its bits do not depend on M or on its place. `kFar`: rows of B lie on memory pages of
// their own, where the hardware does not look ahead.
template <int M, bool kFar, typename B>
inline void multiply_rows(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t k,
                          bool accumulate) {
  Vec sums[M][2];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < 2; ++j) sums[i][j] = accumulate ? load(c + i * ldc + j * kLanes) : Vec{};
  for (int64_t x = 0; x < k; ++x) {
    if (kFar) __builtin_prefetch(b + (x + 24) * ldb);
    Vec b0 = load(b + x * ldb), b1 = load(b + x * ldb + kLanes);
    for (int i = 0; i < M; ++i) {
      Vec value = splat(a[i * lda + x]);
      sums[i][0] += value * b0;
      sums[i][1] += value * b1;
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < 2; ++j) store(c + i * ldc + j * kLanes, sums[i][j]);
}

template <bool kFar = false, typename B>
inline void multiply(const float* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t m,
                     int64_t k, bool accumulate) {
  for (; m >= kRows; m -= kRows, a += kRows * lda, c += kRows * ldc)
    multiply_rows<kRows, kFar>(a, lda, b, ldb, c, ldc, k, accumulate);
  switch (m) {
    case 5: return multiply_rows<5, kFar>(a, lda, b, ldb, c, ldc, k, accumulate);
    case 4: return multiply_rows<4, kFar>(a, lda, b, ldb, c, ldc, k, accumulate);
    case 3: return multiply_rows<3, kFar>(a, lda, b, ldb, c, ldc, k, accumulate);
    case 2: return multiply_rows<2, kFar>(a, lda, b, ldb, c, ldc, k, accumulate);
    case 1: return multiply_rows<1, kFar>(a, lda, b, ldb, c, ldc, k, accumulate);
    default: return;
  }
}

}  // namespace native
