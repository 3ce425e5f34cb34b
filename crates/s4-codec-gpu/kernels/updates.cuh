// Differences predicted from the optimizer's moments (docs/predictors/update.md): their sign from the first moment's,
// and the table of each symbol from the size of the update. Policies for the composed kernels; values have 2 or 4 bytes
// and layout `bytes`.
#pragma once

#include "contexts.cuh"
#include "step.cuh"

namespace s4 {

// The magnitudes of eight values, of a moment or of the weights, in 128ths of an octave; bit k of `signs`: the sign of
// value k.
struct EightSizes {
  int of[8];
  u32 signs;

  template <int kWidth>
  __device__ __forceinline__ void set(u32 type, const Uint<kWidth>* v) {
    signs = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      signs |= (v[k] >> (8 * kWidth - 1) & 1) << k;
      const u32 half = kWidth == 4 ? v[k] >> 16 & 0x7fff : v[k] & 0x7fff;
      of[k] = static_cast<int>(kWidth == 2 && type == kFloat16 ? (half >> 3) + 0x3800 : half);
    }
  }
  // Without values, of type 0, all are zeros.
  __device__ __forceinline__ void load(u32 type, const u8* values, u32 at, u32 left) {
    u32 v[8] = {};
    if (type == 0) {
      set<4>(type, v);
    } else if (type == kFloat32) {
      load_values8<4>(values, at, left, v);
      set<4>(type, v);
    } else {
      load_values8<2>(values, at, left, v);
      set<2>(type, v);
    }
  }
};

template <class Chunk>
__device__ __forceinline__ const Update& update_of(const Chunk& c) {
  return *reinterpret_cast<const Update*>(c.inputs[kUpdate]);
}

// The classes of eight values, one byte each.
__device__ __forceinline__ uint2 update_classes(const Update& update, const EightSizes& weights,
                                                const EightSizes& first, const EightSizes& second) {
  u32 words[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const int size = max(first.of[k] - (second.of[k] >> 1), static_cast<int>(update.floor));
    const int over = (size - (weights.of[k] & 0x7f80) + update.offset) >> 6;
    words[k / 4] |= static_cast<u32>(min(15, max(0, over))) << (8 * (k % 4));
  }
  return make_uint2(words[0], words[1]);
}

// Where a chunk's classes are: a byte for each value.
__device__ __forceinline__ u8* update_classes_at(const EncodeChunk& c) {
  return c.scratch + planes_bytes(c.n, c.width) + tables_bytes(0, 0);
}
__device__ __forceinline__ u8* update_classes_at(const DecodeChunk& c) {
  return c.scratch + round_up64(composed_decode_scratch(c.n, c.width, c.frame_len), 16) + kMaxTables * (4u << 12);
}

__device__ __forceinline__ void store_classes(u8* to, u32 at, u32 left, const uint2& classes) {
  const u32 words[2] = {classes.x, classes.y};
  store_group<8>(to + at, true, words, left);
}

// ---- residual `descent` ----

// The difference from the parent's values, negated where the first moment is positive: a policy like `Difference`
// (layouts.cuh). When encoding, this also writes the classes, since all of their inputs are loaded.
struct Descent {
  const u8* parent;
  const u8* first;
  const u8* second;
  Update update;
  u8* classes;

  template <class Chunk>
  __device__ __forceinline__ static bool suits(const Chunk& c) {
    if (c.residual != kDescent || c.prediction != kPredictInput || c.layout != kBytes) return false;
    if (c.inputs[kParent] == nullptr || c.inputs[kFirst] == nullptr || c.inputs[kUpdate] == nullptr) return false;
    return are_moments(c, update_of(c));
  }
  __device__ __forceinline__ static Sparse density(const EncodeChunk&) { return Sparse{}; }
  template <class Chunk>
  __device__ __forceinline__ static Descent of(const Chunk& c) {
    return Descent{c.inputs[kParent], c.inputs[kFirst], c.inputs[kSecond], update_of(c), update_classes_at(c)};
  }

  template <int kWidth>
  __device__ __forceinline__ void take(u32 at, u32 left, Uint<kWidth>* v) const {
    Uint<kWidth> p[8];
    load_values8<kWidth>(parent, at, left, p);
    EightSizes weights, m, s;
    weights.set<kWidth>(update.weight, p);
    m.load(update.first, first, at, left);
    s.load(update.second, second, at, left);
    store_classes(classes, at, left, update_classes(update, weights, m, s));
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const Uint<kWidth> d = ordered<kWidth>(v[k]) - ordered<kWidth>(p[k]);
      const Uint<kWidth> turned = (m.signs >> k & 1 ? d : 0 - d) & kAllBits<kWidth>;
      v[k] = (turned << 1 ^ (turned >> (8 * kWidth - 1) & 1 ? kAllBits<kWidth> : 0)) & kAllBits<kWidth>;
    }
  }
  template <int kWidth>
  __device__ __forceinline__ void give(u32 at, u32 left, Uint<kWidth>* v) const {
    Uint<kWidth> p[8];
    load_values8<kWidth>(parent, at, left, p);
    EightSizes m;
    m.load(update.first, first, at, left);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const Uint<kWidth> d = v[k] >> 1 ^ (v[k] & 1 ? kAllBits<kWidth> : 0);
      const Uint<kWidth> turned = m.signs >> k & 1 ? d : 0 - d;
      v[k] = ordered<kWidth>((ordered<kWidth>(p[k]) + turned) & kAllBits<kWidth>);
    }
  }
};

// Only layout `bytes` with two widths is needed, so these replace the versions for every shape in layouts.cuh.
__device__ __forceinline__ void split_chunk(u32, u32 width, const ValueSpan& span, const Descent& predict,
                                            const PlaneSet& to) {
  if (width == 2) split_values<2, kBytes>(span, predict, to);
  else split_values<4, kBytes>(span, predict, to);
}
__device__ __forceinline__ void merge_chunk(u32, u32 width, const PlaneSet& from, const Descent& predict, u32 n,
                                            u8* values) {
  if (width == 2) merge_values<2, kBytes>(from, predict, n, values);
  else merge_values<4, kBytes>(from, predict, n, values);
}

// ---- contexts `update` ----

// A source of contexts (contexts.cuh): the same for all planes, except planes with a single table.
struct UpdateContexts {
  static constexpr u32 kMostTables = kMaxTables;
  static constexpr bool kPrefersShared = true;

  template <class Chunk>
  __device__ __forceinline__ static bool suits(const Chunk& c, u32) {
    return c.contexts == kContextsUpdate;
  }
  // `Descent` has written the classes.
  __device__ __forceinline__ static void prepare(const EncodeChunk&) {}
  // Writes the classes. All threads; readers need a barrier.
  __device__ __forceinline__ static void prepare(const DecodeChunk& c) {
    const Update update = update_of(c);
    u8* const to = update_classes_at(c);
#pragma unroll 1
    for (u32 at = kOctet * threadIdx.x; at < c.n; at += kOctet * blockDim.x) {
      const u32 left = values_left(at, c.n);
      EightSizes weights, m, s;
      weights.load(update.weight, c.inputs[kParent], at, left);
      m.load(update.first, c.inputs[kFirst], at, left);
      s.load(update.second, c.inputs[kSecond], at, left);
      store_classes(to, at, left, update_classes(update, weights, m, s));
    }
  }
  template <class Chunk>
  __device__ __forceinline__ static PlaneContexts contexts_of(const Chunk& c, u32 i, const PlaneSet&) {
    const bool one = update_of(c).one_table >> i & 1;
    return PlaneContexts{one ? nullptr : update_classes_at(c), nullptr, plane_size(c.layout, c.width, c.n, i)};
  }
};

}  // namespace s4
