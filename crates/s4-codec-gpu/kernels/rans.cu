// Kernels of codec `rans` fused with splitting and merging: values in, plane E coded and the other
// planes as they are, and back. Batched over chunks: one thread block of `s4::kThreads<width>` threads
// a chunk. They allocate nothing and know no names; who calls them checks sizes and alignment.
//
// The stream of plane E carries the last `s4::carried_bytes(n)` bytes of plane A, so that plane A is
// stored without them. Where plane E is stored as it is, nothing is carried.

#include "rans_decode.cuh"
#include "rans_encode.cuh"

namespace s4 {

// A chunk to encode: 1 to `kMaxChunk` values. Values may lie anywhere, which is fast if 16-byte
// aligned; raw planes are 16-byte aligned. They are written as a whole, with what is carried: only
// afterwards it is known whether plane E is stored as a stream.
struct EncodeChunk {
  const u8* values;
  RawPlanes raw;
  u32 n;
  u32 reserved;
};

template <int kWidth>
struct __align__(kCodersBytes) EncodeShared {
  Coder coders[256];
  Model model;
  u32 words[kWarps<kWidth>];
  union {
    struct {
      Histogram hist;
      u32 counts[256];
    } count;
    __align__(16) u16 words[kWarps<kWidth>][WordSink::kBytes / 2];
  } u;
};

// Encodes a chunk into its slot. All threads; ends with a barrier.
template <int kWidth>
__device__ __forceinline__ void encode_chunk(const EncodeChunk& chunk, Slot<kWidth>& slot,
                                             EncodeShared<kWidth>& shared) {
  const u32 start = start_state<kWidth>(chunk.values, chunk.n);  // early: the load takes its time
  make_model<kWidth>(chunk.values, chunk.n, shared.u.count.hist, shared.u.count.counts, shared.model);
  const bool round = make_coders(shared.model, shared.coders);
  const u32 warp = uniform_warp_id(), first = warp * kSegment;
  if (first < chunk.n) {
    const u32 padding = shared.model.symbol[shared.model.kept - 1];
    const SegmentSource<kWidth> src{chunk.values, chunk.raw, chunk.n, padding * 0x01010101u,
                                    is_aligned(chunk.values)};
    const Shared coders = shared_address(shared.coders);
    u16* end = slot.segments[warp] + kSlotWords;
    WordSink sink(shared.u.words[warp], end);
    const u8* states = round ? encode_segment<kWidth, true>(src, first, start, coders, sink)
                             : encode_segment<kWidth, false>(src, first, start, coders, sink);
    const u64 bytes = reinterpret_cast<const u8*>(end) - states;
    if (lane_id() == 0) shared.words[warp] = static_cast<u32>(bytes - kStatesBytes) / 2;
  }
  __syncthreads();
  write_head(slot, shared.model, chunk.n, shared.words);
  __syncthreads();
}

template <int kWidth>
__device__ __forceinline__ void encode_kernel(const EncodeChunk* chunks, Slot<kWidth>* slots, u32* lens) {
  __shared__ EncodeShared<kWidth> shared;
  Slot<kWidth>& slot = slots[blockIdx.x];
  encode_chunk<kWidth>(chunks[blockIdx.x], slot, shared);
  if (threadIdx.x == 0) lens[blockIdx.x] = stored_len(slot, chunks[blockIdx.x].n);
}

template <int kWidth>
struct __align__(4 * kTotal) DecodeShared {
  u32 entries[kTotal];
  DecodeChunk chunk;
  Header header;
  u16 carry[kMaxSegments * kLanes];
  __align__(16) u16 rings[kWarps<kWidth>][WordSource::kBytes / 2];
};

// Decodes every `kWarps`-th segment of a chunk; false if one is not sound. One warp.
template <int kWidth>
__device__ __forceinline__ bool decode_segments(DecodeShared<kWidth>& shared) {
  const DecodeChunk& chunk = shared.chunk;
  const Header& h = shared.header;
  const Shared entries = shared_address(shared.entries);
  const u32 warp = uniform_warp_id();
  for (u32 i = warp; i < h.segments; i += kWarps<kWidth>) {
    const u32 at = h.segment_at[i], first = i << h.segment_log2;
    u32 x = *reinterpret_cast<const u32*>(chunk.stream + at + 4 * lane_id());
    WordSource words(shared.rings[warp], chunk.stream, at + kStatesBytes, h.words[i]);
    const u32 end = min(chunk.n - first, 1u << h.segment_log2) + first;
    const bool sound = decode_segment<kWidth>(chunk, first, end, x, entries, words);
    if (!__all_sync(kAllLanes, sound && x - kLow < (h.carried > 0 ? kLow : 1))) return false;
    shared.carry[i * kLanes + lane_id()] = static_cast<u16>(x);
  }
  return true;
}

// Gives the last values their bytes A, once they have all other bits. All threads.
template <int kWidth>
__device__ __forceinline__ void restore_carried(const DecodeShared<kWidth>& shared) {
  const DecodeChunk& chunk = shared.chunk;
  const u32 carried = shared.header.carried;
  for (u32 i = threadIdx.x; 2 * i < carried; i += kThreads<kWidth>) {
    const u32 pair = shared.carry[i];
    u8* p = chunk.values + static_cast<u64>(chunk.n - carried + 2 * i) * kWidth;
    replace_a<kWidth>(p, pair & 0xff);
    replace_a<kWidth>(p + kWidth, pair >> 8);
  }
}

template <int kWidth>
__device__ __forceinline__ void decode_kernel(const DecodeChunk* chunks, u32* status) {
  __shared__ DecodeShared<kWidth> shared;
  const DecodeChunk chunk = chunks[blockIdx.x];
  if (threadIdx.x == 0) shared.chunk = chunk;
  u32 result = read_header(chunk.stream, chunk.stream_len, chunk.n, shared.header, shared.entries);
  if (result == kOk && chunk.a_len + shared.header.carried != chunk.n) result = kCorrupt;
  if (result == kOk) {
    const bool sound = decode_segments<kWidth>(shared);
    result = __syncthreads_or(!sound) ? kCorrupt : kOk;
    if (result == kOk) restore_carried<kWidth>(shared);
  }
  if (threadIdx.x == 0) status[blockIdx.x] = result;
}

constexpr u32 kScanThreads = 1024;

}  // namespace s4

// The blocks a multiprocessor that the bounds below ask for were the fastest on an H200: fewer registers
// than they leave mean spills, fewer blocks too little to do while loads are under way.

// Encode: grid = chunks. `lens[i]` becomes the bytes of the stream that `slots[i]` holds in parts.
extern "C" __global__ void __launch_bounds__(s4::kThreads<2>, 5)
s4_rans_encode_w2(const s4::EncodeChunk* chunks, s4::Slot<2>* slots, s4::u32* lens) {
  s4::encode_kernel<2>(chunks, slots, lens);
}

extern "C" __global__ void __launch_bounds__(s4::kThreads<4>, 9)
s4_rans_encode_w4(const s4::EncodeChunk* chunks, s4::Slot<4>* slots, s4::u32* lens) {
  s4::encode_kernel<4>(chunks, slots, lens);
}

// Where each stream goes: `offsets[i]` for `i` in `0 ..= count`, each a multiple of 16. One block of
// `kScanThreads` threads.
extern "C" __global__ void __launch_bounds__(s4::kScanThreads)
s4_rans_offsets(const s4::u32* lens, s4::u64* offsets, s4::u32 count) {
  using namespace s4;
  __shared__ u64 warp_sums[kScanThreads / kLanes];
  const u32 each = (count + kScanThreads - 1) / kScanThreads;
  const u32 first = min(count, threadIdx.x * each), end = min(count, first + each);
  u64 sum = 0;
  for (u32 i = first; i < end; i++) sum += round_up(lens[i], 16);
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
    offsets[i] = at;
    at += round_up(lens[i], 16);
  }
  if (threadIdx.x == kScanThreads - 1) offsets[count] = at;
}

// Puts the planes together, one behind the other: grid = chunks. `to` is 16-byte aligned and may be
// mapped host memory; `offsets[count]` bytes of it are written.
extern "C" __global__ void __launch_bounds__(s4::kThreads<2>)
s4_rans_gather_w2(const s4::EncodeChunk* chunks, const s4::Slot<2>* slots, const s4::u64* offsets,
                  s4::u8* to) {
  const s4::EncodeChunk& chunk = chunks[blockIdx.x];
  s4::store_plane<2>(slots[blockIdx.x], chunk.values, chunk.n, to + offsets[blockIdx.x]);
}

extern "C" __global__ void __launch_bounds__(s4::kThreads<4>)
s4_rans_gather_w4(const s4::EncodeChunk* chunks, const s4::Slot<4>* slots, const s4::u64* offsets,
                  s4::u8* to) {
  const s4::EncodeChunk& chunk = chunks[blockIdx.x];
  s4::store_plane<4>(slots[blockIdx.x], chunk.values, chunk.n, to + offsets[blockIdx.x]);
}

// Decode: grid = chunks. `status[i]` becomes `s4::Status`; unless it is `kOk` the values are unspecified.
extern "C" __global__ void __launch_bounds__(s4::kThreads<2>, 5)
s4_rans_decode_w2(const s4::DecodeChunk* chunks, s4::u32* status) {
  s4::decode_kernel<2>(chunks, status);
}

extern "C" __global__ void __launch_bounds__(s4::kThreads<4>, 8)
s4_rans_decode_w4(const s4::DecodeChunk* chunks, s4::u32* status) {
  s4::decode_kernel<4>(chunks, status);
}
