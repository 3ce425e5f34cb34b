// Batches of chunks from a file, through the kernels, into a file: for the emulator (emulated.cpp) and for a
// GPU (device.cu), which differ in where memory is and in how a kernel is launched.
//
// A file of jobs holds batches, each an operation (`u32`: 1 encode, 2 decode, 3 checksums, 4 copies, 5 copies of
// rows), a count (`u32`) and that many items (the structures below). The answers are the results, in order.
#pragma once

#include "jobs_io.h"

// What emulated.cpp and device.cu must define:
//   Memory      buffers, each a separate allocation, `skew` bytes above a multiple of 16:
//                 u8* add(bytes, skew), u8* add(len, skew), Bytes read(address, len), void check()
//   S4_LAUNCH(kernel, grid, block, arguments...)

// Runs `body(first, count)` for each run of chunks of one kind.
template <class Body>
static void for_runs(const std::vector<uint32_t>& kinds, const Body& body) {
  for (size_t i = 0; i < kinds.size();) {
    size_t end = i;
    while (end < kinds.size() && kinds[end] == kinds[i]) end++;
    body(kinds[i], i, static_cast<uint32_t>(end - i));
    i = end;
  }
}

// Reads each plane's tables, `counts[i]` of them for plane i.
static void add_tables(Input& in, Memory& pool, const uint8_t* counts, s4::TableSet* to) {
  for (uint32_t i = 0; i < s4::kMaxPlanes; i++) {
    if (counts[i] == 0) continue;
    to[i].at = reinterpret_cast<s4::SharedTable*>(pool.add(in.bytes(counts[i] * sizeof(s4::SharedTable))));
    to[i].count = counts[i];
  }
}

// ---- encode ----

struct EncodeItem {
  uint8_t kind;  // 2, 4: fused; 0: composed; 1: residual; 8, 9: those with contexts in memory; 10: predicted;
                 // 11: update
  uint8_t width, layout, residual;
  uint8_t coding[s4::kMaxPlanes];
  uint8_t tables[s4::kMaxPlanes];  // number of tables of each plane
  uint32_t n, flags, skew;
  uint8_t contexts, prediction, sparse, class_top, class_shift, reserved[3];
  uint32_t input_len, more_len, columns_len;  // bytes of the inputs
  // then: tables, values, the inputs; with kind 11, `Update`; with prediction kPredictStep, `Step`
};
static_assert(sizeof(EncodeItem) == 52, "");

// Reads the inputs of a chunk.
template <class Chunk, class Item>
static void add_inputs(Input& in, Memory& pool, const Item& item, Chunk& c) {
  if (item.input_len > 0) c.inputs[s4::kParent] = pool.add(in.bytes(item.input_len), item.skew * 3 % 16);
  // Moments may have any alignment.
  const bool step = item.kind == 10 && item.prediction == s4::kPredictStep;
  const uint32_t skew = item.kind == 11 || step ? item.skew % 16 : 0;
  if (item.more_len > 0) c.inputs[s4::kOffsets] = pool.add(in.bytes(item.more_len), skew);
  if (item.columns_len > 0) c.inputs[s4::kColumns] = pool.add(in.bytes(item.columns_len), skew * 5 % 16);
  if (item.kind == 11) c.inputs[s4::kUpdate] = pool.add(in.bytes(sizeof(s4::Update)));
  if (step) c.inputs[s4::kFactors] = pool.add(in.bytes(sizeof(s4::Step)));
  c.contexts = item.contexts;
  c.prediction = item.prediction;
  c.class_top = item.class_top;
  c.class_shift = item.class_shift;
}

// The exact size, so that what is written behind it is found.
static uint64_t scratch_of(const EncodeItem& item) {
  const uint64_t n = item.n, width = item.width;
  const uint64_t planes = item.flags & s4::kKeepPlanes ? s4::round_up64(n * (width - 1), 32) : 0;
  if (item.kind == 2) return s4::kFusedScratch2 + planes;
  if (item.kind == 4) return s4::kFusedScratch4 + planes;
  uint64_t coded = 0;
  for (uint32_t i = 0; i < s4::planes_of(item.layout, item.width); i++)
    if (item.coding[i] != s4::kCodeRaw)
      coded = std::max<uint64_t>(coded, s4::plane_size(item.layout, item.width, item.n, i));
  if (item.kind == 1) return s4::residual_encode_scratch(n, width, coded);
  if (item.kind >= 8) return s4::predicted_encode_scratch(n, width, coded, item.contexts);
  return s4::composed_encode_scratch(n, width, coded);
}

static s4::EncodeChunk read_encode(Input& in, Memory& pool, std::vector<uint32_t>& kinds) {
  const auto item = in.get<EncodeItem>();
  kinds.push_back(item.kind);
  s4::EncodeChunk c{};
  const size_t bytes = size_t(item.n) * item.width;
  add_tables(in, pool, item.tables, c.tables);
  c.values = pool.add(in.bytes(bytes), item.skew);
  add_inputs(in, pool, item, c);
  c.sparse = item.sparse;
  c.scratch = pool.add(scratch_of(item));
  c.n = item.n;
  c.width = item.width;
  c.layout = item.layout;
  c.residual = item.residual;
  memcpy(c.coding, item.coding, sizeof c.coding);
  c.flags = item.flags;
  return c;
}

static void encode(Input& in, Output& out, uint32_t count) {
  Memory pool;
  std::vector<uint32_t> kinds;
  std::vector<s4::EncodeChunk> chunks;
  uint64_t capacity = 0;
  for (uint32_t i = 0; i < count; i++) {
    chunks.push_back(read_encode(in, pool, kinds));
    capacity += s4::round_up64(uint64_t(chunks[i].n) * chunks[i].width, 16);
  }
  auto* all = pool.array(chunks);
  auto* results = reinterpret_cast<s4::EncodeResult*>(pool.add(count * sizeof(s4::EncodeResult)));
  auto* total = reinterpret_cast<s4::u64*>(pool.add(sizeof(s4::u64)));
  uint8_t* to = pool.add(capacity);
  for_runs(kinds, [&](uint32_t kind, size_t first, uint32_t n) {
    const auto* c = all + first;
    auto* r = results + first;
    if (kind == 2) S4_LAUNCH(s4_encode_fused_w2, n, s4::kFusedThreads2, c, r);
    else if (kind == 4) S4_LAUNCH(s4_encode_fused_w4, n, s4::kFusedThreads4, c, r);
    else if (kind == 1) S4_LAUNCH(s4_encode_residual, n, s4::kComposedThreads, c, r);
    else if (kind == 8) S4_LAUNCH(s4_encode_contexts, n, s4::kComposedThreads, c, r);
    else if (kind == 9) S4_LAUNCH(s4_encode_residual_contexts, n, s4::kComposedThreads, c, r);
    else if (kind == 10) S4_LAUNCH(s4_encode_predicted, n, s4::kComposedThreads, c, r);
    else if (kind == 11) S4_LAUNCH(s4_encode_update, n, s4::kComposedThreads, c, r);
    else S4_LAUNCH(s4_encode_composed, n, s4::kComposedThreads, c, r);
  });
  S4_LAUNCH(s4_frame_offsets, 1, s4::kOffsetsThreads, results, count, total);
  for_runs(kinds, [&](uint32_t kind, size_t first, uint32_t n) {
    const auto* c = all + first;
    auto* r = results + first;
    if (kind == 2) S4_LAUNCH(s4_gather_fused_w2, n, s4::kFusedThreads2, c, r, to, capacity);
    else if (kind == 4) S4_LAUNCH(s4_gather_fused_w4, n, s4::kFusedThreads4, c, r, to, capacity);
    else S4_LAUNCH(s4_gather_composed, n, s4::kComposedThreads, c, r, to, capacity);
  });
  S4_LAUNCH(s4_encode_crcs, 2 * count, s4::kCrcThreads, all, results, to, capacity);
  pool.check();
  const Bytes bytes = pool.read(results, count * sizeof(s4::EncodeResult));
  const Bytes used = pool.read(total, sizeof(s4::u64));
  s4::u64 end = 0;
  memcpy(&end, used.data(), sizeof end);
  if (end > capacity) fail("the frames take more than their bound");
  const Bytes frames = pool.read(to, end);
  for (uint32_t i = 0; i < count; i++) {
    s4::EncodeResult r;
    memcpy(static_cast<void*>(&r), &bytes[i * sizeof r], sizeof r);
    for (uint64_t k = r.len; k < s4::round_up64(r.len, 16); k++)
      if (frames.at(r.offset + k) != 0) fail("a gap behind a frame that is not zero");
    out.put(&r, sizeof r);
    out.put(frames.data() + r.offset, r.len);
  }
}

// ---- decode ----

struct DecodeItem {
  uint8_t kind, width, layout, residual, plain, planes, check, contexts;
  uint32_t n, frame_len, crc_encoded, crc_raw, skew, input_len;
  uint8_t tables[s4::kMaxPlanes];
  s4::DecodeStream streams[s4::kMaxPlanes];
  uint8_t prediction, in_place, class_top, class_shift;  // in_place: `values` is the parent's buffer
  uint32_t more_len, columns_len;
  // then: tables, frame, the inputs; with kind 11, `Update`
};
static_assert(sizeof(DecodeItem) == 148, "");

static s4::DecodeChunk read_decode(Input& in, Memory& pool, std::vector<uint32_t>& kinds, bool& check) {
  const auto item = in.get<DecodeItem>();
  kinds.push_back(item.kind);
  check = item.check;
  s4::DecodeChunk c{};
  const size_t bytes = size_t(item.n) * item.width;
  add_tables(in, pool, item.tables, c.tables);
  Bytes frame = in.bytes(item.frame_len);
  frame.resize(s4::round_up64(frame.size(), 16), 0xa5);  // readable, but with arbitrary contents
  c.frame = pool.add(frame);
  add_inputs(in, pool, item, c);
  c.values = item.in_place ? const_cast<uint8_t*>(c.inputs[s4::kParent]) : pool.add(bytes, item.skew);
  c.scratch = pool.add(item.kind == 0   ? s4::composed_decode_scratch(item.n, item.width, item.frame_len)
                       : item.kind >= 8 ? s4::predicted_decode_scratch(item.n, item.width, item.frame_len)
                                        : 0);
  c.frame_len = item.frame_len;
  c.n = item.n;
  c.width = item.width;
  c.layout = item.layout;
  c.residual = item.residual;
  c.plain = item.plain;
  c.planes = item.planes;
  c.crc_encoded = item.crc_encoded;
  c.crc_raw = item.crc_raw;
  memcpy(c.streams, item.streams, sizeof c.streams);
  return c;
}

static void decode(Input& in, Output& out, uint32_t count) {
  Memory pool;
  std::vector<uint32_t> kinds;
  std::vector<s4::DecodeChunk> chunks;
  bool check = false;
  for (uint32_t i = 0; i < count; i++) chunks.push_back(read_decode(in, pool, kinds, check));
  auto* all = pool.array(chunks);
  auto* status = pool.array(std::vector<s4::u32>(count, s4::kOk));
  if (check) S4_LAUNCH(s4_check_frames, count, s4::kCrcThreads, all, status);
  for_runs(kinds, [&](uint32_t kind, size_t first, uint32_t n) {
    const auto* c = all + first;
    auto* s = status + first;
    if (kind == 2) S4_LAUNCH(s4_decode_fused_w2, n, s4::kFusedThreads2, c, s);
    else if (kind == 4) S4_LAUNCH(s4_decode_fused_w4, n, s4::kFusedThreads4, c, s);
    else if (kind == 8) S4_LAUNCH(s4_decode_contexts, n, s4::kComposedThreads, c, s);
    else if (kind == 10) S4_LAUNCH(s4_decode_predicted, n, s4::kComposedThreads, c, s);
    else if (kind == 11) S4_LAUNCH(s4_decode_update, n, s4::kComposedThreads, c, s);
    else S4_LAUNCH(s4_decode_composed, n, s4::kComposedThreads, c, s);
  });
  S4_LAUNCH(s4_check_values, count, s4::kCrcThreads, all, status);
  pool.check();
  const Bytes states = pool.read(status, 4 * count);
  for (uint32_t i = 0; i < count; i++) {
    out.put(&states[4 * i], 4);
    // The values of a refused chunk are unspecified: zeros are written instead.
    const size_t len = size_t(chunks[i].n) * chunks[i].width;
    const bool sound = states[4 * i] == s4::kOk;
    out.put(sound ? pool.read(chunks[i].values, len).data() : Bytes(len).data(), len);
  }
}

// ---- others ----

struct SpanItem {
  uint32_t len, from_skew, to_skew;
  // then: the bytes
};

static void checksums(Input& in, Output& out, uint32_t count) {
  Memory pool;
  std::vector<s4::CrcSpan> spans;
  for (uint32_t i = 0; i < count; i++) {
    const auto item = in.get<SpanItem>();
    spans.push_back({pool.add(in.bytes(item.len), item.from_skew), item.len});
  }
  const auto* all = pool.array(spans);
  auto* crcs = reinterpret_cast<s4::u32*>(pool.add(4 * count));
  S4_LAUNCH(s4_crc_spans, count, s4::kCrcThreads, all, crcs);
  out.put(pool.read(crcs, 4 * count).data(), 4 * count);
}

static void copies(Input& in, Output& out, uint32_t count) {
  Memory pool;
  std::vector<s4::CopySpan> spans;
  for (uint32_t i = 0; i < count; i++) {
    const auto item = in.get<SpanItem>();
    const uint8_t* from = pool.add(in.bytes(item.len), item.from_skew);
    spans.push_back({from, pool.add(item.len, item.to_skew), item.len});
  }
  const auto* all = pool.array(spans);
  S4_LAUNCH(s4_copy_spans, count, s4::kCopyThreads, all);
  pool.check();
  for (const auto& span : spans) out.put(pool.read(span.to, span.len).data(), span.len);
}

struct RowsItem {
  uint32_t len, step, count, from_skew, to_skew;
  // then: the bytes from the first row's start to the last one's end
};

static void rows(Input& in, Output& out, uint32_t count) {
  Memory pool;
  std::vector<s4::CopyRows> list;
  for (uint32_t i = 0; i < count; i++) {
    const auto item = in.get<RowsItem>();
    const uint8_t* from = pool.add(in.bytes(item.step * (item.count - 1) + item.len), item.from_skew);
    list.push_back({from, pool.add(item.len * item.count, item.to_skew), item.len, item.step, item.count});
  }
  const auto* all = pool.array(list);
  S4_LAUNCH(s4_copy_rows, count, s4::kCopyThreads, all);
  pool.check();
  for (const auto& r : list) out.put(pool.read(r.to, r.len * r.count).data(), r.len * r.count);
}

// Runs all batches of a file.
static int run_jobs(int argc, char** argv) {
  if (argc != 3) fail("two arguments: the file of jobs, and that of the answers");
  Input in(argv[1]);
  Output out(argv[2]);
  while (!in.done()) {
    const auto op = in.get<uint32_t>(), count = in.get<uint32_t>();
    if (op == 1) encode(in, out, count);
    else if (op == 2) decode(in, out, count);
    else if (op == 3) checksums(in, out, count);
    else if (op == 4) copies(in, out, count);
    else if (op == 5) rows(in, out, count);
    else fail("unknown operation");
  }
  return 0;
}
