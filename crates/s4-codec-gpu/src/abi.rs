//! The inputs and outputs of the kernels: the structures and sizes of `kernels/abi.h`, field by
//! field.
//!
//! Addresses are those of device memory unless a field says otherwise.

use bytemuck::{Pod, Zeroable};
use s4_codec_cpu::rans::Table;

/// The header that host and kernels share: the single source of its numbers.
const HEADER: &[u8] = include_bytes!("../kernels/abi.h");

/// The number that the header gives a name: `name = 12`, or `name = 1u << 4`.
const fn header(name: &str) -> u64 {
    let (text, name) = (HEADER, name.as_bytes());
    let mut at = 0;
    while !stands_at(text, at, name) || !stands_at(text, at + name.len(), b" = ") {
        at += 1;
        assert!(at < text.len(), "name is not in the header");
    }
    let (value, end) = number(text, at + name.len() + 3);
    if !stands_at(text, end, b" << ") {
        return value;
    }
    value << number(text, end + 4).0
}

const fn stands_at(text: &[u8], at: usize, what: &[u8]) -> bool {
    let mut i = 0;
    while i < what.len() && at + i < text.len() && text[at + i] == what[i] {
        i += 1;
    }
    i == what.len()
}

/// A decimal number with the suffix `u`, and where it ends.
const fn number(text: &[u8], mut at: usize) -> (u64, usize) {
    let mut value = 0;
    assert!(text[at].is_ascii_digit(), "number in the header is not decimal");
    while text[at].is_ascii_digit() {
        value = 10 * value + (text[at] - b'0') as u64;
        at += 1;
    }
    (value, if text[at] == b'u' { at + 1 } else { at })
}

/// The most planes of a layout.
pub const MAX_PLANES: usize = header("kMaxPlanes") as usize;
/// The most inputs of a chunk.
pub const MAX_INPUTS: usize = header("kMaxInputs") as usize;
/// Index of the parent's values among a chunk's inputs.
pub const PARENT: usize = header("kParent") as usize;
/// Index of [`Offsets`], with the offsets of the rows after them.
pub const OFFSETS: usize = header("kOffsets") as usize;
/// Index of the offsets of columns.
pub const COLUMNS: usize = header("kColumns") as usize;
/// Index of the first moment's values, for [`Route::Update`] and [`prediction::STEP`].
pub const FIRST: usize = header("kFirst") as usize;
/// Index of the second moment's values.
pub const SECOND: usize = header("kSecond") as usize;
/// Index of [`Update`]: how both become contexts.
pub const UPDATE: usize = header("kUpdate") as usize;
/// Index of [`Step`]: what both make of the parent's values.
pub const FACTORS: usize = header("kFactors") as usize;
/// The most tables of a stream.
pub const MAX_TABLES: usize = header("kMaxTables") as usize;
/// The most values of a chunk that the fused kernels encode, of 2 and of 4 bytes.
pub const FUSED_VALUES: [u64; 2] = [header("kFusedValues2"), header("kFusedValues4")];
/// The most values of a chunk that the fused kernels decode.
pub const FUSED_DECODE_VALUES: u64 = header("kFusedDecodeValues");
/// The most bytes of values of a chunk that the kernels encode.
pub const MAX_ENCODE_BYTES: u64 = header("kMaxPlaneBytes");
/// The most bytes of values of a chunk that the kernels decode.
pub const MAX_DECODE_BYTES: u64 = header("kMaxDecodeBytes");
/// Bytes of a [`CopySpan`] that a thread block copies in good time; longer ones are split.
pub const COPY_SPAN_BYTES: u64 = 256 << 10;
/// Bytes of a row of [`CopyRows`] that a warp copies in good time.
pub const COPY_ROW_BYTES: u64 = 4 << 10;

const FUSED_SCRATCH: [u64; 2] = [header("kFusedScratch2"), header("kFusedScratch4")];
const SEGMENT_SCRATCH: u64 = header("kSegmentScratch");
const SEGMENT: u64 = 16_384;

/// Threads of a block of each kernel.
pub(crate) mod threads {
    use super::header;

    pub(crate) const FUSED2: u32 = header("kFusedThreads2") as u32;
    pub(crate) const FUSED4: u32 = header("kFusedThreads4") as u32;
    pub(crate) const COMPOSED: u32 = header("kComposedThreads") as u32;
    pub(crate) const OFFSETS: u32 = header("kOffsetsThreads") as u32;
    pub(crate) const CRC: u32 = header("kCrcThreads") as u32;
    pub(crate) const COPY: u32 = header("kCopyThreads") as u32;
}

/// `Status`: the outcome of a chunk, as the kernels report it.
pub mod status {
    use super::header;

    /// Nothing is wrong.
    pub const OK: u32 = header("kOk") as u32;
    /// A stream is not valid.
    pub const CORRUPT: u32 = header("kCorrupt") as u32;
    /// Not for these kernels.
    pub const UNSUPPORTED: u32 = header("kUnsupported") as u32;
    /// The stored bytes are not those that were written.
    pub const FRAME_CHECKSUM: u32 = header("kFrameChecksum") as u32;
    /// The decoded values are not those that were encoded.
    pub const VALUE_CHECKSUM: u32 = header("kValueChecksum") as u32;
    /// The frame exceeds the capacity.
    pub const NO_ROOM: u32 = header("kNoRoom") as u32;
}

/// [`EncodeChunk::flags`], fused routes: raw planes go into scratch memory while values are encoded, and the gather
/// copies them from there. It takes `n * (width - 1)` more bytes of scratch, rounded up to 32.
pub const KEEP_PLANES: u32 = header("kKeepPlanes") as u32;

/// `Coding`: how to code a plane.
pub mod coding {
    use super::header;

    /// Raw.
    pub const RAW: u8 = header("kCodeRaw") as u8;
    /// Codec `bits`, 7 bits for each value.
    pub const BITS7: u8 = header("kCodeBits7") as u8;
    /// rANS, P = 8.
    pub const RANS8: u8 = header("kCodeRans8") as u8;
    /// rANS, P = 12.
    pub const RANS12: u8 = header("kCodeRans12") as u8;
}

/// `Prediction`: the source of the values that the kernels of [`Route::Predicted`] expect.
pub mod prediction {
    use super::header;

    /// Nothing: values are stored without a prediction.
    pub const NOTHING: u8 = header("kPredictNothing") as u8;
    /// The values of input [`PARENT`](super::PARENT).
    pub const INPUT: u8 = header("kPredictInput") as u8;
    /// Those values, which are fp32, rounded to bf16.
    pub const BF16: u8 = header("kPredictBf16") as u8;
    /// Those values, which are fp32, rounded to fp16.
    pub const F16: u8 = header("kPredictF16") as u8;
    /// The sums of the offsets of rows and columns.
    pub const OFFSETS: u8 = header("kPredictOffsets") as u8;
    /// These sums, with a share of the magnitudes of input [`PARENT`](super::PARENT).
    pub const BLEND: u8 = header("kPredictBlend") as u8;
    /// The values of input [`PARENT`](super::PARENT) after the optimizer's step.
    pub const STEP: u8 = header("kPredictStep") as u8;
}

/// Contexts by the exponent of the input's values, as descriptors name them.
pub const CONTEXTS_EXPONENT: u8 = header("kContextsExponent") as u8;
/// Contexts by the optimizer's update, for [`Route::Update`].
pub const CONTEXTS_UPDATE: u8 = header("kContextsUpdate") as u8;

/// Types of floats.
pub mod float {
    use super::header;

    /// There are no such values.
    pub const NONE: u8 = 0;
    /// bfloat16.
    pub const BF16: u8 = header("kBFloat16") as u8;
    /// float16.
    pub const F16: u8 = header("kFloat16") as u8;
    /// float32.
    pub const F32: u8 = header("kFloat32") as u8;
}

/// The parameters that turn updates into classes, and the types of weights and moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Update {
    /// Smaller updates count as this.
    pub floor: i16,
    /// Added before classes are counted.
    pub offset: i16,
    /// [`float`] of the weights.
    pub weight: u8,
    /// Those of the first and second moment.
    pub moments: [u8; 2],
    /// For an encoder, a bit mask of planes that have no contexts.
    pub one_table: u8,
}

/// The constants of an optimizer's step, and the types of weights and moments.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Step {
    /// The factor of the weights.
    pub keep: f32,
    /// The factor of the updates.
    pub rate: f32,
    /// Added to the roots of second moments.
    pub epsilon: f32,
    /// [`float`] of the weights.
    pub weight: u8,
    /// Those of the first and second moment.
    pub moments: [u8; 2],
    /// 0.
    pub reserved: u8,
}

/// The parameters of the sums of row and column offsets. The offsets of the chunk's rows follow, 2 bytes each.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Offsets {
    /// The number that they are added to.
    pub base: u64,
    /// Index of the chunk's first value, counted from the start of the first of these rows.
    pub first: u64,
    /// Bits that the sum of both is shifted by, fewer than a value has.
    pub shift: u32,
    /// Number of rows that follow.
    pub rows: u32,
    /// Values in a row.
    pub cols: u32,
    /// Share of the parent's magnitude in 256ths, for [`prediction::BLEND`].
    pub share: u32,
}

/// A table that the chunks of a tensor share, for one plane. All zero: the plane has none.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct SharedTable {
    /// 8 or 12; 0: none.
    pub precision: u16,
    /// Number of symbols.
    pub count: u16,
    /// Frequency of the escape.
    pub escape: u16,
    /// Zero.
    pub reserved: u16,
    /// The symbols, in the order of their slots.
    pub symbol: [u8; 256],
    /// Their frequencies.
    pub freq: [u16; 256],
}

impl From<&Table> for SharedTable {
    fn from(table: &Table) -> Self {
        let mut out = Self::zeroed();
        out.precision = table.precision().bits() as u16;
        // At most 256 entries.
        out.count = table.entries().len() as u16;
        out.escape = table.escape();
        for (i, entry) in table.entries().iter().enumerate() {
            out.symbol[i] = entry.symbol;
            out.freq[i] = entry.freq;
        }
        out
    }
}

/// The tables that the streams of one plane may share. All zero: there are none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TableSet {
    /// Address of the first [`SharedTable`].
    pub at: u64,
    /// Number of tables, which lie one after the other: at most 16.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

impl TableSet {
    /// The sets of planes that have `counts` tables each, which lie one after the other from address `at` on.
    pub fn of_counts(at: u64, counts: &[u32; MAX_PLANES]) -> [Self; MAX_PLANES] {
        let mut next = at;
        counts.map(|count| {
            let set = Self { at: if count > 0 { next } else { 0 }, count, reserved: 0 };
            next += u64::from(count) * size_of::<SharedTable>() as u64;
            set
        })
    }
}

/// The inputs of a chunk that has only its parent's values, at address `at`; 0: it has none.
pub fn parent_input(at: u64) -> [u64; MAX_INPUTS] {
    let mut inputs = [0; MAX_INPUTS];
    inputs[PARENT] = at;
    inputs
}

/// A chunk to encode.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct EncodeChunk {
    /// Address of `n * width` bytes, of any alignment.
    pub values: u64,
    /// Address of the chunk's own scratch, a multiple of 16; [`encode_scratch`] bytes.
    pub scratch: u64,
    /// Number of values, at least 1.
    pub n: u32,
    /// Bytes of a value.
    pub width: u8,
    /// Id of the layout.
    pub layout: u8,
    /// Id of the residual.
    pub residual: u8,
    /// 0, [`CONTEXTS_EXPONENT`] or [`CONTEXTS_UPDATE`].
    pub contexts: u8,
    /// [`coding`] of each plane.
    pub coding: [u8; MAX_PLANES],
    /// 0 or [`KEEP_PLANES`].
    pub flags: u32,
    /// [`prediction`], for [`Route::Predicted`].
    pub prediction: u8,
    /// 1: planes are counted and cut as those of differences from a parent, for [`Route::Predicted`].
    pub sparse: u8,
    /// Exponent of class 0, and the shift of exponents below it, for contexts.
    pub class: [u8; 2],
    /// Addresses of the prediction's inputs; see [`PARENT`], [`OFFSETS`], [`COLUMNS`], [`FIRST`], [`SECOND`],
    /// [`UPDATE`].
    pub inputs: [u64; MAX_INPUTS],
    /// Index of the chunk's first value in its tensor.
    pub first: u64,
    /// Values in a row of the tensor (its last dimension); 0 if it has one dimension.
    pub cols: u64,
    /// The shared tables of each plane.
    pub tables: [TableSet; MAX_PLANES],
    /// Zero.
    pub reserved: [u64; 5],
}

/// A stream as a frame's header has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ResultStream {
    /// Id of the codec.
    pub codec: u8,
    /// Its parameter.
    pub param: u8,
    /// Zero.
    pub zero: u16,
    /// Bytes in the frame.
    pub len: u32,
}

/// The result of encoding a chunk.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct EncodeResult {
    /// Offset of the frame in the batch's frames.
    pub offset: u64,
    /// Bytes of the frame.
    pub len: u32,
    /// CRC-32C of the frame.
    pub crc_encoded: u32,
    /// CRC-32C of the values.
    pub crc_raw: u32,
    /// 1: the frame is the values.
    pub plain: u8,
    /// 1: a stream uses a shared table.
    pub shared: u8,
    /// Number of streams.
    pub streams: u8,
    /// [`status`].
    pub status: u8,
    /// Zero.
    pub reserved: u64,
    /// The streams; zero after the last one.
    pub stream: [ResultStream; MAX_PLANES],
}

/// A stream to decode.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub struct DecodeStream {
    /// Its offset in the frame.
    pub offset: u32,
    /// Its bytes there.
    pub len: u32,
    /// Id of the codec.
    pub codec: u8,
    /// Its parameter.
    pub param: u8,
    /// Zero.
    pub reserved: u16,
}

/// A chunk to decode.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct DecodeChunk {
    /// Address of the frame, a multiple of 16, readable up to the next multiple of 16.
    pub frame: u64,
    /// Address of `n * width` bytes to write, of any alignment.
    pub values: u64,
    /// Address of the chunk's own scratch, a multiple of 16; [`decode_scratch`] bytes.
    pub scratch: u64,
    /// Bytes of the frame.
    pub frame_len: u32,
    /// Number of values, at least 1.
    pub n: u32,
    /// Bytes of a value.
    pub width: u8,
    /// Id of the layout.
    pub layout: u8,
    /// Id of the residual.
    pub residual: u8,
    /// 1: the frame is the values.
    pub plain: u8,
    /// Number of streams.
    pub planes: u8,
    /// As [`EncodeChunk::contexts`].
    pub contexts: u8,
    /// [`prediction`], for [`Route::Predicted`].
    pub prediction: u8,
    /// Zero.
    pub reserved: u8,
    /// CRC-32C of the frame.
    pub crc_encoded: u32,
    /// CRC-32C of the values.
    pub crc_raw: u32,
    /// The streams.
    pub streams: [DecodeStream; MAX_PLANES],
    /// Addresses of the prediction's inputs, as in [`EncodeChunk::inputs`].
    pub inputs: [u64; MAX_INPUTS],
    /// Index of the chunk's first value in its tensor.
    pub first: u64,
    /// Values in a row of the tensor (its last dimension); 0 if it has one dimension.
    pub cols: u64,
    /// The shared tables of each plane.
    pub tables: [TableSet; MAX_PLANES],
    /// As [`EncodeChunk::class`].
    pub class: [u8; 2],
    /// Zero.
    pub reserved1: [u8; 6],
    /// Zero.
    pub reserved2: [u64; 7],
}

/// Bytes to copy.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct CopySpan {
    /// Address of the source.
    pub from: u64,
    /// Address of the destination.
    pub to: u64,
    /// Number of bytes; see [`COPY_SPAN_BYTES`].
    pub len: u64,
}

impl CopySpan {
    /// Spans of at most [`COPY_SPAN_BYTES`] that copy `len` bytes together.
    pub fn cut(from: u64, to: u64, len: u64) -> impl Iterator<Item = Self> {
        (0..len).step_by(COPY_SPAN_BYTES as usize).map(move |first| Self {
            from: from + first,
            to: to + first,
            len: COPY_SPAN_BYTES.min(len - first),
        })
    }
}

/// Evenly spaced rows of bytes to copy, which end up one after the other.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct CopyRows {
    /// Address of the first row.
    pub from: u64,
    /// Address of the destination.
    pub to: u64,
    /// Bytes of a row: with more than [`COPY_ROW_BYTES`] the copy is slow.
    pub len: u64,
    /// Bytes from the start of one row to the start of the next.
    pub step: u64,
    /// Number of rows: at most [`COPY_SPAN_BYTES`] in all.
    pub count: u64,
}

/// Bytes to take the CRC-32C of.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct CrcSpan {
    /// Address.
    pub data: u64,
    /// Number of bytes, below 2^32.
    pub len: u64,
}

const _: () = {
    assert!(size_of::<SharedTable>() == 776);
    assert!(size_of::<TableSet>() == 16);
    assert!(size_of::<EncodeChunk>() == 256);
    assert!(size_of::<ResultStream>() == 8);
    assert!(size_of::<EncodeResult>() == 96);
    assert!(size_of::<DecodeStream>() == 12);
    assert!(size_of::<DecodeChunk>() == 384);
    assert!(size_of::<Offsets>() == 32);
    assert!(size_of::<Update>() == 8);
    assert!(size_of::<Step>() == 16);
    assert!(size_of::<CopySpan>() == 24);
    assert!(size_of::<CopyRows>() == 40);
    assert!(size_of::<CrcSpan>() == 16);
};

/// The kernels that a chunk is for. Batches are sorted by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Route {
    /// Layout `fields` of 2-byte values, exponents by rANS with P = 8, the rest raw.
    Fused2,
    /// The same for 4-byte values.
    Fused4,
    /// Other layouts and codings; also decoding a difference from a parent.
    Composed,
    /// Any prediction, any residual but `descent`, contexts by exponents.
    Predicted,
    /// Residual `descent` and contexts by updates.
    Update,
    /// Encoding a difference from a parent.
    Residual,
}

impl Route {
    /// The fused route for values of a width, if there is one.
    pub fn fused(width: usize) -> Option<Self> {
        match width {
            2 => Some(Self::Fused2),
            4 => Some(Self::Fused4),
            _ => None,
        }
    }
}

/// All planes of `n` values, each at a multiple of 16.
pub(crate) const fn planes_bytes(n: u64, width: u64) -> u64 {
    (n * width + n / 8).next_multiple_of(16) + 16 * MAX_PLANES as u64
}

/// Bytes of scratch that encoding a chunk of `n` values of `width` bytes takes. `coded`: bytes of the largest plane
/// whose coding is not [`RAW`](coding::RAW), at most `n * width`; `contexts`: whether the chunk has contexts.
pub const fn encode_scratch(route: Route, n: u64, width: u64, coded: u64, contexts: bool) -> u64 {
    match route {
        Route::Fused2 => FUSED_SCRATCH[0],
        Route::Fused4 => FUSED_SCRATCH[1],
        Route::Composed => planes_bytes(n, width) + coded.div_ceil(SEGMENT) * SEGMENT_SCRATCH,
        // Segments may be twice as long.
        Route::Residual => {
            planes_bytes(n, width) + coded.div_ceil(2 * SEGMENT) * 2 * SEGMENT_SCRATCH
        }
        // The tables of a stream, and a class for each value.
        Route::Predicted | Route::Update => {
            let tables = (MAX_TABLES * size_of::<SharedTable>()) as u64;
            let classes = if contexts { n.next_multiple_of(16) } else { 0 };
            encode_scratch(Route::Residual, n, width, coded, contexts) + tables + classes
        }
    }
}

/// Bytes of scratch that decoding a chunk of `n` values of `width` bytes takes.
pub const fn decode_scratch(route: Route, n: u64, width: u64, frame_len: u64) -> u64 {
    match route {
        Route::Fused2 | Route::Fused4 => 0,
        Route::Composed | Route::Residual => {
            planes_bytes(n, width)
                + frame_len.next_multiple_of(16)
                + 3 * ((n * width / 64).next_multiple_of(16) + 64)
        }
        // The entries of tables with P = 12, and a class for each value.
        Route::Predicted | Route::Update => {
            let one = decode_scratch(Route::Composed, n, width, frame_len).next_multiple_of(16);
            one + (MAX_TABLES as u64) * (4 << 12) + n
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_the_header() {
        // Facts of the format, which the header repeats.
        assert_eq!(MAX_PLANES, s4_format::layout::MAX_PLANES);
        assert_eq!((coding::RANS8, coding::RANS12, status::OK), (8, 12, 0));
        assert_eq!(number(b"17u)", 0), (17, 3));
        assert_eq!(MAX_DECODE_BYTES, 8 << s4_format::limits::CHUNK_LOG2.end());
        assert_eq!(FUSED_VALUES, [1 << 17, 1 << 16]);
    }

    #[test]
    fn scratch_grows_with_the_chunk_and_is_aligned() {
        for width in [1, 2, 4, 8] {
            let mut before = 0;
            for n in [1, 255, 16_384, 65_536] {
                let bytes = encode_scratch(Route::Composed, n, width, n, false);
                assert!(bytes > before && bytes.is_multiple_of(16), "{n} {width}");
                assert!(decode_scratch(Route::Composed, n, width, n).is_multiple_of(16));
                before = bytes;
            }
        }
    }

    #[test]
    fn every_plane_has_its_tables_or_none() {
        let sets = TableSet::of_counts(0x1000, &[1, 0, 8, 10, 0, 0, 0, 1]);
        let at = |i: usize| (sets[i].at, sets[i].count);
        assert_eq!((at(0), at(1), at(2)), ((0x1000, 1), (0, 0), (0x1000 + 776, 8)));
        assert_eq!((at(3), at(7)), ((0x1000 + 9 * 776, 10), (0x1000 + 19 * 776, 1)));
        assert_eq!(TableSet::of_counts(0, &[0; MAX_PLANES]), [TableSet::default(); MAX_PLANES]);
        assert_eq!(parent_input(5), [5, 0, 0, 0]);
    }

    #[test]
    fn shared_tables_keep_the_order_of_slots() {
        use s4_codec_cpu::rans::{Precision, TableEntry};
        let entries = [TableEntry { symbol: 9, freq: 5 }, TableEntry { symbol: 3, freq: 250 }];
        let table = Table::new(Precision::P8, &entries).unwrap();
        let shared = SharedTable::from(&table);
        assert_eq!((shared.precision, shared.count, shared.escape), (8, 2, 1));
        assert_eq!(
            (shared.symbol[..3].to_vec(), shared.freq[..3].to_vec()),
            (vec![9, 3, 0], vec![5, 250, 0])
        );
    }
}
