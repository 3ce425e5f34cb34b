//! The kernels for any prediction, beside the specification written down once more: what is predicted, what is left
//! of values, and the contexts of what is left, in plain words.

use s4_codec_cpu::rans::{Counts, Precision, Rans, Table, TablePlace, Tables, cost};
use s4_codec_cpu::Codec;
use s4_engine::{CpuEngine, EncodeJob, PlaneCoding, Scratch, TensorPlan, TensorView};
use s4_format::{CodecId, DType, LayoutId, Plan, StreamEntry, crc32c};
use s4_planes::patterns::{self, Kind as Pattern};
use s4_planes::{Simd, Width};

use super::{
    Answers, CORRUPT, Contexts, Decode, Encode, Jobs, Kind, MAX_PLANES, OK, Predicted, UNSUPPORTED,
    shared_table,
};

const INPUT: u8 = 1;
const BF16: u8 = 2;
const F16: u8 = 3;
const OFFSETS: u8 = 4;

const XOR: u8 = 1;
const SUB: u8 = 2;
const MAGNITUDE: u8 = 3;

/// Row and column offsets, and what they are added to.
#[derive(Debug, Clone)]
struct Offsets {
    base: u64,
    shift: u32,
    rows: Vec<i16>,
    cols: Vec<i16>,
}

impl Offsets {
    fn predict(&self, i: u64, bits: u32) -> u64 {
        let cols = self.cols.len() as u64;
        let (row, col) = (self.rows[(i / cols) as usize], self.cols[(i % cols) as usize]);
        if row == i16::MIN {
            return 0;
        }
        let sum = (i64::from(row) + i64::from(col)) as u64;
        self.base.wrapping_add(sum << self.shift) & ((1 << (bits - 1)) - 1)
    }

    /// What the kernels read for values from number `first` on: with its own row and those behind it.
    fn bytes(&self, first: u64) -> Vec<u8> {
        let cols = self.cols.len() as u64;
        let rows = &self.rows[(first / cols) as usize..];
        let sizes = [self.shift, rows.len() as u32, cols as u32, 0];
        let mut out = [self.base, first % cols].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        out.extend(sizes.iter().flat_map(|v| v.to_le_bytes()));
        out.extend(rows.iter().flat_map(|v| v.to_le_bytes()));
        out
    }
}

/// A chunk, and how it is to be encoded.
#[derive(Clone)]
struct Case {
    name: String,
    width: usize,
    layout: LayoutId,
    coding: [u8; MAX_PLANES],
    residual: u8,
    prediction: u8,
    sparse: bool,
    /// Top exponent and shift, if there are contexts.
    class: Option<(u8, u8)>,
    values: Vec<u8>,
    input: Vec<u8>,
    offsets: Option<Offsets>,
    first: u64,
    /// Whether tables are shared, of which kind.
    shared: Vec<Vec<Table>>,
}

/// What it becomes.
struct Expected {
    frame: Vec<u8>,
    streams: Vec<StreamEntry>,
    plain: bool,
    shared: bool,
}

/// Values of `width` bytes, little-endian.
fn numbers(bytes: &[u8], width: usize) -> Vec<u64> {
    let number = |v: &[u8]| v.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
    bytes.chunks(width).map(number).collect()
}

fn ordered(x: u64, bits: u32) -> u64 {
    let half = 1u64 << (bits - 1);
    if x & half == 0 { x } else { x ^ (half - 1) }
}

fn round_f16(x: u32) -> u64 {
    let (a, sign) = (x & 0x7fff_ffff, u64::from(x >> 16 & 0x8000));
    let h = match a {
        0x477f_f000.. => 0x7c00,
        0x3880_0000.. => (a - 0x3800_0000 + 0xfff + (a >> 13 & 1)) >> 13,
        0x3300_0000.. => {
            let (m, k) = ((a & 0x7f_ffff) | 0x80_0000, 126 - (a >> 23));
            (m + (1 << (k - 1)) - 1 + (m >> k & 1)) >> k
        }
        _ => 0,
    };
    sign | u64::from(h)
}

impl Case {
    fn new(name: &str, width: usize, layout: LayoutId, values: Vec<u8>) -> Self {
        Self {
            name: name.into(),
            width,
            layout,
            coding: [8; MAX_PLANES],
            residual: 0,
            prediction: 0,
            sparse: false,
            class: None,
            values,
            input: vec![],
            offsets: None,
            first: 0,
            shared: vec![],
        }
    }

    fn with_input(self, prediction: u8, residual: u8, input: &[u8]) -> Self {
        Self { prediction, residual, input: input.to_vec(), ..self }
    }

    fn with_offsets(self, offsets: Offsets, first: u64) -> Self {
        let (prediction, residual) = (OFFSETS, MAGNITUDE);
        Self { prediction, residual, offsets: Some(offsets), first, ..self }
    }

    fn coded(mut self, coding: &[u8]) -> Self {
        self.coding = [coding[coding.len() - 1]; MAX_PLANES];
        self.coding[..coding.len()].copy_from_slice(coding);
        self
    }

    fn what(&self) -> String {
        let Self { name, width, layout, residual, prediction, class, .. } = self;
        let (n, coding) = (self.values.len() / width, self.coding);
        format!(
            "{name}: {n} values of {width}, {layout}, prediction {prediction}, residual {residual}, \
             contexts {class:?}, codings {coding:?}"
        )
    }

    fn bits(&self) -> u32 {
        8 * self.width as u32
    }

    fn predicted(&self) -> Vec<u64> {
        let n = self.values.len() / self.width;
        match self.prediction {
            INPUT => numbers(&self.input, self.width),
            BF16 | F16 => {
                let input = numbers(&self.input, 4);
                let round = |x: &u64| match self.prediction {
                    BF16 => u64::from(
                        (*x as u32).wrapping_add(0x7fff).wrapping_add(*x as u32 >> 16 & 1) >> 16,
                    ),
                    _ => round_f16(*x as u32),
                };
                input.iter().map(round).collect()
            }
            OFFSETS => {
                let offsets = self.offsets.as_ref().unwrap();
                (0..n as u64).map(|i| offsets.predict(self.first + i, self.bits())).collect()
            }
            _ => vec![0; n],
        }
    }

    /// What is stored of each value.
    fn residuals(&self) -> Vec<u64> {
        let bits = self.bits();
        let mask = u64::MAX >> (64 - bits);
        let half = 1u64 << (bits - 1);
        let left = |(x, p): (u64, u64)| match self.residual {
            XOR => x ^ p,
            SUB => {
                let d = ordered(x, bits).wrapping_sub(ordered(p, bits)) & mask;
                (d << 1 ^ if d & half == 0 { 0 } else { mask }) & mask
            }
            MAGNITUDE => {
                // Differences of the bits below the sign.
                let d = (x & (half - 1)).wrapping_sub(p) & (half - 1);
                let negative = d & (half >> 1) != 0;
                let zigzag = (d << 1 ^ if negative { half - 1 } else { 0 }) & (half - 1);
                x & half | zigzag
            }
            _ => x,
        };
        numbers(&self.values, self.width).into_iter().zip(self.predicted()).map(left).collect()
    }

    /// The planes of what is stored.
    fn planes(&self) -> Vec<Vec<u8>> {
        let (u, bits, w) = (self.residuals(), self.bits(), self.width);
        let low = |x: &u64, bytes: usize| x.to_le_bytes()[..bytes].to_vec();
        let byte = |x: u64, shift: u32| (x >> shift) as u8;
        let fields = |sign: bool| {
            let r: Vec<u64> = u.iter().map(|x| if sign { x << 1 } else { x << 1 | x >> (bits - 1) }).collect();
            let second = |x: &u64| byte(*x, bits - 16) >> u32::from(sign);
            let mut planes = vec![r.iter().map(|x| byte(*x, bits - 8)).collect::<Vec<u8>>()];
            planes.push(r.iter().map(second).collect());
            if w > 2 {
                let source = if sign { &u } else { &r };
                planes.push(source.iter().flat_map(|x| low(x, w - 2)).collect());
            }
            planes
        };
        match self.layout {
            LayoutId::WHOLE => vec![u.iter().flat_map(|x| low(x, w)).collect()],
            LayoutId::BYTES => {
                (0..w).rev().map(|b| u.iter().map(|x| byte(*x, 8 * b as u32)).collect()).collect()
            }
            LayoutId::FIELDS => fields(false),
            _ => {
                let mut signs = vec![0; u.len().div_ceil(8)];
                u.iter().enumerate().for_each(|(i, x)| signs[i / 8] |= byte(*x, bits - 1) << (i % 8));
                std::iter::once(signs).chain(fields(true)).collect()
            }
        }
    }

    /// The context of each symbol of a plane, and how many tables it has.
    fn contexts(&self, plane: usize, planes: &[Vec<u8>]) -> (Vec<u8>, usize) {
        let exponents = usize::from(self.layout == LayoutId::FIELDS_SIGN);
        let Some((top, shift)) = self.class.filter(|_| (exponents..exponents + 2).contains(&plane)) else {
            return (vec![], 1);
        };
        let class = |p: &u64| {
            let exponent = (p >> (self.bits() - 9) & 255) as u8;
            (top.saturating_sub(exponent) >> shift).min(7)
        };
        let classes: Vec<u8> = numbers(&self.input, self.width).iter().map(class).collect();
        if plane == exponents {
            return (classes, 8);
        }
        let context = |(class, e): (u8, &u8)| match e {
            0 => class,
            1 => 8,
            _ => 9,
        };
        (classes.into_iter().zip(&planes[exponents]).map(context).collect(), 10)
    }

    fn expected(&self) -> Expected {
        let plain = Expected { frame: self.values.clone(), streams: vec![], plain: true, shared: false };
        let planes = self.planes();
        let repeats = |bytes: &[u8], look: usize| {
            let head = &bytes[..bytes.len().min(look)];
            (1..=16).any(|u| head.len() <= u || head[u..] == head[..head.len() - u])
        };
        if self.coding[..planes.len()].iter().all(|c| *c == 0) && !repeats(&self.values, 80) {
            return plain;
        }
        let (mut behind, mut streams, mut shared) = (vec![], vec![], false);
        for (i, plane) in planes.iter().enumerate().rev() {
            let (mut codec, mut stream, mut carried) = ((CodecId::RAW, 0), plane.clone(), 0);
            if repeats(plane, plane.len()) {
                let unit = (1..=16).find(|&u| plane.len() <= u || plane[u..] == plane[..plane.len() - u]);
                (codec, stream) = ((CodecId::CONST, 0), plane[..unit.unwrap()].to_vec());
            } else if self.coding[i] == 7 {
                stream = vec![0; (7 * plane.len()).div_ceil(8)];
                for (k, v) in plane.iter().enumerate() {
                    (0..7).for_each(|b| stream[(7 * k + b) / 8] |= (v >> b & 1) << ((7 * k + b) % 8));
                }
                codec = (CodecId::BITS, 7);
            } else if self.coding[i] != 0 {
                let done;
                (stream, carried, done) = self.rans(i, &planes, &behind);
                codec = (CodecId::RANS, self.coding[i]);
                if stream.len() < plane.len() {
                    shared |= done;
                }
            }
            if stream.len() >= plane.len() && codec.0 != CodecId::CONST {
                (codec, stream, carried) = ((CodecId::RAW, 0), plane.clone(), 0);
            }
            if let Some((_, stored)) = streams.last_mut() {
                let stored: &mut Vec<u8> = stored;
                stored.truncate(stored.len() - carried);
            }
            streams.push((codec, stream.clone()));
            behind = stream;
        }
        let mut out = Expected { frame: vec![], streams: vec![], plain: false, shared };
        for ((codec, param), stream) in streams.iter().rev() {
            let len = stream.len() as u32;
            out.streams.push(StreamEntry { codec: *codec, param: *param, len });
            out.frame.extend([codec.0, *param, 0, 0]);
            out.frame.extend(len.to_le_bytes());
        }
        for (_, stream) in streams.iter().rev() {
            out.frame.resize(out.frame.len().next_multiple_of(16), 0);
            out.frame.extend(stream);
        }
        if out.frame.len() < self.values.len() { out } else { Expected { shared, ..plain } }
    }

    /// A plane's stream, what it carries, and whether it uses shared tables.
    fn rans(&self, i: usize, planes: &[Vec<u8>], behind: &[u8]) -> (Vec<u8>, usize, bool) {
        let precision = Precision::from_param(self.coding[i]).unwrap();
        let (contexts, most) = self.contexts(i, planes);
        let plane = &planes[i];
        // Those with contexts are counted as dense ones are.
        let all = plane.len() <= 8192 || self.sparse && contexts.is_empty();
        let tables = 1 + contexts.iter().fold(0, |a, &b| usize::from(b).max(a));
        let mut counts = vec![Counts::new(); tables];
        for (k, &symbol) in plane.iter().enumerate() {
            if all || k % 512 / 64 == 5 * (k / 512) % 8 {
                counts[contexts.get(k).map_or(0, |&c| usize::from(c))].add_symbol(symbol, 1);
            }
        }
        if !all {
            counts = counts.into_iter().map(Counts::partial).collect();
        }
        for count in counts.iter_mut().filter(|c| c.total() == 0) {
            count.add_symbol(0, 1);
            *count = count.clone().partial();
        }
        let own: Vec<Table> = counts.iter().map(|c| c.table(precision)).collect();
        let total = counts.iter().map(Counts::total).sum::<u64>().max(1);
        let bits = |tables: &[Table]| {
            let sum = counts.iter().zip(tables).map(|(c, t)| cost(c, t)).sum::<u64>();
            sum * plane.len() as u64 / total
        };
        let own_len: u64 = own.iter().map(|t| s4_codec_cpu::rans::write_tables(std::slice::from_ref(t)).len() as u64).sum();
        let shared = self.shared.get(i).filter(|s| s.len() >= tables);
        assert!(tables <= most);
        let list = shared.filter(|s| bits(s) < bits(&own) + 8 * own_len);
        let rans = Rans::new(Simd::detect());
        let rans = if self.sparse && plane.len() > 1 << 16 { rans.with_long_segments() } else { rans };
        let at = behind.len().checked_sub(rans.carry_len(plane.len()));
        let carry = at.map_or(&[][..], |at| &behind[at..]);
        let place = if list.is_some() { TablePlace::Shared } else { TablePlace::Inline };
        let tables = Tables { list: list.map_or(&own[..], |l| &l[..]), place };
        let mut stream = vec![0; rans.with_long_segments().bound(self.coding[i], plane.len()) + 4096];
        let done = rans.encode_with(tables, &contexts, carry, plane, &mut stream).unwrap();
        stream.truncate(done.len);
        (stream, done.carried, place == TablePlace::Shared)
    }

    fn told(&self, in_place: bool) -> Predicted {
        Predicted {
            prediction: self.prediction,
            sparse: self.sparse,
            contexts: u8::from(self.class.is_some()),
            class: self.class.unwrap_or_default(),
            offsets: self.offsets.as_ref().map(|o| o.bytes(self.first)).unwrap_or_default(),
            columns: {
                let columns = self.offsets.iter().flat_map(|o| &o.cols);
                columns.flat_map(|v| v.to_le_bytes()).collect()
            },
            in_place,
        }
    }

    fn tables(&self) -> (Contexts, Vec<u8>) {
        let mut tables = [0; MAX_PLANES];
        tables.iter_mut().zip(&self.shared).for_each(|(to, list)| *to = list.len() as u8);
        let contexts = Contexts { tables: Some(tables), ..Contexts::default() };
        (contexts, self.shared.iter().flatten().flat_map(shared_table).collect())
    }

    fn encode(&self, skew: u32) -> Encode {
        let (contexts, tables) = self.tables();
        let planes = self.planes().len();
        let mut coding = [0; MAX_PLANES];
        coding[..planes].copy_from_slice(&self.coding[..planes]);
        Encode {
            kind: Kind::Predicted,
            width: self.width,
            layout: self.layout,
            residual: self.residual,
            coding,
            flags: 0,
            skew,
            tables,
            values: self.values.clone(),
            parent: self.input.clone(),
            contexts,
            predicted: self.told(false),
        }
    }

    fn decode(&self, expected: &Expected, skew: u32, in_place: bool) -> Decode {
        let (contexts, tables) = self.tables();
        let crc = crc32c(&self.values);
        let planes = if expected.plain { 0 } else { expected.streams.len() };
        let stored = StreamEntry::parse_chunk(&expected.frame, planes);
        Decode {
            kind: Kind::Predicted,
            width: self.width,
            layout: self.layout,
            residual: self.residual,
            plain: expected.plain,
            n: self.values.len() / self.width,
            check: true,
            crc_encoded: if expected.plain { crc } else { stored.unwrap().crc() },
            crc_raw: crc,
            skew,
            tables,
            frame: expected.frame.clone(),
            parent: self.input.clone(),
            contexts,
            predicted: self.told(in_place),
        }
    }
}

/// Encodes and decodes cases by the kernels, and compares.
fn compare(file: &'static str, cases: &[Case]) -> Vec<Expected> {
    let expected: Vec<_> = cases.iter().map(Case::expected).collect();
    let skew = |i: usize| (i % 3 / 2 * cases[i].width) as u32;
    let mut jobs = Jobs::new(file);
    let encode: Vec<_> = cases.iter().enumerate().map(|(i, c)| c.encode(skew(i))).collect();
    let decode: Vec<_> = (0..cases.len())
        .map(|i| {
            // A parent's values may lie where the chunk's go.
            let in_place = cases[i].prediction == INPUT && i % 2 == 1;
            cases[i].decode(&expected[i], skew(i), in_place)
        })
        .collect();
    jobs.encode(&encode);
    assert_eq!(jobs.decode(&decode).len(), cases.len());
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    for ((case, e), got) in cases.iter().zip(&expected).zip(encoded) {
        let what = case.what();
        assert_eq!((got.status, got.plain), (0, e.plain), "{what}");
        assert_eq!(got.streams, e.streams, "{what}");
        assert!(got.frame == e.frame, "{what}: the frame differs");
        assert_eq!((got.shared, got.crc_raw), (e.shared, crc32c(&case.values)), "{what}");
    }
    for (case, (status, values)) in cases.iter().zip(decoded) {
        assert_eq!(*status, OK, "{}", case.what());
        assert!(*values == case.values, "{}: the values differ", case.what());
    }
    expected
}

fn noise(i: u64) -> u64 {
    (i ^ 0x5bd1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 17
}

fn kind_of(width: usize) -> Pattern {
    match width {
        1 => Pattern::int(Width::B1),
        2 => Pattern::BF16,
        4 => Pattern::F32,
        _ => Pattern::F64,
    }
}

/// Values that are nearly those of `of`: most differ little, some much.
fn near(of: &[u8], width: usize) -> Vec<u8> {
    let mut out = of.to_vec();
    for (i, v) in out.chunks_mut(width).enumerate() {
        match noise(i as u64) % 16 {
            0 => v[width - 1] ^= 0x81,
            1..6 => {}
            k => v[0] = v[0].wrapping_add(k as u8).wrapping_sub(9),
        }
    }
    out
}

fn layouts(width: usize) -> Vec<LayoutId> {
    let mut all = vec![LayoutId::WHOLE, LayoutId::BYTES];
    if width > 1 {
        all.extend([LayoutId::FIELDS, LayoutId::FIELDS_SIGN]);
    }
    all
}

/// Offsets whose rows and columns hold `n` values from `first` on.
fn offsets(width: usize, cols: usize, first: u64, n: usize) -> Offsets {
    let bits = 8 * width as u32;
    let rows = (first as usize + n).div_ceil(cols);
    let of = |i: u64, seed: u64| match noise(i + seed) % 23 {
        0 => i16::MIN,
        1 => i16::MAX,
        2 => i16::MIN + 1,
        k => (k as i16 - 12) * 17,
    };
    let shift = [0, 0, 0, 0, 14, 0, 0, 0, 43][width];
    Offsets {
        base: 0x3f << (bits - 9) | 5,
        shift,
        rows: (0..rows as u64).map(|i| of(i, 3)).collect(),
        cols: (0..cols as u64).map(|i| of(i, 99)).collect(),
    }
}

#[test]
fn rows_and_columns_predict_as_specified() {
    let mut cases = vec![];
    for width in [2, 4, 8] {
        let mut some = 0;
        for (cols, first) in [(1, 0), (7, 3), (8, 65536), (24, 65541), (1000, 65536), (100_000, 65536)] {
            for n in [1, 5, 16, 257, 2100] {
                let patterns: Vec<_> = patterns::all(kind_of(width), n).collect();
                let (name, values) = &patterns[some % patterns.len()];
                some += 1;
                for layout in layouts(width) {
                    let o = offsets(width, cols, first, n);
                    // Values near their prediction, too.
                    let like = |i: u64| o.predict(first + i, 8 * width as u32) ^ noise(i) % 64;
                    let close: Vec<u8> = (0..n as u64).flat_map(|i| like(i).to_le_bytes()[..width].to_vec()).collect();
                    for values in [values, &close] {
                        let case = Case::new(name, width, layout, values.clone()).with_offsets(o.clone(), first);
                        let codings: &[u8] = if layout == LayoutId::FIELDS_SIGN { &[0, 8, 7, 0] } else { &[8, 0] };
                        cases.push(case.clone().coded(codings));
                        cases.push(case.coded(&[12, 8, 12, 8]));
                    }
                }
            }
        }
        // Beyond what is counted as a whole, and with more segments than one.
        let o = offsets(width, 768, 65536 * 3 + 5, 20_000);
        let like = |i: u64| o.predict(65536 * 3 + 5 + i, 8 * width as u32) ^ noise(i) % 640;
        let values = (0..20_000).flat_map(|i| like(i).to_le_bytes()[..width].to_vec()).collect();
        let case = Case::new("long", width, LayoutId::FIELDS_SIGN, values).with_offsets(o, 65536 * 3 + 5);
        cases.push(case.coded(&[0, 8, 8, 0]));
    }
    let expected = compare("offsets", &cases);
    let coded = expected.iter().filter(|e| !e.plain).count();
    assert!(coded > cases.len() / 4, "{coded} of {} are coded", cases.len());
}

#[test]
fn rows_of_zeros_stay_constant() {
    let o = Offsets { base: 1000, shift: 14, rows: vec![i16::MIN; 4], cols: (0..600).collect() };
    let case = Case::new("zeros", 4, LayoutId::FIELDS_SIGN, vec![0; 4 * 2400]).with_offsets(o, 0);
    let [e] = &compare("zero-rows", &[case])[..] else { panic!() };
    assert!(!e.plain && e.streams.iter().all(|s| s.codec == CodecId::CONST), "{:?}", e.streams);
}

#[test]
fn inputs_predict_as_specified() {
    let mut cases = vec![];
    for width in [1, 2, 4, 8] {
        for n in [1, 3, 255, 2100] {
            for (name, values) in patterns::all(kind_of(width), n) {
                for (k, layout) in layouts(width).into_iter().enumerate() {
                    let residual = if (k + n) % 2 == 0 { XOR } else { SUB };
                    let input = near(&values, width);
                    let case = Case::new(name, width, layout, values.clone());
                    cases.push(case.with_input(INPUT, residual, &input).coded(&[[8, 12][n % 2]; 1]));
                }
            }
        }
        // The same values: every plane is constant.
        let values = patterns::all(kind_of(width), 3000).next().unwrap().1;
        let case = Case::new("same", width, layouts(width).pop().unwrap(), values.clone());
        cases.push(case.with_input(INPUT, XOR, &values));
    }
    // Differences of which all symbols are counted, and long segments.
    for (n, coding) in [(9001, 8), ((1 << 16) + 300, 12)] {
        let values = patterns::all(Pattern::BF16, n).find(|p| p.0 == "like-weights").unwrap().1;
        let mut case = Case::new("sparse", 2, LayoutId::FIELDS, values.clone());
        case.sparse = true;
        cases.push(case.with_input(INPUT, SUB, &near(&values, 2)).coded(&[coding]));
    }
    let expected = compare("inputs", &cases);
    let same = expected.iter().filter(|e| e.streams.iter().all(|s| s.codec == CodecId::CONST) && !e.plain);
    assert!(same.count() >= 4);
}

#[test]
fn rounded_copies_are_nothing_but_their_exceptions() {
    let mut cases = vec![];
    // Every exponent with mantissas around ties, and random ones.
    let mut wide: Vec<u32> = vec![];
    for exponent in 0..512u32 {
        for mantissa in [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0x1_8000, 0x7f_ffff] {
            wide.push(exponent << 23 | mantissa);
        }
    }
    wide.extend((0..3000).map(|i| noise(i) as u32));
    let input: Vec<u8> = wide.iter().flat_map(|x| x.to_le_bytes()).collect();
    for prediction in [BF16, F16] {
        let mut case = Case::new("rounded", 2, LayoutId::FIELDS, vec![0; 2 * wide.len()]);
        case = case.with_input(prediction, XOR, &input);
        let rounded: Vec<u8> = case.predicted().iter().flat_map(|x| (*x as u16).to_le_bytes()).collect();
        for (name, every) in [("all", usize::MAX), ("few differ", 997), ("one differs", wide.len() - 1)] {
            case.name = name.into();
            case.values = rounded.clone();
            (0..wide.len()).step_by(every).skip(1).for_each(|i| case.values[2 * i] ^= 1);
            for layout in layouts(2) {
                cases.push(Case { layout, ..case.clone() }.coded(&[8]));
            }
        }
        // What is rounded by the language is the same, but for NaNs.
        let finite = |x: &u32| !f32::from_bits(*x).is_nan();
        if prediction == BF16 {
            let as_f32 = |x: u64| f32::from_bits((x as u32) << 16);
            for (x, p) in wide.iter().zip(case.predicted()).filter(|(x, _)| finite(x)) {
                let (x, p) = (f32::from_bits(*x), as_f32(p));
                let next = |d: i32| f32::from_bits(p.to_bits().wrapping_add_signed(d << 16));
                let error = (f64::from(x) - f64::from(p)).abs();
                let others = [next(-1), next(1)].into_iter().filter(|v| v.is_finite());
                assert!(!p.is_finite() || others.map(|v| (f64::from(x) - f64::from(v)).abs()).all(|e| error <= e));
            }
        }
    }
    let expected = compare("rounded", &cases);
    assert!(expected.iter().filter(|e| e.streams.iter().all(|s| s.codec == CodecId::CONST)).count() >= 4);
}

/// Cases with contexts: `n` values that a step changed.
fn with_contexts(width: usize, n: usize, class: (u8, u8), sparse: bool) -> Vec<Case> {
    let mut cases = vec![];
    for name in ["like-weights", "like-squares", "random", "zeros", "weights-and-nans"] {
        let Some((_, values)) = patterns::all(kind_of(width), n).find(|p| p.0 == name) else { continue };
        for layout in [LayoutId::FIELDS, LayoutId::FIELDS_SIGN] {
            for coding in [[8, 8, 0, 0], [12, 12, 12, 12], [12, 8, 12, 0]] {
                let case = Case::new(name, width, layout, values.clone());
                let case = case.with_input(INPUT, SUB, &near(&values, width)).coded(&coding);
                cases.push(Case { class: Some(class), sparse, ..case });
            }
        }
    }
    cases
}

#[test]
fn exponents_of_the_input_tell_the_tables() {
    let mut cases = vec![];
    for width in [2, 4, 8] {
        for n in [1, 9, 700, 9001] {
            cases.extend(with_contexts(width, n, (127, 1), true));
        }
        cases.extend(with_contexts(width, 1000, (255, 7), true));
        cases.extend(with_contexts(width, 1000, (0, 0), false));
        cases.extend(with_contexts(width, 9001, (124, 0), false));
    }
    // Long segments.
    cases.extend(with_contexts(2, (1 << 16) + 300, (126, 0), true).into_iter().take(3));
    // Shared tables as good as its own, and too few of them.
    let mut more = vec![];
    for case in cases.iter().filter(|c| c.values.len() > 5000) {
        let planes = case.planes();
        let tables = |i: usize| {
            let (contexts, tables) = case.contexts(i, &planes);
            let mut counts = vec![Counts::new(); tables];
            for (k, &symbol) in planes[i].iter().enumerate() {
                counts[contexts.get(k).map_or(0, |&c| usize::from(c))].add_symbol(symbol, 1);
            }
            let precision = Precision::from_param(case.coding[i]);
            precision.map_or(vec![], |p| counts.into_iter().map(|c| c.partial().table(p)).collect::<Vec<_>>())
        };
        let mut shared: Vec<Vec<Table>> = (0..planes.len()).map(tables).collect();
        if more.len() % 3 == 2 {
            shared.iter_mut().for_each(|list| drop(list.pop()));
        }
        more.push(Case { shared, name: format!("{}, shared", case.name), ..case.clone() });
    }
    cases.extend(more);
    let expected = compare("exponents", &cases);
    let of = |k: u8| {
        let count = |e: &Expected| {
            let streams = StreamEntry::parse_chunk(&e.frame, e.streams.len()).unwrap();
            streams.items().iter().any(|(entry, bytes)| entry.codec == CodecId::RANS && bytes.get(6) == Some(&k))
        };
        expected.iter().filter(|e| !e.plain).any(count)
    };
    assert!(of(8) && of(10) && (2..8).any(of) && of(1));
    assert!(expected.iter().any(|e| e.shared) && expected.iter().any(|e| !e.shared && !e.plain));
}

#[test]
fn what_is_dense_is_as_without_a_prediction() {
    // The planes' streams are those of residuals that are stored as values are.
    let engine = CpuEngine::new(Simd::detect());
    for width in [2, 4] {
        let n = 20_000;
        let o = offsets(width, 96, 0, n);
        let like = |i: u64| o.predict(i, 8 * width as u32) ^ noise(i) % 640;
        let values: Vec<u8> = (0..n as u64).flat_map(|i| like(i).to_le_bytes()[..width].to_vec()).collect();
        let case = Case::new("dense", width, LayoutId::FIELDS, values).with_offsets(o, 0).coded(&[8, 0]);
        let data: Vec<u8> = case.residuals().iter().flat_map(|u| u.to_le_bytes()[..width].to_vec()).collect();
        let dtype = if width == 2 { DType::BFloat16 } else { DType::Float32 };
        let view = TensorView { dtype, shape: &[n as u64], data: &data };
        let planes = vec![PlaneCoding::RANS8, PlaneCoding::RAW, PlaneCoding::RAW];
        let plan = TensorPlan::new(Plan::direct(LayoutId::FIELDS), planes[..width.min(3)].to_vec(), 16);
        let mut frame = vec![];
        let job = EncodeJob { view: &view, plan: &plan, chunk: 0, inputs: &[] };
        engine.encode(&job, &mut Scratch::default(), &mut frame).unwrap();
        assert!(frame == case.expected().frame);
    }
}

#[test]
fn descriptors_that_do_not_fit_are_refused() {
    let values = patterns::all(Pattern::F32, 300).find(|p| p.0 == "like-weights").unwrap().1;
    let input = near(&values, 4);
    let good = Case::new("good", 4, LayoutId::FIELDS, values.clone()).with_input(INPUT, SUB, &input);
    let good = Case { class: Some((127, 1)), ..good };
    let mut long = good.clone();
    (long.values, long.input) = (values.repeat(20), input.repeat(20));
    let expected = long.expected();
    assert!(expected.streams[0].codec == CodecId::RANS, "{:?}", expected.streams);
    let o = offsets(4, 10, 0, 300);
    let placed = Case::new("placed", 4, LayoutId::FIELDS, values).with_offsets(o, 0);
    let wrong: Vec<(Encode, fn(&mut Encode))> = vec![
        (good.encode(0), |e| e.predicted.contexts = 2),
        (good.encode(0), |e| e.predicted.class.1 = 8),
        (good.encode(0), |e| e.layout = LayoutId::BYTES),
        (good.encode(0), |e| e.parent.clear()),
        (good.encode(0), |e| e.predicted.prediction = BF16),
        (good.encode(0), |e| e.predicted.prediction = 9),
        (good.encode(0), |e| e.residual = MAGNITUDE),
        (good.encode(0), |e| e.residual = 0),
        (placed.encode(0), |e| e.residual = SUB),
        (placed.encode(0), |e| e.predicted.offsets.clear()),
        // The last value is in a row that is not there.
        (placed.encode(0), |e| e.predicted.offsets[8] = 1),
        (placed.encode(0), |e| e.predicted.offsets[16] = 32),
        (placed.encode(0), |e| e.predicted.offsets[24..28].fill(0)),
        (placed.encode(0), |e| e.predicted.columns.clear()),
    ];
    let mut jobs = Jobs::new("predicted-refused");
    let encode: Vec<_> = wrong.into_iter().map(|(mut e, change)| (change(&mut e), e).1).collect();
    jobs.encode(&encode);
    // Fewer tables than contexts.
    let mut several = long.decode(&expected, 0, false);
    several.check = false;
    let first = StreamEntry::header_len(expected.streams.len());
    several.frame[first + 6] -= 1;
    jobs.decode(&[several]);
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    for (i, e) in encoded.iter().enumerate() {
        assert_eq!(u32::from(e.status), UNSUPPORTED, "number {i}");
    }
    assert_eq!(decoded[0].0, CORRUPT);
}
