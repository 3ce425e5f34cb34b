// One chunk through the decoding kernels, run by the emulator. Every buffer is just as long as abi.h asks
// for, so that an address sanitizer sees what lies outside.
#include "emulator.h"

#include "s4.cu"

#include <memory>

namespace {

struct Free {
  void operator()(uint8_t* p) const { free(p); }
};

// `len` bytes, 16-byte aligned, a copy of `from` if there is one.
std::unique_ptr<uint8_t, Free> buffer(size_t len, const uint8_t* from = nullptr, size_t given = 0) {
  void* p = nullptr;
  if (posix_memalign(&p, 16, len ? len : 1) != 0) abort();
  memset(p, 0xa5, len);
  if (from) memcpy(p, from, given);
  return std::unique_ptr<uint8_t, Free>(static_cast<uint8_t*>(p));
}

}  // namespace

// Decodes the chunk that `given` describes, with lengths and places of its own; returns its status, and its
// values in `values`. `kind` is 2 or 4 for the fused kernels, otherwise 0; `tables` is a number.
extern "C" uint32_t s4_fuzz_decode(const s4::DecodeChunk* given, uint32_t kind, uint32_t tables,
                                   uint8_t* values) {
  s4::DecodeChunk c = *given;
  const size_t bytes = size_t(c.n) * c.width;
  const size_t shared = tables * sizeof(s4::SharedTable);
  auto table = buffer(shared, reinterpret_cast<const uint8_t*>(c.tables[0].at), shared);
  auto frame = buffer(s4::round_up64(c.frame_len, 16), c.frame, c.frame_len);
  const uint8_t*& from = c.inputs[s4::kParent];
  auto parent = buffer(bytes, from, from ? bytes : 0);
  auto out = buffer(bytes);
  auto scratch = buffer(kind == 0 ? s4::composed_decode_scratch(c.n, c.width, c.frame_len) : 0);
  for (uint32_t i = 0; i < s4::kMaxPlanes; i++)
    c.tables[i] = {i < tables ? reinterpret_cast<s4::SharedTable*>(table.get()) + i : nullptr, i < tables, 0};
  c.frame = frame.get();
  from = from ? parent.get() : nullptr;
  c.values = out.get();
  c.scratch = scratch.get();
  s4::u32 status = s4::kOk;
  emulator::launch(1, s4::kCrcThreads, [&] { s4_check_frames(&c, &status); });
  if (kind == 2) emulator::launch(1, s4::kFusedThreads2, [&] { s4_decode_fused_w2(&c, &status); });
  else if (kind == 4) emulator::launch(1, s4::kFusedThreads4, [&] { s4_decode_fused_w4(&c, &status); });
  else emulator::launch(1, s4::kComposedThreads, [&] { s4_decode_composed(&c, &status); });
  emulator::launch(1, s4::kCrcThreads, [&] { s4_check_values(&c, &status); });
  memcpy(values, out.get(), bytes);
  return status;
}
