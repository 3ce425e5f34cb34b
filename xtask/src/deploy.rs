//! `cargo xtask deploy`: checks the files in `deploy`, without an account.

use std::path::Path;

use crate::error::Result;
use crate::proc;
use crate::python::Venv;

const TEMPLATE: &str = "deploy/cfn-train-runner.yaml";

/// What to check.
#[derive(Default, clap::Args)]
pub(crate) struct Args {
    /// Skip checkov, which takes minutes to install
    #[arg(long)]
    quick: bool,
}

/// The part that `ci` runs.
///
/// # Errors
/// As [`run`].
pub(crate) fn quick(root: &Path) -> Result<String> {
    run(root, &Args { quick: true })
}

/// Runs the linters and the tests of the files in `deploy`.
///
/// # Errors
/// If a tool cannot be installed, or finds something.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    let venv = Venv::deploy(root)?;
    proc::run(proc::command(root, venv.program("cfn-lint")).arg(TEMPLATE))?;
    let mut tests = proc::command(root, venv.python());
    tests.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "deploy/tests"]);
    let mut last = String::new();
    proc::run_seeing(&mut tests, |line| {
        if !line.trim().is_empty() {
            last = line.trim().to_owned();
        }
    })?;
    if args.quick {
        return Ok(format!("cfn-lint clean; {last}; checkov skipped"));
    }
    let venv = Venv::checkov(root)?;
    let mut checkov = proc::command(root, venv.program("checkov"));
    checkov.args(["--quiet", "--compact", "--skip-download", "--file", TEMPLATE]);
    proc::run(&mut checkov)?;
    Ok(format!("cfn-lint and checkov clean; {last}"))
}
