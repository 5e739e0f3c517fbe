// Sums of attention to pages, of all rows and heads; see `page_kernel.py` for the arguments.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

template <size_t rank>
using Floats = ffi::Buffer<ffi::F32, rank>;
template <size_t rank>
using Ints = ffi::Buffer<ffi::S32, rank>;
template <size_t rank>
using FloatsOut = ffi::Result<ffi::Buffer<ffi::F32, rank>>;

// Numbers that are computed together. Where registers are narrower, the compiler takes several.
constexpr int64_t kWidth = 16;
typedef float Vector __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVector __attribute__((vector_size(4 * kWidth)));
// Queries whose sums are in registers together.
constexpr int64_t kTile = 8;
// Keys whose scores are held at a time, and the room for those of a query: a vector may end later.
constexpr int64_t kBlock = 256, kSpan = kBlock + kWidth;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

Vector Load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

void Store(const Vector& x, float* to) { std::memcpy(to, &x, sizeof(x)); }

int64_t RoundedUp(int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; }

// Exponentials of x <= 0; 0 below e^-85. With n, the whole number next to x / ln 2, e^x is 2^n
// times the series of e^r to r^7, where r = x - n ln 2 is at most ln 2 / 2.
Vector Exp(const Vector& x) {
  const Vector bound = x < -85.0f ? Vector{} - 85.0f : x;
  const IntVector n = __builtin_convertvector(bound * 1.44269504f - 0.5f, IntVector);
  const Vector r = bound - __builtin_convertvector(n, Vector) * 0.693147181f;
  Vector sum = r * (1.0f / 5040) + 1.0f / 720;
  for (float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) sum = sum * r + term;
  // A float that is a power of 2 has its exponent, plus 127, above the 23 bits of its fraction.
  const IntVector bits = (n + 127) << 23;
  Vector power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -85.0f ? Vector{} : sum * power;
}

// Adds a [rows, size] times b [size, kWidth] to c [rows, kWidth]; strides are those of rows.
template <int64_t rows>
void AddTile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t size,
             float* c, int64_t c_stride) {
  Vector sums[rows];
  for (int64_t row = 0; row < rows; ++row) sums[row] = Load(c + row * c_stride);
  for (int64_t i = 0; i < size; ++i) {
    const Vector factor = Load(b + i * b_stride);
    for (int64_t row = 0; row < rows; ++row) sums[row] += a[row * a_stride + i] * factor;
  }
  for (int64_t row = 0; row < rows; ++row) Store(sums[row], c + row * c_stride);
}

void AddProduct(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                int64_t size, float* c, int64_t c_stride) {
  for (; rows >= kTile; rows -= kTile, a += kTile * a_stride, c += kTile * c_stride) {
    AddTile<kTile>(a, a_stride, b, b_stride, size, c, c_stride);
  }
  for (; rows > 0; --rows, a += a_stride, c += c_stride) {
    AddTile<1>(a, a_stride, b, b_stride, size, c, c_stride);
  }
}

struct Call {
  // Of one layer: [pages, heads, page_size, dims].
  const float *query, *key, *value;
  const int32_t *firsts, *lasts, *tables;
  float *peak, *total, *values;
  // Rows `width` at a time share a table.
  int64_t num_tables, width, heads, group, head_dim, value_dim, page_size, pages_a_row;
  std::atomic<int64_t> num_taken{0}, num_done{0};

  int64_t num_parts() const { return num_tables * heads; }

  // The sums of the queries that share a table and the keys of a head, a block of keys at a time.
  void Sum(int64_t part, std::vector<float>& scratch) {
    const int64_t row = part / heads * width, head = part % heads, size = width * group;
    const int64_t first = *std::min_element(firsts + row, firsts + row + width);
    const int64_t end = *std::max_element(lasts + row, lasts + row + width) + 1;
    scratch.assign(size * (head_dim + kSpan + value_dim) + head_dim * kWidth, 0.0f);
    float *queries = scratch.data(), *scores = queries + size * head_dim;
    float *sums = scores + size * kSpan, *block = sums + size * value_dim;
    auto number = [&](int64_t n) { return ((row + n / group) * heads + head) * group + n % group; };

    for (int64_t n = 0; n < size; ++n) {
      std::copy_n(query + number(n) * head_dim, head_dim, queries + n * head_dim);
      // Finite: of a row that sees nothing, exp(peak - peak) is 1.
      peak[number(n)] = -1e30f, total[number(n)] = 0.0f;
    }
    for (int64_t start = first, next; start < end; start = next) {
      next = std::min(end, (start / kBlock + 1) * kBlock);
      std::fill_n(scores, size * kSpan, 0.0f);
      EachPage(start, next, part, key, head_dim, [&](int64_t at, int64_t num, auto* keys) {
        Score(size, queries, keys, num, block, scores + at);
      });
      for (int64_t n = 0; n < size; ++n) {
        const int64_t of = row + n / group;
        Weigh(scores + n * kSpan, next - start, firsts[of] - start, lasts[of] + 1 - start,
              peak[number(n)], total[number(n)], sums + n * value_dim);
      }
      EachPage(start, next, part, value, value_dim, [&](int64_t at, int64_t num, auto* all) {
        for (int64_t d = 0; d < value_dim; d += kWidth) {
          AddProduct(size, scores + at, kSpan, all + d, value_dim, num, sums + d, value_dim);
        }
      });
    }
    for (int64_t n = 0; n < size; ++n) {
      std::copy_n(sums + n * value_dim, value_dim, values + number(n) * value_dim);
    }
  }

  // Calls f with the first position that is left of [start, end), after `start`; how many are left
  // of its page; and their vectors.
  template <typename F>
  void EachPage(int64_t start, int64_t end, int64_t part, const float* pages, int64_t dims,
                F f) const {
    const int32_t* table = tables + part / heads * pages_a_row;
    for (int64_t at = start, next; at < end; at = next) {
      const int64_t page = at / page_size, place = table[page] * heads + part % heads;
      next = std::min(end, (page + 1) * page_size);
      f(at - start, next - at, pages + (place * page_size + at % page_size) * dims);
    }
  }

  // Adds the scores of keys to sums that are 0; `block` is for [head_dim, kWidth].
  void Score(int64_t size, const float* queries, const float* keys, int64_t num, float* block,
             float* scores) const {
    if (size < kTile) {
      for (int64_t n = 0; n < size; ++n) {
        for (int64_t i = 0; i < num; ++i) {
          const float *q = queries + n * head_dim, *k = keys + i * head_dim;
          float sum = 0.0f;
          for (int64_t d = 0; d < head_dim; ++d) sum += q[d] * k[d];
          scores[n * kSpan + i] = sum;
        }
      }
      return;
    }
    for (; num > 0; num -= kWidth, keys += kWidth * head_dim, scores += kWidth) {
      // Zeros in place of keys that there are not, so that later scores stay 0.
      if (num < kWidth) std::fill_n(block, head_dim * kWidth, 0.0f);
      for (int64_t i = 0; i < std::min(num, kWidth); ++i) {
        for (int64_t d = 0; d < head_dim; ++d) block[d * kWidth + i] = keys[i * head_dim + d];
      }
      AddProduct(size, queries, head_dim, block, kWidth, head_dim, scores, kSpan);
    }
  }

  // Makes the scores of a block weights, 0 outside of [first, end), and updates the sums of a query
  // by the largest score that it has had.
  void Weigh(float* scores, int64_t size, int64_t first, int64_t end, float& peak, float& total,
             float* sums) const {
    std::fill(scores, scores + std::clamp<int64_t>(first, 0, size), -kInfinity);
    end = std::clamp<int64_t>(end, 0, size), size = RoundedUp(size);
    std::fill(scores + end, scores + size, -kInfinity);
    Vector largest = Vector{} + peak, weights = {};
    for (int64_t at = 0; at < size; at += kWidth) {
      const Vector x = Load(scores + at);
      largest = x > largest ? x : largest;
    }
    const float before = peak;
    for (int64_t i = 0; i < kWidth; ++i) peak = std::max(peak, largest[i]);
    for (int64_t at = 0; at < size; at += kWidth) {
      const Vector weight = Exp(Load(scores + at) - peak);
      Store(weight, scores + at);
      weights += weight;
    }
    const float kept = std::exp(before - peak);
    total *= kept;
    for (int64_t i = 0; i < kWidth; ++i) total += weights[i];
    for (int64_t d = 0; d < value_dim; ++d) sums[d] *= kept;
  }

  // Sums what no other thread has taken.
  void Share() {
    std::vector<float> scratch;
    for (;;) {
      const int64_t part = num_taken.fetch_add(1);
      if (part >= num_parts()) return;
      Sum(part, scratch);
      num_done.fetch_add(1, std::memory_order_release);
    }
  }
};

ffi::Error PageSums(ffi::ThreadPool pool, Floats<4> query, Floats<6> key, Floats<6> value,
                    Ints<0> layer, Ints<1> firsts, Ints<1> lasts, Ints<2> tables,
                    FloatsOut<3> peak, FloatsOut<3> total, FloatsOut<4> values) {
  const auto rows = query.dimensions();
  if (value.dimensions()[5] % kWidth != 0) {
    return ffi::Error::InvalidArgument("16 must divide the dims of values");
  }
  auto of_layer = [&](const Floats<6>& pages) {
    const int64_t layers = pages.dimensions()[0];
    return pages.typed_data() + *layer.typed_data() * (pages.element_count() / layers);
  };
  // Tasks may start after this call has returned.
  auto call = std::make_shared<Call>();
  call->query = query.typed_data(), call->key = of_layer(key), call->value = of_layer(value);
  call->firsts = firsts.typed_data(), call->lasts = lasts.typed_data();
  call->tables = tables.typed_data();
  call->peak = peak->typed_data(), call->total = total->typed_data();
  call->values = values->typed_data();
  call->num_tables = tables.dimensions()[0], call->width = rows[0] / call->num_tables;
  call->heads = rows[1], call->group = rows[2], call->head_dim = rows[3];
  call->page_size = key.dimensions()[4], call->value_dim = value.dimensions()[5];
  call->pages_a_row = tables.dimensions()[1];
  for (int64_t n = 1; n < pool.num_threads(); ++n) pool.Schedule([call] { call->Share(); });
  call->Share();
  // Other threads still sum what they have taken; those that have not started have nothing.
  while (call->num_done.load(std::memory_order_acquire) < call->num_parts()) {
    std::this_thread::yield();
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PageSumsHandler, PageSums,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats<4>>()
                                  .Arg<Floats<6>>()
                                  .Arg<Floats<6>>()
                                  .Arg<Ints<0>>()
                                  .Arg<Ints<1>>()
                                  .Arg<Ints<1>>()
                                  .Arg<Ints<2>>()
                                  .Ret<Floats<3>>()
                                  .Ret<Floats<3>>()
                                  .Ret<Floats<4>>());
