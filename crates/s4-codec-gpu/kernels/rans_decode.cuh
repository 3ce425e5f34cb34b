// What the decoders of values (fused_decode.cuh) and of planes (plane_decode.cuh) share: safe on any bytes.
// Headers are checked before they are used; words are read through a buffer that never loads a piece behind its
// segment; the final states and word counts say whether the stream was sound.
#pragma once

#include "rans.cuh"

namespace s4 {

// What is read from a stream's header, and from the first four bytes of a table.
struct Fixed {
  u32 escape;        // its frequency
  u32 kept;          // symbols of the table
  u32 segment_log2;
  u32 segments;
  u32 carried;       // bytes that the states carry
  u32 counts_at;     // offset of the word counts
};

// The same, the slots of the table that is being read, and where the segments of the stream are.
template <u32 kMaxSegments>
struct Header {
  Fixed fixed;
  u32 seen[8];                    // a bit for each symbol of the table
  u32 segment_at[kMaxSegments];   // offset of each segment
  u16 words[kMaxSegments];        // of each segment
  u16 start[256];                 // first slot of the i-th symbol
};

// How to take one symbol off the state, by slot. P = 8: bits 0..7 slot - start, 8..15 symbol, 16 escape,
// 17..25 frequency. P = 12: bits 0..11 slot - start, 12..19 symbol, 20..31 frequency - 1.
constexpr u32 kEscapeEntry = 1u << 16;
constexpr u32 kPairEscapes = kEscapeEntry | kEscapeEntry << 8;  // of a pair, see `pop_block`

template <u32 kBits>
__device__ __forceinline__ u32 make_entry(u32 freq, u32 symbol, u32 bias, bool escape) {
  if (kBits == 8) return freq << 17 | (escape ? kEscapeEntry : 0) | symbol << 8 | bias;
  return (freq - 1) << 20 | symbol << 12 | bias;
}

__device__ __forceinline__ u32 load_u16(const u8* p) { return p[0] | p[1] << 8; }
__device__ __forceinline__ u32 load_u32(const u8* p) { return load_u16(p) | load_u16(p + 2) << 16; }

// The table of a stream: its own, or one that the host vouches for.
struct TableBytes {
  const SharedTable* shared;  // null: the table is in the stream
  const u8* own;              // its symbols, frequencies behind them
  u32 kept;

  __device__ __forceinline__ u32 symbol(u32 i) const { return shared ? shared->symbol[i] : own[i]; }
  template <u32 kBits>
  __device__ __forceinline__ u32 freq(u32 i) const {
    if (shared) return shared->freq[i];
    return kBits == 8 ? own[kept + i] : load_u16(own + kept + 2 * i);
  }
};

// Reads the start of a stream's header into `h`, all fields but those of the table. `head`: the first bytes of
// the stream. Any thread, on its own.
__device__ __forceinline__ Status read_shape(const u8* head, u32 len, u32 n, u32 max_segments, Fixed& h) {
  if (len < kHeaderBytes) return kCorrupt;
  if (load_u32(head) != n) return kCorrupt;
  const u32 lanes_log2 = head[4], flags = head[7];
  h.segment_log2 = head[5];
  if (lanes_log2 != 5 || flags > (kFlagShared | kFlagCarries)) return kUnsupported;
  if (h.segment_log2 < 12 || h.segment_log2 > 15) return kUnsupported;
  h.segments = ((n - 1) >> h.segment_log2) + 1;
  if (h.segments > max_segments) return kUnsupported;
  h.carried = flags & kFlagCarries ? kCarryBytes * h.segments : 0;
  h.counts_at = kHeaderBytes;
  return kOk;
}

// Reads the count of symbols and the escape of a table: of `shared`, or if that is null of the table in the stream
// at `h.counts_at`, which then moves behind the table and perhaps behind the stream. Any thread, on its own.
template <u32 kBits>
__device__ __forceinline__ Status read_table(const u8* head, u32 len, const SharedTable* shared, Fixed& h) {
  if (shared != nullptr) {
    if (shared->precision == 0) return kCorrupt;
    if (shared->precision != kBits) return kUnsupported;
    h.kept = shared->count;
    h.escape = shared->escape;
  } else {
    if (len < h.counts_at + 4) return kCorrupt;
    h.kept = load_u16(head + h.counts_at);
    h.escape = load_u16(head + h.counts_at + 2);
    h.counts_at += 4 + (kBits == 8 ? 2 : 3) * h.kept;
  }
  return h.kept > 256 || h.escape > 1u << kBits ? kCorrupt : kOk;
}

// Reads the header of a stream with one table into `h`, up to the table's symbols; returns `kOk` only if table and
// word counts fit into the stream. `tables`, the tensor's, is read only if the stream uses its table, since it may be
// far from what was loaded before; `shared` is that table, else null. Any thread, on its own.
template <u32 kBits, u32 kMaxSegments>
__device__ __forceinline__ Status read_fixed(const u8* head, u32 len, u32 n, const TableSet& tables, Fixed& h,
                                             const SharedTable*& shared) {
  const Status shape = read_shape(head, len, n, kMaxSegments, h);
  if (shape != kOk) return shape;
  if (head[6] != 1) return kUnsupported;
  shared = nullptr;
  if (head[7] & kFlagShared) {
    shared = only_table(tables);
    if (shared == nullptr) return kCorrupt;
  }
  const Status status = read_table<kBits>(head, len, shared, h);
  if (status != kOk) return status;
  return h.counts_at + 2 * h.segments > len ? kCorrupt : kOk;
}

// Finds the segments; false if they do not fill the stream. One warp.
template <u32 kMaxSegments>
__device__ __forceinline__ bool find_segments(const u8* head, u32 len, const Fixed& fixed, Header<kMaxSegments>& h) {
  u32 end = fixed.counts_at + 2 * fixed.segments, at = round_up(end, kAlign);
#pragma unroll 1
  for (u32 first = 0; first < fixed.segments; first += kLanes) {
    const u32 i = first + lane_id(), words = i < fixed.segments ? load_u16(head + fixed.counts_at + 2 * i) : 0;
    const u32 size = i < fixed.segments ? kStatesBytes + 2 * words : 0, padded = round_up(size, kAlign);
    const u32 mine = at + warp_sum_below(padded);
    if (i < fixed.segments) {
      h.words[i] = static_cast<u16>(words);
      h.segment_at[i] = mine;
      end = mine + size;
    }
    at += warp_sum(padded);
  }
  return warp_max(end) == len;
}

// Finds the first slots of all symbols; false if the symbols do not fill the table. One warp.
template <u32 kBits, u32 kMaxSegments>
__device__ __forceinline__ bool find_slots(const TableBytes& table, u32 escape, Header<kMaxSegments>& h) {
  u32 freq[8], sum = 0;
  for (u32 k = 0; k < 8; k++) {
    const u32 i = lane_id() * 8 + k;
    sum += freq[k] = i < table.kept ? table.freq<kBits>(i) : 0;
  }
  u32 at = escape + warp_sum_below(sum);
  for (u32 k = 0; k < 8; k++) {
    h.start[lane_id() * 8 + k] = static_cast<u16>(at);
    at += freq[k];
  }
  return lane_id() != kLanes - 1 || at == 1u << kBits;
}

// Whether, in this thread's share of a table, a symbol occurs twice or has frequency 0. `h.seen` must be zero before
// the first thread calls this.
template <u32 kBits, u32 kMaxSegments>
__device__ __forceinline__ bool is_bad(const TableBytes& table, Header<kMaxSegments>& h) {
  bool bad = false;
  for (u32 i = threadIdx.x; i < table.kept; i += blockDim.x) {
    const u32 symbol = table.symbol(i), bit = 1u << symbol % 32;
    bad |= table.freq<kBits>(i) == 0;
    bad |= (atomicOr(&h.seen[symbol / 32], bit) & bit) != 0;
  }
  return bad;
}

// Fills `entries[2^P]` from a table whose slots are known. All threads.
template <u32 kBits, u32 kMaxSegments>
__device__ __forceinline__ void fill_entries(const TableBytes& table, u32 escape, const Header<kMaxSegments>& h,
                                             u32* entries) {
  for (u32 slot = threadIdx.x; slot < 1u << kBits; slot += blockDim.x) {
    if (slot < escape) {
      entries[slot] = make_entry<kBits>(escape, 0, slot, true);
      continue;
    }
    u32 low = 0, high = table.kept;  // start[low] <= slot < start[high]
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      (h.start[middle] <= slot ? low : high) = middle;
    }
    entries[slot] = make_entry<kBits>(table.freq<kBits>(low), table.symbol(low), slot - h.start[low], false);
  }
}

// Reads header and table of a stream of `n` > 0 symbols and fills `entries[2^P]`. `head`: the first bytes of
// the stream, up to the word counts at least. All threads, two warps at least; all return the same; barriers.
template <u32 kBits, u32 kMaxSegments>
__device__ __forceinline__ Status read_header(const u8* head, u32 len, u32 n, const TableSet& tables,
                                              Header<kMaxSegments>& h, u32* entries) {
  Fixed fixed;
  const SharedTable* shared;
  if (threadIdx.x < 8) h.seen[threadIdx.x] = 0;
  const Status status = read_fixed<kBits, kMaxSegments>(head, len, n, tables, fixed, shared);
  if (status != kOk) return status;
  if (threadIdx.x == 0) h.fixed = fixed;
  __syncthreads();

  const TableBytes table{shared, head + kHeaderBytes + 4, fixed.kept};
  bool bad = is_bad<kBits>(table, h);
  if (warp_id() == 0) bad |= !find_slots<kBits>(table, fixed.escape, h);
  else if (warp_id() == 1) bad |= !find_segments(head, len, fixed, h);
  if (__syncthreads_or(bad)) return kCorrupt;
  fill_entries<kBits>(table, fixed.escape, h, entries);
  __syncthreads();
  return kOk;
}

// ---- words ----

// A segment's words, copied from global to shared memory a piece at a time, one piece ahead: what is left of
// the last piece moves to the front, and the next one goes behind it. Pieces start at multiples of 16 in
// memory; the bytes in front of the words in the first piece belong to the stream, too. `kLines`: pieces are
// loaded with the rest of their lines (`load_line`), which helps for 4-byte values and hurts for 2-byte ones.
template <bool kLines>
struct WordSource {
  static constexpr u32 kPiece = 256;               // words: 16 bytes a lane
  static constexpr u32 kPieceBytes = 2 * kPiece;
  static constexpr u32 kNeed = 4 * 2 * kLanes;     // bytes of four refills: what `prepare` provides at least
  static constexpr u32 kBytes = kNeed + kPieceBytes;

  Shared buffer;       // kBytes, of this warp, 16-byte aligned
  Shared cursor;       // the next word
  const u8* next;      // the lane's part of the piece after the one in flight
  int rest;            // words from `next`'s piece to the end of the segment; negative behind it
  u32 below;           // mask of the lower lanes
  uint4 ahead;         // the lane's part of the piece in flight

  // The `count` words from offset `at` of a 16-byte aligned stream on.
  __device__ __forceinline__ WordSource(u16* buffer_, const u8* stream, u32 at, u32 count)
      : buffer(shared_address(buffer_)), cursor(buffer + kNeed + at % 16),
        next(stream + at / 16 * 16 + 16 * lane_id()), rest(static_cast<int>(count + at % 16 / 2)),
        below(lanes_below()), ahead(make_uint4(0, 0, 0, 0)) {
    advance();
    // Every lane has now taken its last words of the previous segment, which used the same buffer.
    __syncwarp();
    store_shared4(buffer + kNeed + 16 * lane_id(), ahead);
    __syncwarp();
    advance();
  }

  // Loads the lane's 8 words of the next piece if the segment reaches that far. What lies behind its last word is
  // arbitrary: taking it is an error that `all_taken` finds.
  __device__ __forceinline__ void advance() {
    const uint4* from = reinterpret_cast<const uint4*>(next);
    if (rest > static_cast<int>(8 * lane_id())) ahead = kLines ? load_line(from) : __ldcs(from);
    next += kPieceBytes;
    rest -= kPiece;
  }

  // Makes sure that the words of four refills are in the buffer.
  __device__ __forceinline__ void prepare() {
    if (cursor <= buffer + kPieceBytes) return;
    const uint2 left = load_shared2(buffer + kPieceBytes + 8 * lane_id());
    __syncwarp();
    store_shared2(buffer + 8 * lane_id(), left);
    store_shared4(buffer + kNeed + 16 * lane_id(), ahead);
    __syncwarp();
    cursor -= kPieceBytes;
    advance();
  }

  __device__ __forceinline__ void refill(u32& x) { take_words(x, cursor, below); }

  // Whether exactly the words of the segment have been taken.
  __device__ __forceinline__ bool all_taken() const {
    return rest + static_cast<int>(kPiece) + static_cast<int>(buffer + kBytes - cursor) / 2 == 0;
  }
};

// ---- segment ----

// `entries` is an `AlignedTable`.
__device__ __forceinline__ u32 pop(u32& x, Shared entries) {
  const u32 entry = load_shared(entries | (4 * x & (4 * kTotal - 1)));
  x = (entry >> 17) * (x >> 8) + (entry & 0xff);
  return entry;
}

// Replaces the escapes of a block by their values, round by round; at least one lane has an escape.
template <class Words>
__device__ __forceinline__ void pop_escapes(u32& x, Words& words, u32 left, u32* symbols) {
#pragma unroll 1
  do {
    if (left != 0) {
      const u32 k = __ffs(left) - 1, value = (x & 0xff) << (8 * (k % 4));
      left &= left - 1;
      x >>= 8;
      if (k < 4) symbols[0] |= value;
      else symbols[1] |= value;
    }
    words.prepare();
    words.refill(x);
  } while (__any_sync(kAllLanes, left != 0));
}

// Decodes eight symbols of each lane into two words.
template <class Words>
__device__ __forceinline__ void pop_block(u32& x, Words& words, Shared entries, u32* symbols) {
  words.prepare();
  u32 pairs[4], any = 0;  // bytes 1 and 2 of two entries: symbols, flags
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 first = pop(x, entries), second = pop(x, entries);
    words.refill(x);
    pairs[i] = __byte_perm(first, second, 0x6251);
    any |= pairs[i];
  }
  symbols[0] = __byte_perm(pairs[0], pairs[1], 0x5410);
  symbols[1] = __byte_perm(pairs[2], pairs[3], 0x5410);
  if (__any_sync(kAllLanes, any & kPairEscapes)) {
    u32 left = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) left |= ((pairs[i] >> 16 & 1) | (pairs[i] >> 23 & 2)) << (2 * i);
    pop_escapes(x, words, left, symbols);
  }
}

// One table with P = 8 for all symbols: an `AlignedTable`.
struct PairTable {
  Shared entries;

  template <class Words>
  __device__ __forceinline__ void pop(u32& x, Words& words, u32, u32* symbols) const {
    pop_block(x, words, entries, symbols);
  }
};

// Decodes symbols `first .. end-1` from state `x` on; false if the segment is not sound. One warp.
template <class Words, class Tables, class Target>
__device__ __forceinline__ bool decode_segment(const Tables& tables, const Target& target, u32 first, u32 end, u32& x,
                                               Words& words) {
  if (!__all_sync(kAllLanes, x >= kLow)) return false;
  target.blocks(first, end, [&](u32 from, u32* symbols) { tables.pop(x, words, from, symbols); });
  return words.all_taken();
}

// Decodes every `kWarps`-th segment of a stream; false if one is not sound. `tables` decodes eight symbols of
// each lane at a time; `target` receives the symbols, and the words that the final states carry. `buffers`: of each
// warp. One warp.
template <class Words, u32 kMaxSegments, class Tables, class Target, u32 kWarps, u32 kBuffer>
__device__ __forceinline__ bool decode_segments(const Header<kMaxSegments>& h, const Tables& tables,
                                                const Target& target, u16 (&buffers)[kWarps][kBuffer]) {
  const u32 warp = uniform_warp_id();
#pragma unroll 1
  for (u32 i = warp; i < h.fixed.segments; i += kWarps) {
    const u32 at = h.segment_at[i], first = i << h.fixed.segment_log2;
    u32 x = target.load_state(at);
    Words words(buffers[warp], target.stream(), at + kStatesBytes, h.words[i]);
    const u32 end = min(target.symbols() - first, 1u << h.fixed.segment_log2) + first;
    const bool sound = decode_segment(tables, target, first, end, x, words);
    if (!__all_sync(kAllLanes, sound && x - kLow < (h.fixed.carried > 0 ? kLow : 1))) return false;
    target.store_carried(i, static_cast<u16>(x));
  }
  return true;
}

}  // namespace s4
