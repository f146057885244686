// Element types: how a pack of each is summed, rounded and sent.
//
// No header of CUDA's here: cuda_bf16.h and cuda_fp16.h take longer to compile than the kernels.
//
// Sums run in rank order, start from rank 0's value and are rounded once: bf16, f16 and f32 in
// f32, f64 in f64, integers in themselves (wrapping). Starting from a value, not from zero, keeps
// the sign of a sum of negative zeros. A type has
//   Sum              the running sum of one pack
//   Start, Add       begin with a pack, add a pack
//   Round            the sum, rounded to the type
//   Packets          how it travels (packets.h)
//   Sendable(pack)   the pack, without words that its packets can't carry
// Bodies reach it through WithType() and SendableOf(), because on GPUs it may be AnyBare or
// AnyFlagged.
#pragma once

#include <type_traits>

#include "algorithms.h"
#include "packets.h"

#if !defined(__CUDACC__)
#include <bit>
#endif

namespace jax_intranode {

// Replaces words of all ones by `nan`, another NaN of the type.
JIN_PACK_FN Pack WithoutEmptyWords(Pack p, uint32_t nan) {
#if defined(JIN_VECTORS)
  const __m128i v = VectorOf(p), is_empty = _mm_cmpeq_epi32(v, _mm_set1_epi32(kEmpty));
  return PackOf(_mm_andnot_si128(_mm_and_si128(is_empty, _mm_set1_epi32(~nan)), v));
#else
  JIN_UNROLL
  for (int k = 0; k < 4; ++k) p.word[k] = p.word[k] == kEmpty ? nan : p.word[k];
  return p;
#endif
}

#if !defined(__CUDACC__)
inline uint16_t RoundToBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
#endif

struct F32 {
  static constexpr int kItemBytes = 4;
  static constexpr uint32_t kNaN = 0x7FFFFFFF;
  using Packets = BarePackets;
  struct Sum {
    float lane[4];
  };
  JIN_FN static float Lane(const Pack& p, int k) {
    float x;
    memcpy(&x, &p.word[k], 4);
    return x;
  }
  JIN_FN static void Start(Sum* s, const Pack& p) {
    JIN_UNROLL
    for (int k = 0; k < 4; ++k) s->lane[k] = Lane(p, k);
  }
  JIN_FN static void Add(Sum* s, const Pack& p) {
    JIN_UNROLL
    for (int k = 0; k < 4; ++k) s->lane[k] += Lane(p, k);
  }
  JIN_FN static Pack Round(const Sum& s) {
    Pack p;
    memcpy(&p, s.lane, 16);
    return p;
  }
  JIN_PACK_FN static Pack Sendable(const Pack& p) { return WithoutEmptyWords(p, kNaN); }
};

// bf16 and f16. `Format` turns a word into two floats and back.
template <class Format>
struct TwoByteFloat {
  static constexpr int kItemBytes = 2;
  static constexpr uint32_t kNaN = 0x7FFF7FFF;  // 0x7FFF is a NaN in both formats
  using Packets = BarePackets;
  struct Sum {
    float lane[8];
  };
  JIN_FN static void Start(Sum* s, const Pack& p) {
    JIN_UNROLL
    for (int k = 0; k < 4; ++k) Format::Unpack(p.word[k], &s->lane[2 * k], &s->lane[2 * k + 1]);
  }
  JIN_FN static void Add(Sum* s, const Pack& p) {
    JIN_UNROLL
    for (int k = 0; k < 4; ++k) {
      float low, high;
      Format::Unpack(p.word[k], &low, &high);
      s->lane[2 * k] += low;
      s->lane[2 * k + 1] += high;
    }
  }
  JIN_FN static Pack Round(const Sum& s) {
    Pack p;
    JIN_UNROLL
    for (int k = 0; k < 4; ++k) p.word[k] = Format::Round(s.lane[2 * k], s.lane[2 * k + 1]);
    return p;
  }
  JIN_FN static uint32_t RoundPair(float low, float high) { return Format::Round(low, high); }
  JIN_FN static void UnpackPair(uint32_t word, float* low, float* high) {
    Format::Unpack(word, low, high);
  }
  JIN_PACK_FN static Pack Sendable(const Pack& p) { return WithoutEmptyWords(p, kNaN); }
};

struct Bf16Format {
  JIN_FN static void Unpack(uint32_t word, float* low, float* high) {
    const uint32_t l = word << 16, h = word & 0xFFFF0000u;
    memcpy(low, &l, 4);
    memcpy(high, &h, 4);
  }
  JIN_FN static uint32_t Round(float low, float high) {
#if defined(__CUDACC__)
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return RoundToBf16(low) | static_cast<uint32_t>(RoundToBf16(high)) << 16;
#endif
  }
};

struct F16Format {
  JIN_FN static void Unpack(uint32_t word, float* low, float* high) {
#if defined(__CUDACC__)
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(*low), "=f"(*high)
        : "r"(word));
#else
    *low = std::bit_cast<_Float16>(static_cast<uint16_t>(word));
    *high = std::bit_cast<_Float16>(static_cast<uint16_t>(word >> 16));
#endif
  }
  JIN_FN static uint32_t Round(float low, float high) {
#if defined(__CUDACC__)
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return std::bit_cast<uint16_t>(static_cast<_Float16>(low)) |
           static_cast<uint32_t>(std::bit_cast<uint16_t>(static_cast<_Float16>(high))) << 16;
#endif
  }
};

using BF16 = TwoByteFloat<Bf16Format>;
using F16 = TwoByteFloat<F16Format>;

// f64 travels flagged: one of the two words of a finite double can be all ones.
struct F64 {
  static constexpr int kItemBytes = 8;
  using Packets = FlaggedPackets;
  struct Sum {
    double lane[2];
  };
  JIN_FN static void Start(Sum* s, const Pack& p) { memcpy(s->lane, &p, 16); }
  JIN_FN static void Add(Sum* s, const Pack& p) {
    double x[2];
    memcpy(x, &p, 16);
    s->lane[0] += x[0];
    s->lane[1] += x[1];
  }
  JIN_FN static Pack Round(const Sum& s) {
    Pack p;
    memcpy(&p, s.lane, 16);
    return p;
  }
  JIN_PACK_FN static Pack Sendable(const Pack& p) { return p; }
};

// Integers wrap, so signed and unsigned ones share a sum. `Lanes::Add` adds two words' lanes.
template <class Lanes>
struct Integer {
  using Item = typename Lanes::Item;
  static constexpr int kItemBytes = Lanes::kItemBytes;
  using Packets = FlaggedPackets;
  using Sum = Pack;
  JIN_FN static void Start(Sum* s, const Pack& p) { *s = p; }
  JIN_FN static void Add(Sum* s, const Pack& p) { Lanes::Add(s, p); }
  JIN_FN static Pack Round(const Sum& s) { return s; }
  JIN_PACK_FN static Pack Sendable(const Pack& p) { return p; }
};

struct Lanes8 {
  using Item = int8_t;
  static constexpr int kItemBytes = 1;
  // Four bytes in a word: the top bits are added apart, so that no carry leaves its byte.
  JIN_FN static void Add(Pack* s, const Pack& p) {
    JIN_UNROLL
    for (int k = 0; k < 4; ++k) {
      const uint32_t a = s->word[k], b = p.word[k];
      s->word[k] = ((a & 0x7F7F7F7Fu) + (b & 0x7F7F7F7Fu)) ^ ((a ^ b) & 0x80808080u);
    }
  }
};

struct Lanes32 {
  using Item = int32_t;
  static constexpr int kItemBytes = 4;
  JIN_FN static void Add(Pack* s, const Pack& p) {
    JIN_UNROLL
    for (int k = 0; k < 4; ++k) s->word[k] += p.word[k];
  }
};

struct Lanes64 {
  using Item = int64_t;
  static constexpr int kItemBytes = 8;
  JIN_FN static void Add(Pack* s, const Pack& p) {
    uint64_t a[2], b[2];
    memcpy(a, s, 16);
    memcpy(b, &p, 16);
    a[0] += b[0];
    a[1] += b[1];
    memcpy(s, a, 16);
  }
};

using I8 = Integer<Lanes8>;
using I32 = Integer<Lanes32>;
using I64 = Integer<Lanes64>;

// Their sums are those of signed ones; only maxima and minima tell them apart.
struct U8 : I8 {
  using Item = uint8_t;
};
struct U32 : I32 {
  using Item = uint32_t;
};
struct U64 : I64 {
  using Item = uint64_t;
};
template <class Type>
constexpr bool kIsUnsigned =
    std::is_same_v<Type, U8> || std::is_same_v<Type, U32> || std::is_same_v<Type, U64>;

// The larger or the smaller of two numbers. A NaN is both; +0 is larger than -0.
template <bool kMax, class Number>
JIN_FN Number ExtremeOf(Number a, Number b) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<Number, float>) {
    float x;
    if constexpr (kMax) {
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    } else {
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    }
    return x;
  }
#endif
  if constexpr (std::is_floating_point_v<Number>) {
    if (a != a || b != b) return a + b;
    if (a == b) {
      uint64_t bits = 0;
      memcpy(&bits, &a, sizeof a);
      const bool a_is_negative = bits >> (8 * sizeof a - 1) != 0;
      return a_is_negative == kMax ? b : a;
    }
  }
  return (a > b) == kMax ? a : b;
}

// A type whose packs are not summed: the largest or the smallest element of all ranks counts. The
// folds of lax.max and lax.min in rank order have the same value.
template <class Type, bool kMax>
struct Extreme : Type {
  using Sum = typename Type::Sum;
  JIN_FN static void Add(Sum* s, const Pack& p) {
    if constexpr (std::is_same_v<Sum, Pack>) {
      using Item = typename Type::Item;
      Item a[16 / sizeof(Item)], b[16 / sizeof(Item)];
      memcpy(a, s, 16);
      memcpy(b, &p, 16);
      JIN_UNROLL
      for (size_t k = 0; k < 16 / sizeof(Item); ++k) a[k] = ExtremeOf<kMax>(a[k], b[k]);
      memcpy(s, a, 16);
    } else {
      Sum other;
      Type::Start(&other, p);
      constexpr int kLanes = sizeof(Sum) / sizeof(s->lane[0]);
      JIN_UNROLL
      for (int k = 0; k < kLanes; ++k) s->lane[k] = ExtremeOf<kMax>(s->lane[k], other.lane[k]);
    }
  }
};

// The type as which operations that only copy take elements, so that they are compiled once. The
// NaN that BF16 sends in place of an empty word is one of each type that travels in bare packets.
template <class Type>
using CopiedAs = std::conditional_t<std::is_same_v<typename Type::Packets, BarePackets>, BF16, I8>;

#if defined(__CUDACC__)
// Any type of the same packets: the thread tells which, because each kernel costs build time.
// Visit() calls `with` with the type, on the host or in a kernel.
struct AnyBare {
  using Packets = BarePackets;
  using Sum = void;  // that of the type
  JIN_FN static Pack Sendable(const Pack& p, ElementType type) {
    return WithoutEmptyWords(p, type == ElementType::kF32 ? F32::kNaN : BF16::kNaN);
  }
#pragma nv_exec_check_disable
  template <class With>
  JIN_HOST_FN static auto Visit(ElementType type, const With& with) {
    return type == ElementType::kF32    ? with(F32{})
           : type == ElementType::kBF16 ? with(BF16{})
                                        : with(F16{});
  }
};

struct AnyFlagged {
  using Packets = FlaggedPackets;
  using Sum = void;
  JIN_FN static Pack Sendable(const Pack& p, ElementType) { return p; }
#pragma nv_exec_check_disable
  template <class With>
  JIN_HOST_FN static auto Visit(ElementType type, const With& with) {
    return type == ElementType::kF64   ? with(F64{})
           : type == ElementType::kI8  ? with(I8{})
           : type == ElementType::kI32 ? with(I32{})
                                       : with(I64{});
  }
};

template <bool kMax>
struct Extreme<AnyBare, kMax> : AnyBare {
#pragma nv_exec_check_disable
  template <class With>
  JIN_HOST_FN static auto Visit(ElementType type, const With& with) {
    return AnyBare::Visit(type, [&](auto of) { return with(Extreme<decltype(of), kMax>{}); });
  }
};

template <bool kMax>
struct Extreme<AnyFlagged, kMax> : AnyFlagged {
#pragma nv_exec_check_disable
  template <class With>
  JIN_HOST_FN static auto Visit(ElementType type, const With& with) {
    return type == ElementType::kU8    ? with(Extreme<U8, kMax>{})
           : type == ElementType::kU32 ? with(Extreme<U32, kMax>{})
           : type == ElementType::kU64 ? with(Extreme<U64, kMax>{})
                                       : AnyFlagged::Visit(type, [&](auto of) {
                                           return with(Extreme<decltype(of), kMax>{});
                                         });
  }
};
#endif

template <class Type>
constexpr bool kThreadTellsType = std::is_void_v<typename Type::Sum>;

template <class Type, class Thread, class With>
JIN_FN auto WithType(const Thread& t, const With& with) {
  if constexpr (kThreadTellsType<Type>) {
    return Type::Visit(t.type(), with);
  } else {
    return with(Type{});
  }
}
template <class Type, class Thread>
JIN_FN Pack SendableOf(const Thread& t, const Pack& p) {
  if constexpr (kThreadTellsType<Type>) {
    return Type::Sendable(p, t.type());
  } else {
    return Type::Sendable(p);
  }
}

#define JIN_X(type, item_bytes, packet_bytes) \
  static_assert(type::kItemBytes == item_bytes && type::Packets::kBytes == packet_bytes);
JIN_ELEMENT_TYPES(JIN_X)
#undef JIN_X

}  // namespace jax_intranode
