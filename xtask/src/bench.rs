//! `cargo xtask bench`.

mod kernels;

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::proc;
use crate::python::Venv;

/// Where results are written, below the workspace's root.
const RESULTS: &str = "benches/results";

/// The marks around the figures in README.md.
const MARKS: [&str; 2] = ["<!-- figures -->", "<!-- end of figures -->"];

/// What to measure, and on what.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder of the *.safetensors files to measure the peers with
    #[arg(long, default_value = "testdata")]
    data: PathBuf,
    /// Number of threads for each peer
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Number of repetitions of each measurement; the best counts
    #[arg(long, default_value_t = 5)]
    repeat: usize,
    /// Write the summary to README.md, between its two markers
    #[arg(long)]
    readme: bool,
    /// Measure only one part
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Measure only the CUDA engine, and saves and loads of GPU tensors if PyTorch has a device; fails
    /// without a device
    #[arg(long, conflicts_with_all = ["only", "readme"])]
    gpu: bool,
    /// Measure only ratios by preset, of single checkpoints and deltas (`NAME_s0.safetensors`,
    /// `NAME_sK.safetensors`)
    #[arg(long, conflicts_with_all = ["only", "readme", "gpu"])]
    ratio: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Kernels,
    Peers,
    Calls,
}

/// Measures, prints the tables, and keeps them under `benches/results`.
///
/// # Errors
/// If a build fails, or a peer returns other bytes than it was given.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    let data = std::path::absolute(&args.data).map_err(|e| Error::at(&args.data, &e))?;
    if args.gpu {
        return gpu(root, &data);
    }
    if args.ratio {
        return ratio(root, args, &data);
    }
    let wanted = |part| args.only.is_none_or(|only| only == part);
    if wanted(Part::Kernels) {
        kernels::run(root, &root.join(RESULTS))?;
    }
    if wanted(Part::Peers) {
        peers(root, args, &data)?;
    }
    if wanted(Part::Calls) {
        calls(root, args, &data)?;
    }
    if args.readme {
        update_readme(root)?;
    }
    Ok(format!("results are in {RESULTS}"))
}

/// Succeeds where PyTorch sees a CUDA device.
const CUDA_PROBE: &str = "import sys, torch; sys.exit(not torch.cuda.is_available())";

/// The CUDA engine, and nvCOMP if its library is found: one program, one run. Then whole paths from
/// Python, if its PyTorch sees the device.
fn gpu(root: &Path, data: &Path) -> Result<String> {
    let mut bench = proc::cargo(root);
    bench.args(["run", "--release", "--locked", "-p", "s4-benches", "--bin", "gpu", "--"]);
    bench.arg("--data").arg(data).args(["--out", RESULTS]);
    proc::run(&mut bench)?;
    let paths = match gpu_paths(root)? {
        None => format!("and {RESULTS}/gpu_paths.{{json,md,svg}}"),
        Some(why) => format!("benches/gpu_paths.py was not run: {why}"),
    };
    Ok(format!("results are in {RESULTS}/gpu.{{json,md,svg}}; {paths}"))
}

/// Ratios and speeds of the presets, as a table.
fn ratio(root: &Path, args: &Args, data: &Path) -> Result<String> {
    let mut bench = proc::cargo(root);
    bench.args(["run", "--release", "--locked", "-p", "s4-benches", "--bin", "ratio", "--"]);
    bench.arg("--data").arg(data).args(["--threads", &args.threads.to_string(), "--markdown"]);
    let table = proc::output(&mut bench)?;
    let path = root.join(RESULTS).join("ratio.md");
    fs::write(&path, &table).map_err(|e| Error::at(&path, &e))?;
    Ok(format!("{table}\nwritten to {RESULTS}/ratio.md"))
}

/// Saves and loads of GPU tensors, compared with those of torch and others; returns why they were
/// not measured, if so.
fn gpu_paths(root: &Path) -> Result<Option<String>> {
    let venv = match Venv::main(root) {
        Ok(venv) => venv,
        Err(e) => return Ok(Some(e.to_string())),
    };
    let mut probe = proc::command(root, venv.python());
    if proc::output(probe.args(["-c", CUDA_PROBE])).is_err() {
        return Ok(Some("PyTorch in .venv finds no CUDA device".into()));
    }
    venv.install_wheel()?;
    let mut bench = proc::command(root, venv.python());
    bench.args(["benches/gpu_paths.py", "--out", RESULTS]);
    proc::run(&mut bench)?;
    Ok(None)
}

/// Replaces the text between the marks in README.md with the newest summary.
fn update_readme(root: &Path) -> Result<()> {
    let (readme, summary) = (root.join("README.md"), root.join(RESULTS).join("summary.md"));
    let read = |path: &Path| fs::read_to_string(path).map_err(|e| Error::at(path, &e));
    let text = between(&read(&readme)?, &read(&summary)?).ok_or_else(|| {
        Error::new(format!("README.md must contain {MARKS:?}, each once, in this order"))
    })?;
    fs::write(&readme, text).map_err(|e| Error::at(&readme, &e))
}

fn between(text: &str, new: &str) -> Option<String> {
    let (before, rest) = text.split_once(MARKS[0])?;
    let (_, after) = rest.split_once(MARKS[1])?;
    Some(format!("{before}{}\n{new}{}{after}", MARKS[0], MARKS[1]))
}

/// Every peer on the same bytes, in one process of one environment.
fn peers(root: &Path, args: &Args, data: &Path) -> Result<()> {
    let main = Venv::main(root)?;
    main.install_wheel()?;
    let (venv, missing) = Venv::peers(root, &main)?;
    let mut bench = proc::command(root, venv.python());
    // ZipNN still uses a deprecated part of torch.
    bench.args(["-W", "ignore::FutureWarning", "benches/peers.py"]);
    bench.arg("--data").arg(data).args(["--out", RESULTS]);
    bench.args(["--threads", &args.threads.to_string()]);
    bench.args(["--repeat", &args.repeat.to_string()]);
    for package in &missing {
        bench.args(["--not-installable", package]);
    }
    proc::run(&mut bench)
}

/// The calls that users make, compared with torch, safetensors and ZipNN: with one thread, two and
/// all.
fn calls(root: &Path, args: &Args, data: &Path) -> Result<()> {
    let main = Venv::main(root)?;
    main.install_wheel()?;
    let (venv, _) = Venv::peers(root, &main)?;
    let mut bench = proc::command(root, venv.python());
    bench.args(["-W", "ignore::FutureWarning", "benches/calls.py"]);
    bench.arg("--data").arg(data).args(["--out", RESULTS]);
    bench.args(["--repeat", &args.repeat.to_string()]);
    proc::run(&mut bench)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_between_the_marks_is_replaced_and_no_other() {
        let text = format!("a{}old{}z", MARKS[0], MARKS[1]);
        let once = between(&text, "new\n").unwrap();
        assert_eq!(once, format!("a{}\nnew\n{}z", MARKS[0], MARKS[1]));
        assert_eq!(between(&once, "new\n").unwrap(), once);
        assert!(between("no marks", "new").is_none());
    }
}
