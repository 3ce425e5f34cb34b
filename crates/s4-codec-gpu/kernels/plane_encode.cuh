// Codes one plane of a chunk that was split: const, bits, rANS of both precisions, or not at all. Divides by
// division, where rans_encode.cuh multiplies: this is for the planes that are not a model's weights.
#pragma once

#include "rans_encode.cuh"

namespace s4 {

// How to code one symbol: bits 0..12 frequency, 13..24 first slot, 31 escape.
constexpr u32 kPlaneEscape = 1u << 31;

constexpr u32 kComposedWarps = kComposedThreads / kLanes;
constexpr u32 kMaxPlaneSegments = kMaxPlaneBytes / kSegment;
static_assert(kSegmentScratch % 16 == 0 && kSegmentScratch >= 3 * kSegment + kStatesBytes + 4,
              "three bytes for each symbol, states, and what copy_shifted reads in front");

// A coded stream, or the plane itself, in memory.
struct Coded {
  const u8* at;
  u32 len;      // of the whole stream, with what the one before it carries
  u32 carried;  // bytes of the stream behind it that it carries
  u8 codec, param;
  bool shared;
};

struct PlaneShared {
  u32 coders[256];
  u32 words[kMaxPlaneSegments];
  u32 unit;
  u8 head[kHeadBytes];
  Model model;
  union {
    struct {
      Histogram hist;
      u32 counts[256];
    } count;
    __align__(16) u16 words[kComposedWarps][WordSink::kBytes / 2];
  } u;
};

// What a plane is coded with.
struct PlaneJob {
  const u8* plane;            // 16-byte aligned
  u32 size;                   // at least 1
  u32 coding;
  const SharedTable* table;   // or null
  Coded behind;               // the next stream; length 0 if there is none
  u8* stream;                 // where a stream goes: `size` bytes, 16-byte aligned
  u8* segments;               // kSegmentScratch for each segment
};

template <u32 kBits>
__device__ __forceinline__ void push_plane_symbol(u32& x, u32 coder) {
  const u32 freq = coder & 0x1fff, quotient = x / freq;
  x = (quotient << kBits) + (coder >> 13 & 0xfff) + (x - quotient * freq);
}

// Codes eight symbols of each lane.
template <u32 kBits>
__device__ __forceinline__ void push_plane_block(u32& x, WordSink& sink, const u32* coders, const u32* symbols) {
  u32 c[8], left = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    c[k] = coders[byte_of(symbols, k)];
    left |= c[k] >> 31 << k;
  }
  if (__any_sync(kAllLanes, left)) push_escapes(x, sink, left, symbols);
  if (kBits == 8) {
#pragma unroll
    for (int k = 6; k >= 0; k -= 2) {
      sink.put(x, (c[k] & 0x1fff) * (c[k + 1] & 0x1fff) << 16);
      push_plane_symbol<kBits>(x, c[k + 1]);
      push_plane_symbol<kBits>(x, c[k]);
    }
  } else {
#pragma unroll
    for (int k = 7; k >= 0; k--) {
      const u32 freq = c[k] & 0x1fff;
      sink.put(x, freq << 20, freq < 4096);  // 4096 << 20 is more than any state
      push_plane_symbol<kBits>(x, c[k]);
    }
  }
  sink.flush_pieces();
}

// Codes symbols `first .. end-1` from state `x` on; returns where the segment's states are. One warp.
template <u32 kBits>
__device__ __forceinline__ const u8* encode_plane_segment(const u8* plane, u32 first, u32 end, u32 x,
                                                          const u32* coders, u32 padding, WordSink& sink) {
  const u32 mine = lane_id() * kOctet;
#pragma unroll 1
  for (u32 at = first + (end - first - 1) / kBlock * kBlock;; at -= kBlock) {
    const u32 left = values_left(at + mine, end);
    u32 symbols[2];
    if (left == kOctet) {
      const uint2 v = *reinterpret_cast<const uint2*>(plane + at + mine);
      symbols[0] = v.x, symbols[1] = v.y;
    } else {
#pragma unroll
      for (u32 k = 0; k < 8; k++) {
        const u32 symbol = k < left ? plane[at + mine + k] : padding;
        symbols[k / 4] = (k % 4 ? symbols[k / 4] : 0) | symbol << (8 * (k % 4));
      }
    }
    push_plane_block<kBits>(x, sink, coders, symbols);
    if (at == first) return sink.finish(x);
  }
}

// Bytes that a stream of `size` symbols carries of the one behind it.
__device__ __forceinline__ u32 carried_of(u32 size, u32 behind) {
  const u32 bytes = kCarryBytes * segments_of(size);
  return bytes <= behind ? bytes : 0;
}

// Codes all segments into their scratch and their numbers of words into `shared.words`. All threads; ends
// with a barrier.
template <u32 kBits>
__device__ __forceinline__ void encode_plane_segments(const PlaneJob& job, u32 carried, PlaneShared& shared) {
  const Model& model = shared.model;
  const u32 padding = model.symbol[model.kept - 1];
  const u8* tail = job.behind.at + (job.behind.len - carried);
#pragma unroll 1
  for (u32 i = uniform_warp_id(); i < segments_of(job.size); i += kComposedWarps) {
    u32 x = kLow;
    if (carried > 0) {
      const u8* word = tail + i * kCarryBytes + 2 * lane_id();
      x |= word[0] | word[1] << 8;
    }
    u16* end = reinterpret_cast<u16*>(job.segments + (i + 1) * kSegmentScratch);
    WordSink sink(shared.u.words[warp_id()], end);
    const u32 first = i * kSegment, last = min(job.size, first + kSegment);
    const u8* states = encode_plane_segment<kBits>(job.plane, first, last, x, shared.coders, padding, sink);
    if (lane_id() == 0)
      shared.words[i] = static_cast<u32>(reinterpret_cast<const u8*>(end) - states - kStatesBytes) / 2;
    __syncwarp();
  }
  __syncthreads();
}

// Puts head and segments together. All threads; ends with a barrier.
__device__ __forceinline__ void assemble_stream(const PlaneJob& job, const Head& head) {
  for (u32 i = threadIdx.x; i < head.len(); i += blockDim.x) job.stream[i] = head.byte(i);
  u32 at = head.len();
#pragma unroll 1
  for (u32 i = 0; i < segments_of(job.size); i++) {
    const u32 len = kStatesBytes + 2 * head.words[i];
    if (i % kComposedWarps == warp_id())
      copy_shifted(job.segments + (i + 1) * kSegmentScratch - len, job.stream + at, len);
    at += round_up(len, kAlign);
  }
  __syncthreads();
}

// How to code each symbol, by symbol. All threads; ends with a barrier.
__device__ __forceinline__ void make_plane_coders(const Model& model, u32* coders) {
  for (u32 s = threadIdx.x; s < 256; s += blockDim.x) coders[s] = model.escape | kPlaneEscape;
  __syncthreads();
  for (u32 i = threadIdx.x; i < model.kept; i += blockDim.x)
    coders[model.symbol[i]] = model.freq[i] | static_cast<u32>(model.start[i]) << 13;
  __syncthreads();
}

// Codes a plane by rANS, unless that is not shorter. All threads.
template <u32 kBits>
__device__ __forceinline__ Coded encode_rans(const PlaneJob& job, PlaneShared& shared) {
  constexpr u32 kSlots = 1u << kBits;
  const u32* counts = shared.u.count.counts;
  count_plane(job.plane, job.size, shared.u.count.hist, shared.u.count.counts);
  make_model(counts, job.size, kSlots, shared.model);
  const bool tensors = choose_table(counts, job.table, job.size, kSlots, shared.model);
  const Model& model = shared.model;
  make_plane_coders(model, shared.coders);
  const u32 carried = carried_of(job.size, job.behind.len);
  encode_plane_segments<kBits>(job, carried, shared);
  const u32 flags = (tensors ? kFlagShared : 0) | (carried > 0 ? kFlagCarries : 0);
  const Head head{model, shared.words, job.size, kBits == 8 ? 1u : 2u, flags};
  const u32 len = head.stream_len();
  if (len >= job.size) return Coded{job.plane, job.size, 0, kRaw, 0, false};
  assemble_stream(job, head);
  return Coded{job.stream, len, carried, kRans, kBits, tensors};
}

// Packs values of 7 bits. All threads; ends with a barrier.
__device__ __forceinline__ Coded encode_bits(const PlaneJob& job) {
  const u32 len = job.size / 8 * 7 + (job.size % 8 * 7 + 7) / 8;
  if (len >= job.size) return Coded{job.plane, job.size, 0, kRaw, 0, false};
#pragma unroll 1
  for (u32 i = threadIdx.x; i < (job.size + 7) / 8; i += blockDim.x) {
    const u32 left = values_left(8 * i, job.size), bytes = min(7u, len - 7 * i);
    u64 packed = 0;
#pragma unroll 1
    for (u32 k = 0; k < left; k++) packed |= static_cast<u64>(job.plane[8 * i + k]) << (7 * k);
#pragma unroll 1
    for (u32 k = 0; k < bytes; k++) job.stream[7 * i + k] = static_cast<u8>(packed >> (8 * k));
  }
  __syncthreads();
  return Coded{job.stream, len, 0, kBits, 7, false};
}

// Whether a plane repeats a unit, whose size `shared.unit` is then. All threads.
__device__ __forceinline__ bool plane_repeats(const PlaneJob& job, PlaneShared& shared) {
  auto get = [&](u32 i) { return job.plane[i]; };
  if (warp_id() == 0) {
    const u32 unit = head_unit(job.size, get, shared.head);
    if (lane_id() == 0) shared.unit = unit;
  }
  __syncthreads();
  const u32 unit = shared.unit;
  return unit > 0 && (job.size <= kHeadBytes || repeats_unit(job.size, get, unit));
}

// Codes a plane. All threads; ends with a barrier.
__device__ __forceinline__ Coded encode_plane(const PlaneJob& job, PlaneShared& shared) {
  if (plane_repeats(job, shared)) return Coded{job.plane, shared.unit, 0, kConst, 0, false};
  switch (job.coding) {
    case kCodeRans8: return encode_rans<8>(job, shared);
    case kCodeRans12: return encode_rans<12>(job, shared);
    case kCodeBits7: return encode_bits(job);
    default: return Coded{job.plane, job.size, 0, kRaw, 0, false};
  }
}

}  // namespace s4
