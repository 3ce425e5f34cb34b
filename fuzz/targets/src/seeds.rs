//! Inputs to start from, made by the project's own encoders: the same on every machine.

use s4_codec_cpu::{
    Bits, Codec, Const, Context, Deflate, Gdeflate, Lz4, Rans, Simd, Snappy, Symbols, Workspace,
    Zstd,
};
use s4_format::index::{Block, Tensor, TensorKind, write_table};
use s4_format::side::{Side, SideKind};
use s4_format::{ChunkRecord, DType, Digest};

use crate::input::expand;

/// A target's name and one input.
pub type Seed = (&'static str, Vec<u8>);

/// All of them.
pub fn all() -> Vec<Seed> {
    let mut out = vec![];
    streams(&mut out);
    parts(&mut out);
    texts(&mut out);
    // Inputs that are lists of choices: a few of each kind of choice.
    for (target, width, most) in [
        ("chain", 8, 20u8),
        ("reader", 8, 20),
        ("store_log", 5, 12),
        ("store_views", 4, 10),
        ("planes", 40, 9),
        ("rans_encode", 30, 8),
        ("chunk", 60, 12),
        ("gpu", 60, 12),
    ] {
        for op in 0..most {
            // Number 255 is the large file.
            let mut list = vec![if op == 19 { 255 } else { op }];
            for i in 0..6u8 {
                let seed = [i.wrapping_mul(op) | 1, op, i, 3 * i, 0x11u8.wrapping_mul(op)];
                list.push(op + i * 20 % 61);
                list.extend(expand(&seed, width - 1));
            }
            out.push((target, list));
        }
    }
    out
}

/// Streams of every codec, after their parameter and length.
fn streams(out: &mut Vec<Seed>) {
    let planes = [
        vec![],
        vec![7; 100],
        expand(&[4, 120, 121, 120, 119], 700),
        expand(&[1, 1, 2, 3, 4, 5], 300),
        expand(&[0x1f, 9, 9, 9, 9, 200], 3000),
    ];
    let named: [(&'static str, &dyn Codec, u8); 8] = [
        ("bits", &Bits::new(Simd::Scalar), 7),
        ("gdeflate", &Gdeflate::default(), 0),
        ("deflate", &Deflate::default(), 0),
        ("zstd", &Zstd::default(), 0),
        ("zstd", &Zstd::default(), Zstd::IN_BLOCKS),
        ("lz4", &Lz4, 0),
        ("snappy", &Snappy, 0),
        ("stored", &Const, 0),
    ];
    let encode = |codec: &dyn Codec, param: u8, plane: &[u8]| {
        let mut dst = vec![0; codec.bound(param, plane.len())];
        let symbols = Symbols::new(plane, Context::of(param));
        let done = codec.encode(&symbols, &mut dst, &mut Workspace::default()).ok()?;
        dst.truncate(done.len);
        Some(dst)
    };
    for plane in &planes {
        let len = (plane.len() as u16).to_le_bytes();
        for (target, codec, param) in named {
            let Some(stream) = encode(codec, param, plane) else { continue };
            let head: &[u8] = if target == "stored" { &[1] } else { &[] };
            out.push((target, [head, &[param], &len, &[0], &stream].concat()));
        }
        for (choice, param) in [(0, 8), (1, 12)] {
            let Some(stream) = encode(&Rans::new(Simd::Scalar), param, plane) else { continue };
            out.push(("rans", [&[choice, 0], &len[..], &[0], &stream].concat()));
        }
        // Two blocks, after their sizes.
        let table = [&3u32.to_le_bytes()[..], &2u32.to_le_bytes(), &[0; 8], &[1; 19]].concat();
        out.push(("stored", [&[2], &200u16.to_le_bytes()[..], &[0, 99, 0], &table].concat()));
    }
}

/// Binary parts of the format.
fn parts(out: &mut Vec<Seed>) {
    let block = Block { offset: 100, len: 24, crc: 7 };
    let name = |name: &str, dtype, kind| Tensor {
        name: name.into(),
        dtype,
        shape: vec![10, 20],
        plan: 0,
        kind,
    };
    let tensors = [
        name("w", DType::BFloat16, TensorKind::Chunks { block, chunk_log2: 17, pack: false }),
        name("b", DType::Float32, TensorKind::Packed { pack: 2, first: 0 }),
        name("", DType::Float32, TensorKind::Chunks { block, chunk_log2: 16, pack: true }),
    ];
    let mut index =
        |part: u8, n: u8, bytes: &[u8]| out.push(("index", [&[part, n], bytes].concat()));
    index(0, 0, &write_table(&tensors).unwrap_or_default());
    let mut record = vec![];
    ChunkRecord { offset: 16, object: 0, len: 99, plain: false, crc_encoded: 1, crc_raw: 2 }
        .write(&mut record);
    index(1, 0, &record.repeat(2));
    let mut frame = vec![0; 64];
    (frame[0], frame[4], frame[12]) = (3, 20, 16);
    frame[16..36].fill(9);
    index(2, 2, &frame);
    let mut side = Side::default();
    let _ = side.push(SideKind::TABLES, vec![1, 2, 3]);
    let _ = side.push(SideKind::OFFSETS, vec![9; 8]);
    let mut bytes = vec![];
    let _ = side.write(&mut bytes);
    index(3, 0, &bytes);
    index(4, 0, &s4_format::file::header());
    let offsets = [&20u32.to_le_bytes()[..], &12u32.to_le_bytes(), &[0; 16], &[1, 0].repeat(32)];
    let mut packed = Side::default();
    let _ = packed.push(SideKind::OFFSETS, offsets.concat());
    let mut bytes = vec![];
    let _ = packed.write(&mut bytes);
    index(3, 0, &bytes);
    let sides = [&2u32.to_le_bytes()[..], &3u32.to_le_bytes()].concat();
    let offsets =
        [&sides[..], &[7, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0], &[1; 10]].concat();
    index(5, 1, &offsets);
    index(6, 0, Digest::of(b"x").to_string().as_bytes());
    index(6, 0, b"torch.bfloat16");
    index(7, 8, &[1, 0, 1, 0, 5, 255]);
}

/// JSON.
fn texts(out: &mut Vec<Seed>) {
    for text in crate::files::manifests() {
        out.push(("manifest", text.into_bytes()));
    }
    let header = r#"{"__metadata__":{"a":"b"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"f":{"dtype":"F4","shape":[4],"data_offsets":[12,14]}}"#;
    out.push(("safetensors", [&[1], header.as_bytes(), &[5; 14]].concat()));
    out.push(("safetensors", [&[1], &b"{}"[..]].concat()));
    out.push(("safetensors", [&[0], &2u64.to_le_bytes()[..], b"{}"].concat()));
    for (kind, text) in crate::store::documents() {
        out.push(("store_views", [&[kind, 0], text.as_bytes()].concat()));
    }
}

/// A file name for an input, by its content.
#[must_use]
pub fn name(bytes: &[u8]) -> String {
    Digest::of(bytes).to_string()[..16].to_owned()
}
