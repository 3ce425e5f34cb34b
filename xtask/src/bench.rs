//! `cargo xtask bench`.

mod kernels;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::proc;
use crate::python::Venv;

/// Where results are written, below the workspace's root.
const RESULTS: &str = "benches/results";

/// What to measure, and on what.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder whose *.safetensors files the peers are measured on
    #[arg(long, default_value = "testdata")]
    data: PathBuf,
    /// Threads that every peer may use
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// How often each measurement is repeated; the best counts
    #[arg(long, default_value_t = 5)]
    repeat: usize,
    /// Measure one part only
    #[arg(long, value_enum)]
    only: Option<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Kernels,
    Peers,
}

/// Measures, prints the tables, and keeps them under `benches/results`.
///
/// # Errors
/// If a build fails, or a peer returns other bytes than it was given.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    let data = std::path::absolute(&args.data).map_err(|e| Error::at(&args.data, &e))?;
    if args.only != Some(Part::Peers) {
        kernels::run(root, &root.join(RESULTS))?;
    }
    if args.only != Some(Part::Kernels) {
        peers(root, args, &data)?;
    }
    Ok(format!("results are in {RESULTS}"))
}

/// Every peer on the same bytes, in one process of one environment.
fn peers(root: &Path, args: &Args, data: &Path) -> Result<()> {
    let main = Venv::main(root)?;
    main.install_wheel()?;
    let (venv, missing) = Venv::peers(root, &main)?;
    let mut bench = proc::command(root, venv.python());
    bench.arg("benches/peers.py").arg("--data").arg(data).args(["--out", RESULTS]);
    bench.args(["--threads", &args.threads.to_string()]);
    bench.args(["--repeat", &args.repeat.to_string()]);
    for package in &missing {
        bench.args(["--not-installable", package]);
    }
    proc::run(&mut bench)
}
