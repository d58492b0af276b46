// Ragged paged attention: write this step's keys and values into pages, then attend over the pages where they lie.
//
// Pages are [layers, pages, 2, K, S, H] of float32, or of bfloat16 held as uint16. All sums are float32, over tokens at
// fixed places in the sequence, so a row's bits do not depend on who else is in the batch.

#include <algorithm>
#include <limits>
#include <string_view>

#include "gemm.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace native {
namespace {

namespace ffi = xla::ffi;

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kPart = 512;        // tokens of a decode row that one thread takes
constexpr int64_t kBlock = 64;        // tokens that a prefill tile sees at once
constexpr int64_t kTileRows = 384;    // (query, head) pairs of a tile: its queries, scores and sums fit the L2 cache
constexpr int64_t kHeadsAtOnce = 4;   // query heads that share the keys of a decode row while they are in registers

struct Shape {
  int64_t tokens, heads, kv_heads, head_dim, rows, pages_per_row, num_pages, page_size;
  float scale, soft_cap;  // soft_cap 0: off
  int64_t window;         // 0: all
  const float* sinks;     // [heads], or none
  int64_t group() const { return heads / kv_heads; }
};

struct Step {
  const int32_t *kv_lens, *tables, *starts, *distribution, *positions, *token_rows;
};

template <typename C>
struct Cache {
  C* layer;  // this one's pages
  const Shape* shape;
  C* at(int64_t page, int64_t is_value, int64_t head) const {
    const Shape& s = *shape;
    return layer + ((page * 2 + is_value) * s.kv_heads + head) * s.page_size * s.head_dim;
  }
};

template <typename Q, typename C>
void write(const Shape& s, const Step& step, const Cache<C>& cache, const Q* k, const Q* v, int64_t num_tokens) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    int64_t row = step.token_rows[t], column = step.positions[t] / s.page_size, slot = step.positions[t] % s.page_size;
    if (row >= s.rows || column >= s.pages_per_row) continue;  // has no page of its own
    int64_t page = step.tables[row * s.pages_per_row + column];
    for (int64_t head = 0; head < s.kv_heads; ++head) {
      C* key = cache.at(page, 0, head) + slot * s.head_dim;
      C* value = cache.at(page, 1, head) + slot * s.head_dim;
      const Q* new_key = k + (t * s.kv_heads + head) * s.head_dim;
      const Q* new_value = v + (t * s.kv_heads + head) * s.head_dim;
      for (int64_t i = 0; i < s.head_dim; ++i) {
        put(key + i, as_float(new_key[i]));
        put(value + i, as_float(new_value[i]));
      }
    }
  }
}

inline float capped(float logit, float cap) { return cap == 0.0f ? logit : cap * std::tanh(logit / cap); }

// Softmax numerators in place: logits[0:n] become e^(logit - top), and their sum is returned. `top` may be -inf.
float exponentials(float* logits, int64_t n, float top) {
  float shift = top == kNothing ? 0.0f : top;
  Vec total{}, shifts = splat(shift);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Vec e = exp_of_negative(load(logits + i) - shifts);
    store(logits + i, e);
    total += e;
  }
  float rest = 0.0f;
  for (; i < n; ++i) {
    logits[i] = exp_of_negative(splat(logits[i] - shift))[0];
    rest += logits[i];
  }
  return sum(total) + rest;
}

float highest_of(const float* x, int64_t n) {
  Vec best = splat(kNothing);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) best = higher(load(x + i), best);
  float top = highest(best);
  for (; i < n; ++i) top = std::max(top, x[i]);
  return top;
}

// ---- decode: one query a row ----------------------------------------------------------------------------------------

struct Part {
  int64_t row, begin, end;  // tokens [begin, end) of the row's sequence
};

// logits[g * kPart + i] for the tokens of one page.
template <int G, typename C>
void dot_keys(const float* q, const C* keys, int64_t count, int64_t head_dim, float* logits) {
  int64_t whole = head_dim / kLanes * kLanes;
  for (int64_t i = 0; i < count; ++i, keys += head_dim) {
    Vec sums[G] = {};
    for (int64_t h = 0; h < whole; h += kLanes) {
      Vec key = load(keys + h);
      for (int g = 0; g < G; ++g) sums[g] += load(q + g * head_dim + h) * key;
    }
    for (int g = 0; g < G; ++g) {
      float logit = sum(sums[g]);
      for (int64_t h = whole; h < head_dim; ++h) logit = multiply_add(q[g * head_dim + h], as_float(keys[h]), logit);
      logits[g * kPart + i] = logit;
    }
  }
}

template <typename C>
void dot_keys(int64_t g, const float* q, const C* keys, int64_t count, int64_t head_dim, float* logits) {
  for (; g >= kHeadsAtOnce; g -= kHeadsAtOnce, q += kHeadsAtOnce * head_dim, logits += kHeadsAtOnce * kPart)
    dot_keys<kHeadsAtOnce>(q, keys, count, head_dim, logits);
  if (g == 3) dot_keys<3>(q, keys, count, head_dim, logits);
  if (g == 2) dot_keys<2>(q, keys, count, head_dim, logits);
  if (g == 1) dot_keys<1>(q, keys, count, head_dim, logits);
}

// sums [G, H] += weights [G, count] values [count, H]
template <typename C>
void add_values(int64_t g, const float* weights, const C* values, int64_t count, int64_t head_dim, float* sums) {
  int64_t whole = head_dim / kPanel * kPanel;
  for (int64_t h = 0; h < whole; h += kPanel)
    multiply(weights, kPart, values + h, head_dim, sums + h, head_dim, g, count, true);
  for (int64_t h = whole; h < head_dim; ++h)
    for (int64_t i = 0; i < g; ++i) {
      float& sum = sums[i * head_dim + h];
      for (int64_t x = 0; x < count; ++x)
        sum = multiply_add(weights[i * kPart + x], as_float(values[x * head_dim + h]), sum);
    }
}

// The next page lies anywhere: ask for it while this one is worked on.
template <typename C>
void look_ahead(const C* page, int64_t size) {
  const char* bytes = reinterpret_cast<const char*>(page);
  int64_t end = std::min<int64_t>(size * sizeof(C), 4096);
  for (int64_t at = 0; at < end; at += 64) __builtin_prefetch(bytes + at);
}

// Partial result of each query head: top, total, then H sums. All heads in one go: a page is one piece of memory.
template <typename Q, typename C>
void attend_part(const Shape& s, const Step& step, const Cache<C>& cache, const Q* q, const Part& part,
                 float* results) {
  int64_t group = s.group(), head_dim = s.head_dim, size = s.page_size, count = part.end - part.begin;
  float* queries = scratch<2>(s.heads * head_dim);
  float* logits = scratch<3>(s.heads * kPart);
  float* sums = scratch<4>(s.heads * head_dim);
  const Q* own = q + part.row * s.heads * head_dim;
  for (int64_t i = 0; i < s.heads * head_dim; ++i) queries[i] = as_float(own[i]) * s.scale;
  std::fill(sums, sums + s.heads * head_dim, 0.0f);
  const int32_t* table = step.tables + part.row * s.pages_per_row;
  auto each_page = [&](int64_t is_value, auto body) {
    for (int64_t at = part.begin; at < part.end;) {
      int64_t slot = at % size, tokens = std::min(size - slot, part.end - at), next = at + tokens;
      if (next < part.end) look_ahead(cache.at(table[next / size], is_value, 0), size * head_dim);
      for (int64_t head = 0; head < s.kv_heads; ++head)
        body(head, cache.at(table[at / size], is_value, head) + slot * head_dim, tokens, at - part.begin);
      at = next;
    }
  };
  each_page(0, [&](int64_t head, const C* keys, int64_t tokens, int64_t done) {
    dot_keys(group, queries + head * group * head_dim, keys, tokens, head_dim, logits + head * group * kPart + done);
  });
  for (int64_t head = 0; head < s.heads; ++head) {
    float* mine = logits + head * kPart;
    if (s.soft_cap != 0.0f)
      for (int64_t i = 0; i < count; ++i) mine[i] = capped(mine[i], s.soft_cap);
    float top = highest_of(mine, count);
    results[head * (head_dim + 2)] = top;
    results[head * (head_dim + 2) + 1] = exponentials(mine, count, top);
  }
  each_page(1, [&](int64_t head, const C* values, int64_t tokens, int64_t done) {
    add_values(group, logits + head * group * kPart + done, values, tokens, head_dim, sums + head * group * head_dim);
  });
  for (int64_t head = 0; head < s.heads; ++head)
    std::copy(sums + head * head_dim, sums + (head + 1) * head_dim, results + head * (head_dim + 2) + 2);
}

// out [H] of one query head, from its partial results `stride` apart, in the order of their tokens; they are used up.
template <typename Q>
void join_parts(float* results, int64_t count, int64_t stride, int64_t head_dim, const float* sink, Q* out) {
  float top = sink ? *sink : kNothing;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, results[i * stride]);
  float shift = top == kNothing ? 0.0f : top, total = sink ? std::exp(*sink - shift) : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    float keep = std::exp(results[i * stride] - shift), *sums = results + i * stride + 2;
    total += results[i * stride + 1] * keep;
    for (int64_t h = 0; h < head_dim; ++h) results[2 + h] = i == 0 ? sums[h] * keep : results[2 + h] + sums[h] * keep;
  }
  for (int64_t h = 0; h < head_dim; ++h) put(out + h, count > 0 && total > 0.0f ? results[2 + h] / total : 0.0f);
}

template <typename Q, typename C>
void decode(ffi::ThreadPool pool, const Shape& s, const Step& step, const Cache<C>& cache, const Q* q, Q* out) {
  int64_t num_rows = std::min<int64_t>({step.distribution[0], s.rows, s.tokens});
  std::vector<Part> parts;
  std::vector<int64_t> first_part(num_rows + 1, 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t length = step.kv_lens[row], end = std::min(length, s.pages_per_row * s.page_size);
    int64_t begin = s.window ? std::max<int64_t>(length - s.window, 0) : 0;
    for (int64_t at = begin, next; at < end; at = next) {
      next = std::min(end, (at / kPart + 1) * kPart);
      parts.push_back({row, at, next});
    }
    first_part[row + 1] = parts.size();
  }
  int64_t size = s.head_dim + 2, stride = s.heads * size;
  std::vector<float> results(parts.size() * stride);
  parallel_for(pool, parts.size(), [&](int64_t i) { attend_part(s, step, cache, q, parts[i], &results[i * stride]); });
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t head = 0; head < s.heads; ++head)
      join_parts(results.data() + first_part[row] * stride + head * size, first_part[row + 1] - first_part[row], stride,
                 s.head_dim, s.sinks ? s.sinks + head : nullptr, out + (row * s.heads + head) * s.head_dim);
}

// ---- prefill: several queries a row ---------------------------------------------------------------------------------

struct Tile {
  int64_t row, head, token, count, position;  // queries [token, token + count) of the batch, from `position` on
};

// Keys [H, kBlock] on their side and values [kBlock, padded H] of tokens [at, at + kBlock); zeros outside [begin, end).
template <typename C>
void load_block(const Shape& s, const int32_t* table, const Cache<C>& cache, int64_t head, int64_t at, int64_t begin,
                int64_t end, float* keys, float* values, int64_t padded) {
  for (int64_t i = 0; i < kBlock; ++i) {
    int64_t token = at + i;
    bool is_seen = token >= begin && token < end;
    const C *key = nullptr, *value = nullptr;
    if (is_seen) {
      int64_t page = table[token / s.page_size], slot = token % s.page_size;
      key = cache.at(page, 0, head) + slot * s.head_dim;
      value = cache.at(page, 1, head) + slot * s.head_dim;
    }
    for (int64_t h = 0; h < s.head_dim; ++h) keys[h * kBlock + i] = is_seen ? as_float(key[h]) : 0.0f;
    for (int64_t h = 0; h < padded; ++h) values[i * padded + h] = is_seen && h < s.head_dim ? as_float(value[h]) : 0.0f;
  }
}

// Fold one block into the state of one (query, head): masks, exponentials, and the factor for its earlier sums.
void fold_row(const Shape& s, float* logits, int64_t at, int64_t position, int64_t end, float* top, float* total,
              float* sums, int64_t padded) {
  int64_t first = s.window ? std::max<int64_t>(position - s.window + 1 - at, 0) : 0;
  int64_t last = std::min({position, end - 1, at + kBlock - 1}) - at;
  if (s.soft_cap != 0.0f)
    for (int64_t i = 0; i < kBlock; ++i) logits[i] = capped(logits[i], s.soft_cap);
  for (int64_t i = 0; i < std::min(first, kBlock); ++i) logits[i] = kNothing;
  for (int64_t i = last + 1; i < kBlock; ++i) logits[i] = kNothing;
  float new_top = std::max(*top, highest_of(logits, kBlock));
  float keep = new_top == kNothing ? 1.0f : std::exp(*top - new_top);
  *total = *total * keep + exponentials(logits, kBlock, new_top);
  *top = new_top;
  if (keep == 1.0f) return;
  for (int64_t h = 0; h < padded; h += kLanes) store(sums + h, load(sums + h) * splat(keep));
}

template <typename Q, typename C>
void attend_tile(const Shape& s, const Step& step, const Cache<C>& cache, const Q* q, const Tile& tile, Q* out) {
  int64_t group = s.group(), head_dim = s.head_dim, rows = tile.count * group;
  int64_t padded = (head_dim + kPanel - 1) / kPanel * kPanel;
  float* queries = scratch<5>(rows * head_dim);
  float* sums = scratch<6>(rows * padded);
  float* logits = scratch<7>(rows * kBlock);
  float* block = scratch<8>(kBlock * (head_dim + padded));
  float* state = scratch<9>(2 * rows);
  float *tops = state, *totals = state + rows;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t head = tile.head * group + r % group;
    const Q* from = q + ((tile.token + r / group) * s.heads + head) * head_dim;
    for (int64_t h = 0; h < head_dim; ++h) queries[r * head_dim + h] = as_float(from[h]) * s.scale;
    tops[r] = s.sinks ? s.sinks[head] : kNothing;
    totals[r] = s.sinks ? 1.0f : 0.0f;
  }
  std::fill(sums, sums + rows * padded, 0.0f);
  const int32_t* table = step.tables + tile.row * s.pages_per_row;
  int64_t begin = s.window ? std::max<int64_t>(tile.position - s.window + 1, 0) : 0;
  int64_t end = std::min(tile.position + tile.count, s.pages_per_row * s.page_size);
  float *keys = block, *values = block + kBlock * head_dim;
  for (int64_t at = begin / kBlock * kBlock; at < end; at += kBlock) {
    load_block(s, table, cache, tile.head, at, begin, end, keys, values, padded);
    int64_t skipped = std::max<int64_t>(at - tile.position, 0) * group, seen = rows - skipped;  // causal: see nothing
    for (int64_t i = 0; i < kBlock; i += kPanel)
      multiply(queries + skipped * head_dim, head_dim, keys + i, kBlock, logits + skipped * kBlock + i, kBlock, seen,
               head_dim, false);
    for (int64_t r = skipped; r < rows; ++r) {
      int64_t position = tile.position + r / group;
      fold_row(s, logits + r * kBlock, at, position, end, tops + r, totals + r, sums + r * padded, padded);
    }
    for (int64_t h = 0; h < padded; h += kPanel)
      multiply(logits + skipped * kBlock, kBlock, values + h, padded, sums + skipped * padded + h, padded, seen, kBlock,
               true);
  }
  for (int64_t r = 0; r < rows; ++r) {
    Q* to = out + ((tile.token + r / group) * s.heads + tile.head * group + r % group) * head_dim;
    float scale = totals[r] > 0.0f ? 1.0f / totals[r] : 0.0f;
    for (int64_t h = 0; h < head_dim; ++h) put(to + h, sums[r * padded + h] * scale);
  }
}

template <typename Q, typename C>
void prefill(ffi::ThreadPool pool, const Shape& s, const Step& step, const Cache<C>& cache, const Q* q, Q* out) {
  std::vector<Tile> tiles;
  int64_t width = std::max<int64_t>(kTileRows / s.group(), 1);
  int64_t last_row = std::min<int64_t>(step.distribution[2], s.rows);
  for (int64_t row = step.distribution[0]; row < last_row; ++row) {
    int64_t start = step.starts[row], length = step.starts[row + 1] - start, position = step.kv_lens[row] - length;
    for (int64_t done = 0; done < length; done += width)
      for (int64_t head = 0; head < s.kv_heads; ++head)
        tiles.push_back({row, head, start + done, std::min(width, length - done), position + done});
  }
  // The longest first, so that the threads end together.
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& a, const Tile& b) { return a.position + a.count > b.position + b.count; });
  parallel_for(pool, tiles.size(), [&](int64_t i) { attend_tile(s, step, cache, q, tiles[i], out); });
}

template <typename Q, typename C>
void run(ffi::ThreadPool pool, const Shape& s, const Step& step, bool writes, const void* q, const void* k,
         const void* v, void* layer, void* out) {
  Cache<C> cache{static_cast<C*>(layer), &s};
  int64_t num_tokens = std::clamp<int64_t>(step.starts[s.rows], 0, s.tokens);
  if (writes) write(s, step, cache, static_cast<const Q*>(k), static_cast<const Q*>(v), num_tokens);
  Q* to = static_cast<Q*>(out);
  decode(pool, s, step, cache, static_cast<const Q*>(q), to);
  prefill(pool, s, step, cache, static_cast<const Q*>(q), to);
  std::fill(to + num_tokens * s.heads * s.head_dim, to + s.tokens * s.heads * s.head_dim, Q(0));
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer kv,
                     ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> page_tables,
                     ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::S32> distribution,
                     ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> token_rows, ffi::Buffer<ffi::F32> sinks,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> kv_out, float scale, int64_t window,
                     float soft_cap, bool has_sinks, bool writes) {
  if (kv.untyped_data() != kv_out->untyped_data())
    return ffi::Error(ffi::ErrorCode::kInternal, "the pages are not updated in place");
  auto q_dims = q.dimensions(), kv_dims = kv.dimensions(), table_dims = page_tables.dimensions();
  Shape s{q_dims[0],  q_dims[1],     kv_dims[3], q_dims[2], table_dims[0], table_dims[1],
          kv_dims[1], kv_dims[4],    scale,      soft_cap,  window,        has_sinks ? sinks.typed_data() : nullptr};
  Step step{kv_lens.typed_data(),      page_tables.typed_data(), query_starts.typed_data(),
            distribution.typed_data(), positions.typed_data(),   token_rows.typed_data()};
  bool exact_q = q.element_type() == ffi::F32, exact_kv = kv.element_type() == ffi::F32;
  int64_t item = exact_kv ? 4 : 2, layer_size = s.num_pages * 2 * s.kv_heads * s.page_size * s.head_dim;
  int64_t index = std::clamp<int64_t>(layer.typed_data()[0], 0, kv_dims[0] - 1);
  void* pages = static_cast<char*>(kv_out->untyped_data()) + index * layer_size * item;
  auto* chosen = exact_q ? (exact_kv ? run<float, float> : run<float, uint16_t>)
                         : (exact_kv ? run<uint16_t, float> : run<uint16_t, uint16_t>);
  chosen(pool, s, step, writes, q.untyped_data(), k.untyped_data(), v.untyped_data(), pages, out->untyped_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace native

XLA_FFI_DEFINE_HANDLER_SYMBOL(NativeAttention, native::attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("has_sinks")
                                  .Attr<bool>("writes"));
