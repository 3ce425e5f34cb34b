// A stand-in for the CUDA driver's library: device memory is the host's, and kernels are run by the
// emulator, one call at a time. It has the calls that the CUDA handle makes, and no others. With it the
// tests of the CUDA engine run where there is no GPU; ordering between streams is not tested by it.
//
// Memory is handed out with canaries on both sides, which are looked at when it is freed.

#include "emulator.h"

#include "s4.cu"

#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace {

typedef int Result;
constexpr Result kSuccess = 0, kInvalid = 1, kOutOfMemory = 2, kNotFound = 500;
constexpr size_t kCanary = 256, kMemory = size_t{4} << 30;
constexpr size_t kUntouched = 512 << 20;  // more than that only takes room: no test looks at it
constexpr char kGuard = 0x6b;

std::mutex lock;
size_t used = 0;
struct Memory {
  size_t bytes;
  int device;
};
std::map<uint64_t, Memory> allocated;
thread_local std::vector<int> contexts;  // devices of the contexts that are current, one upon the other

void guard(uint64_t at, size_t bytes) {
  memset(reinterpret_cast<char*>(at) - kCanary, kGuard, kCanary);
  memset(reinterpret_cast<char*>(at) + bytes, kGuard, kCanary);
}

bool intact(uint64_t at, size_t bytes) {
  const char *p = reinterpret_cast<char*>(at) - kCanary, *q = reinterpret_cast<char*>(at) + bytes;
  for (size_t i = 0; i < kCanary; i++)
    if (p[i] != kGuard || q[i] != kGuard) return false;
  return true;
}

Result take(uint64_t* at, size_t bytes) {
  std::lock_guard<std::mutex> hold(lock);
  void* p = nullptr;
  if (contexts.empty()) return 201;
  if (used + bytes > kMemory || posix_memalign(&p, 256, bytes + 2 * kCanary) != 0) return kOutOfMemory;
  *at = reinterpret_cast<uint64_t>(p) + kCanary;
  if (bytes < kUntouched) memset(reinterpret_cast<void*>(*at), 0xcd, bytes);
  guard(*at, bytes);
  allocated[*at] = {bytes, contexts.back()};
  used += bytes;
  return kSuccess;
}

Result give(uint64_t at) {
  std::lock_guard<std::mutex> hold(lock);
  const auto found = allocated.find(at);
  if (found == allocated.end()) return kInvalid;
  if (!intact(at, found->second.bytes)) {
    fprintf(stderr, "emulated driver: written outside of %zu bytes of device memory\n", found->second.bytes);
    abort();
  }
  used -= found->second.bytes;
  free(reinterpret_cast<void*>(at - kCanary));
  allocated.erase(found);
  return kSuccess;
}

// The allocation that holds an address.
std::map<uint64_t, Memory>::iterator holder(uint64_t at) {
  auto found = allocated.upper_bound(at);
  if (found == allocated.begin()) return allocated.end();
  --found;
  return at < found->first + found->second.bytes ? found : allocated.end();
}

template <class T>
T arg(void** params, int i) {
  return *static_cast<T*>(params[i]);
}

using s4::CodedPlane;
using s4::CopySpan;
using s4::CrcSpan;
using s4::DecodeChunk;
using s4::EncodeChunk;
using s4::EncodeResult;
using s4::u32;
using s4::u64;
using s4::u8;

template <class K>
void encode(K kernel, void** p) {
  kernel(arg<const EncodeChunk*>(p, 0), arg<EncodeResult*>(p, 1));
}
template <class K>
void gather(K kernel, void** p) {
  kernel(arg<const EncodeChunk*>(p, 0), arg<EncodeResult*>(p, 1), arg<u8*>(p, 2), arg<u64>(p, 3));
}
template <class K>
void decode(K kernel, void** p) {
  kernel(arg<const DecodeChunk*>(p, 0), arg<u32*>(p, 1));
}

typedef void (*Kernel)(void**);
const std::map<std::string, Kernel> kernels = {
    {"s4_encode_fused_w2", [](void** p) { encode(s4_encode_fused_w2, p); }},
    {"s4_encode_fused_w4", [](void** p) { encode(s4_encode_fused_w4, p); }},
    {"s4_encode_composed", [](void** p) { encode(s4_encode_composed, p); }},
    {"s4_encode_residual", [](void** p) { encode(s4_encode_residual, p); }},
    {"s4_encode_predicted", [](void** p) { encode(s4_encode_predicted, p); }},
    {"s4_encode_update", [](void** p) { encode(s4_encode_update, p); }},
    {"s4_split_planes", [](void** p) { encode(s4_split_planes, p); }},
    {"s4_place_streams",
     [](void** p) {
       s4_place_streams(arg<const EncodeChunk*>(p, 0), arg<EncodeResult*>(p, 1), arg<const CodedPlane*>(p, 2),
                        arg<u32>(p, 3));
     }},
    {"s4_gather_planes",
     [](void** p) {
       s4_gather_planes(arg<const EncodeChunk*>(p, 0), arg<EncodeResult*>(p, 1), arg<const CodedPlane*>(p, 2),
                        arg<u8*>(p, 3), arg<u64>(p, 4));
     }},
    {"s4_frame_offsets",
     [](void** p) { s4_frame_offsets(arg<EncodeResult*>(p, 0), arg<u32>(p, 1), arg<u64*>(p, 2)); }},
    {"s4_gather_fused_w2", [](void** p) { gather(s4_gather_fused_w2, p); }},
    {"s4_gather_fused_w4", [](void** p) { gather(s4_gather_fused_w4, p); }},
    {"s4_gather_composed", [](void** p) { gather(s4_gather_composed, p); }},
    {"s4_encode_crcs", [](void** p) { gather(s4_encode_crcs, p); }},
    {"s4_check_frames", [](void** p) { decode(s4_check_frames, p); }},
    {"s4_decode_fused_w2", [](void** p) { decode(s4_decode_fused_w2, p); }},
    {"s4_decode_fused_w4", [](void** p) { decode(s4_decode_fused_w4, p); }},
    {"s4_decode_composed", [](void** p) { decode(s4_decode_composed, p); }},
    {"s4_decode_predicted", [](void** p) { decode(s4_decode_predicted, p); }},
    {"s4_decode_update", [](void** p) { decode(s4_decode_update, p); }},
    {"s4_check_values", [](void** p) { decode(s4_check_values, p); }},
    {"s4_copy_spans", [](void** p) { s4_copy_spans(arg<const CopySpan*>(p, 0)); }},
    {"s4_copy_rows", [](void** p) { s4_copy_rows(arg<const CopyRows*>(p, 0)); }},
    {"s4_crc_spans", [](void** p) { s4_crc_spans(arg<const CrcSpan*>(p, 0), arg<u32*>(p, 1)); }},
};

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) Result

CALL cuInit(unsigned) { return kSuccess; }
CALL cuDriverGetVersion(int* v) { return *v = 12000, kSuccess; }
CALL cuGetErrorName(int, const char** s) { return *s = "EMULATED", kSuccess; }
CALL cuGetErrorString(int, const char** s) { return *s = "an error of the emulated driver", kSuccess; }
CALL cuDeviceGetCount(int* n) { return *n = 2, kSuccess; }
CALL cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? kSuccess : 101;
}
CALL cuDeviceGetName(char* name, int len, int) {
  snprintf(name, static_cast<size_t>(len), "emulated");
  return kSuccess;
}
CALL cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = kMemory, kSuccess; }
CALL cuDeviceGetAttribute(int* v, int, int) { return *v = 1, kSuccess; }
CALL cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(uint64_t{1} + device);
  return kSuccess;
}
CALL cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
CALL cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(static_cast<int>(reinterpret_cast<uint64_t>(context) - 1));
  return kSuccess;
}
CALL cuCtxPopCurrent_v2(void** context) {
  *context = nullptr;
  if (contexts.empty()) return 201;
  contexts.pop_back();
  return kSuccess;
}
CALL cuCtxGetDevice(int* device) {
  if (contexts.empty()) return 201;
  return *device = contexts.back(), kSuccess;
}
CALL cuCtxGetCurrent(void** context) {
  *context = contexts.empty() ? nullptr : reinterpret_cast<void*>(uint64_t{1} + contexts.back());
  return kSuccess;
}
CALL cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, kSuccess; }

CALL cuStreamCreateWithPriority(void** s, unsigned, int) { return *s = reinterpret_cast<void*>(8), kSuccess; }
CALL cuStreamDestroy_v2(void*) { return kSuccess; }
CALL cuStreamSynchronize(void*) { return contexts.empty() ? 201 : kSuccess; }
CALL cuStreamWaitEvent(void*, void*, unsigned) { return kSuccess; }
CALL cuStreamIsCapturing(void*, int* status) { return *status = 0, kSuccess; }
CALL cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int own = 0;
  std::swap(own, *mode);
  return kSuccess;
}
CALL cuEventCreate(void** e, unsigned) { return *e = reinterpret_cast<void*>(16), kSuccess; }
CALL cuEventRecord(void*, void*) { return kSuccess; }
CALL cuEventSynchronize(void*) { return kSuccess; }
CALL cuEventQuery(void*) { return kSuccess; }
CALL cuEventElapsedTime(float* ms, void*, void*) { return *ms = 0, kSuccess; }
CALL cuEventDestroy_v2(void*) { return kSuccess; }

CALL cuMemAlloc_v2(uint64_t* at, size_t bytes) { return take(at, bytes); }
CALL cuMemFree_v2(uint64_t at) { return give(at); }
CALL cuMemGetAllocationGranularity(size_t* bytes, const void*, int) { return *bytes = 2 << 20, kSuccess; }
CALL cuMemCreate(u64* handle, size_t bytes, const void*, u64) {
  std::lock_guard<std::mutex> hold(lock);
  return *handle = 1, used + bytes > kMemory ? kOutOfMemory : kSuccess;
}
CALL cuMemAddressReserve(uint64_t* at, size_t bytes, size_t, uint64_t, u64) { return take(at, bytes); }
CALL cuMemMap(uint64_t, size_t, size_t, u64, u64) { return kSuccess; }
CALL cuMemSetAccess(uint64_t, size_t, const void*, size_t) { return kSuccess; }
CALL cuMemUnmap(uint64_t, size_t) { return kSuccess; }
CALL cuMemRelease(u64) { return kSuccess; }
CALL cuMemAddressFree(uint64_t at, size_t) { return give(at); }
CALL cuMemGetInfo_v2(size_t* free, size_t* total) {
  return *free = kMemory - used, *total = kMemory, kSuccess;
}
CALL cuMemHostAlloc(void** p, size_t bytes, unsigned) {
  return posix_memalign(p, 4096, bytes) == 0 ? kSuccess : kOutOfMemory;
}
CALL cuMemFreeHost(void* p) { return free(p), kSuccess; }

// Pages of the process that are locked. What has kRefused bytes is not, and devices see what has kElsewhere
// bytes at other addresses, as some systems' do.
namespace {
constexpr size_t kRefused = 10 << 20, kElsewhere = 6 << 20;
std::map<void*, size_t> locked;
}  // namespace
CALL cuMemHostRegister_v2(void* p, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> hold(lock);
  if (bytes == kRefused) return kOutOfMemory;
  return locked.emplace(p, bytes).second ? kSuccess : kInvalid;
}
CALL cuMemHostUnregister(void* p) {
  std::lock_guard<std::mutex> hold(lock);
  return locked.erase(p) == 1 ? kSuccess : kInvalid;
}
CALL cuMemHostGetDevicePointer_v2(uint64_t* at, void* p, unsigned) {
  std::lock_guard<std::mutex> hold(lock);
  const auto found = locked.find(p);
  if (found == locked.end()) return kInvalid;
  *at = reinterpret_cast<uint64_t>(p) + (found->second == kElsewhere ? 4096 : 0);
  return kSuccess;
}

namespace {
bool on_device(uint64_t at, size_t bytes) {
  std::lock_guard<std::mutex> hold(lock);
  const auto found = holder(at);
  return found != allocated.end() && at + bytes <= found->first + found->second.bytes;
}
Result copy(void* to, const void* from, size_t bytes, uint64_t device) {
  if (!on_device(device, bytes)) return kInvalid;
  memmove(to, from, bytes);
  return kSuccess;
}
}  // namespace

CALL cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
  return copy(reinterpret_cast<void*>(to), from, bytes, to);
}
CALL cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
  return copy(to, reinterpret_cast<void*>(from), bytes, from);
}
CALL cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void*) {
  return copy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes, from);
}
CALL cuMemsetD8Async(uint64_t to, unsigned char v, size_t bytes, void*) {
  if (!on_device(to, bytes)) return kInvalid;
  memset(reinterpret_cast<void*>(to), v, bytes);
  return kSuccess;
}

CALL cuPointerGetAttributes(unsigned n, int* asked, void** places, uint64_t at) {
  std::lock_guard<std::mutex> hold(lock);
  const auto found = holder(at);
  for (unsigned i = 0; i < n; i++) {
    const bool known = found != allocated.end();
    if (asked[i] == 2) *static_cast<u32*>(places[i]) = known ? 2 : 0;
    if (asked[i] == 9) *static_cast<int*>(places[i]) = known ? found->second.device : -2;
    if (asked[i] == 11) *static_cast<u64*>(places[i]) = known ? found->first : 0;
    if (asked[i] == 12) *static_cast<size_t*>(places[i]) = known ? found->second.bytes : 0;
  }
  return kSuccess;
}
CALL cuPointerGetAttribute(void* place, int asked, uint64_t at) {
  return cuPointerGetAttributes(1, &asked, &place, at);
}

CALL cuModuleLoadData(void** module, const void*) { return *module = reinterpret_cast<void*>(64), kSuccess; }
CALL cuModuleUnload(void*) { return kSuccess; }
CALL cuFuncSetAttribute(void*, int, int) { return kSuccess; }
CALL cuModuleGetFunction(void** f, void*, const char* name) {
  const auto found = kernels.find(name);
  if (found == kernels.end()) return kNotFound;
  *f = reinterpret_cast<void*>(found->second);
  return kSuccess;
}
CALL cuLaunchKernel(void* f, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                    void*, void** params, void**) {
  std::lock_guard<std::mutex> hold(lock);
  if (contexts.empty()) return 201;
  const auto kernel = reinterpret_cast<Kernel>(f);
  emulator::launch(grid, block, [=] { kernel(params); });
  return kSuccess;
}
