//! `gc`: deletes data that no listed checkpoint needs.

use std::time::Duration;

use s4weights::store::{StoreOptions, SweepOptions, SweepReport, Swept, Why};
use serde::Serialize;

use super::{StoreArgs, text};
use crate::error::{Failure, Result};
use crate::visible::name;
use crate::{say, to_json};

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
pub(crate) fn gc(args: &StoreArgs, grace: Duration, exclusive: bool, dry_run: bool) -> Result<()> {
    let store = match dry_run {
        true => args.open_to_read(StoreOptions::default())?,
        false => args.open()?,
    };
    let report = store.sweep(&SweepOptions { grace, exclusive, dry_run })?;
    say(&match args.json {
        true => to_json(&Collected::new(dry_run, &report))?,
        false => collected(store.name(), dry_run, &report),
    })?;
    match report.failed.first() {
        None => Ok(()),
        Some((what, error)) => Err(Failure::NotFound(format!(
            "{}: could not delete {}, such as {what}: {error}; the next gc will try again",
            store.name(),
            text::count(report.failed.len(), "item")
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
        format!("{verb}: {} ({}, {})", name(&s.what), text::bytes(s.bytes), why(s.why))
    };
    let mut lines: Vec<String> = report.deleted.iter().map(|s| line(delete, s)).collect();
    lines.extend(report.aborted.iter().map(|s| line(give_up, s)));
    lines.extend(report.waiting.iter().map(|s| line("kept for now", s)));
    lines.extend(report.foreign.iter().map(|key| format!("not part of this store: {}", name(key))));
    let waiting: u64 = report.waiting.iter().map(|s| s.bytes).sum();
    lines.push(format!(
        "{store}: {delete} {} ({}); {} ({}) still in the grace period",
        text::count(report.deleted.len(), "item"),
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
        Why::Aborted => "given up",
        Why::Orphan => "never published; the next gc deletes it",
        Why::Leftover => "left behind by a killed process",
        Why::TooYoung => "too young",
        _ => "for another reason",
    }
}
