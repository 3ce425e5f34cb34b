// Device functions of the `rans` bitstream (docs/codecs/rans.md), P = 8: constants, warp helpers,
// counting and the choice of frequencies. The encoder is in rans_encode.cuh, the decoder in
// rans_decode.cuh, the kernels in rans.cu.
//
// One thread block codes one chunk; a warp codes one segment, a lane one state. No function needs more
// than sm_75.
#pragma once

#include "shared.cuh"

namespace s4 {

constexpr u32 kLanes = 32;

constexpr u32 kBlock = kLanes * kOctet;          // symbols that a warp codes at a time
constexpr u32 kSegmentLog2 = 14;                 // what the encoder writes
constexpr u32 kSegment = 1u << kSegmentLog2;
constexpr u32 kTotal = 256;                      // sum of a table's frequencies: 2^P
constexpr u32 kLow = 1u << 16;                   // states lie in [kLow, 2^32) between steps

constexpr u32 kHeaderBytes = 8;
constexpr u32 kStatesBytes = 4 * kLanes;
constexpr u32 kCarryBytes = 2 * kLanes;          // what the states of a segment carry
constexpr u32 kAlign = 4;                        // of segments, from the start of the stream

constexpr u32 kFlagCarries = 2;                  // in header byte 7

// Values are `kWidth` bytes. A chunk that is encoded here has at most 256 KiB of them, and a block a warp
// for each of its segments.
template <int kWidth>
constexpr u32 kWarps = 16 / kWidth;
template <int kWidth>
constexpr u32 kThreads = kWarps<kWidth> * kLanes;
template <int kWidth>
constexpr u32 kMaxChunk = kWarps<kWidth> * kSegment;

// Counting (docs/codecs/rans.md, "Counts").
constexpr u32 kCountAll = 8192;
constexpr u32 kWindow = 512;
constexpr u32 kSample = 64;

__device__ __forceinline__ u32 lane_id() { return threadIdx.x % kLanes; }
__device__ __forceinline__ u32 warp_id() { return threadIdx.x / kLanes; }

// The same for a full warp, so that the compiler knows it to be equal in all lanes: loops whose bounds
// follow from it need no code for lanes that went different ways.
__device__ __forceinline__ u32 uniform_warp_id() { return __shfl_sync(kAllLanes, warp_id(), 0); }

__device__ __forceinline__ u32 lanes_below() { return (1u << lane_id()) - 1; }

__device__ __forceinline__ u32 round_up(u32 v, u32 to) { return (v + to - 1) / to * to; }

__device__ __forceinline__ u32 segments_of(u32 n) { return (n + kSegment - 1) / kSegment; }

// Bytes of plane A that the stream of a chunk of `n` values carries.
__device__ __forceinline__ u32 carried_bytes(u32 n) {
  const u32 bytes = kCarryBytes * segments_of(n);
  return bytes <= n ? bytes : 0;
}

__device__ __forceinline__ u32 warp_sum(u32 v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kAllLanes, v, d);
  return v;
}

__device__ __forceinline__ u32 warp_max(u32 v) {
  for (int d = 16; d > 0; d /= 2) v = max(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}

__device__ __forceinline__ u32 warp_min(u32 v) {
  for (int d = 16; d > 0; d /= 2) v = min(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}

// Sum of the values of the lanes below this one.
__device__ __forceinline__ u32 warp_sum_below(u32 v) {
  u32 sum = v;
  for (int d = 1; d < 32; d *= 2) {
    const u32 other = __shfl_up_sync(kAllLanes, sum, d);
    if (lane_id() >= static_cast<u32>(d)) sum += other;
  }
  return sum - v;
}

__device__ __forceinline__ u32 byte_of(const u32* words, int i) {
  return (words[i / 4] >> (8 * (i % 4))) & 0xff;
}

// ---- counting ----

// Eight counters of 2 x 16 bits for each symbol: the lanes of a warp mostly see the same few
// symbols and would otherwise queue for one address.
constexpr u32 kCopies = 8;
struct Histogram {
  u32 copies[256 * kCopies];
};

// Index of the first of eight symbols that the `i`-th group of eight to be counted holds.
__device__ __forceinline__ u32 counted_octet(u32 i, bool all) {
  if (all) return i * kOctet;
  const u32 window = i / (kSample / kOctet), part = i % (kSample / kOctet);
  return window * kWindow + kSample * (5 * window % 8) + kOctet * part;
}

// Counts the symbols of plane E of a chunk into `counts[256]`. All threads take part.
template <int kWidth>
__device__ void count_symbols(const u8* values, u32 n, Histogram& hist, u32* counts) {
  constexpr u32 kStep = kThreads<kWidth>;
  for (u32 i = threadIdx.x; i < 256 * kCopies; i += kStep) hist.copies[i] = 0;
  __syncthreads();
  const bool all = n <= kCountAll, aligned = is_aligned(values);
  const u32 octets = all ? (n + kOctet - 1) / kOctet : (n + kWindow - 1) / kWindow * (kSample / kOctet);
  const u32 column = lane_id() % kCopies, one = 1u << (16 * (lane_id() / kCopies % 2));
  auto count = [&](const Values<kWidth>& v, u32 left) {
    const Octet<kWidth> o = split(v);
#pragma unroll
    for (int k = 0; k < 8; k++)
      if (static_cast<u32>(k) < left) atomicAdd(&hist.copies[byte_of(o.e, k) * kCopies + column], one);
  };
  u32 i = threadIdx.x;
  // Several loads at once: nothing else hides their latency here.
  constexpr u32 kAtOnce = 8 / kWidth;
  if (aligned && n % kWindow == 0) {
    for (; i + (kAtOnce - 1) * kStep < octets; i += kAtOnce * kStep) {
      Values<kWidth> v[kAtOnce];
#pragma unroll
      for (u32 k = 0; k < kAtOnce; k++)
        v[k] = load_values<kWidth>(values, counted_octet(i + k * kStep, all));
#pragma unroll
      for (u32 k = 0; k < kAtOnce; k++) count(v[k], kOctet);
    }
  }
#pragma unroll 1
  for (; i < octets; i += kStep) {
    const u32 at = counted_octet(i, all), left = values_left(at, n);
    count(load_values_slow<kWidth>(values, at, left), left);
  }
  __syncthreads();
  for (u32 s = threadIdx.x; s < 256; s += kStep) {
    u32 sum = 0;
    for (u32 k = 0; k < kCopies; k++) {
      const u32 pair = hist.copies[s * kCopies + (k + s) % kCopies];
      sum += (pair & 0xffff) + (pair >> 16);
    }
    counts[s] = sum;
  }
  __syncthreads();
}

// ---- frequencies ----

// The table of a chunk.
struct Model {
  u32 escape;  // frequency of the escape
  u32 kept;    // number of symbols in the table
  // By rank, as the table is written.
  u8 symbol[256];
  u16 freq[256];
  u16 start[256];
  // By symbol, ascending: what the ranks are made of.
  u8 listed[256];
  u16 listed_count[256];
  u16 listed_freq[256];
};

// Decides which symbols are kept and lists them with their counts; sets the escape's frequency. One
// warp, eight symbols a lane.
__device__ __forceinline__ void choose_symbols(const u32* counts, bool all, Model& model) {
  const u32 first = lane_id() * 8;
  u32 count[8], sum = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) sum += count[k] = counts[first + k];
  const u32 n = warp_sum(sum);

  u32 dropped = 0, mine = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const bool keep = count[k] > 0 && count[k] * (kTotal * 5) >= n;
    dropped += keep ? 0 : count[k];
    mine += keep;
    if (!keep) count[k] = 0;
  }
  dropped = warp_sum(dropped);
  const u32 escape = all && dropped == 0 ? 0 : max(1u, (kTotal * dropped + n / 2) / n);

  u32 kept = warp_sum(mine);
  for (; kept > kTotal - escape; kept--) {
    u32 rarest = ~0u;
#pragma unroll
    for (int k = 0; k < 8; k++)
      if (count[k] > 0) rarest = min(rarest, count[k] << 8 | (255 - (first + k)));
    rarest = 255 - (warp_min(rarest) & 255);
    mine -= rarest / 8 == lane_id();
#pragma unroll
    for (int k = 0; k < 8; k++)
      if (first + k == rarest) count[k] = 0;
  }

  u32 at = warp_sum_below(mine);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    if (count[k] == 0) continue;
    model.listed[at] = static_cast<u8>(first + k);
    model.listed_count[at] = static_cast<u16>(count[k]);
    at++;
  }
  if (lane_id() == 0) model.escape = escape, model.kept = kept;
  __syncwarp();
}

// What decides where a frequency is changed: a count in relation to it, in 24 bits. Counts are at most
// 2^14 and the divisors at least 3, so that at most one symbol is cut short.
__device__ __forceinline__ u32 weight(u32 count, u32 divisor) { return min(count * 4096 / divisor, 0xffffffu); }

// Gives the listed symbols frequencies that add up. One warp; mostly a symbol or none for each lane.
__device__ __forceinline__ void choose_frequencies(Model& model) {
  const u32 kept = model.kept, total = kTotal - model.escape;
  u32 sum = 0;
  for (u32 i = lane_id(); i < kept; i += kLanes) sum += model.listed_count[i];
  const u32 m = warp_sum(sum);
  sum = 0;
  for (u32 i = lane_id(); i < kept; i += kLanes) {
    const u32 freq = max(1u, (2 * model.listed_count[i] * total + m) / (2 * m));
    model.listed_freq[i] = static_cast<u16>(freq);
    sum += freq;
  }
  sum = warp_sum(sum);
  for (; sum < total; sum++) {
    u32 best = 0;
    for (u32 i = lane_id(); i < kept; i += kLanes)
      best = max(best, weight(model.listed_count[i], 2 * model.listed_freq[i] + 1) << 8 | (255 - i));
    best = 255 - (warp_max(best) & 255);
    if (best % kLanes == lane_id()) model.listed_freq[best]++;
  }
  for (; sum > total; sum--) {
    u32 best = ~0u;
    for (u32 i = lane_id(); i < kept; i += kLanes)
      if (model.listed_freq[i] > 1)
        best = min(best, weight(model.listed_count[i], 2 * model.listed_freq[i] - 1) << 8 | i);
    best = warp_min(best) & 255;
    if (best % kLanes == lane_id()) model.listed_freq[best]--;
  }
  __syncwarp();
  // One symbol that is alone: its frequency must fit into a byte.
  if (lane_id() == 0 && model.listed_freq[0] == kTotal) model.listed_freq[0] = kTotal - 1, model.escape = 1;
}

// Sorts the chosen symbols by frequency, then symbol, and gives each its slots. All threads.
__device__ __forceinline__ void rank_symbols(Model& model) {
  for (u32 i = threadIdx.x; i < model.kept; i += blockDim.x) {
    const u32 freq = model.listed_freq[i];
    u32 rank = 0, start = model.escape;
    for (u32 k = 0; k < model.kept; k++) {
      const u32 other = model.listed_freq[k];
      const bool before = other < freq || (other == freq && k < i);
      rank += before;
      start += before ? other : 0;
    }
    model.symbol[rank] = model.listed[i];
    model.freq[rank] = static_cast<u16>(freq);
    model.start[rank] = static_cast<u16>(start);
  }
}

// Counts a chunk and makes its table. All threads; ends with a barrier.
template <int kWidth>
__device__ void make_model(const u8* values, u32 n, Histogram& hist, u32* counts, Model& model) {
  count_symbols<kWidth>(values, n, hist, counts);
  if (warp_id() == 0) {
    choose_symbols(counts, n <= kCountAll, model);
    choose_frequencies(model);
  }
  __syncthreads();
  rank_symbols(model);
  __syncthreads();
}

}  // namespace s4
