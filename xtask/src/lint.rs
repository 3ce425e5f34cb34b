//! Checks that read the sources and build nothing that runs: clippy, rustdoc, cargo-deny, ruff.

use std::path::Path;

use crate::error::Result;
use crate::proc;
use crate::python::Venv;

/// The linter of Python sources, in an environment of its own: it takes seconds to install.
const RUFF: &str = "ruff==0.17.6";
const FOLDER: &str = ".venv-lint";
/// Where its rules are.
const RULES: &str = "crates/s4-py/pyproject.toml";

/// Python sources, those of the wheel, the tests, the examples and the benchmarks.
///
/// # Errors
/// If the linter cannot be installed or finds something.
pub(crate) fn python(root: &Path) -> Result<()> {
    let venv = Venv::with_packages(root, &root.join(FOLDER), &[RUFF])?;
    let mut ruff = proc::command(root, venv.program("ruff"));
    proc::run(ruff.args(["check", "--no-cache", "--config", RULES, "."]))
}

/// Clippy and rustdoc, without a warning, and the lock file of `fuzz`, which is no part of the workspace: `--locked`
/// refuses it when a crate's dependencies have changed since.
///
/// # Errors
/// If any of them finds something.
pub(crate) fn rust(root: &Path) -> Result<()> {
    let mut fuzz = proc::cargo(root);
    fuzz.args(["metadata", "--locked", "--format-version", "1"]);
    proc::output(fuzz.args(["--manifest-path", "fuzz/Cargo.toml"]))?;
    let mut clippy = proc::cargo(root);
    clippy.args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    proc::run(&mut clippy)?;
    let mut doc = proc::cargo(root);
    doc.args(["doc", "--locked", "--workspace", "--no-deps", "--document-private-items"]);
    proc::run(doc.env("RUSTDOCFLAGS", "-D warnings"))
}

/// Checks licences, bans and sources of the dependencies if `cargo-deny` is installed; says whether
/// it did.
///
/// # Errors
/// If it finds something.
pub(crate) fn dependencies(root: &Path) -> Result<&'static str> {
    if proc::output(proc::cargo(root).args(["deny", "--version"])).is_err() {
        println!("\ncargo-deny is not installed here: `cargo install cargo-deny --locked`");
        return Ok("cargo-deny is not installed: licences not checked");
    }
    // Advisories come from a database on the network, so they are no part of a check that must be
    // repeatable.
    proc::run(proc::cargo(root).args(["deny", "check", "bans", "licenses", "sources"]))?;
    Ok("cargo-deny clean")
}
