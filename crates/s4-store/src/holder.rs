//! The process that holds the lease of a store for one writer at a time.

use std::fmt;
use std::sync::OnceLock;

use chrono::DateTime;
use serde::{Deserialize, Serialize};

/// The holder of the lease of a store that allows one writer at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The machine's own name for itself.
    pub host: String,
    /// The process there.
    pub pid: u32,
    /// When it took the lease, by its clock, in milliseconds since 1970.
    pub since_ms: i64,
}

impl Holder {
    pub(crate) fn this_process(since_ms: i64) -> Self {
        Self { host: host().to_owned(), pid: std::process::id(), since_ms }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The host was read from an object that anybody may have written.
        let host: String = self.host.chars().filter(|c| !c.is_control()).take(64).collect();
        write!(f, "process {} on {host}", self.pid)?;
        match DateTime::from_timestamp_millis(self.since_ms) {
            Some(since) => write!(f, " (since {})", since.format("%Y-%m-%d %H:%M:%S UTC")),
            None => Ok(()),
        }
    }
}

fn host() -> &'static str {
    static HOST: OnceLock<String> = OnceLock::new();
    HOST.get_or_init(|| {
        let of_kernel = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let name = of_kernel
            .or_else(|| std::env::var("HOSTNAME").ok())
            .or_else(|| std::env::var("COMPUTERNAME").ok());
        name.map_or("an unnamed host".to_owned(), |name| name.trim().to_owned())
    })
}
