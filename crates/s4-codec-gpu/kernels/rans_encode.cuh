// What the encoders of values (fused.cuh) and of planes (plane_encode.cuh) share: a warp codes its segment backwards
// into the end of its scratch memory, then the parts of a stream are put together. Also the coders of values, for
// P = 8, which multiply instead of dividing.
#pragma once

#include "frame.cuh"
#include "model.cuh"

namespace s4 {

constexpr u32 kPiece = 256;  // words that a warp writes or reads at a time: 16 bytes a lane

// ---- table of the encoder ----

// How to code one symbol. `magic` and `shift` divide the state by the frequency f; `packed` holds:
// bits 23..31 what is added (start; for f = 1 the quotient comes out one too small and start + 255
// makes up for it), bits 8..15 256 - f, bit 7 escape, bit 5 round, bits 0..4 shift.
struct Coder {
  u32 magic, packed;
};

constexpr u32 kEscapeBit = 1u << 7;
constexpr u32 kRoundBit = 1u << 5;

// The state x to divide is below f * 2^24. With s = floor(log2 f), floor(x * ceil(2^(32+s) / f)
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

// The size of all 256 coders (an `AlignedTable`).
constexpr u32 kCodersBytes = 256 * sizeof(Coder);

// The coder of byte `k` of `symbols`.
__device__ __forceinline__ Coder load_coder(Shared coders, u32 symbols, int k) {
  const u32 scaled = k == 0 ? symbols << 3 : symbols >> (8 * k - 3);
  const uint2 v = load_shared2(coders | (scaled & (kCodersBytes - 1) & ~7u));
  return Coder{v.x, v.y};
}

// Makes the coders of all 256 symbols; returns whether one of them rounds. All threads; barriers.
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
  // A flush leaves less than a piece; a block then adds at most 384 words in front of it.
  static constexpr u32 kEnough = 3 * kPieceBytes;

  Shared buffer;   // kBytes, of this warp, 16-byte aligned
  Shared cursor;   // the first word so far
  Shared written;  // where the words that are yet to be written end: whole pieces from `buffer`
  u8* target;      // where in the slot the byte at `written` would go
  u32 below;       // mask of the lower lanes

  __device__ __forceinline__ WordSink(u16* buffer_, u16* slot_end)
      : buffer(shared_address(buffer_)), cursor(buffer + kBytes), written(cursor),
        target(reinterpret_cast<u8*>(slot_end)), below(lanes_below()) {}

  __device__ __forceinline__ void put(u32& x, u32 limit, bool active = true) {
    put_words(x, limit, active, cursor, below);
  }

  // Writes whole pieces; near the lower end of the buffer, moves the rest to the upper end.
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

  // Puts the states in front of the words and writes what is left. Returns the address of the states.
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

// -f, made from the byte 256 - f.
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

// Codes symbols with one table and P = 8, by multiplication (see `Coder`).
template <bool kRound>
struct PairCoders {
  Shared coders;

  __device__ __forceinline__ void push(u32& x, WordSink& sink, u32, const u32* symbols) const {
    push_block<kRound>(x, sink, coders, symbols);
  }
};

// Codes symbols `first .. end-1` of `source`, which provides them a block at a time, the last block first.
// `x`: the initial state. `room_end`: where the segment's part of the scratch memory ends. Returns the number
// of words. One warp.
template <class Source, class Coders>
__device__ __forceinline__ u32 encode_segment(const Source& source, u32 first, u32 end, u32 x, const Coders& coders,
                                              u16* buffer, u8* room_end) {
  WordSink sink(buffer, reinterpret_cast<u16*>(room_end));
  source.blocks_backwards(first, end, [&](u32 at, const u32* symbols) { coders.push(x, sink, at, symbols); });
  const u8* states = sink.finish(x);
  return static_cast<u32>(room_end - states - kStatesBytes) / 2;
}

// ---- stream ----

// The bytes of a stream's only table.
template <u32 kBits>
struct ModelBytes {
  static constexpr u32 kFreqBytes = kBits == 8 ? 1 : 2;
  const Model& model;

  __device__ __forceinline__ u32 count() const { return 1; }
  __device__ __forceinline__ u32 len() const { return 4 + (1 + kFreqBytes) * model.kept; }
  __device__ __forceinline__ u32 byte(u32 i) const {
    if (i < 2) return model.kept >> (8 * i);
    if (i < 4) return model.escape >> (8 * (i - 2));
    if (i < 4 + model.kept) return model.symbol[i - 4];
    const u32 k = i - 4 - model.kept;
    return kFreqBytes == 1 ? model.freq[k] : model.freq[k / 2] >> (8 * (k % 2));
  }
};

// Everything in front of a stream's segments, as single bytes.
template <class TableBytes, class Density>
struct Head {
  const TableBytes tables;
  const u32* words;  // of each segment
  Segments<Density> segments;
  u32 flags;

  __device__ __forceinline__ u32 counts_at() const {
    return kHeaderBytes + (flags & kFlagShared ? 0 : tables.len());
  }
  __device__ __forceinline__ u32 counts_end() const { return counts_at() + 2 * segments.count(); }
  __device__ __forceinline__ u32 len() const { return round_up(counts_end(), kAlign); }

  __device__ __forceinline__ u8 byte(u32 i) const {
    const u32 at = counts_at();
    u32 v = 0;
    if (i < 4) v = segments.symbols >> (8 * i);
    else if (i == 4) v = 5;
    else if (i == 5) v = segments.log2();
    else if (i == 6) v = tables.count();
    else if (i == 7) v = flags;
    else if (i < at) v = tables.byte(i - kHeaderBytes);
    else if (i < counts_end()) v = words[(i - at) / 2] >> (8 * ((i - at) % 2));
    return static_cast<u8>(v);
  }

  // Bytes of the whole stream.
  __device__ __forceinline__ u32 stream_len() const {
    u32 at = len();
#pragma unroll 1
    for (u32 i = 0; i < segments.count(); i++) at = round_up(at, kAlign) + kStatesBytes + 2 * words[i];
    return at;
  }
};

// Copies `len` bytes (even) from a 2-byte aligned `from` to a 4-byte aligned `to`, padded with zeros to a
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

// Copies `count` segments into the stream at `to`, from offset `at` on. `words`: their word counts; `room_end(i)`:
// where the scratch memory of segment `i` ends. Returns the end's offset. All of `kWarps` warps.
template <u32 kWarps, class RoomEnd>
__device__ __forceinline__ u32 join_segments(u32 count, const u32* words, const RoomEnd& room_end, u8* to, u32 at) {
#pragma unroll 1
  for (u32 i = 0; i < count; i++) {
    const u32 len = kStatesBytes + 2 * words[i];
    if (i % kWarps == warp_id()) copy_shifted(room_end(i) - len, to + at, len);
    at += round_up(len, kAlign);
  }
  return at;
}

}  // namespace s4
