// The kernels' entry points. abi.h says how they are called and what their arguments mean; this is the only
// file that is compiled, for sm_75 and later.
//
// The blocks a multiprocessor that the bounds of the fused kernels ask for were the fastest on an H200: fewer
// registers than they leave mean spills, fewer blocks too little to do while loads are under way.

#include "abi.h"
#include "composed.cuh"
#include "crc32c.cuh"
#include "fused.cuh"

namespace s4 {

// Where each frame goes: the sum of the lengths below, each rounded up to 16. One block.
__device__ __forceinline__ void place_frames(EncodeResult* results, u32 count, u64* total) {
  __shared__ u64 warp_sums[kOffsetsThreads / kLanes];
  const u32 each = (count + kOffsetsThreads - 1) / kOffsetsThreads;
  const u32 first = min(count, threadIdx.x * each), end = min(count, first + each);
  u64 sum = 0;
  for (u32 i = first; i < end; i++) sum += round_up(results[i].len, 16);
  u64 below = sum;
  for (u32 d = 1; d < kLanes; d *= 2) {
    const u64 other = __shfl_up_sync(kAllLanes, below, d);
    if (lane_id() >= d) below += other;
  }
  if (lane_id() == kLanes - 1) warp_sums[warp_id()] = below;
  __syncthreads();
  u64 at = below - sum;
  for (u32 i = 0; i < warp_id(); i++) at += warp_sums[i];
  for (u32 i = first; i < end; i++) {
    results[i].offset = at;
    at += round_up(results[i].len, 16);
  }
  if (threadIdx.x == kOffsetsThreads - 1) *total = at;
}

__device__ __forceinline__ u32 crc_of_values(const u8* values, u32 n, u32 width, CrcShared& shared) {
  Crc32c crc(shared);
  crc.take(values, n * width);
  return crc.value();
}

__device__ __forceinline__ u32 crc_of_result(const EncodeResult& result, const u8* frames, CrcShared& shared) {
  auto at = [&](u32 stream) {
    u32 at = header_len(result.streams);
    for (u32 i = 0; i < stream; i++) at += round_up(result.stream[i].len, 16);
    return at;
  };
  return crc_of_frame(
      frames + result.offset, result.streams, at, [&](u32 i) { return result.stream[i].codec; },
      [&](u32 i) { return result.stream[i].len; }, shared);
}

// Block 2i does the values of chunk i, block 2i + 1 its frame.
__device__ __forceinline__ void encode_crcs(const EncodeChunk* chunks, EncodeResult* results, const u8* frames,
                                            u64 capacity) {
  __shared__ CrcShared shared;
  const EncodeChunk& c = chunks[blockIdx.x / 2];
  EncodeResult& result = results[blockIdx.x / 2];
  if (result.status != kOk || result.offset + result.len > capacity) return;
  if (blockIdx.x % 2 == 0) {
    const u32 crc = crc_of_values(c.values, c.n, c.width, shared);
    if (threadIdx.x == 0) result.crc_raw = crc;
    if (threadIdx.x == 0 && result.plain) result.crc_encoded = crc;
  } else if (!result.plain) {
    const u32 crc = crc_of_result(result, frames, shared);
    if (threadIdx.x == 0) result.crc_encoded = crc;
  }
}

__device__ __forceinline__ void check_frame(const DecodeChunk& c, u32& status) {
  __shared__ CrcShared shared;
  u32 crc = c.crc_raw;  // of a plain chunk both are the same
  if (!c.plain)
    crc = crc_of_frame(
        c.frame, min(static_cast<u32>(c.planes), kMaxPlanes), [&](u32 i) { return c.streams[i].offset; },
        [&](u32 i) { return c.streams[i].codec; }, [&](u32 i) { return c.streams[i].len; }, shared);
  if (threadIdx.x == 0) status = crc == c.crc_encoded ? kOk : kFrameChecksum;
}

__device__ __forceinline__ void check_values(const DecodeChunk& c, u32& status) {
  __shared__ CrcShared shared;
  if (status != kOk) return;
  __syncthreads();  // all have read it
  const u32 crc = crc_of_values(c.values, c.n, c.width, shared);
  if (threadIdx.x == 0 && crc != c.crc_raw) status = kValueChecksum;
}

}  // namespace s4

using namespace s4;

extern "C" {

// ---- encode ----

__global__ void __launch_bounds__(kFusedThreads2, 5)
s4_encode_fused_w2(const EncodeChunk* chunks, EncodeResult* results) {
  encode_fused<2>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kFusedThreads4, 9)
s4_encode_fused_w4(const EncodeChunk* chunks, EncodeResult* results) {
  encode_fused<4>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_encode_composed(const EncodeChunk* chunks, EncodeResult* results) {
  encode_composed(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kOffsetsThreads)
s4_frame_offsets(EncodeResult* results, u32 count, u64* total) {
  place_frames(results, count, total);
}

__global__ void __launch_bounds__(kFusedThreads2)
s4_gather_fused_w2(const EncodeChunk* chunks, EncodeResult* results, u8* frames, u64 capacity) {
  gather_fused<2>(chunks[blockIdx.x], results[blockIdx.x], frames, capacity);
}

__global__ void __launch_bounds__(kFusedThreads4)
s4_gather_fused_w4(const EncodeChunk* chunks, EncodeResult* results, u8* frames, u64 capacity) {
  gather_fused<4>(chunks[blockIdx.x], results[blockIdx.x], frames, capacity);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_gather_composed(const EncodeChunk* chunks, EncodeResult* results, u8* frames, u64 capacity) {
  gather_composed(chunks[blockIdx.x], results[blockIdx.x], frames, capacity);
}

__global__ void __launch_bounds__(kCrcThreads)
s4_encode_crcs(const EncodeChunk* chunks, EncodeResult* results, const u8* frames, u64 capacity) {
  encode_crcs(chunks, results, frames, capacity);
}

// ---- decode ----

__global__ void __launch_bounds__(kCrcThreads) s4_check_frames(const DecodeChunk* chunks, u32* status) {
  check_frame(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kFusedThreads2, 5)
s4_decode_fused_w2(const DecodeChunk* chunks, u32* status) {
  decode_fused<2>(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kFusedThreads4, 8)
s4_decode_fused_w4(const DecodeChunk* chunks, u32* status) {
  decode_fused<4>(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_decode_composed(const DecodeChunk* chunks, u32* status) {
  decode_composed(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kCrcThreads) s4_check_values(const DecodeChunk* chunks, u32* status) {
  check_values(chunks[blockIdx.x], status[blockIdx.x]);
}

// ---- others ----

__global__ void __launch_bounds__(kCopyThreads) s4_copy_spans(const CopySpan* spans) {
  const CopySpan& span = spans[blockIdx.x];
  copy_bytes(span.from, span.to, span.len);
}

__global__ void __launch_bounds__(kCrcThreads) s4_crc_spans(const CrcSpan* spans, u32* crcs) {
  __shared__ CrcShared shared;
  Crc32c crc(shared);
  crc.take(spans[blockIdx.x].data, static_cast<u32>(spans[blockIdx.x].len));
  if (threadIdx.x == 0) crcs[blockIdx.x] = crc.value();
}

}  // extern "C"
