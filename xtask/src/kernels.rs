//! `cargo xtask kernels`: the PTX that the GPU engine loads, made from the kernels' sources.
//!
//! An old compiler on purpose: what it makes is read by every driver from 525 on.

use std::fs;
use std::path::Path;

use crate::error::{Error, Result};
use crate::proc;
use crate::python::Venv;

/// What compiles, and where the environment that holds it lies below the target folder.
const COMPILER: &str = "nvidia-cuda-nvrtc-cu12==12.0.140";
const FOLDER: &str = "kernels-nvrtc";

const SOURCES: &str = "crates/s4-codec-gpu/kernels";
const PTX: &str = "crates/s4-codec-gpu/kernels/s4.ptx";

/// What to do with the PTX.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare with the file in the tree, and change nothing
    #[arg(long)]
    check: bool,
}

/// Checks the PTX, where there is a compiler for it.
///
/// # Errors
/// As [`run`].
pub(crate) fn check(root: &Path) -> Result<String> {
    if cfg!(not(target_os = "linux")) {
        return Ok("PTX unchecked: its compiler is for Linux".into());
    }
    run(root, &Args { check: true })
}

/// Makes the PTX, or checks that it is what its sources make.
///
/// # Errors
/// If the compiler cannot be installed or refuses the sources; with `--check`, if the PTX differs.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    let target = proc::target_folder(root)?;
    let venv = Venv::with_packages(root, &target.join(FOLDER), &[COMPILER])?;
    let made = target.join(FOLDER).join("s4.ptx");
    let mut compile = proc::command(root, venv.python());
    compile.args(["xtask/src/kernels/nvrtc.py", SOURCES]).arg(&made);
    proc::run(&mut compile)?;
    let read = |path: &Path| fs::read_to_string(path).map_err(|e| Error::at(path, &e));
    let (made, kept) = (read(&made)?, root.join(PTX));
    let size = format!("{} KB of PTX", made.len() / 1024);
    if !args.check {
        fs::write(&kept, made).map_err(|e| Error::at(&kept, &e))?;
        return Ok(size);
    }
    if read(&kept)? == made {
        return Ok(format!("{size}, as the sources make it"));
    }
    Err(Error::new(format!("{PTX} is not what its sources make: run `cargo xtask kernels`")))
}
