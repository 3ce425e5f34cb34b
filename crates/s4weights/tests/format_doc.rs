//! The worked example of docs/format.md is what this version writes.

mod common;

use std::path::Path;

use common::{Owned, save};
use s4weights::{DType, WriteOptions};

#[test]
fn the_worked_example_is_a_real_file() {
    let doc = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/format.md");
    let doc = std::fs::read_to_string(doc).unwrap();
    let (_, example) = doc.split_once("<!-- example -->").unwrap();
    let (example, _) = example.split_once("<!-- end of example -->").unwrap();
    // Lines of an offset, up to 16 bytes in hexadecimal, and a comment after two spaces.
    let mut bytes = vec![];
    for line in example.lines().filter(|l| l.starts_with("0")) {
        let (offset, rest) = line.split_once("  ").unwrap();
        assert_eq!(usize::from_str_radix(offset, 16).unwrap(), bytes.len(), "{line}");
        let hex = rest.split("  ").next().unwrap();
        bytes.extend(hex.split(' ').map(|b| u8::from_str_radix(b, 16).unwrap()));
    }
    let data = [0x3f80u16, 0x3f80, 0xbf80, 0x4000].iter().flat_map(|v| v.to_le_bytes()).collect();
    let file = save(&[Owned::new("w", DType::BFloat16, &[2, 2], data)], WriteOptions::default());
    assert!(bytes == file, "the example should read:\n{}", dump(&file));
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
