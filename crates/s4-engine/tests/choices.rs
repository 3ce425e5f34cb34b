//! Plans with an earlier choice for the same tensor: the same as without it, as long as it holds.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]

use s4_engine::{
    Choice, CpuEngine, MomentSample, ParentSample, PlanJob, Preset, Scratch, TensorPlan,
    TensorView, parent_probes,
};
use s4_format::side::SideKind;
use s4_format::{DType, Digest, PredictorId};
use s4_planes::Simd;

const ROWS: usize = 500;
const COLS: usize = 700;
const SHAPE: [u64; 2] = [ROWS as u64, COLS as u64];

/// Pseudorandom numbers between -1 and 1, distributed like a bell.
fn bell(i: usize, seed: u64) -> f32 {
    let hash = |n: u64| {
        let n = (i as u64 ^ (seed << 32) ^ (n << 56)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let n = (n ^ (n >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (n >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..6).map(hash).sum::<f32>() / 3.0 - 1.0
}

fn values(of: impl Fn(usize) -> f32) -> Vec<u8> {
    (0..ROWS * COLS).flat_map(|i| of(i).to_le_bytes()).collect()
}

/// A weight after some steps, each of which changes it by about one part in `part`.
fn weight(steps: u64, part: f32) -> Vec<u8> {
    let change = |i: usize| (0..steps).map(|step| bell(i, 100 + step)).sum::<f32>() / part;
    values(|i| 0.03 * (bell(i, 1) + change(i)))
}

/// A second moment, whose rows and columns have sizes of their own.
fn moment(steps: u64) -> Vec<u8> {
    let row = |i: usize| 4.0 * bell(i / COLS, 2) + 4.0 * bell(i % COLS, 3);
    values(|i| (row(i) + 0.2 * bell(i, 4 + steps)).exp() * 1e-6)
}

fn plan(data: &[u8], parent: Option<&[u8]>, choice: Option<Choice>) -> TensorPlan {
    plan_of(DType::Float32, &SHAPE, data, parent, choice)
}

fn plan_of(
    dtype: DType,
    shape: &[u64],
    data: &[u8],
    parent: Option<&[u8]>,
    choice: Option<Choice>,
) -> TensorPlan {
    plan_by(Preset::Balanced, (dtype, shape, data), parent, choice)
}

fn plan_by(
    preset: Preset,
    (dtype, shape, data): (DType, &[u64], &[u8]),
    parent: Option<&[u8]>,
    choice: Option<Choice>,
) -> TensorPlan {
    let sample = parent.map(|parent| probed(parent, dtype));
    let parent = sample.as_ref().map(|values| ParentSample {
        manifest: Digest::of(b"p"),
        tensor: 3,
        values,
        moments: &[],
        expected: None,
    });
    let view = TensorView { dtype, shape, data };
    let job = PlanJob { preset, view: &view, parent: parent.as_ref(), role: None, choice };
    CpuEngine::new(Simd::detect()).plan(&job, &mut Scratch::default()).unwrap()
}

/// A tensor's values at the positions where it is compared with its parent.
fn probed(data: &[u8], dtype: DType) -> Vec<u8> {
    let width = dtype.value_width();
    let probes = parent_probes(dtype, (data.len() / width) as u64).into_iter();
    let run = |p: std::ops::Range<u64>| &data[p.start as usize * width..p.end as usize * width];
    probes.flat_map(run).copied().collect()
}

/// All of a plan except the choice for the next time.
fn stored(plan: &TensorPlan) -> String {
    let mut plan = plan.clone();
    plan.choice = None;
    format!("{plan:?}")
}

#[test]
fn what_holds_makes_the_same_plan() {
    let (before, now) = (weight(3, 1000.0), weight(4, 1000.0));
    let moments = [moment(0), moment(1)];
    let cases = [
        (&now, Some(&before[..]), PredictorId::PARENT),
        (&now, None, PredictorId::NONE),
        (&moments[1], None, PredictorId::RANK1),
    ];
    for (data, parent, predictor) in cases {
        let first = plan(data, parent, None);
        assert_eq!(first.plan.predictor, predictor);
        let choice = first.choice.unwrap();
        assert_eq!(choice.is_delta(), predictor == PredictorId::PARENT);
        let again = plan(data, parent, Some(choice));
        assert_eq!(stored(&again), stored(&first));
        assert_eq!(again.choice, Some(choice), "it stays what it is compared with");
    }
}

#[test]
fn a_later_step_is_planned_by_its_own_values() {
    let steps: Vec<_> = (3..6).map(|steps| weight(steps, 1000.0)).collect();
    let choice = plan(&steps[1], Some(&steps[0]), None).choice;
    let (fresh, again) =
        (plan(&steps[2], Some(&steps[1]), None), plan(&steps[2], Some(&steps[1]), choice));
    assert_eq!(stored(&again), stored(&fresh));
    assert_eq!(again.choice, choice);
}

#[test]
fn what_does_not_hold_is_compared_and_forgotten() {
    let (before, now) = (weight(3, 1000.0), weight(4, 1000.0));
    let choice = plan(&now, Some(&before), None).choice;
    // Another weight altogether; steps a hundred times as long; nothing changed.
    let cases = [moment(0), weight(4, 10.0), before.clone()];
    for data in cases {
        let (fresh, again) = (plan(&data, Some(&before), None), plan(&data, Some(&before), choice));
        assert_eq!(again.choice, None);
        // (Rows and columns are not looked at.)
        if fresh.plan.predictor != PredictorId::RANK1 {
            assert_eq!(stored(&again), stored(&fresh));
        }
    }
    let alone = plan(&now, None, None).choice;
    let coarse = values(|i| (bell(i, 1) * 8.0).round());
    let again = plan(&coarse, None, alone);
    assert_eq!((stored(&again), again.choice), (stored(&plan(&coarse, None, None)), None));
}

/// A first moment after some steps, of which each adds a tenth.
fn first_moment(steps: u64) -> Vec<u8> {
    values(|i| (0..steps).fold(0.0, |m, step| 0.9 * m + 0.1 * bell(i, 200 + step)))
}

#[test]
fn a_difference_that_saves_little_is_made_again_as_long_as_it_does() {
    let steps: Vec<_> = (20..23).map(first_moment).collect();
    let first = plan(&steps[1], Some(&steps[0]), None);
    let choice = first.choice.unwrap();
    assert!(choice.is_delta());
    let again = plan(&steps[2], Some(&steps[1]), Some(choice));
    assert_eq!(again.choice, Some(choice), "it holds");
    assert_eq!(stored(&again), stored(&plan(&steps[2], Some(&steps[1]), None)));
    // The same size, and nothing to do with the parent.
    let other = values(|i| (0..20).fold(0.0, |m, step| 0.9 * m + 0.1 * bell(i, 300 + step)));
    let given = plan(&other, Some(&steps[0]), Some(choice));
    assert!(!given.plan.is_delta());
    assert_eq!(stored(&given), stored(&plan(&other, Some(&steps[0]), None)));
}

/// Frozen layers, the end of a warm-up, smaller learning rates.
#[test]
fn a_tensor_that_changes_less_than_it_did_is_a_difference_at_once() {
    let before = weight(0, 1.0);
    // Other values altogether: no difference is worth it.
    let other = values(|i| 0.03 * bell(i, 50));
    let choice = plan(&other, Some(&before), None).choice.unwrap();
    assert!(!choice.is_delta());
    assert_eq!(plan(&other, Some(&before), Some(choice)).choice, Some(choice), "it holds");
    let near = values(|i| 0.03 * (bell(i, 50) + bell(i, 51) / 1000.0));
    for now in [&other, &near] {
        let given = plan(now, Some(&other), Some(choice));
        assert!(given.plan.is_delta());
        assert_eq!(stored(&given), stored(&plan(now, Some(&other), None)));
        assert_eq!(given.choice, None, "all are compared the next time, too");
    }
}

#[test]
fn choices_of_other_tensors_say_nothing() {
    let (before, now) = (weight(3, 1000.0), weight(4, 1000.0));
    let choice = plan(&now, Some(&before), None).choice;
    let values = now.len() as u64 / 4;
    for (dtype, shape) in [(DType::BFloat16, vec![2 * values]), (DType::Float32, vec![values / 2])]
    {
        let bytes = shape[0] as usize * dtype.size();
        let (data, parent) = (&now[..bytes], Some(&before[..bytes]));
        let fresh = plan_of(dtype, &shape, data, parent, None);
        let given = plan_of(dtype, &shape, data, parent, choice);
        assert_eq!((stored(&given), given.choice), (stored(&fresh), fresh.choice));
    }
    // A delta's choice, for a tensor without a parent.
    let fresh = plan(&now, None, None);
    assert_eq!(stored(&plan(&now, None, choice)), stored(&fresh));
}

/// The first rows of a tensor, few enough for a sample to hold them whole.
fn small(data: &[u8]) -> &[u8] {
    &data[..4 * 13 * COLS]
}

/// How such a tensor is coded best is found by encoding it, which a choice saves as well.
#[test]
fn what_is_chosen_for_a_tensor_that_is_all_sample_makes_the_same_plan() {
    let (before, now) = (weight(3, 1000.0), weight(4, 1000.0));
    // The rules of preset `fast` make this one smaller.
    let few = values(|i| (bell(i, 6) * 6.0).round());
    for (data, parent, as_fast) in [(&now, Some(&before), false), (&few, None, true)] {
        let (data, parent) = (small(data), parent.map(|parent| small(parent)));
        let tensor = (DType::Float32, &[13, COLS as u64][..], data);
        let plan = |choice| plan_by(Preset::Balanced, tensor, parent, choice);
        let first = plan(None);
        assert_eq!(first.choice.unwrap().is_delta(), parent.is_some());
        let fast = plan_by(Preset::Fast, tensor, parent, None);
        assert_eq!(stored(&first) == stored(&fast), as_fast);
        let again = plan(first.choice);
        assert_eq!((stored(&again), again.choice), (stored(&first), first.choice));
    }
}

/// Two tensors that differ in their values alone.
#[test]
fn what_is_chosen_for_one_tensor_is_tried_for_others_that_are_alike() {
    let alike = |of: &TensorPlan| of.choice.unwrap().for_one_alike();
    let other = values(|i| 0.03 * bell(i, 9));
    let first = plan(&weight(3, 1000.0), None, None);
    let like = plan(&other, None, Some(alike(&first)));
    let itself = plan(&other, None, None);
    assert_eq!(stored(&like), stored(&itself));
    // From then on it is the tensor's own choice, with its own bits.
    let again = plan(&other, None, like.choice);
    assert_eq!(again.choice, like.choice);
    assert_ne!(like.choice, Some(alike(&first)));
}

#[test]
fn a_tensor_that_turns_out_otherwise_is_planned_as_if_nothing_were_known() {
    let even = plan(&weight(3, 1000.0), None, None).choice.unwrap().for_one_alike();
    let (rows, before) = (moment(1), weight(3, 1000.0));
    // Its rows and columns differ in size, which nothing suggested for the first one.
    let unlike = plan(&rows, None, Some(even));
    assert_eq!(unlike.plan.predictor, PredictorId::RANK1);
    let itself = plan(&rows, None, None);
    assert_eq!((stored(&unlike), unlike.choice), (stored(&itself), itself.choice));
    // It changes by a thousandth of what the first one did.
    let first = plan(&weight(4, 1000.0), Some(&before), None).choice.unwrap();
    assert!(first.is_delta());
    let parent = values(|i| 0.03 * bell(i, 9));
    let now = values(|i| 0.03 * (bell(i, 9) + bell(i, 8) / 1e6));
    let unlike = plan(&now, Some(&parent), Some(first.for_one_alike()));
    let itself = plan(&now, Some(&parent), None);
    assert_eq!((stored(&unlike), unlike.choice), (stored(&itself), itself.choice));
}

/// A weight, what AdamW makes of it in one step with this rate, and the moments it does so with.
fn stepped(seed: u64, rate: f32) -> [Vec<u8>; 4] {
    let weight = |i: usize| 0.03 * bell(i, seed);
    let first = |i: usize| 1e-4 * bell(i, seed + 1);
    let second = |i: usize| 1e-8 * (2.0 * bell(i, seed + 2)).exp();
    let step = |i: usize| 3e-3 * weight(i) + first(i) / (second(i).sqrt() + 1e-8);
    [values(weight), values(|i| weight(i) - rate * step(i)), values(first), values(second)]
}

fn plan_step(of: &[Vec<u8>; 4], choice: Option<Choice>) -> TensorPlan {
    let dtype = DType::Float32;
    let [parent, data, first, second] = of;
    let [values, first, second] = [parent, first, second].map(|data| probed(data, dtype));
    let moment = |tensor, values| MomentSample { tensor, dtype, values };
    let moments = &[moment(4, &first[..]), moment(5, &second[..])];
    let (manifest, values, expected) = (Digest::of(b"p"), &values[..], None);
    let parent = ParentSample { manifest, tensor: 3, values, moments, expected };
    let view = TensorView { dtype, shape: &[(data.len() / 4 / COLS) as u64, COLS as u64], data };
    let job = PlanJob { choice, parent: Some(&parent), ..PlanJob::new(Preset::Balanced, &view) };
    CpuEngine::new(Simd::detect()).plan(&job, &mut Scratch::default()).unwrap()
}

/// The optimizer changes all weights of a checkpoint by one rule.
#[test]
fn the_step_of_one_tensor_is_used_for_others_that_it_explains() {
    let constants = |plan: &TensorPlan| {
        assert_eq!(plan.plan.predictor, PredictorId::STEP);
        plan.side.get(SideKind::STEP).to_vec()
    };
    let first = plan_step(&stepped(10, 3e-4), None);
    let alike = first.choice.unwrap().for_one_alike();
    let second = stepped(20, 3e-4);
    let itself = constants(&plan_step(&second, None));
    assert_ne!(itself, constants(&first), "found in other values");
    let like = plan_step(&second, Some(alike));
    assert_eq!(constants(&like), constants(&first));
    // Another rate leaves more than the first one did.
    let third = stepped(30, 2.9e-4);
    assert_eq!(constants(&plan_step(&third, Some(alike))), constants(&plan_step(&third, None)));
    // Of an earlier checkpoint only the method is tried, unless another tensor of this one has shown the step.
    let own = like.choice.unwrap().of_earlier();
    assert!(own.is_step());
    assert_eq!(constants(&plan_step(&second, Some(own))), itself);
    let shown = own.with_step_of(&first.choice.unwrap());
    assert_eq!(constants(&plan_step(&second, Some(shown))), constants(&first));
}

#[test]
fn a_step_explains_a_tensor_that_is_all_sample() {
    let of = |seed, rate| stepped(seed, rate).map(|data| small(&data).to_vec());
    let first = plan_step(&of(10, 3e-4), None);
    assert_eq!(first.plan.predictor, PredictorId::STEP);
    let like = plan_step(&of(20, 3e-4), first.choice.map(Choice::for_one_alike));
    assert_eq!(like.side.get(SideKind::STEP), first.side.get(SideKind::STEP));
}
