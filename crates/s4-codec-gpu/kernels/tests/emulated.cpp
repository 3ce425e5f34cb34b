// Runs the kernels in the emulator, on jobs from a file:
//
//   emulated JOBS ANSWERS
//   emulated foreign           (foreign.h)
//
// Every buffer is exactly as long as abi.h requires, so that the address sanitizer catches accesses outside it.
#include "../emulator.h"

#include "../s4.cu"
#include "contexts.h"
#include "jobs_io.h"

// `len` bytes at an address that is `skew` above a multiple of 16, with nothing behind them.
class Buffer {
 public:
  explicit Buffer(size_t len, size_t skew = 0) : len_(len), skew_(skew) {
    void* p = nullptr;
    if (posix_memalign(&p, 16, len + skew) != 0) fail("no memory");
    all_.reset(static_cast<uint8_t*>(p));
    memset(p, kPoison, len + skew);
  }
  explicit Buffer(const Bytes& b, size_t skew = 0) : Buffer(b.size(), skew) {
    if (!b.empty()) memcpy(data(), b.data(), b.size());
  }
  uint8_t* data() const { return all_.get() + skew_; }
  size_t size() const { return len_; }
  // Fails if the bytes in front of the data were written to.
  void check() const {
    for (const uint8_t* p = all_.get(); p < data(); p++)
      if (*p != kPoison) fail("a write in front of a buffer");
  }

 private:
  static constexpr uint8_t kPoison = 0xa5;
  struct Free {
    void operator()(uint8_t* p) const { free(p); }
  };
  std::unique_ptr<uint8_t, Free> all_;
  size_t len_, skew_;
};

class Memory {
 public:
  uint8_t* add(const Bytes& b, size_t skew = 0) {
    list_.emplace_back(b, skew);
    return list_.back().data();
  }
  uint8_t* add(size_t len, size_t skew = 0) {
    list_.emplace_back(len, skew);
    return list_.back().data();
  }
  template <class T>
  T* array(const std::vector<T>& v) {
    const auto* p = reinterpret_cast<const uint8_t*>(v.data());
    return reinterpret_cast<T*>(add(Bytes(p, p + v.size() * sizeof(T))));
  }
  Bytes read(const void* p, size_t len) const {
    const auto* from = static_cast<const uint8_t*>(p);
    return Bytes(from, from + len);
  }
  void check() const {
    for (const Buffer& b : list_) b.check();
  }

 private:
  std::vector<Buffer> list_;
};

#define S4_LAUNCH(kernel, grid, block, ...) emulator::launch(grid, block, [&] { kernel(__VA_ARGS__); })

#include "jobs.h"

#include "foreign.h"

int main(int argc, char** argv) {
  if (argc == 2 && argv[1] == std::string("foreign")) return foreign::run();
  return run_jobs(argc, argv);
}
