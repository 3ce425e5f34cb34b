//! One chunk, its checksums mended, in every set of vector instructions.

use std::iter;
use std::sync::OnceLock;

use s4_engine::{CpuEngine, DecodeJob, InputValues, Scratch, TensorSpec};
use s4_format::layout::Planes;
use s4_format::side::{Side, SideKind};
use s4_format::{
    ChunkRecord, CodecId, DType, Digest, LayoutId, Plan, PredictorId, ResidualId, StreamEntry,
    crc32c,
};
use s4_planes::Simd;
use s4_predict::{Step, Update};

use crate::input::{Input, expand, sets};
use crate::memory::bounded;

/// The codecs that may be in a frame, and an unknown one.
const CODECS: [CodecId; 10] = [
    CodecId::RAW,
    CodecId::CONST,
    CodecId::BITS,
    CodecId::RANS,
    CodecId::ZSTD,
    CodecId::GDEFLATE,
    CodecId::DEFLATE,
    CodecId::LZ4,
    CodecId::SNAPPY,
    CodecId(250),
];

/// A chunk as a file could hold it: a plan, side data, and streams of arbitrary codecs. All sets of
/// vector instructions give the same values, or all refuse.
pub fn chunk(data: &[u8]) {
    let Some(sample) = Sample::read(&mut Input::new(data), &CODECS, 9000) else { return };
    bounded(sample.frame.len(), 16 * sample.parent.len(), || {
        let mut scratch = Scratch::default();
        let (crc, sound, values) = sample.decode_mended(&mut scratch);
        for simd in sets() {
            let (ok, got) = sample.decode(simd, crc, &mut scratch);
            assert_eq!(ok, sound, "{simd} decides otherwise");
            assert!(!ok || got == values, "{simd} decodes otherwise");
        }
    });
}

/// A chunk, and what decoding it needs.
pub(crate) struct Sample {
    pub(crate) dtype: DType,
    pub(crate) plan: Plan,
    pub(crate) side: Side,
    pub(crate) plain: bool,
    pub(crate) frame: Vec<u8>,
    /// The parent's values, as many as the chunk has.
    pub(crate) parent: Vec<u8>,
    /// With predictor `step` or contexts `update`: the moments' values.
    moments: Vec<Vec<u8>>,
    shape: Vec<u64>,
    chunk: u64,
    crc_encoded: u32,
}

impl Sample {
    /// A chunk of fewer than `most` values; `None` for a plan that a manifest must not hold.
    pub(crate) fn read(input: &mut Input<'_>, codecs: &[CodecId], most: usize) -> Option<Self> {
        let dtype = input.pick(DType::ALL);
        let mut plan = plan(input)?;
        let n = input.len() % most;
        let (flags, chunk) = (input.u8(), u64::from(input.u8() % 4));
        let width = dtype.value_width();
        let side = side(input, width, n);
        let planes = Planes::new(plan.layout, width, n).ok()?;
        let streams = planes.sizes().iter().map(|&size| stream(input, codecs, size));
        let streams: Vec<_> = streams.collect();
        let plain = flags & 1 == 1;
        let frame = if plain { expand(input.take(64), n * width) } else { frame(&streams) };
        let crc = StreamEntry::parse_chunk(&frame, streams.len()).map_or(0, |s| s.crc());
        let mut shape = vec![n as u64];
        if flags & 2 == 2 {
            shape.splice(0..0, [3, u64::from(input.u8())]);
        }
        let mut moments = vec![];
        let (contexts, step) = (side.get(SideKind::CONTEXTS), side.get(SideKind::STEP));
        let mut dtypes = None;
        // One moment or two, whatever the side data says.
        let listed = &[1, 2][..if flags & 16 == 16 { 1 } else { 2 }];
        if !step.is_empty() && plan.is_delta() {
            plan = Plan::step(plan.layout, Digest([0; 32]), 0, listed);
            let said = Step::parse(step).map(|s| iter::once(s.first).chain(s.second).collect());
            dtypes = Some(said);
        } else if !contexts.is_empty() && plan.is_delta() && plan.layout == LayoutId::BYTES {
            plan = Plan::update(Digest([0; 32]), 0, listed);
            dtypes = Some(
                Update::parse(contexts).map(|u| iter::once(u.first).chain(u.second).collect()),
            );
        }
        if let Some(dtypes) = dtypes {
            // Moments of various sizes, mostly of the right ones.
            let dtypes = dtypes.unwrap_or_else(|_| vec![DType::BFloat16, DType::Float32]);
            let widths = dtypes.iter().map(|d| d.value_width());
            moments = widths.map(|w| expand(input.take(24), n * w)).collect();
            if flags & 12 == 12 {
                moments.pop();
            }
        }
        let parent = expand(input.rest(), n * width);
        let crc_encoded = crc;
        Some(Self { dtype, plan, side, plain, frame, parent, moments, shape, chunk, crc_encoded })
    }

    pub(crate) fn record(&self, crc_raw: u32) -> ChunkRecord {
        ChunkRecord {
            offset: 0,
            object: 0,
            len: self.frame.len() as u32,
            plain: self.plain,
            crc_encoded: if self.plain { crc_raw } else { self.crc_encoded },
            crc_raw,
        }
    }

    /// Whether the chunk is sound, given this checksum of its values, and what was decoded.
    fn decode(&self, simd: Simd, crc_raw: u32, scratch: &mut Scratch) -> (bool, Vec<u8>) {
        let Self { dtype, plan, side, chunk, .. } = self;
        let spec = TensorSpec { dtype: *dtype, shape: &self.shape, plan, side, chunk_log2: 16 };
        let (record, mut values) = (self.record(crc_raw), self.parent.clone());
        let engine = engine(simd);
        let moments = self.moments.iter().map(|values| InputValues::Slice(values));
        let inputs: Vec<_> = [InputValues::Destination].into_iter().chain(moments).collect();
        let done = engine.decode(
            &DecodeJob {
                spec: &spec,
                chunk: *chunk,
                record: &record,
                frame: &self.frame,
                inputs: &inputs,
            },
            scratch,
            &mut values,
        );
        (done.is_ok(), values)
    }

    /// As [`Self::decode`] in plain Rust, with the checksum that the values turn out to have.
    pub(crate) fn decode_mended(&self, scratch: &mut Scratch) -> (u32, bool, Vec<u8>) {
        let (_, values) = self.decode(Simd::Scalar, 0, scratch);
        let crc = crc32c(&values);
        let (ok, values) = self.decode(Simd::Scalar, crc, scratch);
        (crc, ok, values)
    }
}

fn engine(simd: Simd) -> &'static CpuEngine {
    static ENGINES: OnceLock<Vec<(Simd, CpuEngine)>> = OnceLock::new();
    let all = ENGINES.get_or_init(|| sets().map(|simd| (simd, CpuEngine::new(simd))).collect());
    all.iter().find(|e| e.0 == simd).map_or(&all[0].1, |e| &e.1)
}

/// A plan that the manifest's parser takes.
fn plan(input: &mut Input<'_>) -> Option<Plan> {
    let predictor = input.pick(&[PredictorId::NONE, PredictorId::PARENT, PredictorId::RANK1]);
    let residual =
        input.pick(&[ResidualId::ID, ResidualId::XOR, ResidualId::SUB, ResidualId::MAGNITUDE]);
    let layout = LayoutId(input.u8() % 6);
    let mut plan = match predictor {
        PredictorId::PARENT => Plan::delta(layout, Digest([0; 32]), 0),
        _ => Plan::direct(layout),
    };
    (plan.predictor, plan.residual) = (predictor, residual);
    plan.require_open().is_ok().then_some(plan)
}

/// Side data: nothing, tables, offsets of `rank1`, contexts `update`, constants of `step`, or several of these, with
/// arbitrary bytes.
fn side(input: &mut Input<'_>, width: usize, n: usize) -> Side {
    let mut side = Side::default();
    let kinds = input.u8();
    if kinds & 1 == 1 {
        let len = usize::from(input.u16()) % 2048;
        let _ = side.push(SideKind::TABLES, input.take(len).to_vec());
    }
    if kinds & 2 == 2 {
        let (rows, cols) = (u32::from(input.u8()), u32::from(input.u16()));
        // Offsets for another number of values are refused before anything else.
        let (rows, cols) = if kinds & 8 == 8 { (1, n as u32) } else { (rows, cols) };
        let mut bytes = [rows.to_le_bytes(), cols.to_le_bytes()].concat();
        let base = u64::from(input.u16()) << (8 * width).saturating_sub(17);
        bytes.extend(base.to_le_bytes());
        bytes.extend([input.u8() % 32, 0, 0, 0, 0, 0, 0, 0]);
        let len = 2 * (rows + cols) as usize;
        bytes.extend(expand(input.take(16), if kinds & 4 == 4 { len } else { len / 2 }));
        let _ = side.push(SideKind::OFFSETS, bytes);
    }
    if kinds & 16 == 16 {
        let numbers: [u8; 4] = input.array();
        let dtypes = [(); 3].map(|()| input.u8() % 5);
        let end = if kinds & 32 == 32 { dtypes[2] } else { 0 };
        let bytes = [&numbers[..], &dtypes[..2], &[0, end]].concat();
        let _ = side.push(SideKind::CONTEXTS, bytes);
    }
    if kinds & 64 == 64 {
        let numbers: [u8; 12] = input.array();
        let dtypes = [(); 2].map(|()| input.u8() % 5);
        let bytes = [&numbers[..], &dtypes, &[0, 0]].concat();
        let _ = side.push(SideKind::STEP, bytes);
    }
    side
}

/// A stream for a plane of `size` bytes: as long, a little shorter, or of a length that the input
/// gives.
fn stream(input: &mut Input<'_>, codecs: &[CodecId], size: usize) -> Stream {
    let (codec, param, how) = (input.pick(codecs), input.u8() % 13, input.u8());
    let given = usize::from(input.u16());
    let bytes = match how % 4 {
        0 => expand(input.take(given % 64), size),
        1 => expand(input.take(given % 64), size.saturating_sub(given % 200)),
        _ => input.take(given).to_vec(),
    };
    (codec, param, bytes)
}

/// Codec, parameter and bytes of a stream.
type Stream = (CodecId, u8, Vec<u8>);

/// A frame of streams: header, gaps and all.
fn frame(streams: &[Stream]) -> Vec<u8> {
    let entry = |(codec, param, bytes): &Stream| StreamEntry {
        codec: *codec,
        param: *param,
        len: bytes.len() as u32,
    };
    let entries: Vec<_> = streams.iter().map(entry).collect();
    let mut out = vec![0; StreamEntry::header_len(entries.len())];
    StreamEntry::write_header(&entries, &mut out);
    for (_, _, bytes) in streams {
        out.resize(out.len().next_multiple_of(16), 0);
        out.extend(bytes);
    }
    out
}
