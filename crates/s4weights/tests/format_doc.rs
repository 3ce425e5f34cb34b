//! The worked examples of docs/format.md are what this version writes, and the test vectors that it
//! points to are what this version reads.
#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

mod common;
#[path = "vectors/expected.rs"]
mod expected;
#[path = "vectors/golden_cpu.rs"]
mod golden_cpu;
#[path = "vectors/refuse.rs"]
mod refuse;

use std::path::{Path, PathBuf};

use common::{Owned, save};
use s4weights::format::file::Footer;
use s4weights::format::index::{Tensor, TensorKind, parse_table, split_block};
use s4weights::format::layout::Planes;
use s4weights::format::{ChunkRecord, CodecId, StreamEntry};
use s4weights::{DType, Manifest, WriteOptions};

/// A file of the repository.
fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn document(path: &str) -> String {
    std::fs::read_to_string(repository(path)).unwrap()
}

/// The bytes of a hex dump between two marks: lines of an offset, two spaces, up to 16 bytes in
/// hexadecimal, and a comment after two spaces.
fn dumped(doc: &str, name: &str) -> Vec<u8> {
    let (_, example) = doc.split_once(&format!("<!-- {name} -->")).unwrap();
    let (example, _) = example.split_once(&format!("<!-- end of {name} -->")).unwrap();
    let mut bytes = vec![];
    for line in example.lines().filter(|l| l.starts_with("0")) {
        let (offset, rest) = line.split_once("  ").unwrap();
        assert_eq!(usize::from_str_radix(offset, 16).unwrap(), bytes.len(), "{line}");
        let hex = rest.split("  ").next().unwrap();
        bytes.extend(hex.split(' ').map(|b| u8::from_str_radix(b, 16).unwrap()));
    }
    bytes
}

fn dump(file: &[u8]) -> String {
    let line = |(i, bytes): (usize, &[u8])| {
        let hex: Vec<_> = bytes.iter().map(|b| format!("{b:02x}")).collect();
        let text: String = (bytes.iter())
            .map(|b| if (0x20..0x7f).contains(b) { char::from(*b) } else { '.' })
            .collect();
        format!("{:04x}  {:47}  {text}\n", i * 16, hex.join(" "))
    };
    file.chunks(16).enumerate().map(line).collect()
}

#[test]
fn the_worked_example_is_a_real_file() {
    let data = [0x3f80u16, 0x3f80, 0xbf80, 0x4000].iter().flat_map(|v| v.to_le_bytes()).collect();
    let file = save(&[Owned::new("w", DType::BFloat16, &[2, 2], data)], WriteOptions::default());
    let bytes = dumped(&document("docs/format.md"), "example");
    assert!(bytes == file, "the example should read:\n{}", dump(&file));
}

/// Manifest and tensor table of a file.
fn index_of(file: &[u8]) -> (Manifest, Vec<Tensor>) {
    let footer = Footer::parse(file, file.len() as u64).unwrap();
    let at = footer.offset as usize;
    let manifest = Manifest::parse(&file[at..at + footer.len as usize], footer.offset).unwrap();
    let table = &manifest.tensors.section;
    let table = &file[table.offset as usize..(table.offset + table.bytes) as usize];
    let tensors = parse_table(table, footer.offset, manifest.plans.len()).unwrap();
    (manifest, tensors)
}

/// The values of the coded example, as the document defines them.
fn coded_values() -> Vec<u8> {
    let mut x = 1u32;
    let mut value = |i: u32| {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let (sign, mantissa) = (x >> 31, x >> 24 & 127);
        let exponent = 112 + (x >> 8 & 0xffff).count_ones();
        if i == (1 << 17) + 9 { 0 } else { (sign << 15 | exponent << 7 | mantissa) as u16 }
    };
    (0..(1 << 17) + 256).flat_map(|i| value(i).to_le_bytes()).collect()
}

#[test]
fn the_coded_example_is_what_is_written_and_read() {
    let values = coded_values();
    let shape = [(1 << 17) + 256];
    let file =
        save(&[Owned::new("x", DType::BFloat16, &shape, values.clone())], WriteOptions::default());
    let (manifest, tensors) = index_of(&file);
    let TensorKind::Chunks { block, chunk_log2, pack: false } = tensors[0].kind else {
        panic!("{:?}", tensors[0])
    };
    let at = block.offset as usize;
    let bytes = &file[at..at + block.len as usize];
    let (side, table) = split_block(bytes, &block, 2).unwrap();
    let record = ChunkRecord::parse_table(table).unwrap()[1];
    let chunk = &file[record.offset as usize..][..record.len as usize];
    let doc = document("docs/format.md");
    let shown = dumped(&doc, "block");
    assert!(shown == bytes, "the block should read:\n{}", dump(bytes));
    let shown = dumped(&doc, "coded chunk");
    assert!(shown == chunk, "the chunk should read:\n{}", dump(chunk));
    // What the document says about the example.
    let layout = manifest.plans[usize::from(tensors[0].plan)].layout;
    let planes = Planes::new(layout, 2, 256).unwrap();
    assert_eq!((chunk_log2, layout.name(), planes.sizes()), (17, Some("fields"), &[256, 256][..]));
    assert!(!side.is_empty() && !record.plain);
    let streams = StreamEntry::parse_chunk(chunk, 2).unwrap();
    let [(first, rans), (second, raw)] = streams.items() else { panic!() };
    assert_eq!((first.codec, first.param, rans[7]), (CodecId::RANS, 8, 3));
    assert_eq!((second.codec, raw.len()), (CodecId::RAW, 256 - 64));
    let words = u16::from_le_bytes([rans[8], rans[9]]);
    assert!(words > 32, "{words} words");
    assert!(common::open(file).unwrap().read("x").unwrap() == values);
}

#[test]
fn the_table_of_dtypes_is_complete() {
    let doc = document("docs/format.md");
    for &dtype in DType::ALL {
        let (width, values) = (dtype.value_width(), dtype.size() / dtype.value_width());
        let row = format!("| {} | `{dtype}` | {width} | {values} |", dtype as u8);
        assert!(doc.contains(&row), "docs/format.md lacks the row\n{row}");
    }
}

#[test]
fn the_check_values_of_the_document_are_right() {
    let doc = document("docs/format.md");
    let crc = s4weights::format::crc32c(b"123456789");
    assert!(doc.contains(&format!("{crc:08x}")));
    for text in [&b""[..], b"abc"] {
        let hash = s4weights::format::Digest::of(text).to_string();
        assert!(doc.contains(&hash), "{hash}");
    }
}

#[test]
fn the_store_that_the_document_shows_is_the_golden_one() {
    let doc = document("docs/store.md");
    let (_, shown) = doc.split_once("<!-- golden store -->").unwrap();
    let (shown, _) = shown.split_once("<!-- end of golden store -->").unwrap();
    // The document breaks lines; the JSON of these objects has spaces only in strings.
    let packed = |s: &str| s.split_whitespace().collect::<String>();
    let (mut rest, mut seen) = (shown, 0);
    while let Some((before, after)) = rest.split_once("```json\n") {
        let (text, tail) = after.split_once("\n```").unwrap();
        let path = before.trim_end().lines().last().unwrap().split('`').nth(1).unwrap();
        let file = repository("testdata/golden/store").join(path);
        assert_eq!(packed(text), packed(&std::fs::read_to_string(file).unwrap()), "{path}");
        (rest, seen) = (tail, seen + 1);
    }
    assert!(seen >= 6, "{seen} objects are shown");
}

#[test]
fn a_fence_is_as_the_document_says() {
    let fence = r#"{"fence":{"against":"01900000-0000-7000-8000-000000000000"}}"#;
    assert!(document("docs/store.md").contains(fence));
    let op: s4weights::store::Op = serde_json::from_str(fence).unwrap();
    assert_eq!(serde_json::to_string(&op).unwrap(), fence);
}
