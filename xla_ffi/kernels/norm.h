// The residual add and the norm of one row, in a stated order: the same bits wherever the row lies,
// however many rows there are, and however many threads work on it.
//
//   h = round(sum + residual)            sum: the ranks' values, added and rounded as a psum's
//   m = total(h) / hidden                LayerNorm only; else h - m is h
//   v = total((h - m)^2) / hidden
//   y = (h - m) * (1 / sqrt(v + eps))
//   result = round(y * (weight + offset) + bias)
//
// All of it is float32, and each operation rounds: no multiply-add is fused. `round` rounds to the
// element type. The offset is added only if it is not 0, and the bias only if there is one.
//
// `total` adds neighbours: values 0 and 1, 2 and 3, and so on; then the sums in the same way, until
// one is left. Zeros fill up a row to a power of 2. A total of 0 is +0.
//
// That order suits threads. Packs are 16 bytes of a row, and thread t of T, a power of 2, has packs
// t, t + T, t + 2 T, and so on. So the first additions are within a pack, the next ones within a
// warp, then between warps, and the last ones between a thread's packs.
#pragma once

#include "algorithms.h"
#include "memory.h"
#include "types.h"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace jax_intranode {

// One operation: rows of `hidden` elements.
struct NormCall {
  const void* x;         // one-shot, two-shot: `rows` rows; reduce-scatter: a shard for each rank
  const void* residual;  // `rows` rows, as are both results
  const void* weight;    // `hidden` elements
  const void* bias;      // the same, or null
  void* normed;
  void* new_residual;
  size_t shard_bytes;  // reduce-scatter: from a shard of x to the next
  size_t rows;
  uint32_t hidden;
  float eps;
  float weight_offset;
  Algorithm algorithm;
  NormProtocol protocol;
  bool layer_norm;          // else RMSNorm
  bool float32_parameters;  // weight and bias are float32; else of the element type
  bool aligned;             // all rows and parameters begin and end at multiples of 16 bytes
};

// float32 arithmetic that no compiler contracts. The host's is compiled with -ffp-contract=off.
#if defined(__CUDACC__)
JIN_FN float Plus(float a, float b) { return __fadd_rn(a, b); }
JIN_FN float Times(float a, float b) { return __fmul_rn(a, b); }
JIN_FN float Over(float a, float b) { return __fdiv_rn(a, b); }
JIN_FN float Root(float a) { return __fsqrt_rn(a); }
#else
JIN_FN float Plus(float a, float b) { return a + b; }
JIN_FN float Times(float a, float b) { return a * b; }
JIN_FN float Over(float a, float b) { return a / b; }
JIN_FN float Root(float a) { return std::sqrt(a); }
#endif

// Adds v[0 ... count - 1] in pairs of neighbours. `count` is a power of 2, at most kMost; v is
// overwritten.
template <uint32_t kMost>
JIN_FN float TotalOfPairs(float (&v)[kMost], uint32_t count) {
  JIN_UNROLL
  for (uint32_t width = kMost / 2; width > 0; width /= 2) {
    if (width < count) {
      JIN_UNROLL
      for (uint32_t k = 0; k < width; ++k) v[k] = Plus(v[2 * k], v[2 * k + 1]);
    }
  }
  return v[0];
}

// The rows of a call. `Thread` is the context of group.h and also has
//   kRowThreads        the most threads that work on a row
//   Total(v, count)    adds the first `count` values of all threads of the block in pairs, those of
//                      pack 0, 1, 2 and so on being neighbours; each thread gets the result
//
// `kAligned`: all rows and parameters begin at multiples of 16 bytes, and rows end there.
template <class Type, bool kAligned>
struct NormRows {
  static constexpr uint32_t kLanes = sizeof(Pack) / Type::kItemBytes;
  // The most packs of a row that a thread has.
  template <class Thread>
  static constexpr uint32_t kRowPacks = kMaxHidden / kLanes / Thread::kRowThreads;

  JIN_FN static uint32_t RowBytes(const NormCall& c) { return c.hidden * Type::kItemBytes; }
  JIN_FN static uint32_t Packs(const NormCall& c) {
    return (RowBytes(c) + sizeof(Pack) - 1) / sizeof(Pack);
  }

  // Pack k of a row of rank r's shard of x; zeros where there is no such row.
  JIN_FN static Pack X(const NormCall& c, int r, size_t row, uint32_t k) {
    if (row >= c.rows) return Pack{};
    return Load(c, static_cast<const char*>(c.x) + r * c.shard_bytes, row, k);
  }
  JIN_FN static Pack Residual(const NormCall& c, size_t row, uint32_t k) {
    return Load(c, c.residual, row, k);
  }

  // The packs of this thread in a row: `count` of them, rounded up to a power of 2.
  template <class Thread>
  JIN_FN static uint32_t Count(const Thread& t, const NormCall& c) {
    uint32_t count = 1;
    while (count * t.Threads() < Packs(c)) count *= 2;
    return count;
  }

  // Asks for the parameters, which every row needs, before the first wait.
  template <class Thread>
  JIN_FN static void PrefetchParameters(const Thread& t, const NormCall& c) {
    constexpr uint32_t kLine = 128;
    const uint32_t bytes = c.hidden * (c.float32_parameters ? 4 : Type::kItemBytes);
    for (uint32_t at = t.Thread() * kLine; at < bytes; at += t.Threads() * kLine) {
      Prefetch(static_cast<const char*>(c.weight) + at);
      if (c.bias != nullptr) Prefetch(static_cast<const char*>(c.bias) + at);
    }
  }

  // Adds the residual to a row and normalizes it. `h` holds this thread's packs of the sum, and
  // `residual` those of the residual. All threads of the block call it.
  template <class Thread>
  JIN_FN static void Finish(Thread& t, const NormCall& c, size_t row, Pack (&h)[kRowPacks<Thread>],
                            const Pack (&residual)[kRowPacks<Thread>]) {
    constexpr uint32_t kMost = kRowPacks<Thread>;
    const uint32_t count = Count(t, c);
    const float hidden = static_cast<float>(c.hidden);
    float of_packs[kMost];
    JIN_UNROLL
    for (uint32_t j = 0; j < kMost; ++j) {
      if (j >= count) break;
      const uint32_t k = t.Thread() + j * t.Threads();
      of_packs[j] = 0;
      if (k < Packs(c)) {
        typename Type::Sum sum;
        Type::Start(&sum, h[j]);
        Type::Add(&sum, residual[j]);
        h[j] = Type::Round(sum);
        Store(c, c.new_residual, row, k, h[j]);
        of_packs[j] = c.layer_norm ? TotalOfPack(h[j]) : SquaresOfPack(c, k, h[j], 0);
      }
    }
    float mean = 0;
    if (c.layer_norm) {
      mean = Over(Plus(t.Total(of_packs, count), 0), hidden);
      JIN_UNROLL
      for (uint32_t j = 0; j < kMost; ++j) {
        if (j >= count) break;
        const uint32_t k = t.Thread() + j * t.Threads();
        of_packs[j] = k < Packs(c) ? SquaresOfPack(c, k, h[j], mean) : 0;
      }
    }
    const float variance = Over(Plus(t.Total(of_packs, count), 0), hidden);
    const float scale = Over(1, Root(Plus(variance, c.eps)));
    JIN_UNROLL
    for (uint32_t j = 0; j < kMost; ++j) {
      if (j >= count) break;
      const uint32_t k = t.Thread() + j * t.Threads();
      if (k < Packs(c)) Store(c, c.normed, row, k, Scaled(c, k, h[j], mean, scale));
    }
  }

 private:
  // Pack k of `bytes` bytes.
  JIN_FN static Pack LoadPack(const void* from, size_t bytes, uint32_t k) {
    if constexpr (kAligned) return static_cast<const Pack*>(from)[k];
    return LoadBytes(static_cast<const unsigned char*>(from) + k * sizeof(Pack),
                     bytes - k * sizeof(Pack));
  }
  JIN_FN static Pack Load(const NormCall& c, const void* rows, size_t row, uint32_t k) {
    return LoadPack(static_cast<const char*>(rows) + row * RowBytes(c), RowBytes(c), k);
  }
  JIN_FN static void Store(const NormCall& c, void* rows, size_t row, uint32_t k, const Pack& p) {
    char* const to = static_cast<char*>(rows) + row * RowBytes(c);
    if constexpr (kAligned) {
      reinterpret_cast<Pack*>(to)[k] = p;
    } else {
      StoreBytes(reinterpret_cast<unsigned char*>(to) + k * sizeof(Pack),
                 RowBytes(c) - k * sizeof(Pack), p);
    }
  }

  JIN_FN static float TotalOfPack(const Pack& p) {
    typename Type::Sum v;
    Type::Start(&v, p);
    return TotalOfPairs<kLanes>(v.lane, kLanes);
  }

  // What lies past the end of a row has no square.
  JIN_FN static float SquaresOfPack(const NormCall& c, uint32_t k, const Pack& p, float mean) {
    typename Type::Sum v;
    Type::Start(&v, p);
    const uint32_t lanes = c.hidden - k * kLanes;
    JIN_UNROLL
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const float d = c.layer_norm ? Plus(v.lane[lane], -mean) : v.lane[lane];
      v.lane[lane] = kAligned || lane < lanes ? Times(d, d) : 0;
    }
    return TotalOfPairs<kLanes>(v.lane, kLanes);
  }

  // Pack k of the weight or the bias, as float32.
  JIN_FN static void LoadParameters(const NormCall& c, const void* from, uint32_t k,
                                    typename Type::Sum* v) {
    if (!c.float32_parameters || Type::kItemBytes == 4) {
      Type::Start(v, LoadPack(from, RowBytes(c), k));
      return;
    }
    JIN_UNROLL
    for (uint32_t part = 0; part < kLanes / 4; ++part) {
      const uint32_t at = k * (kLanes / 4) + part;
      const Pack p =
          kAligned || at * 4 < c.hidden ? LoadPack(from, size_t{c.hidden} * 4, at) : Pack{};
      memcpy(&v->lane[4 * part], &p, sizeof p);
    }
  }

  JIN_FN static Pack Scaled(const NormCall& c, uint32_t k, const Pack& h, float mean, float scale) {
    typename Type::Sum v, weight, bias;
    Type::Start(&v, h);
    LoadParameters(c, c.weight, k, &weight);
    if (c.bias != nullptr) LoadParameters(c, c.bias, k, &bias);
    JIN_UNROLL
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const float d = c.layer_norm ? Plus(v.lane[lane], -mean) : v.lane[lane];
      const float w =
          c.weight_offset != 0 ? Plus(weight.lane[lane], c.weight_offset) : weight.lane[lane];
      const float y = Times(Times(d, scale), w);
      v.lane[lane] = c.bias != nullptr ? Plus(y, bias.lane[lane]) : y;
    }
    return Type::Round(v);
  }
};

}  // namespace jax_intranode
