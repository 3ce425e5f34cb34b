//! Warnings of the library, to standard error.

use tracing::level_filters::LevelFilter;

use crate::error::{Failure, Result};
use crate::visible::Stderr;

/// The environment variable that says what is told: `off`, `error`, `warn`, `info`, `debug`, `trace`.
pub(crate) const VARIABLE: &str = "S4_LOG";

/// Prints warnings, or what flags and environment ask for. A program that runs this one in its own
/// process and has a subscriber keeps it.
///
/// # Errors
/// `Usage` if the variable is none of its words.
pub(crate) fn start(quiet: bool, verbose: u8) -> Result<()> {
    let level = match (std::env::var_os(VARIABLE), quiet, verbose) {
        (_, _, 1) => LevelFilter::INFO,
        (_, _, 2) => LevelFilter::DEBUG,
        (_, _, 3..) => LevelFilter::TRACE,
        (_, true, 0) => LevelFilter::ERROR,
        (Some(word), ..) if !word.is_empty() => named(&word.to_string_lossy())?,
        _ => LevelFilter::WARN,
    };
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(|| Stderr)
        .with_ansi(false)
        .with_target(level >= LevelFilter::DEBUG)
        .without_time()
        .finish();
    // Set already: the program's own stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
    Ok(())
}

fn named(word: &str) -> Result<LevelFilter> {
    let usage = || {
        Failure::Usage(format!("{VARIABLE}: `off`, `error`, `warn`, `info`, `debug` or `trace`"))
    };
    match word.parse::<usize>() {
        Ok(_) => Err(usage()),
        Err(_) => word.parse().map_err(|_| usage()),
    }
}
