// Shared memory by address, and the two steps that rANS spends its time in.
//
// Both are a ballot, a rank and a predicated access. From C++, the compiler guards each access with a
// branch and its reconvergence, which costs a quarter of the kernels' instructions; hence PTX on the
// device. The C++ beside it says what the PTX means, and is what the emulator runs.
#pragma once

#include "planes.cuh"

namespace s4 {

constexpr u32 kAllLanes = 0xffffffffu;

#ifdef __CUDA_ARCH__
typedef u32 Shared;
// Hides from the compiler how an address was computed, so that it keeps the address in a register instead of
// recomputing it at every use.
__device__ __forceinline__ void hide(Shared& at) { asm volatile("" : "+r"(at)); }
template <class T>
__device__ __forceinline__ void hide(T*& p) {
  asm volatile("" : "+l"(p));
}
__device__ __forceinline__ Shared shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ u32 load_shared(Shared at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared2(Shared at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared4(Shared at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared2(Shared at, const uint2& v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" : : "r"(at), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_shared4(Shared at, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ u32 load_shared_u16(Shared at) {
  u32 v;
  asm volatile("{ .reg .u16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_u16(Shared at, u32 v) {
  asm volatile("{ .reg .u16 h; cvt.u16.u32 h, %1; st.shared.u16 [%0], h; }" : : "r"(at), "r"(v) : "memory");
}
#else
typedef u64 Shared;
template <class T>
void hide(T&) {}
inline Shared shared_address(const void* p) { return reinterpret_cast<u64>(p); }
inline u32 load_shared(Shared at) { return *reinterpret_cast<const u32*>(at); }
inline uint2 load_shared2(Shared at) { return *reinterpret_cast<const uint2*>(at); }
inline uint4 load_shared4(Shared at) { return *reinterpret_cast<const uint4*>(at); }
inline void store_shared2(Shared at, const uint2& v) { *reinterpret_cast<uint2*>(at) = v; }
inline void store_shared4(Shared at, const uint4& v) { *reinterpret_cast<uint4*>(at) = v; }
inline u32 load_shared_u16(Shared at) { return *reinterpret_cast<const u16*>(at); }
inline void store_shared_u16(Shared at, u32 v) { *reinterpret_cast<u16*>(at) = static_cast<u16>(v); }
#endif

// `kCount` elements, aligned to their size in bytes (a power of two), so that an index can be ORed into the
// address. They are aligned at run time: the shared memory of a block starts wherever the driver's own part
// ends, which is a multiple of 1024 at best, whatever alignment is asked for.
template <class T, u32 kCount>
struct AlignedTable {
  static constexpr u32 kBytes = kCount * sizeof(T);
  static_assert((kBytes & (kBytes - 1)) == 0, "a power of two");
  __align__(16) u8 room[2 * kBytes - 16];

  __device__ __forceinline__ T* get() {
    return reinterpret_cast<T*>(room + (-shared_address(room) & (kBytes - 1)));
  }
};

// Every lane whose state is below 2^16 takes the next word at `cursor`, in the order of lanes; the cursor
// moves behind the words taken. `below` has a bit for each lower lane. Full warp. (On the device all lanes
// load: that may read one word too many, but needs one register less than a conditional load.)
__device__ __forceinline__ void take_words(u32& x, Shared& cursor, u32 below) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{\n"
      " .reg .pred low;\n"
      " .reg .u32 lanes, rank, count, word;\n"
      " setp.lt.u32 low, %0, 0x10000;\n"
      " vote.sync.ballot.b32 lanes, low, 0xffffffff;\n"
      " and.b32 rank, lanes, %2;\n"
      " popc.b32 rank, rank;\n"
      " popc.b32 count, lanes;\n"
      " mad.lo.u32 rank, rank, 2, %1;\n"
      " ld.shared.u16 word, [rank];\n"
      " @low mad.lo.u32 %0, %0, 0x10000, word;\n"
      " mad.lo.u32 %1, count, 2, %1;\n"
      "}"
      : "+r"(x), "+r"(cursor)
      : "r"(below)
      : "memory");
#else
  const bool low = x < 1u << 16;
  const u32 lanes = __ballot_sync(kAllLanes, low);
  if (low) x = x << 16 | load_shared_u16(cursor + 2 * __popc(lanes & below));
  cursor += 2 * __popc(lanes);
#endif
}

// Every active lane whose state is at least `limit` puts the state's low half in front of `cursor`, in
// the order of lanes; the cursor moves to the first of them. Full warp.
__device__ __forceinline__ void put_words(u32& x, u32 limit, bool active, Shared& cursor, u32 below) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{\n"
      " .reg .pred on, high;\n"
      " .reg .u32 lanes, rank, count;\n"
      " setp.ne.u32 on, %4, 0;\n"
      " setp.ge.and.u32 high, %0, %2, on;\n"
      " vote.sync.ballot.b32 lanes, high, 0xffffffff;\n"
      " and.b32 rank, lanes, %3;\n"
      " popc.b32 rank, rank;\n"
      " popc.b32 count, lanes;\n"
      " mad.lo.s32 %1, count, -2, %1;\n"
      " mad.lo.u32 rank, rank, 2, %1;\n"
      " @high st.shared.u16 [rank], %0;\n"
      " @high shr.u32 %0, %0, 16;\n"
      "}"
      : "+r"(x), "+r"(cursor)
      : "r"(limit), "r"(below), "r"(static_cast<u32>(active))
      : "memory");
#else
  const bool high = active && x >= limit;
  const u32 lanes = __ballot_sync(kAllLanes, high);
  cursor -= 2 * __popc(lanes);
  if (high) {
    store_shared_u16(cursor + 2 * __popc(lanes & below), x);
    x >>= 16;
  }
#endif
}

}  // namespace s4
