//! `cargo xtask tidy`: checks that no compiler makes.

mod directions;
mod files;
mod specs;

use std::path::Path;

use crate::error::{Error, Result};
use crate::proc;

/// Runs every check, prints all findings, and returns how much was checked.
///
/// # Errors
/// If a check finds something, or cannot run.
pub(crate) fn run(root: &Path) -> Result<String> {
    let packages = directions::packages(root)?;
    let texts = files::texts(root)?;
    let mut findings = directions::check(&packages);
    findings.extend(files::check(root, &texts));
    findings.extend(directions::check_docs(&packages)?);
    findings.extend(directions::check_features(&packages));
    findings.extend(specs::check(root)?);
    for finding in &findings {
        println!("tidy: {finding}");
    }
    proc::run(proc::cargo(root).args(["fmt", "--all", "--check"]))?;
    match findings.len() {
        0 => Ok(format!("{} crates, {} files", packages.len(), texts.len())),
        n => Err(Error::new(format!("{n} finding(s), listed above"))),
    }
}
