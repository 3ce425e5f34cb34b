//! Damaged and malicious files give the data or a typed error, nothing else.

mod common;
#[path = "common/craft.rs"]
#[expect(dead_code, reason = "each test uses its own part")]
mod craft;

use common::{Owned, mixed, open, save};
use craft::{BYTE, Constant, Craft};
use s4weights::format::index::{RECORD_LEN, TABLE_HEADER_LEN, Tensor, TensorKind};
use s4weights::format::manifest::Parent;
use s4weights::format::{Digest, Error as FormatError, LayoutId, Plan};
use s4weights::{DType, Error, WriteOptions, adversarial};

fn small_file() -> (Vec<Owned>, Vec<u8>) {
    let weights =
        adversarial(DType::BFloat16, 5000).find(|p| p.0 == "like-weights").expect("in a test").1;
    let squares =
        adversarial(DType::Float32, 300).find(|p| p.0 == "like-squares").expect("in a test").1;
    let tensors = vec![
        Owned::new("w", DType::BFloat16, &[50, 100], weights),
        Owned::new("v", DType::Float32, &[300], squares),
        Owned::new("s", DType::Int64, &[], vec![7; 8]),
    ];
    let file = save(&tensors, WriteOptions::default());
    (tensors, file)
}

/// Reads every tensor: all the data, or the first error.
fn read_all(tensors: &[Owned], file: Vec<u8>) -> Result<(), Error> {
    let reader = open(file)?;
    for t in tensors {
        assert!(reader.read(&t.name)? == t.data, "{}: other data", t.name);
    }
    Ok(())
}

#[test]
fn every_flip_is_an_error_or_the_exact_data() {
    let (tensors, file) = small_file();
    read_all(&tensors, file.clone()).unwrap();
    let mut harmless = 0;
    for at in 0..file.len() {
        let mut bad = file.clone();
        bad[at] ^= 1 << (at % 8);
        match read_all(&tensors, bad.clone()) {
            Ok(()) => {
                harmless += 1;
                // Verifying sees what reading does not.
                assert!(open(bad).unwrap().verify().is_err(), "byte {at}");
            }
            Err(Error::Format { source, .. }) => {
                let p = source.location();
                let named = p.tensor.is_some() && p.chunk.is_some() || p.part.is_some();
                assert!(named, "byte {at}: {source}");
            }
            Err(e) => panic!("byte {at}: {e}"),
        }
    }
    assert!(harmless < file.len() / 50, "{harmless} of {} flips went unseen", file.len());
}

#[test]
fn every_truncation_is_an_error() {
    let (tensors, file) = small_file();
    for len in 0..file.len() {
        match read_all(&tensors, file[..len].to_vec()) {
            Err(Error::Format { source, .. }) => assert!(
                matches!(source, FormatError::Truncated { .. } | FormatError::Corrupt { .. }),
                "{len}: {source}"
            ),
            other => panic!("{len}: {other:?}"),
        }
    }
    let mut longer = file;
    longer.push(0);
    assert!(read_all(&tensors, longer).is_err());
}

#[test]
fn damage_is_named_by_tensor_and_chunk() {
    let tensors = mixed();
    let file = save(&tensors, WriteOptions::default());
    // The first tensor's chunks come first; the second of its two chunks is an eighth of them.
    let stored = open(file.clone()).unwrap().inspect(false).unwrap().tensors[0].stored.unwrap();
    let mut bad = file;
    bad[stored as usize - 1000] ^= 1;
    let e = open(bad).unwrap().read("w").err().unwrap().to_string();
    assert!(e.contains("tensor `w`, chunk 1"), "{e}");
}

#[test]
fn another_version_is_refused_by_name() {
    let (_, mut file) = small_file();
    file[10] = 9;
    let e = open(file).err().unwrap().to_string();
    assert!(e.contains("format 0.9") && e.contains("format 0.2"), "{e}");
}

#[test]
fn what_is_no_such_file_is_refused() {
    for bytes in [vec![], vec![0; 15], vec![0; 100], b"PK\x03\x04 and so on, a zip file".to_vec()] {
        assert!(matches!(open(bytes), Err(Error::Format { .. })));
    }
}

#[test]
fn the_plan_of_a_packed_tensors_record_is_ignored() {
    // `x` is a copy of `p`, which lies in a pack: all its residuals are 0.
    let parent = Some(Parent { manifest: Digest::of(b""), depth: 1 });
    let x = Constant { parent, ..Constant::new("x", DType::UInt8, 100, 16) };
    for field in [0, 1, 2, u16::MAX] {
        let mut craft =
            Craft::new().constants(&[x.clone(), Constant::new("", DType::UInt8, 100, 16)]);
        craft.parent = None;
        craft.plans[0] = Plan::same(LayoutId::WHOLE, 1);
        let TensorKind::Chunks { pack, .. } = &mut craft.tensors[1].kind else { panic!() };
        *pack = true;
        craft.tensors.insert(
            1,
            Tensor {
                name: "p".into(),
                dtype: DType::UInt8,
                shape: vec![100],
                plan: 0,
                kind: TensorKind::Packed { pack: 2, first: 0 },
            },
        );
        let set = |table: &mut Vec<u8>| {
            let record = &mut table[TABLE_HEADER_LEN + RECORD_LEN..][..RECORD_LEN];
            record[12..14].copy_from_slice(&field.to_le_bytes());
        };
        let (file, _) = craft.finish_with(set, |json| json);
        let reader = open(file).unwrap();
        let (mut x, mut p) = ([0; 100], [0; 100]);
        reader.read_into(&mut [(0, &mut x), (1, &mut p)]).unwrap();
        assert_eq!((x, p), ([BYTE; 100], [BYTE; 100]), "plan {field}");
        reader.verify().unwrap();
    }
}
