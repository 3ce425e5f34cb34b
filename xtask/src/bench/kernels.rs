//! The kernels' benchmarks, and their table.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::proc;

/// One benchmark's outcome.
struct Figure {
    name: String,
    /// Median time of one run, in nanoseconds.
    nanoseconds: f64,
    /// Bytes that one run works through.
    bytes: Option<u64>,
}

/// Runs the benchmarks of `s4-benches` and writes `kernels.json` and `kernels.md` into `results`.
///
/// # Errors
/// If they do not build or run, or leave no figures behind.
pub(super) fn run(root: &Path, results: &Path) -> Result<()> {
    let folder = target(root)?.join("criterion");
    if folder.exists() {
        // It may hold figures of benchmarks that have since been renamed or dropped.
        fs::remove_dir_all(&folder).map_err(|e| Error::at(&folder, &e))?;
    }
    proc::run(proc::cargo(root).args(["bench", "--locked", "-p", "s4-benches"]))?;
    let mut figures = Vec::new();
    collect(&folder, &mut figures)?;
    if figures.is_empty() {
        return Err(Error::new(format!("{}: no results found", folder.display())));
    }
    figures.sort_by(|a, b| a.name.cmp(&b.name));
    let table = markdown(&figures);
    println!("\n{table}");
    fs::create_dir_all(results).map_err(|e| Error::at(results, &e))?;
    write(&results.join("kernels.md"), &table)?;
    write(&results.join("kernels.json"), &format!("{:#}\n", as_json(&figures)))
}

fn target(root: &Path) -> Result<PathBuf> {
    let mut ask = proc::cargo(root);
    ask.args(["metadata", "--format-version", "1", "--no-deps"]);
    let answer = parse(&proc::output(&mut ask)?, "cargo metadata")?;
    let folder = answer["target_directory"].as_str();
    folder.map(PathBuf::from).ok_or_else(|| Error::new("cargo metadata names no target folder"))
}

/// Walks criterion's folder: each benchmark has a folder `new` with two files of JSON.
fn collect(folder: &Path, figures: &mut Vec<Figure>) -> Result<()> {
    let (id, estimates) = (folder.join("benchmark.json"), folder.join("estimates.json"));
    let is_result = folder.file_name().is_some_and(|name| name == "new");
    if is_result && id.exists() && estimates.exists() {
        figures.push(figure(&load(&id)?, &load(&estimates)?)?);
        return Ok(());
    }
    for entry in fs::read_dir(folder).map_err(|e| Error::at(folder, &e))? {
        let path = entry.map_err(|e| Error::at(folder, &e))?.path();
        if path.is_dir() {
            collect(&path, figures)?;
        }
    }
    Ok(())
}

fn figure(id: &Value, estimates: &Value) -> Result<Figure> {
    let incomplete = || Error::new("criterion's files lack a name or a median");
    Ok(Figure {
        name: id["full_id"].as_str().ok_or_else(incomplete)?.to_owned(),
        nanoseconds: estimates["median"]["point_estimate"].as_f64().ok_or_else(incomplete)?,
        bytes: id["throughput"]["Bytes"].as_u64(),
    })
}

/// Bytes per nanosecond are gigabytes per second.
fn rate(figure: &Figure) -> Option<f64> {
    #[expect(clippy::cast_precision_loss, reason = "a figure for people: 52 bits are plenty")]
    figure.bytes.map(|bytes| bytes as f64 / figure.nanoseconds)
}

fn markdown(figures: &[Figure]) -> String {
    let mut table = String::from("| kernel | GB/s | µs |\n|---|---:|---:|\n");
    for figure in figures {
        let rate = rate(figure).map_or_else(|| "-".into(), |r| format!("{r:.2}"));
        table += &format!("| {} | {rate} | {:.1} |\n", figure.name, figure.nanoseconds / 1e3);
    }
    table
}

fn as_json(figures: &[Figure]) -> Value {
    let rows = figures.iter().map(|figure| {
        let rate = rate(figure);
        json!({"name": figure.name, "median_ns": figure.nanoseconds, "gb_per_s": rate})
    });
    Value::Array(rows.collect())
}

fn load(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).map_err(|e| Error::at(path, &e))?;
    parse(&text, &path.display().to_string())
}

fn parse(text: &str, what: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|e| Error::new(format!("{what}: {e}")))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| Error::at(path, &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_read_and_becomes_a_row() {
        let id = json!({"full_id": "split/bf16/avx2", "throughput": {"Bytes": 2_000_000}});
        let estimates = json!({"median": {"point_estimate": 100_000.0}});
        let figure = figure(&id, &estimates).unwrap();
        assert_eq!(rate(&figure), Some(20.0));
        assert!(markdown(&[figure]).ends_with("| split/bf16/avx2 | 20.00 | 100.0 |\n"));
    }

    #[test]
    fn a_file_without_a_median_is_an_error() {
        assert!(figure(&json!({"full_id": "a"}), &json!({})).is_err());
    }
}
