// Chunks and their frames (docs/format.md, "Layouts" and "Chunk"): planes of a layout, constant planes,
// headers, and copying.
#pragma once

#include "warp.cuh"

namespace s4 {

// ---- planes ----

// Number of planes; 0 if the layout is unknown or does not exist for values of this width.
S4_ANYWHERE inline u32 planes_of(u32 layout, u32 width) {
  if (width == 0 || width > 8 || (width & (width - 1)) != 0) return 0;
  const bool floats = width > 1;
  switch (layout) {
    case kWhole: return 1;
    case kBytes: return width;
    case kFields: return floats ? (width == 2 ? 2 : 3) : 0;
    case kFieldsSign: return floats ? (width == 2 ? 3 : 4) : 0;
    default: return 0;
  }
}

// Bytes of plane `i` of `n` values.
S4_ANYWHERE inline u32 plane_size(u32 layout, u32 width, u32 n, u32 i) {
  switch (layout) {
    case kWhole: return n * width;
    case kBytes: return n;
    case kFields: return i < 2 ? n : n * (width - 2);
    default: return i == 0 ? (n + 7) / 8 : i < 3 ? n : n * (width - 2);
  }
}

// Where plane `i` lies in a buffer that holds all, each 16-byte aligned.
__device__ __forceinline__ u32 plane_at(u32 layout, u32 width, u32 n, u32 i) {
  u32 at = 0;
  for (u32 k = 0; k < i; k++) at += round_up(plane_size(layout, width, n, k), 16);
  return at;
}

// The planes of a chunk, each 16-byte aligned.
struct PlaneSet {
  u8* at[kMaxPlanes];
};

// ---- constant planes ----

// Bytes of a plane to examine first: they rule out nearly every plane that does not repeat a unit.
constexpr u32 kHeadBytes = 80;
constexpr u32 kMaxUnit = 16;

// The shortest unit of at most 16 bytes that the head of a plane of `n` bytes repeats; 0 if there is none.
// `get(i)` is byte `i` of the plane, `head` kHeadBytes of shared memory. One warp.
template <class Get>
__device__ __forceinline__ u32 head_unit(u32 n, const Get& get, u8* head) {
  const u32 len = min(n, kHeadBytes);
  for (u32 i = lane_id(); i < len; i += kLanes) head[i] = static_cast<u8>(get(i));
  __syncwarp();
  const u32 unit = lane_id() % kMaxUnit + 1;
  bool same = unit <= len;
#pragma unroll 1
  for (u32 i = 0; same && i + unit < len; i++) same = head[i] == head[i + unit];
  return __ffs(__ballot_sync(kAllLanes, same) & 0xffff);
}

// Whether all of a plane repeats `unit` bytes. All threads; ends with a barrier.
//
// Only the head's shortest unit need be tested: a plane that repeats another unit repeats this one, too,
// because the head is longer than both units together.
template <class Get>
__device__ __forceinline__ bool repeats_unit(u32 n, const Get& get, u32 unit) {
  const u32 step = 32 * blockDim.x;
#pragma unroll 1
  for (u32 first = 0; first < n; first += step) {
    bool differs = false;
#pragma unroll 1
    for (u32 i = first + threadIdx.x; i < first + step && i + unit < n; i += blockDim.x)
      differs |= get(i) != get(i + unit);
    if (__syncthreads_or(differs)) return false;
  }
  return true;
}

// As `repeats_unit`, for a plane in memory (16-byte aligned) whose head is `head` (4-byte aligned).
__device__ __forceinline__ bool repeats_head(const u8* plane, u32 n, const u8* head, u32 unit) {
  constexpr u32 kAtOnce = 4;
  const u32* const words = reinterpret_cast<const u32*>(head);
  bool differs = false;
  // The head says which 16 bytes belong at `at`: it holds all that begin within its first unit.
  const auto differs_at = [&](u32 at, const uint4& v) {
    const u32 from = at % unit, shift = 8 * (from % 4), *w = words + from / 4;
    const u32 wanted[4] = {__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                           __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift)};
    return v.x != wanted[0] || v.y != wanted[1] || v.z != wanted[2] || v.w != wanted[3];
  };
  const u32 whole = n / 16 * 16, step = 16 * blockDim.x;
#pragma unroll 1
  for (u32 first = 0; first < whole; first += kAtOnce * step) {
    const u32 at = first + 16 * threadIdx.x;
    uint4 v[kAtOnce];
#pragma unroll
    for (u32 k = 0; k < kAtOnce; k++)
      if (at + k * step < whole) v[k] = *reinterpret_cast<const uint4*>(plane + at + k * step);
#pragma unroll
    for (u32 k = 0; k < kAtOnce; k++)
      if (at + k * step < whole) differs |= differs_at(at + k * step, v[k]);
    if (__syncthreads_or(differs)) return false;
  }
  const u32 at = whole + threadIdx.x;
  return !__syncthreads_or(at < n && plane[at] != head[at % unit]);
}

// The unit that a plane repeats, 0 if there is none. `shared` has a `head` and a `unit`. All threads; begins and
// ends with a barrier.
template <class SharedMemory>
__device__ __forceinline__ u32 constant_unit(const u8* plane, u32 size, SharedMemory& shared) {
  const auto get = [&](u32 i) { return plane[i]; };
  __syncthreads();
  if (warp_id() == 0) {
    const u32 unit = head_unit(size, get, shared.head);
    if (lane_id() == 0) shared.unit = unit;
  }
  __syncthreads();
  const u32 unit = shared.unit;
  __syncthreads();
  if (unit == 0 || size <= kHeadBytes) return unit;
  return repeats_head(plane, size, shared.head, unit) ? unit : 0;
}

// ---- results ----

__device__ __forceinline__ u32 header_len(u32 streams) { return round_up(8 * streams, 16); }

__device__ __forceinline__ void clear_result(EncodeResult& result, Status status) {
  result.offset = 0;
  result.len = 0;
  result.crc_encoded = 0;
  result.crc_raw = 0;
  result.plain = 0;
  result.shared = 0;
  result.streams = 0;
  result.status = static_cast<u8>(status);
  result.reserved = 0;
  for (u32 i = 0; i < kMaxPlanes; i++) result.stream[i] = StreamEntry{0, 0, 0, 0};
}

// Computes the length of the frame from the `streams` streams in `result`. The chunk becomes plain if that is
// not less than the length of its values, or if there are no streams. One thread.
__device__ __forceinline__ void finish_result(EncodeResult& result, u32 streams, u32 bytes) {
  u32 len = header_len(streams);
  for (u32 i = 0; i < streams; i++) len = round_up(len, 16) + result.stream[i].len;
  result.streams = static_cast<u8>(streams);
  result.len = len;
  if (streams > 0 && len < bytes) return;
  const u8 shared = result.shared;
  clear_result(result, kOk);
  result.shared = shared;
  result.plain = 1;
  result.len = bytes;
}

// Whether the gather must write a frame: the chunk was encoded, and there is room. Sets `kNoRoom`. All threads.
__device__ __forceinline__ bool has_room(EncodeResult& result, u64 capacity) {
  if (result.status != kOk) return false;
  if (result.offset + round_up(result.len, 16) <= capacity) return true;
  __syncthreads();
  if (threadIdx.x == 0) result.status = kNoRoom;
  return false;
}

__device__ __forceinline__ void write_frame_header(const EncodeResult& result, u8* to) {
  const u32 words = header_len(result.streams) / 4;
  if (threadIdx.x >= words) return;
  const u32 i = threadIdx.x / 2;
  u32 word = 0;
  if (i < result.streams) {
    const StreamEntry& e = result.stream[i];
    word = threadIdx.x % 2 ? e.len : e.codec | e.param << 8;
  }
  reinterpret_cast<u32*>(to)[threadIdx.x] = word;
}

// ---- copying ----

// Loads the first `count` of up to 64 bytes, at any address. Out of line: only ends and unaligned addresses need it.
__device__ __noinline__ void load_some(const u8* from, u32* words, u32 count) {
  for (u32 i = 0; i < 16; i++) words[i] = 0;
  for (u32 i = 0; i < count; i++) words[i / 4] |= static_cast<u32>(from[i]) << (8 * (i % 4));
}

// Four words, of which the first `left` bytes are kept and the others zeroed.
__device__ __forceinline__ uint4 masked(const u32* words, u32 left) {
  u32 w[4];
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    const u32 here = left <= 4 * i ? 0 : min(left - 4 * i, 4u);
    w[i] = words[i] & (here == 4 ? ~0u : (1u << (8 * here)) - 1);
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Copies `len` bytes between 16-byte aligned addresses and pads them with zeros to a multiple of 16. All
// threads.
__device__ __forceinline__ void copy_padded(const u8* from, u8* to, u32 len) {
#pragma unroll 4
  for (u32 at = 16 * threadIdx.x; at < len / 16 * 16; at += 16 * blockDim.x)
    __stcs(reinterpret_cast<uint4*>(to + at), __ldcs(reinterpret_cast<const uint4*>(from + at)));
  const u32 last = len / 16 * 16;
  if (threadIdx.x < 16 && last < len)
    to[last + threadIdx.x] = last + threadIdx.x < len ? from[last + threadIdx.x] : 0;
}

// Copies `len` bytes between any addresses: the share of thread `thread` of `threads`. Loads of whole words
// stay within the span.
__device__ __forceinline__ void copy_bytes(const u8* from, u8* to, u64 len, u32 thread, u32 threads) {
  const u32 skew = static_cast<u32>((reinterpret_cast<u64>(from) - reinterpret_cast<u64>(to)) & 3);
  // From `first` on `to` is 16-byte aligned; the words that hold 16 bytes must lie within the span.
  u64 first = static_cast<u64>(-reinterpret_cast<u64>(to)) & 15;
  if (first < skew) first += 16;
  const u64 tail = skew > 0 ? 4 : 0;
  const u64 whole = len < first + 16 + tail ? 0 : (len - first - tail) / 16;
  for (u64 i = thread; i < whole; i += threads) {
    const u8* p = from + first + 16 * i - skew;
    const u32* words = reinterpret_cast<const u32*>(p);
    u32 w[5];
    if (skew == 0 && is_aligned(p)) {
      const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w, w[4] = 0;
    } else {
#pragma unroll
      for (u32 k = 0; k < 5; k++) w[k] = k < 4 || skew > 0 ? words[k] : 0;
    }
    u32 out[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++) out[k] = __funnelshift_r(w[k], w[k + 1], 8 * skew);
    __stcs(reinterpret_cast<uint4*>(to + first + 16 * i), make_uint4(out[0], out[1], out[2], out[3]));
  }
  const u64 head = whole > 0 ? first : len, done = first + 16 * whole;
  for (u64 i = thread; i < head; i += threads) to[i] = from[i];
  if (whole > 0)
    for (u64 i = done + thread; i < len; i += threads) to[i] = from[i];
}

// The same with all threads.
__device__ __forceinline__ void copy_bytes(const u8* from, u8* to, u64 len) {
  copy_bytes(from, to, len, threadIdx.x, blockDim.x);
}

// Writes the frame of a chunk that is plain: its values. All threads.
__device__ __forceinline__ void write_plain(const u8* values, u32 len, u8* to) {
  copy_bytes(values, to, len);
  if (threadIdx.x < round_up(len, 16) - len) to[len + threadIdx.x] = 0;
}

}  // namespace s4
