//! `s4w store`: checkpoint stores. Arguments, and what each verb calls.

mod care;
mod change;
mod look;
mod place;
mod plot;
mod repair;
mod row;
mod select;
mod svg;
mod text;
mod values;
mod verify;
mod writing;

use std::time::Duration;

use clap::Subcommand;
use s4weights::Preset;
use s4weights::store::Writers;

pub(crate) use place::Place;

use crate::Common;
use crate::error::Result;

/// The verbs.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Create a store, after trying what the place can do
    Init {
        #[command(flatten)]
        place: Place,
        /// How many processes may write: `many` at once, which a place that is not safe for that
        /// refuses; or a `single` one at a time, guarded by a lease
        #[arg(long, default_value = "many", value_name = "many|single")]
        writers: Writers,
        /// Use a network file system that is known to be unsafe
        #[arg(long)]
        allow_network_fs: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// List checkpoints, from the oldest to the newest
    Ls {
        #[command(flatten)]
        place: Place,
        /// Only the newest N
        #[arg(long, short = 'n', value_name = "N")]
        last: Option<usize>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Tell about the store, or about one checkpoint and its tensors
    Show {
        #[command(flatten)]
        place: Place,
        #[arg(value_name = "CHECKPOINT", help = select::WHICH)]
        which: Option<String>,
        /// Also the planes of each tensor, with bits for each value
        #[arg(long, requires = "which")]
        bits: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Write one checkpoint into a .s4w or .safetensors file
    Restore {
        #[command(flatten)]
        place: Place,
        #[arg(value_name = "CHECKPOINT", help = select::WHICH)]
        which: String,
        /// File or URL to write; by default `step-<STEP>.s4w`
        output: Option<String>,
        /// How much is tried to make a .s4w file smaller: fast, balanced or small
        #[arg(long, default_value = "balanced")]
        preset: Preset,
        /// As JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Look for damage: in manifests and sizes, or in everything
    Verify {
        #[command(flatten)]
        place: Place,
        /// Steps or ids; all checkpoints if there is none
        #[arg(value_name = "CHECKPOINT")]
        which: Vec<String>,
        /// Read every object, compare every hash, decode every value
        #[arg(long)]
        read_data: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Take checkpoints off the list; `gc` deletes their data later
    Retire {
        #[command(flatten)]
        place: Place,
        #[command(flatten)]
        choice: change::Choice,
        /// Why, for the log
        #[arg(long, default_value = "")]
        reason: String,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// List retired checkpoints again, and what they need, as long as `gc` has not given them up
    Unretire {
        #[command(flatten)]
        place: Place,
        /// Steps, or checkpoints' ids as `log` prints them
        #[arg(value_name = "CHECKPOINT", required = true)]
        which: Vec<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Mend a damaged log; without --apply only say what that would do, and what is lost
    Repair {
        #[command(flatten)]
        place: Place,
        /// Do it. Nothing else may use the store meanwhile
        #[arg(long)]
        apply: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Protect checkpoints from being retired
    Pin {
        #[command(flatten)]
        place: Place,
        #[arg(value_name = "CHECKPOINT", required = true, help = select::WHICH)]
        which: Vec<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// End a protection
    Unpin {
        #[command(flatten)]
        place: Place,
        #[arg(value_name = "CHECKPOINT", required = true, help = select::WHICH)]
        which: Vec<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a base of a delta, so that what it needs can be retired
    Rebase {
        #[command(flatten)]
        place: Place,
        #[arg(value_name = "CHECKPOINT", help = select::WHICH)]
        which: String,
        /// How much is tried to make it smaller: fast, balanced or small
        #[arg(long, default_value = "balanced")]
        preset: Preset,
        /// As JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Delete the data of what was retired or never published
    Gc {
        #[command(flatten)]
        place: Place,
        /// How long data stays for those who may still read it: 7d, 36h; less than a day needs
        /// --exclusive
        #[arg(long, default_value = "7d", value_parser = humantime::parse_duration)]
        grace: Duration,
        /// Nothing else uses the store now
        #[arg(long)]
        exclusive: bool,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Try whether several writers are safe at a place; no store is needed
    Probe {
        #[command(flatten)]
        place: Place,
        /// Open a store that allows one writer at a time to any number, if that is safe. Nothing may
        /// write to it meanwhile
        #[arg(long)]
        allow_many: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove the lease of a dead process from a store that allows one writer at a time
    BreakLease {
        #[command(flatten)]
        place: Place,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the log: every change that was ever made
    Log {
        #[command(flatten)]
        place: Place,
        /// From this entry on
        #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        from: u64,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Draw size and ratio of each step, and what costs most
    Plot {
        #[command(flatten)]
        place: Place,
        /// SVG file to write
        output: std::path::PathBuf,
        /// Only the newest N
        #[arg(long, short = 'n', value_name = "N", default_value_t = 200)]
        last: usize,
        /// Print the figures as JSON
        #[arg(long)]
        json: bool,
    },
}

impl Verb {
    /// Whether nothing but errors and the result is to be told.
    pub(crate) fn is_quiet(&self) -> bool {
        match self {
            Self::Restore { common, .. }
            | Self::Verify { common, .. }
            | Self::Rebase { common, .. } => common.quiet,
            _ => false,
        }
    }
}

/// Runs a verb.
pub(crate) fn execute(verb: Verb) -> Result<()> {
    match verb {
        Verb::Init { place, writers, allow_network_fs, json } => {
            care::init(&place, writers, allow_network_fs, json)
        }
        Verb::Ls { place, last, json } => look::list(&place, last, json),
        Verb::Show { place, which: None, json, .. } => look::summary(&place, json),
        Verb::Show { place, which: Some(which), bits, json } => {
            look::show(&place, &which, bits, json)
        }
        Verb::Restore { place, which, output, preset, json, common } => {
            values::restore(&place, &which, output.as_deref(), preset, json, &common)
        }
        Verb::Verify { place, which, read_data, json, common } => {
            verify::verify(&place, &which, read_data, json, &common)
        }
        Verb::Retire { place, choice, reason, dry_run, json } => {
            change::retire(&place, &choice, &reason, dry_run, json)
        }
        Verb::Unretire { place, which, json } => change::unretire(&place, &which, json),
        Verb::Repair { place, apply, json } => repair::repair(&place, apply, json),
        Verb::Pin { place, which, json } => change::pin(&place, &which, true, json),
        Verb::Unpin { place, which, json } => change::pin(&place, &which, false, json),
        Verb::Rebase { place, which, preset, json, common } => {
            values::rebase(&place, &which, preset, json, &common)
        }
        Verb::Gc { place, grace, exclusive, dry_run, json } => {
            care::gc(&place, grace, exclusive, dry_run, json)
        }
        Verb::Probe { place, allow_many, json } => writing::probe(&place, allow_many, json),
        Verb::BreakLease { place, json } => writing::break_lease(&place, json),
        Verb::Log { place, from, json } => look::log(&place, from, json),
        Verb::Plot { place, output, last, json } => plot::plot(&place, &output, last, json),
    }
}
