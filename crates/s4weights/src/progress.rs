//! The progress of an operation, as its caller sees it.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::interrupt;

/// Progress of an operation, in bytes of tensor values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes done.
    pub done: u64,
    /// Bytes of this call, if known.
    pub total: u64,
}

/// Called with the progress, on the calling thread; `false` cancels the operation.
pub type ProgressFn = Arc<dyn Fn(Progress) -> bool + Send + Sync>;

/// Counts bytes and reports them to the caller.
pub(crate) struct Meter {
    pub(crate) callback: Option<ProgressFn>,
    pub(crate) done: u64,
    pub(crate) total: u64,
}

impl Meter {
    pub(crate) fn add(&mut self, bytes: u64) -> Result<()> {
        self.done += bytes;
        let p = Progress { done: self.done, total: self.total };
        match &self.callback {
            Some(callback) if !callback(p) => Err(Error::Cancelled),
            _ => interrupt::check(),
        }
    }
}
