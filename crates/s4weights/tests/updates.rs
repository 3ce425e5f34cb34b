//! Weights that are predicted from the moments of their optimizer (predictor `step`), or whose residuals are coded with
//! them (contexts `update`).

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{Memory, Owned, bell};
use s4weights::format::file::Footer;
use s4weights::format::limits::MAX_UPDATES;
use s4weights::format::manifest::RoleKind::{self, ExpAvg, ExpAvgSq, Master, Weight};
use s4weights::format::manifest::{Role, Roles};
use s4weights::format::{Digest, Error as FormatError};
use s4weights::{
    Contents, DType, Error, Preset, ReadOptions, Reader, Simd, Slice, Source, Target, WriteOptions,
    Writer, adversarial,
};

const ROWS: u64 = 300;
const COLS: u64 = 500;
const F32: DType = DType::Float32;
const BF16: DType = DType::BFloat16;
const F16: DType = DType::Float16;

fn bytes(dtype: DType, values: impl Iterator<Item = f32>) -> Vec<u8> {
    let wide: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let kernels = s4_planes::Kernels::default();
    let mut narrow = vec![0; wide.len() / 2];
    match dtype {
        DType::BFloat16 => kernels.to_bf16(&wide, &mut narrow),
        DType::Float16 => kernels.to_fp16(&wide, &mut narrow),
        _ => return wide,
    }
    narrow
}

fn first(step: u64, i: u64) -> f32 {
    1e-2 * bell(i ^ (step << 40)) * bell((i / COLS) ^ 0xabc_0000).exp()
}

fn second(step: u64, i: u64) -> f32 {
    let old = 1e-4 * (2.0 * bell((i / COLS) ^ 0xabc_0000) + bell(i ^ 0x7777_0000)).exp();
    old * (1.0 + 0.02 * step as f32 * bell(i ^ (step << 44)))
}

/// What the moments tell of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Told {
    /// Size and sign.
    Roughly,
    /// Everything.
    Exactly,
}

use Told::{Exactly, Roughly};

/// A weight and its moments, of these dtypes, after some steps like those of AdamW.
fn state([weight, m, v]: [DType; 3], steps: u64, told: Told) -> Vec<Owned> {
    let value = |i: u64| {
        let more = |step: u64| match told {
            Roughly => (0.7 * bell(i ^ (step << 48))).exp(),
            Exactly => 1.0,
        };
        let update = |step: u64| more(step) * 3e-4 * first(step, i) / second(step, i).sqrt();
        0.05 * bell(i) - (1..=steps).map(update).sum::<f32>()
    };
    let tensor = |name: &str, dtype, of: &dyn Fn(u64) -> f32| {
        Owned::new(name, dtype, &[ROWS, COLS], bytes(dtype, (0..ROWS * COLS).map(of)))
    };
    vec![
        tensor("w", weight, &value),
        tensor("w.m", m, &|i| first(steps, i)),
        tensor("w.v", v, &|i| second(steps, i)),
    ]
}

fn roles(kinds: &[(u32, RoleKind)]) -> Roles {
    let row = |&(tensor, kind)| Role { tensor, parameter: 0, kind, group: 0 };
    Roles { tensors: kinds.iter().map(row).collect(), groups: vec![BTreeMap::new()] }
}

fn all_roles() -> Roles {
    roles(&[(0, Weight), (1, ExpAvg), (2, ExpAvgSq)])
}

fn options(parent: Option<&Arc<Reader>>) -> WriteOptions {
    let parent = parent.map(|p| Arc::clone(p) as _);
    WriteOptions { preset: Preset::Small, parent, ..WriteOptions::default() }
}

fn save(tensors: &[Owned], roles: Roles, options: WriteOptions) -> Vec<u8> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options).unwrap();
    writer.declare(roles).unwrap();
    writer.write(&tensors.iter().map(Owned::source).collect::<Vec<_>>()).unwrap();
    writer.finish(Contents::default()).unwrap();
    std::mem::take(&mut *memory.0.lock().unwrap())
}

fn open(file: Vec<u8>, parent: Option<&Arc<Reader>>) -> Arc<Reader> {
    let reader = Reader::open(Source::Bytes(file.into()), ReadOptions::default()).unwrap();
    if let Some(parent) = parent.filter(|_| reader.parent_digest().is_some()) {
        reader.set_parent(Arc::clone(parent)).unwrap();
    }
    Arc::new(reader)
}

fn plan(reader: &Reader, name: &str) -> String {
    let tensors = reader.inspect(false).unwrap().tensors;
    tensors.into_iter().find(|t| t.name == name).unwrap().plan
}

/// Whether a weight's plan uses its moments.
fn is_told(reader: &Reader, name: &str, told: Told) -> bool {
    let plan = plan(reader, name);
    plan.starts_with(if told == Exactly { "step sub" } else { "parent descent bytes" })
}

/// Reads every tensor separately, all together, and a part, and verifies the file.
fn check(reader: &Reader, tensors: &[Owned]) {
    for t in tensors {
        assert!(reader.read(&t.name).unwrap() == t.data, "{}", t.name);
    }
    let mut values: Vec<_> = tensors.iter().map(|t| vec![7; t.data.len()]).collect();
    let mut requests: Vec<_> = tensors
        .iter()
        .zip(&mut values)
        .map(|(t, to)| (reader.find(&t.name).unwrap(), to.as_mut_slice()))
        .collect();
    reader.read_into(&mut requests).unwrap();
    assert!(tensors.iter().zip(&values).all(|(t, v)| t.data == *v));
    if let [t, ..] = tensors
        && let [rows, cols] = t.shape[..]
    {
        let rows = rows / 3..rows / 3 + 2;
        let part = reader.read_slice(&t.name, &Slice(vec![rows.clone(), 0..cols])).unwrap();
        let byte = |row: u64| row as usize * cols as usize * t.dtype.size();
        assert!(part == t.data[byte(rows.start)..byte(rows.end)]);
    }
    reader.verify().unwrap();
}

#[test]
fn a_step_is_told_by_moments_of_any_dtypes_that_are_worth_reading() {
    [Roughly, Exactly].into_iter().for_each(any_dtypes);
}

fn any_dtypes(how: Told) {
    for (dtypes, told) in [
        ([F32, F32, F32], true),
        ([F32, BF16, BF16], true),
        ([F32, BF16, F32], true),
        ([BF16, BF16, BF16], true),
        ([BF16, F32, BF16], true),
        ([F16, F16, F32], true),
        // With its moments, a weight takes five times its own bytes to read.
        ([BF16, F32, F32], false),
        ([F16, F32, F32], false),
    ] {
        let (before, after) = (state(dtypes, 0, how), state(dtypes, 1, how));
        let base = open(save(&before, all_roles(), options(None)), None);
        let file = save(&after, all_roles(), options(Some(&base)));
        let reader = open(file.clone(), Some(&base));
        assert_eq!(is_told(&reader, "w", how), told, "{dtypes:?}: {}", plan(&reader, "w"));
        check(&reader, &after);
        let without_moments = save(&after, Roles::default(), options(Some(&base)));
        assert!(!is_told(&open(without_moments.clone(), Some(&base)), "w", how));
        if told {
            let weight = after[0].data.len() / 20;
            assert!(file.len() + weight < without_moments.len(), "{dtypes:?}");
        }
        for threads in [1, 3] {
            for simd in Simd::available() {
                let options = WriteOptions {
                    threads: Some(threads),
                    simd: Some(simd),
                    ..options(Some(&base))
                };
                assert!(save(&after, all_roles(), options) == file, "{threads} {simd}");
            }
        }
    }
}

/// A weight and its momentum, of these dtypes, after some steps of SGD.
fn sgd([weight, momentum]: [DType; 2], steps: u64) -> Vec<Owned> {
    let value = |i: u64| 0.05 * bell(i) - (1..=steps).map(|s| 0.03 * first(s, i)).sum::<f32>();
    let tensor = |name: &str, dtype, of: &dyn Fn(u64) -> f32| {
        Owned::new(name, dtype, &[ROWS, COLS], bytes(dtype, (0..ROWS * COLS).map(of)))
    };
    vec![tensor("w", weight, &value), tensor("w.m", momentum, &|i| first(steps, i))]
}

fn sgd_roles() -> Roles {
    roles(&[(0, Weight), (1, ExpAvg)])
}

#[test]
fn a_step_of_sgd_is_told_by_its_momentum() {
    for dtypes in [[F32, F32], [F32, BF16], [BF16, F32], [BF16, BF16], [F16, F16], [F16, F32]] {
        let (before, after) = (sgd(dtypes, 0), sgd(dtypes, 1));
        let base = open(save(&before, sgd_roles(), options(None)), None);
        let file = save(&after, sgd_roles(), options(Some(&base)));
        let reader = open(file.clone(), Some(&base));
        assert!(is_told(&reader, "w", Exactly), "{dtypes:?}: {}", plan(&reader, "w"));
        check(&reader, &after);
        let without_momentum = save(&after, Roles::default(), options(Some(&base)));
        let weight = after[0].data.len() / 10;
        assert!(file.len() + weight < without_momentum.len(), "{dtypes:?}");
        for simd in Simd::available() {
            let options = WriteOptions { simd: Some(simd), ..options(Some(&base)) };
            assert!(save(&after, sgd_roles(), options) == file, "{simd}");
        }
        // One moment more than the side data says, and one less.
        let twice = with_manifest(&file, |m| {
            m.replace(r#",{"tensor":1}]"#, r#",{"tensor":1},{"tensor":1}]"#)
        });
        assert!(matches!(refusal(twice, &base), FormatError::Corrupt { .. }));
    }
    let (before, after) = (state([F32; 3], 0, Exactly), state([F32; 3], 1, Exactly));
    let base = open(save(&before, all_roles(), options(None)), None);
    let file = save(&after, all_roles(), options(Some(&base)));
    let one = with_manifest(&file, |m| m.replace(r#",{"tensor":2}]"#, "]"));
    assert!(matches!(refusal(one, &base), FormatError::Corrupt { .. }));
}

#[test]
fn a_chain_is_read_from_its_base_and_applied_step_by_step() {
    for how in [Roughly, Exactly] {
        chain(how, all_roles(), |step| state([BF16; 3], step, how));
    }
    chain(Exactly, sgd_roles(), |step| sgd([F32; 2], step));
}

fn chain(how: Told, roles: Roles, state: impl Fn(u64) -> Vec<Owned>) {
    let states: Vec<_> = (0..5).map(state).collect();
    let mut chain = vec![open(save(&states[0], roles.clone(), options(None)), None)];
    for state in &states[1..] {
        let parent = chain.last().cloned();
        let reader = open(save(state, roles.clone(), options(parent.as_ref())), parent.as_ref());
        assert!(is_told(&reader, "w", how), "{}", plan(&reader, "w"));
        check(&reader, state);
        chain.push(reader);
    }
    // All tensors; no parent can be opened.
    let mut values = states[0].clone();
    for (reader, state) in chain.iter().zip(&states).skip(1) {
        let numbers = state.iter().map(|t| reader.find(&t.name).unwrap());
        let mut requests: Vec<_> =
            numbers.zip(&mut values).map(|(n, t)| (n, t.data.as_mut_slice())).collect();
        reader.apply_into(&mut requests).unwrap();
        assert!(values.iter().zip(state).all(|(a, b)| a.data == b.data));
    }
    // The weight alone.
    let mut weight = states[0][0].data.clone();
    for (reader, state) in chain.iter().zip(&states).skip(1) {
        reader.apply_into(&mut [(reader.find("w").unwrap(), &mut weight)]).unwrap();
        assert!(weight == state[0].data);
    }
}

#[test]
fn chains_as_long_as_readers_allow_are_not_told_beyond() {
    [Roughly, Exactly].into_iter().for_each(long_chain);
}

fn long_chain(how: Told) {
    let dtypes = [F32, BF16, BF16];
    let mut parent = open(save(&state(dtypes, 0, how), all_roles(), options(None)), None);
    for depth in 2..=MAX_UPDATES + 2 {
        // Every other step goes back, so both the size and the sign of the change are predictable.
        let mut state = state(dtypes, 1, how);
        state[0] = self::state(dtypes, u64::from((depth + 1) % 2), how).remove(0);
        let options = WriteOptions { max_chain: Some(64), ..options(Some(&parent)) };
        let reader = open(save(&state, all_roles(), options), Some(&parent));
        assert_eq!(
            is_told(&reader, "w", how),
            depth <= MAX_UPDATES,
            "{depth}: {}",
            plan(&reader, "w")
        );
        if depth >= MAX_UPDATES {
            assert!(reader.read("w").unwrap() == state[0].data);
        }
        parent = reader;
    }
}

#[test]
fn wrong_and_missing_roles_cost_size_alone() {
    [Roughly, Exactly].into_iter().for_each(wrong_roles);
}

fn wrong_roles(how: Told) {
    let dtypes = [F32, F32, F32];
    let (before, after) = (state(dtypes, 0, how), state(dtypes, 1, how));
    for before_roles in [all_roles(), roles(&[(0, ExpAvg), (1, Weight), (2, ExpAvgSq)])] {
        let base = open(save(&before, before_roles, options(None)), None);
        for wrong in [
            roles(&[(0, Weight), (1, ExpAvgSq), (2, ExpAvg)]),
            roles(&[(0, ExpAvg), (1, Weight), (2, ExpAvgSq)]),
            roles(&[(0, ExpAvgSq), (1, ExpAvg), (2, Master)]),
            roles(&[(0, Weight), (1, ExpAvg)]),
            roles(&[(0, Weight), (1, ExpAvg), (1, ExpAvgSq), (9, ExpAvgSq)]),
            roles(&[(0, Weight), (0, ExpAvg), (0, ExpAvgSq)]),
        ] {
            let reader = open(save(&after, wrong.clone(), options(Some(&base))), Some(&base));
            check(&reader, &after);
            // A weight that was coded with moments may now be a moment, and the other way round.
            let next = open(save(&before, all_roles(), options(Some(&reader))), Some(&reader));
            check(&next, &before);
            let swapped = open(save(&after, wrong, options(Some(&next))), Some(&next));
            check(&swapped, &after);
        }
    }
}

#[test]
fn moments_of_other_sizes_or_stored_elsewhere_tell_nothing() {
    [Roughly, Exactly].into_iter().for_each(other_moments);
}

fn other_moments(how: Told) {
    let dtypes = [F32, F32, F32];
    let (before, mut after) = (state(dtypes, 0, how), state(dtypes, 1, how));
    let base = open(save(&before, all_roles(), options(None)), None);
    // Moments in a separate call.
    let memory = Memory::default();
    let target = Target::Stream(Box::new(memory.clone()));
    let mut writer = Writer::create(target, options(Some(&base))).unwrap();
    writer.declare(roles(&[(0, ExpAvg), (1, ExpAvgSq), (2, Weight)])).unwrap();
    writer.write(&[after[1].source(), after[2].source()]).unwrap();
    writer.write(&[after[0].source()]).unwrap();
    writer.finish(Contents::default()).unwrap();
    let file = std::mem::take(&mut *memory.0.lock().unwrap());
    let reader = open(file, Some(&base));
    assert!(!is_told(&reader, "w", how));
    check(&reader, &after);
    // A moment with one row less.
    after[2].data.truncate((4 * (ROWS - 1) * COLS) as usize);
    after[2].shape[0] -= 1;
    let reader = open(save(&after, all_roles(), options(Some(&base))), Some(&base));
    assert!(!is_told(&reader, "w", how));
    check(&reader, &after);
}

#[test]
fn rounded_copies_of_weights_that_moments_tell_are_read_in_their_order() {
    [Roughly, Exactly].into_iter().for_each(rounded_copies);
}

fn rounded_copies(how: Told) {
    let states = [0, 1, 2].map(|step| {
        let mut all = state([F32, F32, F32], step, how);
        let values = all[0].data.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x));
        let model = Owned::new("model.w", BF16, &[ROWS, COLS], bytes(BF16, values));
        all.insert(0, model);
        all
    });
    let roles = || roles(&[(0, Weight), (1, Master), (2, ExpAvg), (3, ExpAvgSq)]);
    let base = open(save(&states[0], roles(), options(None)), None);
    let first = open(save(&states[1], roles(), options(Some(&base))), Some(&base));
    let second = open(save(&states[2], roles(), options(Some(&first))), Some(&first));
    for (reader, state) in [(&first, &states[1]), (&second, &states[2])] {
        assert!(is_told(reader, "w", how) && plan(reader, "model.w").starts_with("cast"));
        check(reader, state);
    }
    let mut values = states[0].clone();
    let numbers = values.iter().map(|t| first.find(&t.name).unwrap()).collect::<Vec<_>>();
    let targets = values.iter_mut().map(|t| t.data.as_mut_slice());
    first.apply_into(&mut numbers.into_iter().zip(targets).collect::<Vec<_>>()).unwrap();
    assert!(values.iter().zip(&states[1]).all(|(a, b)| a.data == b.data));
}

#[test]
fn adversarial_weights_and_moments_come_back() {
    for dtype in [F32, BF16, F16] {
        let n = 150 * 120;
        let all: Vec<_> = adversarial(dtype, n).map(|(_, data)| data).collect();
        for i in 0..all.len() {
            let at = |k: usize| &all[(i + k) % all.len()];
            let tensors = |weight: &Vec<u8>| -> Vec<Owned> {
                let named = [("w", weight), ("w.m", at(3)), ("w.v", at(5))];
                let owned = |(name, data): (&str, &Vec<u8>)| {
                    Owned::new(name, dtype, &[150, 120], data.clone())
                };
                named.map(owned).into()
            };
            let base = open(save(&tensors(at(0)), all_roles(), options(None)), None);
            let after = tensors(at(1));
            let reader = open(save(&after, all_roles(), options(Some(&base))), Some(&base));
            check(&reader, &after);
        }
    }
}

/// The file with a changed text of its manifest, and matching checksums.
fn with_manifest(file: &[u8], change: impl Fn(String) -> String) -> Vec<u8> {
    let Footer { offset, len, .. } = Footer::parse(file, file.len() as u64).unwrap();
    let (start, end) = (offset as usize, (offset + len) as usize);
    let before = String::from_utf8(file[start..end].to_vec()).unwrap();
    let manifest = change(before.clone());
    assert!(manifest != before, "nothing was changed in {manifest}");
    let (len, digest) = (manifest.len() as u64, Digest::of(manifest.as_bytes()));
    let footer = Footer { offset, len, digest };
    [&file[..start], manifest.as_bytes(), &footer.to_bytes()].concat()
}

/// The error that reading everything ends with.
fn refusal(file: Vec<u8>, parent: &Arc<Reader>) -> FormatError {
    let read = || {
        let reader = Reader::open(Source::Bytes(file.into()), ReadOptions::default())?;
        reader.set_parent(Arc::clone(parent))?;
        reader.read("w")?;
        reader.verify()
    };
    match read() {
        Err(Error::Format { source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn moments_that_are_none_are_refused() {
    [Roughly, Exactly].into_iter().for_each(no_moments);
}

fn no_moments(how: Told) {
    let dtypes = [F32, BF16, F32];
    let two = |step| {
        let mut all = state(dtypes, step, how);
        let more = state(dtypes, step, how);
        // Other rows, so that no tensor is a copy of another one.
        all.extend(more.into_iter().map(|mut t| {
            t.data.rotate_left(t.dtype.value_width() * (20 * COLS) as usize);
            Owned { name: format!("{}2", t.name), ..t }
        }));
        // A tensor with another number of values than the weights.
        all.push(Owned::new("short", F32, &[20_000], all[2].data[..80_000].to_vec()));
        all
    };
    let mut roles = all_roles();
    roles.tensors.extend((3..6).map(|tensor| Role {
        tensor,
        parameter: 1,
        kind: [Weight, ExpAvg, ExpAvgSq][tensor as usize - 3],
        group: 0,
    }));
    let base = open(save(&two(0), roles.clone(), options(None)), None);
    let file = save(&two(1), roles.clone(), options(Some(&base)));
    let reader = open(file.clone(), Some(&base));
    assert!(is_told(&reader, "w", how) && is_told(&reader, "w2", how));
    let inputs = |a: u32, b: u32| format!(r#"{{"tensor":{a}}},{{"tensor":{b}}}"#);
    let with = |a, b| with_manifest(&file, |m| m.replace(&inputs(1, 2), &inputs(a, b)));
    let refused = |file| refusal(file, &base);
    // A moment that does not exist, the weight itself, two weights that need each other.
    assert!(matches!(refused(with(1, 99)), FormatError::Corrupt { .. }));
    assert!(matches!(refused(with(1, 0)), FormatError::Limit { .. }));
    let each_other = with_manifest(&with(1, 3), |m| m.replace(&inputs(4, 5), &inputs(4, 0)));
    assert!(matches!(refused(each_other), FormatError::Limit { .. }));
    // A moment of another dtype, of another number of values, and one that is coded with moments itself.
    for (a, b) in [(2, 1), (2, 2), (1, 6), (1, 3)] {
        let e = refused(with(a, b));
        let text = e.to_string();
        assert!(
            matches!(e, FormatError::Corrupt { .. }) && text.contains("not its moment"),
            "{text}"
        );
    }
    // The other weight's moments would fit but decode to something else: a checksum notices.
    let mut other = two(1);
    for t in &mut other[4..6] {
        t.data.rotate_left(4 * 1000);
    }
    let file = save(&other, roles, options(Some(&base)));
    let swapped = with_manifest(&file, |m| m.replace(&inputs(1, 2), &inputs(4, 5)));
    assert!(matches!(refusal(swapped, &base), FormatError::Corrupt { .. }));
}

#[test]
fn moments_whose_ancestors_need_other_tensors_are_refused() {
    [Roughly, Exactly].into_iter().for_each(branching);
}

fn branching(how: Told) {
    let dtypes = [BF16, BF16, BF16];
    let base = open(save(&state(dtypes, 0, how), all_roles(), options(None)), None);
    let first = save(&state(dtypes, 1, how), all_roles(), options(Some(&base)));
    let first = open(first, Some(&base));
    let second = save(&state(dtypes, 2, how), all_roles(), options(Some(&first)));
    assert!(is_told(&first, "w", how) && is_told(&open(second.clone(), Some(&first)), "w", how));
    // The second moment as a delta of the parent's weight, which is coded with moments itself.
    let above = |number: u32| format!(r#"[{{"manifest":"{}","tensor":{number}}}]"#, first.digest());
    let branching = with_manifest(&second, |m| m.replace(&above(2), &above(0)));
    let e = refusal(branching, &first);
    assert!(e.to_string().contains("needs other tensors"), "{e}");
}
