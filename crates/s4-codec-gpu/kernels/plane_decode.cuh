// Decodes one stream of a chunk into its plane: raw, const, bits, rANS of both precisions. Safe on any bytes.
#pragma once

#include "frame.cuh"
#include "rans_decode.cuh"

namespace s4 {

// Most segments of a plane: kMaxDecodeBytes in the smallest ones.
constexpr u32 kMostSegments = kMaxDecodeBytes >> 12;
constexpr u32 kDecodeWarps = kComposedThreads / kLanes;
using PlaneWords = WordSource<false>;

struct PlaneDecodeShared {
  u32 entries[1 << 12];             // P = 12
  AlignedTable<u32, kTotal> pairs;  // P = 8
  Header<kMostSegments> header;
  __align__(16) u16 words[kDecodeWarps][PlaneWords::kBytes / 2];
};

// A stream, whole: 16-byte aligned.
struct StreamBytes {
  const u8* at;
  u32 len;
};

// Replaces the escapes of a block and says which symbols they are: P = 8 marks them in the entries, P = 12
// knows them by their slots.
template <u32 kBits>
__device__ __forceinline__ void pop_plane_block(u32& x, PlaneWords& words, Shared entries, u32 escape,
                                                u32* symbols) {
  if (kBits == 8) return pop_block(x, words, entries, symbols);
  u32 left = 0;
  symbols[0] = symbols[1] = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    if (k % 4 == 0) words.prepare();
    const u32 slot = x & 0xfff, entry = load_shared(entries + 4 * slot);
    x = ((entry >> 20) + 1) * (x >> 12) + (entry & 0xfff);
    symbols[k / 4] |= (entry >> 12 & 0xff) << (8 * (k % 4));
    left |= slot < escape ? 1u << k : 0;
    words.refill(x);
  }
  if (__any_sync(kAllLanes, left)) pop_escapes(x, words, left, symbols);
}

// Decodes symbols `first .. end-1` from state `x` on into the plane; false if the segment is not sound. One
// warp.
template <u32 kBits>
__device__ __forceinline__ bool decode_plane_segment(u8* plane, u32 first, u32 end, u32& x, Shared entries,
                                                     u32 escape, PlaneWords& words) {
  if (!__all_sync(kAllLanes, x >= kLow)) return false;
  const u32 mine = lane_id() * kOctet;
#pragma unroll 1
  for (u32 at = first; at < end; at += kBlock) {
    u32 symbols[2];
    pop_plane_block<kBits>(x, words, entries, escape, symbols);
    const u32 left = values_left(at + mine, end);
    u8* to = plane + at + mine;
    if (left == kOctet) {
      *reinterpret_cast<uint2*>(to) = make_uint2(symbols[0], symbols[1]);
    } else {
      store_bytes<8>(to, symbols, left);
    }
  }
  return words.all_taken();
}

// Decodes every `kDecodeWarps`-th segment and puts what it carries at `carry`; false if one is not sound.
// One warp.
template <u32 kBits>
__device__ __forceinline__ bool decode_plane_segments(const StreamBytes& stream, u8* plane, u32 size, u8* carry,
                                                      PlaneDecodeShared& shared) {
  const auto& h = shared.header;
  const Shared entries = shared_address(kBits == 8 ? shared.pairs.get() : shared.entries);
#pragma unroll 1
  for (u32 i = uniform_warp_id(); i < h.fixed.segments; i += kDecodeWarps) {
    const u32 at = h.segment_at[i], first = i << h.fixed.segment_log2;
    u32 x = *reinterpret_cast<const u32*>(stream.at + at + 4 * lane_id());
    PlaneWords words(shared.words[warp_id()], stream.at, at + kStatesBytes, h.words[i]);
    const u32 end = min(size - first, 1u << h.fixed.segment_log2) + first;
    const bool sound = decode_plane_segment<kBits>(plane, first, end, x, entries, h.fixed.escape, words);
    if (!__all_sync(kAllLanes, sound && x - kLow < (h.fixed.carried > 0 ? kLow : 1))) return false;
    if (h.fixed.carried > 0) *reinterpret_cast<u16*>(carry + i * kCarryBytes + 2 * lane_id()) = static_cast<u16>(x);
    __syncwarp();
  }
  return true;
}

// What a stream is decoded with, and into.
struct PlaneTarget {
  u8* plane;                 // 16-byte aligned
  u32 size;                  // at least 1
  const SharedTable* table;  // or null
  u8* carry;                 // what the stream carries: 64 bytes for each 4096 symbols
};

// All threads; ends with a barrier. `carried`: bytes at `to.carry`.
template <u32 kBits>
__device__ __forceinline__ Status decode_rans(const StreamBytes& stream, const PlaneTarget& to, u32& carried,
                                              PlaneDecodeShared& shared) {
  u32* const entries = kBits == 8 ? shared.pairs.get() : shared.entries;
  const Status status = read_header<kBits>(stream.at, stream.len, to.size, to.table, shared.header, entries);
  if (status != kOk) return status;
  carried = shared.header.fixed.carried;
  const bool sound = decode_plane_segments<kBits>(stream, to.plane, to.size, to.carry, shared);
  return __syncthreads_or(!sound) ? kCorrupt : kOk;
}

__device__ __forceinline__ Status decode_const(const StreamBytes& stream, const PlaneTarget& to) {
  const u32 unit = stream.len;
  if (unit == 0 || unit > kMaxUnit || unit > to.size) return kCorrupt;
#pragma unroll 1
  for (u32 at = 4 * threadIdx.x; at < to.size; at += 4 * blockDim.x) {
    u32 word = 0;
    for (u32 k = 0; k < 4; k++) word |= static_cast<u32>(stream.at[(at + k) % unit]) << (8 * k);
    store_bytes<4>(to.plane + at, &word, min(4u, to.size - at));
  }
  __syncthreads();
  return kOk;
}

__device__ __forceinline__ Status decode_bits(u32 width, const StreamBytes& stream, const PlaneTarget& to) {
  if (width < 1 || width > 7) return kUnsupported;
  const u32 len = to.size / 8 * width + (to.size % 8 * width + 7) / 8;
  if (stream.len != len) return kCorrupt;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < (to.size + 7) / 8; i += blockDim.x) {
    const u32 left = values_left(8 * i, to.size), bytes = min(width, len - width * i);
    u64 packed = 0;
#pragma unroll 1
    for (u32 k = 0; k < bytes; k++) packed |= static_cast<u64>(stream.at[width * i + k]) << (8 * k);
    const u32 mask = (1u << width) - 1;
#pragma unroll 1
    for (u32 k = 0; k < left; k++) to.plane[8 * i + k] = static_cast<u8>(packed >> (width * k) & mask);
  }
  __syncthreads();
  return kOk;
}

// Decodes a stream that is whole. All threads; ends with a barrier.
__device__ __forceinline__ Status decode_plane(u32 codec, u32 param, const StreamBytes& stream,
                                               const PlaneTarget& to, u32& carried, PlaneDecodeShared& shared) {
  switch (codec) {
    case kRaw:
      if (param != 0) return kUnsupported;
      if (stream.len != to.size) return kCorrupt;
      copy_padded(stream.at, to.plane, to.size);
      __syncthreads();
      return kOk;
    case kConst: return param != 0 ? kUnsupported : decode_const(stream, to);
    case kBits: return decode_bits(param, stream, to);
    case kRans:
      if (param == 8) return decode_rans<8>(stream, to, carried, shared);
      return param == 12 ? decode_rans<12>(stream, to, carried, shared) : kUnsupported;
    default: return kUnsupported;
  }
}

}  // namespace s4
