//! The service that trainers hand checkpoints to.
//!
//! A trainer writes a checkpoint to the local drive and submits it over a Unix socket; from then on it is the
//! runner's. It is compressed against an earlier one, read back and compared, and uploaded; the trainer goes
//! on meanwhile. What was accepted survives `kill -9` at any point, and is listed once: `docs/runner.md` says
//! why. A page on TCP tells what is going on, and changes nothing.
//!
//! Deliberately absent: how checkpoints are encoded and stored (`s4weights`), and any way for the page to
//! change something.
#![cfg(unix)]
#![deny(unsafe_code)]

mod clock;
mod config;
mod connections;
mod converter;
mod dropped;
pub mod entitlement;
mod error;
mod health;
mod http;
mod imds;
mod interruption;
mod journal;
mod memory;
mod metrics;
mod notify;
mod queue;
mod record;
mod restore;
mod run;
mod service;
mod socket;
mod staging;
mod status;
mod stores;
mod watch;
mod worker;

pub use config::{Config, Watch};
pub use error::{Error, Result};
pub use imds::{Imds, NoAnswer};
pub use run::{Hooks, run};
pub use watch::{Convert, Unconverted};
pub use worker::CrashPoints;
