//! `init`, `probe`, `verify`, `gc`: the care of a store.

use std::time::Duration;

use s4weights::store::{
    CheckOptions, CheckReport, Checkpoint, CheckpointStore, Mode, StoreOptions, SweepOptions,
    SweepReport, Swept, Why, Writers,
};
use serde::Serialize;

use super::row::stored;
use super::{Place, select, text};
use crate::error::{Failure, Result};
use crate::progress::Bar;
use crate::{Common, say, to_json};

/// What a store's mode means.
pub(crate) fn writers(mode: Mode) -> &'static str {
    match mode {
        Mode::Many => "any number at once",
        Mode::Single => "ONE AT A TIME: the server cannot refuse a second create of one object",
    }
}

/// `init`
pub(crate) fn init(place: &Place, many: bool, network: bool, json: bool) -> Result<()> {
    let mut options = StoreOptions::default();
    options.requests.writers = if many { Writers::Many } else { Writers::ManyIfPossible };
    options.requests.allow_network_fs = network;
    let store = CheckpointStore::create(&place.store, &place.storage()?, options)?;
    if json {
        return say(&to_json(store.repo())?);
    }
    say(&format!("{}: store created; writers: {}", store.name(), writers(store.repo().mode)))
}

/// `probe`
pub(crate) fn probe(place: &Place, json: bool) -> Result<()> {
    let report = CheckpointStore::probe(&place.store, &place.storage()?)?;
    if json {
        say(&to_json(&report)?)?;
    }
    let name = place.store.split(['?', '#']).next().unwrap_or_default();
    if !report.many_writers() {
        return Err(Failure::Test(format!(
            "{name}: several writers are not safe there: {}; a store would be marked for one writer \
             at a time",
            report.detail
        )));
    }
    if json {
        return Ok(());
    }
    say(&format!(
        "{name}: several writers are safe: a second create was refused, and {} races of 16 had one \
         winner at most",
        report.rounds
    ))
}

#[derive(Serialize, Default)]
struct Verified {
    sound: bool,
    checkpoints: usize,
    objects: u64,
    bytes_read: u64,
    findings: Vec<Found>,
    unusable: Vec<Unusable>,
}

#[derive(Serialize)]
struct Found {
    step: Option<u64>,
    what: String,
}

#[derive(Serialize, PartialEq)]
struct Unusable {
    step: Option<u64>,
    because_of_step: Option<u64>,
}

/// `verify`
pub(crate) fn verify(
    place: &Place,
    which: &[String],
    read_data: bool,
    json: bool,
    common: &Common,
) -> Result<()> {
    let options = StoreOptions { threads: common.threads, simd: common.simd, ..Default::default() };
    let store = place.open_with(options)?;
    let state = store.state()?;
    let wanted = match which.is_empty() {
        true => state.list().into_iter().cloned().collect(),
        false => select::find_all(store.name(), &state, which)?,
    };
    let mut total = Verified::default();
    let step = |id| state.get(id).map(Checkpoint::step);
    // One by one where that takes long, for the sake of the bar.
    let size = if read_data { 1 } else { wanted.len().max(1) };
    let bar = Bar::new(common.quiet);
    bar.expect(wanted.iter().map(stored).sum());
    for some in wanted.chunks(size) {
        let only = some.iter().map(Checkpoint::id).collect();
        let options = CheckOptions { read_data, only, ..CheckOptions::default() };
        total.add(store.check(&options)?, step);
        bar.add(some.iter().map(stored).sum());
    }
    drop(bar);
    total.sound = total.findings.is_empty() && total.unusable.is_empty();
    if json {
        say(&to_json(&total)?)?;
    } else {
        say(&total.as_text(store.name(), read_data))?;
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
    fn add(
        &mut self,
        report: CheckReport,
        step: impl Fn(s4weights::store::CheckpointId) -> Option<u64>,
    ) {
        self.checkpoints += report.checkpoints;
        self.objects += report.objects;
        self.bytes_read += report.bytes_read;
        let found = |f: s4weights::store::Finding| Found {
            step: f.checkpoint.and_then(&step),
            what: f.error.to_string(),
        };
        self.findings.extend(report.findings.into_iter().map(found));
        for (id, because) in report.unusable {
            let one = Unusable { step: step(id), because_of_step: step(because) };
            if !self.unusable.contains(&one) {
                self.unusable.push(one);
            }
        }
    }

    fn as_text(&self, store: &str, read_data: bool) -> String {
        let named = |step: Option<u64>| step.map_or("?".into(), |s| s.to_string());
        let mut lines: Vec<String> = vec![];
        for f in &self.findings {
            lines.push(format!("DAMAGED   step {}: {}", named(f.step), f.what));
        }
        for u in &self.unusable {
            let (step, other) = (named(u.step), named(u.because_of_step));
            lines.push(format!("UNUSABLE  step {step}: it needs step {other}"));
        }
        let read = match read_data {
            true => format!("{} read, every value decoded", text::bytes(self.bytes_read)),
            false => "manifests and sizes only; --read-data reads everything".into(),
        };
        let verdict = if self.sound { "sound" } else { "NOT SOUND" };
        let checkpoints = text::count(self.checkpoints, "checkpoint");
        let objects = text::count(usize::try_from(self.objects).unwrap_or(usize::MAX), "object");
        lines.push(format!("{store}: {verdict}: {checkpoints}, {objects} ({read})"));
        lines.join("\n")
    }
}

#[derive(Serialize)]
struct SweptJson<'a> {
    what: &'a str,
    bytes: u64,
    why: &'static str,
}

#[derive(Serialize)]
struct Collected<'a> {
    dry_run: bool,
    deleted_bytes: u64,
    deleted: Vec<SweptJson<'a>>,
    given_up: Vec<SweptJson<'a>>,
    waiting: Vec<SweptJson<'a>>,
    failed: &'a [(String, String)],
    foreign: &'a [String],
}

/// `gc`
pub(crate) fn gc(
    place: &Place,
    grace: Duration,
    exclusive: bool,
    dry_run: bool,
    json: bool,
) -> Result<()> {
    let store = place.open()?;
    let report = store.sweep(&SweepOptions { grace, exclusive, dry_run })?;
    say(&match json {
        true => to_json(&Collected::new(dry_run, &report))?,
        false => collected(store.name(), dry_run, &report),
    })?;
    match report.failed.first() {
        None => Ok(()),
        Some((what, error)) => Err(Failure::NotFound(format!(
            "{}: could not delete {}, {what} for one: {error}; the next gc tries again",
            store.name(),
            text::count(report.failed.len(), "thing")
        ))),
    }
}

impl<'a> Collected<'a> {
    fn new(dry_run: bool, report: &'a SweepReport) -> Self {
        Self {
            dry_run,
            deleted_bytes: report.deleted_bytes(),
            deleted: each(&report.deleted),
            given_up: each(&report.aborted),
            waiting: each(&report.waiting),
            failed: &report.failed,
            foreign: &report.foreign,
        }
    }
}

fn each(all: &[Swept]) -> Vec<SweptJson<'_>> {
    all.iter().map(|s| SweptJson { what: &s.what, bytes: s.bytes, why: why(s.why) }).collect()
}

fn collected(store: &str, dry_run: bool, report: &SweepReport) -> String {
    let (delete, give_up) = match dry_run {
        true => ("would delete", "would give up"),
        false => ("deleted", "gave up"),
    };
    let line = |verb: &str, s: &Swept| {
        format!("{verb}: {} ({}, {})", s.what, text::bytes(s.bytes), why(s.why))
    };
    let mut lines: Vec<String> = report.deleted.iter().map(|s| line(delete, s)).collect();
    lines.extend(report.aborted.iter().map(|s| line(give_up, s)));
    lines.extend(report.waiting.iter().map(|s| line("keeps for now", s)));
    lines.extend(report.foreign.iter().map(|key| format!("none of ours: {key}")));
    let waiting: u64 = report.waiting.iter().map(|s| s.bytes).sum();
    lines.push(format!(
        "{store}: {delete} {} ({}); {} ({}) wait for their grace to end",
        text::count(report.deleted.len(), "thing"),
        text::bytes(report.deleted_bytes()),
        report.waiting.len(),
        text::bytes(waiting)
    ));
    lines.join("\n")
}

fn why(why: Why) -> &'static str {
    match why {
        Why::Retired => "retired",
        Why::Replaced => "replaced by a base",
        Why::Aborted => "given up before it was published",
        Why::Orphan => "never published; the next gc deletes it",
        Why::Leftover => "left behind by a killed process",
        Why::TooYoung => "too young",
        _ => "for another reason",
    }
}
