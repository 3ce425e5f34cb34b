// Chunks of every layout, width and coding: predict, split into planes in scratch memory, code each plane, put the
// frame together; and the reverse. One thread block per chunk. The kernels are instances for a way to predict
// (layouts.cuh) and a way to find the table of a symbol (plane_encode.cuh, plane_decode.cuh).
#pragma once

#include "layouts.cuh"
#include "plane_decode.cuh"
#include "plane_encode.cuh"
#include "prediction.cuh"

namespace s4 {

// ---- encode ----

template <class Context>
struct ComposedShared {
  PlaneShared<Context> plane;
  PlaneSet planes;
  Coded coded[kMaxPlanes + 1];  // one more than planes: an empty one behind the last
};

// Whether the descriptor is in range: later steps divide and lay out memory by its fields.
__device__ __forceinline__ bool fits(const EncodeChunk& c, u32 planes) {
  if (planes == 0 || c.n == 0 || static_cast<u64>(c.n) * c.width > kMaxPlaneBytes) return false;
  for (u32 i = 0; i < planes; i++) {
    const u32 coding = c.coding[i];
    if (coding != kCodeRaw && coding != kCodeBits7 && coding != kCodeRans8 && coding != kCodeRans12) return false;
    // Only this plane is known to have values below 128.
    if (coding == kCodeBits7 && !(c.layout == kFieldsSign && i == 2)) return false;
  }
  return true;
}

// Whether any plane may shrink; if none can, values are not even split. All threads; ends with a barrier.
template <class SharedMemory>
__device__ __forceinline__ bool may_shrink(const EncodeChunk& c, u32 planes, SharedMemory& shared) {
  for (u32 i = 0; i < planes; i++)
    if (c.coding[i] != kCodeRaw) return true;
  if (warp_id() == 0) {
    const u32 unit = head_unit(c.n * c.width, [&](u32 i) { return c.values[i]; }, shared.head);
    if (lane_id() == 0) shared.unit = unit;
  }
  __syncthreads();
  const bool repeats = shared.unit > 0;
  __syncthreads();
  return repeats;
}

// Codes all planes, the last one first, because a stream may carry the end of the next one. All threads.
template <class Density, class Context>
__device__ __forceinline__ void encode_planes(const EncodeChunk& c, u32 planes, Density density,
                                              ComposedShared<Context>& shared) {
  u8* tables = c.scratch + planes_bytes(c.n, c.width);
  if (threadIdx.x == 0) shared.coded[planes] = Coded{c.scratch, 0, 0, kRaw, 0, false};
  make_multipliers(shared.plane.multipliers);
  __syncthreads();
#pragma unroll 1
  for (u32 i = planes; i-- > 0;) {
    const PlaneJob job{shared.planes.at[i],
                       plane_size(c.layout, c.width, c.n, i),
                       c.coding[i],
                       c.tables[i],
                       Context::contexts_of(c, i, shared.planes),
                       reinterpret_cast<SharedTable*>(tables),
                       shared.coded[i + 1],
                       tables + Context::tables_bytes_of(c)};
    const Coded coded = encode_plane(job, density, shared.plane);
    __syncthreads();
    if (threadIdx.x == 0) shared.coded[i] = coded;
    __syncthreads();
  }
}

// Predicts a chunk's values, splits them, and codes the planes; leaves in scratch memory what `gather_composed`
// makes the frame from. All threads.
template <class Predict, class Context>
__device__ __forceinline__ void encode_composed(const EncodeChunk& c, EncodeResult& result) {
  __shared__ ComposedShared<Context> shared;
  const u32 planes = planes_of(c.layout, c.width);
  const bool good = fits(c, planes) && Predict::suits(c) && Context::suits(c, planes);
  const bool codes = good && may_shrink(c, planes, shared.plane);
  if (codes) {
    if (threadIdx.x < planes)
      shared.planes.at[threadIdx.x] = c.scratch + plane_at(c.layout, c.width, c.n, threadIdx.x);
    __syncthreads();
    split_chunk(c.layout, c.width, ValueSpan{c.values, c.n}, Predict::of(c), shared.planes);
    Context::prepare(c);
    __syncthreads();
    encode_planes(c, planes, Predict::density(c), shared);
  }
  if (threadIdx.x != 0) return;
  clear_result(result, good ? kOk : kUnsupported);
  if (!good) return;
  for (u32 i = 0; codes && i < planes; i++) {
    const Coded& coded = shared.coded[i];
    const u32 carried = i > 0 ? shared.coded[i - 1].carried : 0;
    result.stream[i] = StreamEntry{coded.codec, coded.param, 0, coded.len - carried};
    result.shared |= coded.shared;
  }
  finish_result(result, codes ? planes : 0, c.n * c.width);
}

// Writes the frame. All threads.
__device__ __forceinline__ void gather_composed(const EncodeChunk& c, EncodeResult& result, u8* frames,
                                                u64 capacity) {
  if (!has_room(result, capacity)) return;
  u8* const to = frames + result.offset;
  if (result.plain) return write_plain(c.values, result.len, to);
  write_frame_header(result, to);
  u32 at = header_len(result.streams);
  for (u32 i = 0; i < result.streams; i++) {
    const StreamEntry& e = result.stream[i];
    copy_padded(c.scratch + plane_at(c.layout, c.width, c.n, i), to + at, e.len);
    at += round_up(e.len, 16);
  }
}

// ---- decode ----

// The parts of a chunk's scratch memory, and its planes.
struct DecodeState {
  PlaneSet planes;  // in scratch or, if stored raw, in the frame
  u8* buffers;      // the planes that are not in the frame
  u8* joined;       // a stream, joined with its end that was carried
  u8* carries[2];   // what the current and the previous stream carry, by the parity of their index
};

__device__ __forceinline__ bool fits(const DecodeChunk& c, u32 planes) {
  if (planes == 0 || planes != c.planes) return false;
  return c.n > 0 && static_cast<u64>(c.n) * c.width <= kMaxDecodeBytes;
}

__device__ __forceinline__ DecodeState make_state(const DecodeChunk& c) {
  DecodeState s{};
  const u64 carry = round_up64(static_cast<u64>(c.n) * c.width / 64, 16) + 64;
  s.buffers = c.scratch;
  s.carries[0] = c.scratch + planes_bytes(c.n, c.width);
  s.carries[1] = s.carries[0] + carry;
  s.joined = s.carries[1] + carry;  // room for the frame's length and a third `carry`
  return s;
}

// Decodes stream `i`, whose last `tail` bytes the previous one carried; sets `tail` to the number of bytes that
// this one carries. All threads; ends with a barrier.
template <class Context>
__device__ __forceinline__ Status decode_stream(const DecodeChunk& c, u32 i, DecodeState& s, u32& tail,
                                                PlaneDecodeShared<Context>& shared) {
  const DecodeStream& e = c.streams[i];
  const u32 size = plane_size(c.layout, c.width, c.n, i);
  const u8* from = c.frame + e.offset;
  if (e.codec == kRaw && e.param == 0 && tail == 0 && e.len == size) {
    s.planes.at[i] = const_cast<u8*>(from);  // the plane is only read
    return kOk;
  }
  StreamBytes stream{from, e.len};
  if (tail > 0) {
    copy_padded(from, s.joined, e.len);
    __syncthreads();
    copy_bytes(s.carries[1 - i % 2], s.joined + e.len, tail);
    stream = StreamBytes{s.joined, e.len + tail};
    const u32 behind = stream.len + threadIdx.x;  // readers load whole vectors
    if (behind < round_up(stream.len, 16)) s.joined[behind] = 0;
    __syncthreads();
  }
  s.planes.at[i] = s.buffers + plane_at(c.layout, c.width, c.n, i);
  tail = 0;
  const PlaneTarget to{stream, s.planes.at[i], size, c.tables[i], Context::contexts_of(c, i, s.planes), Context::entries_of(c),
                       s.carries[i % 2]};
  return decode_plane(e.codec, e.param, to, tail, shared);
}

template <class Predict, class Context>
__device__ __forceinline__ Status decode_chunk(const DecodeChunk& c, PlaneDecodeShared<Context>& shared) {
  const u32 planes = planes_of(c.layout, c.width);
  if (c.plain) {
    if (static_cast<u64>(c.n) * c.width != c.frame_len) return kCorrupt;
    copy_bytes(c.frame, c.values, c.frame_len);
    return kOk;
  }
  if (!fits(c, planes) || !Predict::suits(c) || !Context::suits(c, planes)) return kUnsupported;
  Context::prepare(c);  // there is a barrier before the first symbol is decoded
  DecodeState s = make_state(c);
  u32 tail = 0;
#pragma unroll 1
  for (u32 i = 0; i < planes; i++) {
    const Status status = decode_stream(c, i, s, tail, shared);
    if (status != kOk) return status;
  }
  if (tail > 0) return kCorrupt;  // the last stream carries bytes, but there is no next one
  merge_chunk(c.layout, c.width, s.planes, Predict::of(c), c.n, c.values);
  return kOk;
}

template <class Predict, class Context>
__device__ __forceinline__ void decode_composed(const DecodeChunk& c, u32& status) {
  __shared__ PlaneDecodeShared<Context> shared;
  if (status != kOk) return;
  __syncthreads();  // all threads have read `status`
  const Status result = decode_chunk<Predict>(c, shared);
  if (threadIdx.x == 0) status = result;
}

}  // namespace s4
