// Planes whose symbols have contexts (docs/codecs/rans.md): a table for each context. Policies for the composed kernels
// (plane_encode.cuh, plane_decode.cuh); kernels with one table are separate instances without this code.
//
// `Source` provides the contexts: `ExponentContexts` below, `UpdateContexts` (updates.cuh), or the tests'
// `MemoryContexts` (tests/contexts.h).
#pragma once

#include "composed.cuh"

namespace s4 {

// ---- sources ----

// Contexts `exponent` of docs/format.md: the class of the exponent of the input's value at the same index,
// and for the plane behind the exponents also the symbol of the exponents' plane. Classes lie in scratch memory.
struct ExponentContexts {
  static constexpr u32 kMostTables = kClasses + 2;  // contexts of the plane behind the exponents
  static constexpr bool kPrefersShared = false;     // whether the tensor's tables, if any, are always used

  template <class Chunk>
  __device__ __forceinline__ static bool suits(const Chunk& c, u32) {
    if (c.contexts == 0) return true;
    const bool floats = c.layout == kFields || c.layout == kFieldsSign;
    return c.contexts == kContextsExponent && floats && c.prediction == kPredictInput && c.class_shift < 8;
  }
  // Writes the classes. All threads; readers need a barrier.
  template <class Chunk>
  __device__ __forceinline__ static void prepare(const Chunk& c) {
    if (c.contexts == 0) return;
    switch (c.width) {
      case 2: return write_classes<2>(c, classes_of(c));
      case 4: return write_classes<4>(c, classes_of(c));
      default: return write_classes<8>(c, classes_of(c));
    }
  }
  template <class Chunk>
  __device__ __forceinline__ static PlaneContexts contexts_of(const Chunk& c, u32 i, const PlaneSet& planes) {
    const u32 exponents = c.layout == kFieldsSign;  // index of their plane
    PlaneContexts of{nullptr, nullptr, plane_size(c.layout, c.width, c.n, i)};
    if (c.contexts == 0 || i < exponents || i > exponents + 1) return of;
    of.classes = classes_of(c);
    if (i > exponents) of.exponents = planes.at[exponents];
    return of;
  }

 private:
  __device__ __forceinline__ static u8* classes_of(const EncodeChunk& c) {
    return c.scratch + planes_bytes(c.n, c.width) + tables_bytes(0, 0);
  }
  __device__ __forceinline__ static u8* classes_of(const DecodeChunk& c) {
    return c.scratch + round_up64(composed_decode_scratch(c.n, c.width, c.frame_len), 16) + kMaxTables * (4u << 12);
  }
  template <int kWidth, class Chunk>
  __device__ __forceinline__ static void write_classes(const Chunk& c, u8* to) {
#pragma unroll 1
    for (u32 at = kOctet * threadIdx.x; at < c.n; at += kOctet * blockDim.x) {
      const u32 left = values_left(at, c.n);
      Uint<kWidth> v[8];
      load_values8<kWidth>(c.inputs[kParent], at, left, v);
      u32 words[2] = {0, 0};
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const u32 exponent = static_cast<u32>(v[k] >> (8 * kWidth - 9)) & 255, top = c.class_top;
        const u32 below = exponent < top ? top - exponent : 0;
        words[k / 4] |= min(kClasses - 1, below >> c.class_shift) << (8 * (k % 4));
      }
      store_group<8>(to + at, true, words, left);
    }
  }
};

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

// Counts of the symbols of each context, in two copies if there is room, since lanes mostly see the same few symbols.
template <u32 kMostTables>
struct ContextCounts {
  static constexpr u32 kCounters = kMostTables > 10 ? 4096 : 5120;
  u32 of[kCounters];  // `table * 256 + symbol`; the second copy behind all of these

  // Counts the symbols of a plane, `every` one or a sample. All threads; ends with a barrier.
  __device__ __forceinline__ void count(const PlaneContexts& contexts, const u8* plane, bool every, u32 tables) {
    const u32 each = 256 * tables, copies = 2 * each <= kCounters ? 2 : 1;
    for (u32 i = threadIdx.x; i < copies * each; i += blockDim.x) of[i] = 0;
    __syncthreads();
    u32* const mine = of + each * (lane_id() % copies);
    const u32 n = contexts.size, octets = every ? (n + kOctet - 1) / kOctet : counted_octets(n);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < octets; i += blockDim.x) {
      const u32 at = counted_octet(i, every), left = values_left(at, n);
      const PlaneContexts::Eight tables_of = contexts.tables_of(at);
      u32 symbols[2];
      load_octet_bytes(plane + at, symbols, left);
#pragma unroll
      for (int k = 0; k < 8; k++)
        if (static_cast<u32>(k) < left) atomicAdd(&mine[256 * tables_of.of(k) + byte_of(symbols, k)], 1u);
    }
    __syncthreads();
    if (copies == 1) return;
    for (u32 i = threadIdx.x; i < each; i += blockDim.x) of[i] += of[each + i];
    __syncthreads();
  }
};

// Makes a table of `slots` slots from counts; if nothing was counted, as if a sample had one symbol 0. Returns how many
// symbols were counted. One warp.
__device__ __forceinline__ u32 make_table(u32* counts, bool all, u32 slots, Model& model, SharedTable& to) {
  u32 sum = 0;
  for (u32 s = lane_id(); s < 256; s += kLanes) sum += counts[s];
  sum = warp_sum(sum);
  if (sum == 0) {
    all = false, sum = 1;
    if (lane_id() == 0) counts[0] = 1;
    __syncwarp();
  }
  choose_symbols(counts, all, slots, model);
  choose_frequencies(model, slots);
  __syncwarp();
  rank_symbols(model, lane_id(), kLanes);
  __syncwarp();
  for (u32 i = lane_id(); i < model.kept; i += kLanes) to.symbol[i] = model.symbol[i], to.freq[i] = model.freq[i];
  if (lane_id() == 0) {
    to.precision = slots == 256 ? 8 : 12;
    to.count = static_cast<u16>(model.kept);
    to.escape = static_cast<u16>(model.escape);
    to.reserved = 0;
  }
  return sum;
}

// Makes the coders of all symbols for a table. One warp.
template <u32 kBits>
__device__ __forceinline__ void make_list_coders(const SharedTable& table, u32* coders) {
  const u32 escape = make_plane_coder<kBits>(table.escape, 0) | kPlaneEscape;
  for (u32 s = lane_id(); s < 256; s += kLanes) coders[s] = escape;
  __syncwarp();
  u32 at = table.escape;
  for (u32 first = 0; first < table.count; first += kLanes) {
    const u32 i = first + lane_id(), freq = i < table.count ? table.freq[i] : 0;
    const u32 start = at + warp_sum_below(freq);
    if (i < table.count) coders[table.symbol[i]] = make_plane_coder<kBits>(freq, start);
    at += warp_sum(freq);
  }
}

// A table for each context, or the tensor's tables.
template <class Source>
struct EncodeContexts {
  static constexpr bool kLoneEscapes = true;
  static constexpr u32 kModels = kComposedWarps;  // tables that are made at the same time
  struct Coders {
    union {
      u32 of[256 * Source::kMostTables];
      Model models[kModels];  // until the coders are made
    };
    u32 seen, counted;
    u64 own_bits, shared_bits;  // of the counted symbols
  };
  struct Models {};  // they are among the coders
  typedef ContextCounts<Source::kMostTables> Count;
  typedef PlaneShared<EncodeContexts> Memory;

  PlaneContexts contexts;
  const SharedTable* list;  // the tables that are used
  u32 count;

  __device__ __forceinline__ static bool suits(const EncodeChunk& c, u32 planes) { return Source::suits(c, planes); }
  __device__ __forceinline__ static void prepare(const EncodeChunk& c) { Source::prepare(c); }
  __device__ __forceinline__ static PlaneContexts contexts_of(const EncodeChunk& c, u32 i, const PlaneSet& planes) {
    return Source::contexts_of(c, i, planes);
  }
  __device__ __forceinline__ static u64 tables_bytes_of(const EncodeChunk& c) { return tables_bytes(c.n, c.contexts); }
  __device__ __forceinline__ static EncodeContexts of(const PlaneJob& job) {
    return EncodeContexts{job.contexts, job.own, 0};
  }
  __device__ __forceinline__ PlaneContexts::Eight tables_of(u32 at) const { return contexts.tables_of(at); }

  // Whether the tensor's tables can code every symbol of every context.
  __device__ __forceinline__ static bool is_usable(const TableSet& set, u32 bits, u32 contexts) {
    if (set.at == nullptr || set.count < contexts || set.count > kMaxTables) return false;
    for (u32 t = 0; t < set.count; t++) {
      const SharedTable& table = set.at[t];
      if (table.precision != bits || table.count > 256 || (table.escape == 0 && table.count < 256)) return false;
    }
    return true;
  }

  // Makes the tables, chooses between them and the tensor's, and makes the coders; returns whether the tensor's
  // were chosen. All threads; ends with a barrier.
  template <u32 kBits, class Density>
  __device__ __forceinline__ bool choose(const PlaneJob& job, Density density, Memory& shared) {
    constexpr u32 kSlots = 1u << kBits;
    Coders& coders = shared.coders;
    if constexpr (Source::kPrefersShared) {
      // The tensor has a table for every possible context.
      const u32 most = contexts.classes == nullptr ? 1 : Source::kMostTables;
      if (is_usable(job.tables, kBits, most)) {
        list = job.tables.at, count = job.tables.count;
        make_coders<kBits>(coders);
        return true;
      }
    }
    if (threadIdx.x == 0) coders.seen = 0, coders.counted = 0, coders.own_bits = 0, coders.shared_bits = 0;
    __syncthreads();
    atomicOr(&coders.seen, contexts.seen());
    __syncthreads();
    count = 32 - __clz(coders.seen);
    const bool usable = is_usable(job.tables, kBits, count);
    const bool all = job.size <= kCountAll || (density.is_sparse() && contexts.classes == nullptr);
    shared.u.count.count(contexts, job.plane, all, count);
#pragma unroll 1
    for (u32 first = 0; first < count; first += kModels) {
      const u32 t = first + warp_id();
      if (t >= count) continue;
      u32* const counts = shared.u.count.of + 256 * t;
      Model& model = coders.models[warp_id()];
      const u32 counted = make_table(counts, all, kSlots, model, job.own[t]);
      u32 own = 0, other = 0;
      if (usable) {
        const SharedTable& table = job.tables.at[t];
        own = table_cost(counts, model.symbol, model.freq, model.kept, model.escape, kSlots);
        other = table_cost(counts, table.symbol, table.freq, table.count, table.escape, kSlots);
      }
      if (lane_id() == 0) {
        atomicAdd(&coders.counted, counted);
        atomicAdd(&coders.own_bits, static_cast<u64>(own));
        atomicAdd(&coders.shared_bits, static_cast<u64>(other));
      }
      __syncwarp();
    }
    __syncthreads();
    u32 own_len = 0;
    for (u32 t = 0; t < count; t++) own_len += TableListBytes<kBits>::len_of(job.own[t]);
    const auto scaled = [&](u64 bits) { return bits * job.size / max(coders.counted, 1u); };
    const bool tensors = usable && scaled(coders.shared_bits) < scaled(coders.own_bits) + 8 * own_len;
    if (tensors) list = job.tables.at, count = job.tables.count;
    make_coders<kBits>(coders);
    return tensors;
  }

  // Makes the coders of the tables in use. All threads; ends with a barrier.
  template <u32 kBits>
  __device__ __forceinline__ void make_coders(Coders& coders) const {
#pragma unroll 1
    for (u32 t = warp_id(); t < min(count, Source::kMostTables); t += kComposedWarps)
      make_list_coders<kBits>(list[t], coders.of + 256 * t);
    __syncthreads();
  }

  __device__ __forceinline__ u32 padding(const Memory&) const {
    return list->count > 0 ? list->symbol[list->count - 1] : 0;
  }
  template <u32 kBits>
  __device__ __forceinline__ TableListBytes<kBits> bytes(const Memory&) const {
    return TableListBytes<kBits>(list, count);
  }
};

// ---- decode ----

// A table with P = 8 for each context.
struct ContextPairs {
  Shared entries;  // 256 of each table
  PlaneContexts contexts;

  template <class Words>
  __device__ __forceinline__ void pop(u32& x, Words& words, u32 at, u32* symbols) const {
    const PlaneContexts::Eight tables = contexts.tables_of(at);
    u32 left = 0;
    symbols[0] = symbols[1] = 0;
    words.prepare();
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const u32 entry = load_shared(entries + (tables.of(k) << 10) + ((x & 0xff) << 2));
      x = (entry >> 17) * (x >> 8) + (entry & 0xff);
      symbols[k / 4] |= (entry >> 8 & 0xff) << (8 * (k % 4));
      left |= (entry & kEscapeEntry) >> 16 << k;
      if (k % 2 == 1) words.refill(x);
    }
    if (__any_sync(kAllLanes, left)) pop_escapes(x, words, left, symbols);
  }
};

// A table with P = 12 for each context. They are not in shared memory: the project's encoders never write several.
struct WideContexts {
  const u32* entries;  // 4096 of each table
  const u32* escapes;  // their frequencies
  PlaneContexts contexts;

  template <class Words>
  __device__ __forceinline__ void pop(u32& x, Words& words, u32 at, u32* symbols) const {
    const PlaneContexts::Eight tables = contexts.tables_of(at);
    u32 left = 0;
    symbols[0] = symbols[1] = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (k % 4 == 0) words.prepare();
      const u32 table = tables.of(k), slot = x & 0xfff, entry = entries[(table << 12) + slot];
      x = ((entry >> 20) + 1) * (x >> 12) + (entry & 0xfff);
      symbols[k / 4] |= (entry >> 12 & 0xff) << (8 * (k % 4));
      left |= slot < escapes[table] ? 1u << k : 0;
      words.refill(x);
    }
    if (__any_sync(kAllLanes, left)) pop_escapes(x, words, left, symbols);
  }
};

template <class Source>
struct DecodeContexts {
  struct Entries {
    // Room for all tables with P = 8, or one with P = 12; several with P = 12 lie in scratch memory.
    static constexpr u32 kBytes = kMaxTables << 10, kTableBytes = 1 << 10;
    static_assert(kBytes == 4 << 12, "a table with P = 12 takes as much");
    __align__(16) u8 room[kBytes + kTableBytes - 16];
    u32 escapes[kMaxTables];
    u32 tables;

    // Tables with P = 8 are aligned to their size (see `AlignedTable`).
    __device__ __forceinline__ u32* get() {
      return reinterpret_cast<u32*>(room + (-shared_address(room) & (kTableBytes - 1)));
    }
  };
  typedef PlaneDecodeShared<DecodeContexts> Memory;

  __device__ __forceinline__ static bool suits(const DecodeChunk& c, u32 planes) { return Source::suits(c, planes); }
  __device__ __forceinline__ static void prepare(const DecodeChunk& c) { Source::prepare(c); }
  __device__ __forceinline__ static PlaneContexts contexts_of(const DecodeChunk& c, u32 i, const PlaneSet& planes) {
    return Source::contexts_of(c, i, planes);
  }
  // Where several tables with P = 12 lie: behind the scratch memory that kernels with one table need.
  __device__ __forceinline__ static u32* entries_of(const DecodeChunk& c) {
    return reinterpret_cast<u32*>(c.scratch + round_up64(composed_decode_scratch(c.n, c.width, c.frame_len), 16));
  }
  template <u32 kBits>
  __device__ __forceinline__ static u32* entries_of(const PlaneTarget& to, u32 tables, Memory& shared) {
    return kBits == 8 || tables == 1 ? shared.entries.get() : to.entries;
  }
  // With one table, contexts are ignored.
  __device__ __forceinline__ static PlaneContexts contexts_in(const PlaneTarget& to, u32 tables) {
    return tables == 1 ? PlaneContexts{nullptr, nullptr, to.size} : to.contexts;
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
      fill_entries<kBits>(bytes, fixed.escape, h, entries_of<kBits>(to, tables, shared) + (t << kBits));
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

  // Calls `decode` with the tables that decode symbols.
  template <u32 kBits, class Decode>
  __device__ __forceinline__ static bool with_tables(const PlaneTarget& to, Memory& shared, const Decode& decode) {
    const u32 tables = shared.entries.tables;
    const Shared entries = shared_address(shared.entries.get());
    if constexpr (kBits == 8) {
      return tables == 1 ? decode(PairTable{entries}) : decode(ContextPairs{entries, to.contexts});
    } else {
      if (tables == 1) return decode(WideTable{entries, shared.entries.escapes[0]});
      return decode(WideContexts{to.entries, shared.entries.escapes, to.contexts});
    }
  }
};

}  // namespace s4
