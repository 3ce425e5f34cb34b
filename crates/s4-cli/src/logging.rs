//! Warnings of the library, to standard error.

use tracing::level_filters::LevelFilter;

use crate::error::{Failure, Result};
use crate::visible::Stderr;

/// The environment variable that sets the log level: `off`, `error`, `warn`, `info`, `debug`, `trace`.
pub(crate) const VARIABLE: &str = "S4_LOG";

/// Prints warnings, or what flags and environment ask for. If a program that runs this one in its
/// own process has a subscriber, that one stays.
///
/// # Errors
/// `Usage` if the variable has another value.
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
    // If one is set already, it stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
    Ok(())
}

fn named(word: &str) -> Result<LevelFilter> {
    let usage = || {
        Failure::Usage(format!(
            "{VARIABLE}: expected `off`, `error`, `warn`, `info`, `debug` or `trace`"
        ))
    };
    match word.parse::<usize>() {
        Ok(_) => Err(usage()),
        Err(_) => word.parse().map_err(|_| usage()),
    }
}
