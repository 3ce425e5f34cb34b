//! Predicted tensors: from rows and columns, from wider copies, and from a parent by ordered difference.

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{Memory, Owned, bell};
use proptest::prelude::*;
use s4weights::format::manifest::RoleKind::{ExpAvg, ExpAvgSq, Master, Weight};
use s4weights::format::manifest::{Role, RoleKind, Roles};
use s4weights::{
    Contents, DType, MemoryParent, Preset, ReadOptions, Reader, Simd, Slice, Source, Target,
    WriteOptions, Writer, adversarial,
};

fn to_bf16(x: f32) -> u16 {
    let x = x.to_bits();
    ((x + 0x7fff + (x >> 16 & 1)) >> 16) as u16
}

const ROWS: u64 = 700;
const COLS: u64 = 500;

fn floats(name: &str, dtype: DType, of: impl Fn(u64) -> f32) -> Owned {
    let values = (0..ROWS * COLS).map(of);
    let data = match dtype {
        DType::BFloat16 => values.flat_map(|x| to_bf16(x).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    };
    Owned::new(name, dtype, &[ROWS, COLS], data)
}

fn weight(step: u64) -> impl Fn(u64) -> f32 {
    move |i| 0.05 * bell(i) + 1e-4 * step as f32 * bell(i ^ 0x5555_0000)
}

fn second(i: u64) -> f32 {
    let (row, col) = (bell((i / COLS) ^ 0xabc_0000), bell((i % COLS) ^ 0xdef_0000));
    (3.0 * row + 2.0 * col + bell(i ^ 0x7777_0000)).exp() * 1e-9
}

/// fp32 weights, their rounded copies and both moments of an optimizer.
fn state(step: u64) -> Vec<Owned> {
    vec![
        floats("model.w", DType::BFloat16, weight(step)),
        floats("master.w", DType::Float32, weight(step)),
        floats("m.w", DType::Float32, |i| bell(i ^ 0x3333) * second(i).sqrt()),
        floats("v.w", DType::Float32, second),
    ]
}

fn roles(kinds: &[(u32, RoleKind)]) -> Roles {
    let row = |&(tensor, kind)| Role { tensor, parameter: 0, kind, group: 0 };
    Roles { tensors: kinds.iter().map(row).collect(), groups: vec![BTreeMap::new()] }
}

fn all_roles() -> Roles {
    roles(&[(0, Weight), (1, Master), (2, ExpAvg), (3, ExpAvgSq)])
}

fn save(tensors: &[Owned], roles: Roles, options: WriteOptions) -> Vec<u8> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options).unwrap();
    writer.declare(roles).unwrap();
    writer.write(&tensors.iter().map(Owned::source).collect::<Vec<_>>()).unwrap();
    writer.finish(Contents::default()).unwrap();
    std::mem::take(&mut *memory.0.lock().unwrap())
}

/// Second moments after this many steps: rows and columns stay, and so does part of each value's
/// own deviation.
fn second_later(steps: u64) -> impl Fn(u64) -> f32 {
    move |i| {
        let own = |step: u64| bell(i ^ 0x7777_0000 ^ step << 20);
        let noise = (1..=steps).fold(own(0), |before, step| 0.6 * before + 0.8 * own(step));
        let (row, col) = (bell((i / COLS) ^ 0xabc_0000), bell((i % COLS) ^ 0xdef_0000));
        (3.0 * row + 2.0 * col + noise).exp() * 1e-9
    }
}

#[test]
fn second_moments_some_steps_later_take_a_share_of_their_parents() {
    for dtype in [DType::Float32, DType::BFloat16] {
        let steps = (0..4).map(|step| vec![floats("v.w", dtype, second_later(step))]);
        let roles = || roles(&[(0, ExpAvgSq)]);
        let mut before: Option<(Arc<Reader>, Owned)> = None;
        for tensors in steps {
            let alone = save(&tensors, roles(), preset(Preset::Balanced));
            let Some((parent, values)) = before else {
                before = Some((Arc::new(open(alone)), tensors[0].clone()));
                continue;
            };
            let options = || WriteOptions {
                parent: Some(Arc::clone(&parent) as _),
                ..preset(Preset::Balanced)
            };
            let file = save(&tensors, roles(), options());
            let reader = open(file.clone());
            reader.set_parent(Arc::clone(&parent)).unwrap();
            assert!(plans(&reader)[0].starts_with("blend magnitude"), "{:?}", plans(&reader));
            let all = if dtype == DType::Float32 { 994 } else { 980 };
            assert!(file.len() * 1000 < alone.len() * all, "{} of {}", file.len(), alone.len());
            check(&reader, &tensors);
            for rows in [0..1, 261..264, 699..700] {
                let part = reader.read_slice("v.w", &Slice(vec![rows.clone(), 3..COLS])).unwrap();
                let width = tensors[0].data.len() / (ROWS * COLS) as usize;
                let bytes = |row: u64| {
                    let first = (row * COLS) as usize;
                    &tensors[0].data[(first + 3) * width..(first + COLS as usize) * width]
                };
                let expected: Vec<u8> = rows.flat_map(|row| bytes(row).to_vec()).collect();
                assert!(part == expected);
            }
            // The same bytes for any number of threads and any instructions, and with a parent in memory.
            for simd in Simd::available() {
                let options = WriteOptions { threads: Some(3), simd: Some(simd), ..options() };
                assert!(save(&tensors, roles(), options) == file, "{simd}");
            }
            let mut memory = MemoryParent::new(Arc::new(parent.snapshot().unwrap()), 0);
            memory.hold("v.w", values.data.into()).unwrap();
            let options = WriteOptions { parent: Some(Arc::new(memory)), ..options() };
            assert!(save(&tensors, roles(), options) == file);
            before = Some((Arc::new(reader), tensors[0].clone()));
        }
    }
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

/// Options of a preset.
fn preset(preset: Preset) -> WriteOptions {
    WriteOptions { preset, ..WriteOptions::default() }
}

#[test]
fn a_state_in_mixed_precision_is_stored_as_its_optimizer_and_little_more() {
    let tensors = state(0);
    let fast = save(&tensors, all_roles(), preset(Preset::Fast));
    let small = save(&tensors, all_roles(), preset(Preset::Balanced));
    let reader = open(small.clone());
    let plans = plans(&reader);
    assert_eq!(plans[0], "cast xor fields");
    assert!(plans[1].starts_with("none"), "{plans:?}");
    assert!(plans[2].starts_with("rank1 magnitude"), "{plans:?}");
    assert_eq!(plans[3], "rank1 magnitude fields-sign");
    assert!(small.len() * 100 < fast.len() * 88, "{} of {}", small.len(), fast.len());
    check(&reader, &tensors);
    // Copies without a role are found by their shape, and only those.
    let untold = save(&tensors, Roles::default(), preset(Preset::Balanced));
    assert!(untold.len() < small.len() + 4096, "{} of {}", untold.len(), small.len());
    // The same bytes for any number of threads and any instructions.
    for threads in [1, 2, 5] {
        for simd in Simd::available() {
            let options = WriteOptions {
                threads: Some(threads),
                simd: Some(simd),
                ..preset(Preset::Balanced)
            };
            assert!(save(&tensors, all_roles(), options) == small, "{threads} {simd}");
        }
    }
}

#[test]
fn a_part_of_a_rounded_copy_is_read_without_the_rest() {
    let tensors = state(0);
    let reader = open(save(&tensors, all_roles(), preset(Preset::Balanced)));
    for rows in [0..1, 261..264, 300..301, 699..700, 0..700] {
        let part = reader.read_slice("model.w", &Slice(vec![rows.clone(), 0..COLS])).unwrap();
        let bytes = |row: u64| (2 * row * COLS) as usize;
        assert!(part == tensors[0].data[bytes(rows.start)..bytes(rows.end)], "{rows:?}");
    }
}

#[test]
fn values_that_are_no_copies_and_wrong_roles_cost_size_alone() {
    let mut tensors = state(0);
    // One value in 70 differs, where the planner does not look, and so does a whole stretch.
    for (i, x) in tensors[0].data.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        if i % 70 == 3 || (200_000..203_000).contains(&i) {
            x[0] ^= 5;
        }
    }
    let file = save(&tensors, all_roles(), preset(Preset::Balanced));
    check(&open(file), &tensors);
    for wrong in [
        roles(&[(0, Master), (1, Weight), (2, ExpAvgSq), (3, ExpAvg)]),
        roles(&[(0, ExpAvgSq), (1, ExpAvgSq), (2, Master), (3, Master)]),
        roles(&[(0, Weight), (2, Master), (77, Master), (3, Weight)]),
    ] {
        let file = save(&state(0), wrong, preset(Preset::Balanced));
        check(&open(file), &state(0));
    }
}

#[test]
fn weights_a_step_later_are_differences_in_the_order_of_values_with_contexts() {
    let (before, after) = (state(0), state(3));
    let base = Arc::new(open(save(&before, all_roles(), preset(Preset::Balanced))));
    let against =
        |preset| WriteOptions { parent: Some(Arc::clone(&base) as _), ..self::preset(preset) };
    let fast = save(&after, all_roles(), against(Preset::Fast));
    let balanced = save(&after, all_roles(), against(Preset::Balanced));
    let reader = open(balanced.clone());
    reader.set_parent(Arc::clone(&base)).unwrap();
    assert!(plans(&reader)[1].starts_with("parent sub"), "{:?}", plans(&reader));
    assert!(balanced.len() < fast.len(), "{} of {}", balanced.len(), fast.len());
    check(&reader, &after);
    for threads in [1, 3] {
        for simd in Simd::available() {
            let options = WriteOptions {
                threads: Some(threads),
                simd: Some(simd),
                ..against(Preset::Balanced)
            };
            assert!(save(&after, all_roles(), options) == balanced, "{threads} {simd}");
        }
    }
}

#[test]
fn rounded_copies_are_applied_once_what_they_copy_is_there() {
    let (before, after) = (state(0), state(3));
    let base = Arc::new(open(save(&before, all_roles(), preset(Preset::Balanced))));
    let options = WriteOptions { parent: Some(base as _), ..preset(Preset::Balanced) };
    // The reader has no parent.
    let reader = open(save(&after, all_roles(), options));
    let plans = plans(&reader);
    assert!(plans[0].starts_with("cast") && plans[1].starts_with("parent"), "{plans:?}");
    let mut values = before;
    let mut requests: Vec<_> = (values.iter_mut())
        .map(|t| (reader.find(&t.name).unwrap(), t.data.as_mut_slice()))
        .collect();
    reader.apply_into(&mut requests).unwrap();
    for (t, now) in after.iter().zip(&values) {
        assert!(t.data == now.data, "{}", t.name);
    }
}

#[test]
fn matrices_of_adversarial_values_round_trip_with_every_preset_and_role() {
    for dtype in [DType::Float32, DType::BFloat16, DType::Float16, DType::Float64] {
        let n = 150 * 100;
        let all: Vec<_> = adversarial(dtype, n).collect();
        let tensors: Vec<_> = all
            .iter()
            .map(|(name, data)| Owned::new(*name, dtype, &[150, 100], data.clone()))
            .collect();
        let kinds = [Weight, ExpAvg, ExpAvgSq];
        let list: Vec<_> =
            (0u32..).zip(&tensors).map(|(i, _)| (i, kinds[i as usize % 3])).collect();
        let file = save(&tensors, roles(&list), preset(Preset::Balanced));
        let base = Arc::new(open(file));
        check(&base, &tensors);
        // Each pattern as a delta of another one.
        let mut others = tensors.clone();
        let data: Vec<_> = tensors.iter().map(|t| t.data.clone()).collect();
        let shifted = data.iter().skip(1).chain(&data[..1]);
        others.iter_mut().zip(shifted).for_each(|(t, data)| t.data.clone_from(data));
        let options =
            WriteOptions { parent: Some(Arc::clone(&base) as _), ..preset(Preset::Balanced) };
        let reader = open(save(&others, roles(&list), options));
        if reader.parent_digest().is_some() {
            reader.set_parent(base).unwrap();
        }
        check(&reader, &others);
    }
}

/// Where chunks differ, tables of their own save what row and column offsets seem to save.
#[test]
fn matrices_of_parts_of_different_scales_are_no_larger_than_fast_makes_them() {
    let matrix = |rows: u64, cols: u64, of: &dyn Fn(u64) -> f32| {
        let data = (0..rows * cols).flat_map(|i| to_bf16(of(i)).to_le_bytes()).collect();
        Owned::new("w", DType::BFloat16, &[rows, cols], data)
    };
    let fused = |rows: u64| {
        let scale = move |i: u64| if i / 512 < 2 * rows / 3 { 0.02 } else { 0.005 };
        matrix(rows, 512, &move |i| scale(i) * bell(i))
    };
    let counted = |rows: u64| matrix(rows, 512, &|i| i as f32);
    let tensors =
        [fused(600), fused(1536), fused(4500), counted(600), counted(1536), counted(4500)];
    for (i, tensor) in tensors.into_iter().enumerate() {
        let [balanced, fast] = [Preset::Balanced, Preset::Fast]
            .map(|p| save(std::slice::from_ref(&tensor), roles(&[]), preset(p)).len());
        assert!(balanced <= fast + fast / 500, "{i}: {balanced} {fast}");
    }
}

/// Found by the test below: estimates for a pack, which is small, are inaccurate.
#[test]
fn a_pack_is_never_larger_than_fast_makes_it() {
    let of = |j: u64| if j.is_multiple_of(3) { 0.0 } else { second(j) };
    let tensors: Vec<_> = [(22, 80, false), (16, 110, false), (16, 60, true), (18, 64, false)]
        .into_iter()
        .enumerate()
        .map(|(i, (rows, cols, narrow))| {
            let values = (0..rows * cols).map(of);
            let (dtype, data): (_, Vec<u8>) = match narrow {
                true => (DType::BFloat16, values.flat_map(|x| to_bf16(x).to_le_bytes()).collect()),
                false => (DType::Float32, values.flat_map(f32::to_le_bytes).collect()),
            };
            Owned::new(format!("t{i}"), dtype, &[rows, cols], data)
        })
        .collect();
    let weights: Vec<_> = (0..4).map(|i| (i, Weight)).collect();
    let [balanced, fast] =
        [Preset::Balanced, Preset::Fast].map(|p| save(&tensors, roles(&weights), preset(p)).len());
    assert!(balanced <= fast + 4, "{balanced} {fast}");
}

/// What suits values of both signs is not tried for as many that are positive.
#[test]
fn packs_of_one_size_are_planned_separately() {
    let tensor = |name: &str, of: &dyn Fn(u64) -> f32| {
        let data = (0..3000).flat_map(|i| to_bf16(of(i)).to_le_bytes()).collect();
        Owned::new(name, DType::BFloat16, &[3000], data)
    };
    for scale in [0.5, 1.0, 1.5, 2.0] {
        let signed = tensor("a", &|i| bell(i) * (scale * bell(i ^ 0x1234_0000)).exp());
        let positive = tensor("b", &|i| (scale * bell(i ^ 0x4321_0000)).exp() * 1e-6);
        let len = |tensors: &[Owned]| save(tensors, roles(&[]), preset(Preset::Balanced)).len();
        let (one, other) = (len(&[signed.clone(), positive.clone()]), len(&[positive, signed]));
        assert_eq!(one, other, "{scale}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_mix_of_tensors_comes_back(
        shapes in prop::collection::vec((16..90u64, 60..300u64), 1..6),
        kinds in prop::collection::vec(0..4u8, 6),
        narrow in prop::collection::vec(any::<bool>(), 6),
        noise in 0..3u8,
    ) {
        let kind = |k: u8| [
            Weight, Master, ExpAvg, ExpAvgSq,
        ][usize::from(k)];
        let mut tensors = vec![];
        for (i, (rows, cols)) in shapes.iter().enumerate() {
            let of = |j: u64| match noise {
                0 => second(j + i as u64),
                1 => weight(0)(j),
                _ => if j.is_multiple_of(3) { 0.0 } else { second(j) },
            };
            let dtype = if narrow[i] { DType::BFloat16 } else { DType::Float32 };
            let values = (0..rows * cols).map(of);
            let data: Vec<u8> = match narrow[i] {
                true => values.flat_map(|x| to_bf16(x).to_le_bytes()).collect(),
                false => values.flat_map(f32::to_le_bytes).collect(),
            };
            tensors.push(Owned::new(format!("t{i}"), dtype, &[*rows, *cols], data));
        }
        let list: Vec<_> = (0u32..).zip(&kinds).map(|(i, k)| (i, kind(*k))).collect();
        let file = save(&tensors, roles(&list), preset(Preset::Balanced));
        let fast = save(&tensors, roles(&list), preset(Preset::Fast));
        // The manifest names the preset, and `balanced` is four letters longer than `fast`.
        prop_assert!(file.len() <= fast.len() + 4, "{} {}", file.len(), fast.len());
        check(&open(file), &tensors);
    }
}
