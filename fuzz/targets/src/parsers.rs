//! Parsers of the format.

use s4_format::file::{Footer, check_header};
use s4_format::side::Side;
use s4_format::{ChunkRecord, DType, Digest, Manifest, StreamEntry, index as table};
use s4_planes::{Kernels, Width};
use s4_predict::rank1::Offsets;

use crate::input::Input;
use crate::memory::bounded;

/// Where the sections of the parsed file end.
const END: u64 = 1 << 20;

/// A manifest: if it can be read, it is the same again after writing and reading.
pub fn manifest(data: &[u8]) {
    // Parsed JSON takes a multiple of the memory of its text.
    let parsed = bounded(data.len(), 64 * data.len(), || Manifest::parse_closed(data, END));
    let Ok(parsed) = parsed else { return };
    let Ok(text) = parsed.to_json() else { return };
    let again = Manifest::parse_closed(&text, END).map(|m| m.to_json());
    assert!(again == Ok(Ok(text)), "a manifest changes when it is written");
    let inputs = |t: usize| parsed.plans.get(t).map_or(&[][..], |p| &p.inputs);
    let _ = s4_format::plan::check_dependencies(parsed.plans.len().min(64), inputs);
}

/// Binary parts of the index: tensor table, chunk table, frame, side data, header and footer, tables.
pub fn index(data: &[u8]) {
    let mut input = Input::new(data);
    let (part, n) = (input.below(8), input.u8());
    let bytes = input.rest();
    bounded(bytes.len(), 64 * bytes.len(), || parse_part(part, n, bytes));
}

fn parse_part(part: usize, n: u8, bytes: &[u8]) {
    match part {
        0 => {
            let Ok(tensors) = table::parse_table(bytes, END, 1 + usize::from(n)) else { return };
            let again = table::write_table(&tensors)
                .and_then(|bytes| table::parse_table(&bytes, END, 1 + usize::from(n)));
            assert!(again == Ok(tensors), "a tensor table changes when it is written");
        }
        1 => {
            let Ok(records) = ChunkRecord::parse_table(bytes) else { return };
            let mut again = vec![];
            records.iter().for_each(|r| r.write(&mut again));
            assert!(again == bytes, "a chunk table changes when it is written");
        }
        2 => {
            let Ok(list) = StreamEntry::parse_chunk(bytes, usize::from(n % 10)) else { return };
            let stored: usize = list.items().iter().map(|(_, bytes)| bytes.len()).sum();
            assert!(stored <= bytes.len());
            let _ = list.crc();
        }
        3 => {
            let Ok(side) = Side::parse(bytes) else { return };
            let mut again = vec![];
            assert!(side.write(&mut again).is_ok());
            assert!(Side::parse(&again) == Ok(side), "side data changes when it is written");
        }
        4 => {
            let _ = check_header(bytes);
            let _ = Footer::parse(bytes, bytes.len() as u64);
        }
        5 => {
            let width = [Width::B1, Width::B2, Width::B4, Width::B8][usize::from(n % 4)];
            let Ok(offsets) = Offsets::parse(width, bytes) else { return };
            let last = offsets.values().saturating_sub(4);
            let mut out = vec![0; 3 * width.bytes()];
            // With a share, predict once from a parent of as many bytes, and once from none.
            let parent = if offsets.share() == 0 { vec![] } else { out.to_vec() };
            let _ = offsets.predict_range(Kernels::default(), last, &parent, &mut out);
            let _ = offsets.predict_range(Kernels::default(), last, &[], &mut out);
        }
        6 => {
            if let Ok(json) = std::str::from_utf8(bytes) {
                let _ = json.parse::<Digest>();
                let _ = json.parse::<DType>();
            }
        }
        _ => {
            use s4_codec_cpu::rans::{Precision, parse_tables, write_tables};
            let Ok(precision) = Precision::from_param(n) else { return };
            let Ok(tables) = parse_tables(precision, bytes) else { return };
            assert!(write_tables(&tables) == bytes, "tables change when they are written");
        }
    }
}
