//! `cargo xtask power`: a store's process is killed at its system calls, and the power is cut between
//! them (`crates/s4-store/tests/kill_points.py` and `power_cuts.py`).

use std::path::Path;

use crate::error::Result;
use crate::proc;
use crate::python;
use crate::test;

const TESTS: &str = "crates/s4-store/tests";

/// How thorough to be.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Try only every Nth place
    #[arg(long, default_value_t = 1)]
    every: u32,
}

/// CI tries one place in this many: a minute in all.
const SMALL: u32 = 12;

/// The small version, if the machine can run it; says what was done.
///
/// # Errors
/// As [`run`].
pub(crate) fn small(root: &Path) -> Result<String> {
    let strace = proc::output(proc::command(root, "strace").arg("--version"));
    if cfg!(not(target_os = "linux")) || strace.is_err() {
        println!("\nkill points and power cuts need Linux and strace");
        return Ok("kill points and power cuts not tested: no strace".into());
    }
    run(root, &Args { every: SMALL })
}

/// Builds the program that is killed, and runs both scripts.
///
/// # Errors
/// If something that was promised was lost.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    // Built with the features that the tests of the whole workspace have; otherwise everything
    // would be compiled again.
    let mut build = test::command(root);
    proc::run(build.args(["--no-run", "--example", "store_life"]))?;
    let life = proc::target_folder(root)?.join("debug/examples/store_life");
    let every = args.every.to_string();
    let mut said = vec![];
    for script in ["kill_points.py", "power_cuts.py"] {
        let mut test = proc::command(root, python::find(root)?);
        test.arg(format!("{TESTS}/{script}")).arg(&life).args(["--every", &every]);
        proc::run_seeing(&mut test, |line| {
            if line.contains("violations") && !line.starts_with("not synced") {
                said.push(line.trim().to_owned());
            }
        })?;
    }
    let last = |word: &str| said.iter().rev().find(|l| l.contains(word)).cloned();
    let said = [last("points,"), last("states,")].into_iter().flatten();
    Ok(said.collect::<Vec<_>>().join("; "))
}
