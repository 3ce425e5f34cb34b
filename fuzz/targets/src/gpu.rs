//! The CUDA decoding kernels, run on the CPU by an emulator, against the CPU's engine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::{Library, Symbol};
use s4_codec_cpu::rans::{Precision, parse_tables};
use s4_engine::Scratch;
use s4_format::layout::{MAX_PLANES, Planes};
use s4_format::side::SideKind;
use s4_format::{CodecId, LayoutId, StreamEntry};

use crate::chunk::Sample;
use crate::input::Input;

/// The codecs that the kernels decode, and two that the kernels leave to the CPU.
const CODECS: [CodecId; 7] = [
    CodecId::RANS,
    CodecId::RAW,
    CodecId::RANS,
    CodecId::CONST,
    CodecId::BITS,
    CodecId::LZ4,
    CodecId(250),
];

const OK: u32 = 0;
const UNSUPPORTED: u32 = 2;

/// Bytes of a table as the kernels read it.
const TABLE: usize = 776;

/// `DecodeStream` of `kernels/abi.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Stream {
    offset: u32,
    len: u32,
    codec: u8,
    param: u8,
    reserved: u16,
}

/// `TableSet` of `kernels/abi.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tables {
    at: *const u8,
    count: u32,
    reserved: u32,
}

/// `DecodeChunk` of `kernels/abi.h`.
#[repr(C)]
struct Job {
    frame: *const u8,
    values: *mut u8,
    scratch: *mut u8,
    frame_len: u32,
    n: u32,
    width: u8,
    layout: u8,
    residual: u8,
    plain: u8,
    planes: u8,
    contexts: u8,
    reserved: [u8; 2],
    crc_encoded: u32,
    crc_raw: u32,
    streams: [Stream; MAX_PLANES],
    inputs: [*const u8; 4],
    first: u64,
    cols: u64,
    tables: [Tables; MAX_PLANES],
}
const _: () = assert!(size_of::<Job>() == 320);

/// A chunk of arbitrary bytes: the kernels decode it as the CPU does, refuse it as the CPU does, or
/// leave it to the CPU.
pub fn gpu(data: &[u8]) {
    let Some(sample) = Sample::read(&mut Input::new(data), &CODECS, 2100) else { return };
    let width = sample.dtype.value_width();
    let n = sample.parent.len() / width;
    // The CPU decodes what the kernels do not support.
    if n == 0 || sample.plan.layout == LayoutId::TOKEN || sample.plan.has_moments() {
        return;
    }
    let planes = Planes::new(sample.plan.layout, width, n).map_or(0, |p| p.sizes().len());
    let mut streams = [Stream::default(); MAX_PLANES];
    if !sample.plain {
        let Ok(list) = StreamEntry::parse_chunk(&sample.frame, planes) else { return };
        for (to, (entry, bytes)) in streams.iter_mut().zip(list.items()) {
            let offset = bytes.as_ptr() as usize - sample.frame.as_ptr() as usize;
            let StreamEntry { codec, param, len } = *entry;
            *to = Stream { offset: offset as u32, len, codec: codec.0, param, reserved: 0 };
        }
    }
    // A host hands over tables that it has parsed, or lets the CPU report what is wrong with them.
    let Some(tables) = tables(&sample, &streams) else { return };
    let (crc, sound, expected) = sample.decode_mended(&mut Scratch::default());
    let record = sample.record(crc);
    let delta = sample.plan.parent().is_some();
    let fused = sample.plan.layout == LayoutId::FIELDS
        && !(sample.plain || delta)
        && (streams[0].codec, streams[0].param) == (CodecId::RANS.0, 8)
        && streams[1..planes].iter().all(|s| s.codec == CodecId::RAW.0)
        && matches!(width, 2 | 4);
    for kind in [Some(0), fused.then_some(width as u32)].into_iter().flatten() {
        let mut values = vec![0; sample.parent.len()];
        let parent = if delta { sample.parent.as_ptr() } else { std::ptr::null() };
        let job = Job {
            frame: sample.frame.as_ptr(),
            values: std::ptr::null_mut(),
            inputs: [parent, std::ptr::null(), std::ptr::null(), std::ptr::null()],
            scratch: std::ptr::null_mut(),
            first: 0,
            cols: 0,
            // The callee finds all tables behind the first one.
            tables: [Tables { at: tables.as_ptr(), count: 1, reserved: 0 }; MAX_PLANES],
            frame_len: sample.frame.len() as u32,
            n: n as u32,
            width: width as u8,
            layout: sample.plan.layout.0,
            residual: sample.plan.residual.0,
            plain: u8::from(sample.plain),
            planes: if sample.plain { 0 } else { planes as u8 },
            contexts: 0,
            reserved: [0; 2],
            crc_encoded: record.crc_encoded,
            crc_raw: record.crc_raw,
            streams,
        };
        let count = (tables.len() / TABLE) as u32;
        // SAFETY: the job describes buffers that live longer than the call, and are as long as it says.
        let status = unsafe { kernels()(&raw const job, kind, count, values.as_mut_ptr()) };
        match status {
            OK => {
                assert!(sound, "kernels {kind} decode what the CPU refuses");
                assert!(values == expected, "kernels {kind} decode otherwise");
            }
            UNSUPPORTED => {}
            _ => assert!(!sound, "kernels {kind} refuse ({status}) what the CPU decodes"),
        }
    }
}

/// Compiles the kernels, which takes longer than any input may.
pub fn prepare() {
    kernels();
}

type Decode = unsafe extern "C" fn(*const Job, u32, u32, *mut u8) -> u32;

/// The kernels, compiled once for this process. `S4_FUZZ_CXXFLAGS` adds options.
fn kernels() -> Decode {
    static KERNELS: OnceLock<(Library, Decode)> = OnceLock::new();
    KERNELS
        .get_or_init(|| {
            let folder = tempfile::tempdir();
            let Ok(folder) = folder else { panic!("a folder for the kernels") };
            let program = build(folder.path());
            // SAFETY: the library was just made from this project's sources, and runs nothing when loaded.
            let library = unsafe { Library::new(program) };
            let Ok(library) = library else { panic!("the kernels: {:?}", library.err()) };
            // SAFETY: the function has this signature.
            let found: Result<Symbol<'_, Decode>, _> = unsafe { library.get(b"s4_fuzz_decode") };
            let Ok(decode) = found.map(|symbol| *symbol) else { panic!("the kernels' entry") };
            (library, decode)
        })
        .1
}

fn build(folder: &Path) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = folder.join("kernels.so");
    let mut build = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()));
    build.args(["-std=c++17", "-O2", "-g1", "-shared", "-fPIC"]);
    build.args(["-Wno-unknown-pragmas", "-Wno-parentheses", "-I"]);
    build.arg(here.join("../../crates/s4-codec-gpu/kernels")).arg(here.join("src/gpu.cpp"));
    build.args(std::env::var("S4_FUZZ_CXXFLAGS").unwrap_or_default().split_whitespace());
    // A sanitizer that was preloaded into this process is not meant for the compiler.
    let output = build.arg("-o").arg(&library).env_remove("LD_PRELOAD").output();
    let Ok(output) = output else { panic!("a C++ compiler (g++, or what $CXX names)") };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

/// The tables of the side data as the kernels read them, empty if there are none; `None` if they are
/// wrong.
fn tables(sample: &Sample, streams: &[Stream; MAX_PLANES]) -> Option<Vec<u8>> {
    let bytes = sample.side.get(SideKind::TABLES);
    if bytes.is_empty() {
        return Some(vec![]);
    }
    let (lens, mut rest) = bytes.split_at_checked(4 * MAX_PLANES)?;
    let mut out = vec![];
    for (len, stream) in lens.chunks_exact(4).zip(streams) {
        let len = u32::from_le_bytes(len.try_into().ok()?) as usize;
        let (now, later) = rest.split_at_checked(len)?;
        rest = later;
        let mut table = [0; TABLE];
        if len > 0 {
            let precision = Precision::from_param(stream.param).ok()?;
            let list = parse_tables(precision, now).ok()?;
            let [one] = &list[..] else { return None };
            let head = [stream.param.into(), one.entries().len() as u16, one.escape(), 0];
            table[..8].copy_from_slice(head.map(u16::to_le_bytes).as_flattened());
            for (i, e) in one.entries().iter().enumerate() {
                table[8 + i] = e.symbol;
                table[264 + 2 * i..][..2].copy_from_slice(&e.freq.to_le_bytes());
            }
        }
        out.extend(table);
    }
    rest.is_empty().then_some(out)
}
