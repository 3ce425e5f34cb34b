//! Frames that no writer of this project makes: every codec for every plane of every layout, with and without carried
//! bytes, and frames that are nearly valid. Each is decoded, or refused with an error.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

use s4_codec_cpu::rans::{Counts, Precision, Rans, TablePlace, Tables};
use s4_codec_cpu::{Codec, Codecs, Context, Symbols, Workspace, open_codecs};
use s4_engine::{CpuEngine, DecodeJob, InputValues, Scratch, TensorSpec};
use s4_format::layout::Planes;
use s4_format::limits::ALIGN;
use s4_format::side::Side;
use s4_format::{
    ChunkRecord, CodecId, DType, Digest, LayoutId, Plan, ResidualId, StreamEntry, crc32c,
};
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, Width, token_bound};

/// The coding of a plane, if it can be coded; otherwise it is raw.
#[derive(Debug, Clone, Copy)]
enum Coding {
    By(CodecId),
    Rans { precision: Precision, carries: bool },
}

fn codings() -> Vec<Coding> {
    let others =
        CodecId::ALL.iter().filter(|id| id.require_open().is_ok() && **id != CodecId::RANS);
    let mut all: Vec<_> = others.map(|id| Coding::By(*id)).collect();
    for precision in [Precision::P8, Precision::P12] {
        all.extend([false, true].map(|carries| Coding::Rans { precision, carries }));
    }
    all
}

/// A frame, and what its record says.
struct Frame {
    bytes: Vec<u8>,
    crc_encoded: u32,
}

/// Codes the planes of a chunk, the last one first, because a stream may carry the end of the next.
fn build(codecs: &Codecs, planes: &[Vec<u8>], codings: &[Coding]) -> Frame {
    let mut streams: Vec<(StreamEntry, Vec<u8>)> = vec![];
    for (plane, coding) in planes.iter().zip(codings).rev() {
        let raw = (CodecId::RAW, 0, plane.clone());
        let (codec, param, stream) = match *coding {
            Coding::By(id) => {
                let codec = codecs.get(id).unwrap();
                let param = if id == CodecId::BITS { 7 } else { 0 };
                let mut stream = vec![0; codec.bound(param, plane.len())];
                let symbols = Symbols::new(plane, Context::of(param));
                match codec.encode(&symbols, &mut stream, &mut Workspace::default()) {
                    Ok(e) => (id, param, stream[..e.len].to_vec()),
                    Err(_) => raw,
                }
            }
            Coding::Rans { precision, carries } => {
                let (rans, param) = (Rans::new(Simd::Scalar), precision.bits() as u8);
                let table = Counts::of_all(plane).table(precision);
                let tables = Tables { list: &[table], place: TablePlace::Inline };
                let len = rans.carry_len(plane.len());
                let carry = match streams.last_mut() {
                    Some((entry, next)) if carries && len > 0 && next.len() >= len => {
                        entry.len -= len as u32;
                        next.split_off(next.len() - len)
                    }
                    _ => vec![],
                };
                let mut stream = vec![0; rans.bound(param, plane.len())];
                let e = rans.encode_with(tables, &[], &carry, plane, &mut stream).unwrap();
                (CodecId::RANS, param, stream[..e.len].to_vec())
            }
        };
        streams.push((StreamEntry { codec, param, len: stream.len() as u32 }, stream));
    }
    streams.reverse();
    let entries: Vec<_> = streams.iter().map(|s| s.0).collect();
    let mut bytes = vec![0; StreamEntry::header_len(entries.len())];
    StreamEntry::write_header(&entries, &mut bytes);
    for (_, stream) in &streams {
        bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
        bytes.extend_from_slice(stream);
    }
    let crc_encoded = StreamEntry::parse_chunk(&bytes, planes.len()).unwrap().crc();
    Frame { bytes, crc_encoded }
}

/// Values of one chunk, and how they are split.
struct Case {
    dtype: DType,
    plan: Plan,
    values: Vec<u8>,
    planes: Vec<Vec<u8>>,
}

impl Case {
    /// `None` if such values do not have the layout.
    fn new(dtype: DType, layout: LayoutId, values: Vec<u8>) -> Option<Self> {
        let width = dtype.value_width();
        let n = values.len() / width;
        let sizes = Planes::new(layout, width, n).ok()?;
        let mut planes: Vec<_> = sizes.sizes().iter().map(|len| vec![0; *len]).collect();
        let (k, w) = (Kernels::new(Simd::Scalar), Width::from_bytes(width).unwrap());
        let mut plan = Plan::direct(layout);
        match (layout, &mut planes[..]) {
            (LayoutId::FIELDS, [e, a]) => k.split_fields(w, &values, e, a, &mut []),
            (LayoutId::FIELDS, [e, a, b]) => k.split_fields(w, &values, e, a, b),
            (LayoutId::FIELDS_SIGN, [s, e, a]) => k.split_fields_sign(w, &values, s, e, a, &mut []),
            (LayoutId::FIELDS_SIGN, [s, e, a, b]) => k.split_fields_sign(w, &values, s, e, a, b),
            (LayoutId::TOKEN, [tokens, bits]) => {
                plan = Plan::delta(layout, Digest::of(b"parent"), 0);
                plan.residual = ResidualId::SUB;
                // The parent is all zeros.
                let mut residuals = values.clone();
                k.sub_values(w, &mut residuals, &vec![0; values.len()]);
                bits.resize(token_bound(w, n), 0);
                let len = k.split_token(w, &residuals, tokens, bits);
                bits.truncate(len);
            }
            (LayoutId::BYTES, planes) => {
                let mut all = vec![0; values.len()];
                k.split_bytes(w, &values, &mut all);
                for (plane, part) in planes.iter_mut().zip(all.chunks(n)) {
                    plane.copy_from_slice(part);
                }
            }
            (_, [whole]) => whole.copy_from_slice(&values),
            other => panic!("{other:?}"),
        }
        plan.require_open().unwrap();
        Some(Self { dtype, plan, values, planes })
    }

    /// The values, if the frame is decoded: the same with used scratch memory as with fresh memory.
    fn decode(&self, engine: &CpuEngine, frame: &Frame, used: &mut Scratch) -> Option<Vec<u8>> {
        let shape = [(self.values.len() / self.dtype.size()) as u64];
        let side = Side::default();
        let spec = TensorSpec {
            dtype: self.dtype,
            shape: &shape,
            plan: &self.plan,
            side: &side,
            chunk_log2: 16,
        };
        let record = ChunkRecord {
            offset: 0,
            object: 0,
            len: frame.bytes.len() as u32,
            plain: false,
            crc_encoded: frame.crc_encoded,
            crc_raw: crc32c(&self.values),
        };
        let decode = |scratch: &mut Scratch| {
            let mut to = vec![0; self.values.len()];
            let done = engine.decode(
                &DecodeJob {
                    spec: &spec,
                    chunk: 0,
                    record: &record,
                    frame: &frame.bytes,
                    inputs: &[InputValues::Destination],
                },
                scratch,
                &mut to,
            );
            done.is_ok().then_some(to)
        };
        let fresh = decode(&mut Scratch::default());
        assert!(fresh == decode(used), "what is left in memory matters");
        fresh
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as usize % n
    }
}

/// Every combination of codings for `planes` planes, or `most` random ones if there are more.
fn choices(planes: usize, most: usize, random: &mut Random) -> Vec<Vec<Coding>> {
    let all = codings();
    let count = u32::try_from(planes).ok().and_then(|p| all.len().checked_pow(p));
    if let Some(count) = count.filter(|c| *c <= most) {
        let digit = |i: usize, p: usize| all[i / all.len().pow(p as u32) % all.len()];
        return (0..count).map(|i| (0..planes).map(|p| digit(i, p)).collect()).collect();
    }
    (0..most).map(|_| (0..planes).map(|_| all[random.below(all.len())]).collect()).collect()
}

fn cases(n: usize) -> impl Iterator<Item = Case> {
    let dtypes = [
        (DType::UInt8, Kind::int(Width::B1)),
        (DType::BFloat16, Kind::BF16),
        (DType::Float32, Kind::F32),
        (DType::Float64, Kind::F64),
    ];
    dtypes.into_iter().flat_map(move |(dtype, kind)| {
        let wanted = ["zeros", "two-values", "like-weights", "random"];
        let values = patterns::all(kind, n).filter(move |(name, _)| wanted.contains(name));
        values.flat_map(move |(_, values)| {
            LayoutId::ALL.iter().filter_map(move |l| Case::new(dtype, *l, values.clone()))
        })
    })
}

fn engines() -> [CpuEngine; 2] {
    [Simd::Scalar, Simd::detect()].map(CpuEngine::new)
}

#[test]
fn every_plane_of_every_layout_may_be_coded_in_every_way() {
    let (codecs, engines, mut scratch) =
        (open_codecs(Simd::detect()), engines(), Scratch::default());
    let mut random = Random(1);
    let mut decoded = 0;
    for (n, most) in [(200, 2000), (5_000, 60), (40_000, 25)] {
        for case in cases(n) {
            for (i, codings) in choices(case.planes.len(), most, &mut random).iter().enumerate() {
                let frame = build(&codecs, &case.planes, codings);
                let back = case.decode(&engines[i % 2], &frame, &mut scratch);
                let what = (n, case.dtype, case.plan.layout, codings);
                assert!(back.is_some_and(|b| b == case.values), "{what:?}");
                decoded += 1;
            }
        }
    }
    assert!(decoded > 20_000, "{decoded}");
}

/// Changes a frame in a way that its checksum does not show.
fn damage(frame: &mut Vec<u8>, planes: usize, random: &mut Random) {
    let entry = StreamEntry::SIZE * random.below(planes);
    match random.below(8) {
        0 => frame[entry] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 128, 255][random.below(12)],
        1 => frame[entry + 1] = [0, 1, 7, 8, 9, 12, 16, 255][random.below(8)],
        2 => {
            let at = entry + 4;
            let len = u32::from_le_bytes(frame[at..at + 4].try_into().unwrap());
            let by = [1, 2, 16, 32, 64, 1 << 31][random.below(6)];
            let len =
                if random.below(2) == 0 { len.wrapping_add(by) } else { len.wrapping_sub(by) };
            frame[at..at + 4].copy_from_slice(&len.to_le_bytes());
        }
        3 => frame.truncate(frame.len() - random.below(frame.len().min(40))),
        4 => frame.extend((0..random.below(40)).map(|i| i as u8)),
        5 => {
            let other = StreamEntry::SIZE * random.below(planes);
            for i in 0..StreamEntry::SIZE {
                frame.swap(entry + i, other + i);
            }
        }
        6 => {
            let at = random.below(frame.len());
            let end = frame.len().min(at + random.below(64));
            frame[at..end].fill([0, 255][random.below(2)]);
        }
        _ => {
            let at = random.below(frame.len());
            frame[at] ^= 1 << random.below(8);
        }
    }
}

#[test]
fn what_is_nearly_a_frame_is_the_data_or_an_error() {
    let (codecs, engines, mut scratch) =
        (open_codecs(Simd::detect()), engines(), Scratch::default());
    let mut random = Random(2);
    let (mut refused, mut parsed) = (0, 0);
    for (n, most, times) in [(200, 300, 6), (5_000, 20, 6), (40_000, 6, 4)] {
        for case in cases(n) {
            for (i, codings) in choices(case.planes.len(), most, &mut random).iter().enumerate() {
                let whole = build(&codecs, &case.planes, codings);
                for _ in 0..times {
                    let mut bytes = whole.bytes.clone();
                    damage(&mut bytes, case.planes.len(), &mut random);
                    let list = StreamEntry::parse_chunk(&bytes, case.planes.len());
                    let crc_encoded = list.map_or(0, |list| list.crc());
                    parsed += usize::from(crc_encoded != 0);
                    let frame = Frame { bytes, crc_encoded };
                    match case.decode(&engines[i % 2], &frame, &mut scratch) {
                        Some(back) => assert!(back == case.values, "{codings:?}"),
                        None => refused += 1,
                    }
                }
            }
        }
    }
    assert!(refused > 10_000 && parsed > 10_000, "{refused} refused, {parsed} parsed");
}
