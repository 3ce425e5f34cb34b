// Counting symbols, choosing the table of a stream, and whether the tensor's shared table is cheaper: as in
// docs/codecs/rans.md ("Encoding") and the CPU's engine, with the same integer arithmetic.
#pragma once

#include "rans.cuh"

namespace s4 {

// Counting (docs/codecs/rans.md, "Counts").
constexpr u32 kCountAll = 8192;
constexpr u32 kWindow = 512;
constexpr u32 kSample = 64;

// Eight words of two 16-bit counters for each symbol: the lanes of a warp mostly see the same few
// symbols and would otherwise queue for one address.
constexpr u32 kCopies = 8;
struct Histogram {
  u32 copies[256 * kCopies];
};

// Index of the first symbol in the `i`-th group of eight that is counted.
__device__ __forceinline__ u32 counted_octet(u32 i, bool all) {
  if (all) return i * kOctet;
  const u32 window = i / (kSample / kOctet), part = i % (kSample / kOctet);
  return window * kWindow + kSample * (5 * window % 8) + kOctet * part;
}

__device__ __forceinline__ void clear_counts(Histogram& hist) {
  for (u32 i = threadIdx.x; i < 256 * kCopies; i += blockDim.x) hist.copies[i] = 0;
  __syncthreads();
}

// Counts the first `left` of eight symbols.
__device__ __forceinline__ void count_octet(Histogram& hist, const u32* symbols, u32 left) {
  const u32 column = lane_id() % kCopies, one = 1u << (16 * (lane_id() / kCopies % 2));
#pragma unroll
  for (int k = 0; k < 8; k++)
    if (static_cast<u32>(k) < left) atomicAdd(&hist.copies[byte_of(symbols, k) * kCopies + column], one);
}

__device__ __forceinline__ void sum_counts(const Histogram& hist, u32* counts) {
  __syncthreads();
  for (u32 s = threadIdx.x; s < 256; s += blockDim.x) {
    u32 sum = 0;
    for (u32 k = 0; k < kCopies; k++) {
      const u32 pair = hist.copies[s * kCopies + (k + s) % kCopies];
      sum += (pair & 0xffff) + (pair >> 16);
    }
    counts[s] = sum;
  }
  __syncthreads();
}

__device__ __forceinline__ u32 counted_octets(u32 n) {
  return n <= kCountAll ? (n + kOctet - 1) / kOctet : (n + kWindow - 1) / kWindow * (kSample / kOctet);
}

// Counts a 16-byte aligned plane into `counts[256]`: all symbols if the plane is sparse (many are rare then) or
// short, else a sample. All threads take part.
template <class Density>
__device__ __forceinline__ void count_plane(const u8* plane, u32 n, Density density, Histogram& hist, u32* counts) {
  static_assert(kMaxPlaneBytes / (2 * kCopies) <= 1u << 15, "a counter of 16 bits sees a sixteenth of the symbols");
  clear_counts(hist);
  const bool all = density.is_sparse() || n <= kCountAll;
  const u32 octets = all ? (n + kOctet - 1) / kOctet : counted_octets(n);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < octets; i += blockDim.x) {
    const u32 at = counted_octet(i, all), left = values_left(at, n);
    u32 symbols[2];
    load_octet_bytes(plane + at, symbols, left);
    count_octet(hist, symbols, left);
  }
  sum_counts(hist, counts);
}

// Counts the symbols of plane E of a chunk's values into `counts[256]`. All threads take part.
template <int kWidth>
__device__ void count_symbols(const u8* values, u32 n, Histogram& hist, u32* counts) {
  constexpr u32 kStep = kThreads<kWidth>;
  clear_counts(hist);
  const bool all = n <= kCountAll, aligned = is_aligned(values);
  const u32 octets = counted_octets(n);
  auto count = [&](const Values<kWidth>& v, u32 left) {
    const Octet<kWidth> o = split(v);
    count_octet(hist, o.e, left);
  };
  u32 i = threadIdx.x;
  // Several loads at once, since nothing else hides their latency here.
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
  sum_counts(hist, counts);
}

// ---- frequencies ----

// A table while it is made.
struct Model {
  u32 escape;  // frequency of the escape
  u32 kept;    // number of symbols in the table
  // By rank, the order in which the table is written.
  u8 symbol[256];
  u16 freq[256];
  u16 start[256];
  // By ascending symbol, before ranking.
  u8 listed[256];
  u32 listed_count[256];
  u16 listed_freq[256];
};

// Decides which symbols are kept and lists them with their counts; sets the escape's frequency. One
// warp, eight symbols a lane.
__device__ __forceinline__ void choose_symbols(const u32* counts, bool all, u32 total, Model& model) {
  const u32 first = lane_id() * 8;
  u32 count[8], sum = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) sum += count[k] = counts[first + k];
  const u32 n = warp_sum(sum);

  // The smallest count with count * total * 5 >= n; for 2^19 symbols that product would overflow.
  const u32 least = (n + total * 5 - 1) / (total * 5);
  u32 dropped = 0, mine = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const bool keep = count[k] > 0 && count[k] >= least;
    dropped += keep ? 0 : count[k];
    mine += keep;
    if (!keep) count[k] = 0;
  }
  dropped = warp_sum(dropped);
  const u32 escape = all && dropped == 0 ? 0 : max(1u, (total * dropped + n / 2) / n);

  u32 kept = warp_sum(mine);
  for (; kept > total - escape; kept--) {
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
    model.listed_count[at] = count[k];
    at++;
  }
  if (lane_id() == 0) model.escape = escape, model.kept = kept;
  __syncwarp();
}

// Decides which frequency is changed: a count relative to its frequency. Counts are at most 2^19.
__device__ __forceinline__ u32 weight(u32 count, u32 divisor) { return count * 4096 / divisor; }

// The index of a warp's smallest `weight`; among equal weights, the smallest index.
__device__ __forceinline__ u32 index_of_least(u32 weight, u32 index) {
  const u32 least = warp_min(weight);
  return warp_min(weight == least ? index : ~0u);
}

// Gives the listed symbols frequencies that add up to `slots` with the escape's. One warp; most lanes have
// one symbol or none.
__device__ __forceinline__ void choose_frequencies(Model& model, u32 slots) {
  const u32 kept = model.kept, total = slots - model.escape;
  u32 sum = 0;
  for (u32 i = lane_id(); i < kept; i += kLanes) sum += model.listed_count[i];
  const u32 m = warp_sum(sum);
  sum = 0;
  for (u32 i = lane_id(); i < kept; i += kLanes) {
    // The nearest integer to count * total / m. (Doubling that product would overflow for 2^19 symbols.)
    const u32 product = model.listed_count[i] * total, whole = product / m;
    const u32 freq = max(1u, whole + (2 * (product - whole * m) >= m));
    model.listed_freq[i] = static_cast<u16>(freq);
    sum += freq;
  }
  sum = warp_sum(sum);
  // What each of a lane's symbols is worth, so that only the one that changes is divided again; the smallest is taken.
  u32 worth[256 / kLanes];
  const auto set = [&](const auto& of, u32 only) {
#pragma unroll
    for (u32 k = 0; k < 256 / kLanes; k++) {
      const u32 i = lane_id() + kLanes * k;
      if (only == ~0u || i == only) worth[k] = i < kept ? of(model.listed_count[i], model.listed_freq[i]) : ~0u;
    }
  };
  const auto best = [&] {
    u32 least = ~0u, index = ~0u;
#pragma unroll
    for (u32 k = 0; k < 256 / kLanes; k++)
      if (worth[k] < least) least = worth[k], index = lane_id() + kLanes * k;
    return index_of_least(least, index);
  };
  if (sum < total) {
    const auto gain = [](u32 count, u32 freq) { return ~1u - weight(count, 2 * freq + 1); };
    set(gain, ~0u);
    for (; sum < total; sum++) {
      const u32 i = best();
      if (i % kLanes == lane_id()) model.listed_freq[i]++, set(gain, i);
    }
  } else if (sum > total) {
    const auto loss = [](u32 count, u32 freq) { return freq > 1 ? weight(count, 2 * freq - 1) : ~0u; };
    set(loss, ~0u);
    for (; sum > total; sum--) {
      const u32 i = best();
      if (i % kLanes == lane_id()) model.listed_freq[i]--, set(loss, i);
    }
  }
  __syncwarp();
  // The frequency of a lone symbol must fit into a byte.
  if (lane_id() == 0 && slots == 256 && model.listed_freq[0] == 256) model.listed_freq[0] = kTotal - 1, model.escape = 1;
}

// Sorts the chosen symbols by frequency, then symbol, and gives each its slots. Thread `first` of `threads`.
__device__ __forceinline__ void rank_symbols(Model& model, u32 first, u32 threads) {
  for (u32 i = first; i < model.kept; i += threads) {
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

// Makes a table of `slots` slots from counts of `all` symbols or of a sample. All threads; ends with a
// barrier.
__device__ __forceinline__ void make_model(const u32* counts, bool all, u32 slots, Model& model) {
  if (warp_id() == 0) {
    choose_symbols(counts, all, slots, model);
    choose_frequencies(model, slots);
  }
  __syncthreads();
  rank_symbols(model, threadIdx.x, blockDim.x);
  __syncthreads();
}

// ---- shared tables ----

// 256 * log2(v), to the nearest integer, by repeated squaring.
__device__ __forceinline__ u32 log2_256(u32 v) {
  const u32 whole = 31 - __clz(v);
  u64 mantissa = static_cast<u64>(v) << (31 - whole);  // 1.31 fixed-point, in [1, 2)
  u32 fraction = 0;
#pragma unroll 1
  for (int i = 0; i < 9; i++) {
    mantissa = (mantissa * mantissa) >> 31;
    const u32 bit = static_cast<u32>(mantissa >> 32);
    mantissa >>= bit;
    fraction = fraction << 1 | bit;
  }
  return ((whole << 9 | fraction) + 1) >> 1;
}

// Bits that the counted symbols take with a table of `slots` = 2^P slots; if the table lacks one of them, it
// has an escape. One warp.
__device__ __forceinline__ u32 table_cost(const u32* counts, const u8* symbols, const u16* freqs, u32 kept,
                                          u32 escape, u32 slots) {
  const u32 whole = log2_256(slots);
  u32 bits = 0, rest = 0;
  for (u32 s = lane_id(); s < 256; s += kLanes) rest += counts[s];
  for (u32 i = lane_id(); i < kept; i += kLanes) {
    const u32 count = counts[symbols[i]];
    if (count == 0) continue;
    bits += count * (whole - log2_256(freqs[i]));
    rest -= count;
  }
  bits = warp_sum(bits);
  rest = warp_sum(rest);
  if (rest > 0) bits += rest * (whole - log2_256(max(1u, escape)) + (8 << 8));
  return (bits + 255) / 256;
}

// Whether a stream of `n` symbols is cheaper with the tensor's table than with one of its own. One warp.
__device__ __forceinline__ bool shared_is_cheaper(const u32* counts, const Model& own, const SharedTable& table,
                                                  u32 n, u32 slots) {
  if (slots != 1u << table.precision || table.count == 0 || table.count > 256) return false;
  if (table.escape == 0 && table.count < 256) return false;  // it could not code every symbol
  u32 counted = 0;
  for (u32 s = lane_id(); s < 256; s += kLanes) counted += counts[s];
  counted = warp_sum(counted);
  auto scaled = [&](u32 bits) { return static_cast<u64>(bits) * n / counted; };
  const u32 shared_bits = table_cost(counts, table.symbol, table.freq, table.count, table.escape, slots);
  const u32 own_bits = table_cost(counts, own.symbol, own.freq, own.kept, own.escape, slots);
  const u32 own_table = 4 + own.kept * (slots == 256 ? 2 : 3);
  return scaled(shared_bits) < scaled(own_bits) + 8 * own_table;
}

// Replaces the model by the tensor's table. One warp.
__device__ __forceinline__ void take_shared(const SharedTable& table, Model& model) {
  u32 at = table.escape;
  for (u32 first = 0; first < table.count; first += kLanes) {
    const u32 i = first + lane_id(), freq = i < table.count ? table.freq[i] : 0;
    const u32 below = warp_sum_below(freq);
    if (i < table.count) {
      model.symbol[i] = table.symbol[i];
      model.freq[i] = static_cast<u16>(freq);
      model.start[i] = static_cast<u16>(at + below);
    }
    at += warp_sum(freq);
  }
  if (lane_id() == 0) model.escape = table.escape, model.kept = table.count;
}

// Chooses between the stream's own table and the tensor's, which may be null; returns whether it is the
// tensor's. All threads; ends with a barrier.
__device__ __forceinline__ bool choose_table(const u32* counts, const SharedTable* table, u32 n, u32 slots,
                                             Model& model) {
  if (table == nullptr) return false;
  bool shared = false;
  if (warp_id() == 0) {
    shared = shared_is_cheaper(counts, model, *table, n, slots);
    __syncwarp();
    if (shared) take_shared(*table, model);
  }
  return __syncthreads_or(shared) != 0;
}

}  // namespace s4
