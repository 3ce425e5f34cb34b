// Contexts (docs/codecs/rans.md): the table of each symbol is named by a byte that is known before the symbol is
// decoded. Policies for the composed kernels (plane_encode.cuh, plane_decode.cuh); those of one table are separate
// instances, which know nothing of this.
//
// What the contexts are is somebody else's: they lie in a chunk's input `kContexts`, 16-byte aligned, those of
// plane i where `plane_at` says, below kMaxTables each, and `contexts` of the descriptor says which planes have
// any. (No plan has contexts yet, and so s4.cu has no such kernels: they are instances of the tests.) Scratch
// memory is `contexts_encode_scratch` and `contexts_decode_scratch`.
#pragma once

#include "composed.cuh"

namespace s4 {

// The contexts of a plane's symbols.
struct PlaneContexts {
  const u8* at;  // null: all are 0
  u32 size;      // of the plane

  struct Eight {
    u32 words[2];
    __device__ __forceinline__ u32 of(int k) const { return byte_of(words, k); }
  };
  // Those of eight symbols; of what is behind the plane 0.
  __device__ __forceinline__ Eight tables_of(u32 from) const {
    Eight eight{{0, 0}};
    if (at != nullptr) load_octet_bytes(at + from, eight.words, values_left(from, size));
    return eight;
  }

  // Bit i: a symbol that this thread looks at has context i; bit 31: one from 31 on.
  __device__ __forceinline__ u32 seen() const {
    u32 seen = 0;
#pragma unroll 1
    for (u32 from = kOctet * threadIdx.x; from < size; from += kOctet * blockDim.x) {
      const Eight eight = tables_of(from);
#pragma unroll
      for (int k = 0; k < 8; k++) seen |= 1u << min(eight.of(k), 31u);
    }
    return seen;
  }
  // Whether all of them are below `tables`, at most kMaxTables. All threads; a barrier.
  __device__ __forceinline__ bool below(u32 tables) const { return !__syncthreads_or((seen() >> tables) != 0); }
};

template <class Chunk>
__device__ __forceinline__ const u8* contexts_of_plane(const Chunk& c, u32 i) {
  return c.contexts >> i & 1 ? c.inputs[kContexts] + plane_at(c.layout, c.width, c.n, i) : nullptr;
}

// Whether a chunk's descriptor is in range.
template <class Chunk>
__device__ __forceinline__ bool has_contexts(const Chunk& c, u32 planes) {
  if (c.contexts >> planes != 0 || (c.contexts != 0 && c.inputs[kContexts] == nullptr)) return false;
  for (u32 i = 0; i < planes; i++)
    if (c.tables[i].count > kMaxTables) return false;
  return is_aligned(c.inputs[kContexts]);
}

// ---- encode ----

// The bytes of a stream's tables.
template <u32 kBits>
struct TableListBytes {
  static constexpr u32 kEntryBytes = kBits == 8 ? 2 : 3;
  const SharedTable* list;
  u32 tables, bytes;

  __device__ __forceinline__ TableListBytes(const SharedTable* list_, u32 tables_)
      : list(list_), tables(tables_), bytes(0) {
    for (u32 t = 0; t < tables; t++) bytes += len_of(list[t]);
  }
  __device__ __forceinline__ static u32 len_of(const SharedTable& table) { return 4 + kEntryBytes * table.count; }

  __device__ __forceinline__ u32 count() const { return tables; }
  __device__ __forceinline__ u32 len() const { return bytes; }
  __device__ __forceinline__ u32 byte(u32 i) const {
    u32 t = 0;
    for (; t + 1 < tables && i >= len_of(list[t]); t++) i -= len_of(list[t]);
    const SharedTable& table = list[t];
    if (i < 2) return table.count >> (8 * i);
    if (i < 4) return table.escape >> (8 * (i - 2));
    if (i < 4u + table.count) return table.symbol[i - 4];
    const u32 k = i - 4 - table.count;
    return kBits == 8 ? table.freq[k] : table.freq[k / 2] >> (8 * (k % 2));
  }
};

// Counts the symbols of one context, at the positions that are counted without contexts, too; of those that have
// none, all if `every`. All threads.
__device__ __forceinline__ void count_context(const PlaneContexts& contexts, u32 context, const u8* plane, bool every,
                                              Histogram& hist, u32* counts) {
  clear_counts(hist);
  const u32 n = contexts.size, octets = every ? (n + kOctet - 1) / kOctet : counted_octets(n);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < octets; i += blockDim.x) {
    const u32 at = counted_octet(i, every || n <= kCountAll), left = values_left(at, n);
    const PlaneContexts::Eight of = contexts.tables_of(at);
#pragma unroll 1
    for (u32 k = 0; k < left; k++) {
      u32 symbol[2] = {plane[at + k], 0};
      if (of.of(static_cast<int>(k)) == context) count_octet(hist, symbol, 1);
    }
  }
  sum_counts(hist, counts);
}

// As `make_model`; of no symbols a table that has an escape alone. All threads; ends with a barrier.
__device__ __forceinline__ u32 make_any_model(const u32* counts, bool all, u32 slots, Model& model) {
  u32 sum = 0;
  for (u32 s = lane_id(); s < 256; s += kLanes) sum += counts[s];
  sum = warp_sum(sum);
  if (sum > 0) {
    make_model(counts, all, slots, model);
  } else {
    if (threadIdx.x == 0) model.escape = slots, model.kept = 0;
    __syncthreads();
  }
  return sum;
}

// Keeps a model as a table. All threads.
__device__ __forceinline__ void keep_table(const Model& model, u32 bits, SharedTable& to) {
  for (u32 i = threadIdx.x; i < model.kept; i += blockDim.x) to.symbol[i] = model.symbol[i], to.freq[i] = model.freq[i];
  if (threadIdx.x != 0) return;
  to.precision = static_cast<u16>(bits);
  to.count = static_cast<u16>(model.kept);
  to.escape = static_cast<u16>(model.escape);
  to.reserved = 0;
}

// The coders of all symbols with a table. One warp.
__device__ __forceinline__ void make_list_coders(const SharedTable& table, u32* coders) {
  for (u32 s = lane_id(); s < 256; s += kLanes) coders[s] = table.escape | kPlaneEscape;
  __syncwarp();
  u32 at = table.escape;
  for (u32 first = 0; first < table.count; first += kLanes) {
    const u32 i = first + lane_id(), freq = i < table.count ? table.freq[i] : 0;
    const u32 start = at + warp_sum_below(freq);
    if (i < table.count) coders[table.symbol[i]] = freq | start << 13;
    at += warp_sum(freq);
  }
}

// A table for each context that occurs, or the tensor's tables.
struct EncodeContexts {
  static constexpr bool kLoneEscapes = true;
  struct Coders {
    u32 of[256 * kMaxTables];
    u32 seen;
    u64 own_bits, shared_bits;  // of the counted symbols
  };

  PlaneContexts contexts;
  const SharedTable* list;  // the tables that are used
  u32 count;

  __device__ __forceinline__ static bool suits(const EncodeChunk& c, u32 planes) {
    if (!has_contexts(c, planes)) return false;
    for (u32 i = 0; i < planes; i++) {
      const u32 size = plane_size(c.layout, c.width, c.n, i);
      if (!PlaneContexts{contexts_of_plane(c, i), size}.below(kMaxTables)) return false;
    }
    return true;
  }
  __device__ __forceinline__ static const u8* contexts_of(const EncodeChunk& c, u32 i) {
    return contexts_of_plane(c, i);
  }
  __device__ __forceinline__ static EncodeContexts of(const PlaneJob& job) {
    return EncodeContexts{{job.contexts, job.size}, job.own, 0};
  }
  __device__ __forceinline__ PlaneContexts::Eight tables_of(u32 at) const { return contexts.tables_of(at); }

  // Whether the tensor's tables can code every symbol of every context.
  __device__ __forceinline__ static bool is_usable(const TableSet& set, u32 bits, u32 contexts) {
    if (set.at == nullptr || set.count < contexts) return false;
    for (u32 t = 0; t < set.count; t++) {
      const SharedTable& table = set.at[t];
      if (table.precision != bits || table.count > 256 || (table.escape == 0 && table.count < 256)) return false;
    }
    return true;
  }

  // Makes the tables, chooses between them and the tensor's, and makes the coders; says whether it is the
  // tensor's. All threads; ends with a barrier.
  template <u32 kBits, bool kSparse>
  __device__ __forceinline__ bool choose(const PlaneJob& job, PlaneShared<EncodeContexts>& shared) {
    constexpr u32 kSlots = 1u << kBits;
    u32* const counts = shared.u.count.counts;
    Coders& coders = shared.coders;
    if (threadIdx.x == 0) coders.seen = 0, coders.own_bits = 0, coders.shared_bits = 0;
    __syncthreads();
    atomicOr(&coders.seen, contexts.seen());
    __syncthreads();
    count = 32 - __clz(coders.seen);
    const bool usable = is_usable(job.tables, kBits, count), every = kSparse && contexts.at == nullptr;
    u32 counted = 0, own_len = 0;
#pragma unroll 1
    for (u32 t = 0; t < count; t++) {
      count_context(contexts, t, job.plane, every, shared.u.count.hist, counts);
      counted += make_any_model(counts, every || job.size <= kCountAll, kSlots, shared.model);
      const Model& model = shared.model;
      own_len += 4 + (kBits == 8 ? 2 : 3) * model.kept;
      keep_table(model, kBits, job.own[t]);
      if (usable && warp_id() == 0) {
        const SharedTable& table = job.tables.at[t];
        const u32 own = table_cost(counts, model.symbol, model.freq, model.kept, model.escape, kSlots);
        const u32 other = table_cost(counts, table.symbol, table.freq, table.count, table.escape, kSlots);
        if (lane_id() == 0) coders.own_bits += own, coders.shared_bits += other;
      }
      __syncthreads();
    }
    const auto scaled = [&](u64 bits) { return bits * job.size / max(counted, 1u); };
    const bool tensors = usable && scaled(coders.shared_bits) < scaled(coders.own_bits) + 8 * own_len;
    if (tensors) list = job.tables.at, count = job.tables.count;
#pragma unroll 1
    for (u32 t = warp_id(); t < count; t += kComposedWarps) make_list_coders(list[t], coders.of + 256 * t);
    __syncthreads();
    return tensors;
  }

  __device__ __forceinline__ u32 padding(const PlaneShared<EncodeContexts>&) const {
    return list->count > 0 ? list->symbol[list->count - 1] : 0;
  }
  template <u32 kBits>
  __device__ __forceinline__ TableListBytes<kBits> bytes(const PlaneShared<EncodeContexts>&) const {
    return TableListBytes<kBits>(list, count);
  }
};

// ---- decode ----

// As many tables as there are contexts.
template <u32 kBits>
struct ContextTables {
  const u32* entries;  // 2^P of each table
  const u32* escapes;  // their frequencies
  PlaneContexts contexts;

  template <class Words>
  __device__ __forceinline__ void pop(u32& x, Words& words, u32 at, u32* symbols) const {
    const PlaneContexts::Eight tables = contexts.tables_of(at);
    u32 left = 0;
    symbols[0] = symbols[1] = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (k % (kBits == 8 ? 8 : 4) == 0) words.prepare();
      const u32 table = tables.of(k), slot = x & ((1u << kBits) - 1), entry = entries[(table << kBits) + slot];
      const u32 freq = kBits == 8 ? entry >> 17 : (entry >> 20) + 1, bias = entry & (kBits == 8 ? 0xff : 0xfff);
      x = freq * (x >> kBits) + bias;
      symbols[k / 4] |= (entry >> (kBits == 8 ? 8 : 12) & 0xff) << (8 * (k % 4));
      left |= slot < escapes[table] ? 1u << k : 0;
      if (kBits != 8 || k % 2 == 1) words.refill(x);
    }
    if (__any_sync(kAllLanes, left)) pop_escapes(x, words, left, symbols);
  }
};

struct DecodeContexts {
  struct Entries {
    u32 pairs[kMaxTables << 8];  // P = 8; of P = 12 they lie in scratch memory
    u32 escapes[kMaxTables];
    u32 tables;
  };
  typedef PlaneDecodeShared<DecodeContexts> Memory;

  __device__ __forceinline__ static bool suits(const DecodeChunk& c, u32 planes) { return has_contexts(c, planes); }
  __device__ __forceinline__ static const u8* contexts_of(const DecodeChunk& c, u32 i) {
    return contexts_of_plane(c, i);
  }
  // Where those with P = 12 are: behind the scratch memory of one table.
  __device__ __forceinline__ static u32* entries_of(const DecodeChunk& c) {
    return reinterpret_cast<u32*>(c.scratch + composed_decode_scratch(c.n, c.width, c.frame_len));
  }
  template <u32 kBits>
  __device__ __forceinline__ static u32* entries_of(const PlaneTarget& to, Memory& shared) {
    return kBits == 8 ? shared.entries.pairs : to.entries;
  }
  // With one table contexts do not matter.
  __device__ __forceinline__ static PlaneContexts contexts_in(const PlaneTarget& to, u32 tables) {
    return PlaneContexts{tables == 1 ? nullptr : to.contexts, to.size};
  }

  // Reads a stream's header and tables. All threads; all return the same; ends with a barrier.
  template <u32 kBits>
  __device__ __forceinline__ static Status read(const PlaneTarget& to, Memory& shared) {
    const u8* const head = to.from.at;
    const u32 len = to.from.len;
    auto& h = shared.header;
    Fixed fixed;
    const Status shape = read_shape(head, len, to.size, kMostSegments, fixed);
    if (shape != kOk) return shape;
    const u32 tables = head[6];
    const bool tensors = head[7] & kFlagShared;
    if (tables == 0 || tables > kMaxTables || (tensors && tables != to.tables.count)) return kCorrupt;
    if (tensors && to.tables.at == nullptr) return kCorrupt;
#pragma unroll 1
    for (u32 t = 0; t < tables; t++) {
      const SharedTable* const table = tensors ? to.tables.at + t : nullptr;
      const u32 at = fixed.counts_at;
      const Status status = read_table<kBits>(head, len, table, fixed);
      if (status != kOk || fixed.counts_at > len) return status != kOk ? status : kCorrupt;
      if (threadIdx.x < 8) h.seen[threadIdx.x] = 0;
      __syncthreads();
      const TableBytes bytes{table, head + at + 4, fixed.kept};
      bool bad = is_bad<kBits>(bytes, h);
      if (warp_id() == 0) bad |= !find_slots<kBits>(bytes, fixed.escape, h);
      if (__syncthreads_or(bad)) return kCorrupt;
      fill_entries<kBits>(bytes, fixed.escape, h, entries_of<kBits>(to, shared) + (t << kBits));
      if (threadIdx.x == 0) shared.entries.escapes[t] = fixed.escape;
      __syncthreads();
    }
    if (fixed.counts_at + 2 * fixed.segments > len) return kCorrupt;
    if (threadIdx.x == 0) h.fixed = fixed, shared.entries.tables = tables;
    bool bad = false;
    if (warp_id() == 0) bad = !find_segments(head, len, fixed, h);
    if (__syncthreads_or(bad)) return kCorrupt;
    return contexts_in(to, tables).below(tables) ? kOk : kCorrupt;
  }

  template <u32 kBits>
  __device__ __forceinline__ static ContextTables<kBits> tables(const PlaneTarget& to, Memory& shared) {
    return ContextTables<kBits>{entries_of<kBits>(to, shared), shared.entries.escapes,
                                contexts_in(to, shared.entries.tables)};
  }
};

}  // namespace s4
