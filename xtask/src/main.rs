//! The project's own verbs: `cargo xtask <verb>`.
//!
//! A machine needs Rust and Python (3.10 or later, with `venv` and `pip`). Each verb installs
//! whatever else it needs, and no more, into folders of the project (`.venv`, `.venv-peers`,
//! `.venv-servers`, `.venv-lint`, `target`). Every job of CI is one of these verbs, so what fails
//! there fails here in the same way.
//!
//! Deliberately absent: knowledge of how anything is compressed. The verbs start other programs
//! and read what they print.

mod bench;
mod ci;
mod demo;
mod deploy;
mod error;
mod features;
mod fuzz;
mod kernels;
mod lint;
mod power;
mod proc;
mod python;
mod servers;
mod test;
mod tidy;
mod torture;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand};

use crate::error::Result;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "The project's own commands")]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run every test: Rust, documentation, command line, Python (builds the wheel first)
    Test(test::Args),
    /// Train a small GPT, kill it halfway, resume it, and check that not a bit differs
    Demo,
    /// Benchmark the kernels, and s4weights against its peers
    Bench(bench::Args),
    /// Compile the GPU kernels to PTX and machine code, or check that these match their sources
    Kernels(kernels::Args),
    /// Check dependencies between crates, file sizes, specifications and formatting
    Tidy,
    /// Attack the checkpoint store: kills, faulty networks, lying servers, places that vanish
    Torture(torture::Args),
    /// Run all or some of the fuzz targets, and print a summary
    Fuzz(fuzz::Args),
    /// Check the templates, units and scripts in `deploy` (needs no cloud account)
    Deploy(deploy::Args),
    /// Kill a store's process at its system calls, and simulate power cuts between them
    Power(power::Args),
    /// Run everything that must pass before a merge, cheapest first, as CI does
    Ci,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let started = Instant::now();
    let root = root();
    let (name, outcome) = match &args.verb {
        Verb::Test(args) => ("test", test::run(&root, args)),
        Verb::Demo => ("demo", demo::run(&root)),
        Verb::Bench(args) => ("bench", bench::run(&root, args)),
        Verb::Kernels(args) => ("kernels", kernels::run(&root, args)),
        Verb::Tidy => ("tidy", tidy::run(&root)),
        Verb::Torture(args) => ("torture", torture::run(&root, args)),
        Verb::Fuzz(args) => ("fuzz", fuzz::run(&root, args)),
        Verb::Deploy(args) => ("deploy", deploy::run(&root, args)),
        Verb::Power(args) => ("power", power::run(&root, args)),
        Verb::Ci => ("ci", ci::run(&root)),
    };
    finish(name, outcome, started)
}

/// Prints the verb's last line, and turns the outcome into an exit code.
fn finish(verb: &str, outcome: Result<String>, started: Instant) -> ExitCode {
    let seconds = started.elapsed().as_secs();
    match outcome {
        Ok(summary) => {
            println!("xtask {verb}: ok in {seconds} s: {summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("xtask {verb}: FAILED after {seconds} s: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's root: the parent of this package's folder.
fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}
