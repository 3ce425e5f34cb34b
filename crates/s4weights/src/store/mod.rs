//! A checkpoint store: what a training loop saves to and resumes from.
//!
//! [`CheckpointStore`] joins `s4-store`, which keeps and lists checkpoints in a folder or a bucket,
//! with [`crate::Writer`] and [`crate::Reader`], which know their content. A checkpoint becomes a
//! delta when that is smaller, with a parent chosen so that a restore reads few checkpoints.
//!
//! ```
//! use s4weights::store::{CheckpointStore, StoreOptions, SaveOptions};
//! use s4weights::{DType, TensorSource};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let url = dir.path().to_string_lossy();
//! let store = CheckpointStore::open_or_create(&url, &Default::default(), StoreOptions::default())?;
//! let mut weights: Vec<u8> = (0..8192u32).flat_map(|i| (i as f32).sqrt().to_le_bytes()).collect();
//! for step in 0..3 {
//!     weights[step as usize * 4] ^= 1;
//!     let tensors = [TensorSource::new("w", DType::Float32, &[8192], &weights)];
//!     store.save(step, &tensors, &SaveOptions::default())?;
//! }
//! let newest = store.load(None)?;
//! assert_eq!((newest.step(), newest.reader().read("w")?), (2, weights));
//! # Ok(()) }
//! ```
//!
//! All calls block, from any thread; requests run on threads that the store owns. Deliberately
//! absent: what the tensors are, which is the caller's `contents`.

mod bridge;
mod cache;
mod history;
mod import;
mod load;
mod manage;
mod objects;
mod open;
mod parents;
mod ranks;
mod rebase;
mod replicate;
mod save;

use std::sync::{Arc, Mutex};

pub use s4_delta::policy::Reason;
pub use s4_store::{
    Best, Cause, CheckReport, Checkpoint, CheckpointId, CommitUnknown, Conflict, Digest, Entry,
    Error as StoreError, Failure, Finding, Holder, Keep, LogDamage, Loss, Mode, Op, Place,
    ProbeLimits, ProbeReport, Publish, Reference, RepairReport, Repo, Retention, Retry, State,
    StorageOptions, SweepOptions, SweepReport, Swept, Verdict, Why, Writers,
};

pub use import::{ImportOptions, ListingFn};
pub use load::{Loaded, Skipped, StoredBytes, is_damage, is_unreadable};
pub use manage::CheckOptions;
pub use parents::WhyBase;
pub use ranks::{PartOf, RankPart};
pub use replicate::ReplicateOptions;
pub use save::{SaveOptions, Saved, StageSeconds};

use s4_engine::Preset;
use s4_format::limits::MAX_CHAIN;
use s4_planes::Simd;
use s4_store::Store;

use crate::buffers::LargeBuffers;
use crate::error::{Error, Result};
use crate::io::{open_place, put_files};
use crate::objects::ObjectOptions;
use crate::options::OwnCodecs;
use crate::recall::PlanMemory;
use bridge::Bridge;
use history::SaveHistory;
use open::Opener;

/// Most checkpoints that share a base, by default.
pub const DEFAULT_STORE_CHAIN: u32 = 16;

/// Most deltas that a restore reads, by default. Each takes about as long as the base (float32), or
/// up to twice as long (bfloat16, saved at every step): `docs/measurements.md` has figures.
pub const DEFAULT_STORE_HOPS: u32 = 2;

/// The largest [`StoreOptions::max_chain`].
const MAX_SHARING: u32 = 4096;

/// Options for using a store. (Its properties were fixed when it was created.)
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// How much effort goes into making tensors smaller.
    pub preset: Preset,
    /// Threads that encode and decode; `None`: as many as the machine has cores.
    pub threads: Option<usize>,
    /// Vector instructions; `None`: the best that the machine has.
    pub simd: Option<Simd>,
    /// Most checkpoints that share one base, including it: 1 to 4096. 1 means bases only. A new base
    /// comes sooner when deltas no longer pay, or when most tensors are new.
    pub max_chain: u32,
    /// Most deltas that a restore reads besides the base: 1 to 63. Fewer make deltas larger: with 1, each
    /// is a delta of the base; with `max_chain - 1` or more, of the previous checkpoint
    /// ([`s4_delta::Tree`]).
    pub max_hops: u32,
    /// Decides which checkpoints stay listed after a save; `None`: all do.
    pub retention: Option<Retention>,
    /// Bytes of memory for the values that later saves are deltas of: those of the base, and of one
    /// more checkpoint for each further hop, with an equal share for each. Values are kept raw if
    /// they fit their share, or else compressed if that fits, or else not at all: then every save
    /// reads them back from the store. For tensors on devices, frames are kept instead, and only
    /// those for which the engine's page-locked memory has no room
    /// ([`s4_engine::cuda::CudaEngine::keep_frames`]) are copied to this memory. Not counted are
    /// the buffers of a save, which later saves reuse and which the system may reclaim before that,
    /// and the samples for planning where values are read back: up to half as much again.
    pub parent_memory: usize,
    /// Bytes of buffers for encoding.
    pub memory: usize,
    /// Most bytes of an object: 4 to 64 MiB. In an object store, a checkpoint of less than 32 times as many has smaller
    /// ones, down to 4 MiB, so that it takes as many connections.
    pub object_bytes: usize,
    /// Codecs besides the project's: every handle that reads the store's checkpoints needs them.
    pub own: OwnCodecs,
    /// Requests, retries and uploads.
    pub requests: s4_store::StoreOptions,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            preset: Preset::default(),
            threads: None,
            simd: None,
            max_chain: DEFAULT_STORE_CHAIN,
            max_hops: DEFAULT_STORE_HOPS,
            retention: None,
            parent_memory: 1 << 30,
            memory: 128 << 20,
            object_bytes: 32 << 20,
            own: OwnCodecs::default(),
            requests: s4_store::StoreOptions::default(),
        }
    }
}

impl StoreOptions {
    fn check(&self) -> Result<()> {
        let within = |what, n: u32, most: u32| match (1..=most).contains(&n) {
            true => Ok(()),
            false => Err(Error::Argument(format!("{what} is {n}, but must be 1 to {most}"))),
        };
        within("max_chain", self.max_chain, MAX_SHARING)?;
        // A chain includes the base.
        within("max_hops", self.max_hops, MAX_CHAIN as u32 - 1)
    }
}

/// An open checkpoint store. Calls may come from several threads; saves wait for each other.
pub struct CheckpointStore {
    opener: Opener,
    options: StoreOptions,
    /// What this handle saved last. Locked for as long as a save lasts.
    history: Mutex<SaveHistory>,
    /// The checkpoint that was opened last.
    opened: Mutex<Option<Reference>>,
    /// Buffers for objects and for values that are kept.
    buffers: LargeBuffers,
    /// Choices and samples that make the planning of later saves faster.
    plans: Arc<PlanMemory>,
    /// Id of the process that opened the store.
    process: u32,
}

/// How long closing a store waits for its lease to be deleted; after that it expires.
const RELEASE: std::time::Duration = std::time::Duration::from_secs(5);

impl Drop for CheckpointStore {
    /// Gives back the lease of a store that allows one writer at a time.
    fn drop(&mut self) {
        // A forked child has none of its parent process's threads.
        if std::process::id() != self.process {
            return;
        }
        let store = self.opener.store.clone();
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let release = async move { drop(sender.send(store.release().await)) };
        if self.opener.bridge.spawn(release).is_err() {
            return;
        }
        match receiver.recv_timeout(RELEASE) {
            Ok(Ok(())) => {}
            Ok(Err(e)) => {
                tracing::error!(store = self.name(), error = %e, "could not release the store")
            }
            Err(_) => tracing::warn!(store = self.name(), "releasing the store took too long"),
        }
    }
}

impl CheckpointStore {
    /// Creates a store in a folder or below a URL, after probing what the place can do.
    ///
    /// # Errors
    /// [`Error::Store`] if there is one, or if the place cannot hold one; [`Error::Argument`].
    pub fn create(url: &str, storage: &StorageOptions, options: StoreOptions) -> Result<Self> {
        Self::create_at(&open_place(url, storage)?, options)
    }

    /// Opens a store.
    ///
    /// # Errors
    /// [`Error::Store`] if there is none or if it cannot be read; [`Error::Argument`].
    pub fn open(url: &str, storage: &StorageOptions, options: StoreOptions) -> Result<Self> {
        Self::open_at(&open_place(url, storage)?, options)
    }

    /// Opens a store for reading, even if its log is damaged: then it lists what can be proved, and
    /// [`CheckpointStore::log_damage`] says what is wrong. Calls that would write fail.
    ///
    /// # Errors
    /// As [`CheckpointStore::open`], except that a damaged log is no error.
    pub fn open_read_only(
        url: &str,
        storage: &StorageOptions,
        options: StoreOptions,
    ) -> Result<Self> {
        Self::open_read_only_at(&open_place(url, storage)?, options)
    }

    /// Opens a store, or creates it if there is none.
    ///
    /// # Errors
    /// As [`CheckpointStore::open`] and [`CheckpointStore::create`].
    pub fn open_or_create(
        url: &str,
        storage: &StorageOptions,
        options: StoreOptions,
    ) -> Result<Self> {
        Self::open_or_create_at(&open_place(url, storage)?, options)
    }

    /// As [`CheckpointStore::create`], at a place that the caller made.
    ///
    /// # Errors
    /// As [`CheckpointStore::create`].
    pub fn create_at(place: &Place, options: StoreOptions) -> Result<Self> {
        Self::start(place, options, |place, requests| async move {
            Store::create(&place, requests).await
        })
    }

    /// As [`CheckpointStore::open`], at a place that the caller made.
    ///
    /// # Errors
    /// As [`CheckpointStore::open`].
    pub fn open_at(place: &Place, options: StoreOptions) -> Result<Self> {
        Self::start(
            place,
            options,
            |place, requests| async move { Store::open(&place, requests).await },
        )
    }

    /// As [`CheckpointStore::open_read_only`], at a place that the caller made.
    ///
    /// # Errors
    /// As [`CheckpointStore::open_read_only`].
    pub fn open_read_only_at(place: &Place, options: StoreOptions) -> Result<Self> {
        Self::start(place, options, |place, requests| async move {
            Store::open_read_only(&place, requests).await
        })
    }

    /// As [`CheckpointStore::open_or_create`], at a place that the caller made.
    ///
    /// # Errors
    /// As [`CheckpointStore::open_or_create`].
    pub fn open_or_create_at(place: &Place, options: StoreOptions) -> Result<Self> {
        Self::start(place, options, |place, requests| async move {
            Store::open_or_create(&place, requests).await
        })
    }

    fn start<F>(
        place: &Place,
        options: StoreOptions,
        open: impl FnOnce(Place, s4_store::StoreOptions) -> F,
    ) -> Result<Self>
    where
        F: Future<Output = s4_store::Result<Store>> + Send + 'static,
    {
        options.check()?;
        let bridge = Bridge::new(place.name())?;
        let files = options.requests.files.clone().or_else(put_files);
        let requests = s4_store::StoreOptions { files, ..options.requests.clone() };
        let store = bridge.ask(open(place.clone(), requests))?;
        let local = place.as_folder().is_some();
        let opener = Opener { bridge, store, local, kept: Arc::default() };
        let buffers = LargeBuffers::new(options.buffers());
        let (history, opened) = (Mutex::default(), Mutex::default());
        let process = std::process::id();
        let plans = Arc::default();
        Ok(Self { opener, options, history, opened, buffers, plans, process })
    }

    /// The options for cutting a checkpoint that one process writes into objects. `values`: bytes of its values.
    fn objects_for(&self, values: u64) -> ObjectOptions {
        let most = ObjectOptions { bytes: self.options.object_bytes };
        if self.opener.local { most } else { most.for_connections(values) }
    }

    /// Folder or URL, for messages; holds no secret.
    #[must_use]
    pub fn name(&self) -> &str {
        self.opener.bridge.target()
    }

    /// The store's description of itself, such as its id and how many processes may write.
    #[must_use]
    pub fn repo(&self) -> &Repo {
        self.opener.store.repo()
    }

    /// Damage to the log; always empty unless the store was opened read-only.
    ///
    /// # Errors
    /// [`Error::Store`] if the log cannot be read.
    pub fn log_damage(&self) -> Result<Vec<LogDamage>> {
        let store = self.opener.store.clone();
        self.opener.bridge.ask(async move { store.log_damage().await })
    }

    /// The newest state of the log: the listed checkpoints and their parents.
    ///
    /// # Errors
    /// [`Error::Store`] if the log cannot be read.
    pub fn state(&self) -> Result<Arc<State>> {
        let store = self.opener.store.clone();
        self.opener.bridge.ask(async move { store.state().await })
    }

    fn error(&self, source: s4_store::Error) -> Error {
        self.opener.bridge.error(source)
    }
}
