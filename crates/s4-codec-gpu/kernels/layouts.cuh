// Every layout, width and residual (docs/format.md), for the composed kernels: a thread splits
// or merges eight consecutive values at a time. The fused kernels have faster code of their own for layout
// `fields` (planes.cuh).
#pragma once

#include "frame.cuh"
#include "rans.cuh"

namespace s4 {

// Stores the first `count` of up to 64 bytes: the reverse of `load_some`.
__device__ __noinline__ void store_some(u8* to, const u32* words, u32 count) {
  for (u32 i = 0; i < count; i++) to[i] = static_cast<u8>(words[i / 4] >> (8 * (i % 4)));
}

// Loads `kBytes` bytes (8, or a multiple of 16), of which `count` exist; `aligned`: to 8 or 16 bytes.
template <int kBytes>
__device__ __forceinline__ void load_group(const u8* from, bool aligned, u32* words, u32 count) {
  if (!aligned || count < kBytes) {
    u32 some[16];
    load_some(from, some, count);
#pragma unroll
    for (int i = 0; i < kBytes / 4; i++) words[i] = some[i];
  } else if (kBytes == 8) {
    const uint2 v = __ldcs(reinterpret_cast<const uint2*>(from));
    words[0] = v.x, words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; i++) {
      const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from) + i);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
}

template <int kBytes>
__device__ __forceinline__ void store_group(u8* to, bool aligned, const u32* words, u32 count) {
  if (!aligned || count < kBytes) {
    u32 some[16];
#pragma unroll
    for (int i = 0; i < kBytes / 4; i++) some[i] = words[i];
    store_some(to, some, count);
  } else if (kBytes == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 16; i++)
      reinterpret_cast<uint4*>(to)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
}

// An unsigned integer of at least `kBytes` bytes.
template <bool kWide>
struct Unsigned {
  typedef u32 Type;
};
template <>
struct Unsigned<true> {
  typedef u64 Type;
};
template <int kBytes>
using Uint = typename Unsigned<(kBytes > 4)>::Type;

// Field `k` of eight fields of `kFieldBytes` each (1, 2, 4, 6, 8), packed.
template <int kFieldBytes, class T>
__device__ __forceinline__ T field(const u32* words, int k) {
  const int bit = 8 * k * kFieldBytes;
  if (kFieldBytes == 8) return static_cast<T>(static_cast<u64>(words[2 * k + 1]) << 32 | words[2 * k]);
  if (kFieldBytes == 6) {
    const u64 low = words[bit / 32], high = words[bit / 32 + 1];
    return static_cast<T>((bit % 32 ? low >> 16 | high << 16 : high << 32 | low) & 0xffffffffffffull);
  }
  const u32 mask = kFieldBytes == 4 ? ~0u : (1u << (8 * kFieldBytes % 32)) - 1;
  return static_cast<T>(words[bit / 32] >> (bit % 32) & mask);
}

// Packs the low `kFieldBytes` bytes of eight values, each shifted right by `shift` bits.
template <int kFieldBytes, class T>
__device__ __forceinline__ void pack(const T* v, int shift, u32* words) {
#pragma unroll
  for (int i = 0; i < 2 * kFieldBytes; i++) words[i] = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int bit = 8 * k * kFieldBytes;
    const u64 wide = v[k] >> shift;
    const u32 low = static_cast<u32>(wide), high = static_cast<u32>(wide >> 32);
    if (kFieldBytes == 8) {
      words[2 * k] = low, words[2 * k + 1] = high;
    } else if (kFieldBytes == 6) {
      words[bit / 32] |= low << (bit % 32);
      words[bit / 32 + 1] |= bit % 32 ? low >> 16 | (high & 0xffff) << 16 : high & 0xffff;
    } else {
      const u32 mask = kFieldBytes == 4 ? ~0u : (1u << (8 * kFieldBytes % 32)) - 1;
      words[bit / 32] |= (low & mask) << (bit % 32);
    }
  }
}

// ---- bits of a value ----

template <int kWidth>
constexpr Uint<kWidth> kAllBits = static_cast<Uint<kWidth>>(~0ull >> (64 - 8 * kWidth));

// Rotated left by one bit: the sign becomes the lowest one.
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> rotated(Uint<kWidth> x) {
  return (x << 1 | x >> (8 * kWidth - 1)) & kAllBits<kWidth>;
}
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> unrotated(Uint<kWidth> x) {
  return (x >> 1 | x << (8 * kWidth - 1)) & kAllBits<kWidth>;
}

// Drops the sign and inserts a zero bit behind the 8 bits that followed it.
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> spread(Uint<kWidth> x) {
  const Uint<kWidth> top = static_cast<Uint<kWidth>>(0xff) << (8 * kWidth - 8);
  return (x << 1 & top) | (x & kAllBits<kWidth> >> 9);
}
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> unspread(Uint<kWidth> x) {
  const Uint<kWidth> top = static_cast<Uint<kWidth>>(0xff) << (8 * kWidth - 8);
  return (x & top) >> 1 | (x & kAllBits<kWidth> >> 9);
}

// Maps a float's bits to an integer of the same order, and back.
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> ordered(Uint<kWidth> x) {
  return x >> (8 * kWidth - 1) & 1 ? x ^ kAllBits<kWidth> >> 1 : x;
}

template <int kWidth>
__device__ __forceinline__ Uint<kWidth> subtract(Uint<kWidth> x, Uint<kWidth> parent) {
  const Uint<kWidth> d = (ordered<kWidth>(x) - ordered<kWidth>(parent)) & kAllBits<kWidth>;
  return (d << 1 ^ (d >> (8 * kWidth - 1) & 1 ? kAllBits<kWidth> : 0)) & kAllBits<kWidth>;
}
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> add(Uint<kWidth> u, Uint<kWidth> parent) {
  const Uint<kWidth> d = u >> 1 ^ (u & 1 ? kAllBits<kWidth> : 0);
  return ordered<kWidth>((d + ordered<kWidth>(parent)) & kAllBits<kWidth>);
}

// ---- groups ----

template <int kWidth>
__device__ __forceinline__ void load_values8(const u8* values, u32 at, u32 left, Uint<kWidth>* v) {
  u32 words[2 * kWidth];
  load_group<8 * kWidth>(values + static_cast<u64>(at) * kWidth, is_aligned(values), words, left * kWidth);
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] = field<kWidth, Uint<kWidth>>(words, k);
}

// Stores one plane's part of a group: fields of `kFieldBytes` from bit `shift` on.
template <int kFieldBytes, class T>
__device__ __forceinline__ void store_field(u8* plane, u32 at, u32 left, const T* v, int shift) {
  if (kFieldBytes == 0) return;
  constexpr int kBytes = kFieldBytes == 0 ? 8 : 8 * kFieldBytes;
  u32 words[kBytes / 4];
  pack<kBytes / 8>(v, shift, words);
  store_group<kBytes>(plane + static_cast<u64>(at) * kFieldBytes, true, words, left * kFieldBytes);
}

// Puts one plane's part of a group into the values.
template <int kFieldBytes, class T>
__device__ __forceinline__ void load_field(const u8* plane, u32 at, u32 left, T* v, int shift) {
  if (kFieldBytes == 0) return;
  constexpr int kBytes = kFieldBytes == 0 ? 8 : 8 * kFieldBytes;
  u32 words[kBytes / 4];
  load_group<kBytes>(plane + static_cast<u64>(at) * kFieldBytes, true, words, left * kFieldBytes);
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] |= field<kBytes / 8, T>(words, k) << shift;
}

template <int kWidth, u32 kLayout>
__device__ __forceinline__ void split_group(Uint<kWidth>* v, u32 at, u32 left, const PlaneSet& to) {
  constexpr int kTop = 8 * kWidth - 8, kRest = kWidth > 2 ? kWidth - 2 : 0;
  if (kLayout == kWhole) {
    store_field<kWidth>(to.at[0], at, left, v, 0);
  } else if (kLayout == kBytes) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) store_field<1>(to.at[i], at, left, v, kTop - 8 * i);
  } else {
    const bool sign = kLayout == kFieldsSign;
    u32 signs = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (static_cast<u32>(k) < left) signs |= static_cast<u32>(v[k] >> (8 * kWidth - 1) & 1) << k;
      v[k] = sign ? spread<kWidth>(v[k]) : rotated<kWidth>(v[k]);
    }
    if (sign) to.at[0][at / 8] = static_cast<u8>(signs);
    store_field<1>(to.at[sign], at, left, v, kTop);
    store_field<1>(to.at[sign + 1], at, left, v, kTop - 8);
    store_field<kRest>(to.at[sign + 2], at, left, v, 0);
  }
}

template <int kWidth, u32 kLayout>
__device__ __forceinline__ void merge_group(Uint<kWidth>* v, u32 at, u32 left, const PlaneSet& from) {
  constexpr int kTop = 8 * kWidth - 8, kRest = kWidth > 2 ? kWidth - 2 : 0;
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] = 0;
  if (kLayout == kWhole) {
    load_field<kWidth>(from.at[0], at, left, v, 0);
  } else if (kLayout == kBytes) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) load_field<1>(from.at[i], at, left, v, kTop - 8 * i);
  } else {
    const bool sign = kLayout == kFieldsSign;
    const u32 signs = sign ? from.at[0][at / 8] : 0;
    load_field<1>(from.at[sign], at, left, v, kTop);
    load_field<1>(from.at[sign + 1], at, left, v, kTop - 8);
    load_field<kRest>(from.at[sign + 2], at, left, v, 0);
#pragma unroll
    for (int k = 0; k < 8; k++)
      v[k] = sign ? unspread<kWidth>(v[k]) | static_cast<Uint<kWidth>>(signs >> k & 1) << (8 * kWidth - 1)
                  : unrotated<kWidth>(v[k]);
  }
}

// ---- prediction ----

// Policies of the kernels: `take` turns the eight values from `at` on into what is stored for them, and `give`
// turns that back into the values.

// Stores the values themselves.
struct Direct {
  __device__ __forceinline__ static bool suits(const EncodeChunk& c) {
    return c.residual == kId && c.inputs[kParent] == nullptr;
  }
  __device__ __forceinline__ static Dense density(const EncodeChunk&) { return Dense{}; }
  __device__ __forceinline__ static Direct of(const EncodeChunk&) { return Direct{}; }
  template <int kWidth>
  __device__ __forceinline__ void take(u32, u32, Uint<kWidth>*) const {}
};

// Stores the XOR with the parent's values, or the difference from them. Decoders use this for residual `id`, too.
struct Difference {
  const u8* parent;
  u32 residual;

  __device__ __forceinline__ static bool suits(const EncodeChunk& c) {
    return c.residual != kId && c.residual <= kSub && c.inputs[kParent] != nullptr;
  }
  __device__ __forceinline__ static bool suits(const DecodeChunk& c) {
    return c.residual <= kSub && (c.residual != kId) == (c.inputs[kParent] != nullptr);
  }
  __device__ __forceinline__ static Sparse density(const EncodeChunk&) { return Sparse{}; }
  template <class Chunk>
  __device__ __forceinline__ static Difference of(const Chunk& c) {
    return Difference{c.inputs[kParent], c.residual};
  }
  template <int kWidth>
  __device__ __forceinline__ void take(u32 at, u32 left, Uint<kWidth>* v) const {
    if (residual == kId) return;
    Uint<kWidth> p[8];
    load_values8<kWidth>(parent, at, left, p);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = residual == kXor ? v[k] ^ p[k] : subtract<kWidth>(v[k], p[k]);
  }
  template <int kWidth>
  __device__ __forceinline__ void give(u32 at, u32 left, Uint<kWidth>* v) const {
    if (residual == kId) return;
    Uint<kWidth> p[8];
    load_values8<kWidth>(parent, at, left, p);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = residual == kXor ? v[k] ^ p[k] : add<kWidth>(v[k], p[k]);
  }
};

// ---- chunks ----

// The values of a chunk.
struct ValueSpan {
  const u8* values;
  u32 n;
};

template <int kWidth, u32 kLayout, class Predict>
__device__ __forceinline__ void split_values(const ValueSpan& span, const Predict& predict, const PlaneSet& to) {
#pragma unroll 1
  for (u32 at = kOctet * threadIdx.x; at < span.n; at += kOctet * blockDim.x) {
    const u32 left = values_left(at, span.n), next = at + kOctet * blockDim.x;
    if (next < span.n) prefetch(span.values + static_cast<u64>(next) * kWidth);
    Uint<kWidth> v[8];
    load_values8<kWidth>(span.values, at, left, v);
    predict.template take<kWidth>(at, left, v);
    split_group<kWidth, kLayout>(v, at, left, to);
  }
}

template <int kWidth, u32 kLayout, class Predict>
__device__ __forceinline__ void merge_values(const PlaneSet& from, const Predict& predict, u32 n, u8* values) {
#pragma unroll 1
  for (u32 at = kOctet * threadIdx.x; at < n; at += kOctet * blockDim.x) {
    const u32 left = values_left(at, n);
    Uint<kWidth> v[8];
    merge_group<kWidth, kLayout>(v, at, left, from);
    predict.template give<kWidth>(at, left, v);
    u32 words[2 * kWidth];
    pack<kWidth>(v, 0, words);
    store_group<8 * kWidth>(values + static_cast<u64>(at) * kWidth, is_aligned(values), words, left * kWidth);
  }
}

// Layout and width as one number, for those that `planes_of` knows. One-byte values are a single plane in any layout.
__device__ __forceinline__ u32 shape_of(u32 layout, u32 width) { return width == 1 ? 1 : layout << 4 | width; }

#define S4_EVERY_SHAPE(call)                                                                      \
  call(kWhole, 1) call(kWhole, 2) call(kWhole, 4) call(kWhole, 8) call(kBytes, 2) call(kBytes, 4) \
  call(kBytes, 8) call(kFields, 2) call(kFields, 4) call(kFields, 8)              \
  call(kFieldsSign, 2) call(kFieldsSign, 4) call(kFieldsSign, 8)

// Splits a chunk. All threads.
template <class Predict>
__device__ __forceinline__ void split_chunk(u32 layout, u32 width, const ValueSpan& span, const Predict& predict,
                                            const PlaneSet& to) {
#define S4_CASE(l, w) case l << 4 | w: return split_values<w, l>(span, predict, to);
  switch (shape_of(layout, width)) { S4_EVERY_SHAPE(S4_CASE) }
#undef S4_CASE
}

// Merges a chunk of `n` values. All threads.
template <class Predict>
__device__ __forceinline__ void merge_chunk(u32 layout, u32 width, const PlaneSet& from, const Predict& predict,
                                            u32 n, u8* values) {
#define S4_CASE(l, w) case l << 4 | w: return merge_values<w, l>(from, predict, n, values);
  switch (shape_of(layout, width)) { S4_EVERY_SHAPE(S4_CASE) }
#undef S4_CASE
}

}  // namespace s4
