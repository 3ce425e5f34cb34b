// The kernels on a GPU, with the jobs that the emulator runs:
//
//   nvcc -O3 -std=c++17 -arch=native device.cu -o device && ./device JOBS ANSWERS
//
// The answers must equal the emulator's, byte for byte. Every buffer is a separate allocation, for
// compute-sanitizer.
#include "../s4.cu"
#include "contexts.h"
#include "jobs_io.h"

#define CUDA(call)                                                                                     \
  do {                                                                                                 \
    const cudaError_t e = (call);                                                                      \
    if (e != cudaSuccess) fail(std::string(#call) + ": " + cudaGetErrorString(e));                     \
  } while (0)

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() {
    for (uint8_t* p : list_) cudaFree(p);
  }
  uint8_t* add(const Bytes& b, size_t skew = 0) {
    uint8_t* p = add(b.size(), skew);
    if (!b.empty()) CUDA(cudaMemcpy(p, b.data(), b.size(), cudaMemcpyHostToDevice));
    return p;
  }
  uint8_t* add(size_t len, size_t skew = 0) {
    void* p = nullptr;
    CUDA(cudaMalloc(&p, len + skew + (len + skew == 0)));
    list_.push_back(static_cast<uint8_t*>(p));
    return list_.back() + skew;
  }
  template <class T>
  T* array(const std::vector<T>& v) {
    const auto* p = reinterpret_cast<const uint8_t*>(v.data());
    return reinterpret_cast<T*>(add(Bytes(p, p + v.size() * sizeof(T))));
  }
  Bytes read(const void* p, size_t len) const {
    Bytes b(len);
    if (len > 0) CUDA(cudaMemcpy(b.data(), p, len, cudaMemcpyDeviceToHost));
    return b;
  }
  void check() const { CUDA(cudaDeviceSynchronize()); }

 private:
  std::vector<uint8_t*> list_;
};

#define S4_LAUNCH(kernel, grid, block, ...) \
  do {                                      \
    kernel<<<grid, block>>>(__VA_ARGS__);   \
    CUDA(cudaGetLastError());               \
  } while (0)

#include "jobs.h"

int main(int argc, char** argv) { return run_jobs(argc, argv); }
