//! Compares what is left of a store after an attack with what was promised during it.
//!
//! The judge opens the store without faults, reads the log itself, and trusts only the journals:
//! every acknowledged save is listed, unless a process announced that it would retire or rebase it;
//! everything listed loads and has the values of its step; a full check is clean; and the store still
//! accepts saves.

use std::collections::{BTreeMap, BTreeSet};

use s4weights::store::{Checkpoint, CheckpointId, Entry, Op, Publish};

use crate::api::{self, Store, Target};
use crate::journal::Evidence;
use crate::values;

/// A step that no process saves.
const AFTERWARDS: u64 = 1 << 40;
/// Lines of history printed for one violation.
const HISTORY: usize = 30;

/// The findings of a judge.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// Saves that were acknowledged.
    pub(crate) saved: usize,
    /// Checkpoints that are listed, and were loaded.
    pub(crate) listed: usize,
    /// Acknowledged saves that were retired or replaced on purpose.
    pub(crate) gone: usize,
    /// Broken promises, each with its history.
    pub(crate) violations: Vec<String>,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { saved, listed, gone, violations } = self;
        write!(
            f,
            "{saved} saves acknowledged, {gone} of them retired or replaced, {listed} checkpoints \
             listed and loaded, {} violations",
            violations.len()
        )
    }
}

/// Judges a store by the journals of a run.
pub(crate) fn judge(target: &Target, seed: u64, evidence: &Evidence) -> Verdict {
    let mut verdict = Verdict { saved: evidence.saved().count(), ..Verdict::default() };
    verdict.violations.extend(evidence.wrong().map(|w| format!("a process saw: {w}")));
    let store = match Store::open_to_judge(target) {
        Ok(store) => store,
        Err(e) if api::is_no_store(&e) && verdict.saved == 0 => return verdict,
        Err(e) => {
            let what = format!("{}: the store cannot be opened any more: {e}", target.url);
            verdict.violations.push(what);
            return verdict;
        }
    };
    let (list, log) = match (store.list(), store.log()) {
        (Ok(list), Ok(log)) => (list, log),
        (Err(e), _) | (_, Err(e)) => {
            verdict.violations.push(format!("{}: the log cannot be read: {e}", target.url));
            return verdict;
        }
    };
    let case = Case { evidence, past: Past::of(&log), log: &log, list: &list };
    case.acknowledged(&mut verdict);
    case.values(&store, seed, &mut verdict);
    match store.check(true) {
        Ok(findings) => {
            verdict.violations.extend(findings.into_iter().map(|f| format!("a check says: {f}")));
        }
        Err(e) => verdict.violations.push(format!("a check fails: {e}")),
    }
    afterwards(&store, seed, &mut verdict);
    verdict
}

/// The log, by checkpoint.
#[derive(Default)]
struct Past<'a> {
    /// Checkpoints with the number of the entry that lists them.
    published: BTreeMap<CheckpointId, (u64, &'a Publish)>,
    /// The checkpoint that took another's place.
    replaced: BTreeMap<CheckpointId, CheckpointId>,
    /// Entries that retire a checkpoint, with their reasons.
    retired: BTreeMap<CheckpointId, (u64, &'a str)>,
}

impl<'a> Past<'a> {
    fn of(log: &'a [Entry]) -> Self {
        let mut past = Self::default();
        for entry in log {
            match &entry.op {
                Op::Publish(publish) => {
                    past.published.insert(publish.id, (entry.n, publish));
                    if let Some(old) = publish.replaces {
                        past.replaced.insert(old.id, publish.id);
                    }
                }
                Op::Retire { ids, reason } => {
                    past.retired.extend(ids.iter().map(|id| (*id, (entry.n, reason.as_str()))));
                }
                _ => {}
            }
        }
        past
    }

    /// The entry that gives a checkpoint its place in time; for a replacement, the original's.
    fn order(&self, id: CheckpointId) -> Option<u64> {
        let (mut n, mut publish) = self.published.get(&id).copied()?;
        while let Some(old) = publish.replaces {
            (n, publish) = self.published.get(&old.id).copied()?;
        }
        Some(n)
    }

    /// Number of checkpoints that were published after `id` and before entry `end`.
    fn newer(&self, id: CheckpointId, end: u64) -> u64 {
        let order = self.order(id).unwrap_or(end);
        let all = self.published.values();
        all.filter(|(n, p)| p.replaces.is_none() && *n > order && *n < end).count() as u64
    }
}

struct Case<'a> {
    evidence: &'a Evidence,
    past: Past<'a>,
    log: &'a [Entry],
    list: &'a [Checkpoint],
}

impl Case<'_> {
    /// Every acknowledged save is listed, or was retired or replaced as announced.
    fn acknowledged(&self, verdict: &mut Verdict) {
        let listed: BTreeMap<_, _> = self.list.iter().map(|c| (c.id(), c.step())).collect();
        if listed.len() != self.list.len() {
            verdict.violations.push("an id is listed twice".into());
        }
        let (retiring, rebasing) = (self.evidence.retiring(), self.evidence.rebasing());
        let mut seen = BTreeSet::new();
        for (name, step) in self.evidence.saved() {
            let Ok(mut id) = name.parse::<CheckpointId>() else {
                verdict.violations.push(format!("`{name}` is no id"));
                continue;
            };
            if !seen.insert(id) {
                let what = format!("{name} was acknowledged twice");
                verdict.violations.push(self.with_history(what, name));
            }
            while let (None, Some(new)) = (listed.get(&id), self.past.replaced.get(&id)) {
                if !rebasing.contains(id.to_string().as_str()) {
                    let what = format!("{name} of step {step}: nobody wanted {id} rebased");
                    verdict.violations.push(self.with_history(what, name));
                }
                id = *new;
            }
            let wrong = match (listed.get(&id), self.past.retired.get(&id)) {
                (Some(found), _) if *found == step => None,
                (Some(found), _) => Some(format!("is listed as step {found}")),
                (None, None) => Some("is LOST: the log does not list it".to_owned()),
                (None, Some((n, reason))) => {
                    let asked = retiring.contains(id.to_string().as_str());
                    let kept = self.evidence.retention().filter(|_| *reason == "retention");
                    let may_go = asked || kept.is_some_and(|k| self.past.newer(id, *n) >= k);
                    (!may_go).then(|| format!("was retired by entry {n} ({reason}), unasked"))
                }
            };
            if let Some(wrong) = wrong {
                let what = format!("{name} of step {step} was acknowledged and {wrong}");
                verdict.violations.push(self.with_history(what, name));
            } else if id.to_string() != name || !listed.contains_key(&id) {
                verdict.gone += 1;
            }
        }
    }

    /// Everything that is listed loads, and has the values of its step.
    fn values(&self, store: &Store, seed: u64, verdict: &mut Verdict) {
        for checkpoint in self.list {
            let wrong = match store.load(checkpoint.id()) {
                Ok(found) => api::difference(seed, checkpoint.step(), &found),
                Err(e) => Some(format!("cannot be loaded: {e}")),
            };
            verdict.listed += 1;
            if let Some(wrong) = wrong {
                let id = checkpoint.id().to_string();
                let what = format!("{id} of step {} is listed: {wrong}", checkpoint.step());
                verdict.violations.push(self.with_history(what, &id));
            }
        }
    }

    fn with_history(&self, what: String, id: &str) -> String {
        let entries = self.log.iter().map(|e| format!("log: {e:?}"));
        let entries = entries.filter(|line| line.contains(id));
        let lines = self.evidence.about(id).into_iter().chain(entries).take(HISTORY);
        lines.fold(what, |text, line| format!("{text}\n    {line}"))
    }
}

/// A store that survived accepts another save.
fn afterwards(store: &Store, seed: u64, verdict: &mut Verdict) {
    let saved = store.save(AFTERWARDS, &values::at(seed, AFTERWARDS));
    let found = saved.and_then(|saved| store.load(saved.id()));
    match found.map(|found| api::difference(seed, AFTERWARDS, &found)) {
        Ok(None) => {}
        Ok(Some(how)) => verdict.violations.push(format!("a save afterwards: {how}")),
        Err(e) => verdict.violations.push(format!("a save afterwards fails: {e}")),
    }
}

/// Negative controls: each test but the first plants one broken promise, which must be found.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Event, Journal};

    const SEED: u64 = 5;

    struct Scene {
        folder: tempfile::TempDir,
        target: Target,
        journal: Journal,
    }

    /// A store with saves of steps 1 to `saves`, all of them in the journal.
    fn scene(saves: u64) -> (Scene, Vec<CheckpointId>) {
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().join("store").to_string_lossy().into_owned();
        let target = Target { url, endpoint: None };
        let journal = Journal::open(&folder.path().join("a.journal")).unwrap();
        let store = Store::create(&target).unwrap();
        let save = |step| {
            let id = store.save(step, &values::at(SEED, step)).unwrap().id();
            journal.note(&Event::Saved(id.to_string(), step)).unwrap();
            id
        };
        let ids = (1..=saves).map(save).collect();
        (Scene { folder, target, journal }, ids)
    }

    impl Scene {
        fn violations(&self) -> Vec<String> {
            let evidence = Evidence::read(self.folder.path()).unwrap();
            judge(&self.target, SEED, &evidence).violations
        }

        fn only_violation(&self) -> String {
            let all = self.violations();
            assert_eq!(all.len(), 1, "{all:#?}");
            all.into_iter().next().unwrap_or_default()
        }
    }

    #[test]
    fn an_honest_history_is_clean() {
        let (scene, ids) = scene(8);
        let store = Store::open(&scene.target).unwrap();
        let note = |event| scene.journal.note(&event).unwrap();
        note(Event::Rebasing(ids[3].to_string()));
        store.rebase(ids[3]).unwrap();
        note(Event::Retention(2));
        assert!(store.retain(2).unwrap() > 0);
        note(Event::Retiring(vec![ids[7].to_string()]));
        store.retire(&[ids[7]]).unwrap();
        assert_eq!(scene.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_lost_save_is_found() {
        let (scene, _) = scene(2);
        // A save that the store knows nothing of, as if its entry had been overwritten.
        let id = "0190a8b0-0000-7000-8000-000000000000";
        scene.journal.note(&Event::Saved(id.into(), 3)).unwrap();
        let found = scene.only_violation();
        assert!(found.contains("LOST") && found.contains(id) && found.contains("saved"), "{found}");
    }

    #[test]
    fn a_log_that_lost_its_end_is_found() {
        let (scene, ids) = scene(3);
        let log = scene.folder.path().join("store/log");
        let last = std::fs::read_dir(&log).unwrap().flatten().map(|e| e.path()).max().unwrap();
        std::fs::remove_file(last).unwrap();
        let found = scene.only_violation();
        assert!(found.contains("LOST") && found.contains(&ids[2].to_string()), "{found}");
    }

    #[test]
    fn wrong_values_are_found() {
        let (scene, _) = scene(2);
        let store = Store::open(&scene.target).unwrap();
        let id = store.save(3, &values::at(SEED, 4)).unwrap().id().to_string();
        let found = scene.only_violation();
        assert!(found.contains(&id) && found.contains("differs"), "{found}");
    }

    #[test]
    fn what_nobody_wanted_retired_is_found() {
        let (scene, ids) = scene(2);
        Store::open(&scene.target).unwrap().retire(&[ids[1]]).unwrap();
        assert!(scene.only_violation().contains("unasked"));
    }

    #[test]
    fn damaged_data_is_found() {
        let (scene, ids) = scene(1);
        let object = scene.folder.path().join(format!("store/ck/{}/d-0", ids[0]));
        let mut bytes = std::fs::read(&object).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&object, bytes).unwrap();
        assert!(scene.violations().iter().any(|v| v.contains("cannot be loaded")));
    }

    #[test]
    fn what_a_process_saw_counts() {
        let (scene, _) = scene(1);
        scene.journal.note(&Event::Wrong("other values".into())).unwrap();
        assert!(scene.only_violation().contains("other values"));
    }
}
