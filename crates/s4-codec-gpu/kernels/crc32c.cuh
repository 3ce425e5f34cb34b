// CRC-32C of spans of memory, as fast as memory is read: without carry-less multiplication or a table for
// each byte.
//
// A span is a polynomial over GF(2) whose coefficients are 32-bit words: thread t of T = 128 takes every
// 128th word, so that it has a polynomial in Y = x^4096. Since squaring is linear, a multiple q(x) of the
// CRC's polynomial gives the multiple q(Y), and a sparse q costs a few XORs of whole words to reduce by:
//   q(x) = x^40 + x^38 + x^36 + x^35 + x^33 + x^30 + x^27 + x^20 + x^13 + x^7 + x + 1
// The 40 words that remain in each thread are reduced with tables, and the threads' rests are multiplied into
// place. (Zeros in front of a span change nothing.)
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
  u32 bit[32];             // bit i of a word, times Y
  u32 byte_bit[8];         // bit i of a byte, times x^8
  u32 place[kCrcThreads];  // x^(32 (128 - t)): where the rest of thread t belongs, times x^32
};

__host__ __device__ constexpr CrcTables make_crc_tables() {
  CrcTables t{};
  const u32 y = crc_power(8 * kCrcRowBytes), word = crc_power(32);
  for (int i = 0; i < 32; i++) t.bit[i] = crc_multiply(1u << i, y);
  for (int i = 0; i < 8; i++) t.byte_bit[i] = crc_multiply(1u << i, crc_power(8));
  u32 power = word;
  for (u32 i = kCrcThreads; i-- > 0;) {
    t.place[i] = power;
    power = crc_multiply(power, word);
  }
  return t;
}

__device__ const CrcTables kCrcTables = make_crc_tables();

struct CrcShared {
  u32 times_y[4][256];
  u32 byte[256];
  u32 rests[kCrcThreads / kLanes];
};

// This thread's words of a span of whole words, in rows of 128, the last of which is full.
struct CrcColumn {
  const u32* words;
  int first;   // index of the thread's word of row 0; negative in front of the span
  u32 state;   // what goes into the first word of the span
};

constexpr u32 kCrcBatch = kCrcRows / 2;  // rows that are loaded at a time

__device__ __forceinline__ void crc_load(const CrcColumn& column, u32 row, u32* batch) {
#pragma unroll
  for (u32 k = 0; k < kCrcBatch; k++) {
    const int i = column.first + static_cast<int>((row + k) * kCrcThreads);
    batch[k] = i >= 0 ? __ldcs(column.words + i) : 0;
    batch[k] ^= i == 0 ? column.state : 0;
  }
}

// Takes in a batch of rows, starting at row `kRow` of a block of 40: `h` holds the last 40 coefficients of the
// quotient, row r at r mod 40. After the last block (`kLast`) it holds the remainder instead.
template <u32 kRow, bool kLast>
__device__ __forceinline__ void crc_take(u32* h, const u32* batch) {
  constexpr u32 kBack[11] = {2, 4, 5, 7, 10, 13, 20, 27, 33, 39, 40};
#pragma unroll
  for (u32 k = kRow; k < kRow + kCrcBatch; k++) {
    u32 v = batch[k - kRow];
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
  for (u32 i = threadIdx.x; i < 256; i += kCrcThreads) {
    u32 v = 0;
    for (u32 bit = 0; bit < 8; bit++)
      if (i >> bit & 1) v ^= kCrcTables.byte_bit[bit];
    shared.byte[i] = v;
  }
}

// Takes a few bytes into a state, one by one. All threads do the same.
__device__ __forceinline__ u32 crc_few(u32 state, const u8* data, u32 len, const CrcShared& shared) {
#pragma unroll 1
  for (u32 i = 0; i < len; i++) state = (state >> 8) ^ shared.byte[(state ^ data[i]) & 0xff];
  return state;
}

// Takes `count` > 0 aligned words into a state. All threads; all return the same.
__device__ __forceinline__ u32 crc_words(u32 state, const u32* words, u32 count, CrcShared& shared) {
  const u32 rows = (count + kCrcThreads - 1) / kCrcThreads, blocks = (rows + kCrcRows - 1) / kCrcRows;
  const int in_front = static_cast<int>(blocks * kCrcRows * kCrcThreads - count);
  const CrcColumn column{words, static_cast<int>(threadIdx.x) - in_front, state};
  // One batch is always in flight.
  u32 h[kCrcRows] = {}, even[kCrcBatch], odd[kCrcBatch];
  crc_load(column, 0, even);
#pragma unroll 1
  for (u32 row = 0; row < (blocks - 1) * kCrcRows; row += kCrcRows) {
    crc_load(column, row + kCrcBatch, odd);
    crc_take<0, false>(h, even);
    crc_load(column, row + kCrcRows, even);
    crc_take<kCrcBatch, false>(h, odd);
  }
  crc_load(column, (blocks - 1) * kCrcRows + kCrcBatch, odd);
  crc_take<0, true>(h, even);
  crc_take<kCrcBatch, true>(h, odd);

  u32 rest = 0;
#pragma unroll
  for (u32 k = 0; k < kCrcRows; k++) rest = times_y(shared, rest) ^ h[k];
  rest = crc_multiply(rest, kCrcTables.place[threadIdx.x]);
  for (int d = 16; d > 0; d /= 2) rest ^= __shfl_xor_sync(kAllLanes, rest, d);
  __syncthreads();  // all threads have read the previous rests
  if (lane_id() == 0) shared.rests[warp_id()] = rest;
  __syncthreads();
  rest = 0;
  for (u32 i = 0; i < kCrcThreads / kLanes; i++) rest ^= shared.rests[i];
  return rest;
}

// The same out of line, because it is large: for kernels in which it is not most of the work.
__device__ __noinline__ u32 crc_words_apart(u32 state, const u32* words, u32 count, CrcShared& shared) {
  return crc_words(state, words, count, shared);
}

// A span of memory; its length is below 2^31.
struct CrcPart {
  const u8* data;
  u32 len;
};

// CRC-32C of the concatenation of `parts` spans; `part(i)` returns the i-th. All threads of a block of
// kCrcThreads; all return the same. Reads whole words, but only within the spans.
template <bool kApart, class Part>
__device__ __forceinline__ u32 crc_of_parts(u32 parts, const Part& part, CrcShared& shared) {
  make_times_y(shared);
  __syncthreads();
  u32 state = ~0u;
#pragma unroll 1
  for (u32 i = 0; i < parts; i++) {
    const CrcPart p = part(i);
    const u32 front = min(p.len, static_cast<u32>(-reinterpret_cast<u64>(p.data)) & 3);
    const u32 words = p.len > 64 ? (p.len - front) / 4 : 0, done = words > 0 ? front + 4 * words : 0;
    if (words > 0) {
      state = crc_few(state, p.data, front, shared);
      const u32* at = reinterpret_cast<const u32*>(p.data + front);
      state = kApart ? crc_words_apart(state, at, words, shared) : crc_words(state, at, words, shared);
    }
    state = crc_few(state, p.data + done, p.len - done, shared);
  }
  return ~state;
}

}  // namespace s4
