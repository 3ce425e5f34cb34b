//! Escapes what a terminal would obey in printed text: names come from other people's files.

use std::fmt::Write as _;
use std::io::{self, Write as _};

/// Whether a character is a command to a terminal, or changes how those around it are shown:
/// control characters, writing directions and invisible characters.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

/// A name on one line, with such characters escaped.
pub(crate) fn name(text: &str) -> String {
    escaped(text, |_| false)
}

/// Lines of text, with such characters except line ends escaped.
pub(crate) fn lines(text: &str) -> String {
    escaped(text, |c| c == '\n')
}

fn escaped(text: &str, keeps: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match is_hidden(c) && !keeps(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

/// The same JSON with such characters escaped: they can only occur in strings.
pub(crate) fn json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if !is_hidden(c) || c == '\n' {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
    out
}

/// Tells the user something in a line of standard error.
///
/// It is written in one call, since other threads may be logging: `writeln!` would write it in pieces.
pub(crate) fn tell(text: &str) {
    // If standard error is closed, there is nobody to tell.
    let _ = io::stderr().write_all(format!("s4w: {}\n", name(text)).as_bytes());
}

/// Standard error, for messages that contain such names.
pub(crate) struct Stderr;

impl io::Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(lines(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_to_terminals_are_shown_and_not_obeyed() {
        let evil = "a\u{1b}[2Jb\u{9b}31m\u{202e}c\r\n\u{7}é漢";
        let shown = "a\\u{1b}[2Jb\\u{9b}31m\\u{202e}c\\r\\n\\u{7}é漢";
        assert_eq!(name(evil), shown);
        assert_eq!(lines(evil), shown.replace("\\n", "\n"));
        let json_text = serde_json::to_string_pretty(&[evil, "\u{7f}\u{feff}"]).unwrap();
        let safe = json(&json_text);
        assert!(!safe.chars().any(|c| is_hidden(c) && c != '\n'), "{safe}");
        assert_eq!(serde_json::from_str::<Vec<String>>(&safe).unwrap(), [evil, "\u{7f}\u{feff}"]);
    }
}
