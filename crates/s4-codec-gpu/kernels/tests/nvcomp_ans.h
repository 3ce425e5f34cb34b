// Times nvCOMP's ANS in the same run as the kernels. The library is opened at run time; its API is declared by hand.
#pragma once

#include <dlfcn.h>

#include <functional>

#define CUDA(call)                                                                                     \
  do {                                                                                                 \
    const cudaError_t e = (call);                                                                      \
    if (e != cudaSuccess) fail(std::string(#call) + ": " + cudaGetErrorString(e));                     \
  } while (0)

struct AnsCompress {
  uint32_t type, data_type;
  uint8_t sub_chunks, states, histogram, reserved[53];
};
struct AnsDecompress {
  uint32_t backend, data_type;
  uint8_t sub_chunks, states, skip, reserved[53];
};
static_assert(sizeof(AnsCompress) == 64 && sizeof(AnsDecompress) == 64, "options are 64 bytes, by value");

typedef int (*AnsMaxOutput)(size_t, AnsCompress, size_t*);
typedef int (*AnsCompressAsync)(const void* const*, const size_t*, size_t, size_t, void*, size_t, void* const*,
                                size_t*, AnsCompress, int*, cudaStream_t);
typedef int (*AnsDecompressAsync)(const void* const*, const size_t*, const size_t*, size_t*, size_t, void*, size_t,
                                  void* const*, AnsDecompress, int*, cudaStream_t);

template <class T>
static T symbol(void* library, const char* name) {
  void* p = dlsym(library, name);
  if (!p) fail(std::string(name) + " is not in the library");
  return reinterpret_cast<T>(p);
}

template <class T>
static T* uploaded(const std::vector<T>& v) {
  void* p;
  CUDA(cudaMalloc(&p, v.size() * sizeof(T)));
  CUDA(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return static_cast<T*>(p);
}

static void bench_nvcomp_ans(const char* path, uint32_t width, const uint8_t* values, uint8_t* back, size_t bytes,
                             size_t chunk_bytes, float (*time)(const std::function<void()>&)) {
  void* library = dlopen(path, RTLD_NOW);
  if (!library) fail(dlerror());
  const auto max_output = symbol<AnsMaxOutput>(library, "nvcompBatchedANSCompressGetMaxOutputChunkSize");
  const auto compress = symbol<AnsCompressAsync>(library, "nvcompBatchedANSCompressAsync");
  const auto decompress = symbol<AnsDecompressAsync>(library, "nvcompBatchedANSDecompressAsync");
  const AnsCompress in{0, width == 2 ? 10u : 11u, 0, 0, 0, {}};
  const AnsDecompress out{0, 0xff, 0, 0, 0, {}};
  size_t slot = 0;
  if (max_output(chunk_bytes, in, &slot) != 0) fail("nvCOMP: size of the output");
  slot = (slot + 15) / 16 * 16;
  const size_t count = bytes / chunk_bytes;
  uint8_t* packed;
  CUDA(cudaMalloc(&packed, slot * count));
  std::vector<const void*> from(count), packed_from(count);
  std::vector<void*> to(count), packed_to(count);
  for (size_t i = 0; i < count; i++) {
    from[i] = values + i * chunk_bytes, to[i] = back + i * chunk_bytes;
    packed_from[i] = packed_to[i] = packed + i * slot;
  }
  auto *d_from = uploaded(from), *d_packed_from = uploaded(packed_from);
  auto *d_to = uploaded(to), *d_packed_to = uploaded(packed_to);
  auto* sizes = uploaded(std::vector<size_t>(count, chunk_bytes));
  auto* packed_sizes = uploaded(std::vector<size_t>(count));
  auto* sizes_out = uploaded(std::vector<size_t>(count));
  auto* status = uploaded(std::vector<int>(count));
  auto good = [](int rc) {
    if (rc != 0) fail("nvCOMP: status " + std::to_string(rc));
  };
  const float encode = time([&] {
    good(compress(d_from, sizes, chunk_bytes, count, nullptr, 0, d_packed_to, packed_sizes, in, status, nullptr));
  });
  std::vector<size_t> lens(count);
  CUDA(cudaMemcpy(lens.data(), packed_sizes, count * sizeof(size_t), cudaMemcpyDeviceToHost));
  size_t stored = 0;
  for (size_t len : lens) stored += len;
  CUDA(cudaMemset(back, 0xa5, bytes));
  const float decode = time([&] {
    good(decompress(d_packed_from, packed_sizes, sizes, sizes_out, count, nullptr, 0, d_to, out, status, nullptr));
  });
  Bytes a(bytes), b(bytes);
  CUDA(cudaMemcpy(a.data(), values, bytes, cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(b.data(), back, bytes, cudaMemcpyDeviceToHost));
  if (a != b) fail("nvCOMP: values differ");
  printf("nvCOMP ANS into slots: ratio %.4f  encode %.0f  decode %.0f\n", static_cast<double>(bytes) / stored,
         bytes / encode / 1e6, bytes / decode / 1e6);
}
