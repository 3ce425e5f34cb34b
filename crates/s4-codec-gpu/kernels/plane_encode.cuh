// Codes one plane of a chunk that was split: const, bits, rANS of both precisions, or not at all. `Density`: like
// the CPU's engine, differences have all symbols counted and longer segments. `Context` gives the table of each
// symbol.
#pragma once

#include "plane_contexts.cuh"
#include "rans_encode.cuh"

namespace s4 {

// How to code one symbol: bits 0..12 frequency f, 13..24 what is added (the first slot; with P = 8 as in `Coder`), 31
// escape. With P = 8 the state is multiplied instead of divided: by `multipliers[f]`, then bits 25..27 shift, bit 28
// round. That way the coders of many tables fit into shared memory.
constexpr u32 kPlaneEscape = 1u << 31;
constexpr u32 kMultipliers = kTotal + 1;

template <u32 kBits>
__device__ __forceinline__ u32 make_plane_coder(u32 freq, u32 start) {
  if (kBits != 8 || freq == 0) return freq | start << 13;
  const Coder c = make_coder(freq, start, false);
  return freq | c.packed >> 23 << 13 | (c.packed & 7) << 25 | (c.packed & kRoundBit ? 1u << 28 : 0);
}

// All threads.
__device__ __forceinline__ void make_multipliers(u32* multipliers) {
  for (u32 f = threadIdx.x; f < kMultipliers; f += blockDim.x)
    multipliers[f] = f > 0 ? make_coder(f, 0, false).magic : 0;
}

constexpr u32 kComposedWarps = kComposedThreads / kLanes;
constexpr u32 kMostPlaneSegments = kMaxPlaneBytes / kSegment;
static_assert(kSegmentScratch % 16 == 0 && kSegmentScratch >= 3 * kSegment + kStatesBytes + 4,
              "three bytes for each symbol, states, and what copy_shifted reads in front");

// A coded stream, or the plane itself, in memory.
struct Coded {
  const u8* at;
  u32 len;      // of the whole stream, including what the previous one carries
  u32 carried;  // bytes of the next stream that this one carries
  u8 codec, param;
  bool shared;
};

template <class Context>
struct PlaneShared {
  typename Context::Coders coders;
  u32 multipliers[kMultipliers];
  u32 words[kMostPlaneSegments];
  u32 unit;
  __align__(4) u8 head[kHeadBytes];
  typename Context::Models model;
  union {
    typename Context::Count count;
    __align__(16) u16 words[kComposedWarps][WordSink::kBytes / 2];
  } u;
};

// A plane to code, and what it is coded with.
struct PlaneJob {
  u8* plane;                  // 16-byte aligned; its stream replaces it
  u32 size;                   // at least 1
  u32 coding;
  TableSet tables;            // the tensor's
  PlaneContexts contexts;     // of each symbol
  SharedTable* own;           // where contexts.cuh puts the tables that it makes
  Coded behind;               // the next stream; length 0 if there is none
  u8* segments;               // kSegmentScratch for each segment
};

__device__ __forceinline__ void push_wide_symbol(u32& x, u32 coder) {
  const u32 freq = coder & 0x1fff, quotient = x / freq;
  x = (quotient << 12) + (coder >> 13 & 0xfff) + (x - quotient * freq);
}

__device__ __forceinline__ void push_narrow_symbol(u32& x, u32 coder, u32 multiplier) {
  const u32 quotient = __umulhi(x + (coder >> 28 & 1), multiplier) >> (coder >> 25 & 7);
  x = quotient * (kTotal - (coder & 0x1fff)) + (x + (coder >> 13 & 0xfff));
}

// Codes eight symbols of each lane with their coders `c`. `kLoneEscapes`: a pair of symbols may need no bits at all.
template <u32 kBits, bool kLoneEscapes>
__device__ __forceinline__ void push_plane_block(u32& x, WordSink& sink, const u32* c, const u32* multipliers,
                                                 const u32* symbols) {
  u32 left = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) left |= c[k] >> 31 << k;
  if (kBits == 8) {
    u32 m[8];
#pragma unroll
    for (int k = 0; k < 8; k++) m[k] = multipliers[c[k] & 0x1fff];
    if (__any_sync(kAllLanes, left)) push_escapes(x, sink, left, symbols);
#pragma unroll
    for (int k = 6; k >= 0; k -= 2) {
      const u32 limit = (c[k] & 0x1fff) * (c[k + 1] & 0x1fff) << 16;
      sink.put(x, limit, !kLoneEscapes || limit != 0);
      push_narrow_symbol(x, c[k + 1], m[k + 1]);
      push_narrow_symbol(x, c[k], m[k]);
    }
  } else {
    if (__any_sync(kAllLanes, left)) push_escapes(x, sink, left, symbols);
#pragma unroll
    for (int k = 7; k >= 0; k--) {
      const u32 freq = c[k] & 0x1fff;
      sink.put(x, freq << 20, freq < 4096);  // 4096 << 20 is more than any state
      push_wide_symbol(x, c[k]);
    }
  }
  sink.flush_pieces();
}

// A plane as a source for `encode_segment`: `padding` fills up its last block.
struct PlaneSource {
  const u8* plane;
  u32 padding;

  template <class Push>
  __device__ __forceinline__ void blocks_backwards(u32 first, u32 end, const Push& push) const {
    const u32 mine = lane_id() * kOctet;
    u32 at = first + (end - first - 1) / kBlock * kBlock;
    const u32 left = values_left(at + mine, end);
    u32 symbols[2];
    if (left == kOctet) {
      load(at + mine, symbols);
    } else {
#pragma unroll
      for (u32 k = 0; k < 8; k++) {
        const u32 symbol = k < left ? plane[at + mine + k] : padding;
        symbols[k / 4] = (k % 4 ? symbols[k / 4] : 0) | symbol << (8 * (k % 4));
      }
    }
#pragma unroll 1
    for (; at != first; at -= kBlock) {
      // Only the last block may have fewer symbols. The next one is loaded while this one is coded.
      u32 next[2];
      load(at - kBlock + mine, next);
      push(at + mine, symbols);
      symbols[0] = next[0], symbols[1] = next[1];
    }
    push(at + mine, symbols);
  }

 private:
  __device__ __forceinline__ void load(u32 at, u32* symbols) const {
    const uint2 v = *reinterpret_cast<const uint2*>(plane + at);
    symbols[0] = v.x, symbols[1] = v.y;
  }
};

// Where the scratch of segment `i` ends: a segment of twice the length has twice the scratch.
template <class Density>
__device__ __forceinline__ u8* room_end(const Segments<Density>& segments, u8* scratch, u32 i) {
  return scratch + static_cast<u64>(i + 1) * (kSegmentScratch << (segments.log2() - kSegmentLog2));
}

// Codes all segments into their scratch, and puts their word counts into `shared.words`. All threads; ends
// with a barrier.
template <class Density, class Coders, class SharedMemory>
__device__ __forceinline__ void encode_segments(const PlaneJob& job, const Segments<Density>& segments,
                                                const Coders& coders, u32 padding, u32 carried,
                                                SharedMemory& shared) {
  const PlaneSource source{job.plane, padding};
  const u8* tail = job.behind.at + (job.behind.len - carried);
#pragma unroll 1
  for (u32 i = uniform_warp_id(); i < segments.count(); i += kComposedWarps) {
    u32 x = kLow;
    if (carried > 0) {
      const u8* word = tail + i * kCarryBytes + 2 * lane_id();
      x |= word[0] | word[1] << 8;
    }
    const u32 words = encode_segment(source, segments.first(i), segments.end(i), x, coders, shared.u.words[warp_id()],
                                     room_end(segments, job.segments, i));
    if (lane_id() == 0) shared.words[i] = words;
    __syncwarp();
  }
  __syncthreads();
}

// Makes the coders of all symbols, indexed by symbol. All threads; ends with a barrier.
template <u32 kBits>
__device__ __forceinline__ void make_plane_coders(const Model& model, u32* coders) {
  const u32 escape = make_plane_coder<kBits>(model.escape, 0) | kPlaneEscape;
  for (u32 s = threadIdx.x; s < 256; s += blockDim.x) coders[s] = escape;
  __syncthreads();
  for (u32 i = threadIdx.x; i < model.kept; i += blockDim.x)
    coders[model.symbol[i]] = make_plane_coder<kBits>(model.freq[i], model.start[i]);
  __syncthreads();
}

// Codes each symbol with its coder in the table of its context.
template <u32 kBits, class Context>
struct PlaneCoders {
  const u32* coders;
  const u32* multipliers;
  Context context;

  __device__ __forceinline__ void push(u32& x, WordSink& sink, u32 at, const u32* symbols) const {
    const auto tables = context.tables_of(at);
    u32 c[8];
#pragma unroll
    for (int k = 0; k < 8; k++) c[k] = coders[tables.of(k) * 256 + byte_of(symbols, k)];
    push_plane_block<kBits, Context::kLoneEscapes>(x, sink, c, multipliers, symbols);
  }
};

// The context of every symbol is 0: one table codes them all.
struct EncodeOneTable {
  static constexpr bool kLoneEscapes = false;  // whether a table may have nothing but an escape
  struct Coders {
    u32 of[256];
  };
  typedef Model Models;
  struct Count {
    Histogram hist;
    u32 counts[256];
  };
  struct Zeros {
    __device__ __forceinline__ u32 of(int) const { return 0; }
  };

  __device__ __forceinline__ static bool suits(const EncodeChunk&, u32) { return true; }
  __device__ __forceinline__ static EncodeOneTable of(const PlaneJob&) { return EncodeOneTable{}; }
  __device__ __forceinline__ static void prepare(const EncodeChunk&) {}
  __device__ __forceinline__ static PlaneContexts contexts_of(const EncodeChunk&, u32, const PlaneSet&) {
    return PlaneContexts{};
  }
  // Scratch memory between planes and segments.
  __device__ __forceinline__ static u64 tables_bytes_of(const EncodeChunk&) { return 0; }
  // The tables of the eight symbols from `at` on.
  __device__ __forceinline__ Zeros tables_of(u32) const { return Zeros{}; }

  // Makes the plane's table, or takes the tensor's, and makes the coders from it; returns whether it is the
  // tensor's. All threads; ends with a barrier.
  template <u32 kBits, class Density>
  __device__ __forceinline__ bool choose(const PlaneJob& job, Density density,
                                         PlaneShared<EncodeOneTable>& shared) const {
    constexpr u32 kSlots = 1u << kBits;
    u32* const counts = shared.u.count.counts;
    count_plane(job.plane, job.size, density, shared.u.count.hist, counts);
    make_model(counts, density.is_sparse() || job.size <= kCountAll, kSlots, shared.model);
    const bool tensors = choose_table(counts, only_table(job.tables), job.size, kSlots, shared.model);
    make_plane_coders<kBits>(shared.model, shared.coders.of);
    return tensors;
  }

  __device__ __forceinline__ static u32 padding(const PlaneShared<EncodeOneTable>& shared) {
    return shared.model.symbol[shared.model.kept - 1];
  }
  template <u32 kBits>
  __device__ __forceinline__ static ModelBytes<kBits> bytes(const PlaneShared<EncodeOneTable>& shared) {
    return ModelBytes<kBits>{shared.model};
  }
};

// Codes a plane by rANS; it stays raw if the stream is not shorter. All threads.
template <u32 kBits, class Density, class Context>
__device__ __forceinline__ Coded encode_rans(const PlaneJob& job, Density density, PlaneShared<Context>& shared) {
  Context context = Context::of(job);
  const bool tensors = context.template choose<kBits>(job, density, shared);
  const Segments<Density> segments{job.size, density};
  const u32 carried = segments.carried(job.behind.len);
  const PlaneCoders<kBits, Context> coders{shared.coders.of, shared.multipliers, context};
  encode_segments(job, segments, coders, context.padding(shared), carried, shared);
  const u32 flags = (tensors ? kFlagShared : 0) | (carried > 0 ? kFlagCarries : 0);
  const auto bytes = context.template bytes<kBits>(shared);
  const Head<decltype(bytes), Density> head{bytes, shared.words, segments, flags};
  const u32 len = head.stream_len();
  if (len >= job.size) return Coded{job.plane, job.size, 0, kRaw, 0, false};
  for (u32 i = threadIdx.x; i < head.len(); i += blockDim.x) job.plane[i] = head.byte(i);
  const auto end = [&](u32 i) { return room_end(segments, job.segments, i); };
  join_segments<kComposedWarps>(segments.count(), shared.words, end, job.plane, head.len());
  __syncthreads();
  return Coded{job.plane, len, carried, kRans, kBits, tensors};
}

// The values below 128 in the bytes of a word, without the bits between them.
__device__ __forceinline__ u64 squeeze(u64 x) {
  x = (x & 0x007f007f007f007f) | (x & 0x7f007f007f007f00) >> 1;
  x = (x & 0x00003fff00003fff) | (x & 0x3fff00003fff0000) >> 2;
  return (x & 0x000000000fffffff) | (x & 0x0fffffff00000000) >> 4;
}

// Packs values of 7 bits: eight words become seven. All threads; ends with a barrier.
__device__ __forceinline__ Coded encode_bits(const PlaneJob& job) {
  const u32 len = job.size / 8 * 7 + (job.size % 8 * 7 + 7) / 8;
  if (len >= job.size) return Coded{job.plane, job.size, 0, kRaw, 0, false};
  // What all threads write lies before what they read next.
#pragma unroll 1
  for (u32 first = 0; 64 * first < job.size; first += blockDim.x) {
    const u32 i = first + threadIdx.x, at = 64 * i, left = at < job.size ? min(64u, job.size - at) : 0;
    u64 words[8] = {};
    if (left == 64) {
#pragma unroll
      for (int k = 0; k < 8; k++) words[k] = reinterpret_cast<const u64*>(job.plane + at)[k];
    } else {
#pragma unroll
      for (u32 k = 0; k < 64; k++)
        if (k < left) words[k / 8] |= static_cast<u64>(job.plane[at + k]) << (8 * (k % 8));
    }
    u64 packed[7];
#pragma unroll
    for (int k = 0; k < 8; k++) words[k] = squeeze(words[k]);
#pragma unroll
    for (int k = 0; k < 7; k++) packed[k] = words[k] >> (8 * k) | words[k + 1] << (56 - 8 * k);
    __syncthreads();
    u8* const to = job.plane + 56 * i;
    if (left == 64) {
#pragma unroll
      for (int k = 0; k < 7; k++) reinterpret_cast<u64*>(to)[k] = packed[k];
    } else if (left > 0) {
#pragma unroll
      for (u32 k = 0; k < 56; k++)
        if (56 * i + k < len) to[k] = static_cast<u8>(packed[k / 8] >> (8 * (k % 8)));
    }
  }
  __syncthreads();
  return Coded{job.plane, len, 0, kBits, 7, false};
}

// Codes a plane. All threads; ends with a barrier.
template <class Density, class Context>
__device__ __forceinline__ Coded encode_plane(const PlaneJob& job, Density density, PlaneShared<Context>& shared) {
  const u32 unit = constant_unit(job.plane, job.size, shared);
  if (unit > 0) return Coded{job.plane, unit, 0, kConst, 0, false};
  switch (job.coding) {
    case kCodeRans8: return encode_rans<8>(job, density, shared);
    case kCodeRans12: return encode_rans<12>(job, density, shared);
    case kCodeBits7: return encode_bits(job);
    default: return Coded{job.plane, job.size, 0, kRaw, 0, false};
  }
}

}  // namespace s4
