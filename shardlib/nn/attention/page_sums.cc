// Sums of attention to pages, of all rows and heads; see `page_kernel.py` for the arguments.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
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

struct Call {
  // Of one layer: [pages, heads, page_size, dims].
  const float *query, *key, *value;
  const int32_t *firsts, *lasts, *tables;
  float *peak, *total, *values;
  int64_t rows, heads, group, head_dim, value_dim, page_size, pages_a_row;
  std::atomic<int64_t> num_taken{0}, num_done{0};

  // The sums of the queries of a row that share the keys of a head.
  void Sum(int64_t number, float* scores) {
    const int64_t row = number / heads, head = number % heads;
    const int64_t first = firsts[row], end = lasts[row] + 1;
    const int32_t* table = tables + row * pages_a_row;
    // Calls f with each position that the row sees, and its place among those of all pages.
    auto each = [&](auto f) {
      for (int64_t at = first, next; at < end; at = next) {
        const int64_t page = at / page_size;
        const int64_t start = (table[page] * heads + head - page) * page_size;
        next = std::min(end, (page + 1) * page_size);
        for (int64_t i = at; i < next; ++i) f(i, start + i);
      }
    };
    for (int64_t g = 0; g < group; ++g) {
      const int64_t n = number * group + g;
      const float* q = query + n * head_dim;
      // Finite: of a row that sees nothing, exp(peak - peak) is 1.
      float largest = -1e30f, sum = 0.0f;
      each([&](int64_t at, int64_t place) {
        const float* k = key + place * head_dim;
        float score = 0.0f;
        for (int64_t d = 0; d < head_dim; ++d) score += q[d] * k[d];
        scores[at] = score;
        largest = std::max(largest, score);
      });
      for (int64_t at = first; at < end; ++at) {
        scores[at] = std::exp(scores[at] - largest);
        sum += scores[at];
      }
      float* out = values + n * value_dim;
      std::fill(out, out + value_dim, 0.0f);
      each([&](int64_t at, int64_t place) {
        const float* v = value + place * value_dim;
        for (int64_t d = 0; d < value_dim; ++d) out[d] += scores[at] * v[d];
      });
      peak[n] = largest;
      total[n] = sum;
    }
  }

  // Sums what no other thread has taken.
  void Share() {
    std::vector<float> scores;
    for (;;) {
      const int64_t number = num_taken.fetch_add(1);
      if (number >= rows * heads) return;
      scores.resize(pages_a_row * page_size);
      Sum(number, scores.data());
      num_done.fetch_add(1, std::memory_order_release);
    }
  }
};

ffi::Error PageSums(ffi::ThreadPool pool, Floats<4> query, Floats<6> key, Floats<6> value,
                    Ints<0> layer, Ints<1> firsts, Ints<1> lasts, Ints<2> tables,
                    FloatsOut<3> peak, FloatsOut<3> total, FloatsOut<4> values) {
  const auto rows = query.dimensions();
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
  call->rows = rows[0], call->heads = rows[1], call->group = rows[2], call->head_dim = rows[3];
  call->page_size = key.dimensions()[4], call->value_dim = value.dimensions()[5];
  call->pages_a_row = tables.dimensions()[1];
  for (int64_t n = 1; n < pool.num_threads(); ++n) pool.Schedule([call] { call->Share(); });
  call->Share();
  // Other threads still sum what they have taken; those that have not started have nothing.
  while (call->num_done.load(std::memory_order_acquire) < call->rows * call->heads) {
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
