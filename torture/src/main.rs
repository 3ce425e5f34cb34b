//! Attacks on the checkpoint store from outside, through its public interface alone: processes that
//! are killed and paused, a network that loses requests and answers, servers that ignore conditions,
//! places that vanish. Whatever happens, the store must keep two promises: every acknowledged save is
//! there, and everything that is there has the right values.
//!
//! Every attack takes a seed and prints it. The scheduling of several processes does not repeat
//! exactly, so each violation is printed with the history of the checkpoint that it is about.
//!
//! `cargo xtask torture` starts the servers and runs this; `tests/small.rs` runs it for a minute.
#![forbid(unsafe_code)]

mod api;
mod attacks;
mod children;
mod journal;
mod judge;
mod proxy;
mod roles;
mod values;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};

use attacks::{Plan, creation, kills, liars, storm, vanish};

/// The result of the program's own work; the error says what stopped it.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Parser)]
#[command(name = "s4-torture", about = "Attacks on the checkpoint store")]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Kill a training process again and again, in folders and on servers
    Kills(Options),
    /// Four writers and a sweeper through a faulty network, killed and paused
    Proxy(Options),
    /// Create stores through a faulty network
    Creation(Options),
    /// Servers that ignore conditions, or check them first and write later
    Liars(Options),
    /// Folders and buckets that are emptied under an open writer
    Vanish(Options),
    /// All of them
    All(Options),
    #[command(hide = true)]
    Writer(roles::Args),
    #[command(hide = true)]
    Sweeper(roles::Args),
    #[command(hide = true)]
    Trainer(roles::Args),
}

#[derive(Clone, clap::Args)]
struct Options {
    /// How much: kills, operations, creations, tries of each liar
    #[arg(long)]
    rounds: Option<usize>,
    /// Seed of all random choices; a new one for each run by default
    #[arg(long)]
    seed: Option<u64>,
    /// Stop each attack after this many seconds and judge what was done by then
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
}

fn main() -> ExitCode {
    let outcome = match Args::parse().verb {
        Verb::Writer(args) => return roles::end(roles::writer(&args)),
        Verb::Sweeper(args) => return roles::end(roles::sweeper(&args)),
        Verb::Trainer(args) => return roles::end(roles::trainer(&args)),
        Verb::Kills(options) => attack(&options, &[("kills", 500, kills::run)]),
        Verb::Proxy(options) => attack(&options, &[("proxy", 5000, storm::run)]),
        Verb::Creation(options) => attack(&options, &[("creation", 500, creation::run)]),
        Verb::Liars(options) => attack(&options, &[("liars", 11, liars::run)]),
        Verb::Vanish(options) => attack(&options, &[("vanish", 10, vanish::run)]),
        Verb::All(options) => attack(
            &options,
            &[
                ("kills", 500, kills::run),
                ("proxy", 5000, storm::run),
                ("creation", 500, creation::run),
                ("liars", 11, liars::run),
                ("vanish", 10, vanish::run),
            ],
        ),
    };
    match outcome {
        Ok(0) => ExitCode::SUCCESS,
        Ok(violations) => {
            println!("FAILED: {violations} violations");
            ExitCode::FAILURE
        }
        Err(e) => {
            println!("FAILED: {e}");
            ExitCode::FAILURE
        }
    }
}

/// The most violations of one report that are printed.
const PRINTED: usize = 20;

type Attack = fn(&Plan) -> Outcome<Vec<attacks::Report>>;

/// Runs attacks one after the other. Returns the number of violations.
fn attack(options: &Options, attacks: &[(&str, usize, Attack)]) -> Outcome<usize> {
    let seed = options.seed.unwrap_or_else(fresh_seed);
    let mut violations = 0;
    for (name, rounds, run) in attacks {
        let started = Instant::now();
        let plan = Plan::new(
            seed,
            options.rounds.unwrap_or(*rounds),
            started + Duration::from_secs(options.seconds),
        )?;
        for report in run(&plan)? {
            let seconds = started.elapsed().as_secs();
            println!("{name}: {} (seed {seed}, {seconds} s)", report.line);
            for violation in report.violations.iter().take(PRINTED) {
                println!("VIOLATION in {name}, seed {seed}: {violation}");
            }
            if let Some(more) = report.violations.len().checked_sub(PRINTED + 1) {
                println!("... and {} more", more + 1);
            }
            violations += report.violations.len();
        }
    }
    Ok(violations)
}

fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().subsec_nanos().into()
}
