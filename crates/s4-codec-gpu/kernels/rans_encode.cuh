// The encoder of plane E of values: a warp codes its segment backwards into the end of a slot; `copy_stream`
// puts the parts of a chunk's stream together.
#pragma once

#include "frame.cuh"
#include "model.cuh"

namespace s4 {

constexpr u32 kPiece = 256;  // words that a warp writes or reads at a time: 16 bytes a lane

// Room for a segment's words, of which there are at most as many as symbols (docs/codecs/rans.md, "Why one
// word is always enough"), and its states: a whole number of pieces.
constexpr u32 kSlotWords = kSegment + kPiece;
static_assert(kSegment % kPiece == 0 && 2 * kLanes <= kPiece, "the states fit into the last piece");

// Longest header with table and word counts.
constexpr u32 kMaxHead = 544;

// What the encoder leaves of a chunk: the head of its stream, then each segment at the end of its
// part. The stream itself is made by `copy_stream`.
template <int kWidth>
struct Slot {
  u32 stream_len;  // bytes of the whole stream
  u32 head_len;    // bytes of `head` in use: a multiple of `kAlign`
  u32 reserved[2];
  u32 words[kWarps<kWidth>];  // of each segment
  u8 head[kMaxHead];
  u16 segments[kWarps<kWidth>][kSlotWords];
};
static_assert(sizeof(Slot<2>) % 16 == 0 && sizeof(Slot<4>) % 16 == 0 && 2 * kSlotWords % 16 == 0,
              "pieces are 16-byte aligned");
static_assert(sizeof(Slot<2>) <= kFusedScratch2 && sizeof(Slot<4>) <= kFusedScratch4, "as abi.h says");

// ---- table of the encoder ----

// How to code one symbol. `magic` and `shift` divide the state by the frequency f; the rest in one word:
// bits 23..31 what is added (start; for f = 1 the quotient comes out one too small and start + 255
// makes up for it), bits 8..15 256 - f, bit 7 escape, bit 5 round, bits 0..4 shift.
struct Coder {
  u32 magic, packed;
};

constexpr u32 kEscapeBit = 1u << 7;
constexpr u32 kRoundBit = 1u << 5;

// The state x that is divided is below f * 2^24. With s = floor(log2 f), floor(x * ceil(2^(32+s) / f)
// / 2^(32+s)) is exact there for every f below 189. For some larger f it is not, but then
// floor((x + 1) * floor(2^(32+s) / f) / 2^(32+s)) is; `kRoundBit` says so. (Both by the usual bound on
// the error of the multiplier, checked for each f by the tests.)
__device__ __forceinline__ Coder make_coder(u32 freq, u32 start, bool escape) {
  const u32 log = 31 - __clz(freq);
  Coder c;
  u32 shift = log, add = start, round = 0;
  if (freq == 1) {
    c.magic = ~0u;
    add += kTotal - 1;
  } else if (freq == 1u << log) {
    c.magic = 1u << 31;
    shift = log - 1;
  } else {
    // 2^(32+s) / f in two steps of 16 bits.
    const u32 top = 1u << (16 + log), high = top / freq, carry = top % freq << 16;
    const u32 rest = carry % freq;
    round = (freq - rest) * freq > 1u << (8 + log);
    c.magic = (high << 16 | carry / freq) + (round ? 0 : 1);
  }
  c.packed = add << 23 | (kTotal - freq) << 8 | (escape ? kEscapeBit : 0) | (round ? kRoundBit : 0) | shift;
  return c;
}

// All 256 coders (`AlignedTable`).
constexpr u32 kCodersBytes = 256 * sizeof(Coder);

// The coder of byte `k` of `symbols`.
__device__ __forceinline__ Coder load_coder(Shared coders, u32 symbols, int k) {
  const u32 scaled = k == 0 ? symbols << 3 : symbols >> (8 * k - 3);
  const uint2 v = load_shared2(coders | (scaled & (kCodersBytes - 1) & ~7u));
  return Coder{v.x, v.y};
}

// Fills the coders of all 256 symbols; says whether one of them rounds. All threads; barriers.
__device__ __forceinline__ bool make_coders(const Model& model, Coder* coders) {
  const Coder escape = make_coder(max(1u, model.escape), 0, true);
  for (u32 s = threadIdx.x; s < 256; s += blockDim.x) coders[s] = escape;
  __syncthreads();
  u32 round = escape.packed;
  for (u32 i = threadIdx.x; i < model.kept; i += blockDim.x) {
    const Coder c = make_coder(model.freq[i], model.start[i], false);
    coders[model.symbol[i]] = c;
    round |= c.packed;
  }
  return __syncthreads_or((round & kRoundBit) != 0);
}

// ---- words ----

// Collects a segment's words from last to first in shared memory and writes them to the end of its
// slot, a piece at a time.
struct WordSink {
  static constexpr u32 kPieceBytes = 2 * kPiece;
  static constexpr u32 kBytes = 4 * kPieceBytes;  // of the buffer
  // Behind a flush less than a piece is left; a block adds at most 384 words in front of it.
  static constexpr u32 kEnough = 3 * kPieceBytes;

  Shared buffer;   // kBytes, of this warp, 16-byte aligned
  Shared cursor;   // the first word so far
  Shared written;  // up to here the buffer is still to be written: a whole number of pieces
  u8* target;      // where in the slot the byte at `written` would go
  u32 below;       // mask of the lower lanes

  __device__ __forceinline__ WordSink(u16* buffer_, u16* slot_end)
      : buffer(shared_address(buffer_)), cursor(buffer + kBytes), written(cursor),
        target(reinterpret_cast<u8*>(slot_end)), below(lanes_below()) {}

  __device__ __forceinline__ void put(u32& x, u32 limit, bool active = true) {
    put_words(x, limit, active, cursor, below);
  }

  // Writes whole pieces; at the lower end of the buffer moves the rest to its upper end.
  __device__ __forceinline__ void flush_pieces() {
    if (written - cursor < kPieceBytes) return;
    const u32 mine = 16 * lane_id();
    __syncwarp();
#pragma unroll 1
    do {
      written -= kPieceBytes;
      target -= kPieceBytes;
      *reinterpret_cast<uint4*>(target + mine) = load_shared4(written + mine);
    } while (written - cursor >= kPieceBytes);
    if (written - buffer < kEnough) {
      const uint4 rest = load_shared4(written - kPieceBytes + mine);
      const u32 up = static_cast<u32>(buffer + kBytes - written);
      store_shared4(written - kPieceBytes + up + mine, rest);
      cursor += up;
      written += up;
    }
    __syncwarp();
  }

  // Puts the states in front of the words and writes what is left. Returns where the states are.
  __device__ __forceinline__ const u8* finish(u32 x) {
    flush_pieces();
    cursor -= kStatesBytes;
    store_shared_u16(cursor + 4 * lane_id(), x);
    store_shared_u16(cursor + 4 * lane_id() + 2, x >> 16);
    __syncwarp();
    u8* first = target - (written - cursor);
#pragma unroll 1
    for (u32 i = 2 * lane_id(); i < written - cursor; i += 2 * kLanes)
      *reinterpret_cast<u16*>(first + i) = static_cast<u16>(load_shared_u16(cursor + i));
    return first;
  }
};

// ---- segment ----

// Puts one symbol onto the state.
template <bool kRound>
__device__ __forceinline__ void push(u32& x, const Coder& c, u32 minus_freq) {
  const u32 rounded = kRound && (c.packed & kRoundBit) ? x + 1 : x;
  const u32 quotient = __umulhi(rounded, c.magic) >> (c.packed & 31);
  // x % f + start + 256 * quotient
  x = quotient * minus_freq + (quotient * kTotal + (x + (c.packed >> 23)));
}

// -f, from its byte.
__device__ __forceinline__ u32 minus_freq(const Coder& c) {
  return __byte_perm(c.packed, ~0u, 0x4441);
}

// Codes the raw values of a block's escapes, last round first. Bit k of `left`: symbol k is an escape.
__device__ __forceinline__ void push_escapes(u32& x, WordSink& sink, u32 left, const u32* symbols) {
  const u32 count = __popc(left);
#pragma unroll 1
  for (u32 round = warp_max(count); round > 0; round--) {
    const bool mine = count >= round;
    sink.put(x, 1u << 24, mine);
    if (mine) {
      const u32 k = 31 - __clz(left);
      left ^= 1u << k;
      const u32 word = k < 4 ? symbols[0] : symbols[1];
      x = x << 8 | ((word >> (8 * (k % 4))) & 0xff);
    }
  }
}

// Codes eight symbols of each lane.
template <bool kRound>
__device__ __forceinline__ void push_block(u32& x, WordSink& sink, Shared coders, const u32* symbols) {
  Coder c[8];
  u32 any = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    c[k] = load_coder(coders, symbols[k / 4], k % 4);
    any |= c[k].packed;
  }
  if (__any_sync(kAllLanes, any & kEscapeBit)) {
    u32 left = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) left |= c[k].packed & kEscapeBit ? 1u << k : 0;
    push_escapes(x, sink, left, symbols);
  }
#pragma unroll
  for (int k = 6; k >= 0; k -= 2) {
    const u32 f0 = minus_freq(c[k]), f1 = minus_freq(c[k + 1]);
    sink.put(x, (f0 * f1) << 16);
    push<kRound>(x, c[k + 1], f1);
    push<kRound>(x, c[k], f0);
  }
  sink.flush_pieces();
}

// What a warp needs to know of its chunk.
template <int kWidth>
struct SegmentSource {
  const u8* values;  // of the chunk
  RawPlanes raw;     // where the raw planes go; null if they go nowhere
  u32 n;        // values of the chunk
  u32 padding;  // symbol that fills the last block, four times
  bool aligned;
};

// Loads a block's values, splits them and stores their raw planes. Missing symbols become padding.
template <int kWidth>
__device__ __forceinline__ Octet<kWidth> take_block_slow(const SegmentSource<kWidth>& src, u32 at) {
  const u32 left = values_left(at, src.n);
  Octet<kWidth> o = split(load_values_slow<kWidth>(src.values, at, left));
  if (src.raw.a != nullptr) store_raw_slow(src.raw, at, o, left);
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    const u32 here = left <= 4 * i ? 0 : min(left - 4 * i, 4u);
    const u32 mask = here == 4 ? ~0u : (1u << (8 * here)) - 1;
    o.e[i] = (o.e[i] & mask) | (src.padding & ~mask);
  }
  return o;
}

// Where the lane starts in the segment of this warp: with its part of the end of plane A.
template <int kWidth>
__device__ __forceinline__ u32 start_state(const u8* values, u32 n) {
  const u32 carried = carried_bytes(n), at = warp_id() * kCarryBytes + 2 * lane_id();
  if (at >= carried) return kLow;
  const u8* p = values + static_cast<u64>(n - carried + at) * kWidth;
  return kLow | a_of<kWidth>(p + kWidth) << 8 | a_of<kWidth>(p);
}

// Codes the segment that starts at value `first` from state `x` on; returns where its states are. One
// warp.
template <int kWidth, bool kRound>
__device__ __forceinline__ const u8* encode_segment(const SegmentSource<kWidth>& src, u32 first, u32 x,
                                                    Shared coders, WordSink& sink) {
  const u32 end = min(src.n, first + kSegment);
  const u32 mine = lane_id() * kOctet;
  u32 at = first + (end - first - 1) / kBlock * kBlock;  // the block in hand
  // Block by block while the fast loop cannot run: the last, partial one, or all.
  if (!src.aligned || at + kBlock > src.n) {
#pragma unroll 1
    while (true) {
      const Octet<kWidth> o = take_block_slow(src, at + mine);
      push_block<kRound>(x, sink, coders, o.e);
      if (at == first) return sink.finish(x);
      at -= kBlock;
      if (src.aligned) break;
    }
  }
  Values<kWidth> next = load_values<kWidth>(src.values, at + mine);
  while (true) {
    const Octet<kWidth> o = split(next);
    if (at > first) next = load_values<kWidth>(src.values, at - kBlock + mine);
    if (at >= first + 3 * kBlock) prefetch_values<kWidth>(src.values, at - 3 * kBlock + mine);
    if (src.raw.a != nullptr) store_raw(src.raw, at + mine, o);
    push_block<kRound>(x, sink, coders, o.e);
    if (at == first) return sink.finish(x);
    at -= kBlock;
  }
}

// ---- stream ----

// The head of a stream of `n` symbols with one table: byte `i` of it. `words`: of each segment.
struct Head {
  const Model& model;
  const u32* words;
  u32 n, freq_bytes;  // 1 for P = 8, 2 for P = 12
  u32 flags;

  __device__ __forceinline__ u32 table_len() const {
    return flags & kFlagShared ? 0 : 4 + (1 + freq_bytes) * model.kept;
  }
  __device__ __forceinline__ u32 counts_end() const { return kHeaderBytes + table_len() + 2 * segments_of(n); }
  __device__ __forceinline__ u32 len() const { return round_up(counts_end(), kAlign); }

  __device__ __forceinline__ u32 table_byte(u32 i) const {
    if (i < 2) return model.kept >> (8 * i);
    if (i < 4) return model.escape >> (8 * (i - 2));
    if (i < 4 + model.kept) return model.symbol[i - 4];
    const u32 k = i - 4 - model.kept;
    return freq_bytes == 1 ? model.freq[k] : model.freq[k / 2] >> (8 * (k % 2));
  }

  __device__ __forceinline__ u8 byte(u32 i) const {
    const u32 counts_at = kHeaderBytes + table_len();
    u32 v = 0;
    if (i < 4) v = n >> (8 * i);
    else if (i == 4) v = 5;
    else if (i == 5) v = kSegmentLog2;
    else if (i == 6) v = 1;
    else if (i == 7) v = flags;
    else if (i < counts_at) v = table_byte(i - kHeaderBytes);
    else if (i < counts_end()) v = words[(i - counts_at) / 2] >> (8 * ((i - counts_at) % 2));
    return static_cast<u8>(v);
  }

  // Bytes of the whole stream.
  __device__ __forceinline__ u32 stream_len() const {
    u32 at = len();
    for (u32 i = 0; i < segments_of(n); i++) at = round_up(at, kAlign) + kStatesBytes + 2 * words[i];
    return at;
  }
};

// Writes the head of a stream into `slot.head` and the sizes beside it. All threads.
template <int kWidth>
__device__ __forceinline__ void write_head(Slot<kWidth>& slot, const Head& head) {
  const u32 len = head.len();
  for (u32 i = threadIdx.x; i < len; i += kThreads<kWidth>) slot.head[i] = head.byte(i);
  if (threadIdx.x < segments_of(head.n)) slot.words[threadIdx.x] = head.words[threadIdx.x];
  if (threadIdx.x == 0) slot.stream_len = head.stream_len(), slot.head_len = len;
}

// Copies `len` bytes (even) from a 2-byte aligned `from` to a 4-byte aligned `to`, and zeros up to a
// multiple of 4. One warp.
__device__ __forceinline__ void copy_shifted(const u8* from, u8* to, u32 len) {
  const u32 skew = static_cast<u32>(reinterpret_cast<u64>(from) & 2);
  const u32* src = reinterpret_cast<const u32*>(from - skew);
  const u32 loads = (len + skew + 3) / 4, stores = (len + 3) / 4;
  auto load = [&](u32 i) -> u32 {
    if (i == 0 && skew > 0) return static_cast<u32>(*reinterpret_cast<const u16*>(from)) << 16;
    return i < loads ? src[i] : 0;
  };
  auto word = [&](u32 i, u32 low, u32 high) {
    const u32 v = __funnelshift_r(low, high, 8 * skew);
    return 4 * i + 2 == len ? v & 0xffff : v;
  };
  // Words up to the first 16-byte boundary, pieces of 16 bytes, words behind the last boundary.
  const u32 lead = min(stores, static_cast<u32>(-reinterpret_cast<u64>(to) / 4 % 4));
  const u32 whole = lead + (stores - lead) / 4 * 4, edges = lead + stores - whole;
  if (lane_id() < edges) {
    const u32 i = lane_id() < lead ? lane_id() : whole + lane_id() - lead;
    reinterpret_cast<u32*>(to)[i] = word(i, load(i), load(i + 1));
  }
  for (u32 i = lead + 4 * lane_id(); i < whole; i += 4 * kLanes) {
    u32 w[5], out[4];
#pragma unroll
    for (u32 k = 0; k < 5; k++) w[k] = load(i + k);
#pragma unroll
    for (u32 k = 0; k < 4; k++) out[k] = word(i + k, w[k], w[k + 1]);
    __stcs(reinterpret_cast<uint4*>(to + 4 * i), make_uint4(out[0], out[1], out[2], out[3]));
  }
}

// Puts a chunk's stream together at `to` (16-byte aligned; its size rounded up to 16 is written).
// All threads.
template <int kWidth>
__device__ __forceinline__ void copy_stream(const Slot<kWidth>& slot, u32 n, u8* to) {
  const u32 segments = segments_of(n);
  for (u32 i = 4 * threadIdx.x; i < slot.head_len; i += 4 * kThreads<kWidth>)
    *reinterpret_cast<u32*>(to + i) = *reinterpret_cast<const u32*>(slot.head + i);
  u32 at = slot.head_len;
  for (u32 i = 0; i < segments; i++) {
    const u32 len = kStatesBytes + 2 * slot.words[i];
    if (i == warp_id()) {
      const u8* end = reinterpret_cast<const u8*>(slot.segments[i] + kSlotWords);
      copy_shifted(end - len, to + at, len);
    }
    at += round_up(len, kAlign);
  }
  const u32 gap = at + 4 * threadIdx.x;
  if (gap < round_up(at, 16)) *reinterpret_cast<u32*>(to + gap) = 0;
}

}  // namespace s4
