// y [T, N] = x [T, K] times one matrix of a stack, in float32 from float32 or bfloat16.
//
// Few rows read the matrix as it lies. More rows copy a strip of it, as float32, into panels that fit the second-level
// cache, and use each panel for all rows. Either way an output is one chain of fused multiply-adds over k, ascending,
// so its bits do not depend on the number of rows.

#include <algorithm>

#include "gemm.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace native {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kFewRows = 4;
constexpr int64_t kSomeRows = 2 * kRows;  // up to here a copy of the matrix costs more than it saves
constexpr int64_t kPanels = 2;            // copied side by side: a cache line of bfloat16
constexpr int64_t kStrip = 2 * kPanels * kPanel;  // columns that a thread takes at once

// y[0:M, 0:width] of a matrix [K, N] whose rows lie `stride` apart; U rows of it at a time.
template <int M, int U, typename W>
void few_rows(const float* x, int64_t k, const W* w, int64_t stride, int64_t width, float* y, int64_t ldy) {
  int64_t whole = width / kLanes * kLanes;
  for (int i = 0; i < M; ++i) std::fill(y + i * ldy, y + i * ldy + width, 0.0f);
  for (int64_t at = 0; at < k; at += U) {
    int used = static_cast<int>(std::min<int64_t>(U, k - at));
    if (used < U) {
      for (int64_t left = at; left < k; ++left)
        for (int i = 0; i < M; ++i) {
          float value = x[i * k + left];
          for (int64_t j = 0; j < width; ++j)
            y[i * ldy + j] = multiply_add(value, as_float(w[left * stride + j]), y[i * ldy + j]);
        }
      return;
    }
    Vec values[M][U];
    for (int i = 0; i < M; ++i)
      for (int u = 0; u < U; ++u) values[i][u] = splat(x[i * k + at + u]);
    for (int64_t j = 0; j < whole; j += kLanes) {
      Vec sums[M];
      for (int i = 0; i < M; ++i) sums[i] = load(y + i * ldy + j);
      for (int u = 0; u < U; ++u) {
        Vec weight = load(w + (at + u) * stride + j);
        for (int i = 0; i < M; ++i) sums[i] += values[i][u] * weight;
      }
      for (int i = 0; i < M; ++i) store(y + i * ldy + j, sums[i]);
    }
    for (int u = 0; u < U; ++u)
      for (int64_t j = whole; j < width; ++j)
        for (int i = 0; i < M; ++i)
          y[i * ldy + j] = multiply_add(x[i * k + at + u], as_float(w[(at + u) * stride + j]), y[i * ldy + j]);
  }
}

template <typename W>
void few_rows(int64_t m, const float* x, int64_t k, const W* w, int64_t stride, int64_t width, float* y, int64_t ldy) {
  switch (m) {
    case 1: return few_rows<1, 8>(x, k, w, stride, width, y, ldy);
    case 2: return few_rows<2, 4>(x, k, w, stride, width, y, ldy);
    case 3: return few_rows<3, 2>(x, k, w, stride, width, y, ldy);
    default: return few_rows<4, 2>(x, k, w, stride, width, y, ldy);
  }
}

// `width` columns of a matrix [K, N], as panels [K, kPanel] of float32, one after the other, with zeros past `width`.
template <typename W>
void pack(const W* w, int64_t k, int64_t stride, int64_t width, float* panels) {
  for (int64_t x = 0; x < k; ++x, w += stride) {
    if (x + 16 < k) __builtin_prefetch(w + 16 * stride);
    for (int64_t p = 0; p * kPanel < width; ++p) {
      float* row = panels + (p * k + x) * kPanel;
      const W* from = w + p * kPanel;
      if (width >= (p + 1) * kPanel) {
        store(row, load(from));
        store(row + kLanes, load(from + kLanes));
      } else {
        for (int64_t j = 0; j < kPanel; ++j) row[j] = p * kPanel + j < width ? as_float(from[j]) : 0.0f;
      }
    }
  }
}

// The same of a matrix [N, K]: its rows become columns, eight by eight in registers.
template <typename W>
void pack_transposed(const W* w, int64_t k, int64_t width, float* panel) {
  int64_t whole = width == kPanel ? k / 8 * 8 : 0;
  for (int64_t j = 0; j < (whole ? kPanel : 0); j += 8)
    for (int64_t x = 0; x < whole; x += 8) {
      Eight columns[8];
      transpose_eight(w + j * k + x, k, columns);
      for (int i = 0; i < 8; ++i) *reinterpret_cast<Eight*>(panel + (x + i) * kPanel + j) = columns[i];
    }
  for (int64_t x = whole; x < k; ++x)
    for (int64_t j = 0; j < kPanel; ++j) panel[x * kPanel + j] = j < width ? as_float(w[j * k + x]) : 0.0f;
}

// y[0:M, 0:width] of a matrix [N, K], for the first columns of `width` that come in whole groups; how many those are.
template <int M, typename W>
int64_t few_rows_transposed(const float* x, int64_t k, const W* w, int64_t width, float* y, int64_t ldy) {
  constexpr int kGroups = M < 4 ? 4 / M : 1;  // chains in flight, while their sums stay in registers
  int64_t whole = k / 8 * 8, done = 0;
  for (; done + 8 * kGroups <= width; done += 8 * kGroups) {
    const W* from = w + done * k;
    Eight sums[kGroups][M] = {};
    for (int64_t at = 0; at < whole; at += 8)
      for (int g = 0; g < kGroups; ++g) {
        Eight columns[8];
        transpose_eight(from + 8 * g * k + at, k, columns);
        for (int i = 0; i < 8; ++i)
          for (int m = 0; m < M; ++m) sums[g][m] += splat_eight(x[m * k + at + i]) * columns[i];
      }
    for (int64_t at = whole; at < k; ++at)
      for (int g = 0; g < kGroups; ++g) {
        Eight column;
        for (int lane = 0; lane < 8; ++lane) column[lane] = as_float(from[(8 * g + lane) * k + at]);
        for (int m = 0; m < M; ++m) sums[g][m] += splat_eight(x[m * k + at]) * column;
      }
    for (int g = 0; g < kGroups; ++g)
      for (int m = 0; m < M; ++m) *reinterpret_cast<Eight*>(y + m * ldy + done + 8 * g) = sums[g][m];
  }
  return done;
}

template <typename W>
int64_t few_rows_transposed(int64_t m, const float* x, int64_t k, const W* w, int64_t width, float* y, int64_t ldy) {
  switch (m) {
    case 1: return few_rows_transposed<1>(x, k, w, width, y, ldy);
    case 2: return few_rows_transposed<2>(x, k, w, width, y, ldy);
    case 3: return few_rows_transposed<3>(x, k, w, width, y, ldy);
    case 4: return few_rows_transposed<4>(x, k, w, width, y, ldy);
    default: return 0;
  }
}

struct Shape {
  int64_t rows, k, n;  // `rows`: the real ones
  bool transposed;     // the matrix is [N, K]
};

// y[:, at : at + columns] from a panel.
void multiply_panel(const Shape& shape, const float* x, const float* panel, int64_t at, int64_t columns, float* y) {
  if (columns == kPanel) return multiply(x, shape.k, panel, kPanel, y + at, shape.n, shape.rows, shape.k, false);
  float* last = scratch<1>(shape.rows * kPanel);
  multiply(x, shape.k, panel, kPanel, last, kPanel, shape.rows, shape.k, false);
  for (int64_t i = 0; i < shape.rows; ++i)
    std::copy(last + i * kPanel, last + i * kPanel + columns, y + i * shape.n + at);
}

template <typename W>
void multiply_strip(const Shape& shape, const float* x, const W* w, int64_t first, float* y) {
  int64_t k = shape.k, n = shape.n, end = std::min(first + kStrip, n);
  float* panels = scratch<0>(k * kPanels * kPanel);
  if (shape.transposed) first += few_rows_transposed(shape.rows, x, k, w + first * k, end - first, y + first, n);
  for (int64_t at = first; at < end; at += kPanels * kPanel) {
    int64_t width = std::min(kPanels * kPanel, end - at);
    if (!shape.transposed && shape.rows <= kSomeRows && width == kPanels * kPanel) {
      for (int64_t p = 0; p < kPanels; ++p)
        multiply<true>(x, k, w + at + p * kPanel, n, y + at + p * kPanel, n, shape.rows, k, false);
      continue;
    }
    if (!shape.transposed) pack(w + at, k, n, width, panels);
    for (int64_t p = 0; p * kPanel < width; ++p) {
      int64_t columns = std::min<int64_t>(kPanel, width - p * kPanel);
      float* panel = panels + p * k * kPanel;
      if (shape.transposed) pack_transposed(w + (at + p * kPanel) * k, k, columns, panel);
      multiply_panel(shape, x, panel, at + p * kPanel, columns, y);
    }
  }
}

template <typename W>
void run(ffi::ThreadPool pool, const Shape& shape, const float* x, const W* w, float* y) {
  if (!shape.transposed && shape.rows <= kFewRows) {
    int64_t pieces = 2 * pool.num_threads(), unit = 2 * kLanes;
    int64_t width = std::max<int64_t>(4 * unit, (shape.n + pieces * unit - 1) / (pieces * unit) * unit);
    parallel_for(pool, (shape.n + width - 1) / width, [&](int64_t i) {
      int64_t first = i * width;
      few_rows(shape.rows, x, shape.k, w + first, shape.n, std::min(width, shape.n - first), y + first, shape.n);
    });
    return;
  }
  parallel_for(pool, (shape.n + kStrip - 1) / kStrip,
               [&](int64_t i) { multiply_strip(shape, x, w, i * kStrip, y); });
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::Buffer<ffi::S32> layer,
                  ffi::Buffer<ffi::S32> num_rows, ffi::ResultBuffer<ffi::F32> y, bool transposed) {
  auto x_dims = x.dimensions(), w_dims = weights.dimensions();
  int64_t t = x_dims[0], k = x_dims[1], n = y->dimensions()[1];
  int64_t rows = std::clamp<int64_t>(num_rows.typed_data()[0], 0, t);
  int64_t index = std::clamp<int64_t>(layer.typed_data()[0], 0, w_dims[0] - 1);
  float* out = y->typed_data();
  std::fill(out + rows * n, out + t * n, 0.0f);
  if (rows == 0) return ffi::Error::Success();
  const float* exact = x.element_type() == ffi::F32 ? static_cast<const float*>(x.untyped_data()) : nullptr;
  std::vector<float> widened;
  if (exact == nullptr) {
    widened.resize(rows * k);
    const uint16_t* narrow = static_cast<const uint16_t*>(x.untyped_data());
    for (int64_t i = 0; i < rows * k; ++i) widened[i] = as_float(narrow[i]);
    exact = widened.data();
  }
  Shape shape{rows, k, n, transposed};
  if (weights.element_type() == ffi::F32)
    run(pool, shape, exact, static_cast<const float*>(weights.untyped_data()) + index * k * n, out);
  else
    run(pool, shape, exact, static_cast<const uint16_t*>(weights.untyped_data()) + index * k * n, out);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace native

XLA_FFI_DEFINE_HANDLER_SYMBOL(NativeMatmul, native::matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("transposed"));
