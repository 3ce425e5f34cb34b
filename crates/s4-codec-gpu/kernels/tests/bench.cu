// Times the kernels on real data and checks that all values come back. Medians, timed with CUDA events, in
// 1e9 bytes of values per second; the device copy counts bytes read and bytes written.
//
//   nvcc -O3 -std=c++17 -arch=native bench.cu -o bench -ldl && ./bench WIDTH values.bin [MiB] [libnvcomp.so]
//
// `values.bin` holds raw values; it is repeated to fill MiB (default 1024) mebibytes. If nvCOMP's library is
// given, its ANS is measured in the same run.
#include <algorithm>
#include <cstring>
#include <functional>

#include "../s4.cu"
#include "jobs_io.h"
#include "nvcomp_ans.h"

template <class T>
static T* device_array(size_t count) {
  void* p;
  CUDA(cudaMalloc(&p, count * sizeof(T) + 16));
  CUDA(cudaMemset(p, 0xa5, count * sizeof(T) + 16));
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

// Median milliseconds.
static float time(const std::function<void()>& work) {
  cudaEvent_t start, stop;
  CUDA(cudaEventCreate(&start));
  CUDA(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < 13; i++) {
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

// The entry points of one kind of kernels.
struct Kernels {
  const char* name;
  uint32_t threads;
  void (*encode)(const s4::EncodeChunk*, s4::EncodeResult*);
  void (*gather)(const s4::EncodeChunk*, s4::EncodeResult*, s4::u8*, s4::u64);
  void (*decode)(const s4::DecodeChunk*, s4::u32*);
};

struct Data {
  uint8_t *values, *back, *frames;
  size_t bytes, chunk_bytes;
  uint32_t width, n, count;
  double rate(float ms) const { return bytes / ms / 1e6; }
};

// One table for each plane of layout `fields`.
static void share_tables(uint32_t width, const s4::SharedTable* tables, s4::TableSet* to) {
  for (uint32_t i = 0; tables != nullptr && i < (width == 2 ? 2 : 3); i++) to[i] = {tables + i, 1, 0};
}

static std::vector<s4::EncodeChunk> encode_chunks(const Data& d, uint8_t* scratch, size_t each, uint32_t flags,
                                                  const s4::SharedTable* tables) {
  std::vector<s4::EncodeChunk> in(d.count);
  for (size_t i = 0; i < d.count; i++) {
    s4::EncodeChunk& c = in[i];
    c = s4::EncodeChunk{};
    c.values = d.values + i * d.chunk_bytes;
    share_tables(d.width, tables, c.tables);
    c.scratch = scratch + i * each;
    c.n = d.n;
    c.width = static_cast<s4::u8>(d.width);
    c.layout = s4::kFields;
    c.coding[0] = s4::kCodeRans8;
    c.flags = flags;
  }
  return in;
}

static std::vector<s4::DecodeChunk> decode_chunks(const Data& d, const std::vector<s4::EncodeResult>& results,
                                                  uint8_t* scratch, size_t each, const s4::SharedTable* tables) {
  std::vector<s4::DecodeChunk> out(d.count);
  for (size_t i = 0; i < d.count; i++) {
    const s4::EncodeResult& r = results[i];
    s4::DecodeChunk& c = out[i];
    c = s4::DecodeChunk{};
    c.frame = d.frames + r.offset;
    c.values = d.back + i * d.chunk_bytes;
    share_tables(d.width, tables, c.tables);
    c.scratch = scratch + i * each;
    c.frame_len = r.len;
    c.n = d.n;
    c.width = static_cast<s4::u8>(d.width);
    c.layout = s4::kFields;
    c.plain = r.plain;
    c.planes = r.streams;
    c.crc_encoded = r.crc_encoded;
    c.crc_raw = r.crc_raw;
    uint32_t at = (8 * r.streams + 15) / 16 * 16;
    for (uint32_t k = 0; k < r.streams; k++) {
      c.streams[k] = s4::DecodeStream{at, r.stream[k].len, r.stream[k].codec, r.stream[k].param, 0};
      at += (r.stream[k].len + 15) / 16 * 16;
    }
  }
  return out;
}

// Encodes and decodes all data with `k`, and prints the times. Returns the frame of the first chunk.
static Bytes run(const Data& d, const Kernels& k, uint32_t flags, const s4::SharedTable* tables) {
  const bool composed = k.threads == s4::kComposedThreads && k.encode == s4_encode_composed;
  const size_t fused = d.width == 2 ? s4::kFusedScratch2 : s4::kFusedScratch4;
  size_t each = composed ? s4::composed_encode_scratch(d.n, d.width, d.n) : fused;
  if (flags & s4::kKeepPlanes) each += s4::round_up64(size_t{d.n} * (d.width - 1), 32);
  each = s4::round_up64(std::max<size_t>(each, s4::composed_decode_scratch(d.n, d.width, d.chunk_bytes)), 16);
  auto* scratch = device_array<uint8_t>(each * d.count);
  auto* chunks = to_device(encode_chunks(d, scratch, each, flags, tables));
  auto* results = device_array<s4::EncodeResult>(d.count);
  auto* total = device_array<s4::u64>(1);
  auto* status = device_array<s4::u32>(d.count);

  const float encode = time([&] { k.encode<<<d.count, k.threads>>>(chunks, results); });
  const float gather = time([&] {
    s4_frame_offsets<<<1, s4::kOffsetsThreads>>>(results, d.count, total);
    k.gather<<<d.count, k.threads>>>(chunks, results, d.frames, d.bytes);
  });
  const float crcs = time([&] {
    s4_encode_crcs<<<2 * d.count, s4::kCrcThreads>>>(chunks, results, d.frames, d.bytes);
  });
  const auto host_results = to_host(results, d.count);
  size_t stored = 0, shared = 0;
  for (const auto& r : host_results) {
    if (r.status != s4::kOk || r.plain) fail("a chunk that is not coded");
    stored += r.len + 24, shared += r.shared;
  }

  auto* frames = to_device(decode_chunks(d, host_results, scratch, each, tables));
  CUDA(cudaMemset(d.back, 0xa5, d.bytes));
  const float check = time([&] { s4_check_frames<<<d.count, s4::kCrcThreads>>>(frames, status); });
  const float decode = time([&] { k.decode<<<d.count, k.threads>>>(frames, status); });
  const float verify = time([&] { s4_check_values<<<d.count, s4::kCrcThreads>>>(frames, status); });
  for (s4::u32 s : to_host(status, d.count))
    if (s != s4::kOk) fail("status " + std::to_string(s));
  if (to_host(d.back, d.bytes) != to_host(d.values, d.bytes)) fail("values differ");

  printf("%-9s keep %u shared %5.1f%%: ratio %.4f  encode %.0f  +gather %.0f  +crcs %.0f | decode %.0f  +frame crc "
         "%.0f  +value crc %.0f | ms: encode %.3f gather %.3f crcs %.3f check %.3f decode %.3f verify %.3f\n",
         k.name, flags, 100.0 * shared / d.count, static_cast<double>(d.bytes) / stored, d.rate(encode),
         d.rate(encode + gather), d.rate(encode + gather + crcs), d.rate(decode), d.rate(decode + check),
         d.rate(decode + check + verify), encode, gather, crcs, check, decode, verify);
  fflush(stdout);
  const Bytes first = to_host(d.frames + host_results[0].offset, host_results[0].len);
  for (void* p : {(void*)scratch, (void*)chunks, (void*)results, (void*)total, (void*)status, (void*)frames})
    CUDA(cudaFree(p));
  return first;
}

// Shared tables for all planes: the table of a frame's first stream for plane 0, none for the others.
static std::vector<s4::SharedTable> table_of(const Bytes& frame, uint32_t planes) {
  const uint8_t* t = &frame[planes == 2 ? 24 : 40];
  std::vector<s4::SharedTable> tables(planes);
  tables[0].precision = 8;
  tables[0].count = static_cast<s4::u16>(t[0] | t[1] << 8);
  tables[0].escape = static_cast<s4::u16>(t[2] | t[3] << 8);
  for (int i = 0; i < tables[0].count; i++) {
    tables[0].symbol[i] = t[4 + i];
    tables[0].freq[i] = t[4 + tables[0].count + i];
  }
  return tables;
}

int main(int argc, char** argv) {
  if (argc < 3) fail("usage: bench WIDTH values.bin [MiB] [libnvcomp.so]");
  Input file(argv[2]);
  Data d{};
  d.width = static_cast<uint32_t>(atoi(argv[1]));
  const Bytes tile = file.rest();
  d.n = d.width == 2 ? s4::kFusedValues2 : s4::kFusedValues4;
  d.chunk_bytes = size_t{d.n} * d.width;
  d.count = static_cast<uint32_t>((size_t(argc > 3 ? atoi(argv[3]) : 1024) << 20) / d.chunk_bytes);
  d.bytes = d.count * d.chunk_bytes;
  Bytes host(d.bytes);
  for (size_t at = 0; at < d.bytes; at += tile.size())
    memcpy(&host[at], tile.data(), std::min(tile.size(), d.bytes - at));
  d.values = to_device(host);
  d.back = device_array<uint8_t>(d.bytes);
  d.frames = device_array<uint8_t>(d.bytes);
  printf("%s, %zu MiB\n", argv[2], d.bytes >> 20);
  const float copy = time([&] { CUDA(cudaMemcpyAsync(d.back, d.values, d.bytes, cudaMemcpyDeviceToDevice)); });
  printf("device copy %.0f (read and written)\n", 2 * d.rate(copy));

  const Kernels fused = d.width == 2 ? Kernels{"fused", s4::kFusedThreads2, s4_encode_fused_w2, s4_gather_fused_w2,
                                               s4_decode_fused_w2}
                                     : Kernels{"fused", s4::kFusedThreads4, s4_encode_fused_w4, s4_gather_fused_w4,
                                               s4_decode_fused_w4};
  const Kernels composed{"composed", s4::kComposedThreads, s4_encode_composed, s4_gather_composed,
                         s4_decode_composed};
  const Bytes frame = run(d, fused, 0, nullptr);
  run(d, fused, s4::kKeepPlanes, nullptr);
  auto* tables = to_device(table_of(frame, d.width == 2 ? 2 : 3));
  run(d, fused, 0, tables);
  run(d, composed, 0, tables);
  if (argc > 4) bench_nvcomp_ans(argv[4], d.width, d.values, d.back, d.bytes, d.chunk_bytes, time);
  return 0;
}
