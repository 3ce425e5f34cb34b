// Layout `fields` of 2- and 4-byte values, plane E coded by rANS with P = 8, the others raw: values are merged while
// they are decoded. The bytes that the states carry (fused.cuh) are put in place at the end.
//
// On large GPUs memory is the limit, and the pattern of accesses matters more than their amount (docs/gpu-kernels.md,
// "Memory is the limit"): each access of a warp covers whole sectors, and several blocks are loaded at a time.
#pragma once

#include "rans_decode.cuh"

namespace s4 {

// A stream of plane E to decode, and the raw planes beside it, 16-byte aligned. Plane A has `a_len` bytes,
// which must be `n` less the carried bytes.
struct FusedStreams {
  const u8* stream;
  RawPlanes raw;
  u8* values;
  u32 stream_len;
  u32 n;
  u32 a_len;
};

constexpr u32 kFusedSegments = kFusedDecodeValues >> 12;

// The longest header with table and word counts, in whole vectors.
constexpr u32 kStaged = (kHeaderBytes + 4 + 2 * 256 + 2 * kFusedSegments + 15) / 16 * 16;

template <int kWidth>
using Words = WordSource<kWidth == 4>;

template <int kWidth>
struct DecodeShared {
  AlignedTable<u32, kTotal> entries;
  FusedStreams chunk;
  Header<kFusedSegments> header;
  u16 carry[kFusedSegments * kLanes];
  __align__(16) u8 head[kStaged];
  __align__(16) u16 words[kWarps<kWidth>][Words<kWidth>::kBytes / 2];
};
static_assert(kStaged / 16 <= kThreads<4>, "each thread stages one vector");

// ---- blocks ----

// Blocks that a warp loads at a time: for 4-byte values enough to make prefetching unnecessary.
template <int kWidth>
constexpr u32 kAtOnce = kWidth == 2 ? 2 : 4;
template <int kWidth>
constexpr u32 kStep = kAtOnce<kWidth> * kBlock;

// For 2-byte values, how many values ahead of the loads L2 prefetches. Much farther ahead, data leaves L2 again before
// it is loaded.
constexpr u32 kAhead = 512;

// How many consecutive values of a block a lane merges and stores: of 2-byte values the eight that it decodes; of
// 4-byte values four in each half of the block, since otherwise each of its two stores would fill only half a sector.
template <int kWidth>
constexpr u32 kOwn = kWidth == 2 ? kOctet : kOctet / 2;

// Where a lane's raw bytes for the next blocks are, and where its values go.
template <int kWidth>
struct BlockCursor {
  const u8 *a, *b;
  u8* values;

  __device__ __forceinline__ BlockCursor(const FusedStreams& chunk, u32 first) {
    const u64 mine = first + lane_id() * kOwn<kWidth>;
    a = chunk.raw.a + mine;
    b = chunk.raw.b + 2 * mine;
    values = chunk.values + mine * kWidth;
  }

  __device__ __forceinline__ void advance_planes() {
    a += kStep<kWidth>;
    b += 2 * kStep<kWidth>;
    hide(a);
    if (kWidth == 4) hide(b);
  }
  __device__ __forceinline__ void advance_values() {
    values += kStep<kWidth> * kWidth;
    hide(values);
  }

  __device__ __forceinline__ void load_a(u32 k, Octet<2>& o) const {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(a + k * kBlock));
    o.a[0] = v.x, o.a[1] = v.y;
  }
  __device__ __forceinline__ void load_a(u32 k, Octet<4>& o) const {
    const u32* p = reinterpret_cast<const u32*>(a + k * kBlock);
    o.a[0] = load_line(p), o.a[1] = load_line(p + kBlock / 8);
  }
  __device__ __forceinline__ void load_b(u32, Octet<2>&) const {}
  __device__ __forceinline__ void load_b(u32 k, Octet<4>& o) const {
    const uint2* p = reinterpret_cast<const uint2*>(b + 2 * k * kBlock);
    const uint2 low = load_line(p), high = load_line(p + kBlock / 8);
    o.b[0] = low.x, o.b[1] = low.y, o.b[2] = high.x, o.b[3] = high.y;
  }
  __device__ __forceinline__ void prefetch_ahead(u32 k) const { prefetch(a + kAhead + k * kBlock); }
  __device__ __forceinline__ void store(u32 k, const Values<kWidth>& v) const {
    uint4* p = reinterpret_cast<uint4*>(values + k * kBlock * kWidth);
#pragma unroll
    for (u32 i = 0; i < kWidth / 2; i++) __stwb(p + i * kLanes, v.v[i]);
  }
};

// Gives each lane the decoded symbols of the values that it stores (`kOwn`).
__device__ __forceinline__ void take_symbols(const u32* decoded, Octet<2>& o) {
  o.e[0] = decoded[0], o.e[1] = decoded[1];
}
__device__ __forceinline__ void take_symbols(const u32* decoded, Octet<4>& o) {
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    const u32 from = kLanes / 2 * half + lane_id() / 2;
    const u32 even = __shfl_sync(kAllLanes, decoded[0], from), odd = __shfl_sync(kAllLanes, decoded[1], from);
    o.e[half] = lane_id() % 2 ? odd : even;
  }
}

// A target of `decode_segments`: the values of a chunk, merged while plane E is decoded. `chunk` is in shared
// memory, so that it takes no registers.
template <int kWidth>
struct ValueTarget {
  const FusedStreams& chunk;
  u16* carry;  // of each state

  __device__ __forceinline__ u32 symbols() const { return chunk.n; }
  __device__ __forceinline__ const u8* stream() const { return chunk.stream; }
  __device__ __forceinline__ u32 load_state(u32 at) const {
    return __ldg(reinterpret_cast<const u32*>(chunk.stream + at) + lane_id());
  }
  __device__ __forceinline__ void store_carried(u32 segment, u16 word) const {
    carry[segment * kLanes + lane_id()] = word;
  }

  // Decodes blocks from value `first` on, as many as vector accesses can handle; returns where it stopped.
  template <class Pop>
  __device__ __forceinline__ u32 fast_blocks(u32 first, u32 end, const Pop& pop) const {
    // Each block must have either all of its bytes of plane A, or none.
    const u32 fast = chunk.a_len % kBlock == 0 ? end : min(end, chunk.a_len);
    if (!is_aligned(chunk.values) || fast < first + kStep<kWidth>) return first;
    const u32 stop = (fast - first) / kStep<kWidth> * kStep<kWidth> + first, a_end = min(stop, chunk.a_len);
    BlockCursor<kWidth> cursor(chunk, first);
    Octet<kWidth> next[kAtOnce<kWidth>] = {};
    auto load = [&](u32 at) {
#pragma unroll
      for (u32 k = 0; k < kAtOnce<kWidth>; k++) {
        if (at + k * kBlock < a_end) cursor.load_a(k, next[k]);
        if (at < stop) cursor.load_b(k, next[k]);
      }
    };
    u32 at = first;
    load(at);
#pragma unroll 1
    do {
      Octet<kWidth> o[kAtOnce<kWidth>];
#pragma unroll
      for (u32 k = 0; k < kAtOnce<kWidth>; k++) o[k] = next[k];
      at += kStep<kWidth>;
      cursor.advance_planes();
      load(at);
      if (kWidth == 2 && at + kAhead + kStep<kWidth> <= a_end) {
#pragma unroll
        for (u32 k = 0; k < kAtOnce<kWidth>; k++) cursor.prefetch_ahead(k);
      }
#pragma unroll
      for (u32 k = 0; k < kAtOnce<kWidth>; k++) {
        u32 decoded[2];
        pop(at - kStep<kWidth> + k * kBlock + lane_id() * kOctet, decoded);
        take_symbols(decoded, o[k]);
        cursor.store(k, merge(o[k]));
      }
      cursor.advance_values();
    } while (at < stop);
    return at;
  }

  // Decodes values `first .. end-1`. Bytes of plane A behind its end (the carried ones) are undefined.
  template <class Pop>
  __device__ __forceinline__ void blocks(u32 first, u32 end, const Pop& pop) const {
    const u32 mine = lane_id() * kOctet;
#pragma unroll 1
    for (u32 at = fast_blocks(first, end, pop); at < end; at += kBlock) {
      Octet<kWidth> o;
      const u32 left = values_left(at + mine, end);
      load_raw_slow(chunk.raw, at + mine, o, min(left, values_left(at + mine, chunk.a_len)), left);
      pop(at + mine, o.e);
      store_values_slow<kWidth>(chunk.values, at + mine, merge(o), left);
    }
  }
};

// ---- chunk ----

// Puts the carried bytes of plane A into the last values, which have all other bits by now. All threads.
template <int kWidth>
__device__ __forceinline__ void restore_carried(const DecodeShared<kWidth>& shared) {
  const FusedStreams& chunk = shared.chunk;
  const u32 carried = shared.header.fixed.carried;
  for (u32 i = threadIdx.x; 2 * i < carried; i += kThreads<kWidth>) {
    const u32 pair = shared.carry[i];
    u8* p = chunk.values + static_cast<u64>(chunk.n - carried + 2 * i) * kWidth;
    replace_a<kWidth>(p, pair & 0xff);
    replace_a<kWidth>(p + kWidth, pair >> 8);
  }
}

template <int kWidth>
__device__ __forceinline__ Status fused_streams(const DecodeChunk& c, FusedStreams& out) {
  const bool right = !c.plain && c.layout == kFields && c.width == kWidth && c.residual == kId && c.n > 0 &&
                     c.n <= kFusedDecodeValues && c.planes == kFieldPlanes<kWidth>;
  if (!right || c.streams[0].codec != kRans || c.streams[0].param != 8) return kUnsupported;
  for (u32 i = 1; i < kFieldPlanes<kWidth>; i++)
    if (c.streams[i].codec != kRaw || c.streams[i].param != 0) return kUnsupported;
  if (c.streams[1].len > c.n || (kWidth == 4 && c.streams[2].len != 2 * c.n)) return kCorrupt;
  // The planes are only read.
  u8* frame = const_cast<u8*>(c.frame);
  out = FusedStreams{frame + c.streams[0].offset,
                     {frame + c.streams[1].offset, kWidth == 4 ? frame + c.streams[2].offset : nullptr},
                     c.values,
                     c.streams[0].len,
                     c.n,
                     c.streams[1].len};
  return kOk;
}

// Prefetches into L2 the raw bytes that a warp needs first, whose place is known before the header is read.
template <int kWidth>
__device__ __forceinline__ void prefetch_first(const FusedStreams& chunk) {
  constexpr u32 kValues = 1024, kLine = 128;
  const u32 first = uniform_warp_id() * kSegment, line = lane_id(), lines = kValues / kLine;
  if (first + kValues > chunk.a_len) return;
  if (line < lines) prefetch(chunk.raw.a + first + line * kLine);
  else if (kWidth == 4 && line < 3 * lines) prefetch(chunk.raw.b + 2 * first + (line - lines) * kLine);
}

// All threads load the header of the stream into shared memory together; it is read from there.
template <int kWidth>
__device__ __forceinline__ Status decode_streams(const DecodeChunk& c, const FusedStreams& chunk,
                                                 DecodeShared<kWidth>& shared) {
  if (threadIdx.x == 0) shared.chunk = chunk;
  prefetch_first<kWidth>(chunk);
  const u32 at = 16 * threadIdx.x;
  if (at < min(chunk.stream_len, kStaged))
    *reinterpret_cast<uint4*>(shared.head + at) = __ldg(reinterpret_cast<const uint4*>(chunk.stream + at));
  __syncthreads();
  const Status read = read_header<8>(shared.head, chunk.stream_len, chunk.n, c.tables[0], shared.header,
                                     shared.entries.get());
  if (read != kOk) return read;
  if (shared.chunk.a_len + shared.header.fixed.carried != shared.chunk.n) return kCorrupt;
  Shared entries = shared_address(shared.entries.get());
  hide(entries);
  const bool sound = decode_segments<Words<kWidth>>(
      shared.header, PairTable{entries}, ValueTarget<kWidth>{shared.chunk, shared.carry}, shared.words);
  if (__syncthreads_or(!sound)) return kCorrupt;
  restore_carried<kWidth>(shared);
  return kOk;
}

template <int kWidth>
__device__ __forceinline__ void decode_fused(const DecodeChunk& c, u32& status) {
  __shared__ DecodeShared<kWidth> shared;
  // The status and the descriptor are loaded at the same time.
  const u32 before = status;
  FusedStreams chunk{};
  const Status known = fused_streams<kWidth>(c, chunk);
  if (before != kOk) return;
  __syncthreads();  // all threads have read `status`
  const Status result = known == kOk ? decode_streams<kWidth>(c, chunk, shared) : known;
  if (threadIdx.x == 0) status = result;
}

}  // namespace s4
