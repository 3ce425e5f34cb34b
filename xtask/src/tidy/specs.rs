//! Codec ids and their specifications: every open codec must have a page, and every page a codec.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::error::{Error, Result};

/// Where the ids are listed, and the folder with a page for each.
const IDS: &str = "crates/s4-format/src/id.rs";
const PAGES: &str = "docs/codecs";

/// Findings: built codecs without a page, and pages that name no codec.
///
/// # Errors
/// If the list of ids or the folder of pages cannot be read, or the list is not found in its file.
pub(super) fn check(root: &Path) -> Result<Vec<String>> {
    let path = root.join(IDS);
    let source = fs::read_to_string(&path).map_err(|e| Error::at(&path, &e))?;
    let codecs = codecs(&source);
    if codecs.is_empty() {
        return Err(Error::new(format!("{IDS}: no codec ids found")));
    }
    Ok(compare(&codecs, &pages(&root.join(PAGES))?))
}

/// The name of a codec, and whether this version of the project builds it.
type Codec<'a> = (&'a str, bool);

/// The codecs in the source: lines like `RANS = 3, "rans", Open;` in the list `CodecId`.
fn codecs(source: &str) -> Vec<Codec<'_>> {
    let list = source.split_once("CodecId, \"codec\" {").map_or("", |(_, rest)| rest);
    list.lines()
        .map(str::trim)
        .take_while(|line| *line != "}")
        .filter(|line| !line.starts_with("//"))
        .filter_map(|line| {
            let (_, rest) = line.split_once('"')?;
            let (name, support) = rest.split_once('"')?;
            Some((name, support.contains("Open")))
        })
        .collect()
}

/// Pages that are about no codec: the list, and the frame that several share.
const SHARED: [&str; 3] = ["README", "blocks", "nvcomp"];

/// The names of the pages in a folder, without their extension.
fn pages(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder).map_err(|e| Error::at(folder, &e))?;
    let pages = entries.filter_map(|entry| entry.ok().map(|e| e.path()));
    Ok(pages
        .filter(|page| page.extension().is_some_and(|e| e == "md"))
        .filter_map(|page| page.file_stem().map(|s| s.to_string_lossy().into_owned()))
        .filter(|name| !SHARED.contains(&&**name))
        .collect())
}

fn compare(codecs: &[Codec<'_>], pages: &BTreeSet<String>) -> Vec<String> {
    let bare = codecs.iter().filter(|(name, open)| *open && !pages.contains(*name));
    let stray = pages.iter().filter(|page| !codecs.iter().any(|(name, _)| name == page));
    bare.map(|(name, _)| format!("codec `{name}` is built but {PAGES}/{name}.md is missing"))
        .chain(stray.map(|page| format!("{PAGES}/{page}.md: no codec has this name")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"
        CodecId, "codec" {
            /// The bytes themselves.
            RAW = 0, "raw", Open;
            LZ4 = 7, "lz4", Reserved;
        }
        LayoutId, "layout" {
            WHOLE = 0, "whole", Open;
        }"#;

    #[test]
    fn reads_the_codecs_and_no_other_list() {
        assert_eq!(codecs(SOURCE), [("raw", true), ("lz4", false)]);
    }

    #[test]
    fn finds_bare_codecs_and_stray_pages() {
        let pages = BTreeSet::from(["huffman".to_owned()]);
        let findings = compare(&codecs(SOURCE), &pages);
        assert_eq!(findings.len(), 2, "{findings:?}");
        let pages = BTreeSet::from(["raw".to_owned()]);
        assert!(compare(&codecs(SOURCE), &pages).is_empty());
    }
}
