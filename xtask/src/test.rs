//! `cargo xtask test`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::kernels;
use crate::proc;
use crate::python::Venv;
use crate::servers::{Kind, Servers};

/// What to test.
#[derive(Default, clap::Args)]
pub(crate) struct Args {
    /// Test only this side of the project
    #[arg(value_enum)]
    side: Option<Side>,
    /// Do not install or start servers, and skip the tests that need one
    #[arg(long)]
    no_servers: bool,
    /// Test only the adapters for frameworks that take long to install, and install these (1.4 GB)
    #[arg(long, conflicts_with = "side")]
    adapters: bool,
}

/// The tests of these adapters.
const ADAPTERS: &str = "crates/s4-py/tests/adapters/on_request";

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Side {
    Rust,
    Python,
}

/// Runs the tests, and says how many passed.
///
/// # Errors
/// If a build or a test fails.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    if args.adapters {
        return adapters(root);
    }
    let (rust_side, python_side) = (args.side != Some(Side::Python), args.side != Some(Side::Rust));
    let mut said = Vec::new();
    if args.side.is_none() {
        said.push(kernels::check(root)?);
    }
    let wanted: &[Kind] = match (args.no_servers, rust_side) {
        (true, _) => &[],
        (false, true) => &[Kind::S3, Kind::Azure, Kind::Racing],
        (false, false) => &[Kind::S3],
    };
    // Installs what is needed while the tests are compiled.
    let servers = std::thread::scope(|scope| {
        let installing = scope.spawn(|| install(root, wanted, python_side));
        let compiled = if rust_side { compile(root) } else { Ok(()) };
        let servers = installing.join().map_err(|_| Error::new("installing panicked"))?;
        compiled.and(servers)
    })?;
    // In parallel: both often wait, for servers, for time limits and for processes that are killed.
    std::thread::scope(|scope| {
        let python = python_side.then(|| scope.spawn(|| python(root, &servers)));
        let rust = rust_side.then(|| rust(root, &servers));
        let python = python.map(|running| {
            running.join().unwrap_or_else(|_| Err(Error::new("testing the wheel panicked")))
        });
        let mut failed = Vec::new();
        for outcome in [rust, python].into_iter().flatten() {
            match outcome {
                Ok(passed) => said.push(passed),
                Err(error) => failed.push(error.to_string()),
            }
        }
        match failed.is_empty() {
            true => Ok(said.join("; ")),
            false => Err(Error::new(failed.join("\n"))),
        }
    })
}

/// Installs what the tests need, and starts the servers that the store is tested against.
fn install(root: &Path, wanted: &[Kind], python_side: bool) -> Result<Servers> {
    let servers = Servers::start(root, wanted)?;
    if python_side {
        Venv::main(root)?;
    }
    Ok(servers)
}

/// The command that tests the Rust side.
pub(crate) fn command(root: &Path) -> Command {
    let mut tests = proc::cargo(root);
    tests.args(["test", "--locked", "--workspace", "--exclude", "s4-py", "--no-fail-fast"]);
    tests
}

fn compile(root: &Path) -> Result<()> {
    proc::run(command(root).arg("--no-run"))
}

/// Unit, integration, command-line and documentation tests of every crate but the Python module,
/// which links against no interpreter and is tested through its wheel.
fn rust(root: &Path, servers: &Servers) -> Result<String> {
    let mut tests = command(root);
    tests.envs(servers.environment());
    let (mut passed, mut suites) = (0, 0);
    let mut failures = Failures::default();
    let ran = proc::run_seeing(&mut tests, |line| {
        failures.see(line);
        if let Some(count) = passed_tests(line) {
            passed += count;
            suites += usize::from(count > 0);
        }
    });
    if let Err(error) = ran {
        // The output has hundreds of suites between a failure and its end, where people look.
        return Err(Error::new(format!("{error}\n{}", failures.said.join("\n"))));
    }
    Ok(format!("{passed} Rust tests in {suites} suites"))
}

/// Collects, line by line, what the harness says about tests that failed.
#[derive(Default)]
struct Failures {
    said: Vec<String>,
    within: bool,
}

impl Failures {
    /// Most lines that are kept.
    const MOST: usize = 400;

    fn see(&mut self, line: &str) {
        self.within |= line == "failures:";
        if self.within && self.said.len() < Self::MOST {
            self.said.push(line.to_owned());
        }
        self.within &= !line.starts_with("test result: ");
    }
}

fn python(root: &Path, servers: &Servers) -> Result<String> {
    let venv = Venv::main(root)?;
    venv.install_checked_wheel()?;
    let mut tests = proc::command(root, venv.python());
    tests.envs(servers.environment()).env("S4W_PROGRAM", program(root)?);
    tests.args(["-m", "pytest", "--ignore", ADAPTERS]);
    Ok(format!("Python: {}", pytest(&mut tests, "crates/s4-py/tests")?))
}

/// The adapters of frameworks that the other tests do not install.
fn adapters(root: &Path) -> Result<String> {
    let main = Venv::main(root)?;
    main.install_wheel()?;
    let (venv, missing) = Venv::adapters(root, &main)?;
    let mut tests = proc::command(root, venv.python());
    let passed = pytest(tests.args(["-m", "pytest"]), ADAPTERS)?;
    if missing.is_empty() {
        return Ok(format!("adapters: {passed}"));
    }
    Ok(format!("adapters: {passed}; could not be installed here: {}", missing.join(", ")))
}

/// Runs the tests below a folder with a pytest command; returns the line that says how many passed.
///
/// # Errors
/// If a test fails: with the lines that name those that did.
fn pytest(tests: &mut Command, folder: &str) -> Result<String> {
    tests.args(["-q", "-p", "no:cacheprovider", folder]);
    let (mut last, mut failed) = (String::new(), String::new());
    let ran = proc::run_seeing(tests, |line| {
        if line.starts_with("FAILED ") || line.starts_with("ERROR ") {
            failed.extend(["\n", line]);
        }
        if !line.trim().is_empty() {
            last = line.trim().trim_matches('=').trim().to_owned();
        }
    });
    match ran {
        Ok(()) => Ok(last),
        Err(error) => Err(Error::new(format!("{error}{failed}"))),
    }
}

/// The native program, with `serve`, as the tests of the Rust side build it.
///
/// # Errors
/// If it cannot be built.
pub(crate) fn program(root: &Path) -> Result<PathBuf> {
    proc::run(command(root).args(["--no-run", "--test", "serve"]))?;
    Ok(proc::target_folder(root)?.join("debug/s4w"))
}

/// The number of passed tests in a line like `test result: ok. 12 passed; 0 failed; ...`.
fn passed_tests(line: &str) -> Option<usize> {
    let (_, counts) = line.split_once("test result: ok. ")?;
    counts.split_once(" passed")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{Failures, passed_tests};

    #[test]
    fn what_failed_is_found_among_what_passed() {
        let output = [
            "test a ... ok",
            "test b ... FAILED",
            "",
            "failures:",
            "---- b stdout ----",
            "why",
            "failures:",
            "    b",
            "test result: FAILED. 1 passed; 1 failed",
            "test c ... ok",
        ];
        let mut failures = Failures::default();
        output.iter().for_each(|line| failures.see(line));
        assert_eq!(failures.said, output[3..9]);
    }

    #[test]
    fn counts_what_the_harness_reports() {
        let line = "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out";
        assert_eq!(passed_tests(line), Some(12));
        assert_eq!(passed_tests("test result: FAILED. 1 passed; 1 failed"), None);
        assert_eq!(passed_tests("test a::b ... ok"), None);
    }
}
