//! `s4w store`: checkpoint stores. Arguments, and what each verb calls.

mod args;
mod gc;
mod init;
mod log;
mod ls;
mod pin;
mod plot;
mod repair;
mod retire;
mod row;
mod select;
mod show;
mod svg;
pub(crate) mod text;
mod unretire;
mod values;
mod verify;
mod writing;

use std::time::Duration;

use clap::Subcommand;
use s4weights::Preset;
use s4weights::store::Writers;

pub(crate) use args::StoreArgs;

use crate::error::Result;
use crate::{Common, Overwrite, at_least_one};

/// The verbs.
#[derive(Subcommand)]
pub(crate) enum Verb {
    /// Create a store, after checking that the place is suitable
    Init {
        #[command(flatten)]
        args: StoreArgs,
        /// How many processes may write at once: `many` (refused if the place does not allow it safely), or
        /// a `single` one, guarded by a lease
        #[arg(long, default_value = "many", value_name = "many|single")]
        writers: Writers,
        /// Allow a network file system that is known to be unsafe
        #[arg(long)]
        allow_network_fs: bool,
    },
    /// List checkpoints, oldest first
    Ls {
        #[command(flatten)]
        args: StoreArgs,
        /// List only the newest N
        #[arg(long, short = 'n', value_name = "N", value_parser = at_least_one)]
        last: Option<usize>,
    },
    /// Describe the store, or one checkpoint and its tensors
    Show {
        #[command(flatten)]
        args: StoreArgs,
        #[arg(value_name = "CHECKPOINT", help = select::WHICH)]
        which: Option<String>,
        /// Also show the planes of each tensor, with bits per value
        #[arg(long, requires = "which")]
        bits: bool,
    },
    /// Restore a checkpoint to a .s4w or .safetensors file
    Restore {
        #[command(flatten)]
        args: StoreArgs,
        #[arg(value_name = "CHECKPOINT", help = select::WHICH)]
        which: String,
        /// File or URL to write; by default `step-<STEP>.s4w`
        #[arg(value_parser = crate::place)]
        output: Option<String>,
        /// How hard to compress a .s4w file: fast, balanced or small
        #[arg(long, default_value = "balanced")]
        preset: Preset,
        #[command(flatten)]
        overwrite: Overwrite,
        #[command(flatten)]
        common: Common,
    },
    /// Check manifests and sizes, or all data with --read-data
    Verify {
        #[command(flatten)]
        args: StoreArgs,
        /// Steps or ids; by default all checkpoints
        #[arg(value_name = "CHECKPOINT")]
        which: Vec<String>,
        /// Read every object, check every hash and decode every value
        #[arg(long)]
        read_data: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Take checkpoints off the list; `gc` deletes their data later
    Retire {
        #[command(flatten)]
        args: StoreArgs,
        #[command(flatten)]
        choice: retire::Choice,
        /// Reason to record in the log
        #[arg(long, default_value = "")]
        reason: String,
        /// Print what would be retired, without retiring it
        #[arg(long)]
        dry_run: bool,
    },
    /// Put retired checkpoints back on the list, with the checkpoints that they need, unless `gc` has
    /// given them up
    Unretire {
        #[command(flatten)]
        args: StoreArgs,
        /// Steps, or checkpoint ids as printed by `log`
        #[arg(value_name = "CHECKPOINT", required = true)]
        which: Vec<String>,
    },
    /// Repair a damaged log; without --apply, only report what would be changed and lost
    Repair {
        #[command(flatten)]
        args: StoreArgs,
        /// Make the changes. Nothing else may use the store at the same time
        #[arg(long)]
        apply: bool,
    },
    /// Protect checkpoints from being retired
    Pin {
        #[command(flatten)]
        args: StoreArgs,
        #[arg(value_name = "CHECKPOINT", required = true, help = select::WHICH)]
        which: Vec<String>,
    },
    /// Undo `pin`
    Unpin {
        #[command(flatten)]
        args: StoreArgs,
        #[arg(value_name = "CHECKPOINT", required = true, help = select::WHICH)]
        which: Vec<String>,
    },
    /// Rewrite a delta as a base, so that the checkpoints it needed can be retired
    Rebase {
        #[command(flatten)]
        args: StoreArgs,
        #[arg(value_name = "CHECKPOINT", help = select::WHICH)]
        which: String,
        /// How hard to compress: fast, balanced or small
        #[arg(long, default_value = "balanced")]
        preset: Preset,
        #[command(flatten)]
        common: Common,
    },
    /// Delete data of checkpoints that were retired or never published
    Gc {
        #[command(flatten)]
        args: StoreArgs,
        /// How long to keep data that others may still be reading, such as 7d or 36h; less than a day needs
        /// --exclusive
        #[arg(long, default_value = "7d", value_parser = humantime::parse_duration)]
        grace: Duration,
        /// Promise that nothing else is using the store
        #[arg(long)]
        exclusive: bool,
        /// Print what would be deleted, without deleting it
        #[arg(long)]
        dry_run: bool,
    },
    /// Test whether a place is safe for several writers; no store is needed
    Probe {
        #[command(flatten)]
        args: StoreArgs,
        /// Change a store for one writer at a time to allow any number, if that is safe. Nothing may write
        /// to it at the same time
        #[arg(long)]
        allow_many: bool,
    },
    /// Remove the lease that a dead process left in a store for one writer at a time
    BreakLease {
        #[command(flatten)]
        args: StoreArgs,
    },
    /// Print the log: every change ever made
    Log {
        #[command(flatten)]
        args: StoreArgs,
        /// Start at this entry
        #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        from: u64,
    },
    /// Plot the size and ratio of each checkpoint, and the tensors that take the most space
    Plot {
        #[command(flatten)]
        args: StoreArgs,
        /// SVG file to write
        output: std::path::PathBuf,
        /// Plot only the newest N
        #[arg(long, short = 'n', value_name = "N", default_value_t = 200, value_parser = at_least_one)]
        last: usize,
    },
}

impl Verb {
    /// Whether only errors and the result are printed.
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
        Verb::Init { args, writers, allow_network_fs } => {
            init::init(&args, writers, allow_network_fs)
        }
        Verb::Ls { args, last } => ls::ls(&args, last),
        Verb::Show { args, which: None, .. } => show::summary(&args),
        Verb::Show { args, which: Some(which), bits } => show::show(&args, &which, bits),
        Verb::Restore { args, which, output, preset, overwrite, common } => {
            let output = values::Output { name: output.as_deref(), preset, force: overwrite.force };
            values::restore(&args, &which, &output, &common)
        }
        Verb::Verify { args, which, read_data, common } => {
            verify::verify(&args, &which, read_data, &common)
        }
        Verb::Retire { args, choice, reason, dry_run } => {
            retire::retire(&args, &choice, &reason, dry_run)
        }
        Verb::Unretire { args, which } => unretire::unretire(&args, &which),
        Verb::Repair { args, apply } => repair::repair(&args, apply),
        Verb::Pin { args, which } => pin::pin(&args, &which, true),
        Verb::Unpin { args, which } => pin::pin(&args, &which, false),
        Verb::Rebase { args, which, preset, common } => {
            values::rebase(&args, &which, preset, &common)
        }
        Verb::Gc { args, grace, exclusive, dry_run } => gc::gc(&args, grace, exclusive, dry_run),
        Verb::Probe { args, allow_many } => writing::probe(&args, allow_many),
        Verb::BreakLease { args } => writing::break_lease(&args),
        Verb::Log { args, from } => log::log(&args, from),
        Verb::Plot { args, output, last } => plot::plot(&args, &output, last),
    }
}
