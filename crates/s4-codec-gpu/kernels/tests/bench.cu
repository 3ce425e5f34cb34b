// Times the kernels on real data and checks them there: streams against the reference, values bit for
// bit. Medians by CUDA events.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 bench.cu -o bench && ./bench values.bin WIDTH [MiB]
//
// `values.bin` holds values as they are; it is repeated until there are MiB (default 1024) of them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "../rans.cu"
#include "reference.h"

using reference::Bytes;

#define CUDA(call)                                                                             \
  do {                                                                                         \
    const cudaError_t e = (call);                                                              \
    if (e != cudaSuccess) fail(std::string(#call) + ": " + cudaGetErrorString(e), __LINE__);   \
  } while (0)

[[noreturn]] static void fail(const std::string& what, int line) {
  fprintf(stderr, "bench.cu:%d: %s\n", line, what.c_str());
  exit(1);
}

template <class T>
static T* device_array(size_t count) {
  void* p;
  CUDA(cudaMalloc(&p, count * sizeof(T) + 16));
  CUDA(cudaMemset(p, 0xa5, count * sizeof(T)));
  return static_cast<T*>(p);
}

template <class T>
static T* to_device(const std::vector<T>& v) {
  T* p = device_array<T>(v.size());
  CUDA(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

template <class T>
static std::vector<T> to_host(const T* p, size_t count) {
  std::vector<T> v(count);
  CUDA(cudaMemcpy(v.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

static bool same(const uint8_t* a, const uint8_t* b, size_t len) {
  return to_host(a, len) == to_host(b, len);
}

// Median milliseconds.
static float time(const std::function<void()>& work) {
  cudaEvent_t start, stop;
  CUDA(cudaEventCreate(&start));
  CUDA(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < 17; i++) {
    CUDA(cudaEventRecord(start));
    work();
    CUDA(cudaEventRecord(stop));
    CUDA(cudaGetLastError());
    CUDA(cudaEventSynchronize(stop));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

static Bytes read_file(const char* path) {
  FILE* f = fopen(path, "rb");
  if (!f) fail(path, __LINE__);
  Bytes out;
  uint8_t part[1 << 16];
  for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) out.insert(out.end(), part, part + n);
  fclose(f);
  return out;
}

template <int kWidth, class Encode, class Gather, class Decode>
static void run(const Bytes& tile, size_t bytes, Encode encode, Gather gather, Decode decode) {
  const size_t chunk_bytes = size_t{s4::kMaxChunk<kWidth>} * kWidth;
  const uint32_t count = static_cast<uint32_t>(bytes / chunk_bytes), n = s4::kMaxChunk<kWidth>;
  const uint32_t threads = s4::kThreads<kWidth>;
  bytes = count * chunk_bytes;
  Bytes host(bytes);
  for (size_t at = 0; at < bytes; at += tile.size())
    memcpy(&host[at], tile.data(), std::min(tile.size(), bytes - at));

  const size_t plane = bytes / kWidth;
  auto* values = to_device(host);
  auto* back = device_array<uint8_t>(bytes);
  auto* a = device_array<uint8_t>(plane);
  auto* b = device_array<uint8_t>(kWidth == 4 ? 2 * plane : 0);
  auto* packed = device_array<uint8_t>(plane);
  auto* slots = device_array<s4::Slot<kWidth>>(count);
  auto* lens = device_array<s4::u32>(count);
  auto* status = device_array<s4::u32>(count);
  auto* offsets = device_array<s4::u64>(count + 1);

  std::vector<s4::EncodeChunk> in;
  for (size_t i = 0; i < count; i++)
    in.push_back({values + i * chunk_bytes, {a + i * n, b + 2 * i * n}, n, 0});
  auto* in_device = to_device(in);

  const float copy_ms = time([&] { CUDA(cudaMemcpyAsync(back, values, bytes, cudaMemcpyDeviceToDevice)); });
  const float encode_ms = time([&] { encode<<<count, threads>>>(in_device, slots, lens); });
  const float gather_ms = time([&] {
    s4_rans_offsets<<<1, s4::kScanThreads>>>(lens, offsets, count);
    gather<<<count, threads>>>(in_device, slots, offsets, packed);
  });
  const auto host_lens = to_host(lens, count);
  const auto host_offsets = to_host(offsets, count + 1);
  const size_t total = host_offsets[count];
  const Bytes host_packed = to_host(packed, total);
  for (size_t i = 0; i < count; i += std::max<size_t>(1, count / 97)) {
    const Bytes chunk(&host[i * chunk_bytes], &host[i * chunk_bytes] + chunk_bytes);
    const Bytes e = reference::plane(chunk, kWidth, 0), plane_a = reference::plane(chunk, kWidth, 1);
    const uint8_t* p = &host_packed[host_offsets[i]];
    if (Bytes(p, p + host_lens[i]) != reference::encode(e, plane_a))
      fail("stream differs from the reference", __LINE__);
    if (to_host(a + i * n, n) != plane_a) fail("plane A differs from the reference", __LINE__);
  }

  std::vector<s4::DecodeChunk> out;
  for (size_t i = 0; i < count; i++)
    out.push_back({packed + host_offsets[i], {a + i * n, b + 2 * i * n}, back + i * chunk_bytes, host_lens[i],
                   n, n - static_cast<uint32_t>(reference::carry_len(n)), 0});
  auto* out_device = to_device(out);
  CUDA(cudaMemset(back, 0xa5, bytes));
  // What is carried is not stored.
  const size_t carried = reference::carry_len(n);
  CUDA(cudaMemset2D(a + n - carried, n, 0xa5, carried, count));
  const float decode_ms = time([&] { decode<<<count, threads>>>(out_device, status); });
  for (s4::u32 s : to_host(status, count))
    if (s != s4::kOk) fail("status " + std::to_string(s), __LINE__);
  if (!same(back, values, bytes)) fail("values differ", __LINE__);

  // As the chunks stand on disk: header, planes at multiples of 16, and 24 bytes in the index.
  size_t stored = 0;
  for (uint32_t len : host_lens) {
    if (len >= n) fail("a plane that is not compressed", __LINE__);
    stored += 16 + 8 * (kWidth - 2) + (len + 15) / 16 * 16 + (kWidth - 1) * n - carried + 24;
  }
  auto rate = [&](float ms) { return bytes / ms / 1e6; };
  printf("%zu MiB: ratio %.4f (bits for E: %.4f)  GB/s: copy %.0f  encode %.0f  with gather %.0f  decode %.0f\n",
         bytes >> 20, static_cast<double>(bytes) / stored,
         8.0 * (total - static_cast<double>(carried) * count) / plane, 2 * rate(copy_ms), rate(encode_ms),
         rate(encode_ms + gather_ms), rate(decode_ms));
}

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: bench values.bin WIDTH [MiB]\n");
    return 2;
  }
  const Bytes tile = read_file(argv[1]);
  const size_t bytes = size_t(argc > 3 ? atoi(argv[3]) : 1024) << 20;
  printf("%s: ", argv[1]);
  if (atoi(argv[2]) == 2)
    run<2>(tile, bytes, s4_rans_encode_w2, s4_rans_gather_w2, s4_rans_decode_w2);
  else
    run<4>(tile, bytes, s4_rans_encode_w4, s4_rans_gather_w4, s4_rans_decode_w4);
  return 0;
}
