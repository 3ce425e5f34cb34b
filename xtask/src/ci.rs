//! `cargo xtask ci`.

use std::path::Path;
use std::time::Instant;

use crate::error::Result;
use crate::{deploy, features, lint, power, test, tidy};

/// Runs every check, the cheapest first, and says how long each took.
///
/// # Errors
/// The first failure.
pub(crate) fn run(root: &Path) -> Result<String> {
    let mut said = vec![];
    let mut step = |name: &str, work: &dyn Fn() -> Result<String>| -> Result<()> {
        let started = Instant::now();
        let summary = work()?;
        println!("\nxtask ci: {name}: {} s: {summary}", started.elapsed().as_secs());
        said.push(summary);
        Ok(())
    };
    step("tidy", &|| tidy::run(root))?;
    step("ruff", &|| lint::python(root).map(|()| "ruff clean".into()))?;
    step("cargo-deny", &|| lint::dependencies(root).map(str::to_owned))?;
    step("clippy and rustdoc", &|| lint::rust(root).map(|()| "clippy and docs clean".into()))?;
    step("deploy", &|| deploy::quick(root))?;
    step("features", &|| features::check(root))?;
    step("test", &|| test::run(root, &test::Args::default()))?;
    step("power", &|| power::small(root))?;
    Ok(said.join("; "))
}
