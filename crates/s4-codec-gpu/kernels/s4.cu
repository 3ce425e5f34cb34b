// The kernels' entry points. abi.h says how they are called and what their arguments mean; this is the only
// file that is compiled, for sm_75 and later.
//
// The fused kernels' launch bounds ask for as many blocks per multiprocessor as were fastest on an H200: more
// blocks leave too few registers and cause spills, fewer have too little to do while loads are in flight.

#include "abi.h"
#include "blocks.cuh"
#include "composed.cuh"
#include "contexts.cuh"
#include "crc32c.cuh"
#include "fused.cuh"
#include "fused_decode.cuh"
#include "updates.cuh"

namespace s4 {

// Sets each frame's offset: the sum of the lengths of all frames before it, each rounded up to 16. One block.
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

// What the first checksum of a chunk covers (docs/format.md, "Index"): part 0 is the header of the frame, part
// i + 1 is stream i, or nothing if that is raw.
__device__ __forceinline__ CrcPart part_of_result(const EncodeResult& result, const u8* frames, u32 part) {
  const u8* frame = frames + result.offset;
  u32 at = header_len(result.streams);
  if (part == 0) return CrcPart{frame, at};
  for (u32 i = 0; i + 1 < part; i++) at += round_up(result.stream[i].len, 16);
  const StreamEntry& e = result.stream[part - 1];
  return CrcPart{frame + at, e.codec == kRaw ? 0 : e.len};
}

__device__ __forceinline__ CrcPart part_of_frame(const DecodeChunk& c, u32 planes, u32 part) {
  if (part == 0) return CrcPart{c.frame, header_len(planes)};
  const DecodeStream& stream = c.streams[part - 1];
  return CrcPart{c.frame + stream.offset, stream.codec == kRaw ? 0 : stream.len};
}

// Block 2i computes the checksum of chunk i's values, block 2i + 1 that of its frame.
__device__ __forceinline__ void encode_crcs(const EncodeChunk* chunks, EncodeResult* results, const u8* frames,
                                            u64 capacity) {
  __shared__ CrcShared shared;
  const EncodeChunk& c = chunks[blockIdx.x / 2];
  EncodeResult& result = results[blockIdx.x / 2];
  const bool plain = result.plain, frame = blockIdx.x % 2 != 0;
  if (result.status != kOk || result.offset + result.len > capacity || (frame && plain)) return;
  auto part = [&](u32 i) {
    return frame ? part_of_result(result, frames, i) : CrcPart{c.values, c.n * c.width};
  };
  const u32 crc = crc_of_parts<false>(frame ? 1 + result.streams : 1, part, shared);
  if (threadIdx.x != 0) return;
  if (!frame) result.crc_raw = crc;
  if (frame || plain) result.crc_encoded = crc;
}

__device__ __forceinline__ void check_frame(const DecodeChunk& c, u32& status) {
  __shared__ CrcShared shared;
  u32 crc = c.crc_raw;  // a plain chunk's checksums are the same
  const u32 planes = min(static_cast<u32>(c.planes), kMaxPlanes);
  if (!c.plain) crc = crc_of_parts<true>(1 + planes, [&](u32 i) { return part_of_frame(c, planes, i); }, shared);
  if (threadIdx.x == 0) status = crc == c.crc_encoded ? kOk : kFrameChecksum;
}

__device__ __forceinline__ void check_values(const DecodeChunk& c, u32& status) {
  __shared__ CrcShared shared;
  if (status != kOk) return;
  __syncthreads();  // all threads have read `status`
  const u32 crc = crc_of_parts<false>(1, [&](u32) { return CrcPart{c.values, c.n * c.width}; }, shared);
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
  encode_composed<Direct, EncodeOneTable>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_encode_residual(const EncodeChunk* chunks, EncodeResult* results) {
  encode_composed<Difference, EncodeOneTable>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads, 3)
s4_encode_predicted(const EncodeChunk* chunks, EncodeResult* results) {
  encode_composed<AnyPrediction, EncodeContexts<ExponentContexts>>(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads, 3)
s4_encode_update(const EncodeChunk* chunks, EncodeResult* results) {
  encode_composed<Descent, EncodeContexts<UpdateContexts>>(chunks[blockIdx.x], results[blockIdx.x]);
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

// ---- encode, with planes that a library codes (blocks.cuh) ----

__global__ void __launch_bounds__(kComposedThreads) s4_split_planes(const EncodeChunk* chunks, EncodeResult* results) {
  split_planes(chunks[blockIdx.x], results[blockIdx.x]);
}

__global__ void __launch_bounds__(kPlaceThreads)
s4_place_streams(const EncodeChunk* chunks, EncodeResult* results, const CodedPlane* planes, u32 count) {
  const u32 i = blockIdx.x * kPlaceThreads + threadIdx.x;
  if (i < count) place_streams(chunks[i], results[i], planes + i * kMaxPlanes);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_gather_planes(const EncodeChunk* chunks, EncodeResult* results, const CodedPlane* planes, u8* frames,
                 u64 capacity) {
  const CodedPlane* coded = planes + blockIdx.x * kMaxPlanes;
  gather_planes(chunks[blockIdx.x], results[blockIdx.x], coded, frames, capacity);
}

// ---- decode ----

__global__ void __launch_bounds__(kCrcThreads) s4_check_frames(const DecodeChunk* chunks, u32* status) {
  check_frame(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kFusedThreads2, 5)
s4_decode_fused_w2(const DecodeChunk* chunks, u32* status) {
  decode_fused<2>(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kFusedThreads4, 5)
s4_decode_fused_w4(const DecodeChunk* chunks, u32* status) {
  decode_fused<4>(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads)
s4_decode_composed(const DecodeChunk* chunks, u32* status) {
  decode_composed<Difference, DecodeOneTable>(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads, 3)
s4_decode_predicted(const DecodeChunk* chunks, u32* status) {
  decode_composed<AnyPrediction, DecodeContexts<ExponentContexts>>(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kComposedThreads, 3)
s4_decode_update(const DecodeChunk* chunks, u32* status) {
  decode_composed<Descent, DecodeContexts<UpdateContexts>>(chunks[blockIdx.x], status[blockIdx.x]);
}

__global__ void __launch_bounds__(kCrcThreads) s4_check_values(const DecodeChunk* chunks, u32* status) {
  check_values(chunks[blockIdx.x], status[blockIdx.x]);
}

// ---- others ----

__global__ void __launch_bounds__(kCopyThreads) s4_copy_spans(const CopySpan* spans) {
  const CopySpan& span = spans[blockIdx.x];
  copy_bytes(span.from, span.to, span.len);
}

__global__ void __launch_bounds__(kCopyThreads) s4_copy_rows(const CopyRows* all) {
  const CopyRows& rows = all[blockIdx.x];
  for (u64 row = threadIdx.x / 32; row < rows.count; row += blockDim.x / 32)
    copy_bytes(rows.from + row * rows.step, rows.to + row * rows.len, rows.len, threadIdx.x % 32, 32);
}

__global__ void __launch_bounds__(kCrcThreads) s4_crc_spans(const CrcSpan* spans, u32* crcs) {
  __shared__ CrcShared shared;
  const CrcSpan& span = spans[blockIdx.x];
  const u32 crc = crc_of_parts<true>(1, [&](u32) { return CrcPart{span.data, static_cast<u32>(span.len)}; }, shared);
  if (threadIdx.x == 0) crcs[blockIdx.x] = crc;
}

}  // extern "C"
