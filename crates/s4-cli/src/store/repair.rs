//! `repair`: repairs a damaged log.

use s4weights::redact_url;
use s4weights::store::{CheckpointStore, Loss, RepairReport, StoreOptions};
use serde::Serialize;

use super::{StoreArgs, text};
use crate::error::Result;
use crate::{say, to_json};

#[derive(Serialize)]
struct Repair<'a> {
    applied: bool,
    damage: Vec<String>,
    /// Steps that are listed afterwards.
    listed: Vec<u64>,
    losses: &'a [Loss],
    rewritten: usize,
    reconstructed: &'a [u64],
    fenced: &'a [u64],
    removed: &'a [u64],
    unnamed: Vec<Unnamed>,
    aside: Option<&'a str>,
}

#[derive(Serialize)]
struct Unnamed {
    id: String,
    bytes: u64,
}

/// `repair`
pub(crate) fn repair(args: &StoreArgs, apply: bool) -> Result<()> {
    let options = args.options(StoreOptions::default());
    let report = CheckpointStore::repair(&args.store, &args.storage()?, options, apply)?;
    let unnamed = |(id, bytes): (&s4weights::store::CheckpointId, &u64)| Unnamed {
        id: id.to_string(),
        bytes: *bytes,
    };
    if args.json {
        return say(&to_json(&Repair {
            applied: report.aside.is_some(),
            damage: report.damage.iter().map(ToString::to_string).collect(),
            listed: report.listed.iter().map(s4weights::store::Checkpoint::step).collect(),
            losses: &report.losses,
            rewritten: report.rewritten.len(),
            reconstructed: &report.reconstructed,
            fenced: &report.fenced,
            removed: &report.removed,
            unnamed: report.unnamed.iter().map(unnamed).collect(),
            aside: report.aside.as_deref(),
        })?);
    }
    say(&as_text(&redact_url(&args.store), &report))
}

fn as_text(name: &str, report: &RepairReport) -> String {
    if report.damage.is_empty() {
        return format!("{name}: the log is intact; nothing to repair");
    }
    let mut lines: Vec<String> = report.damage.iter().map(|d| format!("DAMAGED  {d}")).collect();
    for loss in &report.losses {
        let what = match (loss.step, loss.checkpoint) {
            (Some(step), Some(id)) => format!("step {step} ({id})"),
            _ => format!("the contents of entry {}", loss.entry),
        };
        lines.push(format!("LOST     {what}: {}", loss.why));
    }
    for (id, bytes) in &report.unnamed {
        let bytes = text::bytes(*bytes);
        lines.push(format!("UNNAMED  checkpoint {id}: {bytes} of data that no entry names"));
    }
    let steps: Vec<_> = report.listed.iter().map(|c| c.step().to_string()).collect();
    let steps = if steps.is_empty() { "none".to_owned() } else { steps.join(", ") };
    let tied = report.rewritten.len() + report.reconstructed.len();
    let entries = format!(
        "entries rewritten: {tied} ({} of them from the stored view or later entries); left without effect: \
         {}; removed: {}",
        report.reconstructed.len(),
        report.fenced.len(),
        report.removed.len()
    );
    match &report.aside {
        Some(aside) => {
            lines.push(format!("{name}: repaired: {entries}"));
            lines.push(format!("the original entries are kept under {aside}"));
            lines.push(format!("listed: steps {steps}"));
            lines.push(
                "run `s4w store verify --read-data` to see which of them can be restored".into(),
            );
        }
        None => {
            lines.push(format!("{name}: would repair: {entries}"));
            lines.push(format!("listed: steps {steps}"));
            lines.push(
                "nothing was changed; to repair, use --apply while nothing else uses the store"
                    .into(),
            );
        }
    }
    lines.join("\n")
}
