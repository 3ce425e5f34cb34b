//! What presets must reach: on values that hardly change, on those that hold less than their type could, and beside
//! preset `fast` on everything.

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{Owned, open, save};
use proptest::prelude::*;
use s4weights::store::{CheckpointStore, SaveOptions, StoreOptions};
use s4weights::{DType, Parent, Preset, WriteOptions, adversarial};

/// `balanced` is a longer word in the manifest than `fast`.
const LONGER_NAME: usize = 4;

fn noise(i: u64) -> u64 {
    let x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

/// Tensors of a slice of a training run.
fn slices(file: &str) -> Vec<Owned> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    let bytes = std::fs::read(folder.join(file).with_extension("safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut out = vec![];
    for (name, t) in file.tensors() {
        let dtype = match t.dtype() {
            safetensors::Dtype::BF16 => DType::BFloat16,
            safetensors::Dtype::F32 => DType::Float32,
            other => panic!("{other:?}"),
        };
        let shape: Vec<u64> = t.shape().iter().map(|d| *d as u64).collect();
        out.push(Owned::new(name, dtype, &shape, t.data().to_vec()));
    }
    out.sort_by(|a, b| a.name.cmp(&b.name));
    out
}

/// bf16 weights of a few million values: those of the slice, again and again, each time with other mantissas.
fn weights() -> Vec<Owned> {
    let slice = slices("gpt34m_bf16_s0");
    let large = |t: &&Owned| t.name.starts_with("model.") && t.data.len() > 1 << 16;
    let mut out = vec![];
    for t in slice.iter().filter(large) {
        for copy in 0..12u64 {
            let mut data = t.data.repeat(4);
            for (i, x) in data.chunks_exact_mut(2).enumerate() {
                x[0] ^= (noise(i as u64 ^ copy << 40) & 0x7f) as u8;
            }
            let shape = [4 * t.shape[0], t.shape[1]];
            out.push(Owned::new(format!("{}.{copy}", t.name), t.dtype, &shape, data));
        }
    }
    out
}

/// As reinforcement learning leaves them: 0.3% of values change by one or two units in their last place.
fn a_step_later(tensors: &[Owned]) -> Vec<Owned> {
    let mut out = tensors.to_vec();
    for (number, t) in out.iter_mut().enumerate() {
        for (i, x) in t.data.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let noise = noise(i as u64 ^ (number as u64) << 50 ^ 0x77);
            if noise % 1000 < 3 {
                let by = [1, 1, -1, -1, 2, -2][(noise >> 32) as usize % 6];
                *x = u16::from_le_bytes(*x).wrapping_add_signed(by).to_le_bytes();
            }
        }
    }
    out
}

fn bytes(tensors: &[Owned]) -> usize {
    tensors.iter().map(|t| t.data.len()).sum()
}

fn stored(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
    let size = |e: std::fs::DirEntry| match e.file_type().unwrap().is_dir() {
        true => stored(&e.path()),
        false => e.metadata().unwrap().len() as usize,
    };
    entries.map(size).sum()
}

#[test]
fn a_model_of_which_few_values_changed_costs_half_a_percent() {
    let before = weights();
    let after = a_step_later(&before);
    let raw = bytes(&before);
    let base = Arc::new(open(save(&before, WriteOptions::default())).unwrap());
    let against = || WriteOptions {
        parent: Some(Arc::clone(&base) as Arc<dyn Parent>),
        ..Default::default()
    };
    let file = save(&after, against());
    println!("a file: {} of {raw}", file.len());
    assert!(200 * file.len() <= raw, "{} of {raw}", file.len());
    let reader = open(file).unwrap();
    reader.set_parent(Arc::clone(&base)).unwrap();
    for t in &after {
        assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
    }
    // What did not change at all costs a few bytes a chunk: two constant planes, and the record.
    let unchanged = save(&before, against());
    println!("unchanged: {} of {raw}", unchanged.len());
    assert!(1000 * unchanged.len() <= raw, "{} of {raw}", unchanged.len());

    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().to_str().unwrap();
    let options = StoreOptions::default();
    let store = CheckpointStore::open_or_create(url, &Default::default(), options).unwrap();
    let save = |tensors: &[Owned], step| {
        let sources: Vec<_> = tensors.iter().map(Owned::source).collect();
        let size = stored(folder.path());
        store.save(step, &sources, &SaveOptions::default()).unwrap();
        stored(folder.path()) - size
    };
    save(&before, 0);
    let delta = save(&after, 1);
    println!("in a store: {delta} of {raw}");
    assert!(200 * delta <= raw, "{delta} of {raw}");
}

#[test]
fn values_that_hold_less_than_their_type_could_cost_what_they_hold() {
    let n = 300_000;
    let bf16 = adversarial(DType::BFloat16, n).find(|p| p.0 == "like-weights").unwrap().1;
    let wide: Vec<u8> = bf16.as_chunks::<2>().0.iter().flat_map(|x| [0, 0, x[0], x[1]]).collect();
    let double: Vec<u8> = wide
        .as_chunks::<4>()
        .0
        .iter()
        .flat_map(|x| f64::from(f32::from_le_bytes(*x)).to_le_bytes())
        .collect();
    let fp16_in_fp32: Vec<u8> =
        wide.as_chunks::<4>().0.iter().flat_map(|x| [0, x[1] & 0xe0, x[2], x[3]]).collect();
    // Two chunks, and zeros behind them.
    let two = 2usize << 16;
    let half_zeros = [&wide[..4 * two], &vec![0; 4 * (n - two)]].concat();
    let size = |dtype: DType, data: &[u8]| {
        let n = (data.len() / dtype.size()) as u64;
        let t = Owned::new("w", dtype, &[n], data.to_vec());
        save(&[t], WriteOptions::default()).len()
    };
    let least = size(DType::BFloat16, &bf16);
    let near =
        |found: usize, of: usize| assert!(1000 * found <= 1005 * of + 2_000_000, "{found} {of}");
    near(size(DType::Float32, &wide), least);
    near(size(DType::Float64, &double), least + least / 50);
    // Three more bits of each mantissa, which here are zeros.
    near(size(DType::Float32, &fp16_in_fp32), least + least / 50);
    near(size(DType::Float32, &half_zeros), size(DType::Float32, &wide[..4 * two]));
    for constant in [[0u8; 4], 1f32.to_le_bytes(), [1, 2, 3, 4]] {
        assert!(size(DType::Float32, &constant.repeat(n)) < 1500);
    }
}

/// A tensor, and what becomes of it a step later, by both presets: alone, and as a difference.
fn compare(before: &Owned, after: &Owned) {
    let of = |preset| WriteOptions { preset, ..WriteOptions::default() };
    let (one, other) = (std::slice::from_ref(before), std::slice::from_ref(after));
    let (fast, balanced) = (save(one, of(Preset::Fast)), save(one, of(Preset::Balanced)));
    let about = || format!("{} {} {:?}", before.name, before.dtype, before.shape);
    let sizes = (balanced.len(), fast.len());
    assert!(sizes.0 <= sizes.1 + LONGER_NAME, "{}: {sizes:?}", about());
    let base = Arc::new(open(fast).unwrap());
    let against = |preset| {
        let parent = Some(Arc::clone(&base) as Arc<dyn Parent>);
        save(other, WriteOptions { parent, ..of(preset) }).len()
    };
    let sizes = (against(Preset::Balanced), against(Preset::Fast));
    assert!(sizes.0 <= sizes.1 + LONGER_NAME + 24, "a difference of {}: {sizes:?}", about());
}

/// Members of plans that `fast` never writes, such as `contexts`, take bytes of the manifest: 24 at most, above.
#[test]
fn nothing_of_the_corpus_is_larger_than_by_preset_fast() {
    for run in ["gpt34m_bf16", "gpt98m_fp32"] {
        let (before, after) = (slices(&format!("{run}_s0")), slices(&format!("{run}_s1")));
        for (before, after) in before.iter().zip(&after) {
            let width = before.dtype.value_width();
            for values in
                [4096usize, 4500, 5000, 6016, 8192, 12_032, 16_384, 16_448, 24_000, 65_536]
            {
                if before.data.len() < values * width {
                    continue;
                }
                let cols = if values % 64 == 0 { 64 } else { 1 };
                let shape = [(values / cols) as u64, cols as u64];
                let part = |t: &Owned| {
                    Owned::new(&t.name, t.dtype, &shape, t.data[..values * width].to_vec())
                };
                compare(&part(before), &part(after));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn nothing_is_larger_than_by_preset_fast(
        rows in 64..300u64,
        cols in 64..200u64,
        dtype in prop::sample::select(vec![
            DType::Float32, DType::BFloat16, DType::Float16, DType::Float64, DType::Int32,
        ]),
        pattern in 0..64usize,
        other in 0..64usize,
    ) {
        let n = (rows * cols) as usize;
        let all: Vec<_> = adversarial(dtype, n).collect();
        let (name, data) = &all[pattern % all.len()];
        // The next step: a few bits of all values, or values of another kind.
        let mut later = data.clone();
        match other % 3 {
            0 => later.iter_mut().step_by(dtype.value_width()).enumerate().for_each(|(i, b)| {
                *b ^= (noise(i as u64) % 8) as u8;
            }),
            1 => later.iter_mut().step_by(1009).for_each(|b| *b ^= 3),
            _ => later.clone_from(&all[other % all.len()].1),
        }
        let before = Owned::new(*name, dtype, &[rows, cols], data.clone());
        compare(&before, &Owned::new(*name, dtype, &[rows, cols], later));
    }
}
