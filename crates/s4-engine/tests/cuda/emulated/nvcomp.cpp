// A stand-in for nvCOMP's library, beside the emulated driver: the calls of its batched interface that the
// bindings load, on memory that is the host's. Every format is the same and no real one: up to 16 different
// bytes are packed two to a byte, others are stored. What it is given is looked at: alignment, the room for
// outputs, scratch memory, sizes of blocks.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int kSuccess = 0, kCannotDecompress = 12, kTooSmall = 15;
constexpr size_t kScratch = 1000;  // for each block
constexpr size_t kHeader = 18;

struct Options {
  char bytes[64];
};
struct Alignments {
  size_t input, output, scratch;
};
struct Properties {
  uint32_t version, cudart;
};

void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "emulated nvCOMP: %s\n", what);
  abort();
}

size_t bound(size_t n) { return n + kHeader; }

// Format, number of symbols, the symbols, then what they are packed to.
size_t encode(uint8_t format, const uint8_t* from, size_t n, uint8_t* to) {
  int code[256];
  memset(code, -1, sizeof code);
  int count = 0;
  memset(to, 0, kHeader);
  to[0] = format;
  for (size_t i = 0; i < n && count <= 16; i++) {
    if (code[from[i]] >= 0) continue;
    if (count < 16) to[2 + count] = from[i];
    code[from[i]] = count++;
  }
  if (count > 16) {
    memset(to + 1, 0, kHeader - 1);
    memcpy(to + kHeader, from, n);
    return kHeader + n;
  }
  to[1] = static_cast<uint8_t>(count);
  memset(to + kHeader, 0, (n + 1) / 2);
  for (size_t i = 0; i < n; i++) to[kHeader + i / 2] |= static_cast<uint8_t>(code[from[i]] << (i % 2 * 4));
  return kHeader + (n + 1) / 2;
}

int decode(uint8_t format, const uint8_t* from, size_t len, uint8_t* to, size_t room, size_t* n) {
  if (len < kHeader || from[0] != format) return kCannotDecompress;
  const bool packed = from[1] > 0;
  const size_t most = packed ? 2 * (len - kHeader) : len - kHeader;
  if (most < room) return kCannotDecompress;
  if (most > room + 1) return kTooSmall;
  for (size_t i = 0; i < room; i++)
    to[i] = packed ? from[2 + (from[kHeader + i / 2] >> (i % 2 * 4) & 15)] : from[kHeader + i];
  *n = room;
  return kSuccess;
}

int compress(uint8_t format, const uint8_t* const* inputs, const size_t* sizes, size_t max, size_t count,
             void* scratch, size_t scratch_bytes, uint8_t* const* outputs, size_t* coded, int* statuses) {
  require(count > 0 && scratch_bytes >= kScratch * count, "scratch memory");
  memset(scratch, 0x77, kScratch * count);
  for (size_t i = 0; i < count; i++) {
    require(sizes[i] > 0 && sizes[i] <= max, "the size of a block");
    require((reinterpret_cast<uint64_t>(inputs[i]) | reinterpret_cast<uint64_t>(outputs[i])) % 16 == 0, "alignment");
    // All of the room may be written to.
    memset(outputs[i], 0x99, bound(max));
    coded[i] = encode(format, inputs[i], sizes[i], outputs[i]);
    statuses[i] = kSuccess;
  }
  return kSuccess;
}

int decompress(uint8_t format, const uint8_t* const* inputs, const size_t* sizes, const size_t* room,
               size_t* decoded, size_t count, void* scratch, size_t scratch_bytes, uint8_t* const* outputs,
               int* statuses) {
  require(count > 0 && scratch_bytes >= kScratch * count, "scratch memory");
  memset(scratch, 0x77, kScratch * count);
  for (size_t i = 0; i < count; i++) {
    require((reinterpret_cast<uint64_t>(inputs[i]) | reinterpret_cast<uint64_t>(outputs[i])) % 16 == 0, "alignment");
    decoded[i] = 0;
    statuses[i] = decode(format, inputs[i], sizes[i], outputs[i], room[i], &decoded[i]);
  }
  return kSuccess;
}

int alignments(Alignments* a) { return *a = {16, 16, 8}, kSuccess; }
int scratch_of(size_t count, size_t* bytes) { return *bytes = kScratch * count, kSuccess; }

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) int

CALL nvcompGetProperties(Properties* p) { return *p = {6000, 12000}, kSuccess; }

#define FORMAT(name, id)                                                                                          \
  CALL nvcompBatched##name##CompressGetRequiredAlignments(Options, Alignments* a) { return alignments(a); }       \
  CALL nvcompBatched##name##DecompressGetRequiredAlignments(Options, Alignments* a) { return alignments(a); }     \
  CALL nvcompBatched##name##CompressGetTempSize(size_t n, size_t, Options, size_t* bytes, size_t, void*) {        \
    return scratch_of(n, bytes);                                                                                  \
  }                                                                                                               \
  CALL nvcompBatched##name##DecompressGetTempSize(size_t n, size_t, Options, size_t* bytes, size_t, void*) {      \
    return scratch_of(n, bytes);                                                                                  \
  }                                                                                                               \
  CALL nvcompBatched##name##CompressGetMaxOutputChunkSize(size_t n, Options, size_t* bytes) {                     \
    return *bytes = bound(n), kSuccess;                                                                           \
  }                                                                                                               \
  CALL nvcompBatched##name##CompressAsync(const uint8_t* const* in, const size_t* sizes, size_t max, size_t n,    \
                                          void* scratch, size_t bytes, uint8_t* const* out, size_t* coded,        \
                                          Options, int* statuses, void*) {                                        \
    return compress(id, in, sizes, max, n, scratch, bytes, out, coded, statuses);                                 \
  }                                                                                                               \
  CALL nvcompBatched##name##DecompressAsync(const uint8_t* const* in, const size_t* sizes, const size_t* room,    \
                                            size_t* decoded, size_t n, void* scratch, size_t bytes,               \
                                            uint8_t* const* out, Options, int* statuses, void*) {                 \
    return decompress(id, in, sizes, room, decoded, n, scratch, bytes, out, statuses);                            \
  }

FORMAT(ANS, 1)
FORMAT(Bitcomp, 2)
FORMAT(Cascaded, 3)
FORMAT(Deflate, 4)
FORMAT(Gdeflate, 5)
FORMAT(LZ4, 6)
FORMAT(Snappy, 7)
FORMAT(Zstd, 8)
