// CRC-32C of spans of memory, as fast as memory is read: without carry-less multiplication or a table for
// each byte.
//
// A span is a polynomial over GF(2) whose coefficients are 32-bit words: thread t of T = 128 takes every
// 128th word, so that it has a polynomial in Y = x^4096. Since squaring is linear, a multiple q(x) of the
// CRC's polynomial gives the multiple q(Y), and a sparse q costs a few XORs of whole words to reduce by:
//   q(x) = x^40 + x^38 + x^36 + x^35 + x^33 + x^30 + x^27 + x^20 + x^13 + x^7 + x + 1
// What is left of a thread, 40 words, goes through tables, and the threads' rests are multiplied into place.
//
// Words are little-endian with the lowest bit first, so bit i of a word is x^(31 - i).
#pragma once

#include "warp.cuh"

namespace s4 {

constexpr u32 kCrcRows = 40;                       // degree of q
constexpr u32 kCrcRowBytes = 4 * kCrcThreads;
constexpr u32 kCrcPolynomial = 0x82f63b78;         // without x^32, reflected

// a * b mod P; 0x80000000 is 1.
__host__ __device__ constexpr u32 crc_multiply(u32 a, u32 b) {
  u32 product = 0;
  for (int i = 0; i < 32; i++) {
    if (a & 0x80000000u >> i) product ^= b;
    b = (b >> 1) ^ (b & 1 ? kCrcPolynomial : 0);
  }
  return product;
}

__host__ __device__ constexpr u32 crc_power(u64 exponent) {
  u32 power = 0x40000000, result = 0x80000000;  // x, 1
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = crc_multiply(result, power);
    power = crc_multiply(power, power);
  }
  return result;
}

struct CrcTables {
  u32 bit[32];               // of bit i of a word, times Y
  u32 place[kCrcThreads];    // x^(32 (128 - t)): where the rest of thread t belongs, times x^32
  u32 undo[4];               // x^(-8 i)
};

__host__ __device__ constexpr CrcTables make_crc_tables() {
  CrcTables t{};
  const u32 y = crc_power(8 * kCrcRowBytes), word = crc_power(32);
  for (int i = 0; i < 32; i++) t.bit[i] = crc_multiply(1u << i, y);
  u32 power = word;
  for (u32 i = kCrcThreads; i-- > 0;) {
    t.place[i] = power;
    power = crc_multiply(power, word);
  }
  // The order of x is 2^31 - 1.
  for (u32 i = 0; i < 4; i++) t.undo[i] = crc_power((1u << 31) - 1 - 8 * i);
  return t;
}

__device__ const CrcTables kCrcTables = make_crc_tables();

struct CrcShared {
  u32 times_y[4][256];
  u32 rests[kCrcThreads / kLanes];
};

// A span in rows of 128 words, the last of which holds its end.
struct CrcSpanView {
  const u8 *data, *end;
  const u8* first;  // of this thread's word of row 0, which may lie in front of the span
  u32 blocks;       // of 40 rows

  // A word near an end of the span: bytes outside are 0, and the first four inverted, as CRC-32C starts.
  __device__ __forceinline__ u32 edge_word(u32 row) const {
    // As numbers: the word may lie far in front of the span.
    const u64 at = reinterpret_cast<u64>(first) + static_cast<u64>(row) * kCrcRowBytes;
    const u64 from = reinterpret_cast<u64>(data), to = reinterpret_cast<u64>(end);
    if (at + 4 <= from || at >= to) return 0;
    if (at >= from + 4 && at + 4 <= to) return *reinterpret_cast<const u32*>(at);
    u32 word = 0;
    for (u64 i = 0; i < 4; i++) {
      const u64 p = at + i;
      if (p < from || p >= to) continue;
      const u32 byte = *reinterpret_cast<const u8*>(p) ^ (p - from < 4 ? 0xff : 0);
      word |= byte << (8 * i);
    }
    return word;
  }
  __device__ __forceinline__ u32 inner_word(u32 row) const {
    return __ldcs(reinterpret_cast<const u32*>(first + static_cast<u64>(row) * kCrcRowBytes));
  }
};

// Takes 40 rows in: `h` holds the last 40 coefficients of the quotient, row r at r mod 40. Those of the last
// block are the rest instead.
template <bool kEdge, bool kLast>
__device__ __forceinline__ void crc_block(u32* h, const CrcSpanView& span, u32 row) {
  constexpr u32 kBack[11] = {2, 4, 5, 7, 10, 13, 20, 27, 33, 39, 40};
#pragma unroll
  for (u32 k = 0; k < kCrcRows; k++) {
    u32 v = kEdge ? span.edge_word(row + k) : span.inner_word(row + k);
#pragma unroll
    for (u32 i = 0; i < 11; i++)
      if (!kLast || kBack[i] > k) v ^= h[(k + kCrcRows - kBack[i]) % kCrcRows];
    h[k] = v;
  }
}

__device__ __forceinline__ u32 times_y(const CrcShared& shared, u32 v) {
  return shared.times_y[0][v & 0xff] ^ shared.times_y[1][v >> 8 & 0xff] ^ shared.times_y[2][v >> 16 & 0xff] ^
         shared.times_y[3][v >> 24];
}

__device__ __forceinline__ void make_times_y(CrcShared& shared) {
  for (u32 i = threadIdx.x; i < 1024; i += kCrcThreads) {
    u32 v = 0;
    for (u32 bit = 0; bit < 8; bit++)
      if (i >> bit & 1) v ^= kCrcTables.bit[8 * (i >> 8) + bit];
    shared.times_y[i >> 8][i & 0xff] = v;
  }
}

// Bit by bit, for less than four bytes.
__device__ __forceinline__ u32 crc_of_few(const u8* data, u64 len) {
  u32 crc = ~0u;
  for (u64 i = 0; i < 8 * len; i++) {
    const u32 bit = (crc ^ data[i / 8] >> (i % 8)) & 1;
    crc = (crc >> 1) ^ (bit ? kCrcPolynomial : 0);
  }
  return ~crc;
}

// CRC-32C of a span at any address. All threads of a block of kCrcThreads; the answer is thread 0's. (It
// reads whole words, but only such as lie within the span.)
__device__ __forceinline__ u32 crc_of_span(const u8* data, u64 len, CrcShared& shared) {
  if (len < 4) return threadIdx.x == 0 ? crc_of_few(data, len) : 0;
  make_times_y(shared);
  __syncthreads();
  const u8* end = data + len;
  const u32 behind = static_cast<u32>(-reinterpret_cast<u64>(end)) & 3;  // bytes that the last word lacks
  const u64 in_front = (reinterpret_cast<u64>(end) + behind) - reinterpret_cast<u64>(data);
  const u32 rows = static_cast<u32>((in_front + kCrcRowBytes - 1) / kCrcRowBytes);
  const u32 blocks = (rows + kCrcRows - 1) / kCrcRows;
  const u64 start = reinterpret_cast<u64>(end) + behind - static_cast<u64>(blocks) * kCrcRows * kCrcRowBytes;
  const CrcSpanView span{data, end, reinterpret_cast<const u8*>(start + 4 * threadIdx.x), blocks};

  u32 h[kCrcRows] = {};
  if (blocks > 1) crc_block<true, false>(h, span, 0);
#pragma unroll 1
  for (u32 i = 1; i + 1 < blocks; i++) crc_block<false, false>(h, span, i * kCrcRows);
  crc_block<true, true>(h, span, (blocks - 1) * kCrcRows);

  u32 rest = 0;
#pragma unroll
  for (u32 k = 0; k < kCrcRows; k++) rest = times_y(shared, rest) ^ h[k];
  rest = crc_multiply(rest, kCrcTables.place[threadIdx.x]);
  for (int d = 16; d > 0; d /= 2) rest ^= __shfl_xor_sync(kAllLanes, rest, d);
  if (lane_id() == 0) shared.rests[warp_id()] = rest;
  __syncthreads();
  rest = 0;
  for (u32 i = 0; i < kCrcThreads / kLanes; i++) rest ^= shared.rests[i];
  return ~crc_multiply(rest, kCrcTables.undo[behind]);
}

}  // namespace s4
