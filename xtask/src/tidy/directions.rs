//! Which crate of the workspace may depend on which: nouns at the bottom, verbs above.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::features;
use crate::proc;

/// Each crate with the crates directly below it. A crate may depend on whatever is below it, at any
/// distance, and on no other crate of the workspace.
const BELOW: &[(&str, &[&str])] = &[
    ("s4-format", &[]),
    ("nvcomp-sys", &[]),
    ("s4-planes", &["s4-format"]),
    ("s4-codec-cpu", &["s4-planes"]),
    ("s4-codec-gpu", &["s4-codec-cpu", "nvcomp-sys"]),
    ("s4-delta", &["s4-planes"]),
    ("s4-predict", &["s4-codec-cpu"]),
    ("s4-engine", &["s4-delta", "s4-predict", "s4-codec-gpu"]),
    ("s4-store", &["s4-format"]),
    ("s4weights", &["s4-store", "s4-engine"]),
    ("s4-cli", &["s4weights", "s4-runner"]),
    ("s4-py", &["s4weights", "s4-cli"]),
    ("s4-runner", &["s4weights"]),
    ("s4-benches", &["s4weights"]),
    ("s4-torture", &["s4weights"]),
    ("s4-fuzz-targets", &["s4-cli"]),
    ("xtask", &[]),
];

/// One crate of the workspace.
pub(super) struct Package {
    name: String,
    /// Dependencies of every kind, those of tests included.
    dependencies: Vec<String>,
    /// Features that it declares, the default set left out.
    features: Vec<String>,
    /// Root files of its libraries and programs.
    roots: Vec<PathBuf>,
}

/// The workspace's crates, as cargo sees them.
///
/// # Errors
/// If `cargo metadata` fails or answers something else than promised.
pub(super) fn packages(root: &Path) -> Result<Vec<Package>> {
    let mut ask = proc::cargo(root);
    ask.args(["metadata", "--format-version", "1", "--no-deps"]);
    let answer: Value = serde_json::from_str(&proc::output(&mut ask)?)
        .map_err(|e| Error::new(format!("cargo metadata: {e}")))?;
    Ok(array(&answer["packages"]).iter().map(package).collect())
}

fn package(value: &Value) -> Package {
    let is_root = |target: &&Value| {
        array(&target["kind"]).iter().any(|k| matches!(text(k), "lib" | "bin" | "cdylib"))
    };
    Package {
        name: text(&value["name"]).to_owned(),
        dependencies: array(&value["dependencies"])
            .iter()
            .map(|d| text(&d["name"]).to_owned())
            .collect(),
        features: value["features"]
            .as_object()
            .map_or_else(Vec::new, |all| all.keys().filter(|f| *f != "default").cloned().collect()),
        roots: array(&value["targets"])
            .iter()
            .filter(is_root)
            .map(|t| PathBuf::from(text(&t["src_path"])))
            .collect(),
    }
}

/// Findings: dependencies that point up or sideways, and crates that the table does not know.
pub(super) fn check(packages: &[Package]) -> Vec<String> {
    let members: BTreeSet<&str> = packages.iter().map(|p| p.name.as_str()).collect();
    let mut findings = Vec::new();
    for package in packages {
        if !BELOW.iter().any(|(name, _)| *name == package.name) {
            findings.push(format!("{}: not listed in xtask/src/tidy/directions.rs", package.name));
            continue;
        }
        let allowed = below(&package.name);
        for dependency in package.dependencies.iter().map(String::as_str) {
            if members.contains(dependency) && !allowed.contains(dependency) {
                findings.push(format!("{} must not depend on {dependency}", package.name));
            }
        }
    }
    findings
}

/// Findings: features of the crates that are in no combination of `features.rs`.
pub(super) fn check_features(packages: &[Package]) -> Vec<String> {
    let listed = |p: &Package, f: &String| features::lists(&p.name, f);
    packages
        .iter()
        .flat_map(|p| p.features.iter().filter(|f| !listed(p, f)).map(move |f| (p, f)))
        .map(|(p, f)| format!("{}: no combination in xtask/src/features.rs has `{f}`", p.name))
        .collect()
}

/// Findings: crates whose root file does not open with documentation.
///
/// # Errors
/// If a root file cannot be read.
pub(super) fn check_docs(packages: &[Package]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for package in packages {
        for root in &package.roots {
            let source = fs::read_to_string(root).map_err(|e| Error::at(root, &e))?;
            if !source.starts_with("//! ") {
                let name = root.file_name().unwrap_or_default().to_string_lossy();
                findings.push(format!("{}: {name} does not start with crate docs", package.name));
            }
        }
    }
    Ok(findings)
}

/// Every crate below `name`, at any distance.
fn below(name: &str) -> BTreeSet<&'static str> {
    let direct = |name: &str| BELOW.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, d)| *d);
    let mut open: Vec<&'static str> = direct(name).to_vec();
    let mut found = BTreeSet::new();
    while let Some(next) = open.pop() {
        if found.insert(next) {
            open.extend(direct(next));
        }
    }
    found
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[&str]) -> Package {
        let dependencies = dependencies.iter().map(|d| (*d).to_owned()).collect();
        Package { name: name.to_owned(), dependencies, features: Vec::new(), roots: Vec::new() }
    }

    #[test]
    fn down_is_allowed_at_any_distance() {
        let all = [package("s4-format", &["serde"]), package("s4-engine", &["s4-format", "rayon"])];
        assert!(check(&all).is_empty());
    }

    #[test]
    fn a_feature_that_is_never_checked_alone_is_found() {
        let mut one = package("s4-engine", &[]);
        one.features = vec!["cuda".into(), "new".into()];
        let findings = check_features(&[one]);
        assert_eq!(findings, ["s4-engine: no combination in xtask/src/features.rs has `new`"]);
    }

    #[test]
    fn up_and_sideways_are_found() {
        let all = [
            package("s4-format", &["s4-store"]),
            package("s4-store", &["s4-engine"]),
            package("s4-engine", &[]),
            package("s4-new", &[]),
        ];
        let findings = check(&all);
        assert_eq!(findings.len(), 3, "{findings:?}");
        assert_eq!(findings[0], "s4-format must not depend on s4-store");
        assert!(findings[2].contains("s4-new"));
    }
}
