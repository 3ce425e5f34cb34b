//! The checkpoint store: chains of checkpoints in a folder or a bucket, published atomically. It never
//! deletes anything that a listed checkpoint needs.
//!
//! A [`Store`] keeps opaque data objects and an opaque manifest for each checkpoint. Checkpoints
//! are listed in a log of small objects, each created once and never changed; creating the next one
//! is the only way to change anything, and every reader replays the same entries by the same rules
//! ([`State`]). `docs/store.md` describes the objects, the protocol, and why it is safe.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use s4_store::{About, Place, Store, StoreOptions};
//!
//! let folder = tempfile::tempdir()?;
//! let place = Place::open_url(&folder.path().to_string_lossy(), &Default::default())?;
//! let store = Store::open_or_create(&place, StoreOptions::default()).await?;
//! let mut attempt = store.begin().await?;
//! attempt.put("weights", "encoded elsewhere".into()).await?;
//! let saved = attempt.publish("any manifest".into(), About { step: 100, ..About::default() }).await?;
//!
//! let latest = store.latest().await?.ok_or("empty")?;
//! assert_eq!(latest.id(), saved.id());
//! let reading = store.read(latest.id()).await?;
//! assert_eq!(reading.object(0).await?, "encoded elsewhere");
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! Futures need a tokio runtime with time and I/O. A dropped future stops where it is: the data of
//! an unfinished attempt stays until a sweep deletes it, and a commit in flight may or may not be
//! in the log.
//!
//! Deliberately absent: compression and the meaning of the bytes; multipart uploads, which object
//! stores keep and bill when a client dies; locks, which a paused process outlives (the lease of a
//! store with one writer at a time merely guards against a second one); decisions that depend on the
//! clock of a client.
#![forbid(unsafe_code)]

mod absent;
mod attempt;
mod bulk;
mod cause;
mod check;
mod commit;
mod entry;
mod error;
mod failure;
mod holder;
mod id;
mod inner;
mod io;
mod known;
mod layout;
mod lease;
mod lineage;
mod local;
mod log;
mod manifest;
mod options;
mod place;
mod probe;
mod reading;
mod rebase;
mod reconstruct;
mod redact;
mod removal;
mod repair;
mod replay;
mod repo;
mod retention;
mod retry;
mod salvage;
mod seal;
mod state;
mod store;
mod sweep;
pub mod testing;
mod unretire;
mod url;
mod view;

pub use attempt::{About, Attempt, Staged};
pub use cause::Cause;
pub use check::{CheckOptions, CheckReport, Finding, Inspector, Verdict};
pub use entry::{Entry, Op, Publish, Reference};
pub use error::{CommitUnknown, Conflict, Error, LogDamage, Result};
pub use failure::Failure;
pub use holder::Holder;
pub use id::{CheckpointId, Ids, InvalidId, TimeIds, WriteId};
pub use layout::{MAX_RANK_OBJECTS, MAX_RANKS, Parts};
pub use manifest::{MAX_MANIFEST, MAX_OBJECT, Manifest, ObjectInfo};
pub use options::{
    CrashPoints, ProbeLimits, PutFiles, Retry, StoreOptions, Writers, upload_memory,
};
pub use place::Place;
pub use probe::ProbeReport;
pub use reading::Reading;
pub use rebase::{CallbackError, Rebaser};
pub use redact::{redact_text, redact_url};
pub use repair::{Loss, RepairReport};
pub use repo::{Mode, Repo};
pub use retention::{Best, Keep, Plan, Retention};
pub use retry::Retrier;
pub use s4_format::Digest;
pub use s4_format::limits::MAX_CHAIN;
pub use state::{Checkpoint, Dead, End, State};
pub use store::{Resolution, Store};
pub use sweep::{SHORTEST_GRACE, SweepOptions, SweepReport, Swept, Why};
pub use url::{StorageOptions, check_options, check_url, is_url};
