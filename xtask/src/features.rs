//! The combinations of features that must build. A build of the whole workspace enables every
//! feature that any crate asks for; here each crate is built separately.

use std::path::Path;

use crate::error::Result;
use crate::proc;

/// Each crate that has features, with every combination of them. (`tidy` reports a feature that is
/// in no combination.)
const COMBINATIONS: [(&str, &[&str]); 7] = [
    ("s4-engine", &[]),
    ("s4-engine", &["cuda"]),
    ("s4-engine", &["cuda", "testing"]),
    ("s4weights", &[]),
    ("s4weights", &["cuda"]),
    ("s4-cli", &[]),
    ("s4-cli", &["serve"]),
];

/// Whether a combination of the crate has the feature.
pub(crate) fn lists(name: &str, feature: &str) -> bool {
    COMBINATIONS.iter().any(|(of, features)| *of == name && features.contains(&feature))
}

/// Checks that the crates build with each combination, without generating code and without a warning.
///
/// # Errors
/// If one does not, or warns.
pub(crate) fn check(root: &Path) -> Result<String> {
    for (name, features) in COMBINATIONS {
        let mut check = proc::cargo(root);
        check.args(["clippy", "--locked", "--package", name, "--no-default-features"]);
        check.arg("--features").arg(features.join(","));
        proc::run(check.args(["--", "-D", "warnings"]))?;
    }
    Ok(format!("{} combinations of features build", COMBINATIONS.len()))
}
