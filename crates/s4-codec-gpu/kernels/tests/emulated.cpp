// The kernels, run by the emulator, against the reference: streams byte for byte, values back bit for
// bit, and damaged streams without a stray access (build with -fsanitize=address).
#include "../emulator.h"

#include "../rans.cu"
#include "reference.h"

#include <memory>
#include <random>

using reference::Bytes;

static int failures = 0;

#define CHECK(condition, ...)                            \
  do {                                                   \
    if (!(condition)) {                                  \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                               \
      printf("\n");                                      \
      failures++;                                        \
    }                                                    \
  } while (0)

// `len` bytes at an address that is `skew` above a multiple of 16. Nothing lies behind them, so that
// the address sanitizer sees any access there.
class Buffer {
 public:
  explicit Buffer(size_t len, size_t skew = 0) : len_(len), skew_(skew) {
    void* p = nullptr;
    if (posix_memalign(&p, 16, len + skew) != 0) abort();
    all_.reset(static_cast<uint8_t*>(p));
    memset(p, kPoison, len + skew);
  }
  explicit Buffer(const Bytes& b, size_t skew = 0) : Buffer(b.size(), skew) {
    if (!b.empty()) memcpy(data(), b.data(), b.size());
  }
  uint8_t* data() const { return all_.get() + skew_; }
  Bytes bytes() const { return Bytes(data(), data() + len_); }
  // Whether what lies in front is as it was.
  bool intact() const {
    return std::all_of(all_.get(), data(), [](uint8_t v) { return v == kPoison; });
  }

 private:
  static constexpr uint8_t kPoison = 0xa5;
  struct Free {
    void operator()(uint8_t* p) const { free(p); }
  };
  std::unique_ptr<uint8_t, Free> all_;
  size_t len_, skew_;
};

struct Encoded {
  Bytes stream, a, b;
};

struct Planes {
  Buffer a, b;
  Planes(int width, size_t n) : a(n), b(width == 4 ? 2 * n : 0) {}
  s4::RawPlanes raw() const { return {a.data(), b.data()}; }
};

// Encodes chunks of the values in one batch, as the engine does: slots, offsets, gather.
static std::vector<Encoded> encode(int width, const std::vector<Bytes>& chunks, size_t skew) {
  std::vector<s4::EncodeChunk> list;
  std::vector<Planes> planes;
  std::vector<Buffer> values;
  const uint32_t count = static_cast<uint32_t>(chunks.size());
  for (auto& c : chunks) {
    const uint32_t n = static_cast<uint32_t>(c.size() / width);
    planes.emplace_back(width, n);
    values.emplace_back(c, skew);
    list.push_back({values.back().data(), planes.back().raw(), n, 0});
  }
  const uint32_t threads = width == 2 ? s4::kThreads<2> : s4::kThreads<4>;
  Buffer slots(count * (width == 2 ? sizeof(s4::Slot<2>) : sizeof(s4::Slot<4>)));
  auto* slot2 = reinterpret_cast<s4::Slot<2>*>(slots.data());
  auto* slot4 = reinterpret_cast<s4::Slot<4>*>(slots.data());
  std::vector<uint32_t> lens(count);
  std::vector<unsigned long long> offsets(count + 1);
  emulator::launch(count, threads, [&] {
    width == 2 ? s4_rans_encode_w2(list.data(), slot2, lens.data())
               : s4_rans_encode_w4(list.data(), slot4, lens.data());
  });
  emulator::launch(1, s4::kScanThreads, [&] { s4_rans_offsets(lens.data(), offsets.data(), count); });
  Buffer packed(offsets[count]);
  emulator::launch(count, threads, [&] {
    width == 2 ? s4_rans_gather_w2(list.data(), slot2, offsets.data(), packed.data())
               : s4_rans_gather_w4(list.data(), slot4, offsets.data(), packed.data());
  });

  std::vector<Encoded> out;
  for (uint32_t i = 0; i < count; i++) {
    const uint8_t* p = packed.data() + offsets[i];
    out.push_back({Bytes(p, p + lens[i]), planes[i].a.bytes(), planes[i].b.bytes()});
    for (size_t k = lens[i]; k < offsets[i + 1] - offsets[i]; k++) CHECK(p[k] == 0, "padding");
  }
  return out;
}

// The planes as they are stored with a stream that carries `carried` bytes.
static Encoded stored(Encoded planes, size_t carried) {
  planes.a.resize(planes.a.size() - carried);
  return planes;
}

// Decodes one stream; `values` gets what came out.
static uint32_t decode(int width, const Bytes& stream, const Encoded& planes, uint32_t n, size_t skew,
                       Bytes* values) {
  Buffer in(stream), a(planes.a), b(planes.b), out(size_t(n) * width, skew);
  s4::DecodeChunk chunk{in.data(), {a.data(), b.data()}, out.data(), uint32_t(stream.size()), n,
                        uint32_t(planes.a.size()), 0};
  uint32_t status = ~0u;
  emulator::launch(1, width == 2 ? s4::kThreads<2> : s4::kThreads<4>, [&] {
    width == 2 ? s4_rans_decode_w2(&chunk, &status) : s4_rans_decode_w4(&chunk, &status);
  });
  CHECK(out.intact(), "a write in front of the values");
  *values = out.bytes();
  return status;
}

// ---- data ----

static std::mt19937 rng(1);

// `n` values whose plane E follows `draw` and whose other bits are noise.
static Bytes make_values(int width, size_t n, const std::function<uint8_t(size_t)>& draw) {
  Bytes out;
  for (size_t i = 0; i < n; i++) {
    const int bits = 8 * width;
    const uint64_t mask = (1ull << bits) - 1;
    uint64_t v = rng() & (mask >> 8) | uint64_t(draw(i)) << (bits - 8);
    reference::put(out, (v >> 1 | v << (bits - 1)) & mask, width);
  }
  return out;
}

struct Source {
  const char* name;
  std::function<uint8_t(size_t)> draw;
};

static uint8_t one_of(std::initializer_list<double> weights) {
  std::discrete_distribution<int> d(weights);
  return static_cast<uint8_t>(100 + 7 * d(rng));
}

static std::vector<Source> sources() {
  return {
      {"exponents",
       [](size_t) { return static_cast<uint8_t>(120 - std::min(119, std::geometric_distribution<int>(.45)(rng))); }},
      {"constant", [](size_t) { return uint8_t(7); }},
      {"noise", [](size_t) { return uint8_t(rng()); }},
      {"two", [](size_t) { return one_of({1, 1}); }},
      {"dominant 190", [](size_t) { return one_of({190, 66}); }},
      {"dominant 254", [](size_t) { return one_of({254, 2}); }},
      {"dominant 221", [](size_t) { return one_of({221, 20, 10, 3, 1, 1}); }},
      {"changing", [](size_t i) { return uint8_t(i < 16384 ? rng() : 3); }},
      {"rare", [](size_t) { return rng() % 500 ? one_of({9, 4, 2, 1}) : uint8_t(rng()); }},
      {"ramp", [](size_t i) { return uint8_t(i); }},
  };
}

// ---- tests ----

static void test_division() {
  for (uint32_t f = 1; f <= 255; f++) {
    const s4::Coder c = s4::make_coder(f, 0, false);
    const uint64_t end = uint64_t(f) << 24;
    for (int i = 0; i < 40000; i++) {
      const uint64_t top = i % 2 ? end : std::max<uint64_t>(rng() % end, 256);
      for (uint64_t x : {top - 1, top / f * f, top / f * f - 1, top - top / 1000 / f * f - 1}) {
        if (x == 0 || x >= end) continue;
        uint32_t state = static_cast<uint32_t>(x);
        s4::push<true>(state, c, s4::minus_freq(c));
        const uint32_t expected = static_cast<uint32_t>(x / f * 256 + x % f);
        if (state != expected) {
          CHECK(false, "f %u x %llu", f, static_cast<unsigned long long>(x));
          return;
        }
      }
      if (i % 2) break;
    }
  }
}

static void test_round_trip(int width) {
  const size_t most = width == 2 ? s4::kMaxChunk<2> : s4::kMaxChunk<4>;
  std::vector<size_t> sizes = {1, 8, 63, 64, 255, 256, 257, 1001, 8192, 8193, 16384, 16390, 40001, most};
  for (const Source& source : sources()) {
    if (source.name == std::string("two")) sizes.pop_back();  // the emulator is slow
    std::vector<Bytes> chunks;
    for (size_t n : sizes) chunks.push_back(make_values(width, n, source.draw));
    const size_t skew = rng() % 2 * width;
    const std::vector<Encoded> encoded = encode(width, chunks, skew);
    for (size_t i = 0; i < chunks.size(); i++) {
      const Bytes e = reference::plane(chunks[i], width, 0), a = reference::plane(chunks[i], width, 1);
      const Bytes stream = reference::encode(e, a), carry = reference::tail(a);
      const uint32_t n = static_cast<uint32_t>(sizes[i]);
      Bytes carried;
      CHECK(reference::decode(stream, &carried) == e, "%s %u", source.name, n);
      CHECK(carried == carry && carry.size() == s4::carried_bytes(n), "%s %u", source.name, n);
      CHECK(encoded[i].stream == (stream.size() < n ? stream : e), "%s %u", source.name, n);
      CHECK(encoded[i].a == a, "%s %u", source.name, n);
      if (width == 4) CHECK(encoded[i].b == reference::plane(chunks[i], width, 2), "%s %u", source.name, n);
      Bytes values;
      const Encoded planes = stored(encoded[i], carry.size());
      CHECK(decode(width, stream, planes, n, rng() % 2 * width, &values) == s4::kOk, "%s %u", source.name, n);
      CHECK(values == chunks[i], "%s %u", source.name, n);
    }
  }
}

// Streams that this encoder does not write but a decoder must read.
static void test_foreign_streams() {
  const Bytes values = make_values(2, 30000, sources()[0].draw), e = reference::plane(values, 2, 0);
  const Encoded planes{{}, reference::plane(values, 2, 1), {}};
  std::vector<reference::Table> tables(3);
  tables[0].escape = 256;  // every symbol raw
  tables[1] = tables[2] = reference::choose(reference::count(e.data(), e.size()), false);
  std::shuffle(tables[1].symbols.begin(), tables[1].symbols.end(), rng);
  uint32_t at = tables[1].escape;
  for (int s : tables[1].symbols) tables[1].start[s] = at, at += tables[1].freq[s];
  for (size_t i = 0; i < tables.size(); i++)
    for (int log2 : {12, 14, 15})
      for (const Bytes& carry : {Bytes(), reference::tail(planes.a, log2)}) {
        const Bytes stream = reference::encode(e, tables[i], carry, log2);
        Bytes out;
        const uint32_t status = decode(2, stream, stored(planes, carry.size()), 30000, 0, &out);
        CHECK(status == s4::kOk, "table %zu, segments %d, carry %zu", i, log2, carry.size());
        CHECK(out == values, "table %zu, segments %d, carry %zu", i, log2, carry.size());
      }
}

// More segments than the block has warps, and more than a decoder takes.
static void test_many_segments() {
  for (uint32_t n : {262144u, 262145u}) {
    const Bytes values = make_values(4, n, sources()[0].draw), e = reference::plane(values, 4, 0);
    const Encoded planes{{}, reference::plane(values, 4, 1), reference::plane(values, 4, 2)};
    const Bytes carry = reference::tail(planes.a, 12);
    const reference::Table table = reference::choose(reference::count(e.data(), e.size()), false);
    Bytes out;
    const Bytes stream = reference::encode(e, table, carry, 12);
    const uint32_t status = decode(4, stream, stored(planes, carry.size()), n, 0, &out);
    CHECK(status == (n <= 262144 ? s4::kOk : s4::kUnsupported), "%u values", n);
    CHECK((out == values) == (n <= 262144), "%u values", n);
  }
}

// States that end elsewhere than the header says, and more to carry than there are bytes.
static void test_wrong_carry() {
  for (uint32_t n : {63u, 64u, 20000u}) {
    const Bytes values = make_values(2, n, sources()[0].draw), e = reference::plane(values, 2, 0);
    const Encoded planes{{}, reference::plane(values, 2, 1), {}};
    const reference::Table table = reference::choose(reference::count(e.data(), e.size()), n <= 8192);
    Bytes carry(reference::carry_len(n)), out;
    Bytes plain = reference::encode(e, table, {}), carrying = reference::encode(e, table, carry);
    CHECK(decode(2, plain, planes, n, 0, &out) == s4::kOk && out == values, "%u values", n);
    CHECK(decode(2, carrying, planes, n, 0, &out) == s4::kCorrupt, "%u values", n);
    if (n >= carry.size())
      CHECK(decode(2, carrying, stored(planes, carry.size()), n, 0, &out) == s4::kOk, "%u values", n);
    carry[carry.size() - 1] = 1;
    carrying = reference::encode(e, table, carry);
    carrying[7] = 0;
    CHECK(decode(2, carrying, planes, n, 0, &out) == s4::kCorrupt, "%u values", n);
    plain[7] = 4;
    CHECK(decode(2, plain, planes, n, 0, &out) == s4::kUnsupported, "%u values", n);
  }
}

static void test_damaged_streams() {
  const uint32_t n = 18000;
  const Bytes values = make_values(2, n, sources()[8].draw), e = reference::plane(values, 2, 0);
  const Bytes a = reference::plane(values, 2, 1), stream = reference::encode(e, a);
  const Encoded planes{{}, Bytes(a.begin(), a.end() - reference::tail(a).size()), {}};
  Bytes out;
  const size_t len = stream.size();
  for (size_t cut : {size_t{0}, size_t{7}, size_t{11}, size_t{20}, size_t{60}, size_t{300}, len - 2, len - 1}) {
    const Bytes shorter(stream.begin(), stream.begin() + cut);
    CHECK(decode(2, shorter, planes, n, 0, &out) == s4::kCorrupt, "cut at %zu", cut);
  }
  int seen = 0;
  for (int i = 0; i < 150; i++) {
    Bytes bad = stream;
    const size_t at = i < 60 ? i : rng() % bad.size();
    bad[at] ^= 1 << (rng() % 8);
    const uint32_t status = decode(2, bad, planes, n, 0, &out);
    CHECK(status == s4::kOk || status == s4::kCorrupt || status == s4::kUnsupported, "status %u", status);
    seen += status != s4::kOk;
    if (i < 8) CHECK(status != s4::kOk, "header byte %d", i);
  }
  CHECK(seen > 120, "only %d of 150 damaged streams were refused", seen);
  for (int i = 0; i < 20; i++) {  // noise behind a sound head
    Bytes bad = stream;
    for (size_t k = 80; k < bad.size(); k++) bad[k] = uint8_t(rng() % (i + 1) * 37);
    CHECK(decode(2, bad, planes, n, 0, &out) != s4::kOk, "noise %d", i);
  }
}

int main() {
  test_division();
  test_round_trip(2);
  test_round_trip(4);
  test_foreign_streams();
  test_many_segments();
  test_wrong_carry();
  test_damaged_streams();
  printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return failures != 0;
}
