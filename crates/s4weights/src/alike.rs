//! Similar tensors of one checkpoint, such as those of a model's layers: the choice for the first
//! of them is tried first for the others, which takes a fraction of the time that comparing all
//! candidates does.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use s4_engine::{Choice, TensorPlan};
use s4_format::DType;
use s4_format::manifest::RoleKind;

use crate::batch::Batch;
use crate::parallel::lock;

/// Tensors with more values are planned separately: for them planning takes little time compared
/// with encoding.
const MOST_VALUES: u64 = 1 << 20;

/// Properties that similar tensors have in common.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Kind {
    /// Their name without its digits.
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    role: Option<RoleKind>,
    has_parent: bool,
    has_moments: bool,
}

/// The choice for the first tensor of each kind.
#[derive(Default)]
pub(crate) struct Alike(Mutex<HashMap<Kind, Option<Choice>>>);

/// Tensors of a batch that are planned together.
#[derive(Default)]
pub(crate) struct Round {
    /// Their indices in the batch.
    pub(crate) tensors: Vec<usize>,
    /// For each tensor, the choice to try first.
    pub(crate) choices: Vec<Option<Choice>>,
    /// The tensors that are the first of their kinds, as positions in `tensors`.
    firsts: Vec<(usize, Kind)>,
}

impl Alike {
    /// Takes from `left` the tensors of a batch to plan now: all except those that are similar to one
    /// taken in this round. `known` holds the choice made for each by an earlier save. Which tensor
    /// is the first of its kind does not depend on where a batch ends.
    pub(crate) fn round(
        &self,
        batch: &Batch<'_>,
        known: &[Option<Choice>],
        left: &mut Vec<usize>,
    ) -> Round {
        let (chosen, mut begun, mut round) = (lock(&self.0), HashSet::new(), Round::default());
        left.retain(|&i| {
            // A remembered choice needs nothing from other tensors except this checkpoint's step.
            let asks = known[i].is_none_or(|choice| choice.is_step());
            let kind = if asks { kind(batch, i) } else { None };
            let of_first = kind.as_ref().and_then(|kind| chosen.get(kind));
            if let Some(kind) = kind.filter(|_| of_first.is_none()) {
                if begun.contains(&kind) {
                    return true;
                }
                begun.insert(kind.clone());
                round.firsts.push((round.tensors.len(), kind));
            }
            round.tensors.push(i);
            let of_first = *of_first.unwrap_or(&None);
            round.choices.push(match (known[i], of_first) {
                (Some(known), Some(first)) => Some(known.with_step_of(&first)),
                (known, of_first) => known.or(of_first),
            });
            false
        });
        round
    }

    /// Records the choices for the first tensors of a round.
    pub(crate) fn note(&self, round: Round, plans: &[TensorPlan]) {
        let chosen = round.firsts.into_iter();
        let chosen = chosen.map(|(at, kind)| (kind, plans[at].choice.map(Choice::for_one_alike)));
        lock(&self.0).extend(chosen);
    }
}

fn kind(batch: &Batch<'_>, i: usize) -> Option<Kind> {
    let t = &batch.tensors[i];
    let small = t.values.bytes() / t.dtype.value_width() as u64 <= MOST_VALUES;
    small.then(|| Kind {
        name: batch.names[i].chars().filter(|c| !c.is_ascii_digit()).collect(),
        dtype: t.dtype,
        shape: t.shape.to_vec(),
        role: t.role.map(|role| role.row.kind),
        has_parent: batch.parents[i].is_some(),
        has_moments: batch.moments.get(i).is_some_and(|moments| !moments.is_empty()),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use s4_engine::{
        CpuEngine, MomentSample, ParentSample, PlanJob, Preset, Scratch, TensorValues, TensorView,
        parent_probes,
    };
    use s4_format::Digest;
    use s4_planes::Simd;

    use super::*;
    use crate::adversarial;

    const SMALL: u64 = 100_000;
    const LARGE: u64 = MOST_VALUES + 1;

    fn plan() -> TensorPlan {
        let data = adversarial(DType::BFloat16, 100_000).find(|p| p.0 == "like-weights").unwrap().1;
        let view = TensorView { dtype: DType::BFloat16, shape: &[SMALL], data: &data };
        let job = PlanJob::new(Preset::Balanced, &view);
        CpuEngine::new(Simd::detect()).plan(&job, &mut Scratch::default()).unwrap()
    }

    /// A plan by the optimizer's step.
    pub(crate) fn step() -> TensorPlan {
        let bell = |i: u64| {
            let n = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (n ^ n >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40
        };
        let value = |i: u64| bell(i) as f32 / (1 << 24) as f32 - 0.5;
        let values = |of: &dyn Fn(u64) -> f32| {
            (0..SMALL).flat_map(|i| of(i).to_le_bytes()).collect::<Vec<u8>>()
        };
        let first = |i| value(i + SMALL);
        let (before, first_moment) = (values(&value), values(&first));
        let data = values(&|i| value(i) - 1e-3 * first(i));
        let sample = |data: &[u8]| {
            let probes = parent_probes(DType::Float32, SMALL).into_iter();
            probes.flat_map(|p| data[4 * p.start as usize..4 * p.end as usize].to_vec()).collect()
        };
        let [before, first]: [Vec<u8>; 2] = [sample(&before), sample(&first_moment)];
        let moments = &[MomentSample { tensor: 1, dtype: DType::Float32, values: &first }];
        let (manifest, values, expected) = (Digest::of(b"p"), &before[..], None);
        let parent = ParentSample { manifest, tensor: 0, values, moments, expected };
        let view = TensorView { dtype: DType::Float32, shape: &[SMALL], data: &data };
        let job = PlanJob { parent: Some(&parent), ..PlanJob::new(Preset::Balanced, &view) };
        let engine = CpuEngine::new(Simd::detect());
        engine.plan(&job, &mut Scratch::default()).unwrap()
    }

    /// A batch of tensors with these names and shapes.
    fn batch<'a>(data: &'a [u8], tensors: &[(&'a str, &'a [u64])]) -> Batch<'a> {
        let values = |shape: &'a [u64]| {
            let bytes = 2 * shape.iter().product::<u64>() as usize;
            TensorValues::new(DType::BFloat16, shape, &data[..bytes])
        };
        Batch {
            names: tensors.iter().map(|t| t.0).collect(),
            tensors: tensors.iter().map(|t| values(t.1)).collect(),
            parents: vec![None; tensors.len()],
            ..Batch::default()
        }
    }

    /// The tensors of each round, and for each whether a choice is tried first.
    fn rounds(alike: &Alike, batch: &Batch<'_>, known: &[usize]) -> Vec<Vec<(usize, bool)>> {
        let choice = plan().choice;
        let known: Vec<_> =
            (0..batch.names.len()).map(|i| choice.filter(|_| known.contains(&i))).collect();
        let (mut left, mut out): (Vec<_>, _) = ((0..batch.names.len()).collect(), vec![]);
        while !left.is_empty() {
            let round = alike.round(batch, &known, &mut left);
            let given = round.choices.iter().map(Option::is_some);
            out.push(round.tensors.iter().copied().zip(given).collect());
            let plans = vec![plan(); round.tensors.len()];
            alike.note(round, &plans);
        }
        out
    }

    const TENSORS: [(&str, &[u64]); 8] = [
        ("layers.0.w", &[SMALL]),
        ("layers.1.w", &[SMALL]),
        ("layers.2.w", &[1000, 100]),
        ("head.w", &[SMALL]),
        ("layers.3.w", &[LARGE]),
        ("layers.4.w", &[LARGE]),
        ("layers.10.w", &[SMALL]),
        ("layers.11.w", &[SMALL]),
    ];

    #[test]
    fn the_first_of_each_kind_is_planned_before_the_others() {
        let data = vec![0; 2 * LARGE as usize];
        let batch = batch(&data, &TENSORS);
        let first: Vec<_> = [0, 2, 3, 4, 5].map(|i| (i, false)).into();
        let found = rounds(&Alike::default(), &batch, &[]);
        assert_eq!(found, [first, [1, 6, 7].map(|i| (i, true)).into()]);
        // A choice known for the tensor itself takes precedence.
        let found = rounds(&Alike::default(), &batch, &[0, 6]);
        let is_known = |i: usize| (i, [0, 6].contains(&i));
        assert_eq!(found, [[0, 1, 2, 3, 4, 5, 6].map(is_known).to_vec(), vec![(7, true)]]);
    }

    /// The first of a kind shows the step of a checkpoint, which an earlier one cannot.
    #[test]
    fn a_remembered_step_waits_for_the_first_of_its_kind() {
        let data = vec![0; 2 * LARGE as usize];
        let batch = batch(&data, &TENSORS);
        let choice = step().choice.unwrap().of_earlier();
        let known = vec![Some(choice); TENSORS.len()];
        let (alike, mut left) = (Alike::default(), (0..TENSORS.len()).collect());
        let round = alike.round(&batch, &known, &mut left);
        assert_eq!((&round.tensors[..], &left[..]), (&[0, 2, 3, 4, 5][..], &[1, 6, 7][..]));
        assert!(round.choices.iter().all(|given| *given == Some(choice)));
        let plans = vec![step(); round.tensors.len()];
        alike.note(round, &plans);
        let round = alike.round(&batch, &known, &mut left);
        let shown = choice.with_step_of(&step().choice.unwrap());
        assert!(round.choices == [Some(shown); 3] && shown != choice);
    }

    #[test]
    fn it_does_not_matter_where_batches_end() {
        let data = vec![0; 2 * LARGE as usize];
        let tried = |parts: &[std::ops::Range<usize>]| {
            let alike = Alike::default();
            let mut all = vec![];
            for part in parts {
                let batch = batch(&data, &TENSORS[part.clone()]);
                let rounds = rounds(&alike, &batch, &[]);
                all.extend(rounds.concat().into_iter().map(|(i, tried)| (part.start + i, tried)));
            }
            all.sort_unstable();
            all
        };
        let expected = (0..8).map(|i| (i, [1, 6, 7].contains(&i))).collect::<Vec<_>>();
        assert_eq!(tried(&[0..1, 1..7, 7..8]), expected);
        assert_eq!(tried(&[0..2, 2..8]), expected);
    }
}
