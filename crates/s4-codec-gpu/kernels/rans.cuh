// Constants of the `rans` bitstream (docs/codecs/rans.md). Tables are made in model.cuh; P = 8 is coded from
// values in fused.cuh and into values in fused_decode.cuh, both precisions from and into planes in
// plane_encode.cuh and plane_decode.cuh, with several tables in contexts.cuh; rans_encode.cuh and
// rans_decode.cuh are what they share.
//
// One thread block codes one chunk; a warp codes one segment, a lane one state. No function needs more
// than sm_75.
#pragma once

#include "warp.cuh"

namespace s4 {

constexpr u32 kBlock = kLanes * kOctet;          // symbols that a warp codes at a time
constexpr u32 kSegmentLog2 = 14;                 // what the encoder writes, but see `Segments`
constexpr u32 kSegment = 1u << kSegmentLog2;
constexpr u32 kLongStream = 1u << 16, kLongSegmentLog2 = 15;
constexpr u32 kTotal = 256;                      // sum of a table's frequencies: 2^P
constexpr u32 kLow = 1u << 16;                   // states lie in [kLow, 2^32) between steps

constexpr u32 kHeaderBytes = 8;
constexpr u32 kStatesBytes = 4 * kLanes;
constexpr u32 kCarryBytes = 2 * kLanes;          // what the states of a segment carry
constexpr u32 kAlign = 4;                        // of segments, from the start of the stream

constexpr u32 kFlagShared = 1, kFlagCarries = 2;  // in header byte 7

// Values are `kWidth` bytes. A chunk that is encoded here has at most 256 KiB of them, and a block a warp
// for each of its segments.
template <int kWidth>
constexpr u32 kWarps = 16 / kWidth;
template <int kWidth>
constexpr u32 kThreads = kWarps<kWidth> * kLanes;
template <int kWidth>
constexpr u32 kMaxChunk = kWarps<kWidth> * kSegment;

template <int kWidth>
constexpr u32 kFieldPlanes = kWidth == 2 ? 2 : 3;

// Whether most symbols of a plane are expected to be the same, as those of differences from a parent are. A type,
// so that kernels that know it have no code for the other case.
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

// How a stream of symbols is cut into segments. Sparse ones take few bits, of which a segment's states are a larger
// part: long streams of them have segments of twice the length.
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
  // Bytes that the stream carries of the one behind it, which has `behind`.
  __device__ __forceinline__ u32 carried(u32 behind) const {
    const u32 bytes = kCarryBytes * count();
    return bytes <= behind ? bytes : 0;
  }
};

}  // namespace s4
