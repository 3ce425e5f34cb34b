//! `cargo xtask ci`.

use std::path::Path;

use crate::error::Result;
use crate::{proc, test, tidy};

/// Runs every check in the order of what it costs.
///
/// # Errors
/// The first failure.
pub(crate) fn run(root: &Path) -> Result<String> {
    tidy::run(root)?;
    let mut clippy = proc::cargo(root);
    clippy.args(["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    proc::run(&mut clippy)?;
    let mut doc = proc::cargo(root);
    doc.args(["doc", "--locked", "--workspace", "--no-deps", "--document-private-items"]);
    proc::run(doc.env("RUSTDOCFLAGS", "-D warnings"))?;
    let deny = deny(root)?;
    let tests = test::run(root, &test::Args::default())?;
    Ok(format!("tidy, clippy and docs clean; {deny}; {tests}"))
}

/// Licences, advisories, bans and sources, where `cargo-deny` is installed.
fn deny(root: &Path) -> Result<&'static str> {
    if proc::output(proc::cargo(root).args(["deny", "--version"])).is_err() {
        println!("\ncargo-deny is not installed here: `cargo install cargo-deny --locked`");
        return Ok("cargo-deny not installed, licences unchecked");
    }
    // The advisories come from a database on the network: not part of a check that must repeat.
    proc::run(proc::cargo(root).args(["deny", "check", "bans", "licenses", "sources"]))?;
    Ok("cargo-deny clean")
}
