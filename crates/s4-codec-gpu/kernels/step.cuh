// What an optimizer's step makes of weights (docs/predictors/step.md), with the same bits as on the host: every
// operation is rounded by itself, and numbers below 2^-125 become +0 before and after it.
#pragma once

#include "layouts.cuh"

namespace s4 {

__device__ __forceinline__ u32 float_width(u32 type) { return type == kFloat32 ? 4 : 2; }

__device__ __forceinline__ bool is_float(u32 type) {
  return type == kBFloat16 || type == kFloat16 || type == kFloat32;
}

// Whether the types of weights and moments in a `Step` or `Update` are those of the chunk's values and inputs.
template <class Chunk, class Types>
__device__ __forceinline__ bool are_moments(const Chunk& c, const Types& types) {
  const bool second = is_float(types.second) ? c.inputs[kSecond] != nullptr : types.second == 0;
  return is_float(types.weight) && is_float(types.first) && second && float_width(types.weight) == c.width;
}

__device__ __forceinline__ u32 flushed(u32 bits) { return (bits & 0x7fffffff) < 0x01000000 ? 0 : bits; }
__device__ __forceinline__ float flushed(float x) { return __uint_as_float(flushed(__float_as_uint(x))); }

// The bits of an fp16 value as fp32.
__device__ __forceinline__ u32 widened_f16(u32 x) {
  const u32 sign = (x & 0x8000) << 16, size = x & 0x7fff;
  if (size >= 0x7c00) return sign | ((size << 13) + 0x70000000);
  if (size >= 0x0400) return sign | ((size << 13) + 0x38000000);
  // So many times 2^-24, which is exact.
  return sign | __float_as_uint(__fmul_rn(static_cast<float>(size), __uint_as_float(0x33800000)));
}

// Loads eight floats of a type as the bits of fp32.
__device__ __forceinline__ void load_floats(u32 type, const u8* values, u32 at, u32 left, u32* v) {
  if (type == kFloat32) return load_values8<4>(values, at, left, v);
  load_values8<2>(values, at, left, v);
#pragma unroll
  for (int k = 0; k < 8; k++) v[k] = type == kBFloat16 ? v[k] << 16 : widened_f16(v[k]);
}

// The bits of a weight after a step; its own if they are not those of a finite number.
__device__ __forceinline__ u32 stepped(const Step& step, u32 weight, u32 first, u32 second) {
  const float root = __fsqrt_rn(__uint_as_float(flushed(second)));
  const float quotient = flushed(__fdiv_rn(__uint_as_float(flushed(first)), __fadd_rn(root, step.epsilon)));
  const float change = flushed(__fmul_rn(quotient, step.rate));
  const float kept = flushed(__fmul_rn(__uint_as_float(flushed(weight)), step.keep));
  const u32 after = flushed(__float_as_uint(__fsub_rn(kept, change)));
  return (after & 0x7f800000) == 0x7f800000 ? weight : after;
}

}  // namespace s4
