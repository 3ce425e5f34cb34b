//! Drives `kernels/tests/emulated.cpp`: writes jobs, runs the program, reads the answers. The
//! structures are those of `kernels/tests/jobs.h` and `kernels/abi.h`.

mod contexts;
mod predicted;
mod updates;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use s4_codec_cpu::rans::{Precision, Table, parse_tables};
use s4_engine::{PlaneCoding, TensorPlan};
use s4_format::layout::Planes;
use s4_format::side::{Side, SideKind};
use s4_format::{LayoutId, StreamEntry};

const MAX_PLANES: usize = 8;

pub(crate) const OK: u32 = 0;
pub(crate) const CORRUPT: u32 = 1;
pub(crate) const UNSUPPORTED: u32 = 2;
pub(crate) const FRAME_CHECKSUM: u32 = 3;
pub(crate) const VALUE_CHECKSUM: u32 = 4;

/// The kernels that a chunk goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Fused2,
    Fused4,
    Composed,
    /// Encoding differences.
    Residual,
    /// Symbols with contexts, and encoding differences with contexts.
    Contexts,
    ResidualContexts,
    /// Any prediction, and contexts of its own.
    Predicted,
    /// Contexts from moments.
    Update,
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Self::Fused2 => 2,
            Self::Fused4 => 4,
            Self::Composed => 0,
            Self::Residual => 1,
            Self::Contexts => 8,
            Self::ResidualContexts => 9,
            Self::Predicted => 10,
            Self::Update => 11,
        }
    }

    /// The kernels of the common case, if the codings are those of it.
    pub(crate) fn fused(layout: LayoutId, width: usize, coding: [u8; MAX_PLANES]) -> Option<Self> {
        let common = layout == LayoutId::FIELDS && coding[0] == 8 && coding[1..] == [0; 7];
        match width {
            2 if common => Some(Self::Fused2),
            4 if common => Some(Self::Fused4),
            _ => None,
        }
    }
}

/// The codings of the planes as the kernels number them; `None` if the kernels lack one of them.
pub(crate) fn codings(plan: &TensorPlan) -> Option<[u8; MAX_PLANES]> {
    let mut all = [0; MAX_PLANES];
    for (coding, plane) in all.iter_mut().zip(&plan.planes) {
        *coding = match *plane {
            PlaneCoding::RAW => 0,
            PlaneCoding::BITS7 => 7,
            PlaneCoding::RANS8 | PlaneCoding::RANS12 => plane.param,
            _ => return None,
        };
    }
    Some(all)
}

/// A tensor's shared tables as the kernels read them; empty if there are none.
pub(crate) fn tables(side: &Side, precisions: [u8; MAX_PLANES]) -> Vec<u8> {
    let bytes = side.get(SideKind::TABLES);
    let Some((lens, mut rest)) = bytes.split_at_checked(4 * MAX_PLANES) else { return vec![] };
    let mut out = vec![];
    for (len, precision) in lens.chunks_exact(4).zip(precisions) {
        let len = u32::from_le_bytes(len.try_into().unwrap()) as usize;
        if len > 0 && matches!(precision, 8 | 12) {
            let p = Precision::from_param(precision).unwrap();
            let [table] = &parse_tables(p, &rest[..len]).unwrap()[..] else { panic!() };
            out.extend(shared_table(table));
        } else {
            out.extend([0; 776]);
        }
        rest = &rest[len..];
    }
    out
}

/// A table as the kernels read it.
fn shared_table(table: &Table) -> Vec<u8> {
    let (entries, mut freqs) = (table.entries(), [0; 256]);
    let head = [table.precision().bits() as u16, entries.len() as u16, table.escape(), 0];
    let mut out: Vec<u8> = head.iter().flat_map(|h| h.to_le_bytes()).collect();
    out.extend(entries.iter().map(|e| e.symbol));
    out.resize(8 + 256, 0);
    freqs.iter_mut().zip(entries).for_each(|(to, e)| *to = e.freq);
    out.extend(freqs.iter().flat_map(|f: &u16| f.to_le_bytes()));
    out
}

/// The contexts of a chunk's symbols.
#[derive(Debug, Clone, Default)]
pub(crate) struct Contexts {
    /// Bit mask of the planes that have any.
    planes: u8,
    /// The contexts of all planes, each plane's at a multiple of 16.
    bytes: Vec<u8>,
    /// Number of shared tables of each plane, if not one.
    tables: Option<[u8; MAX_PLANES]>,
}

impl Contexts {
    /// Number of shared tables of each plane, which take `bytes` bytes in all.
    fn tables(&self, bytes: usize) -> [u8; MAX_PLANES] {
        let one = u8::from(bytes > 0);
        let tables = self.tables.unwrap_or([one; MAX_PLANES]);
        assert_eq!(bytes, tables.iter().map(|&t| 776 * usize::from(t)).sum::<usize>());
        tables
    }
}

/// The inputs of the kernels for any prediction, as in a chunk's descriptor.
#[derive(Debug, Clone, Default)]
pub(crate) struct Predicted {
    prediction: u8,
    sparse: bool,
    contexts: u8,
    /// Top exponent and shift of the classes.
    class: (u8, u8),
    /// `Offsets` with those of rows, and those of columns; empty if there are none.
    offsets: Vec<u8>,
    columns: Vec<u8>,
    /// The parameters of update classes, or the constants of a step; the moments are `offsets` and `columns` then.
    by_moments: Vec<u8>,
    /// Whether the input's values lie where the chunk's are decoded to.
    in_place: bool,
}

/// A chunk to encode.
#[derive(Debug, Clone)]
pub(crate) struct Encode {
    pub(crate) kind: Kind,
    pub(crate) width: usize,
    pub(crate) layout: LayoutId,
    /// 0 none, 1 XOR, 2 difference.
    pub(crate) residual: u8,
    pub(crate) coding: [u8; MAX_PLANES],
    /// 1: raw planes go through scratch memory.
    pub(crate) flags: u32,
    /// Bytes that the values lie above a multiple of 16.
    pub(crate) skew: u32,
    pub(crate) tables: Vec<u8>,
    pub(crate) values: Vec<u8>,
    pub(crate) parent: Vec<u8>,
    pub(crate) contexts: Contexts,
    pub(crate) predicted: Predicted,
}

/// The result of encoding a chunk.
#[derive(Debug, PartialEq)]
pub(crate) struct Encoded {
    pub(crate) crc_encoded: u32,
    pub(crate) crc_raw: u32,
    pub(crate) plain: bool,
    pub(crate) shared: bool,
    pub(crate) status: u8,
    pub(crate) streams: Vec<StreamEntry>,
    pub(crate) frame: Vec<u8>,
}

/// A chunk to decode.
#[derive(Debug, Clone)]
pub(crate) struct Decode {
    pub(crate) kind: Kind,
    pub(crate) width: usize,
    pub(crate) layout: LayoutId,
    pub(crate) residual: u8,
    pub(crate) plain: bool,
    pub(crate) n: usize,
    /// Whether the frame's checksum is checked first.
    pub(crate) check: bool,
    pub(crate) crc_encoded: u32,
    pub(crate) crc_raw: u32,
    pub(crate) skew: u32,
    pub(crate) tables: Vec<u8>,
    pub(crate) frame: Vec<u8>,
    pub(crate) parent: Vec<u8>,
    pub(crate) contexts: Contexts,
    pub(crate) predicted: Predicted,
}

/// Jobs for one run of the program.
pub(crate) struct Jobs {
    name: &'static str,
    bytes: Vec<u8>,
    batches: Vec<Batch>,
}

enum Batch {
    Encode(usize),
    /// Bytes of each chunk's values.
    Decode(Vec<usize>),
    Checksums(usize),
    /// Bytes of each span.
    Copies(Vec<usize>),
}

/// The answers to one batch.
pub(crate) enum Answers {
    Encoded(Vec<Encoded>),
    Decoded(Vec<(u32, Vec<u8>)>),
    Checksums(Vec<u32>),
    Copies(Vec<Vec<u8>>),
}

impl Jobs {
    /// `name` is that of the files.
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, bytes: vec![], batches: vec![] }
    }

    fn start(&mut self, op: u32, count: usize) {
        self.put(op);
        self.put(count as u32);
    }

    fn put(&mut self, v: u32) {
        self.bytes.extend(v.to_le_bytes());
    }

    /// One batch of chunks, sorted by kind.
    pub(crate) fn encode(&mut self, chunks: &[Encode]) {
        assert!(chunks.is_sorted_by_key(|c| c.kind));
        self.start(1, chunks.len());
        for c in chunks {
            self.bytes.extend([c.kind.byte(), c.width as u8, c.layout.0, c.residual]);
            self.bytes.extend(c.coding);
            self.bytes.extend(c.contexts.tables(c.tables.len()));
            self.put((c.values.len() / c.width) as u32);
            [c.flags, c.skew].into_iter().for_each(|v| self.put(v));
            let p = &c.predicted;
            let contexts = c.contexts.planes | p.contexts;
            self.bytes.extend([contexts, p.prediction, p.sparse.into(), p.class.0]);
            self.bytes.extend([p.class.1, 0, 0, 0]);
            let more = [&c.contexts.bytes[..], &p.offsets].concat();
            let lens = [c.parent.len(), more.len(), p.columns.len()];
            lens.into_iter().for_each(|len| self.put(len as u32));
            self.bytes.extend([&c.tables[..], &c.values, &c.parent, &more, &p.columns].concat());
            self.bytes.extend(&p.by_moments);
        }
        self.batches.push(Batch::Encode(chunks.len()));
    }

    /// One batch of chunks, sorted by kind. Chunks whose frame has no valid header are left out;
    /// returns which were taken.
    pub(crate) fn decode(&mut self, chunks: &[Decode]) -> Vec<usize> {
        assert!(chunks.is_sorted_by_key(|c| c.kind));
        let parsed: Vec<_> =
            chunks.iter().enumerate().filter_map(|(i, c)| Some((i, streams(c)?))).collect();
        self.start(2, parsed.len());
        for (i, (planes, streams)) in &parsed {
            let c = &chunks[*i];
            self.bytes.extend([c.kind.byte(), c.width as u8, c.layout.0, c.residual]);
            let p = &c.predicted;
            let contexts = c.contexts.planes | p.contexts;
            self.bytes.extend([u8::from(c.plain), *planes, u8::from(c.check), contexts]);
            let lens = [c.n, c.frame.len()].map(|v| v as u32);
            lens.into_iter().chain([c.crc_encoded, c.crc_raw, c.skew]).for_each(|v| self.put(v));
            self.put(c.parent.len() as u32);
            self.bytes.extend(c.contexts.tables(c.tables.len()));
            self.bytes.extend(streams);
            self.bytes.extend([p.prediction, p.in_place.into(), p.class.0, p.class.1]);
            let more = [&c.contexts.bytes[..], &p.offsets].concat();
            [more.len(), p.columns.len()].into_iter().for_each(|len| self.put(len as u32));
            self.bytes.extend([&c.tables[..], &c.frame, &c.parent, &more, &p.columns].concat());
            self.bytes.extend(&p.by_moments);
        }
        let lens = parsed.iter().map(|(i, _)| chunks[*i].n * chunks[*i].width).collect();
        self.batches.push(Batch::Decode(lens));
        parsed.iter().map(|p| p.0).collect()
    }

    /// Spans, each with the skew of its start.
    pub(crate) fn checksums(&mut self, spans: &[(&[u8], u32)]) {
        self.start(3, spans.len());
        for (span, skew) in spans {
            [span.len() as u32, *skew, 0].into_iter().for_each(|v| self.put(v));
            self.bytes.extend(*span);
        }
        self.batches.push(Batch::Checksums(spans.len()));
    }

    /// Spans, each with the skews of where it lies and where it goes.
    pub(crate) fn copies(&mut self, spans: &[(&[u8], u32, u32)]) {
        self.start(4, spans.len());
        for (span, from, to) in spans {
            [span.len() as u32, *from, *to].into_iter().for_each(|v| self.put(v));
            self.bytes.extend(*span);
        }
        self.batches.push(Batch::Copies(spans.iter().map(|s| s.0.len()).collect()));
    }

    /// Rows within bytes that end with the last one: its bytes, how far they are apart, and how many there are, with the
    /// skews of where they lie and where they go.
    pub(crate) fn rows(&mut self, all: &[(&[u8], [usize; 3], u32, u32)]) {
        self.start(5, all.len());
        for (bytes, [len, step, count], from, to) in all {
            assert_eq!(bytes.len(), step * (count - 1) + len);
            let head = [*len, *step, *count].map(|v| v as u32);
            head.into_iter().chain([*from, *to]).for_each(|v| self.put(v));
            self.bytes.extend(*bytes);
        }
        self.batches.push(Batch::Copies(all.iter().map(|r| r.1[0] * r.1[2]).collect()));
    }

    /// Runs all batches.
    pub(crate) fn run(self) -> Vec<Answers> {
        let folder = folder();
        let (jobs, answers) =
            (folder.join(self.name).with_extension("jobs"), folder.join(self.name));
        let answers = answers.with_extension("answers");
        std::fs::write(&jobs, &self.bytes).unwrap();
        run(&[jobs.as_path(), answers.as_path()]);
        let bytes = std::fs::read(&answers).unwrap();
        let mut at = Reader(&bytes);
        let all = self.batches.iter().map(|b| at.batch(b)).collect();
        assert!(at.0.is_empty());
        all
    }
}

/// Streams that the CPU's encoder does not write either, against a plain reference in C++.
pub(crate) fn foreign() {
    run(&[Path::new("foreign")]);
}

fn run(args: &[&Path]) {
    let mut run = Command::new(program());
    // Stacks are switched by hand, which the sanitizer need not follow.
    run.args(args).env("ASAN_OPTIONS", "detect_stack_use_after_return=0:detect_leaks=0");
    let output = run.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {}\n{said}", output.status);
}

/// Number of streams, and offset and length of each as the kernels read them.
fn streams(c: &Decode) -> Option<(u8, Vec<u8>)> {
    let mut out = vec![];
    let mut planes = 0;
    if !c.plain {
        planes = Planes::new(c.layout, c.width, c.n).unwrap().sizes().len();
        let list = StreamEntry::parse_chunk(&c.frame, planes).ok()?;
        for (entry, bytes) in list.items() {
            let offset = bytes.as_ptr() as usize - c.frame.as_ptr() as usize;
            out.extend((offset as u32).to_le_bytes());
            out.extend(entry.len.to_le_bytes());
            out.extend([entry.codec.0, entry.param, 0, 0]);
        }
    }
    out.resize(12 * MAX_PLANES, 0);
    Some((planes as u8, out))
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        head.to_vec()
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes(4).try_into().unwrap())
    }

    fn batch(&mut self, batch: &Batch) -> Answers {
        match batch {
            Batch::Encode(count) => Answers::Encoded((0..*count).map(|_| self.encoded()).collect()),
            Batch::Decode(lens) => {
                Answers::Decoded(lens.iter().map(|&len| (self.u32(), self.bytes(len))).collect())
            }
            Batch::Checksums(n) => Answers::Checksums((0..*n).map(|_| self.u32()).collect()),
            Batch::Copies(lens) => {
                Answers::Copies(lens.iter().map(|&len| self.bytes(len)).collect())
            }
        }
    }

    fn encoded(&mut self) -> Encoded {
        let offset = self.bytes(8);
        assert_eq!(offset[0] % 16, 0);
        let (len, crc_encoded, crc_raw) = (self.u32(), self.u32(), self.u32());
        let [plain, shared, streams, status] = self.bytes(4).try_into().unwrap();
        assert_eq!(self.bytes(8), [0; 8]);
        let entries = self.bytes(8 * MAX_PLANES);
        let (entries, rest) = entries.split_at(8 * usize::from(streams));
        assert!(rest.iter().all(|&b| b == 0));
        let entry = |e: &[u8]| StreamEntry {
            codec: s4_format::CodecId(e[0]),
            param: e[1],
            len: u32::from_le_bytes(e[4..8].try_into().unwrap()),
        };
        Encoded {
            crc_encoded,
            crc_raw,
            plain: plain == 1,
            shared: shared == 1,
            status,
            streams: entries.chunks_exact(8).map(entry).collect(),
            frame: self.bytes(len as usize),
        }
    }
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

/// The program, built once.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../s4-codec-gpu/kernels");
        let program = folder().join("emulated");
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
        let mut build = Command::new(compiler);
        build.args(["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]);
        build.args(["-Wno-unknown-pragmas", "-Wno-parentheses", "-Wno-unused-function"]);
        build.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]);
        build.arg(kernels.join("tests/emulated.cpp")).arg("-o").arg(&program);
        let output = build.output().expect("a C++ compiler (g++, or what $CXX names)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    })
}
