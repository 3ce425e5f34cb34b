// Streams that these encoders do not write but a decoder must read or refuse: other segment sizes, lone
// escapes, tables in another order, final states that contradict the header. Also tests the multiplication that
// replaces division in the fused encoder. Emulator only; include it after jobs.h.
#pragma once

#include <algorithm>
#include <random>

#include "reference.h"

namespace foreign {

static std::mt19937 rng(1);

static void check(bool condition, const std::string& what) {
  if (!condition) fail("foreign streams: " + what);
}

// `n` values whose plane E is skewed and whose other bits are noise.
static Bytes values_of(int width, size_t n) {
  std::geometric_distribution<int> d(.45);
  Bytes out;
  for (size_t i = 0; i < n; i++) {
    const int bits = 8 * width;
    const uint64_t mask = (1ull << bits) - 1, e = uint64_t(120 - std::min(119, d(rng)));
    const uint64_t v = (rng() & (mask >> 8)) | e << (bits - 8);
    reference::put(out, (v >> 1 | v << (bits - 1)) & mask, width);
  }
  return out;
}

// Decodes plane E's stream, with the other planes raw and plane A short of its last `carried` bytes.
static uint32_t decode(bool fused, int width, const Bytes& values, const Bytes& stream, size_t carried, Bytes* out) {
  const uint32_t n = static_cast<uint32_t>(values.size() / width);
  std::vector<Bytes> parts = {stream, reference::plane(values, width, 1)};
  parts[1].resize(parts[1].size() - carried);
  if (width == 4) parts.push_back(reference::plane(values, width, 2));
  s4::DecodeChunk c{};
  Bytes frame((8 * parts.size() + 15) / 16 * 16);
  for (size_t i = 0; i < parts.size(); i++) {
    reference::pad(frame, 16);
    c.streams[i] = {static_cast<uint32_t>(frame.size()), static_cast<uint32_t>(parts[i].size()),
                    i == 0 ? s4::u8{s4::kRans} : s4::u8{s4::kRaw}, i == 0 ? s4::u8{8} : s4::u8{0}, 0};
    frame.insert(frame.end(), parts[i].begin(), parts[i].end());
  }
  Memory memory;
  Bytes readable = frame;
  readable.resize(s4::round_up64(frame.size(), 16), 0xa5);
  c.frame = memory.add(readable);
  c.values = memory.add(values.size());
  c.scratch = memory.add(s4::composed_decode_scratch(n, width, frame.size()));
  c.frame_len = static_cast<uint32_t>(frame.size());
  c.n = n;
  c.width = static_cast<s4::u8>(width);
  c.layout = s4::kFields;
  c.planes = static_cast<s4::u8>(parts.size());
  uint32_t status = s4::kOk;
  const s4::DecodeChunk* p = &c;
  if (!fused) S4_LAUNCH(s4_decode_composed, 1, s4::kComposedThreads, p, &status);
  else if (width == 2) S4_LAUNCH(s4_decode_fused_w2, 1, s4::kFusedThreads2, p, &status);
  else S4_LAUNCH(s4_decode_fused_w4, 1, s4::kFusedThreads4, p, &status);
  memory.check();
  *out = memory.read(c.values, values.size());
  return status;
}

static reference::Table table_of(const Bytes& e) {
  return reference::choose(reference::count(e.data(), e.size()), e.size() <= 8192);
}

static void tables_and_segments(bool fused) {
  const Bytes values = values_of(2, 30000), e = reference::plane(values, 2, 0), a = reference::plane(values, 2, 1);
  std::vector<reference::Table> tables(3);
  tables[0].escape = 256;  // every symbol is an escape
  tables[1] = tables[2] = table_of(e);
  std::shuffle(tables[1].symbols.begin(), tables[1].symbols.end(), rng);
  uint32_t at = tables[1].escape;
  for (int s : tables[1].symbols) tables[1].start[s] = at, at += tables[1].freq[s];
  for (const auto& table : tables)
    for (int log2 : {12, 14, 15})
      for (const Bytes& carry : {Bytes(), reference::tail(a, log2)}) {
        Bytes out;
        const Bytes stream = reference::encode(e, table, carry, log2);
        check(decode(fused, 2, values, stream, carry.size(), &out) == s4::kOk && out == values, "tables, segments");
      }
}

// More segments than the block has warps, and more values than the fused decoder accepts.
static void many_segments(bool fused) {
  for (uint32_t n : {262144u, 262145u}) {
    const Bytes values = values_of(4, n), e = reference::plane(values, 4, 0), a = reference::plane(values, 4, 1);
    const Bytes carry = reference::tail(a, 12);
    Bytes out;
    const uint32_t status =
        decode(fused, 4, values, reference::encode(e, table_of(e), carry, 12), carry.size(), &out);
    const bool takes = !fused || n <= s4::kFusedDecodeValues;
    check(status == (takes ? s4::kOk : s4::kUnsupported) && (out == values) == takes, "many segments");
  }
}

static void wrong_carry(bool fused) {
  for (uint32_t n : {63u, 64u, 20000u}) {
    const Bytes values = values_of(2, n), e = reference::plane(values, 2, 0);
    const reference::Table table = table_of(e);
    Bytes carry(reference::carry_len(n)), out;
    Bytes plain = reference::encode(e, table, {}), carrying = reference::encode(e, table, carry);
    check(decode(fused, 2, values, plain, 0, &out) == s4::kOk && out == values, "nothing carried");
    check(decode(fused, 2, values, carrying, 0, &out) == s4::kCorrupt, "carried, and stored as well");
    carry[carry.size() - 1] = 1;
    carrying = reference::encode(e, table, carry);
    carrying[7] = 0;
    check(decode(fused, 2, values, carrying, 0, &out) == s4::kCorrupt, "states that do not end at 2^16");
    plain[7] = 4;
    check(decode(fused, 2, values, plain, 0, &out) == s4::kUnsupported, "an unknown flag");
  }
}

// Compares the fused encoder's division by multiplication with real division, on both sides of multiples of f.
static void division() {
  for (uint32_t f = 1; f <= 256; f++) {
    const s4::Coder c = s4::make_coder(f, 0, false);
    const uint64_t end = uint64_t(f) << 24;
    for (int i = 0; i < 20000; i++) {
      const uint64_t top = i == 0 ? end : std::max<uint64_t>(rng() % end, 256);
      for (uint64_t x : {top - 1, top / f * f, top / f * f - 1}) {
        if (x == 0 || x >= end || x > ~0u) continue;
        uint32_t state = static_cast<uint32_t>(x);
        s4::push<true>(state, c, s4::minus_freq(c));
        check(state == static_cast<uint32_t>(x / f * 256 + x % f), "division by " + std::to_string(f));
      }
    }
  }
}

static int run() {
  division();
  for (bool fused : {false, true}) {
    tables_and_segments(fused);
    many_segments(fused);
    wrong_carry(fused);
  }
  return 0;
}

}  // namespace foreign
