// Chunks whose planes a library codes in blocks (docs/codecs/blocks.md): these kernels split values into
// planes before the library runs, and put what it wrote into frames afterwards.
//
//   1. s4_split_planes (chunks, results)                            grid = chunks, block = kComposedThreads
//   2. the library codes blocks of the planes, in whatever way, into slots
//   3. s4_place_streams (chunks, results, planes, count)            grid = count / kPlaceThreads, rounded up
//   4. s4_frame_offsets (results, count, total)                     as in abi.h
//   5. s4_gather_planes (chunks, results, planes, frames, capacity) grid = chunks, block = kComposedThreads
//   6. s4_encode_crcs                                               as in abi.h
//
// 1. writes, and 5. reads, `split_scratch` bytes of a chunk's scratch memory: plane i lies where `plane_at`
// says. Codings, inputs and tables are ignored. `planes` has kMaxPlanes entries for each chunk, and is read
// from 3. on.
//
// A plane that repeats a short unit becomes `const` (in 1.), whatever the library made of it. In 3., a coded
// plane is replaced by its stream if that is shorter; all others stay raw. If a block of a coded plane failed,
// or its size is out of range, the chunk becomes `kCorrupt`.
#pragma once

#include "layouts.cuh"

namespace s4 {

constexpr u32 kPlaceThreads = 128;

S4_ANYWHERE constexpr u64 split_scratch(u64 n, u64 width) { return planes_bytes(n, width); }

// A plane of a chunk as coded by a library. All fields are zero if it was not coded.
struct CodedPlane {
  const u8* slots;      // where the library put the first block; 16-byte aligned
  const u64* sizes;     // of each coded block
  const u32* statuses;  // of each block, 0: success
  u32 slot;             // bytes from one block's start to the next one's; a multiple of 16
  u32 blocks;
  u8 codec;             // for the stream's entry
  u8 param;
  u8 reserved[6];
};
static_assert(sizeof(CodedPlane) == 40, "");

__device__ __forceinline__ u32 table_len(u32 blocks) { return round_up(4 * blocks, 16); }

struct SplitShared {
  PlaneSet planes;
  u32 unit;
  __align__(4) u8 head[kHeadBytes];
};

__device__ __forceinline__ void split_planes(const EncodeChunk& c, EncodeResult& result) {
  __shared__ SplitShared shared;
  const u32 planes = planes_of(c.layout, c.width);
  const bool good = planes > 0 && c.n > 0 && static_cast<u64>(c.n) * c.width <= kMaxPlaneBytes && c.residual == kId;
  if (threadIdx.x == 0) clear_result(result, good ? kOk : kUnsupported);
  if (!good) return;
  if (threadIdx.x < planes)
    shared.planes.at[threadIdx.x] = c.scratch + plane_at(c.layout, c.width, c.n, threadIdx.x);
  __syncthreads();
  split_chunk(c.layout, c.width, ValueSpan{c.values, c.n}, Direct{}, shared.planes);
#pragma unroll 1
  for (u32 i = 0; i < planes; i++) {
    const u32 size = plane_size(c.layout, c.width, c.n, i);
    const u32 unit = constant_unit(shared.planes.at[i], size, shared);
    if (threadIdx.x != 0) continue;
    result.stream[i] = unit > 0 ? StreamEntry{kConst, 0, 0, unit} : StreamEntry{kRaw, 0, 0, size};
  }
}

// Bytes of the stream of a coded plane; 0 if a block of it failed.
__device__ __forceinline__ u32 blocks_len(const CodedPlane& plane) {
  u32 len = table_len(plane.blocks);
  for (u32 i = 0; i < plane.blocks; i++) {
    const u64 size = plane.sizes[i];
    if (plane.statuses[i] != 0 || size == 0 || size > plane.slot) return 0;
    len = round_up(len, 16) + static_cast<u32>(size);
  }
  return len;
}

// Decides what each stream of a chunk is. One thread.
__device__ __forceinline__ void place_streams(const EncodeChunk& c, EncodeResult& result, const CodedPlane* coded) {
  if (result.status != kOk) return;
  const u32 planes = planes_of(c.layout, c.width);
  for (u32 i = 0; i < planes; i++) {
    StreamEntry& e = result.stream[i];
    if (e.codec != kRaw || coded[i].blocks == 0) continue;
    const u32 len = blocks_len(coded[i]);
    if (len == 0) {
      clear_result(result, kCorrupt);
      return;
    }
    if (len < e.len) e = StreamEntry{coded[i].codec, coded[i].param, 0, len};
  }
  finish_result(result, planes, c.n * c.width);
}

// Puts a coded plane's size table and blocks together. All threads.
__device__ __forceinline__ void gather_blocks(const CodedPlane& plane, u8* to) {
  const u32 table = table_len(plane.blocks);
  for (u32 i = threadIdx.x; i < table / 4; i += blockDim.x)
    reinterpret_cast<u32*>(to)[i] = i < plane.blocks ? static_cast<u32>(plane.sizes[i]) : 0;
  u32 at = table;
  for (u32 i = 0; i < plane.blocks; i++) {
    const u32 size = static_cast<u32>(plane.sizes[i]);
    copy_padded(plane.slots + static_cast<u64>(i) * plane.slot, to + at, size);
    at += round_up(size, 16);
  }
}

// Writes the frame. All threads.
__device__ __forceinline__ void gather_planes(const EncodeChunk& c, EncodeResult& result, const CodedPlane* coded,
                                              u8* frames, u64 capacity) {
  if (!has_room(result, capacity)) return;
  u8* const to = frames + result.offset;
  if (result.plain) return write_plain(c.values, result.len, to);
  write_frame_header(result, to);
  u32 at = header_len(result.streams);
#pragma unroll 1
  for (u32 i = 0; i < result.streams; i++) {
    const StreamEntry& e = result.stream[i];
    if (e.codec == kRaw || e.codec == kConst)
      copy_padded(c.scratch + plane_at(c.layout, c.width, c.n, i), to + at, e.len);
    else
      gather_blocks(coded[i], to + at);
    at += round_up(e.len, 16);
  }
}

}  // namespace s4
