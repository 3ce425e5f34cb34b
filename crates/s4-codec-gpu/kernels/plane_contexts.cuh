// Contexts of a plane's symbols (docs/format.md, "Contexts"): the index of the table that each is coded with, computed
// from what a decoder knows before it decodes the plane. The coders of one table (plane_encode.cuh, plane_decode.cuh)
// ignore contexts; those of several tables are in contexts.cuh.
#pragma once

#include "frame.cuh"

namespace s4 {

constexpr u32 kClasses = 8;  // that an input's exponents are sorted into

// If empty, all contexts are 0: one table codes the plane.
struct PlaneContexts {
  const u8* classes;    // the class of each symbol, 16-byte aligned; null: all contexts are 0
  const u8* exponents;  // for the plane behind the exponents: the exponents' plane, 16-byte aligned; else null
  u32 size;             // of the plane

  struct Eight {
    u32 words[2];
    __device__ __forceinline__ u32 of(int k) const { return byte_of(words, k); }
  };

  // The contexts of the eight symbols at `from`; 0 behind the end of the plane.
  __device__ __forceinline__ Eight tables_of(u32 from) const {
    Eight eight{{0, 0}};
    if (classes == nullptr) return eight;
    const u32 left = values_left(from, size);
    load_octet_bytes(classes + from, eight.words, left);
    if (exponents == nullptr) return eight;
    u32 e[2];
    load_octet_bytes(exponents + from, e, left);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 word = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const u32 exponent = byte_of(e, 4 * i + k);
        word |= (exponent == 0 ? byte_of(eight.words, 4 * i + k) : kClasses + (exponent > 1)) << (8 * k);
      }
      eight.words[i] = word;
    }
    return eight;
  }

  // Bit i: a symbol in this thread's share has context i; bit 31: a context of 31 or more. Bit 0 is always set.
  __device__ __forceinline__ u32 seen() const {
    u32 seen = 1;
    if (classes == nullptr) return seen;
#pragma unroll 1
    for (u32 from = kOctet * threadIdx.x; from < size; from += kOctet * blockDim.x) {
      const Eight eight = tables_of(from);
#pragma unroll
      for (int k = 0; k < 8; k++) seen |= 1u << min(eight.of(k), 31u);
    }
    return seen;
  }
  // Whether all contexts are below `tables`, which is at most kMaxTables. All threads; a barrier.
  __device__ __forceinline__ bool below(u32 tables) const { return !__syncthreads_or((seen() >> tables) != 0); }
};

}  // namespace s4
