//! `verify`: looks for damage, and says what restores.

use std::collections::BTreeMap;

use s4weights::store::{
    CheckOptions, CheckReport, Checkpoint, CheckpointId, Loss, State, StoreOptions, Verdict,
};
use serde::Serialize;

use super::{StoreArgs, select, text};
use crate::error::{Failure, Result};
use crate::progress::Bar;
use crate::{Common, say, to_json};

#[derive(Serialize)]
struct Verified {
    sound: bool,
    checkpoints: usize,
    objects: u64,
    bytes_read: u64,
    findings: Vec<Found>,
    unusable: Vec<Unusable>,
    /// Together with `does_not_restore`: each checkpoint that was asked for, once.
    restores: Vec<Named>,
    does_not_restore: Vec<Named>,
    /// Losses from damage to the log: steps if they are known, else the content of log entries.
    lost: Vec<Loss>,
    /// Data that no entry of the log names: perhaps of lost steps.
    unnamed: Vec<Unnamed>,
}

#[derive(Serialize)]
struct Found {
    step: Option<u64>,
    what: String,
}

#[derive(Serialize)]
struct Unusable {
    step: Option<u64>,
    because_of_step: Option<u64>,
}

#[derive(Serialize)]
struct Named {
    step: u64,
    id: CheckpointId,
}

#[derive(Serialize)]
struct Unnamed {
    id: CheckpointId,
    bytes: u64,
}

/// `verify`
pub(crate) fn verify(
    args: &StoreArgs,
    which: &[String],
    read_data: bool,
    common: &Common,
) -> Result<()> {
    let options = StoreOptions { threads: common.threads, simd: common.simd, ..Default::default() };
    let store = args.open_to_read(options)?;
    let state = store.state()?;
    let wanted = select::find_all(store.name(), &state, which)?;
    let bar = Bar::new(common.quiet);
    bar.expect(state.list().iter().map(|c| c.about.data_len).sum());
    let only = wanted.iter().map(Checkpoint::id).collect();
    let report = store.check(&CheckOptions { read_data, only, progress: bar.callback() })?;
    drop(bar);
    let total = Verified::new(&state, &report);
    match args.json {
        true => say(&to_json(&total)?)?,
        false => say(&total.as_text(store.name(), read_data))?,
    }
    match total.sound {
        true => Ok(()),
        false => Err(Failure::Test(format!(
            "{}: {}",
            store.name(),
            text::count(total.findings.len(), "damaged part")
        ))),
    }
}

impl Verified {
    fn new(state: &State, report: &CheckReport) -> Self {
        let step = |id: CheckpointId| state.get(id).map(Checkpoint::step);
        let found = |f: &s4weights::store::Finding| Found {
            step: f.checkpoint.and_then(step),
            what: f.error.to_string(),
        };
        let unusable = |(id, because): &(CheckpointId, CheckpointId)| Unusable {
            step: step(*id),
            because_of_step: step(*because),
        };
        let (restores, does_not): (Vec<_>, Vec<_>) =
            report.verdicts.iter().partition(|(_, verdict)| *verdict == Verdict::Restores);
        let named = |list: Vec<&(CheckpointId, Verdict)>| {
            let one = |(id, _): &(CheckpointId, Verdict)| Some(Named { step: step(*id)?, id: *id });
            list.into_iter().filter_map(one).collect()
        };
        let repair = report.repair.clone().unwrap_or_default();
        let unnamed = repair.unnamed.into_iter().map(|(id, bytes)| Unnamed { id, bytes });
        Self {
            sound: report.is_clean(),
            checkpoints: report.checkpoints,
            objects: report.objects,
            bytes_read: report.bytes_read,
            findings: report.findings.iter().map(found).collect(),
            unusable: report.unusable.iter().map(unusable).collect(),
            restores: named(restores),
            does_not_restore: named(does_not),
            lost: repair.losses,
            unnamed: unnamed.collect(),
        }
    }

    fn as_text(&self, store: &str, read_data: bool) -> String {
        let mut lines: Vec<String> = vec![];
        for f in &self.findings {
            let what = f.step.map_or("the log".into(), |step| format!("step {step}"));
            lines.push(format!("DAMAGED   {what}: {}", f.what));
        }
        let named = |step: Option<u64>| step.map_or("?".into(), |s| s.to_string());
        for u in &self.unusable {
            let (step, other) = (named(u.step), named(u.because_of_step));
            lines.push(format!("UNUSABLE  step {step}: needs step {other}"));
        }
        let read = match read_data {
            true => format!("{} read, every value decoded", text::bytes(self.bytes_read)),
            false => "manifests and sizes only; --read-data reads everything".into(),
        };
        let verdict = if self.sound { "sound" } else { "NOT SOUND" };
        let checkpoints = text::count(self.checkpoints, "checkpoint");
        let objects = text::count(usize::try_from(self.objects).unwrap_or(usize::MAX), "object");
        lines.push(format!("{store}: {verdict}: {checkpoints}, {objects} ({read})"));
        if !self.sound {
            lines.push(format!("restores: {}", steps(&self.restores)));
            // Of what the log has lost, no step may be known.
            let is_all = self.lost.is_empty() && self.unnamed.is_empty();
            let none = if is_all { "no step" } else { "no listed step" };
            let bad = Some(&self.does_not_restore).filter(|bad| !bad.is_empty());
            lines.push(format!("does NOT restore: {}", bad.map_or(none.into(), |bad| steps(bad))));
            lines.extend(self.lost_as_text());
        }
        lines.join("\n")
    }

    /// What is lost with the log, and what cannot be known.
    fn lost_as_text(&self) -> Vec<String> {
        let (mut lost, mut unknown) = (vec![], vec![]);
        for loss in &self.lost {
            match (loss.step, loss.checkpoint) {
                (Some(step), Some(id)) => lost.push(format!("{step} ({id}): {}", loss.why)),
                _ => unknown.push(format!("the contents of entry {}", loss.entry)),
            }
        }
        for data in &self.unnamed {
            let bytes = text::bytes(data.bytes);
            unknown.push(format!("the step of {} ({bytes} that no entry names)", data.id));
        }
        let mut lines = vec![];
        if !lost.is_empty() {
            lines.push(format!("lost from the log: {}", lost.join("; ")));
        }
        if !unknown.is_empty() {
            lines.push(format!("NOT KNOWN: {}", unknown.join("; ")));
        }
        lines
    }
}

/// Steps as text, with the id where several checkpoints have the same step.
fn steps(list: &[Named]) -> String {
    let mut times: BTreeMap<u64, usize> = BTreeMap::new();
    list.iter().for_each(|named| *times.entry(named.step).or_default() += 1);
    let one = |named: &Named| match times[&named.step] {
        1 => named.step.to_string(),
        _ => format!("{} ({})", named.step, named.id),
    };
    match list.is_empty() {
        true => "no step".into(),
        false => list.iter().map(one).collect::<Vec<_>>().join(", "),
    }
}
