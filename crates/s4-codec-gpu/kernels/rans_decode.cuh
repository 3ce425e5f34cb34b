// The decoder of plane E of values, and what it shares with that of planes: safe on any bytes. Headers are checked before they are used; words are read through a
// ring that never asks for one behind its segment; the final states and word counts say whether the
// stream was sound.
#pragma once

#include "rans.cuh"

namespace s4 {

// A stream of plane E to decode, and the raw planes beside it, 16-byte aligned. Plane A has `a_len` bytes,
// which must be `n` less those that are carried.
struct FusedStreams {
  const u8* stream;
  RawPlanes raw;
  u8* values;
  u32 stream_len;
  u32 n;
  u32 a_len;
};

// Slots of a table that is being read, and where the parts of a stream are.
template <u32 kMaxSegments>
struct Header {
  u32 escape;
  u32 kept;
  u32 segment_log2;
  u32 segments;
  u32 carried;                    // bytes that the states carry
  u32 counts_at;                  // offset of the word counts
  u32 status;                     // of reading it: a `Status`
  u32 segment_at[kMaxSegments];   // offset of each segment
  u16 words[kMaxSegments];        // of each segment
  u16 start[256];                 // first slot of the i-th symbol
};

// How to take one symbol off the state, by slot. P = 8: bits 0..7 slot - start, 8..15 symbol, 16 escape,
// 17..25 frequency. P = 12: bits 0..11 slot - start, 12..19 symbol, 20..31 frequency - 1.
constexpr u32 kEscapeEntry = 1u << 16;

template <u32 kBits>
__device__ __forceinline__ u32 make_entry(u32 freq, u32 symbol, u32 bias, bool escape) {
  if (kBits == 8) return freq << 17 | (escape ? kEscapeEntry : 0) | symbol << 8 | bias;
  return (freq - 1) << 20 | symbol << 12 | bias;
}

__device__ __forceinline__ u32 load_u16(const u8* p) { return p[0] | p[1] << 8; }
__device__ __forceinline__ u32 load_u32(const u8* p) { return load_u16(p) | load_u16(p + 2) << 16; }

// The table of a stream: its own, or one that the host vouches for.
struct TableBytes {
  const SharedTable* shared;  // null: the table stands in the stream
  const u8* own;              // its symbols, frequencies behind them
  u32 kept;

  __device__ __forceinline__ u32 symbol(u32 i) const { return shared ? shared->symbol[i] : own[i]; }
  template <u32 kBits>
  __device__ __forceinline__ u32 freq(u32 i) const {
    if (shared) return shared->freq[i];
    return kBits == 8 ? own[kept + i] : load_u16(own + kept + 2 * i);
  }
};

// Reads what stands before the table; table and word counts fit into the stream if the answer is `kOk`.
template <u32 kBits, u32 kMaxSegments>
__device__ __forceinline__ Status read_fixed(const u8* stream, u32 len, u32 n, const SharedTable* table,
                                             Header<kMaxSegments>& h) {
  if (len < kHeaderBytes) return kCorrupt;
  if (load_u32(stream) != n) return kCorrupt;
  const u32 lanes_log2 = stream[4], tables = stream[6], flags = stream[7];
  h.segment_log2 = stream[5];
  if (lanes_log2 != 5 || tables != 1 || flags > (kFlagShared | kFlagCarries)) return kUnsupported;
  if (h.segment_log2 < 12 || h.segment_log2 > 15) return kUnsupported;
  h.counts_at = kHeaderBytes;
  if (flags & kFlagShared) {
    if (table == nullptr || table->precision == 0) return kCorrupt;
    if (table->precision != kBits) return kUnsupported;
    h.kept = table->count;
    h.escape = table->escape;
  } else {
    if (len < kHeaderBytes + 4) return kCorrupt;
    h.kept = load_u16(stream + kHeaderBytes);
    h.escape = load_u16(stream + kHeaderBytes + 2);
    h.counts_at += 4 + (kBits == 8 ? 2 : 3) * h.kept;
  }
  if (h.kept > 256 || h.escape > 1u << kBits) return kCorrupt;
  h.segments = ((n - 1) >> h.segment_log2) + 1;
  if (h.segments > kMaxSegments) return kUnsupported;
  h.carried = flags & kFlagCarries ? kCarryBytes * h.segments : 0;
  return h.counts_at + 2 * h.segments > len ? kCorrupt : kOk;
}

// Finds the segments; false if they do not fill the stream. One warp.
template <u32 kMaxSegments>
__device__ __forceinline__ bool find_segments(const u8* stream, u32 len, Header<kMaxSegments>& h) {
  u32 end = h.counts_at + 2 * h.segments, at = round_up(end, kAlign);
#pragma unroll 1
  for (u32 first = 0; first < h.segments; first += kLanes) {
    const u32 i = first + lane_id(), words = i < h.segments ? load_u16(stream + h.counts_at + 2 * i) : 0;
    const u32 size = i < h.segments ? kStatesBytes + 2 * words : 0, padded = round_up(size, kAlign);
    const u32 mine = at + warp_sum_below(padded);
    if (i < h.segments) {
      h.words[i] = static_cast<u16>(words);
      h.segment_at[i] = mine;
      end = mine + size;
    }
    at += warp_sum(padded);
  }
  return warp_max(end) == len;
}

// First slots of all symbols; false if they do not fill the table. One warp.
template <u32 kBits, u32 kMaxSegments>
__device__ __forceinline__ bool find_slots(const TableBytes& table, Header<kMaxSegments>& h) {
  u32 freq[8], sum = 0;
  for (u32 k = 0; k < 8; k++) {
    const u32 i = lane_id() * 8 + k;
    sum += freq[k] = i < h.kept ? table.freq<kBits>(i) : 0;
  }
  u32 at = h.escape + warp_sum_below(sum);
  for (u32 k = 0; k < 8; k++) {
    h.start[lane_id() * 8 + k] = static_cast<u16>(at);
    at += freq[k];
  }
  return lane_id() != kLanes - 1 || at == 1u << kBits;
}

// Reads header and table of a stream of `n` > 0 symbols and fills `entries[2^P]`. All threads, two warps at
// least; all return the same; barriers.
template <u32 kBits, u32 kMaxSegments>
__device__ __forceinline__ Status read_header(const u8* stream, u32 len, u32 n, const SharedTable* shared,
                                              Header<kMaxSegments>& h, u32* entries) {
  if (threadIdx.x == 0) h.status = read_fixed<kBits>(stream, len, n, shared, h);
  __syncthreads();
  if (h.status != kOk) return static_cast<Status>(h.status);

  const TableBytes table{stream[7] & kFlagShared ? shared : nullptr, stream + kHeaderBytes + 4, h.kept};
  for (u32 s = threadIdx.x; s < 256; s += blockDim.x) entries[s] = 0;
  __syncthreads();
  bool bad = false;
  for (u32 i = threadIdx.x; i < h.kept; i += blockDim.x) {
    bad |= table.freq<kBits>(i) == 0;
    bad |= atomicAdd(&entries[table.symbol(i)], 1u) != 0;
  }
  if (warp_id() == 0) bad |= !find_slots<kBits>(table, h);
  else if (warp_id() == 1) bad |= !find_segments(stream, len, h);
  if (__syncthreads_or(bad)) return kCorrupt;

  for (u32 slot = threadIdx.x; slot < 1u << kBits; slot += blockDim.x) {
    if (slot < h.escape) {
      entries[slot] = make_entry<kBits>(h.escape, 0, slot, true);
      continue;
    }
    u32 low = 0, high = h.kept;  // start[low] <= slot < start[high]
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      (h.start[middle] <= slot ? low : high) = middle;
    }
    entries[slot] = make_entry<kBits>(table.freq<kBits>(low), table.symbol(low), slot - h.start[low], false);
  }
  __syncthreads();
  return kOk;
}

// ---- words ----

// A segment's words, brought from global into shared memory a piece at a time, one piece ahead.
// The buffer is a ring of three pieces with a copy of it behind, so that the words of a block always
// lie in a row. Pieces lie at multiples of 16 in memory; what the first one has in front of the words
// belongs to the stream, too.
struct WordSource {
  static constexpr u32 kPiece = 256;            // words: 16 bytes a lane
  static constexpr u32 kPieceBytes = 2 * kPiece;
  static constexpr u32 kRing = 3 * kPieceBytes;
  static constexpr u32 kBytes = 2 * kRing;
  static constexpr int kMost = 2 * 12 * kLanes;  // bytes that a block takes (docs/codecs/rans.md, "Why one word")

  Shared ring;       // kBytes, of this warp, 16-byte aligned
  Shared cursor;     // the next word
  Shared filled;     // end of the words in the ring, not wrapped
  const u8* words;   // the piece behind the next: 16-byte aligned
  int rest;          // words from there to the end of the segment; may be negative
  u32 below;         // mask of the lower lanes
  uint4 ahead;       // the lane's part of the next piece

  // The `count` words from offset `at` of a 16-byte aligned stream on.
  __device__ __forceinline__ WordSource(u16* ring_, const u8* stream, u32 at, u32 count)
      : ring(shared_address(ring_)), cursor(ring + at % 16), filled(ring), words(stream + at / 16 * 16),
        rest(static_cast<int>(count + at % 16 / 2)), below(lanes_below()) {
    advance();
  }

  // Loads the lane's 8 words of the next piece; zeros behind the last word.
  __device__ __forceinline__ void advance() {
    const u8* from = words + 16 * lane_id();
    const int here = rest - static_cast<int>(8 * lane_id());
    words += kPieceBytes;
    rest -= kPiece;
    if (here >= 8) {
      ahead = __ldcs(reinterpret_cast<const uint4*>(from));
      return;
    }
    u32 w[4] = {};
#pragma unroll
    for (int k = 0; k < 8; k++)
      if (k < here) w[k / 2] |= load_u16(from + 2 * k) << (16 * (k % 2));
    ahead = make_uint4(w[0], w[1], w[2], w[3]);
  }

  // Makes sure that a block's words are in the buffer. (Behind the last word of the segment there are
  // zeros, and no more loads.)
  __device__ __forceinline__ void prepare() {
    if (left() >= kMost) return;
    __syncwarp();
    if (cursor - ring >= kRing) {
      cursor -= kRing;
      filled -= kRing;
    }
#pragma unroll 1
    do {
      const Shared to = filled - (filled - ring >= kRing ? kRing : 0) + 16 * lane_id();
      store_shared4(to, ahead);
      store_shared4(to + kRing, ahead);
      filled += kPieceBytes;
      advance();
    } while (left() < kMost);
    __syncwarp();
  }

  // Bytes in the buffer that are not taken. (Negative before the first `prepare`.)
  __device__ __forceinline__ int left() const { return static_cast<int>(filled - cursor); }

  __device__ __forceinline__ void refill(u32& x) { take_words(x, cursor, below); }

  // Whether the words taken are just those of the segment: no more, no less.
  __device__ __forceinline__ bool all_taken() const { return rest + static_cast<int>(kPiece) + left() / 2 == 0; }
};

// ---- segment ----

// `entries` is an `AlignedTable`.
__device__ __forceinline__ u32 pop(u32& x, Shared entries) {
  const u32 entry = load_shared(entries | (4 * x & (4 * kTotal - 1)));
  x = (entry >> 17) * (x >> 8) + (entry & 0xff);
  return entry;
}

// Replaces the escapes of a block by their values, round by round; a lane has one at least.
__device__ __forceinline__ void pop_escapes(u32& x, WordSource& words, u32 left, u32* symbols) {
#pragma unroll 1
  do {
    if (left != 0) {
      const u32 k = __ffs(left) - 1, value = (x & 0xff) << (8 * (k % 4));
      left &= left - 1;
      x >>= 8;
      if (k < 4) symbols[0] |= value;
      else symbols[1] |= value;
    }
    words.refill(x);
  } while (__any_sync(kAllLanes, left != 0));
}

// Decodes eight symbols of each lane into two words.
__device__ __forceinline__ void pop_block(u32& x, WordSource& words, Shared entries, u32* symbols) {
  u32 e[8];
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    e[k] = pop(x, entries);
    e[k + 1] = pop(x, entries);
    words.refill(x);
  }
  u32 any = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32* p = e + 4 * i;
    any |= p[0] | p[1] | p[2] | p[3];
    symbols[i] = __byte_perm(__byte_perm(p[0], p[1], 0x0051), __byte_perm(p[2], p[3], 0x0051), 0x5410);
  }
  if (__any_sync(kAllLanes, any & kEscapeEntry)) {
    u32 left = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) left |= e[k] & kEscapeEntry ? 1u << k : 0;
    pop_escapes(x, words, left, symbols);
  }
}

// Decodes values `first .. end-1` from state `x` on; false if the segment is not sound. Bytes A behind the
// end of their plane become anything. One warp. (`chunk` is in shared memory, so that it takes no
// registers.)
template <int kWidth>
__device__ __forceinline__ bool decode_segment(const FusedStreams& chunk, u32 first, u32 end, u32& x, Shared entries,
                                               WordSource& words) {
  if (!__all_sync(kAllLanes, x >= kLow)) return false;
  const u32 mine = lane_id() * kOctet;
  u32 at = first;
  Octet<kWidth> o, next = {};
  // Vectors will do if each block has all of its bytes A or none.
  const u32 fast = chunk.a_len % kBlock == 0 ? end : min(end, chunk.a_len);
  if (is_aligned(chunk.values) && fast >= first + kBlock) {
    const u32 whole = (fast - first) / kBlock * kBlock + first, a_end = min(whole, chunk.a_len);
    const RawPlanes raw = chunk.raw;
    u8* values = chunk.values;
    if (at < a_end) load_a(raw, at + mine, next.a);
    load_b(raw, at + mine, next);
    do {
      o = next;
      words.prepare();
      const u32 here = at + mine;
      at += kBlock;
      if (at < a_end) load_a(raw, here + kBlock, next.a);
      if (at < whole) load_b(raw, here + kBlock, next);
      // The larger loads of 4-byte values are slowed down by it.
      if (kWidth == 2 && at + 2 * kBlock < a_end) prefetch(raw.a + here + 3 * kBlock);
      pop_block(x, words, entries, o.e);
      store_values<kWidth>(values, here, merge(o));
    } while (at < whole);
  }
#pragma unroll 1
  for (; at < end; at += kBlock) {
    const u32 left = values_left(at + mine, end);
    load_raw_slow(chunk.raw, at + mine, o, min(left, values_left(at + mine, chunk.a_len)), left);
    words.prepare();
    pop_block(x, words, entries, o.e);
    store_values_slow<kWidth>(chunk.values, at + mine, merge(o), left);
  }
  return words.all_taken();
}

}  // namespace s4
