// Encodes chunks that are differences from a parent, of every layout, width and coding. As composed.cuh, but
// for what the CPU's engine does differently where planes are differences: all symbols are counted, not a
// sample, because there are many rare ones; and planes of more than kLongPlane symbols are coded in segments of
// twice the length, because differences take few bits, of which a segment's states are a larger part.
#pragma once

#include "composed.cuh"

namespace s4 {

constexpr u32 kLongPlane = 1u << 16;
constexpr u32 kLongSegmentLog2 = 15;
static_assert(kMaxPlaneBytes / 16 <= 1u << 15, "a counter of 16 bits sees a sixteenth of a plane's symbols");

// ---- counts and table ----

// Counts all symbols of a plane into `counts[256]`. All threads.
__device__ __forceinline__ void count_all(const u8* plane, u32 n, Histogram& hist, u32* counts) {
  clear_counts(hist);
#pragma unroll 1
  for (u32 at = kOctet * threadIdx.x; at < n; at += kOctet * blockDim.x) {
    const u32 left = values_left(at, n);
    u32 symbols[2];
    if (left == kOctet) {
      const uint2 v = *reinterpret_cast<const uint2*>(plane + at);
      symbols[0] = v.x, symbols[1] = v.y;
    } else {
      load_bytes<8>(plane + at, symbols, left);
    }
    count_octet(hist, symbols, left);
  }
  sum_counts(hist, counts);
}

// As `make_model`, of counts that are complete. All threads; ends with a barrier.
__device__ __forceinline__ void make_complete_model(const u32* counts, u32 slots, Model& model) {
  if (warp_id() == 0) {
    choose_symbols(counts, true, slots, model);
    choose_frequencies(model, slots);
  }
  __syncthreads();
  rank_symbols(model);
  __syncthreads();
}

// ---- stream ----

// The shape of a plane's stream.
struct Segments {
  u32 symbols, log2;

  __device__ __forceinline__ explicit Segments(u32 symbols_)
      : symbols(symbols_), log2(symbols_ > kLongPlane ? kLongSegmentLog2 : kSegmentLog2) {}
  __device__ __forceinline__ u32 count() const { return ((symbols - 1) >> log2) + 1; }
  // Scratch of segment `i`: longer ones take that of two.
  __device__ __forceinline__ u8* end(u8* scratch, u32 i) const {
    return scratch + static_cast<u64>(i + 1) * (kSegmentScratch << (log2 - kSegmentLog2));
  }
  // Bytes that a stream carries of the one behind it.
  __device__ __forceinline__ u32 carried(u32 behind) const {
    const u32 bytes = kCarryBytes * count();
    return bytes <= behind ? bytes : 0;
  }
};

// What stands in front of the segments: byte `i` of it.
struct ResidualHead {
  const Model& model;
  const u32* words;  // of each segment
  Segments segments;
  u32 freq_bytes;    // 1 for P = 8, 2 for P = 12
  u32 flags;

  __device__ __forceinline__ Head table() const { return Head{model, words, 0, freq_bytes, flags}; }
  __device__ __forceinline__ u32 counts_at() const { return kHeaderBytes + table().table_len(); }
  __device__ __forceinline__ u32 len() const { return round_up(counts_at() + 2 * segments.count(), kAlign); }

  __device__ __forceinline__ u8 byte(u32 i) const {
    const u32 at = counts_at();
    u32 v = 0;
    if (i < 4) v = segments.symbols >> (8 * i);
    else if (i == 4) v = 5;
    else if (i == 5) v = segments.log2;
    else if (i == 6) v = 1;
    else if (i == 7) v = flags;
    else if (i < at) v = table().table_byte(i - kHeaderBytes);
    else if (i < at + 2 * segments.count()) v = words[(i - at) / 2] >> (8 * ((i - at) % 2));
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

// Codes all segments into their scratch and their numbers of words into `shared.words`. All threads; ends
// with a barrier.
template <u32 kBits>
__device__ __forceinline__ void encode_residual_segments(const PlaneJob& job, const Segments& segments, u32 carried,
                                                         PlaneShared& shared) {
  const u32 padding = shared.model.symbol[shared.model.kept - 1];
  const u8* tail = job.behind.at + (job.behind.len - carried);
#pragma unroll 1
  for (u32 i = uniform_warp_id(); i < segments.count(); i += kComposedWarps) {
    u32 x = kLow;
    if (carried > 0) {
      const u8* word = tail + i * kCarryBytes + 2 * lane_id();
      x |= word[0] | word[1] << 8;
    }
    const u8* room = segments.end(job.segments, i);
    WordSink sink(shared.u.words[warp_id()], reinterpret_cast<u16*>(segments.end(job.segments, i)));
    const u32 first = i << segments.log2, end = min(job.size, first + (1u << segments.log2));
    const u8* states = encode_plane_segment<kBits>(job.plane, first, end, x, shared.coders, padding, sink);
    if (lane_id() == 0) shared.words[i] = static_cast<u32>(room - states - kStatesBytes) / 2;
    __syncwarp();
  }
  __syncthreads();
}

// Puts head and segments together. All threads; ends with a barrier.
__device__ __forceinline__ void assemble_residual(const PlaneJob& job, const ResidualHead& head) {
  for (u32 i = threadIdx.x; i < head.len(); i += blockDim.x) job.stream[i] = head.byte(i);
  u32 at = head.len();
#pragma unroll 1
  for (u32 i = 0; i < head.segments.count(); i++) {
    const u32 len = kStatesBytes + 2 * head.words[i];
    if (i % kComposedWarps == warp_id())
      copy_shifted(head.segments.end(job.segments, i) - len, job.stream + at, len);
    at += round_up(len, kAlign);
  }
  __syncthreads();
}

// Codes a plane by rANS, unless that is not shorter. All threads.
template <u32 kBits>
__device__ __forceinline__ Coded encode_residual_rans(const PlaneJob& job, PlaneShared& shared) {
  constexpr u32 kSlots = 1u << kBits;
  const u32* counts = shared.u.count.counts;
  count_all(job.plane, job.size, shared.u.count.hist, shared.u.count.counts);
  make_complete_model(counts, kSlots, shared.model);
  const bool tensors = choose_table(counts, job.table, job.size, kSlots, shared.model);
  const Model& model = shared.model;
  make_plane_coders(model, shared.coders);
  const Segments segments(job.size);
  const u32 carried = segments.carried(job.behind.len);
  encode_residual_segments<kBits>(job, segments, carried, shared);
  const u32 flags = (tensors ? kFlagShared : 0) | (carried > 0 ? kFlagCarries : 0);
  const ResidualHead head{model, shared.words, segments, kBits == 8 ? 1u : 2u, flags};
  const u32 len = head.stream_len();
  if (len >= job.size) return Coded{job.plane, job.size, 0, kRaw, 0, false};
  assemble_residual(job, head);
  return Coded{job.stream, len, carried, kRans, kBits, tensors};
}

// ---- chunk ----

// Codes a plane. All threads; ends with a barrier.
__device__ __forceinline__ Coded encode_residual_plane(const PlaneJob& job, PlaneShared& shared) {
  if (job.coding != kCodeRans8 && job.coding != kCodeRans12) return encode_plane(job, shared);
  if (plane_repeats(job, shared)) return Coded{job.plane, shared.unit, 0, kConst, 0, false};
  return job.coding == kCodeRans8 ? encode_residual_rans<8>(job, shared) : encode_residual_rans<12>(job, shared);
}

__device__ __forceinline__ void encode_residual(const EncodeChunk& c, EncodeResult& result) {
  encode_chunk(c, result, c.residual != kId, ValueSpan{c.values, c.parent, c.n, c.residual},
               [](const PlaneJob& job, PlaneShared& shared) { return encode_residual_plane(job, shared); });
}

}  // namespace s4
