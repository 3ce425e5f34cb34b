//! Checkpoints of preset `nvcomp` in a store: they are read without the caller's consent, because
//! the log names them by their hash. Damaged data never reaches the library.
//!
//! Without a GPU with nvCOMP, these tests run on the emulated driver of `s4-engine`'s tests.

use std::path::Path;

use s4weights::store::{CheckpointStore, Place, SaveOptions, StoreOptions, is_damage};
use s4weights::{DType, Preset, TensorSource};

use crate::damage::{flip, objects};
use crate::emulated;
use crate::run::{open, options};

/// Four exponents, which the closed codec makes smaller, and noise, which no codec does.
fn values() -> Vec<u8> {
    let noise = (0..150_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u16);
    noise.flat_map(|x| ((x & 0x007f) | 0x3e00 | (x & 0x0300) >> 1).to_le_bytes()).collect()
}

/// A store with one checkpoint; `None` without nvCOMP.
fn store(folder: &Path) -> Option<CheckpointStore> {
    let place = Place::folder(folder);
    let store = open(&place, StoreOptions { preset: Preset::Nvcomp, ..options() });
    let (shape, data) = ([150_000], values());
    let tensor = TensorSource::new("w", DType::BFloat16, &shape, &data);
    match store.save(1, &[tensor], &SaveOptions::default()) {
        Ok(_) => Some(store),
        Err(e) => {
            let required = std::env::var("S4_REQUIRE_GPU").is_ok_and(|v| v == "1");
            assert!(!required, "a GPU and nvCOMP are required: {e}");
            assert!(e.to_string().contains("preset `nvcomp` needs"), "{e}");
            println!("skipped: no nvCOMP");
            None
        }
    }
}

#[test]
fn closed_streams_of_a_store_are_read_without_trust() {
    let folder = tempfile::tempdir().unwrap();
    let Some(store) = store(folder.path()) else { return };
    let loaded = store.load(None).unwrap();
    let closed = &loaded.reader().manifest().closed_codecs;
    assert!(!closed.is_empty());
    assert!(loaded.reader().read("w").unwrap() == values());
}

#[test]
fn closed_streams_are_decoded_only_of_objects_whose_hash_matches() {
    let folder = tempfile::tempdir().unwrap();
    let Some(store) = store(folder.path()) else { return };
    let id = store.latest().unwrap().unwrap().id();
    let object = &objects(folder.path(), id)[0];
    let sound = std::fs::read(object).unwrap();
    // Damage far behind the first chunk, part of which is read: the object is compared as a whole.
    let mut bytes = sound.clone();
    let last = bytes.len() - 40;
    bytes[last] ^= 1;
    std::fs::write(object, &bytes).unwrap();
    #[expect(clippy::single_range_in_vec_init, reason = "one dimension")]
    let slice = s4weights::Slice(vec![0..10]);
    let error = store.load(None).unwrap().reader().read_slice("w", &slice).unwrap_err();
    assert!(is_damage(&error) && error.to_string().contains("hash"), "{error}");
    std::fs::write(object, &sound).unwrap();
    let first = store.load(None).unwrap().reader().read_slice("w", &slice).unwrap();
    assert!(first == values()[..20]);
    flip(object);
    assert!(store.load(None).unwrap().reader().read("w").is_err());
}

#[test]
fn closed_tests_pass_on_an_emulated_driver() {
    emulated::run(&["closed::closed_streams", "--test-threads=1", "--nocapture"]);
}
