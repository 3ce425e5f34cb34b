//! A progress bar on standard error, where that is a terminal.

use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use s4weights::ProgressFn;

/// A bar over bytes of values. It vanishes when dropped.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    pub(crate) fn new(quiet: bool) -> Self {
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::no_length() };
        let style = "{wide_bar} {bytes} of {total_bytes}  {bytes_per_sec}  {eta}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// A spinner, for work of unknown length.
    pub(crate) fn waiting(quiet: bool, text: &str) -> Self {
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new_spinner() };
        bar.set_message(text.to_owned());
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    /// Sets the number of bytes that all calls together will report.
    pub(crate) fn expect(&self, bytes: u64) {
        self.0.set_length(bytes);
    }

    /// A callback that adds up what several calls report, each of which starts from zero.
    pub(crate) fn callback(&self) -> Option<ProgressFn> {
        let bar = self.0.clone();
        let last = std::sync::Mutex::new(0u64);
        Some(Arc::new(move |p| {
            let mut last = last.lock().unwrap_or_else(|e| e.into_inner());
            bar.inc(if p.done >= *last { p.done - *last } else { p.done });
            *last = p.done;
            true
        }))
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
