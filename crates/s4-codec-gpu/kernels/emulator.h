// Runs the kernels on the host: every thread of a block is a fiber, and barriers and warp
// collectives switch between fibers. For tests without a GPU; include it before the kernels, with a host compiler.
//
// Blocks run one after the other, so races between blocks, memory ordering and timing are not seen.
#pragma once

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
// IEEE 754, whatever the compiler would make of the operators.
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float rounded(volatile float x) { return x; }
inline float __fadd_rn(float a, float b) { return rounded(a + b); }
inline float __fsub_rn(float a, float b) { return rounded(a - b); }
inline float __fmul_rn(float a, float b) { return rounded(a * b); }
inline float __fdiv_rn(float a, float b) { return rounded(a / b); }
inline float __fsqrt_rn(float x) { return rounded(std::sqrt(x)); }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Index {
  uint32_t x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr uint32_t kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;

// ---- switching between stacks ----

#if defined(__x86_64__)
// A stack pointer; the registers that a call must preserve lie on that stack. (`swapcontext` asks the kernel for the
// signal mask each time, which takes most of a test's time.)
typedef void* Context;
extern "C" void emulator_switch(Context* from, Context to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, . - emulator_switch
)");
inline void switch_to(Context& from, Context& to) { emulator_switch(&from, to); }
inline void make_context(Context& context, std::vector<char>& stack, void (*entry)()) {
  uintptr_t top = reinterpret_cast<uintptr_t>(stack.data() + stack.size()) / 16 * 16;
  void** p = reinterpret_cast<void**>(top) - 2;  // as after a call: 8 below a multiple of 16
  p[0] = reinterpret_cast<void*>(entry);
  context = std::fill_n(p - 6, 6, nullptr) - 6;
}
#else
typedef ucontext_t Context;
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
inline void make_context(Context& context, std::vector<char>& stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack.data();
  context.uc_stack.ss_size = stack.size();
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

// ---- threads ----

struct Fiber {
  Context context;
  std::vector<char> stack;
  bool done;
  uint32_t collectives;  // warp collectives so far; their parity picks the exchange buffer
};

// A barrier; the caller of `wait` says for how many fibers.
struct Barrier {
  uint32_t arrived, generation;
};

struct State {
  Context scheduler;
  std::vector<Fiber> fibers{kMaxThreads};
  std::function<void()> body;
  Barrier block, warps[kMaxThreads / 32];
  uint64_t exchange[kMaxThreads / 32][2][32];
  uint32_t votes[2];
  uint64_t progress;
};
inline State state;

inline void yield() {
  const uint32_t me = threadIdx.x;
  switch_to(state.fibers[me].context, state.scheduler);
  threadIdx.x = me;
}

inline void wait(Barrier& barrier, uint32_t size) {
  const uint32_t generation = barrier.generation;
  if (++barrier.arrived == size) {
    barrier.arrived = 0;
    barrier.generation++;
    state.progress++;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline void run_fiber() {
  state.body();
  state.fibers[threadIdx.x].done = true;
  state.progress++;
  yield();
}

// Gives every lane's value to all lanes of the warp.
inline const uint64_t* exchange(uint64_t value) {
  const uint32_t warp = threadIdx.x / 32, parity = state.fibers[threadIdx.x].collectives++ % 2;
  state.exchange[warp][parity][threadIdx.x % 32] = value;
  wait(state.warps[warp], 32);
  return state.exchange[warp][parity];
}

inline void start_fiber(Fiber& f) {
  if (f.stack.empty()) f.stack.resize(kStackBytes);
  f.done = false;
  f.collectives = 0;
  make_context(f.context, f.stack, run_fiber);
}

inline void run_block(uint32_t threads) {
  state.block = {};
  for (auto& w : state.warps) w = {};
  for (uint32_t i = 0; i < threads; i++) start_fiber(state.fibers[i]);
  for (uint32_t left = threads; left > 0;) {
    const uint64_t before = state.progress;
    for (uint32_t i = 0; i < threads; i++) {
      if (state.fibers[i].done) continue;
      threadIdx.x = i;
      switch_to(state.scheduler, state.fibers[i].context);
      left -= state.fibers[i].done;
    }
    if (state.progress == before) {
      fprintf(stderr, "emulator: threads of block %u wait for each other\n", blockIdx.x);
      abort();
    }
  }
}

// Runs `body` as a kernel of `blocks` blocks of `threads` threads, a multiple of 32.
inline void launch(uint32_t blocks, uint32_t threads, std::function<void()> body) {
  state.body = std::move(body);
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) run_block(threads);
}

}  // namespace emulator

inline void __syncwarp() { emulator::exchange(0); }
inline void __syncthreads() { emulator::wait(emulator::state.block, blockDim.x); }
inline int __syncthreads_or(int v) {
  auto& s = emulator::state;
  const uint32_t parity = s.block.generation % 2;
  if (s.block.arrived == 0) s.votes[parity] = 0;
  s.votes[parity] |= v != 0;
  __syncthreads();
  return static_cast<int>(s.votes[parity]);
}

inline uint32_t __ballot_sync(uint32_t, int v) {
  const uint64_t* all = emulator::exchange(v != 0);
  uint32_t bits = 0;
  for (int i = 0; i < 32; i++) bits |= static_cast<uint32_t>(all[i]) << i;
  return bits;
}
inline int __any_sync(uint32_t mask, int v) { return __ballot_sync(mask, v) != 0; }
inline int __all_sync(uint32_t mask, int v) { return __ballot_sync(mask, v) == ~0u; }
template <class T>
T __shfl_xor_sync(uint32_t, T v, int d) {
  return static_cast<T>(emulator::exchange(v)[threadIdx.x % 32 ^ d]);
}
template <class T>
T __shfl_sync(uint32_t, T v, int lane) {
  return static_cast<T>(emulator::exchange(v)[lane]);
}
template <class T>
T __shfl_up_sync(uint32_t, T v, uint32_t d) {
  const uint32_t lane = threadIdx.x % 32;
  return static_cast<T>(emulator::exchange(v)[lane >= d ? lane - d : lane]);
}

inline uint32_t __funnelshift_l(uint32_t lo, uint32_t hi, uint32_t s) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(hi) << 32 | lo) << (s & 31)) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, uint32_t s) {
  return static_cast<uint32_t>((static_cast<uint64_t>(hi) << 32 | lo) >> (s & 31));
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++)
    out |= static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return out;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(uint32_t v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}
template <class T>
void __stwb(T* p, T v) {
  *p = v;
}
template <class T>
T atomicAdd(T* p, T v) {
  const T old = *p;
  *p += v;
  return old;
}
template <class T>
T atomicOr(T* p, T v) {
  const T old = *p;
  *p |= v;
  return old;
}
using std::max;
using std::min;
