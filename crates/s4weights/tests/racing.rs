//! Values that change while they are saved: a file holds each value as it was at some time, and always loads.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

mod common;
#[path = "common/racing.rs"]
mod racing;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::Memory;
use racing::{Racing, churn, tensors};
use s4weights::{
    Contents, MemoryOptions, MemoryParent, Parent, ParentRange, Preset, ReadOptions, Reader,
    Result, Simd, Source, Target, TensorCodec, WriteOptions, Writer, Written,
};

/// Runs `work` while another thread changes the values.
fn while_changing(tensors: &[Racing], work: impl FnOnce()) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| churn(tensors, &stop));
        // Stops the other thread also on a panic.
        let _stop = Stop(&stop);
        work();
    });
}

fn write(tensors: &[Racing], options: WriteOptions) -> Result<(Vec<u8>, Written)> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options)?;
    writer.write(&tensors.iter().map(Racing::source).collect::<Vec<_>>())?;
    let written = writer.complete(Contents::default())?;
    let file = std::mem::take(&mut *memory.0.lock().unwrap());
    Ok((file, written))
}

fn open(file: Vec<u8>) -> Reader {
    Reader::open(Source::Bytes(file.into()), ReadOptions::default()).unwrap()
}

fn check(reader: &Reader, tensors: &[Racing]) {
    reader.verify().unwrap();
    for t in tensors {
        assert!(t.had(&reader.read(t.name).unwrap()), "{}: a value that never was", t.name);
    }
}

#[test]
fn every_file_loads_and_holds_values_that_were_there() {
    let tensors = tensors();
    while_changing(&tensors, || {
        for round in 0..40 {
            let simd = [Simd::detect(), Simd::Scalar][round / 20];
            let options = WriteOptions {
                threads: Some(1 + round % 2),
                simd: Some(simd),
                ..WriteOptions::default()
            };
            let (file, _) = write(&tensors, options).unwrap();
            check(&open(file), &tensors);
        }
    });
}

#[test]
fn every_difference_loads_too() {
    let tensors = tensors();
    let base = Arc::new(open(write(&tensors, WriteOptions::default()).unwrap().0));
    while_changing(&tensors, || {
        for round in 0..20 {
            let options = WriteOptions {
                parent: Some(Arc::clone(&base) as _),
                threads: Some(1 + round % 2),
                ..WriteOptions::default()
            };
            let (file, _) = write(&tensors, options).unwrap();
            let reader = open(file);
            if reader.parent_digest().is_some() {
                reader.set_parent(Arc::clone(&base)).unwrap();
            }
            check(&reader, &tensors);
        }
    });
}

#[test]
fn compressed_tensors_decompress() {
    let tensors = tensors();
    let codec = TensorCodec::new(MemoryOptions::default()).unwrap();
    while_changing(&tensors, || {
        for _ in 0..10 {
            for t in &tensors {
                let source = t.source();
                let (dtype, shape, data) = (source.dtype, source.shape, t.data());
                let compressed = codec.compress(&s4_engine::TensorView { dtype, shape, data });
                let mut values = vec![0; data.len()];
                codec.decompress(&compressed.unwrap(), &mut values).unwrap();
                assert!(t.had(&values), "{}", t.name);
            }
        }
    });
}

/// A parent kept in memory has the values that were stored, or is not kept.
#[test]
fn a_parent_in_memory_is_the_checkpoint_or_refuses_at_once() {
    let tensors = tensors();
    let options = MemoryOptions { preset: Preset::Fast, ..MemoryOptions::default() };
    let codec = Arc::new(TensorCodec::new(options).unwrap());
    let mut kept = 0;
    while_changing(&tensors, || {
        for _ in 0..20 {
            let (file, written) = write(&tensors, WriteOptions::default()).unwrap();
            let reader = open(file);
            let snapshot = Arc::new(written.snapshot);
            for t in &tensors {
                let mut parent = MemoryParent::new(Arc::clone(&snapshot), 1 << 30);
                if !parent.keep(&codec, t.name, t.data()).is_ok_and(|kept| kept) {
                    continue;
                }
                kept += 1;
                let stored = reader.read(t.name).unwrap();
                let mut values = vec![0; stored.len()];
                let number = reader.find(t.name).unwrap() as u32;
                parent
                    .read(&mut [ParentRange { tensor: number, first: 0, to: &mut values }])
                    .unwrap();
                assert!(values == stored, "{}", t.name);
            }
        }
    });
    println!("{kept} kept");
}
