// Every prediction and residual of docs/format.md, for the kernels `predicted`: the descriptor says which one.
#pragma once

#include "layouts.cuh"
#include "step.cuh"

namespace s4 {

// ---- residuals ----

// `magnitude`: the sign as it is, below it the difference of the magnitudes.
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> subtract_magnitude(Uint<kWidth> x, Uint<kWidth> predicted) {
  constexpr Uint<kWidth> kMagnitude = kAllBits<kWidth> >> 1;
  const Uint<kWidth> d = (x - predicted) << 1 & kAllBits<kWidth>;
  return ((d ^ (d > kMagnitude ? kAllBits<kWidth> : 0)) & kMagnitude) | (x & ~kMagnitude);
}
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> add_magnitude(Uint<kWidth> u, Uint<kWidth> predicted) {
  constexpr Uint<kWidth> kMagnitude = kAllBits<kWidth> >> 1;
  const Uint<kWidth> d = (u & kMagnitude) >> 1 ^ (u & 1 ? kAllBits<kWidth> : 0);
  return ((predicted + d) & kMagnitude) | (u & ~kMagnitude & kAllBits<kWidth>);
}

template <int kWidth>
__device__ __forceinline__ Uint<kWidth> residual_of(u32 residual, Uint<kWidth> x, Uint<kWidth> predicted) {
  if (residual == kSub) return subtract<kWidth>(x, predicted);
  return residual == kXor ? x ^ predicted : subtract_magnitude<kWidth>(x, predicted);
}
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> value_of(u32 residual, Uint<kWidth> u, Uint<kWidth> predicted) {
  if (residual == kSub) return add<kWidth>(u, predicted);
  return residual == kXor ? u ^ predicted : add_magnitude<kWidth>(u, predicted);
}

// ---- predictions ----

// An fp32 value rounded to the nearest bf16 value, ties to even. NaNs get no special treatment.
__device__ __forceinline__ u32 rounded_bf16(u32 x) { return (x + 0x7fff + (x >> 16 & 1)) >> 16; }

// The same for fp16; values that are too large, and NaNs, become infinite.
__device__ __forceinline__ u32 rounded_f16(u32 x) {
  const u32 a = x & 0x7fffffff, sign = x >> 16 & 0x8000;
  if (a >= 0x477ff000) return sign | 0x7c00;
  if (a >= 0x38800000) return sign | (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
  if (a < 0x33000000) return sign;
  const u32 m = (a & 0x7fffff) | 0x800000, k = 126 - (a >> 23);
  return sign | (m + (1u << (k - 1)) - 1 + (m >> k & 1)) >> k;
}

// Loads eight fp32 values, rounded to bf16 (if `bf16`) or fp16.
template <int kWidth>
__device__ __forceinline__ void load_rounded(const u8* values, bool bf16, u32 at, u32 left, Uint<kWidth>* v) {
  u32 wide[8];
  load_values8<4>(values, at, left, wide);
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] = bf16 ? rounded_bf16(wide[k]) : rounded_f16(wide[k]);
}

// Predictions that are sums of row and column offsets.
struct RowsAndColumns {
  const short* rows;
  const short* columns;
  u64 base;
  u32 shift, cols, share;
  u32 row, col;  // of the chunk's first value

  template <class Chunk>
  __device__ __forceinline__ static RowsAndColumns of(const Chunk& c) {
    const Offsets& o = *reinterpret_cast<const Offsets*>(c.inputs[kOffsets]);
    return RowsAndColumns{reinterpret_cast<const short*>(c.inputs[kOffsets] + sizeof(Offsets)),
                          reinterpret_cast<const short*>(c.inputs[kColumns]), o.base, o.shift, o.cols, o.share,
                          static_cast<u32>(o.first / o.cols), static_cast<u32>(o.first % o.cols)};
  }
  template <int kWidth>
  __device__ __forceinline__ Uint<kWidth> predicted(int row, int column, Uint<kWidth> more) const {
    const Uint<kWidth> offset = static_cast<Uint<kWidth>>(static_cast<long long>(row + column));
    if (row == kNoRow) return 0;
    return (static_cast<Uint<kWidth>>(base) + (offset << shift) + more) & kAllBits<kWidth> >> 1;
  }
  // `more[k]` is added to prediction k, unless `more` is null.
  template <int kWidth>
  __device__ __forceinline__ void predict(u32 at, u32 left, Uint<kWidth>* v, const Uint<kWidth>* more = nullptr) const {
    // No overflow: a column is below 2^31, and an index in a chunk below 2^22.
    const u32 place = col + at;
    u32 r = row + place / cols, c = place % cols;
    int offset = rows[r];
    if (c % 8 == 0 && c + 8 <= cols) {
      const uint4 eight = *reinterpret_cast<const uint4*>(columns + c);
      const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int k = 0; k < 8; k++)
        v[k] = predicted<kWidth>(offset, static_cast<short>(words[k / 2] >> (16 * (k % 2))), more ? more[k] : 0);
      return;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (static_cast<u32>(k) >= left) {
        v[k] = 0;
        continue;
      }
      if (c == cols) c = 0, offset = rows[++r];
      v[k] = predicted<kWidth>(offset, columns[c++], more ? more[k] : 0);
    }
  }
};

// `share` 256ths of the bits below the sign, rounded down. No product overflows.
template <int kWidth>
__device__ __forceinline__ Uint<kWidth> share_of(Uint<kWidth> x, u32 share) {
  const Uint<kWidth> magnitude = x & kAllBits<kWidth> >> 1;
  return (magnitude >> 8) * share + ((magnitude & 0xff) * share >> 8);
}

struct AnyPrediction;

// Out of line: inlined for each layout and width, these would be most of the kernels' code.
template <int kWidth>
__device__ __noinline__ void take_predicted(const AnyPrediction& by, u32 at, u32 left, Uint<kWidth>* v);
template <int kWidth>
__device__ __noinline__ void give_predicted(const AnyPrediction& by, u32 at, u32 left, Uint<kWidth>* v);

// The prediction that the descriptor names: a policy like `Direct` (layouts.cuh).
struct AnyPrediction {
  u32 prediction, residual;
  const u8* input;
  const u8* const* inputs;  // all of them, in the descriptor
  RowsAndColumns offsets;

  template <class Chunk>
  __device__ __forceinline__ static bool suits(const Chunk& c) {
    const bool predicts = c.prediction != kPredictNothing;
    if (predicts != (c.residual != kId) || c.residual > kMagnitude) return false;
    switch (c.prediction) {
      case kPredictNothing: return true;
      case kPredictInput: return c.inputs[kParent] != nullptr && c.residual != kMagnitude;
      case kPredictBf16:
      case kPredictF16: return c.inputs[kParent] != nullptr && c.residual == kXor && c.width == 2;
      case kPredictOffsets: return has_offsets(c);
      case kPredictBlend: return c.inputs[kParent] != nullptr && has_offsets(c);
      case kPredictStep: return has_step(c);
      default: return false;
    }
  }
  template <class Chunk>
  __device__ __forceinline__ static bool has_offsets(const Chunk& c) {
    if (c.inputs[kOffsets] == nullptr || c.inputs[kColumns] == nullptr || c.residual != kMagnitude) return false;
    const Offsets& o = *reinterpret_cast<const Offsets*>(c.inputs[kOffsets]);
    if (c.width == 1 || o.cols == 0 || o.cols >> 31 != 0 || o.shift >= 8u * c.width) return false;
    return (o.first + c.n - 1) / o.cols < o.rows;  // the last value's row
  }
  template <class Chunk>
  __device__ __forceinline__ static bool has_step(const Chunk& c) {
    if (c.inputs[kParent] == nullptr || c.inputs[kFirst] == nullptr || c.inputs[kFactors] == nullptr) return false;
    return c.residual == kSub && are_moments(c, *reinterpret_cast<const Step*>(c.inputs[kFactors]));
  }
  __device__ __forceinline__ static AnyDensity density(const EncodeChunk& c) { return AnyDensity{c.sparse != 0}; }
  template <class Chunk>
  __device__ __forceinline__ static AnyPrediction of(const Chunk& c) {
    AnyPrediction p{c.prediction, c.residual, c.inputs[kParent], c.inputs, {}};
    if (c.prediction == kPredictOffsets || c.prediction == kPredictBlend) p.offsets = RowsAndColumns::of(c);
    return p;
  }

  template <int kWidth>
  __device__ __forceinline__ void predict(u32 at, u32 left, Uint<kWidth>* p) const {
    if (prediction == kPredictInput) load_values8<kWidth>(input, at, left, p);
    else if (kWidth > 1 && prediction == kPredictOffsets) offsets.predict<kWidth>(at, left, p);
    else if (kWidth > 1 && prediction == kPredictBlend) blend<kWidth>(at, left, p);
    else if ((kWidth == 2 || kWidth == 4) && prediction == kPredictStep) step<kWidth>(at, left, p);
    else if (kWidth == 2) load_rounded<kWidth>(input, prediction == kPredictBf16, at, left, p);
  }
  template <int kWidth>
  __device__ __forceinline__ void step(u32 at, u32 left, Uint<kWidth>* p) const {
    const Step& by = *reinterpret_cast<const Step*>(inputs[kFactors]);
    u32 weights[8], first[8], second[8] = {};
    load_floats(by.weight, input, at, left, weights);
    load_floats(by.first, inputs[kFirst], at, left, first);
    if (by.second != 0) load_floats(by.second, inputs[kSecond], at, left, second);
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const u32 after = stepped(by, weights[k], first[k], second[k]);
      if (kWidth == 4) p[k] = after;
      else p[k] = by.weight == kBFloat16 ? rounded_bf16(after) : rounded_f16(after);
    }
  }
  // In rows without a prediction (kNoRow) nothing is added.
  template <int kWidth>
  __device__ __forceinline__ void blend(u32 at, u32 left, Uint<kWidth>* p) const {
    Uint<kWidth> before[8] = {};
    load_values8<kWidth>(input, at, left, before);
#pragma unroll
    for (int k = 0; k < 8; k++) before[k] = share_of<kWidth>(before[k], offsets.share);
    offsets.predict<kWidth>(at, left, p, before);
  }
  template <int kWidth>
  __device__ __forceinline__ void take(u32 at, u32 left, Uint<kWidth>* v) const {
    if (prediction != kPredictNothing) take_predicted<kWidth>(*this, at, left, v);
  }
  template <int kWidth>
  __device__ __forceinline__ void give(u32 at, u32 left, Uint<kWidth>* v) const {
    if (prediction != kPredictNothing) give_predicted<kWidth>(*this, at, left, v);
  }
};

template <int kWidth>
__device__ __noinline__ void take_predicted(const AnyPrediction& by, u32 at, u32 left, Uint<kWidth>* v) {
  Uint<kWidth> p[8] = {};
  by.predict<kWidth>(at, left, p);
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] = residual_of<kWidth>(by.residual, v[k], p[k]);
}

template <int kWidth>
__device__ __noinline__ void give_predicted(const AnyPrediction& by, u32 at, u32 left, Uint<kWidth>* v) {
  Uint<kWidth> p[8] = {};
  by.predict<kWidth>(at, left, p);
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] = value_of<kWidth>(by.residual, v[k], p[k]);
}

}  // namespace s4
