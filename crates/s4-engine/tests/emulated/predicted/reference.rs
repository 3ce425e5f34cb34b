//! The reference for the kernels for any prediction: the specification written out again, in plain code.

use s4_codec_cpu::Codec;
use s4_codec_cpu::rans::{Counts, Precision, Rans, Table, TablePlace, Tables, cost, write_tables};
use s4_format::{CodecId, LayoutId, StreamEntry, crc32c};
use s4_planes::Simd;

use crate::emulated::{Contexts, Decode, Encode, Kind, MAX_PLANES, Predicted, shared_table};

pub(super) const INPUT: u8 = 1;
pub(super) const BF16: u8 = 2;
pub(super) const F16: u8 = 3;
pub(super) const OFFSETS: u8 = 4;

pub(super) const XOR: u8 = 1;
pub(super) const SUB: u8 = 2;
pub(super) const MAGNITUDE: u8 = 3;

/// Row and column offsets, and what they are added to.
#[derive(Debug, Clone)]
pub(super) struct Offsets {
    pub(super) base: u64,
    pub(super) shift: u32,
    pub(super) rows: Vec<i16>,
    pub(super) cols: Vec<i16>,
}

impl Offsets {
    pub(super) fn predict(&self, i: u64, bits: u32) -> u64 {
        let cols = self.cols.len() as u64;
        let (row, col) = (self.rows[(i / cols) as usize], self.cols[(i % cols) as usize]);
        if row == i16::MIN {
            return 0;
        }
        let sum = (i64::from(row) + i64::from(col)) as u64;
        self.base.wrapping_add(sum << self.shift) & ((1 << (bits - 1)) - 1)
    }

    /// The data that the kernels read for values from index `first` on: with the row of that value and the rows after
    /// it.
    fn bytes(&self, first: u64) -> Vec<u8> {
        let cols = self.cols.len() as u64;
        let rows = &self.rows[(first / cols) as usize..];
        let sizes = [self.shift, rows.len() as u32, cols as u32, 0];
        let mut out =
            [self.base, first % cols].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        out.extend(sizes.iter().flat_map(|v| v.to_le_bytes()));
        out.extend(rows.iter().flat_map(|v| v.to_le_bytes()));
        out
    }
}

/// A chunk, and how to encode it.
#[derive(Clone)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) width: usize,
    pub(super) layout: LayoutId,
    pub(super) coding: [u8; MAX_PLANES],
    pub(super) residual: u8,
    pub(super) prediction: u8,
    pub(super) sparse: bool,
    /// Top exponent and shift, if there are contexts.
    pub(super) class: Option<(u8, u8)>,
    pub(super) values: Vec<u8>,
    pub(super) input: Vec<u8>,
    pub(super) offsets: Option<Offsets>,
    pub(super) first: u64,
    /// The shared tables of each plane; empty if there are none.
    pub(super) shared: Vec<Vec<Table>>,
}

/// What the chunk becomes.
pub(super) struct Expected {
    pub(super) frame: Vec<u8>,
    pub(super) streams: Vec<StreamEntry>,
    pub(super) plain: bool,
    pub(super) shared: bool,
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
    pub(super) fn new(name: &str, width: usize, layout: LayoutId, values: Vec<u8>) -> Self {
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

    pub(super) fn with_input(self, prediction: u8, residual: u8, input: &[u8]) -> Self {
        Self { prediction, residual, input: input.to_vec(), ..self }
    }

    pub(super) fn with_offsets(self, offsets: Offsets, first: u64) -> Self {
        let (prediction, residual) = (OFFSETS, MAGNITUDE);
        Self { prediction, residual, offsets: Some(offsets), first, ..self }
    }

    pub(super) fn coded(mut self, coding: &[u8]) -> Self {
        self.coding = [coding[coding.len() - 1]; MAX_PLANES];
        self.coding[..coding.len()].copy_from_slice(coding);
        self
    }

    pub(super) fn what(&self) -> String {
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

    pub(super) fn predicted(&self) -> Vec<u64> {
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

    /// The residual of each value.
    pub(super) fn residuals(&self) -> Vec<u64> {
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

    /// The planes of the residuals.
    pub(super) fn planes(&self) -> Vec<Vec<u8>> {
        let (u, bits, w) = (self.residuals(), self.bits(), self.width);
        let low = |x: &u64, bytes: usize| x.to_le_bytes()[..bytes].to_vec();
        let byte = |x: u64, shift: u32| (x >> shift) as u8;
        let fields = |sign: bool| {
            let r: Vec<u64> =
                u.iter().map(|x| if sign { x << 1 } else { x << 1 | x >> (bits - 1) }).collect();
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
                u.iter()
                    .enumerate()
                    .for_each(|(i, x)| signs[i / 8] |= byte(*x, bits - 1) << (i % 8));
                std::iter::once(signs).chain(fields(true)).collect()
            }
        }
    }

    /// The context of each symbol of a plane, and how many tables it has.
    pub(super) fn contexts(&self, plane: usize, planes: &[Vec<u8>]) -> (Vec<u8>, usize) {
        let exponents = usize::from(self.layout == LayoutId::FIELDS_SIGN);
        let Some((top, shift)) = self.class.filter(|_| (exponents..exponents + 2).contains(&plane))
        else {
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

    pub(super) fn expected(&self) -> Expected {
        let plain =
            Expected { frame: self.values.clone(), streams: vec![], plain: true, shared: false };
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
                let unit =
                    (1..=16).find(|&u| plane.len() <= u || plane[u..] == plane[..plane.len() - u]);
                (codec, stream) = ((CodecId::CONST, 0), plane[..unit.unwrap()].to_vec());
            } else if self.coding[i] == 7 {
                stream = vec![0; (7 * plane.len()).div_ceil(8)];
                for (k, v) in plane.iter().enumerate() {
                    (0..7)
                        .for_each(|b| stream[(7 * k + b) / 8] |= (v >> b & 1) << ((7 * k + b) % 8));
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
        // Planes with contexts are counted as dense ones are.
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
        let own_len: u64 =
            own.iter().map(|t| write_tables(std::slice::from_ref(t)).len() as u64).sum();
        let shared = self.shared.get(i).filter(|s| s.len() >= tables);
        assert!(tables <= most);
        let list = shared.filter(|s| bits(s) < bits(&own) + 8 * own_len);
        let rans = Rans::new(Simd::detect());
        let rans =
            if self.sparse && plane.len() > 1 << 16 { rans.with_long_segments() } else { rans };
        let at = behind.len().checked_sub(rans.carry_len(plane.len()));
        let carry = at.map_or(&[][..], |at| &behind[at..]);
        let place = if list.is_some() { TablePlace::Shared } else { TablePlace::Inline };
        let tables = Tables { list: list.map_or(&own[..], |l| &l[..]), place };
        let mut stream =
            vec![0; rans.with_long_segments().bound(self.coding[i], plane.len()) + 4096];
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
            by_moments: vec![],
            in_place,
        }
    }

    fn tables(&self) -> (Contexts, Vec<u8>) {
        let mut tables = [0; MAX_PLANES];
        tables.iter_mut().zip(&self.shared).for_each(|(to, list)| *to = list.len() as u8);
        let contexts = Contexts { tables: Some(tables), ..Contexts::default() };
        (contexts, self.shared.iter().flatten().flat_map(shared_table).collect())
    }

    pub(super) fn encode(&self, skew: u32) -> Encode {
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

    pub(super) fn decode(&self, expected: &Expected, skew: u32, in_place: bool) -> Decode {
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
