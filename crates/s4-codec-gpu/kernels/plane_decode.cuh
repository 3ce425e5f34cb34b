// Decodes one stream of a chunk into its plane: raw, const, bits, rANS of both precisions. Safe on any bytes.
#pragma once

#include "frame.cuh"
#include "plane_contexts.cuh"
#include "rans_decode.cuh"

namespace s4 {

// Most segments that a plane can have: kMaxDecodeBytes in segments of the smallest size.
constexpr u32 kMostSegments = kMaxDecodeBytes >> 12;
constexpr u32 kDecodeWarps = kComposedThreads / kLanes;
using PlaneWords = WordSource<false>;

template <class Context>
struct PlaneDecodeShared {
  typename Context::Entries entries;
  Header<kMostSegments> header;
  __align__(16) u16 words[kDecodeWarps][PlaneWords::kBytes / 2];
};

// A whole stream, with the bytes that were carried; 16-byte aligned.
struct StreamBytes {
  const u8* at;
  u32 len;
};

// A stream to decode, what it is decoded with, and where it goes.
struct PlaneTarget {
  StreamBytes from;
  u8* plane;                 // 16-byte aligned
  u32 size;                  // at least 1
  TableSet tables;           // the tensor's
  PlaneContexts contexts;    // of each symbol
  u32* entries;              // scratch memory, for contexts.cuh
  u8* carry;                 // where carried bytes go: room for 64 for each 4096 symbols; null if nothing is carried

  __device__ __forceinline__ u32 symbols() const { return size; }
  __device__ __forceinline__ const u8* stream() const { return from.at; }
  // The lane's, of the states at `at`.
  __device__ __forceinline__ u32 load_state(u32 at) const {
    return reinterpret_cast<const u32*>(from.at + at)[lane_id()];
  }
  __device__ __forceinline__ void store_carried(u32 segment, u16 word) const {
    if (carry != nullptr) *reinterpret_cast<u16*>(carry + segment * kCarryBytes + 2 * lane_id()) = word;
  }

  // Stores symbols `first .. end-1`.
  template <class Pop>
  __device__ __forceinline__ void blocks(u32 first, u32 end, const Pop& pop) const {
    const u32 mine = lane_id() * kOctet;
#pragma unroll 1
    for (u32 at = first; at < end; at += kBlock) {
      u32 symbols[2];
      pop(at + mine, symbols);
      const u32 left = values_left(at + mine, end);
      u8* to = plane + at + mine;
      if (left == kOctet) {
        *reinterpret_cast<uint2*>(to) = make_uint2(symbols[0], symbols[1]);
      } else {
        store_bytes<8>(to, symbols, left);
      }
    }
  }
};

// One table with P = 12 for all symbols.
struct WideTable {
  Shared entries;
  u32 escape;  // its frequency

  // Escapes are recognized by their slots (with P = 8 the entries mark them).
  template <class Words>
  __device__ __forceinline__ void pop(u32& x, Words& words, u32, u32* symbols) const {
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
};

// The context of every symbol is 0: one table decodes them all.
struct DecodeOneTable {
  struct Entries {
    u32 wide[1 << 12];                // P = 12
    AlignedTable<u32, kTotal> pairs;  // P = 8

    template <u32 kBits>
    __device__ __forceinline__ u32* get() {
      return kBits == 8 ? pairs.get() : wide;
    }
  };
  __device__ __forceinline__ static bool suits(const DecodeChunk&, u32) { return true; }
  __device__ __forceinline__ static void prepare(const DecodeChunk&) {}
  __device__ __forceinline__ static PlaneContexts contexts_of(const DecodeChunk&, u32, const PlaneSet&) {
    return PlaneContexts{};
  }
  __device__ __forceinline__ static u32* entries_of(const DecodeChunk&) { return nullptr; }

  // Reads a stream's header and table. All threads; all return the same; ends with a barrier.
  template <u32 kBits>
  __device__ __forceinline__ static Status read(const PlaneTarget& to, PlaneDecodeShared<DecodeOneTable>& shared) {
    return read_header<kBits>(to.from.at, to.from.len, to.size, to.tables, shared.header,
                              shared.entries.template get<kBits>());
  }
  // Calls `decode` with the table that decodes symbols.
  template <u32 kBits, class Decode>
  __device__ __forceinline__ static bool with_tables(const PlaneTarget&, PlaneDecodeShared<DecodeOneTable>& shared,
                                                     const Decode& decode) {
    const Shared entries = shared_address(shared.entries.template get<kBits>());
    if constexpr (kBits == 8) return decode(PairTable{entries});
    else return decode(WideTable{entries, shared.header.fixed.escape});
  }
};

// Decodes a stream; sets `carried` to the number of bytes put at `to.carry`. All threads; ends with a barrier.
template <u32 kBits, class Context>
__device__ __forceinline__ Status decode_rans(PlaneTarget to, u32& carried, PlaneDecodeShared<Context>& shared) {
  const Status status = Context::template read<kBits>(to, shared);
  if (status != kOk) return status;
  carried = shared.header.fixed.carried;
  if (carried == 0) to.carry = nullptr;
  const bool sound = Context::template with_tables<kBits>(to, shared, [&](const auto& tables) {
    return decode_segments<PlaneWords>(shared.header, tables, to, shared.words);
  });
  return __syncthreads_or(!sound) ? kCorrupt : kOk;
}

__device__ __forceinline__ Status decode_const(const PlaneTarget& to) {
  const u32 unit = to.from.len;
  if (unit == 0 || unit > kMaxUnit || unit > to.size) return kCorrupt;
#pragma unroll 1
  for (u32 at = 4 * threadIdx.x; at < to.size; at += 4 * blockDim.x) {
    u32 word = 0;
    for (u32 k = 0; k < 4; k++) word |= static_cast<u32>(to.from.at[(at + k) % unit]) << (8 * k);
    store_bytes<4>(to.plane + at, &word, min(4u, to.size - at));
  }
  __syncthreads();
  return kOk;
}

__device__ __forceinline__ Status decode_bits(u32 width, const PlaneTarget& to) {
  if (width < 1 || width > 7) return kUnsupported;
  const u32 len = to.size / 8 * width + (to.size % 8 * width + 7) / 8;
  if (to.from.len != len) return kCorrupt;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < (to.size + 7) / 8; i += blockDim.x) {
    const u32 left = values_left(8 * i, to.size), bytes = min(width, len - width * i);
    u64 packed = 0;
#pragma unroll 1
    for (u32 k = 0; k < bytes; k++) packed |= static_cast<u64>(to.from.at[width * i + k]) << (8 * k);
    const u32 mask = (1u << width) - 1;
#pragma unroll 1
    for (u32 k = 0; k < left; k++) to.plane[8 * i + k] = static_cast<u8>(packed >> (width * k) & mask);
  }
  __syncthreads();
  return kOk;
}

// Decodes a whole stream. All threads; ends with a barrier.
template <class Context>
__device__ __forceinline__ Status decode_plane(u32 codec, u32 param, const PlaneTarget& to, u32& carried,
                                               PlaneDecodeShared<Context>& shared) {
  switch (codec) {
    case kRaw:
      if (param != 0) return kUnsupported;
      if (to.from.len != to.size) return kCorrupt;
      copy_padded(to.from.at, to.plane, to.size);
      __syncthreads();
      return kOk;
    case kConst: return param != 0 ? kUnsupported : decode_const(to);
    case kBits: return decode_bits(param, to);
    case kRans:
      if (param == 8) return decode_rans<8>(to, carried, shared);
      return param == 12 ? decode_rans<12>(to, carried, shared) : kUnsupported;
    default: return kUnsupported;
  }
}

}  // namespace s4
