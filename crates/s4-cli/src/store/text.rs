//! Numbers, times and tables for people.

use std::time::{Duration, UNIX_EPOCH};

use indicatif::DecimalBytes;

/// The last millisecond of the year 9999: later ones have no common notation.
const LAST: u64 = 253_402_300_799_999;

/// A size such as `12.35 MB`.
pub(crate) fn bytes(n: u64) -> String {
    DecimalBytes(n).to_string()
}

/// Milliseconds since 1970 as a date and time, UTC.
pub(crate) fn when(ms: i64) -> String {
    let ms = u64::try_from(ms).unwrap_or(0).min(LAST);
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(ms)).to_string()
}

/// `raw / stored`, if both are known.
pub(crate) fn ratio(raw: u64, stored: u64) -> Option<f64> {
    (raw > 0 && stored > 0).then(|| raw as f64 / stored as f64)
}

/// A ratio with three places, or a dash.
pub(crate) fn ratio_text(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".into(), |r| format!("{r:.3}"))
}

/// `1 checkpoint`, `2 checkpoints`.
pub(crate) fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A table with columns as wide as they need to be: aligned right, except those in `left`.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>], left: &[usize]) -> String {
    let width = |i: usize| {
        let cells = rows.iter().filter_map(|row| row.get(i)).map(|c| c.chars().count());
        cells.chain([head[i].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut out = String::new();
        for (i, (cell, width)) in cells.zip(&widths).enumerate() {
            let gap = if i == 0 { "" } else { "  " };
            out += &match left.contains(&i) {
                true => format!("{gap}{cell:<width$}"),
                false => format!("{gap}{cell:>width$}"),
            };
        }
        out.truncate(out.trim_end().len());
        out
    };
    let mut lines = vec![line(&mut head.iter().copied())];
    lines.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_any_clock_are_shown() {
        assert_eq!(when(0), "1970-01-01T00:00:00Z");
        assert_eq!(when(1_700_000_000_999), "2023-11-14T22:13:20Z");
        assert_eq!(when(i64::MIN), when(0));
        assert_eq!(when(i64::MAX), "9999-12-31T23:59:59Z");
    }

    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["1".into(), "a".into()], vec!["22".into(), "bcd".into()]];
        assert_eq!(table(&["n", "name"], &rows, &[1]), " n  name\n 1  a\n22  bcd");
    }
}
