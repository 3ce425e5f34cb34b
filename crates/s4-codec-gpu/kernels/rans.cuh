// Constants of the `rans` bitstream (docs/codecs/rans.md). model.cuh makes tables. fused.cuh encodes values with
// P = 8, and fused_decode.cuh decodes them; plane_encode.cuh and plane_decode.cuh do so for planes with both
// precisions, and contexts.cuh with several tables. What they share is in rans_encode.cuh and rans_decode.cuh.
//
// One thread block codes one chunk; a warp codes one segment, a lane one state. No function needs more
// than sm_75.
#pragma once

#include "warp.cuh"

namespace s4 {

constexpr u32 kBlock = kLanes * kOctet;          // symbols that a warp codes at a time
constexpr u32 kSegmentLog2 = 14;                 // what the encoder writes; see `Segments` for an exception
constexpr u32 kSegment = 1u << kSegmentLog2;
constexpr u32 kLongStream = 1u << 16, kLongSegmentLog2 = 15;
constexpr u32 kTotal = 256;                      // sum of a table's frequencies: 2^P
constexpr u32 kLow = 1u << 16;                   // states lie in [kLow, 2^32) between steps

constexpr u32 kHeaderBytes = 8;
constexpr u32 kStatesBytes = 4 * kLanes;
constexpr u32 kCarryBytes = 2 * kLanes;          // what the states of a segment carry
constexpr u32 kAlign = 4;                        // of segments, from the start of the stream

constexpr u32 kFlagShared = 1, kFlagCarries = 2;  // in header byte 7

// The tensor's table for a plane that has exactly one; null if it has none or several.
__device__ __forceinline__ const SharedTable* only_table(const TableSet& set) {
  return set.count == 1 ? set.at : nullptr;
}

// For the fused encoders of values of `kWidth` bytes: a chunk has at most 256 KiB of values, and its thread
// block has a warp for each of its segments.
template <int kWidth>
constexpr u32 kWarps = 16 / kWidth;
template <int kWidth>
constexpr u32 kThreads = kWarps<kWidth> * kLanes;
template <int kWidth>
constexpr u32 kMaxChunk = kWarps<kWidth> * kSegment;

template <int kWidth>
constexpr u32 kFieldPlanes = kWidth == 2 ? 2 : 3;

// Whether most symbols of a plane are expected to be the same, as in differences from a parent. This is a type, so
// that kernels for which it is fixed have no code for the other case.
struct Dense {
  __device__ __forceinline__ bool is_sparse() const { return false; }
};
struct Sparse {
  __device__ __forceinline__ bool is_sparse() const { return true; }
};
struct AnyDensity {
  bool sparse;
  __device__ __forceinline__ bool is_sparse() const { return sparse; }
};

// How a stream of symbols is cut into segments. Sparse symbols take few bits, so that a segment's
// states are a larger part of them: long sparse streams have segments of twice the length.
template <class Density>
struct Segments {
  u32 symbols;  // at least 1
  Density density;

  __device__ __forceinline__ u32 log2() const {
    return density.is_sparse() && symbols > kLongStream ? kLongSegmentLog2 : kSegmentLog2;
  }
  __device__ __forceinline__ u32 count() const { return ((symbols - 1) >> log2()) + 1; }
  __device__ __forceinline__ u32 first(u32 i) const { return i << log2(); }
  __device__ __forceinline__ u32 end(u32 i) const { return min(symbols, first(i) + (1u << log2())); }
  // How many bytes of the next stream this one carries; `behind` is the next one's length.
  __device__ __forceinline__ u32 carried(u32 behind) const {
    const u32 bytes = kCarryBytes * count();
    return bytes <= behind ? bytes : 0;
  }
};

}  // namespace s4
