// What a host needs to know to call the kernels: structures, entry points, sizes of scratch memory.
// Included by the kernels themselves; it is plain C++17 without host headers, so that NVRTC, nvcc and a
// host compiler read it alike. All integers are little-endian; a structure has no hidden padding.
//
// All pointers are device-accessible addresses (device memory, or mapped host memory where stated). The
// kernels allocate nothing, keep no state, know no names and never wait for the host. Every grid and
// block is one-dimensional; no launch uses dynamic shared memory.
//
// ENCODE a batch of chunks, of any tensors. The host sorts the batch by kind (see below), so that the chunks
// of a kind form one run, uploads the `EncodeChunk`s, and enqueues on one stream (`c`, `r` point to the
// first chunk and result of the run; `chunks`, `results` to the first of the batch):
//
//   1. s4_encode_fused_w2 (c, r)                           grid = chunks of the run, block = kFusedThreads2
//      s4_encode_fused_w4 (c, r)                           grid = chunks of the run, block = kFusedThreads4
//      s4_encode_composed (c, r)                           grid = chunks of the run, block = kComposedThreads
//      s4_encode_residual (c, r)                           grid = chunks of the run, block = kComposedThreads
//      s4_encode_predicted (c, r)                          grid = chunks of the run, block = kComposedThreads
//      s4_encode_update (c, r)                             grid = chunks of the run, block = kComposedThreads
//   2. s4_frame_offsets (results, count, total)            grid = 1, block = kOffsetsThreads
//   3. s4_gather_fused_w2 (c, r, frames, capacity)         grid and block as in 1.
//      s4_gather_fused_w4 (c, r, frames, capacity)
//      s4_gather_composed (c, r, frames, capacity)         all others
//   4. s4_encode_crcs (chunks, results, frames, capacity)  grid = 2 x count, block = kCrcThreads
//
// Afterwards `results` holds one `EncodeResult` for each chunk, `*total` the number of bytes of `frames` in
// use, and `frames` the frames, consecutive in the order of the batch, each at a multiple of 16, with zeros
// in the gaps. `frames` is 16-byte aligned; it may be mapped host memory for 3., but 4. reads it again. A
// capacity of the sum of `round_up(n * width, 16)` over the batch is always enough; a frame that would pass
// `capacity` is not written at all, and its status becomes `kNoRoom`. `scratch` and the values are in use
// until 4. is done. The kinds of chunks:
//
//   fused w2, w4   layout `fields`, width 2 or 4, residual `id`, coding rANS P = 8 for plane 0 and raw for
//                  all others, at most kFusedValues2 or kFusedValues4 values
//   composed       any chunk, up to kMaxPlaneBytes of values (slower where the fused kernels will do)
//   residual       the same with residual `xor` or `sub`. Their planes are coded as the CPU's engine codes
//                  differences: all symbols are counted, and long planes have longer segments.
//   predicted      any `Prediction`, any residual but `descent`, contexts `exponent` (slower where the others will do)
//   update         residual `descent` from an input, contexts `update`, layout `bytes`. A plane that has shared tables
//                  always uses them: they are not compared with tables of its own.
//   none           codecs and layouts that are not listed here (zstd, token): the CPU encodes these
//
// DECODE a batch, also sorted by kind:
//
//   1. s4_check_frames (chunks, status)                    grid = count, block = kCrcThreads
//   2. s4_decode_fused_w2 (c, s)                           grid = chunks of the run, block = kFusedThreads2
//      s4_decode_fused_w4 (c, s)                           grid = chunks of the run, block = kFusedThreads4
//      s4_decode_composed (c, s)                           grid = chunks of the run, block = kComposedThreads
//      s4_decode_predicted (c, s)                          grid = chunks of the run, block = kComposedThreads
//      s4_decode_update (c, s)                             grid = chunks of the run, block = kComposedThreads
//   3. s4_check_values (chunks, status)                    grid = count, block = kCrcThreads
//
// A chunk's parent may be its own `values`, which are then overwritten.
//
// 1. sets every `status[i]`; a host that has checked the frames itself clears the array instead. A chunk
// whose status is not `kOk` is skipped by later steps. The host finds the streams of a frame
// (`StreamEntry::parse_chunk`) and puts them into `DecodeChunk::streams`; every offset and length must lie
// within the frame. What the streams hold is checked here: whatever their bytes, nothing outside of the
// chunk's own frame, tables, scratch and values is touched. On `kCorrupt` or `kUnsupported` the host lets
// the CPU decode the chunk, for an error that says why. The kinds of chunks:
//
//   fused w2, w4   not plain, layout `fields`, width 2 or 4, residual `id`, stream 0 `rans` P = 8, all
//                  others `raw`, at most kFusedDecodeValues values
//   composed       plain chunks, and any with streams raw, const, bits, rans (P = 8 or 12, one table), up to
//                  kMaxDecodeBytes of values
//   predicted      any `Prediction`, any residual but `descent`, several tables a plane
//   update         residual `descent` from an input, contexts `update`, layout `bytes`
//
// The kernels `predicted` and `update` take their inputs from the descriptors' last fields; the others use only the
// parent (input 0) and one table a plane. docs/gpu-kernels.md says what the kernels are instances of.
//
// OTHERS:
//   s4_copy_spans (spans)         grid = spans, block = kCopyThreads: packs small tensors and
//                                 unpacks them. One block copies a span: keep spans below 1 MiB.
//   s4_copy_rows (rows)           grid = descriptors, block = kCopyThreads: gathers samples. A warp copies a row:
//                                 keep rows below 64 KiB, and all rows of a descriptor below 1 MiB.
//   s4_crc_spans (spans, crcs)    grid = spans, block = kCrcThreads: CRC-32C of each span.
#pragma once

#ifdef __CUDACC__
#define S4_ANYWHERE __host__ __device__
#else
#define S4_ANYWHERE
#endif

namespace s4 {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Numbers of docs/format.md.
enum Layout : u8 { kWhole = 0, kBytes = 1, kFields = 2, kFieldsSign = 3 };
enum Residual : u8 { kId = 0, kXor = 1, kSub = 2, kMagnitude = 3, kDescent = 4 };
enum Codec : u8 { kRaw = 0, kConst = 1, kBits = 2, kRans = 3 };

// How the kernels `predicted` predict a value: all that they know of a tensor's predictor.
enum Prediction : u8 {
  kPredictNothing = 0,   // residual `id`
  kPredictInput = 1,     // the value of input kParent at the same index
  kPredictBf16 = 2,      // the value of input kParent (n fp32 values), rounded to bf16
  kPredictF16 = 3,       // the same, rounded to fp16
  kPredictOffsets = 4,   // the sum of the offsets of its row and column, input kOffsets
  kPredictBlend = 5,     // that sum, plus a share of the magnitude of input kParent
  kPredictStep = 6,      // what the optimizer's step, input kFactors, makes of input kParent
};

// Contexts of docs/format.md.
constexpr u8 kContextsExponent = 1;
constexpr u8 kContextsUpdate = 2;

// How a plane is to be coded (`PlaneCoding` of the planner). A constant plane becomes `const`, and one
// that does not get smaller stays raw, as in the CPU's encoder.
enum Coding : u8 { kCodeRaw = 0, kCodeBits7 = 7, kCodeRans8 = 8, kCodeRans12 = 12 };

enum Status : u32 {
  kOk = 0,
  kCorrupt = 1,        // invalid streams
  kUnsupported = 2,    // perhaps valid, but not handled by these kernels; or a descriptor that is out of range
  kFrameChecksum = 3,  // the stored bytes are not those that were written
  kValueChecksum = 4,  // the decoded values are not those that were encoded
  kNoRoom = 5,         // encode: the frame passes `capacity`
};

constexpr u32 kMaxPlanes = 8;
constexpr u32 kMaxInputs = 4;  // of a chunk
constexpr u32 kMaxTables = 16;  // of a stream

constexpr u32 kFusedThreads2 = 256, kFusedThreads4 = 128;
constexpr u32 kComposedThreads = 256;
constexpr u32 kOffsetsThreads = 1024;
constexpr u32 kCrcThreads = 128;
constexpr u32 kCopyThreads = 256;

constexpr u32 kFusedValues2 = 1u << 17, kFusedValues4 = 1u << 16;  // of a chunk, encode
constexpr u32 kFusedDecodeValues = 1u << 18;
constexpr u32 kMaxPlaneBytes = 512u << 10;   // n * width of a chunk, encode
constexpr u32 kMaxDecodeBytes = 2048u << 10;  // n * width of a chunk, decode

// A table that the chunks of a tensor share, for one plane. It is valid, since the host made or parsed it.
// Symbols own slots in this order, after the escape's. `precision` 0: the plane has none.
struct SharedTable {
  u16 precision;  // 0, 8 or 12
  u16 count;      // symbols
  u16 escape;     // frequency of the escape; an encoder ignores a table that has none and lacks a symbol
  u16 reserved;
  u8 symbol[256];
  u16 freq[256];
};
static_assert(sizeof(SharedTable) == 776, "");  // 16 of them: a multiple of 16 bytes

// The tables that the streams of one plane may share. If there are none: a null pointer, and count 0.
struct TableSet {
  const SharedTable* at;  // 8-byte aligned
  u32 count;              // at most kMaxTables
  u32 reserved;
};
static_assert(sizeof(TableSet) == 16, "");

// Indices of a chunk's inputs:
constexpr u32 kParent = 0;    // the parent's values, n * width bytes at any address; null with residual `id`
constexpr u32 kOffsets = 1;   // for kPredictOffsets, kPredictBlend: `Offsets`, 8-byte aligned
constexpr u32 kColumns = 2;   // for the same: the columns' offsets, 16-byte aligned
constexpr u32 kFirst = 1;     // for kContextsUpdate, kPredictStep: the n values of the first moment, at any address
constexpr u32 kSecond = 2;    // for the same: the n values of the second moment, at any address; unused if there is none
constexpr u32 kUpdate = 3;    // for kContextsUpdate: `Update`, 8-byte aligned
constexpr u32 kFactors = 3;   // for kPredictStep: `Step`, 8-byte aligned

// How the offsets of rows and columns are used. The rows' offsets follow this structure, at least for the rows that the
// chunk has values in. Offsets are signed 16-bit integers. A row is `cols` consecutive values of the tensor.
struct Offsets {
  u64 base;
  u64 first;  // index of the chunk's first value, counted from the start of the first of these rows
  u32 shift;  // below 8 * width
  u32 rows;
  u32 cols;   // below 2^31
  u32 share;  // for kPredictBlend: 256ths of the parent's magnitude, below 256
};
static_assert(sizeof(Offsets) == 32, "");
constexpr int kNoRow = -32768;  // the offset of a row whose values are expected to be zero

// Types of floats; 0: none.
constexpr u8 kBFloat16 = 1;
constexpr u8 kFloat16 = 2;
constexpr u8 kFloat32 = 3;

// How updates become classes (docs/predictors/update.md), and the types of weights and moments.
struct Update {
  short floor, offset;
  u8 weight, first, second;
  u8 one_table;  // for an encoder: bit i: plane i has no contexts; a decoder finds out from the stream
};
static_assert(sizeof(Update) == 8, "");

// The constants of an optimizer's step (docs/predictors/step.md), and the types of weights and moments. If the type of
// second moments is 0, all are zeros.
struct Step {
  float keep, rate, epsilon;
  u8 weight, first, second, reserved;
};
static_assert(sizeof(Step) == 16, "");

constexpr u32 kKeepPlanes = 1;  // EncodeChunk::flags, fused: raw planes go through scratch (see below)

// A chunk to encode, 8-byte aligned. Whole lines of a cache: in a 128-byte aligned array, all that a kernel reads first
// is one line.
struct EncodeChunk {
  const u8* values;           // n * width bytes, at any address; fast if 16-byte aligned
  u8* scratch;                // 16-byte aligned; sizes below; not shared with another chunk of the batch
  u32 n;                      // values, at least 1
  u8 width;                   // 1, 2, 4, 8
  u8 layout;                  // `Layout`
  u8 residual;                // `Residual`
  u8 contexts;                // predicted: 0, or kContextsExponent; update: kContextsUpdate
  u8 coding[kMaxPlanes];      // `Coding` of each plane
  u32 flags;
  u8 prediction;              // predicted: `Prediction`; update: kPredictInput
  u8 sparse;                  // predicted: 1 to count and cut into segments as for differences from a parent
  u8 class_top, class_shift;  // for kContextsExponent
  const u8* inputs[kMaxInputs];  // what the values are predicted from
  u64 first;                  // index of the first value in its tensor
  u64 cols;                   // values in a row of the tensor, its last dimension
  TableSet tables[kMaxPlanes];
  u64 reserved[5];
};
static_assert(sizeof(EncodeChunk) == 256, "");

// A stream's entry in the header of a frame.
struct StreamEntry {
  u8 codec;   // `Codec`
  u8 param;
  u16 zero;
  u32 len;    // stored bytes
};
static_assert(sizeof(StreamEntry) == 8, "");

// The outcome of encoding a chunk, 8-byte aligned. All fields are written.
struct EncodeResult {
  u64 offset;       // of the frame in `frames`
  u32 len;          // bytes of the frame
  u32 crc_encoded;  // first checksum of docs/format.md: header and coded streams; plain: as crc_raw
  u32 crc_raw;      // CRC-32C of the values, also if what is stored are residuals
  u8 plain;         // 1: the frame is the values as they are, and there are no streams
  u8 shared;        // 1: a stream uses one of `tables`
  u8 streams;       // number of streams
  u8 status;        // `Status`
  u64 reserved;
  StreamEntry stream[kMaxPlanes];  // zero behind the last one
};
static_assert(sizeof(EncodeResult) == 96, "");

struct DecodeStream {
  u32 offset;  // in the frame; a multiple of 16
  u32 len;     // stored bytes
  u8 codec;
  u8 param;
  u16 reserved;
};
static_assert(sizeof(DecodeStream) == 12, "");

// A chunk to decode, 8-byte aligned; whole lines, as well.
struct DecodeChunk {
  const u8* frame;            // 16-byte aligned, readable up to the next multiple of 16; may be mapped memory
  u8* values;                 // n * width bytes, at any address; fast if 16-byte aligned
  u8* scratch;                // composed, not plain: 16-byte aligned; fused: unused
  u32 frame_len;
  u32 n;                      // values, at least 1
  u8 width;
  u8 layout;
  u8 residual;
  u8 plain;                   // 1: the frame is the values
  u8 planes;                  // number of streams: the layout's planes
  u8 contexts;                // this and what follows: as when the chunk was encoded
  u8 prediction;
  u8 reserved;
  u32 crc_encoded;
  u32 crc_raw;
  DecodeStream streams[kMaxPlanes];
  const u8* inputs[kMaxInputs];  // as when the chunk was encoded
  u64 first;                  // index of the first value in its tensor
  u64 cols;                   // values in a row of the tensor, its last dimension
  TableSet tables[kMaxPlanes];
  u8 class_top, class_shift;  // for kContextsExponent
  u8 reserved1[6];
  u64 reserved2[7];
};
static_assert(sizeof(DecodeChunk) == 384, "");

struct CopySpan {
  const u8* from;
  u8* to;
  u64 len;
};
static_assert(sizeof(CopySpan) == 24, "");

// `count` rows of `len` bytes, `step` bytes apart at `from` and without gaps at `to`.
struct CopyRows {
  const u8* from;
  u8* to;
  u64 len;
  u64 step;
  u64 count;
};
static_assert(sizeof(CopyRows) == 40, "");

struct CrcSpan {
  const u8* data;
  u64 len;  // below 2^31
};
static_assert(sizeof(CrcSpan) == 16, "");

// ---- scratch ----

S4_ANYWHERE constexpr u64 round_up64(u64 v, u64 to) { return (v + to - 1) / to * to; }

// Fused encode, for any n. `kKeepPlanes` (raw planes are stored while encoding and copied by the gather,
// instead of being split off twice) needs `n * (width - 1)` more, rounded up to 32. On an H200 it is 5%
// faster for width 2 and 9% slower for width 4, encode and gather together.
constexpr u64 kFusedScratch2 = 267008, kFusedScratch4 = 133792;

// All planes of `n` values, each 16-byte aligned.
S4_ANYWHERE constexpr u64 planes_bytes(u64 n, u64 width) { return round_up64(n * width + n / 8, 16) + 16 * kMaxPlanes; }

// A segment of 16384 symbols: states and the most words that P = 12 makes of it.
constexpr u64 kSegmentScratch = 49664;

// Planes, which their streams replace, and the segments of one plane. `coded`: bytes of the largest plane that is not
// stored raw.
S4_ANYWHERE constexpr u64 composed_encode_scratch(u64 n, u64 width, u64 coded) {
  return planes_bytes(n, width) + (coded + 16383) / 16384 * kSegmentScratch;
}

// The same, but a segment may be twice as long.
S4_ANYWHERE constexpr u64 residual_encode_scratch(u64 n, u64 width, u64 coded) {
  return planes_bytes(n, width) + (coded + 32767) / 32768 * (2 * kSegmentScratch);
}

// `frame_len` as in the descriptor.
S4_ANYWHERE constexpr u64 composed_decode_scratch(u64 n, u64 width, u64 frame_len) {
  return planes_bytes(n, width) + round_up64(frame_len, 16) + 3 * (round_up64(n * width / 64, 16) + 64);
}

// The kernels `predicted` and `update` also need the tables of a stream (to decode: their entries with P = 12) and a class
// for each value; an encoder only with contexts, and it has both between planes and segments.
S4_ANYWHERE constexpr u64 tables_bytes(u64 n, u32 contexts) {
  return kMaxTables * sizeof(SharedTable) + (contexts > 0 ? round_up64(n, 16) : 0);
}
S4_ANYWHERE constexpr u64 predicted_encode_scratch(u64 n, u64 width, u64 coded, u32 contexts) {
  return residual_encode_scratch(n, width, coded) + tables_bytes(n, contexts);
}
S4_ANYWHERE constexpr u64 predicted_decode_scratch(u64 n, u64 width, u64 frame_len) {
  return round_up64(composed_decode_scratch(n, width, frame_len), 16) + kMaxTables * (4u << 12) + n;
}

}  // namespace s4
