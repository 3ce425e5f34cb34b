//! Tensors that equal others of their checkpoint are stored once.

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;

use common::{Memory, Owned};
use s4weights::{
    Contents, DType, Preset, ReadOptions, Reader, Simd, Slice, Source, Target, WriteOptions,
    Writer, adversarial,
};

const N: usize = 150_000;
const DTYPES: [DType; 7] = [
    DType::BFloat16,
    DType::Float16,
    DType::Float32,
    DType::Float64,
    DType::Float8E4M3Fn,
    DType::Int64,
    DType::Complex64,
];

fn values(dtype: DType, pattern: &str) -> Vec<u8> {
    adversarial(dtype, N).find(|p| p.0 == pattern).unwrap().1
}

fn save(tensors: &[Owned], options: WriteOptions) -> Vec<u8> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options).unwrap();
    writer.write(&tensors.iter().map(Owned::source).collect::<Vec<_>>()).unwrap();
    writer.finish(Contents::default()).unwrap();
    std::mem::take(&mut *memory.0.lock().unwrap())
}

fn open(file: Vec<u8>) -> Reader {
    Reader::open(Source::Bytes(file.into()), ReadOptions::default()).unwrap()
}

fn plans(reader: &Reader) -> Vec<String> {
    reader.inspect(false).unwrap().tensors.into_iter().map(|t| t.plan).collect()
}

fn check(reader: &Reader, tensors: &[Owned]) {
    for t in tensors {
        assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
    }
    reader.verify().unwrap();
}

/// A tensor and `copies` others with the same values, of other shapes.
fn equal(dtype: DType, data: &[u8], copies: usize) -> Vec<Owned> {
    let shapes: [&[u64]; 3] = [&[N as u64], &[300, 500], &[2, 3, 25_000]];
    let tensor = |i: usize| Owned::new(format!("t{i}"), dtype, shapes[i % 3], data.to_vec());
    (0..=copies).map(tensor).collect()
}

#[test]
fn equal_tensors_of_every_dtype_take_the_place_of_one() {
    for dtype in DTYPES {
        let data = values(dtype, "random");
        let one = save(&equal(dtype, &data, 0), WriteOptions::default());
        let tensors = equal(dtype, &data, 3);
        let all = save(&tensors, WriteOptions::default());
        assert!(all.len() < one.len() + 3000, "{dtype}: {} of {}", all.len(), one.len());
        let reader = open(all.clone());
        let plans = plans(&reader);
        assert!(!plans[0].starts_with("same"), "{dtype}: {plans:?}");
        assert!(plans[1..].iter().all(|p| p.starts_with("same xor")), "{dtype}: {plans:?}");
        check(&reader, &tensors);
        let width = dtype.size() as u64;
        let rows = reader.read_slice("t1", &Slice(vec![290..300, 0..500])).unwrap();
        assert!(rows == data[(290 * 500 * width) as usize..], "{dtype}: a part");
        for simd in Simd::available() {
            let options =
                WriteOptions { threads: Some(3), simd: Some(simd), ..WriteOptions::default() };
            assert!(save(&tensors, options) == all, "{dtype} {simd}");
        }
    }
}

#[test]
fn preset_fast_looks_for_no_copies() {
    let tensors = equal(DType::Float32, &values(DType::Float32, "like-weights"), 1);
    let reader = open(save(&tensors, WriteOptions { preset: Preset::Fast, ..Default::default() }));
    assert!(plans(&reader).iter().all(|p| p.starts_with("none")), "{:?}", plans(&reader));
}

#[test]
fn what_only_looks_equal_comes_back_too() {
    for (every, from) in [(70, 3), (1, 100_000), (3, 11)] {
        let data = values(DType::Float32, "like-weights");
        let mut tensors = equal(DType::Float32, &data, 2);
        let (first, count) = (from, N - from);
        tensors[1].data.chunks_exact_mut(4).skip(first).take(count).step_by(every).for_each(|x| {
            x[0] ^= 0x11;
            x[2] ^= 0x41;
        });
        check(&open(save(&tensors, WriteOptions::default())), &tensors);
    }
}

#[test]
fn masks_that_agree_along_the_diagonal_are_no_copies() {
    // The evenly spaced runs that are compared first begin at the diagonal.
    const ROWS: usize = 1021;
    let mask = |window: usize| {
        let value = |i| u8::from(i % ROWS <= i / ROWS && i / ROWS - i % ROWS < window);
        let shape = [ROWS as u64; 2];
        let data = (0..ROWS * ROWS).map(value).collect();
        Owned::new(format!("m{window}"), DType::Bool, &shape, data)
    };
    let tensors = [mask(ROWS), mask(256), mask(ROWS + 1)];
    let file = save(&tensors, WriteOptions::default());
    let fast = WriteOptions { preset: Preset::Fast, ..Default::default() };
    assert!(file.len() < save(&tensors, fast).len(), "{}", file.len());
    let reader = open(file);
    let same: Vec<_> = plans(&reader).iter().map(|p| p.starts_with("same")).collect();
    assert_eq!(same, [false, false, true]);
    check(&reader, &tensors);
}

#[test]
fn constant_tensors_are_no_copies() {
    let tensors = equal(DType::Float32, &vec![0; 4 * N], 2);
    let file = save(&tensors, WriteOptions::default());
    assert!(file.len() < 4000, "{}", file.len());
    let reader = open(file);
    assert!(plans(&reader).iter().all(|p| p.starts_with("none")), "{:?}", plans(&reader));
}

#[test]
fn chains_go_through_copies_both_ways() {
    // At step 0 an average equals its weights, at step 1 it no longer does, at step 2 it does again.
    let of = |change: u8| {
        let mut data = values(DType::Float32, "like-weights");
        data.chunks_exact_mut(4).step_by(5).for_each(|x| x[1] ^= change);
        data
    };
    let state = |weights: u8, average: u8| {
        let mut tensors = equal(DType::Float32, &of(weights), 1);
        tensors[1].data = of(average);
        tensors
    };
    let steps = [state(0, 0), state(1, 2), state(3, 3), state(4, 4)];
    let mut above: Option<Arc<Reader>> = None;
    for (i, tensors) in steps.iter().enumerate() {
        let parent = above.clone().map(|p| p as _);
        let reader = open(save(tensors, WriteOptions { parent, ..WriteOptions::default() }));
        if let Some(above) = above.filter(|_| reader.parent_digest().is_some()) {
            reader.set_parent(above).unwrap();
        }
        let plans = plans(&reader);
        assert_eq!(plans[1].starts_with("same"), i != 1, "{i}: {plans:?}");
        assert_eq!(plans[0].starts_with("parent"), i > 0, "{i}: {plans:?}");
        check(&reader, tensors);
        above = Some(Arc::new(reader));
    }
}

#[test]
fn a_rounded_copy_of_two_equal_tensors_is_one_of_the_first() {
    let mut tensors = equal(DType::Float32, &values(DType::Float32, "like-weights"), 1);
    let rounded = tensors[0].data.as_chunks::<4>().0.iter().flat_map(|x| {
        let x = u32::from_le_bytes(*x);
        (((x + 0x7fff + (x >> 16 & 1)) >> 16) as u16).to_le_bytes()
    });
    let rounded: Vec<u8> = rounded.collect();
    tensors.push(Owned::new("t2.t1", DType::BFloat16, &[N as u64], rounded.clone()));
    tensors.push(Owned::new("t3", DType::BFloat16, &[N as u64], rounded));
    let reader = open(save(&tensors, WriteOptions::default()));
    let plans = plans(&reader);
    assert!(plans[1].starts_with("same") && plans[2..].iter().all(|p| p.starts_with("cast")));
    check(&reader, &tensors);
}
