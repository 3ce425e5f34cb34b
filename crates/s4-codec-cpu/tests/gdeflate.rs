//! GDeflate against another implementation, in both directions, and against bytes that are not
//! pages.

#[path = "common/data.rs"]
mod data;

use std::sync::OnceLock;

use gdeflate::{CompressionLevel, CompressionResult, Compressor, Decompressor, Tile};
use proptest::prelude::*;
use s4_codec_cpu::blocks::{BLOCK, Block, Blocks, bound, write};
use s4_codec_cpu::{Codec, Context, Gdeflate, Symbols, Workspace};

const LEVELS: [CompressionLevel; 13] = [
    CompressionLevel::None,
    CompressionLevel::Level1,
    CompressionLevel::Level2,
    CompressionLevel::Level3,
    CompressionLevel::Level4,
    CompressionLevel::Level5,
    CompressionLevel::Level6,
    CompressionLevel::Level7,
    CompressionLevel::Level8,
    CompressionLevel::Level9,
    CompressionLevel::Level10,
    CompressionLevel::Level11,
    CompressionLevel::Level12,
];

/// Real planes and shapes that real planes do not have.
fn inputs() -> Vec<(&'static str, Vec<u8>)> {
    let noise = |len: usize| -> Vec<u8> {
        let mut x = 1u64;
        let next = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 56) as u8
        };
        std::iter::repeat_with(next).take(len).collect()
    };
    let steep = noise(70_000).into_iter().zip(noise(70_001).into_iter().skip(1));
    let mut all = data::planes(3 * BLOCK / 2);
    all.extend([
        ("one", vec![7]),
        ("two", vec![7, 8]),
        ("zeros", vec![0; 2 * BLOCK]),
        ("noise", noise(BLOCK + 1)),
        ("stored twice", noise(BLOCK)),
        ("text", b"the lanes take turns, and the turns take lanes; ".repeat(900)),
        // Codewords longer than the decoder's table.
        ("steep", steep.map(|(a, b)| (a.trailing_zeros() + b.leading_zeros()) as u8).collect()),
        ("fibonacci", fibonacci()),
        ("runs", (0..60_000u32).map(|i| (i.isqrt() % 7) as u8).collect()),
        ("period 40000", noise(40_000).repeat(2)),
    ]);
    all
}

/// Symbols whose best code is as deep as can be.
fn fibonacci() -> Vec<u8> {
    let counts = std::iter::successors(Some((1, 1)), |(a, b)| Some((*b, a + b))).map(|p| p.0);
    let all = (0u8..22).zip(counts).flat_map(|(symbol, count)| vec![symbol; count]);
    all.take(BLOCK).collect()
}

fn encode(codec: Gdeflate, plane: &[u8]) -> Vec<u8> {
    let mut dst = vec![0xa5; codec.bound(0, plane.len())];
    let symbols = Symbols::new(plane, Context::default());
    let len = codec.encode(&symbols, &mut dst, &mut Workspace::default()).expect("encodes").len;
    dst.truncate(len);
    dst
}

fn decode(stream: &[u8], len: usize) -> s4_format::Result<Vec<u8>> {
    let mut dst = vec![0x5a; len];
    let mut work = Workspace::default();
    Gdeflate::default().decode(Context::default(), stream, &mut dst, &mut work).map(|()| dst)
}

/// The other implementation's output. It reads past the end of some bad pages, so zeros follow the
/// page.
fn decode_elsewhere(page: &[u8], len: usize) -> Vec<u8> {
    let mut bytes = page.to_vec();
    bytes.resize(page.len() + 300_000, 0);
    let tiles = [Tile { compressed_size: page.len() as u32, uncompressed_size: len as u32 }];
    let pages = CompressionResult::new(&bytes, &tiles, BLOCK as u32);
    Decompressor::new().expect("memory").decompress(pages).expect("decodes")
}

fn page_elsewhere(page: &[u8], level: CompressionLevel) -> Vec<u8> {
    let mut compressor = Compressor::new(level).expect("memory");
    compressor.compress(page, BLOCK).expect("encodes").bytes
}

#[test]
fn our_pages_are_read_elsewhere() {
    for (name, plane) in inputs() {
        for codec in [Gdeflate::entropy_only(), Gdeflate::with_matches()] {
            let stream = encode(codec, &plane);
            let mut read = Vec::new();
            for Block { stored, plane } in
                Blocks::parse(&stream, plane.len(), BLOCK).expect("parses").iter()
            {
                read.extend(decode_elsewhere(&stream[stored], plane.len()));
            }
            assert!(read == plane, "{name}, {codec:?}");
            assert!(decode(&stream, plane.len()).as_ref() == Ok(&plane), "{name}, {codec:?}");
        }
    }
}

#[test]
fn pages_written_elsewhere_are_read() {
    for (name, plane) in inputs() {
        for level in LEVELS {
            let page_bound = |len: usize| 2 * len + 1000;
            let mut stream = vec![0; bound(plane.len(), BLOCK, page_bound)];
            let len = write(&plane, &mut stream, BLOCK, page_bound, |page, dst| {
                let coded = page_elsewhere(page, level);
                dst[..coded.len()].copy_from_slice(&coded);
                Ok(coded.len())
            });
            let stream = &stream[..len.expect("fits")];
            match decode(stream, plane.len()) {
                Ok(read) => assert!(read == plane, "{name} at {level:?}"),
                Err(error) => panic!("{name} at {level:?}: {error}"),
            }
        }
    }
}

#[test]
fn matches_pay_where_there_are_some() {
    let text = b"the lanes take turns, and the turns take lanes; ".repeat(900);
    let entropy = encode(Gdeflate::entropy_only(), &text).len();
    let matches = encode(Gdeflate::with_matches(), &text).len();
    assert!(entropy < 6 * text.len() / 10 && matches < text.len() / 20, "{entropy}, {matches}");
}

#[test]
fn entropy_coding_is_as_good_as_elsewhere() {
    for (name, plane) in data::planes(BLOCK) {
        let ours = encode(Gdeflate::entropy_only(), &plane).len();
        let best = page_elsewhere(&plane, CompressionLevel::Level12).len();
        assert!(ours <= plane.len() + 272, "{name}: {ours}");
        // Exponents hardly repeat: matches give a few per cent.
        assert!(name != "bf16 high" || ours <= best * 108 / 100, "{name}: {ours}, {best}");
    }
}

/// The inputs, made once.
static INPUTS: OnceLock<Vec<(&'static str, Vec<u8>)>> = OnceLock::new();

/// A stream of one block.
fn framed(page: &[u8]) -> Vec<u8> {
    let mut stream = (page.len() as u32).to_le_bytes().to_vec();
    stream.resize(16, 0);
    stream.extend(page);
    stream
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_give_data_or_an_error(
        page in prop::collection::vec(any::<u8>(), 1..1200),
        first in 0u8..8,
        len in 1usize..3000,
    ) {
        // The first bits select the kind of block; each kind must occur often enough.
        let mut page = page;
        page[0] = page[0] & !7 | first;
        if let Ok(read) = decode(&framed(&page), len) {
            prop_assert_eq!(decode_elsewhere(&page, len), read);
        }
    }

    #[test]
    fn damaged_pages_are_refused_or_read_as_elsewhere(
        which in 0usize..17,
        level in 0usize..13,
        len in 1usize..5000,
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 0..4),
    ) {
        let all = INPUTS.get_or_init(inputs);
        let plane = &all[which % all.len()].1;
        let plane = &plane[..len.min(plane.len())];
        let mut page = page_elsewhere(plane, LEVELS[level]);
        for (at, bit) in &flips {
            let at = at.index(page.len());
            page[at] ^= 1 << bit;
        }
        match decode(&framed(&page), plane.len()) {
            Ok(read) => prop_assert_eq!(decode_elsewhere(&page, plane.len()), read),
            Err(error) => prop_assert!(!flips.is_empty(), "{}", error),
        }
    }
}
