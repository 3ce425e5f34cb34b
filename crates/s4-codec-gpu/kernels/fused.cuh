// The common case without planes in between: layout `fields` of 2- and 4-byte values, plane E coded by rANS with
// P = 8, the others raw. Values are split while they are coded (and merged while they are decoded: fused_decode.cuh);
// the gather splits off the raw planes again, which costs no more than storing and copying them.
//
// The stream of plane E carries the last bytes of plane A (`Segments::carried`), so that plane A is stored
// without them, unless plane A is constant or plane E is not stored as a stream.
#pragma once

#include "rans_encode.cuh"

namespace s4 {

static_assert(kThreads<2> == kFusedThreads2 && kThreads<4> == kFusedThreads4, "as abi.h says");
static_assert(kMaxChunk<2> == kFusedValues2 && kMaxChunk<4> == kFusedValues4, "as abi.h says");

// Room for a segment's words, at most one per symbol (docs/codecs/rans.md, "Why one word is always enough"),
// and its states: a whole number of pieces.
constexpr u32 kSlotWords = kSegment + kPiece;
static_assert(kSegment % kPiece == 0 && 2 * kLanes <= kPiece, "the states fit into the last piece");

// Longest header with table and word counts.
constexpr u32 kMaxHead = 544;

// What the encoder leaves for the gather, which puts the stream together: the head of the stream, and each
// segment at the end of its part of `segments`.
template <int kWidth>
struct Slot {
  u32 stream_len;  // bytes of the whole stream
  u32 head_len;    // bytes of `head` in use: a multiple of `kAlign`
  u32 reserved[2];
  u32 words[kWarps<kWidth>];  // of each segment
  u8 head[kMaxHead];
  u16 segments[kWarps<kWidth>][kSlotWords];

  // Where segment `i` ends.
  __device__ __forceinline__ const u8* end(u32 i) const {
    return reinterpret_cast<const u8*>(segments[i] + kSlotWords);
  }
};
static_assert(sizeof(Slot<2>) % 16 == 0 && sizeof(Slot<4>) % 16 == 0 && 2 * kSlotWords % 16 == 0,
              "pieces are 16-byte aligned");
static_assert(sizeof(Slot<2>) <= kFusedScratch2 && sizeof(Slot<4>) <= kFusedScratch4, "as abi.h says");

// ---- load and layout ----

// Plane E of a chunk's values, split off while it is coded: a source for `encode_segment`.
template <int kWidth>
struct ValueSource {
  const u8* values;  // of the chunk
  RawPlanes raw;     // where the raw planes go; null if they are not stored
  u32 n;             // values of the chunk
  u32 padding;       // the symbol that fills up the last block, in all four bytes
  bool aligned;

  // Loads a block's values, splits them and stores their raw planes. Missing symbols become padding.
  __device__ __forceinline__ Octet<kWidth> take_block_slow(u32 at) const {
    const u32 left = values_left(at, n);
    Octet<kWidth> o = split(load_values_slow<kWidth>(values, at, left));
    if (raw.a != nullptr) store_raw_slow(raw, at, o, left);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u32 here = left <= 4 * i ? 0 : min(left - 4 * i, 4u);
      const u32 mask = here == 4 ? ~0u : (1u << (8 * here)) - 1;
      o.e[i] = (o.e[i] & mask) | (padding & ~mask);
    }
    return o;
  }

  template <class Push>
  __device__ __forceinline__ void blocks_backwards(u32 first, u32 end, const Push& push) const {
    const u32 mine = lane_id() * kOctet;
    u32 at = first + (end - first - 1) / kBlock * kBlock;  // the current block
    // Blocks that the fast loop cannot take: the last, partial one, or all if values are not aligned.
    if (!aligned || at + kBlock > n) {
#pragma unroll 1
      while (true) {
        const Octet<kWidth> o = take_block_slow(at + mine);
        push(at + mine, o.e);
        if (at == first) return;
        at -= kBlock;
        if (aligned) break;
      }
    }
    Values<kWidth> next = load_values<kWidth>(values, at + mine);
    while (true) {
      const Octet<kWidth> o = split(next);
      if (at > first) next = load_values<kWidth>(values, at - kBlock + mine);
      if (at >= first + 3 * kBlock) prefetch_values<kWidth>(values, at - 3 * kBlock + mine);
      if (raw.a != nullptr) store_raw(raw, at + mine, o);
      push(at + mine, o.e);
      if (at == first) return;
      at -= kBlock;
    }
  }
};

// The state that this lane starts with in its warp's segment: it holds the lane's bytes of the end of plane A.
template <int kWidth>
__device__ __forceinline__ u32 start_state(const u8* values, u32 n) {
  const u32 carried = Segments<Dense>{n, {}}.carried(n), at = warp_id() * kCarryBytes + 2 * lane_id();
  if (at >= carried) return kLow;
  const u8* p = values + static_cast<u64>(n - carried + at) * kWidth;
  return kLow | a_of<kWidth>(p + kWidth) << 8 | a_of<kWidth>(p);
}

// ---- encode ----

template <int kWidth>
struct EncodeShared {
  AlignedTable<Coder, 256> coders;
  Model model;
  u32 words[kWarps<kWidth>];
  u32 unit[3];  // of each plane, if it is constant; else 0
  u8 heads[3][kHeadBytes];
  union {
    struct {
      Histogram hist;
      u32 counts[256];
    } count;
    __align__(16) u16 words[kWarps<kWidth>][WordSink::kBytes / 2];
  } u;
};

// Byte `i` of plane `plane` of values.
template <int kWidth>
__device__ __forceinline__ u32 plane_byte(const u8* values, u32 plane, u32 i) {
  const u8* p = values + static_cast<u64>(plane == 2 ? i / 2 : i) * kWidth;
  if (plane == 0) return (p[kWidth - 1] << 1 | p[kWidth - 2] >> 7) & 0xff;
  if (plane == 1) return a_of<kWidth>(p);
  return i % 2 ? (p[1] << 1 | p[0] >> 7) & 0xff : (p[0] << 1 | p[kWidth - 1] >> 7) & 0xff;
}

template <int kWidth>
__device__ __forceinline__ bool is_fused(const EncodeChunk& c) {
  if (c.layout != kFields || c.width != kWidth || c.residual != kId || c.n == 0 || c.n > kMaxChunk<kWidth>)
    return false;
  return c.coding[0] == kCodeRans8 && c.coding[1] == kCodeRaw && (kWidth == 2 || c.coding[2] == kCodeRaw);
}

// Looks for a repeated unit in the heads of the planes, one warp per plane.
template <int kWidth>
__device__ __forceinline__ void look_for_units(const EncodeChunk& c, EncodeShared<kWidth>& shared) {
  const u32 plane = warp_id();
  if (plane >= 3) return;
  u32 unit = 0;
  if (plane < kFieldPlanes<kWidth>) {
    auto get = [&](u32 i) { return plane_byte<kWidth>(c.values, plane, i); };
    unit = head_unit(plane == 2 ? 2 * c.n : c.n, get, shared.heads[plane]);
  }
  if (lane_id() == 0) shared.unit[plane] = unit;
}

// Drops units that the head repeats but the plane does not. All threads; ends with a barrier if there was a unit.
template <int kWidth>
__device__ __forceinline__ void check_units(const EncodeChunk& c, EncodeShared<kWidth>& shared) {
  for (u32 plane = 0; plane < kFieldPlanes<kWidth>; plane++) {
    const u32 unit = shared.unit[plane], size = plane == 2 ? 2 * c.n : c.n;
    if (unit == 0 || size <= kHeadBytes) continue;
    auto get = [&](u32 i) { return plane_byte<kWidth>(c.values, plane, i); };
    const bool repeats = repeats_unit(size, get, unit);
    __syncthreads();
    if (threadIdx.x == 0 && !repeats) shared.unit[plane] = 0;
    __syncthreads();
  }
}

// Writes the head of a stream into `slot.head`, and its lengths and word counts into the slot. All threads.
template <int kWidth>
__device__ __forceinline__ void write_head(Slot<kWidth>& slot, const Head<ModelBytes<8>, Dense>& head) {
  const u32 len = head.len();
  for (u32 i = threadIdx.x; i < len; i += kThreads<kWidth>) slot.head[i] = head.byte(i);
  if (threadIdx.x < head.segments.count()) slot.words[threadIdx.x] = head.words[threadIdx.x];
  if (threadIdx.x == 0) slot.stream_len = head.stream_len(), slot.head_len = len;
}

// Codes plane E into the slot. Returns the flags of the stream. All threads; ends with a barrier.
template <int kWidth>
__device__ __forceinline__ u32 encode_e(const EncodeChunk& c, u32 start, bool carries, Slot<kWidth>& slot,
                                        EncodeShared<kWidth>& shared) {
  const u32 n = c.n;
  const u32* counts = shared.u.count.counts;
  make_model(counts, n <= kCountAll, kTotal, shared.model);
  const bool tensors = choose_table(counts, only_table(c.tables[0]), n, kTotal, shared.model);
  Coder* const table = shared.coders.get();
  const bool round = make_coders(shared.model, table);
  const Segments<Dense> segments{n, {}};
  const u32 warp = uniform_warp_id(), first = segments.first(warp);
  if (first < n) {
    const u32 padding = shared.model.symbol[shared.model.kept - 1];
    u8* planes = c.flags & kKeepPlanes ? c.scratch + sizeof(Slot<kWidth>) : nullptr;
    const RawPlanes raw{planes, planes + round_up(n, 16)};
    const ValueSource<kWidth> source{c.values, raw, n, padding * 0x01010101u, is_aligned(c.values)};
    const Shared coders = shared_address(table);
    u16* const buffer = shared.u.words[warp];
    u8* const room_end = c.scratch + (slot.end(warp) - reinterpret_cast<const u8*>(&slot));
    const u32 end = segments.end(warp);
    const u32 words = round ? encode_segment(source, first, end, start, PairCoders<true>{coders}, buffer, room_end)
                            : encode_segment(source, first, end, start, PairCoders<false>{coders}, buffer, room_end);
    if (lane_id() == 0) shared.words[warp] = words;
  }
  __syncthreads();
  const u32 flags = (tensors ? kFlagShared : 0) | (carries ? kFlagCarries : 0);
  write_head(slot, Head<ModelBytes<8>, Dense>{{shared.model}, shared.words, segments, flags});
  __syncthreads();
  return flags;
}

// Sets the streams of `result` and finishes it. One thread.
template <int kWidth>
__device__ __forceinline__ void name_streams(const EncodeChunk& c, u32 flags, u32 stream_len,
                                             const u32* unit, EncodeResult& result) {
  const u32 n = c.n;
  u32 carried = 0;
  auto stored = [&](u32 plane, u32 size) {
    return unit[plane] > 0 ? StreamEntry{kConst, 0, 0, unit[plane]} : StreamEntry{kRaw, 0, 0, size};
  };
  clear_result(result, kOk);
  result.stream[0] = stored(0, n);
  if (unit[0] == 0 && stream_len < n) {
    result.stream[0] = StreamEntry{kRans, 8, 0, stream_len};
    result.shared = (flags & kFlagShared) != 0;
    carried = flags & kFlagCarries ? Segments<Dense>{n, {}}.carried(n) : 0;
  }
  result.stream[1] = stored(1, n - carried);
  if (kWidth == 4) result.stream[2] = stored(2, 2 * n);
  finish_result(result, kFieldPlanes<kWidth>, n * kWidth);
}

template <int kWidth>
__device__ __forceinline__ void encode_fused(const EncodeChunk& c, EncodeResult& result) {
  __shared__ EncodeShared<kWidth> shared;
  if (!is_fused<kWidth>(c)) {
    if (threadIdx.x == 0) clear_result(result, kUnsupported);
    return;
  }
  Slot<kWidth>& slot = *reinterpret_cast<Slot<kWidth>*>(c.scratch);
  u32 start = start_state<kWidth>(c.values, c.n);  // early, to hide the latency of the load
  look_for_units(c, shared);
  count_symbols<kWidth>(c.values, c.n, shared.u.count.hist, shared.u.count.counts);
  check_units(c, shared);
  u32 flags = 0;
  if (shared.unit[0] == 0) {
    const bool carries = shared.unit[1] == 0 && Segments<Dense>{c.n, {}}.carried(c.n) > 0;
    if (!carries) start = kLow;
    flags = encode_e(c, start, carries, slot, shared);
  }
  if (threadIdx.x == 0)
    name_streams<kWidth>(c, flags, shared.unit[0] == 0 ? slot.stream_len : c.n, shared.unit, result);
}

// ---- gather ----

// Where the planes of a chunk go in its frame; null for planes that are not stored raw.
struct PlaneTargets {
  u8 *e, *a, *b;
  u32 a_len;
};

__device__ __forceinline__ void store16(u8* plane, u32 at, u32 len, const u32* words) {
  if (plane == nullptr || at >= len) return;
  uint4 v = make_uint4(words[0], words[1], words[2], words[3]);
  if (len - at < 16) v = masked(words, len - at);
  __stcs(reinterpret_cast<uint4*>(plane + at), v);
}

// Stores the planes of sixteen values: two octets.
__device__ __forceinline__ void store_planes(const PlaneTargets& to, u32 at, u32 n, const Octet<2>* o) {
  const u32 e[4] = {o[0].e[0], o[0].e[1], o[1].e[0], o[1].e[1]};
  const u32 a[4] = {o[0].a[0], o[0].a[1], o[1].a[0], o[1].a[1]};
  store16(to.e, at, n, e);
  store16(to.a, at, to.a_len, a);
}

__device__ __forceinline__ void store_planes(const PlaneTargets& to, u32 at, u32 n, const Octet<4>* o) {
  const u32 e[4] = {o[0].e[0], o[0].e[1], o[1].e[0], o[1].e[1]};
  const u32 a[4] = {o[0].a[0], o[0].a[1], o[1].a[0], o[1].a[1]};
  store16(to.e, at, n, e);
  store16(to.a, at, to.a_len, a);
  store16(to.b, 2 * at, 2 * n, o[0].b);
  store16(to.b, 2 * at + 16, 2 * n, o[1].b);
}

// Loads eight values at any alignment; missing ones are zero.
template <int kWidth>
__device__ __forceinline__ Values<kWidth> load_octet(const u8* values, u32 at, u32 n) {
  if (is_aligned(values) && at + kOctet <= n) return load_values<kWidth>(values, at);
  u32 w[16];
  load_some(values + static_cast<u64>(at) * kWidth, w, values_left(at, n) * kWidth);
  Values<kWidth> out;
#pragma unroll
  for (int i = 0; i < kWidth / 2; i++)
    out.v[i] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
  return out;
}

// Splits the values again and stores the planes that stay raw, padded with zeros to a multiple of 16.
template <int kWidth>
__device__ __forceinline__ void store_raw_planes(const u8* values, u32 n, const PlaneTargets& to) {
  constexpr u32 kEach = 2 * kOctet, kStep = kEach * kThreads<kWidth>;
  constexpr u32 kAtOnce = 8 / kWidth;  // nothing else hides the latency of the loads
  const u32 fast = is_aligned(values) ? n / kEach * kEach : 0;
  u32 at = kEach * threadIdx.x;
#pragma unroll 1
  for (; at + (kAtOnce - 1) * kStep < fast; at += kAtOnce * kStep) {
    Values<kWidth> v[2 * kAtOnce];
#pragma unroll
    for (u32 k = 0; k < 2 * kAtOnce; k++)
      v[k] = load_values<kWidth>(values, at + k / 2 * kStep + k % 2 * kOctet);
#pragma unroll
    for (u32 k = 0; k < kAtOnce; k++) {
      const Octet<kWidth> o[2] = {split(v[2 * k]), split(v[2 * k + 1])};
      store_planes(to, at + k * kStep, n, o);
    }
  }
#pragma unroll 1
  for (; at < n; at += kStep) {
    const Octet<kWidth> o[2] = {split(load_octet<kWidth>(values, at, n)),
                                split(load_octet<kWidth>(values, at + kOctet, n))};
    store_planes(to, at, n, o);
  }
}

// As `store_raw_planes`, but copies planes that were kept while encoding.
template <int kWidth>
__device__ __forceinline__ void copy_kept_planes(const EncodeChunk& c, const PlaneTargets& to) {
  const u8* planes = c.scratch + sizeof(Slot<kWidth>);
  if (to.a != nullptr) copy_padded(planes, to.a, to.a_len);
  if (to.b != nullptr) copy_padded(planes + round_up(c.n, 16), to.b, 2 * c.n);
}

// Puts a chunk's stream together at `to` (16-byte aligned; its size rounded up to 16 is written).
// All threads.
template <int kWidth>
__device__ __forceinline__ void copy_stream(const Slot<kWidth>& slot, u32 n, u8* to) {
  for (u32 i = 4 * threadIdx.x; i < slot.head_len; i += 4 * kThreads<kWidth>)
    *reinterpret_cast<u32*>(to + i) = *reinterpret_cast<const u32*>(slot.head + i);
  const u32 end = join_segments<kWarps<kWidth>>(
      Segments<Dense>{n, {}}.count(), slot.words, [&](u32 i) { return slot.end(i); }, to, slot.head_len);
  const u32 gap = end + 4 * threadIdx.x;
  if (gap < round_up(end, 16)) *reinterpret_cast<u32*>(to + gap) = 0;
}

template <int kWidth>
__device__ __forceinline__ void gather_fused(const EncodeChunk& c, EncodeResult& result, u8* frames,
                                             u64 capacity) {
  if (!has_room(result, capacity)) return;
  u8* const to = frames + result.offset;
  if (result.plain) return write_plain(c.values, result.len, to);
  write_frame_header(result, to);
  const Slot<kWidth>& slot = *reinterpret_cast<const Slot<kWidth>*>(c.scratch);
  u8* raw[3] = {nullptr, nullptr, nullptr};
  u32 at = header_len(kFieldPlanes<kWidth>);
#pragma unroll
  for (u32 plane = 0; plane < kFieldPlanes<kWidth>; plane++) {
    const StreamEntry& e = result.stream[plane];
    if (e.codec == kRaw) raw[plane] = to + at;
    if (e.codec == kConst && threadIdx.x < 16)
      to[at + threadIdx.x] =
          static_cast<u8>(threadIdx.x < e.len ? plane_byte<kWidth>(c.values, plane, threadIdx.x) : 0);
    if (e.codec == kRans) copy_stream(slot, c.n, to + at);
    at += round_up(e.len, 16);
  }
  const PlaneTargets targets{raw[0], raw[1], raw[2], result.stream[1].len};
  if (c.flags & kKeepPlanes && result.stream[0].codec == kRans) copy_kept_planes<kWidth>(c, targets);
  else store_raw_planes<kWidth>(c.values, c.n, targets);
}

}  // namespace s4
