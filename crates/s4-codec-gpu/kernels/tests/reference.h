// The `rans` bitstream (docs/codecs/rans.md) for P = 8, one table in the stream: an encoder and a
// decoder, as simple as possible, to compare the kernels with. The decoder trusts its input.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace reference {

using Bytes = std::vector<uint8_t>;

struct Table {
  uint32_t escape = 0;
  std::vector<int> symbols;  // ascending frequency
  uint32_t freq[256] = {}, start[256] = {};
};

inline std::vector<uint32_t> count(const uint8_t* s, size_t n) {
  std::vector<uint32_t> counts(256);
  for (size_t i = 0; i < n; i++) {
    const size_t window = i / 512, from = 64 * (5 * window % 8);
    if (n <= 8192 || (i % 512 >= from && i % 512 < from + 64)) counts[s[i]]++;
  }
  return counts;
}

inline Table choose(std::vector<uint32_t> counts, bool all) {
  Table t;
  uint64_t n = 0, dropped = 0, m = 0, kept = 0;
  for (uint64_t c : counts) n += c;
  for (auto& c : counts) {
    if (c > 0 && uint64_t(c) * 256 * 5 < n) dropped += c, c = 0;
    kept += c > 0;
  }
  if (!all || dropped > 0) t.escape = std::max<uint64_t>(1, (256 * dropped + n / 2) / n);
  for (; kept > 256 - t.escape; kept--) {
    int rarest = -1;
    for (int s = 255; s >= 0; s--)
      if (counts[s] && (rarest < 0 || counts[s] < counts[rarest])) rarest = s;
    counts[rarest] = 0;
  }
  for (uint64_t c : counts) m += c;
  const int64_t total = 256 - t.escape;
  int64_t sum = 0;
  for (int s = 0; s < 256; s++) {
    if (!counts[s]) continue;
    t.freq[s] = std::max<uint64_t>(1, (2 * counts[s] * total + m) / (2 * m));
    sum += t.freq[s];
  }
  for (; sum < total; sum++) {
    int best = -1;
    auto key = [&](int s) { return uint64_t(counts[s]) * 4096 / (2 * t.freq[s] + 1); };
    for (int s = 0; s < 256; s++)
      if (t.freq[s] && (best < 0 || key(s) > key(best))) best = s;
    t.freq[best]++;
  }
  for (; sum > total; sum--) {
    int best = -1;
    auto key = [&](int s) { return uint64_t(counts[s]) * 4096 / (2 * t.freq[s] - 1); };
    for (int s = 0; s < 256; s++)
      if (t.freq[s] > 1 && (best < 0 || key(s) < key(best))) best = s;
    t.freq[best]--;
  }
  for (auto& f : t.freq)
    if (f == 256) f = 255, t.escape = 1;
  uint32_t at = t.escape;
  for (uint32_t f = 1; f < 256; f++)
    for (int s = 0; s < 256; s++)
      if (t.freq[s] == f) t.symbols.push_back(s), t.start[s] = at, at += f;
  return t;
}

// One segment: its states and words. `carry`: 64 bytes or null.
inline Bytes encode_segment(const uint8_t* s, size_t n, const Table& t, const uint8_t* carry) {
  const size_t blocks = (n + 255) / 256;
  std::vector<uint8_t> padded(s, s + n);
  padded.resize(blocks * 256, t.symbols.empty() ? 0 : uint8_t(t.symbols.back()));
  std::vector<uint32_t> x(32, 1 << 16);
  for (int l = 0; carry && l < 32; l++) x[l] += carry[2 * l] + carry[2 * l + 1] * 256;
  std::vector<uint16_t> words;  // in the order of emission
  auto emit = [&](uint32_t& state, uint64_t limit) {
    if (state >= limit) words.push_back(uint16_t(state)), state >>= 16;
  };
  auto freq = [&](uint8_t v) { return t.freq[v] ? t.freq[v] : t.escape; };
  auto code = [&](uint32_t& state, uint8_t v) {
    const uint32_t f = freq(v), start = t.freq[v] ? t.start[v] : 0;
    state = (state / f << 8) + start + state % f;
  };
  for (size_t b = blocks; b-- > 0;) {
    const uint8_t* p = padded.data() + 256 * b;
    std::vector<std::vector<uint8_t>> escapes(32);
    for (int i = 0; i < 256; i++)
      if (!t.freq[p[i]]) escapes[i / 8].push_back(p[i]);
    for (size_t round = 8; round-- > 0;)
      for (int l = 31; l >= 0; l--)
        if (escapes[l].size() > round) {
          emit(x[l], 1 << 24);
          x[l] = x[l] << 8 | escapes[l][round];
        }
    for (int k = 6; k >= 0; k -= 2) {
      for (int l = 31; l >= 0; l--)
        emit(x[l], uint64_t(freq(p[8 * l + k])) * freq(p[8 * l + k + 1]) << 16);
      for (int l = 0; l < 32; l++) code(x[l], p[8 * l + k + 1]), code(x[l], p[8 * l + k]);
    }
  }
  Bytes out(128 + 2 * words.size());
  memcpy(out.data(), x.data(), 128);
  for (size_t i = 0; i < words.size(); i++)
    memcpy(&out[128 + 2 * i], &words[words.size() - 1 - i], 2);
  return out;
}

inline void put(Bytes& out, uint64_t v, int bytes) {
  for (int i = 0; i < bytes; i++) out.push_back(uint8_t(v >> (8 * i)));
}

inline void pad(Bytes& out, size_t to) { out.resize((out.size() + to - 1) / to * to); }

// How many bytes a stream of `n` symbols can carry.
inline size_t carry_len(size_t n, int segment_log2 = 14) {
  return 64 * ((n + (1 << segment_log2) - 1) >> segment_log2);
}

// `carry`: nothing, or `carry_len` bytes.
inline Bytes encode(const Bytes& s, const Table& t, const Bytes& carry, int segment_log2 = 14) {
  const size_t n = s.size();
  Bytes out;
  put(out, n, 4);
  for (int v : {5, segment_log2, 1, carry.empty() ? 0 : 2}) put(out, v, 1);
  put(out, t.symbols.size(), 2);
  put(out, t.escape, 2);
  for (int v : t.symbols) put(out, v, 1);
  for (int v : t.symbols) put(out, t.freq[v], 1);
  const size_t size = size_t(1) << segment_log2;
  std::vector<Bytes> segments;
  for (size_t at = 0; at < n; at += size) {
    const uint8_t* carried = carry.empty() ? nullptr : &carry[64 * (at / size)];
    segments.push_back(encode_segment(&s[at], std::min(size, n - at), t, carried));
  }
  for (auto& seg : segments) put(out, (seg.size() - 128) / 2, 2);
  for (auto& seg : segments) {
    pad(out, 4);
    out.insert(out.end(), seg.begin(), seg.end());
  }
  return out;
}

// The end of plane A that plane E's stream carries; empty if plane A is too short.
inline Bytes tail(const Bytes& a, int segment_log2 = 14) {
  const size_t len = carry_len(a.size(), segment_log2);
  return len <= a.size() ? Bytes(a.end() - len, a.end()) : Bytes();
}

inline Bytes encode(const Bytes& e, const Bytes& a) {
  return encode(e, choose(count(e.data(), e.size()), e.size() <= 8192), tail(a));
}

// Decodes a stream that is known to be valid; appends what it carries to `carry`.
inline Bytes decode(const Bytes& in, Bytes* carry) {
  auto get = [&](size_t at, int bytes) {
    uint32_t v = 0;
    memcpy(&v, &in[at], bytes);
    return v;
  };
  const size_t n = get(0, 4), size = size_t(1) << in[5], kept = get(8, 2), escape = get(10, 2);
  struct Slot {
    uint32_t freq, start, symbol;
    bool escape;
  } slots[256];
  size_t at = 0;
  for (; at < escape; at++) slots[at] = {uint32_t(escape), 0, 0, true};
  for (size_t i = 0; i < kept; i++) {
    const uint32_t start = uint32_t(at), f = in[12 + kept + i];
    for (; at < start + f; at++) slots[at] = {f, start, in[12 + i], false};
  }
  const size_t segments = (n + size - 1) / size, counts = 12 + 2 * kept;
  Bytes out;
  at = counts + 2 * segments;
  for (size_t i = 0; i < segments; i++) {
    at = (at + 3) / 4 * 4;
    uint32_t x[32];
    memcpy(x, &in[at], 128);
    size_t word = at + 128;
    auto refill = [&] {
      for (auto& state : x)
        if (state < 1 << 16) state = state << 16 | get(word, 2), word += 2;
    };
    const size_t here = std::min(size, n - i * size);
    for (size_t b = 0; b < (here + 255) / 256; b++) {
      uint8_t block[256];
      std::vector<int> escapes[32];
      for (int k = 0; k < 8; k++) {
        for (int l = 0; l < 32; l++) {
          const Slot& s = slots[x[l] % 256];
          x[l] = s.freq * (x[l] >> 8) + x[l] % 256 - s.start;
          block[8 * l + k] = uint8_t(s.symbol);
          if (s.escape) escapes[l].push_back(8 * l + k);
        }
        if (k % 2) refill();
      }
      for (size_t round = 0; round < 8; round++) {
        for (int l = 0; l < 32; l++)
          if (escapes[l].size() > round) block[escapes[l][round]] = uint8_t(x[l]), x[l] >>= 8;
        refill();
      }
      out.insert(out.end(), block, block + std::min<size_t>(256, here - 256 * b));
    }
    for (uint32_t state : x)
      if (in[7] & 2) put(*carry, state & 0xffff, 2);
    at += 128 + 2 * get(counts + 2 * i, 2);
  }
  return out;
}

// Plane `plane` (0 = E, 1 = A, 2 = B) of values of `width` bytes.
inline Bytes plane(const Bytes& values, int width, int plane) {
  Bytes out;
  for (size_t i = 0; i < values.size(); i += width) {
    uint64_t v = 0;
    memcpy(&v, &values[i], width);
    v = v << 1 | v >> (8 * width - 1);
    if (plane == 0) put(out, v >> (8 * width - 8), 1);
    if (plane == 1) put(out, v >> (8 * width - 16), 1);
    if (plane == 2) put(out, v, width - 2);
  }
  return out;
}

}  // namespace reference
