//! A store's memory of the tensors that it saved, which makes planning the next checkpoints faster: the choice for
//! each tensor, and the values that deltas are estimated from. Without it, planning reads these values, and more,
//! again. Reading checkpoints does not depend on it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use s4_delta::Tree;
use s4_engine::Choice;
use s4_format::crc32c;
use s4_store::CheckpointId;

use crate::parallel::lock;

/// Each save compares all candidates for one tensor in this many (of similar tensors, for the first
/// of them: `alike.rs`), and for others only if the earlier choice no longer holds.
const RENEWED: u32 = 8;

/// A tensor that was not saved for this many saves is forgotten: names may come and go.
const FORGOTTEN: u32 = 128;

/// For how many distances to a parent the choices for a tensor are remembered. The size of a delta
/// depends on the distance, and the deltas of a base have few distances, which recur.
const DISTANCES: usize = 8;

/// Values of a checkpoint's tensors, by name.
type Samples = HashMap<String, Vec<u8>>;

/// The choices and samples of a store.
#[derive(Default)]
pub(crate) struct PlanMemory(Mutex<Known>);

#[derive(Default)]
struct Known {
    saves: u32,
    /// By [`Recall::kind`] and name, in ascending order of distances.
    choices: [HashMap<String, Vec<Chosen>>; 3],
    samples: Vec<SamplesOf>,
}

/// The choice for a tensor.
#[derive(Clone, Copy)]
struct Chosen {
    /// Checkpoints from the parent to the delta.
    distance: u32,
    /// `None`: the earlier choice did not hold, or all candidates are compared each time.
    choice: Option<Choice>,
    /// The last save that made or confirmed it.
    save: u32,
}

/// Samples of a checkpoint, for deltas of it.
struct SamplesOf {
    id: CheckpointId,
    /// Its number since the base.
    number: u32,
    bytes: usize,
    samples: Arc<Samples>,
}

/// State of planning one checkpoint: earlier choices and samples, and new ones to remember.
pub(crate) struct Recall {
    memory: Arc<PlanMemory>,
    save: u32,
    distance: u32,
    parents: Option<Arc<Samples>>,
    own: Mutex<Own>,
    keeps: bool,
    is_read_back: bool,
}

/// Samples of the checkpoint that is planned.
#[derive(Default)]
struct Own {
    samples: Samples,
    bytes: usize,
    /// Bytes that they may take.
    room: usize,
}

impl PlanMemory {
    /// Begins a checkpoint. `parent`: the checkpoint that it may be a delta of, and how many
    /// checkpoints earlier that is. `room`: bytes that all samples together may take, if deltas of
    /// this checkpoint will read it back; `None` if none will.
    pub(crate) fn begin(
        self: &Arc<Self>,
        parent: Option<(CheckpointId, u32)>,
        room: Option<usize>,
    ) -> Recall {
        let mut known = lock(&self.0);
        known.saves = known.saves.wrapping_add(1);
        let save = known.saves;
        if save.is_multiple_of(FORGOTTEN) {
            for choices in &mut known.choices {
                choices.retain(|_, of_tensor| {
                    of_tensor.retain(|c| save.wrapping_sub(c.save) < FORGOTTEN);
                    !of_tensor.is_empty()
                });
            }
        }
        let of_parent = |s: &&SamplesOf| parent.is_some_and(|(id, _)| s.id == id);
        let parents = known.samples.iter().find(of_parent).map(|s| Arc::clone(&s.samples));
        let taken: usize = known.samples.iter().map(|s| s.bytes).sum();
        let is_read_back = room.is_some();
        let room = room.unwrap_or_default().saturating_sub(taken);
        Recall {
            memory: Arc::clone(self),
            save,
            distance: parent.map_or(0, |(_, distance)| distance),
            parents,
            own: Mutex::new(Own { room, ..Own::default() }),
            keeps: room > 0,
            is_read_back,
        }
    }

    /// Drops the samples that no delta can use any more; `next` is the next checkpoint's number since the base.
    /// With 0, a new base, all are dropped.
    pub(crate) fn forget(&self, tree: &Tree, next: u32) {
        let later = |s: &SamplesOf| tree.last_child(s.number).is_some_and(|last| last >= next);
        lock(&self.0).samples.retain(|s| next > 0 && later(s));
    }

    /// Keeps the samples of a checkpoint.
    pub(crate) fn keep(&self, id: CheckpointId, number: u32, recall: &Recall) {
        let Own { samples, bytes, .. } = std::mem::take(&mut *lock(&recall.own));
        if !samples.is_empty() {
            let samples = Arc::new(samples);
            lock(&self.0).samples.push(SamplesOf { id, number, bytes, samples });
        }
    }
}

impl Recall {
    /// The earlier choice for a tensor, if it should be tried first.
    pub(crate) fn choice(&self, name: &str, has_parent: bool) -> Option<Choice> {
        let turn = crc32c(name.as_bytes()).wrapping_add(self.save);
        if turn.is_multiple_of(RENEWED) {
            return None;
        }
        let known = lock(&self.memory.0);
        let of_tensor = known.choices[self.kind(has_parent)].get(name)?;
        // If the choice at this distance did not hold, everything is compared.
        let given = of_tensor.iter().filter(|c| c.choice.is_some() || c.distance == self.distance);
        let nearest = given.min_by_key(|c| c.distance.abs_diff(self.distance))?;
        let choice = nearest.choice?;
        // A delta may pay with a nearer parent though it did not with a farther one.
        let is_nearer = has_parent && !choice.is_delta() && self.distance < nearest.distance;
        let same = nearest.distance == self.distance;
        (!is_nearer).then(|| if same { choice.of_earlier() } else { choice.at_other_distance() })
    }

    /// Notes the choices for tensors.
    pub(crate) fn note<'a>(&self, chosen: impl Iterator<Item = (&'a str, bool, Option<Choice>)>) {
        let mut known = lock(&self.memory.0);
        for (name, has_parent, choice) in chosen {
            let of_kind = &mut known.choices[self.kind(has_parent)];
            let chosen = Chosen { distance: self.distance, choice, save: self.save };
            let Some(of_tensor) = of_kind.get_mut(name) else {
                of_kind.insert(name.to_owned(), vec![chosen]);
                continue;
            };
            match of_tensor.binary_search_by_key(&self.distance, |c| c.distance) {
                Ok(i) => of_tensor[i] = chosen,
                Err(i) => of_tensor.insert(i, chosen),
            }
            if of_tensor.len() > DISTANCES {
                let age = |c: &Chosen| self.save.wrapping_sub(c.save);
                let oldest = (0..of_tensor.len()).max_by_key(|i| age(&of_tensor[*i]));
                of_tensor.remove(oldest.unwrap_or_default());
            }
        }
    }

    /// The set of choices that a tensor uses.
    fn kind(&self, has_parent: bool) -> usize {
        usize::from(has_parent) + usize::from(has_parent && self.is_read_back)
    }

    /// Whether deltas of the checkpoint will read it back. Its weights then get no contexts from
    /// moments: each of these deltas would have to read the moments, too, and decode them on the
    /// CPU.
    pub(crate) fn is_read_back(&self) -> bool {
        self.is_read_back
    }

    /// The sample of a tensor's parent, if it has `bytes` bytes.
    pub(crate) fn sample(&self, name: &str, bytes: usize) -> Option<&[u8]> {
        let sample = self.parents.as_ref()?.get(name)?;
        (sample.len() == bytes).then_some(&sample[..])
    }

    /// Whether samples are kept.
    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Keeps a tensor's sample, if there is room.
    pub(crate) fn keep(&self, name: &str, sample: &[u8]) {
        let mut own = lock(&self.own);
        if own.bytes + sample.len() > own.room {
            return;
        }
        if own.samples.insert(name.to_owned(), vec![]).is_some() {
            return;
        }
        own.bytes += sample.len();
        drop(own);
        // Copied without the lock, so that threads copy in parallel.
        let copy = sample.to_vec();
        lock(&self.own).samples.insert(name.to_owned(), copy);
    }
}

#[cfg(test)]
mod tests {
    use s4_engine::{CpuEngine, PlanJob, Preset, Scratch, TensorView};
    use s4_format::DType;
    use s4_planes::Simd;

    use super::*;
    use crate::adversarial;

    fn id(number: u32) -> CheckpointId {
        format!("00000000-0000-7000-8000-{number:012}").parse().unwrap()
    }

    fn choice() -> Choice {
        let data = adversarial(DType::BFloat16, 100_000).find(|p| p.0 == "like-weights").unwrap().1;
        let view = TensorView { dtype: DType::BFloat16, shape: &[100_000], data: &data };
        let job = PlanJob::new(Preset::Fast, &view);
        let engine = CpuEngine::new(Simd::detect());
        engine.plan(&job, &mut Scratch::default()).unwrap().choice.unwrap()
    }

    #[test]
    fn choices_are_given_but_for_one_tensor_in_eight() {
        let memory = Arc::new(PlanMemory::default());
        let names: Vec<_> = (0..1000).map(|i| format!("layers.{i}.weight")).collect();
        let first = memory.begin(None, None);
        assert!(names.iter().all(|name| first.choice(name, false).is_none()));
        let chosen = choice();
        first.note(names.iter().map(|name| (&name[..], false, Some(chosen))));
        let mut withheld = vec![0; names.len()];
        for _ in 0..RENEWED {
            let recall = memory.begin(None, None);
            for (name, withheld) in names.iter().zip(&mut withheld) {
                assert!(recall.choice(name, true).is_none(), "of a tensor with a parent");
                *withheld += u32::from(recall.choice(name, false).is_none());
            }
        }
        assert!(withheld.iter().all(|n| *n == 1), "each tensor once in so many saves");
        memory.begin(None, None).note([(&names[0][..], false, None)].into_iter());
        let given = (0..RENEWED).filter_map(|_| memory.begin(None, None).choice(&names[0], false));
        assert_eq!(given.count(), 0, "it did not hold");
    }

    #[test]
    fn tensors_that_are_gone_are_forgotten() {
        let memory = Arc::new(PlanMemory::default());
        let chosen = choice();
        let note = |name: &str| {
            memory.begin(None, None).note([(name, false, Some(chosen))].into_iter());
        };
        note("gone");
        (0..2 * FORGOTTEN).for_each(|_| note("there"));
        let known = lock(&memory.0);
        assert_eq!(known.choices.each_ref().map(HashMap::len), [1, 0, 0]);
        assert!(known.choices[0].contains_key("there"));
    }

    /// An optimizer's rate changes from save to save.
    #[test]
    fn the_constants_of_a_step_are_not_remembered() {
        let memory = Arc::new(PlanMemory::default());
        let chosen = crate::alike::tests::step().choice.unwrap();
        assert!(chosen.is_step() && chosen != chosen.of_earlier());
        let begin = || memory.begin(Some((id(1), 1)), None);
        begin().note([("w", true, Some(chosen))].into_iter());
        let given = (0..RENEWED).find_map(|_| begin().choice("w", true));
        assert_eq!(given, Some(chosen.of_earlier()));
    }

    #[test]
    fn choices_are_remembered_by_distance() {
        let memory = Arc::new(PlanMemory::default());
        let parent = id(1);
        let of = |distance| memory.begin(Some((parent, distance)), None);
        let note = |distance, choice| of(distance).note([("w", true, choice)].into_iter());
        let given = |distance| (0..RENEWED).any(|_| of(distance).choice("w", true).is_some());
        note(1, Some(choice()));
        assert!(given(1) && given(2), "the nearest that there is");
        // A choice that did not hold at one distance still holds at another.
        note(2, None);
        assert!(given(1) && !given(2) && given(3));
        note(2, Some(choice()));
        note(1, None);
        assert!(!given(1) && given(2) && given(3));
        (1..100).for_each(|distance| note(distance, Some(choice())));
        assert_eq!(lock(&memory.0).choices[1]["w"].len(), DISTANCES);
        assert!(given(99));
    }

    #[test]
    fn a_nearer_parent_is_compared_where_a_farther_one_was_of_no_use() {
        let memory = Arc::new(PlanMemory::default());
        let parent = id(1);
        let of = |distance| memory.begin(Some((parent, distance)), None);
        let alone = choice();
        assert!(!alone.is_delta());
        of(2).note([("w", true, Some(alone))].into_iter());
        let given = |distance| (0..RENEWED).any(|_| of(distance).choice("w", true).is_some());
        assert!(given(2) && given(3) && !given(1));
        // The same result at a farther distance changes nothing.
        of(4).note([("w", true, Some(alone))].into_iter());
        assert!(given(2) && !given(1));
    }

    #[test]
    fn samples_are_kept_while_they_have_room_and_are_wanted() {
        let (memory, tree) = (Arc::new(PlanMemory::default()), Tree::new(16, 2));
        let save = |of: u32, parent, number, room| {
            memory.forget(&tree, number);
            let (id, recall) = (id(of), memory.begin(parent, room));
            recall.keep("a", &[1; 60]);
            recall.keep("b", &[2; 60]);
            memory.keep(id, number, &recall);
            id
        };
        let sample = |id, name, bytes| {
            memory.begin(Some((id, 1)), None).sample(name, bytes).map(<[u8]>::to_vec)
        };
        let base = save(1, None, 0, Some(100));
        assert_eq!(sample(base, "a", 60), Some(vec![1; 60]));
        assert_eq!(sample(base, "a", 61), None, "of another shape");
        assert_eq!(sample(base, "b", 60), None, "there was no room");
        let fourth = save(2, Some((base, 4)), 4, Some(200));
        assert_eq!(sample(fourth, "a", 60), Some(vec![1; 60]));
        assert_eq!(sample(fourth, "b", 60), Some(vec![2; 60]), "no more than 200 with the base's");
        let fifth = save(3, Some((fourth, 1)), 5, None);
        assert_eq!(sample(fifth, "a", 60), None, "nothing is a delta of it");
        assert!(sample(base, "a", 60).is_some() && sample(fourth, "a", 60).is_some());
        let eighth = save(4, Some((base, 8)), 8, Some(200));
        assert!(sample(fourth, "a", 60).is_none() && sample(eighth, "a", 60).is_some());
        let next = save(5, None, 0, Some(200));
        assert!(sample(base, "a", 60).is_none() && sample(next, "a", 60).is_some());
    }
}
