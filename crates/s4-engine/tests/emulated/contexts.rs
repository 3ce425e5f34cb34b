//! Streams of several tables, a context for each symbol: the kernels' instances against the codec.

use s4_codec_cpu::rans::{Counts, Precision, Rans, Table, write_tables};
use s4_codec_cpu::{Codec, Context, Symbols, Workspace};
use s4_format::{CodecId, LayoutId, StreamEntry, crc32c};
use s4_planes::Simd;

use super::{Answers, CORRUPT, Contexts, Decode, Encode, Jobs, Kind, MAX_PLANES, OK, UNSUPPORTED};
use super::{Predicted, VALUE_CHECKSUM, shared_table};

/// A plane, and what its stream is coded with.
#[derive(Clone)]
struct Plane {
    symbols: Vec<u8>,
    /// Empty: all are 0.
    contexts: Vec<u8>,
    precision: Precision,
    shared: Vec<Table>,
}

/// A chunk of layout `bytes` whose planes are given, of values of as many bytes.
struct Case {
    name: String,
    planes: Vec<Plane>,
    /// What the planes differ from; empty if they are the values'.
    parent: Vec<u8>,
    values: Vec<u8>,
    /// As the codec makes it.
    frame: Vec<u8>,
    streams: Vec<StreamEntry>,
    shared: bool,
}

fn noise(i: usize) -> usize {
    (i ^ 0x5bd1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33
}

fn param(precision: Precision) -> u8 {
    precision.bits() as u8
}

/// `n` symbols, skewed around another one for each of `tables` contexts.
fn plane(n: usize, tables: usize, precision: Precision, seed: usize) -> Plane {
    let contexts: Vec<u8> = (0..n).map(|i| (noise(i * 3 + seed) % tables) as u8).collect();
    let skewed = |i: usize| (noise(i + 77 * seed) % 4096).leading_zeros() as u8 & 63;
    let symbols = contexts
        .iter()
        .enumerate()
        .map(|(i, c)| skewed(i).wrapping_add(c.wrapping_mul(37)))
        .collect();
    Plane { symbols, contexts, precision, shared: vec![] }
}

impl Plane {
    fn counts(&self, tables: usize) -> Vec<Counts> {
        let mut counts = vec![Counts::new(); tables];
        for (i, &symbol) in self.symbols.iter().enumerate() {
            let context = self.contexts.get(i).map_or(0, |&c| usize::from(c));
            counts[context].add_symbol(symbol, 1);
        }
        counts.into_iter().map(Counts::partial).collect()
    }

    /// Adds shared tables that are as good as its own.
    fn sharing(mut self, tables: usize) -> Self {
        self.shared = self.counts(tables).iter().map(|c| c.table(self.precision)).collect();
        self
    }
}

impl Case {
    fn new(name: &str, planes: Vec<Plane>, parent: bool) -> Self {
        let (width, n) = (planes.len(), planes[0].symbols.len());
        let parent: Vec<u8> =
            if parent { (0..n * width).map(|i| noise(i) as u8).collect() } else { vec![] };
        // Plane 0 has the highest bytes.
        let mut values: Vec<u8> =
            (0..n * width).map(|i| planes[width - 1 - i % width].symbols[i / width]).collect();
        values.iter_mut().zip(&parent).for_each(|(v, p)| *v ^= p);
        let mut this = Self {
            name: format!("{name}: {n} values of {width}"),
            planes,
            parent,
            values,
            frame: vec![],
            streams: vec![],
            shared: false,
        };
        this.code();
        this
    }

    /// Codes the planes as an engine does, the last one first.
    fn code(&mut self) {
        let (rans, mut work) = (Rans::new(Simd::detect()), Workspace::default());
        let (mut behind, mut streams) = (vec![], vec![]);
        for plane in self.planes.iter().rev() {
            let param = param(plane.precision);
            let tables = write_tables(&plane.shared);
            let context = Context { param, tables: &tables, contexts: &plane.contexts };
            let symbols = Symbols {
                bytes: &plane.symbols,
                context,
                own_tables: true,
                behind: &behind,
                sparse: !self.parent.is_empty(),
            };
            let mut stream = vec![0; rans.bound(param, plane.symbols.len())];
            let done = rans.encode(&symbols, &mut stream, &mut work).unwrap();
            stream.truncate(done.len);
            let (mut codec, mut carried) = ((CodecId::RANS, param), done.carried);
            self.shared |= done.shared;
            if done.len >= plane.symbols.len() {
                (stream, codec, carried) = (plane.symbols.clone(), (CodecId::RAW, 0), 0);
            }
            if let Some((_, stored)) = streams.last_mut() {
                let stored: &mut Vec<u8> = stored;
                stored.truncate(stored.len() - carried);
            }
            streams.push((codec, stream.clone()));
            behind = stream;
        }
        for ((codec, param), stream) in streams.iter().rev() {
            let len = stream.len() as u32;
            self.streams.push(StreamEntry { codec: *codec, param: *param, len });
            self.frame.extend([codec.0, *param, 0, 0]);
            self.frame.extend(len.to_le_bytes());
        }
        for (_, stream) in streams.iter().rev() {
            self.frame.resize(self.frame.len().next_multiple_of(16), 0);
            self.frame.extend(stream);
        }
    }

    fn layout(&self) -> LayoutId {
        if self.planes.len() == 1 { LayoutId::WHOLE } else { LayoutId::BYTES }
    }

    fn residual(&self) -> u8 {
        u8::from(!self.parent.is_empty())
    }

    fn contexts(&self) -> Contexts {
        let mut contexts = Contexts { tables: Some([0; MAX_PLANES]), ..Contexts::default() };
        for (i, plane) in self.planes.iter().enumerate() {
            contexts.bytes.resize(contexts.bytes.len().next_multiple_of(16), 0);
            let none = plane.contexts.is_empty();
            contexts.planes |= u8::from(!none) << i;
            let bytes = if none { &plane.symbols } else { &plane.contexts };
            contexts.bytes.extend(bytes);
            contexts.tables.as_mut().unwrap()[i] = plane.shared.len() as u8;
        }
        contexts
    }

    fn tables(&self) -> Vec<u8> {
        self.planes.iter().flat_map(|p| p.shared.iter().flat_map(shared_table)).collect()
    }

    fn encode(&self) -> Encode {
        let mut coding = [0; MAX_PLANES];
        coding.iter_mut().zip(&self.planes).for_each(|(c, p)| *c = param(p.precision));
        let kinds = [Kind::Contexts, Kind::ResidualContexts];
        Encode {
            kind: kinds[usize::from(self.residual())],
            width: self.planes.len(),
            layout: self.layout(),
            residual: self.residual(),
            coding,
            flags: 0,
            skew: 0,
            tables: self.tables(),
            values: self.values.clone(),
            parent: self.parent.clone(),
            contexts: self.contexts(),
            predicted: Predicted::default(),
        }
    }

    fn decode(&self) -> Decode {
        let parsed = StreamEntry::parse_chunk(&self.frame, self.streams.len()).unwrap();
        Decode {
            kind: Kind::Contexts,
            width: self.planes.len(),
            layout: self.layout(),
            residual: self.residual(),
            plain: false,
            n: self.planes[0].symbols.len(),
            check: true,
            crc_encoded: parsed.crc(),
            crc_raw: crc32c(&self.values),
            skew: 0,
            tables: self.tables(),
            frame: self.frame.clone(),
            parent: self.parent.clone(),
            contexts: self.contexts(),
            predicted: Predicted::default(),
        }
    }
}

/// Number of tables in a stream of a frame.
fn tables_of(case: &Case, i: usize) -> u8 {
    let streams = StreamEntry::parse_chunk(&case.frame, case.streams.len()).unwrap();
    streams.items()[i].1[6]
}

fn cases() -> Vec<Case> {
    let (p8, p12) = (Precision::P8, Precision::P12);
    let mut all = vec![];
    for tables in [1, 2, 5, 16] {
        for p in [p8, p12] {
            // With more than 8192 symbols a sample is counted; differences of more than 2^16 have longer segments.
            for n in [3000, 9001] {
                let name = format!("{tables} contexts, {p:?}");
                let one = plane(n, tables, p, 1);
                all.push(Case::new(&name, vec![one.clone()], false));
                all.push(Case::new(&name, vec![one.clone().sharing(tables)], false));
                // More tables than contexts that occur.
                if tables < 16 {
                    all.push(Case::new(&name, vec![one.clone().sharing(tables + 1)], false));
                }
                // Too few tables.
                if tables > 1 {
                    let mut few = one.clone().sharing(tables);
                    few.shared.pop();
                    all.push(Case::new(&name, vec![few], false));
                }
                all.push(Case::new(&name, vec![one.clone()], true));
                let other = plane(n, 17 - tables, p12, 2);
                all.push(Case::new(&name, vec![one, other], false));
            }
        }
        let long = plane((1 << 16) + 300, tables, p8, 3);
        all.push(Case::new("long", vec![long], true));
    }
    // One plane with contexts, one without.
    let mut without = plane(9001, 1, p8, 4);
    without.contexts.clear();
    all.push(Case::new("half", vec![without.clone(), plane(9001, 3, p12, 5)], true));
    all.push(Case::new("half", vec![plane(9001, 3, p8, 5), without.sharing(1)], false));
    for p in [p8, p12] {
        // The counted symbols have context 1, the others 2, none 0: two tables expect 0, and have an escape.
        let mut blind = plane(20_000, 1, p, 6);
        for (i, (symbol, context)) in blind.symbols.iter_mut().zip(&mut blind.contexts).enumerate()
        {
            let counted = i % 512 / 64 == 5 * (i / 512) % 8;
            *context = 2 - u8::from(counted);
            let rare = if i.is_multiple_of(16) { noise(i) as u8 } else { 0 };
            *symbol = if counted { 7 } else { rare };
        }
        all.push(Case::new("blind", vec![blind], false));
    }
    all
}

#[test]
fn symbols_with_contexts_are_coded_as_by_the_cpu() {
    let mut cases = cases();
    cases.sort_by_key(|c| c.residual());
    let tables: Vec<u8> = cases.iter().map(|c| tables_of(c, 0)).collect();
    assert!([1, 2, 5, 16, 3].iter().all(|t| tables.contains(t)), "{tables:?}");
    let shared = cases.iter().filter(|c| c.shared).count();
    assert!(shared > 4 && shared < cases.len() / 2, "{shared} of {} share", cases.len());
    let carried = |c: &Case| c.planes.len() > 1 && c.streams[1].codec == CodecId::RANS;
    assert!(cases.iter().any(carried));
    let mut jobs = Jobs::new("contexts");
    let decode: Vec<_> = cases.iter().map(Case::decode).collect();
    jobs.encode(&cases.iter().map(Case::encode).collect::<Vec<_>>());
    assert_eq!(jobs.decode(&decode).len(), cases.len());
    let answers = jobs.run();
    let [Answers::Encoded(encoded), Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    for (case, got) in cases.iter().zip(encoded) {
        assert_eq!((got.status, got.plain), (0, false), "{}", case.name);
        assert_eq!(got.streams, case.streams, "{}", case.name);
        assert!(got.frame == case.frame, "{}: the frame differs", case.name);
        assert_eq!(got.shared, case.shared, "{}", case.name);
        assert_eq!(got.crc_raw, crc32c(&case.values), "{}", case.name);
    }
    for (case, (status, values)) in cases.iter().zip(decoded) {
        assert_eq!(*status, OK, "{}", case.name);
        assert!(*values == case.values, "{}: the values differ", case.name);
    }
}

#[test]
fn what_does_not_fit_its_contexts_is_refused() {
    let case = Case::new("five", vec![plane(3000, 5, Precision::P8, 1)], false);
    let (encode, decode) = (case.encode(), case.decode());
    // A context without a table; missing tables; contexts of a missing plane.
    let mut large = decode.clone();
    large.contexts.bytes[2999] = 5;
    let mut several = decode.clone();
    several.kind = Kind::Composed;
    let mut planes = decode;
    planes.contexts.planes = 2;
    let mut jobs = Jobs::new("contexts-refused");
    jobs.decode(&[several, large, planes]);
    let (mut large, mut missing) = (encode.clone(), encode);
    large.contexts.bytes[0] = 16;
    missing.contexts.bytes.clear();
    jobs.encode(&[large, missing]);
    let answers = jobs.run();
    let [Answers::Decoded(decoded), Answers::Encoded(encoded)] = &answers[..] else { panic!() };
    let status: Vec<_> = decoded.iter().map(|d| d.0).collect();
    assert_eq!(status, [UNSUPPORTED, CORRUPT, UNSUPPORTED]);
    assert!(encoded.iter().all(|e| u32::from(e.status) == UNSUPPORTED));
}

#[test]
fn damaged_streams_with_contexts_are_treated_as_by_the_cpu() {
    let rans = Rans::new(Simd::detect());
    let mut jobs = Jobs::new("contexts-damaged");
    let (mut expected, mut decode) = (vec![], vec![]);
    for precision in [Precision::P8, Precision::P12] {
        for tables in [2, 16] {
            let case = Case::new("damaged", vec![plane(900, tables, precision, 1)], false);
            let plane = &case.planes[0];
            for i in 0..120 {
                let mut frame = case.frame.clone();
                // Mostly the head and its tables.
                let at = 16 + if i % 3 == 0 { noise(i) % (frame.len() - 16) } else { i };
                frame[at] ^= 1 << (noise(i + 9) % 8);
                let context =
                    Context { param: param(precision), tables: &[], contexts: &plane.contexts };
                let mut out = vec![0; plane.symbols.len()];
                let done = rans.decode(context, &frame[16..], &mut out, &mut Workspace::default());
                expected.push(done.is_ok().then_some(out));
                decode.push(Decode { frame, check: false, ..case.decode() });
            }
        }
    }
    assert_eq!(jobs.decode(&decode).len(), decode.len());
    let answers = jobs.run();
    let [Answers::Decoded(decoded)] = &answers[..] else { panic!() };
    let mut refused = 0;
    for (i, ((status, values), cpu)) in decoded.iter().zip(&expected).enumerate() {
        let took = *status == OK || *status == VALUE_CHECKSUM;
        assert_eq!(took, cpu.is_some(), "damage {i}: status {status}");
        if *status == OK {
            assert!(cpu.as_ref() == Some(values), "damage {i}");
        }
        refused += usize::from(!took);
    }
    assert!(refused > expected.len() / 2, "only {refused} of {} were refused", expected.len());
}
