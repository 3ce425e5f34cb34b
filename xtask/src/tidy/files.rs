//! Rules for the text of a file.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The longest a source file may be, in lines.
const MAX_LINES: usize = 700;

/// Extensions of source files, which are kept short, and of other texts.
const SOURCES: [&str; 8] = ["rs", "py", "pyi", "cu", "cuh", "h", "c", "cpp"];
const TEXTS: [&str; 5] = ["md", "toml", "txt", "yml", "yaml"];

/// Folders that hold nothing of the project.
const SKIPPED: [&str; 2] = ["target", "__pycache__"];

/// Hidden folders that hold something of the project.
const HIDDEN: [&str; 3] = [".cargo", ".ci", ".github"];

/// Top-level folders of one person's machine: a path below one of them works nowhere else. Split in
/// halves, so that this file passes its own check.
const PERSONAL: [(&str, &str); 4] =
    [("/ho", "me/"), ("/ro", "ot/"), ("/Us", "ers/"), ("/wo", "rk/")];

/// A text of the project.
pub(super) struct Text {
    path: PathBuf,
    content: String,
}

/// Every source file and text below `root`, in a fixed order.
///
/// # Errors
/// If a folder or file cannot be read.
pub(super) fn texts(root: &Path) -> Result<Vec<Text>> {
    let mut open = vec![root.to_path_buf()];
    let mut found = Vec::new();
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).map_err(|e| Error::at(&folder, &e))? {
            let path = entry.map_err(|e| Error::at(&folder, &e))?.path();
            if path.is_dir() {
                open.extend(is_ours(&path).then_some(path));
            } else if has_extension(&path, &SOURCES) || has_extension(&path, &TEXTS) {
                let content = fs::read_to_string(&path).map_err(|e| Error::at(&path, &e))?;
                found.push(Text { path, content });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Findings in all texts.
pub(super) fn check(root: &Path, texts: &[Text]) -> Vec<String> {
    texts
        .iter()
        .flat_map(|text| {
            let name = text.path.strip_prefix(root).unwrap_or(&text.path).display().to_string();
            let source = has_extension(&text.path, &SOURCES);
            check_one(&name, &text.content, source)
        })
        .collect()
}

fn check_one(name: &str, content: &str, source: bool) -> Vec<String> {
    let mut findings = Vec::new();
    let lines = content.lines().count();
    if source && lines > MAX_LINES {
        findings.push(format!("{name}: {lines} lines, at most {MAX_LINES} are allowed"));
    }
    for (number, line) in content.lines().enumerate() {
        if let Some(path) = personal_path(line) {
            findings.push(format!("{name}:{}: machine-specific path: {path}", number + 1));
        }
        if source && line.ends_with([' ', '\t']) {
            findings.push(format!("{name}:{}: trailing whitespace", number + 1));
        }
    }
    if !content.is_empty() && !content.ends_with('\n') {
        findings.push(format!("{name}: no newline at end of file"));
    }
    findings
}

/// The first absolute path in `line` that only one person's machine has.
fn personal_path(line: &str) -> Option<String> {
    PERSONAL.iter().map(|(a, b)| format!("{a}{b}")).find(|folder| {
        // `x/home/y` is relative: an absolute path follows a quote, a blank or nothing.
        line.match_indices(folder.as_str()).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            !before.is_some_and(|c| c.is_alphanumeric() || "/._-*}$>".contains(c))
        })
    })
}

fn is_ours(folder: &Path) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let hidden = name.starts_with('.');
    if hidden { HIDDEN.contains(&&*name) } else { !SKIPPED.contains(&&*name) }
}

fn has_extension(path: &Path, list: &[&str]) -> bool {
    path.extension().is_some_and(|e| list.iter().any(|l| e == *l))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absolute_path_of_one_machine_is_found() {
        let home = ["/ho", "me/me/data"].concat();
        assert!(personal_path(&format!("open(\"{home}\")")).is_some());
        assert!(personal_path(&format!("see docs{home}")).is_none());
        assert!(personal_path("open(\"/dev/null\")").is_none());
    }

    #[test]
    fn a_long_source_is_found_and_a_long_text_is_not() {
        let long = "x\n".repeat(MAX_LINES + 1);
        assert_eq!(check_one("a.rs", &long, true).len(), 1);
        assert!(check_one("a.md", &long, false).is_empty());
        assert!(check_one("a.rs", &"x\n".repeat(MAX_LINES), true).is_empty());
    }

    #[test]
    fn ragged_ends_are_found() {
        assert_eq!(check_one("a.rs", "x \ny", true).len(), 2);
    }
}
