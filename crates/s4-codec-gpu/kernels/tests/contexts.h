// Instances of the composed kernels with contexts read from memory, for the tests: any number of tables for any
// plane. Include it after s4.cu.
#pragma once

#include "../contexts.cuh"

namespace s4 {

// A chunk's input `kMemoryContexts` (16-byte aligned) has the contexts of plane i, each below kMaxTables, where
// `plane_at` says; bit i of the descriptor's `contexts` says whether plane i has any.
constexpr u32 kMemoryContexts = kOffsets;

struct MemoryContexts {
  static constexpr u32 kMostTables = kMaxTables;
  static constexpr bool kPrefersShared = false;

  template <class Chunk>
  __device__ __forceinline__ static bool suits(const Chunk& c, u32 planes) {
    if (c.contexts >> planes != 0 || (c.contexts != 0 && c.inputs[kMemoryContexts] == nullptr)) return false;
    if (!is_aligned(c.inputs[kMemoryContexts])) return false;
    for (u32 i = 0; i < planes; i++)
      if (c.tables[i].count > kMaxTables) return false;
    return has_table(c, planes);
  }
  template <class Chunk>
  __device__ __forceinline__ static void prepare(const Chunk&) {}
  template <class Chunk>
  __device__ __forceinline__ static PlaneContexts contexts_of(const Chunk& c, u32 i, const PlaneSet&) {
    const u8* at = c.contexts >> i & 1 ? c.inputs[kMemoryContexts] + plane_at(c.layout, c.width, c.n, i) : nullptr;
    return PlaneContexts{at, nullptr, plane_size(c.layout, c.width, c.n, i)};
  }

 private:
  __device__ __forceinline__ static bool has_table(const EncodeChunk& c, u32 planes) {
    for (u32 i = 0; i < planes; i++)
      if (!contexts_of(c, i, PlaneSet{}).below(kMaxTables)) return false;
    return true;
  }
  __device__ __forceinline__ static bool has_table(const DecodeChunk&, u32) { return true; }
};

}  // namespace s4

using namespace s4;

extern "C" {

__global__ void __launch_bounds__(kComposedThreads)
s4_encode_contexts(const EncodeChunk* chunks, EncodeResult* results) {
  encode_composed<Direct, EncodeContexts<MemoryContexts>>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_encode_residual_contexts(const EncodeChunk* chunks, EncodeResult* results) {
  encode_composed<Difference, EncodeContexts<MemoryContexts>>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_decode_contexts(const DecodeChunk* chunks, u32* status) {
  decode_composed<Difference, DecodeContexts<MemoryContexts>>(chunks[blockIdx.x], status[blockIdx.x]);
}

}  // extern "C"
