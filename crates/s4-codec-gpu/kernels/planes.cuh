// Splitting float values into byte planes and merging them again, eight values of one lane at a time.
//
// A value is rotated left by one bit within its own width, so that the sign becomes the lowest bit:
//   E = the highest byte   (bf16, fp32: the exponent; fp16: the exponent and 3 mantissa bits)
//   A = the byte below it
//   B = the remaining two bytes, little-endian (4-byte values only)
// This is layout `fields` of docs/format.md.
//
// No host headers: NVRTC has none.
#pragma once

#include "abi.h"

namespace s4 {

// Values that one lane owns in each block.
constexpr u32 kOctet = 8;

// The planes of eight values, four bytes to a word, lowest byte first.
template <int kWidth>
struct Octet;

template <>
struct Octet<2> {
  u32 e[2], a[2];
};

template <>
struct Octet<4> {
  u32 e[2], a[2], b[4];
};

// Words of eight values as they lie in memory.
template <int kWidth>
struct Values {
  uint4 v[kWidth / 2];
};

// The bits of `a` where `mask` has zeros, those of `b` where it has ones: one instruction, which the compiler
// does not find for a constant mask.
__device__ __forceinline__ u32 blend(u32 a, u32 b, u32 mask) {
#ifdef __CUDA_ARCH__
  u32 v;
  asm("lop3.b32 %0, %1, %2, %3, 0xd8;" : "=r"(v) : "r"(a), "r"(b), "r"(mask));
  return v;
#else
  return (a & ~mask) | (b & mask);
#endif
}

// Swaps the lowest bits of neighbouring bytes. Rotating a pair of 16-bit values as one 32-bit word
// leaves each sign with the other value; this brings them home, four values at a time.
__device__ __forceinline__ u32 swap_signs(u32 a) { return blend(a, __byte_perm(a, 0, 0x2301), 0x01010101u); }

__device__ __forceinline__ u32 rotate_left1(u32 v) { return __funnelshift_l(v, v, 1); }
__device__ __forceinline__ u32 rotate_right1(u32 v) { return __funnelshift_r(v, v, 1); }

__device__ __forceinline__ Octet<2> split(const Values<2>& in) {
  const u32 q[4] = {rotate_left1(in.v[0].x), rotate_left1(in.v[0].y), rotate_left1(in.v[0].z),
                    rotate_left1(in.v[0].w)};
  Octet<2> o;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    o.e[i] = __byte_perm(q[2 * i], q[2 * i + 1], 0x7531);
    o.a[i] = swap_signs(__byte_perm(q[2 * i], q[2 * i + 1], 0x6420));
  }
  return o;
}

__device__ __forceinline__ Values<2> merge(const Octet<2>& o) {
  u32 q[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 a = swap_signs(o.a[i]);
    q[2 * i] = rotate_right1(__byte_perm(a, o.e[i], 0x5140));
    q[2 * i + 1] = rotate_right1(__byte_perm(a, o.e[i], 0x7362));
  }
  return Values<2>{{make_uint4(q[0], q[1], q[2], q[3])}};
}

__device__ __forceinline__ Octet<4> split(const Values<4>& in) {
  Octet<4> o;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 q[4] = {rotate_left1(in.v[i].x), rotate_left1(in.v[i].y), rotate_left1(in.v[i].z),
                      rotate_left1(in.v[i].w)};
    // A0 A1 E0 E1 and A2 A3 E2 E3.
    const u32 high[2] = {__byte_perm(q[0], q[1], 0x7362), __byte_perm(q[2], q[3], 0x7362)};
    o.e[i] = __byte_perm(high[0], high[1], 0x7632);
    o.a[i] = __byte_perm(high[0], high[1], 0x5410);
    o.b[2 * i] = __byte_perm(q[0], q[1], 0x5410);
    o.b[2 * i + 1] = __byte_perm(q[2], q[3], 0x5410);
  }
  return o;
}

__device__ __forceinline__ Values<4> merge(const Octet<4>& o) {
  Values<4> out;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 low = __byte_perm(o.a[i], o.e[i], 0x5140);   // A0 E0 A1 E1
    const u32 high = __byte_perm(o.a[i], o.e[i], 0x7362);  // A2 E2 A3 E3
    out.v[i].x = rotate_right1(__byte_perm(o.b[2 * i], low, 0x5410));
    out.v[i].y = rotate_right1(__byte_perm(o.b[2 * i], low, 0x7632));
    out.v[i].z = rotate_right1(__byte_perm(o.b[2 * i + 1], high, 0x5410));
    out.v[i].w = rotate_right1(__byte_perm(o.b[2 * i + 1], high, 0x7632));
  }
  return out;
}

// Whether vector accesses to a chunk's values are allowed; planes are 16-byte aligned by contract.
__device__ __forceinline__ bool is_aligned(const void* p) {
  return (reinterpret_cast<u64>(p) & 15) == 0;
}

// How many of the eight values from `at` on exist in a chunk of `n`.
__device__ __forceinline__ u32 values_left(u32 at, u32 n) {
  return at >= n ? 0 : (n - at < kOctet ? n - at : kOctet);
}

// Prefetches a line from device memory, so that the load finds it in the L2 cache: loading one block ahead
// into registers is too late.
__device__ __forceinline__ void prefetch(const void* p) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" : : "l"(p));
#else
  (void)p;
#endif
}

// Loads read-only data, and makes L2 fetch the rest of its 128-byte line at the same time: for sequences that a warp
// reads in pieces of a line or more, and that do not start at the start of a line.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ u32 load_line(const u32* p) {
  u32 v;
  asm volatile("ld.global.nc.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_line(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.nc.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_line(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
#else
template <class T>
T load_line(const T* p) {
  return *p;
}
#endif

template <int kWidth>
__device__ __forceinline__ void prefetch_values(const u8* values, u32 at) {
  prefetch(values + static_cast<u64>(at) * kWidth);
}

// Loads the eight values from index `at` on; `values` is 16-byte aligned and all eight exist.
template <int kWidth>
__device__ __forceinline__ Values<kWidth> load_values(const u8* values, u32 at) {
  const uint4* p = reinterpret_cast<const uint4*>(values + static_cast<u64>(at) * kWidth);
  Values<kWidth> out;
#pragma unroll
  for (int i = 0; i < kWidth / 2; i++) out.v[i] = __ldcs(p + i);
  return out;
}

// Loads and stores of the first `count` of `kBytes` bytes, for the end of a chunk and for values
// that are not 16-byte aligned. Unrolled, so that `words` stays in registers.
template <int kBytes>
__device__ __forceinline__ void load_bytes(const u8* from, u32* words, u32 count) {
#pragma unroll
  for (u32 i = 0; i < kBytes; i++) {
    if (i % 4 == 0) words[i / 4] = 0;
    if (i < count) words[i / 4] |= static_cast<u32>(from[i]) << (8 * (i % 4));
  }
}

template <int kBytes>
__device__ __forceinline__ void store_bytes(u8* to, const u32* words, u32 count) {
#pragma unroll
  for (u32 i = 0; i < kBytes; i++)
    if (i < count) to[i] = static_cast<u8>(words[i / 4] >> (8 * (i % 4)));
}

// The first `left` of eight bytes at a multiple of 8; the missing ones are zero.
__device__ __forceinline__ void load_octet_bytes(const u8* from, u32* words, u32 left) {
  if (left == kOctet) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else {
    load_bytes<8>(from, words, left);
  }
}

// As `load_values`, for `count` values at any alignment; the missing ones are zero.
template <int kWidth>
__device__ __forceinline__ Values<kWidth> load_values_slow(const u8* values, u32 at, u32 count) {
  u32 w[2 * kWidth];
  load_bytes<8 * kWidth>(values + static_cast<u64>(at) * kWidth, w, count * kWidth);
  Values<kWidth> out;
#pragma unroll
  for (int i = 0; i < kWidth / 2; i++)
    out.v[i] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
  return out;
}

template <int kWidth>
__device__ __forceinline__ void store_values_slow(u8* values, u32 at, const Values<kWidth>& in,
                                                  u32 count) {
  u32 w[2 * kWidth];
#pragma unroll
  for (int i = 0; i < kWidth / 2; i++) {
    w[4 * i] = in.v[i].x, w[4 * i + 1] = in.v[i].y;
    w[4 * i + 2] = in.v[i].z, w[4 * i + 3] = in.v[i].w;
  }
  store_bytes<8 * kWidth>(values + static_cast<u64>(at) * kWidth, w, count * kWidth);
}

// Reads byte A of the value at `p`; `replace_a` replaces it.
template <int kWidth>
__device__ __forceinline__ u32 a_of(const u8* p) {
  return (p[kWidth - 2] << 1 | p[1] >> 7) & 0xff;
}

template <int kWidth>
__device__ __forceinline__ void replace_a(u8* p, u32 a) {
  p[kWidth - 2] = static_cast<u8>((p[kWidth - 2] & 0x80) | a >> 1);
  p[1] = static_cast<u8>((p[1] & 0x7f) | a << 7);
}

// The planes of a chunk that are stored as they are.
struct RawPlanes {
  u8* a;
  u8* b;  // 4-byte values only
};

__device__ __forceinline__ void store_raw(const RawPlanes& to, u32 at, const Octet<2>& o) {
  __stcs(reinterpret_cast<uint2*>(to.a + at), make_uint2(o.a[0], o.a[1]));
}

__device__ __forceinline__ void store_raw(const RawPlanes& to, u32 at, const Octet<4>& o) {
  __stcs(reinterpret_cast<uint2*>(to.a + at), make_uint2(o.a[0], o.a[1]));
  __stcs(reinterpret_cast<uint4*>(to.b + 2 * static_cast<u64>(at)),
         make_uint4(o.b[0], o.b[1], o.b[2], o.b[3]));
}

__device__ __forceinline__ void store_raw_slow(const RawPlanes& to, u32 at, const Octet<2>& o,
                                               u32 count) {
  store_bytes<8>(to.a + at, o.a, count);
}

__device__ __forceinline__ void store_raw_slow(const RawPlanes& to, u32 at, const Octet<4>& o,
                                               u32 count) {
  store_bytes<8>(to.a + at, o.a, count);
  store_bytes<16>(to.b + 2 * static_cast<u64>(at), o.b, 2 * count);
}

// Loads the raw bytes of the eight values from `at` on: those of `count_a` values in plane A, `count` in plane B.
__device__ __forceinline__ void load_raw_slow(const RawPlanes& from, u32 at, Octet<2>& o, u32 count_a, u32) {
  load_bytes<8>(from.a + at, o.a, count_a);
}

__device__ __forceinline__ void load_raw_slow(const RawPlanes& from, u32 at, Octet<4>& o, u32 count_a,
                                              u32 count) {
  load_bytes<8>(from.a + at, o.a, count_a);
  load_bytes<16>(from.b + 2 * static_cast<u64>(at), o.b, 2 * count);
}

}  // namespace s4
