// A thread's lane and warp, and reductions over a warp.
#pragma once

#include "shared.cuh"

namespace s4 {

constexpr u32 kLanes = 32;

__device__ __forceinline__ u32 lane_id() { return threadIdx.x % kLanes; }
__device__ __forceinline__ u32 warp_id() { return threadIdx.x / kLanes; }

// The same, for a full warp, so that the compiler knows it is equal in all lanes: loops whose bounds depend
// on it need no code for divergent lanes.
__device__ __forceinline__ u32 uniform_warp_id() { return __shfl_sync(kAllLanes, warp_id(), 0); }

__device__ __forceinline__ u32 lanes_below() { return (1u << lane_id()) - 1; }

__device__ __forceinline__ u32 round_up(u32 v, u32 to) { return (v + to - 1) / to * to; }

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

}  // namespace s4
