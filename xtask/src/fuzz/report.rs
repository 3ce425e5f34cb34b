//! The results of a run of libFuzzer, as a table.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// How a target did.
pub(super) struct Outcome {
    pub(super) target: String,
    pub(super) log: PathBuf,
    pub(super) executions: u64,
    per_second: u64,
    /// Most memory of the process, in MB.
    peak_mb: u64,
    /// Edges of the code that were reached.
    edges: u64,
    /// Inputs that crashed it, hung it, or took too much memory.
    pub(super) crashes: Vec<PathBuf>,
    pub(super) failed: bool,
}

/// Reads the log of a run that has ended.
pub(super) fn outcome(
    target: &str,
    log: PathBuf,
    text: &str,
    crashes: Vec<PathBuf>,
    failed: bool,
) -> Outcome {
    let stat = |name: &str| {
        let value = text.lines().rev().find_map(|l| l.strip_prefix(name))?;
        value.trim_start_matches(':').trim().parse().ok()
    };
    let stat = |name: &str| stat(name).unwrap_or(0);
    // Progress lines read `#1234 NEW cov: 567 ft: ...`.
    let cov = text.lines().rev().find_map(|l| l.split_once(" cov: ")?.1.split(' ').next());
    Outcome {
        target: target.to_owned(),
        log,
        executions: stat("stat::number_of_executed_units"),
        per_second: stat("stat::average_exec_per_sec"),
        peak_mb: stat("stat::peak_rss_mb"),
        edges: cov.and_then(|c| c.parse().ok()).unwrap_or(0),
        crashes,
        failed,
    }
}

/// The harmful inputs that libFuzzer kept. It also keeps slow ones, which do no harm.
pub(super) fn crashes(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(|e| Error::at(folder, &e))?;
    let paths = entries.filter_map(|e| Some(e.ok()?.path()));
    let harmful = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        ["crash-", "timeout-", "oom-", "leak-"].iter().any(|kind| name.starts_with(kind))
    };
    let mut found: Vec<_> = paths.filter(harmful).collect();
    found.sort();
    Ok(found)
}

/// The table of all outcomes so far.
pub(super) fn table(outcomes: &[Outcome]) -> String {
    let mut out = String::from(
        "\n| target | executions | a second | peak memory, MB | edges | crashes |\n\
         |---|--:|--:|--:|--:|--:|\n",
    );
    for o in outcomes {
        let Outcome { target, executions, per_second, peak_mb, edges, crashes, .. } = o;
        let crashes = crashes.len();
        // Writing into a string does not fail.
        let _ = writeln!(
            out,
            "| {target} | {executions} | {per_second} | {peak_mb} | {edges} | {crashes} |"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read() {
        let text = "#2\tINITED cov: 10 ft: 11 corp: 1/1b\n#8\tDONE   cov: 12 ft: 20 corp: 2/9b\n\
                    Done 8 runs in 1 second(s)\n\
                    stat::number_of_executed_units: 8\nstat::average_exec_per_sec:     4\n\
                    stat::new_units_added:          1\nstat::peak_rss_mb:              33\n";
        let o = outcome("rans", PathBuf::from("log"), text, vec![], false);
        assert_eq!((o.executions, o.per_second, o.peak_mb, o.edges), (8, 4, 33, 12));
        assert!(table(&[o]).ends_with("| rans | 8 | 4 | 33 | 12 | 0 |\n"));
    }
}
