//! The worked examples of docs/codecs (that of `rans` is in `rans.rs`).

use s4_codec_cpu::{Codec, Context, Simd, Symbols, Workspace, open_codecs};
use s4_format::CodecId;

fn check(id: CodecId, param: u8, plane: &[u8], stream: &[u8]) {
    let codecs = open_codecs(Simd::detect());
    let codec = codecs.get(id).expect("registered");
    let mut dst = vec![0xa5; plane.len()];
    let mut work = Workspace::default();
    codec.decode(Context::of(param), stream, &mut dst, &mut work).expect("decodes");
    assert_eq!(dst, plane, "{id}");
}

fn encode(codec: &dyn Codec, param: u8, plane: &[u8]) -> Vec<u8> {
    let mut dst = vec![0; codec.bound(param, plane.len())];
    let symbols = Symbols::new(plane, Context::of(param));
    let len = codec.encode(&symbols, &mut dst, &mut Workspace::default()).expect("encodes").len;
    dst.truncate(len);
    dst
}

#[test]
fn raw() {
    check(CodecId::RAW, 0, &[1, 2, 3], &[1, 2, 3]);
    check(CodecId::RAW, 0, &[], &[]);
}

#[test]
fn constant() {
    let plane = [0x3f, 0x80, 0x00, 0x3f, 0x80, 0x00, 0x3f, 0x80];
    check(CodecId::CONST, 0, &plane, &plane[..3]);
    assert_eq!(encode(&s4_codec_cpu::Const, 0, &plane), plane[..3]);
    assert_eq!(encode(&s4_codec_cpu::Const, 0, &[0; 65_536]), [0]);
}

#[test]
fn bits() {
    let (plane, stream) = ([1, 2, 3, 4, 5, 6, 7, 0, 1], [0xd1, 0x58, 0x1f, 0x01]);
    check(CodecId::BITS, 3, &plane, &stream);
    for simd in Simd::available() {
        assert_eq!(encode(&s4_codec_cpu::Bits::new(simd), 3, &plane), stream);
    }
}

#[test]
fn zstd() {
    let stream = [0x28, 0xb5, 0x2f, 0xfd, 0x20, 8, 0x41, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    check(CodecId::ZSTD, 0, &[0; 8], &stream);
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let codecs = open_codecs(Simd::Scalar);
    let error = codecs.get(CodecId::NVCOMP_ANS).unwrap_err().to_string();
    assert!(error.contains("nvcomp-ans"), "{error}");
    assert_eq!(codecs.ids().count(), 9);
}

/// A stream of one block.
fn framed(block: &[u8]) -> Vec<u8> {
    let mut stream = (block.len() as u32).to_le_bytes().to_vec();
    stream.resize(16, 0);
    stream.extend(block);
    stream
}

#[test]
fn codecs_in_blocks() {
    check(CodecId::DEFLATE, 0, &[0; 8], &framed(&[0x63, 0x60, 0x80, 0x00, 0x00]));
    check(CodecId::LZ4, 0, &[1, 2, 3], &framed(&[0x30, 1, 2, 3]));
    check(CodecId::SNAPPY, 0, &[1, 2, 3], &framed(&[3, 8, 1, 2, 3]));
    for id in [CodecId::GDEFLATE, CodecId::DEFLATE, CodecId::LZ4, CodecId::SNAPPY] {
        check(id, 0, &[], &[]);
    }
}

#[test]
fn gdeflate() {
    let mut words = [0u32; 35];
    words[..3].copy_from_slice(&[0x0308_0019, 0x62, 0x63]);
    let page: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let stream = framed(&page);
    assert_eq!(stream.len(), 156);
    check(CodecId::GDEFLATE, 0, b"abc", &stream);
}
