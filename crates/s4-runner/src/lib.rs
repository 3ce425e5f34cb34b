//! The service that trainers hand checkpoints to.
//!
//! A trainer writes a checkpoint to the local drive and submits it over a Unix socket; from then on
//! the runner owns it. The runner compresses it against an earlier checkpoint, reads it back,
//! compares and uploads it, while the trainer continues. An accepted checkpoint survives `kill -9`
//! at any point and is listed exactly once: `docs/runner.md` says why. A read-only page on TCP
//! shows what is going on.
//!
//! Deliberately absent: how checkpoints are encoded and stored (`s4weights`), and any way for the
//! page to change anything.
#![cfg(unix)]
#![deny(unsafe_code)]

mod clock;
mod config;
mod connections;
mod converter;
mod dropped;
pub mod entitlement;
mod error;
mod folder;
mod health;
mod http;
mod imds;
mod interruption;
mod journal;
mod lock;
mod memory;
mod metrics;
mod notify;
mod queue;
mod record;
mod restore;
mod restores;
mod run;
mod service;
mod socket;
mod staging;
mod status;
mod stores;
mod watch;
mod worker;

pub use config::{Config, Watch};
pub use converter::Unconverted;
pub use error::{Error, Result};
pub use imds::{Imds, NoAnswer};
pub use run::{Hooks, run};
pub use watch::Convert;
pub use worker::CrashHook;
