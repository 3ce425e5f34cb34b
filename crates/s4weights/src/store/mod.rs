//! A checkpoint store: what a training loop saves to and resumes from.
//!
//! [`CheckpointStore`] joins `s4-store`, which keeps and lists checkpoints in a folder or a bucket,
//! with [`crate::Writer`] and [`crate::Reader`], which know what they hold. A checkpoint becomes a
//! difference from the one before when that is smaller; chains are kept short.
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
//!     let tensors = [TensorSource { name: "w", dtype: DType::Float32, shape: &[8192], data: &weights }];
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
mod kept;
mod load;
mod manage;
mod open;
mod rebase;
mod save;
mod sources;

use std::sync::{Arc, Mutex};

pub use s4_delta::policy::Reason;
pub use s4_store::{
    Best, Checkpoint, CheckpointId, CommitUnknown, Conflict, Entry, Error as StoreError, Finding,
    Hash, Keep, Mode, Op, Place, ProbeReport, Publish, Reference, Repo, Retention, Retry, State,
    StorageOptions, SweepOptions, SweepReport, Swept, Why, Writers,
};

pub use load::{Loaded, Skipped, is_damage};
pub use manage::{CheckOptions, CheckReport};
pub use save::{SaveOptions, Saved, WhyBase};

use s4_engine::Preset;
use s4_planes::Simd;
use s4_store::Store;

use crate::error::{Error, Result};
use crate::memory::{MemoryOptions, TensorCodec};
use crate::parent::{MemoryParent, Parent, Snapshot};
use crate::reader::Reader;
use crate::writer::TensorSource;
use bridge::Bridge;
use open::Opener;

/// The longest chain, unless told. Every level is decoded, each in about the time of a base: at
/// depth 4 a restore took 2.7 to 3.6 times as long as that of a base, at depth 8 nine times, while
/// longer chains make what is stored hardly smaller (ratio 1.37 for 1.34 on values like float32 AdamW).
pub const DEFAULT_STORE_CHAIN: u32 = 4;

/// How a store is used. What it is was decided when it was created.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// How much is tried to make tensors smaller.
    pub preset: Preset,
    /// Threads that encode and decode; `None`: as many as the machine has cores.
    pub threads: Option<usize>,
    /// Vector instructions; `None`: the best that the machine has.
    pub simd: Option<Simd>,
    /// Most checkpoints of a chain, the base counted: 1 to 64. 1 means bases only.
    pub max_chain: u32,
    /// A base after so many checkpoints; `None`: when the chain is as long as it may be, when
    /// differences no longer pay, or when most tensors are new.
    pub every: Option<u32>,
    /// What stays listed after a save; `None`: everything.
    pub retention: Option<Retention>,
    /// Bytes of memory to keep the values of the last save in, which the next one is compared with:
    /// as they are if they fit, compressed if that fits, else they are read back from the store. Of
    /// tensors on devices what was stored is kept, with all that it is a difference from.
    pub parent_memory: usize,
    /// Bytes of buffers for encoding.
    pub memory: usize,
    /// Bytes of an object, at most: 4 to 64 MiB.
    pub object_bytes: usize,
    /// Requests, retries and uploads.
    pub requests: s4_store::StoreOptions,
}

impl Default for StoreOptions {
    fn default() -> Self {
        let requests = s4_store::StoreOptions {
            upload_memory: 128 << 20,
            ..s4_store::StoreOptions::default()
        };
        Self {
            preset: Preset::default(),
            threads: None,
            simd: None,
            max_chain: DEFAULT_STORE_CHAIN,
            every: None,
            retention: None,
            parent_memory: 1 << 30,
            memory: 128 << 20,
            object_bytes: 32 << 20,
            requests,
        }
    }
}

impl StoreOptions {
    fn check(&self) -> Result<()> {
        if (1..=s4_store::MAX_CHAIN as u64).contains(&u64::from(self.max_chain)) {
            return Ok(());
        }
        let what = format!("chains of {} checkpoints: 1 to 64 are allowed", self.max_chain);
        Err(Error::Argument(what))
    }
}

/// An open checkpoint store. Calls may come from several threads; saves wait for each other.
pub struct CheckpointStore {
    opener: Opener,
    options: StoreOptions,
    last: Mutex<Option<Last>>,
}

/// The checkpoint that this handle saved last.
struct Last {
    id: CheckpointId,
    manifest_blake3: Hash,
    /// Its values, if they are in memory.
    values: Option<Values>,
}

/// The values of a checkpoint, for differences from it.
#[derive(Clone)]
pub(crate) enum Values {
    /// In memory, as they are or compressed.
    Memory(Arc<MemoryParent>),
    /// In the frames of the checkpoint and those that it needs: in memory, or in the store.
    Frames(Arc<Reader>, usize),
}

impl Values {
    pub(crate) fn parent(&self) -> Arc<dyn Parent> {
        match self {
            Self::Memory(values) => Arc::clone(values) as _,
            Self::Frames(reader, _) => Arc::clone(reader) as _,
        }
    }

    /// The open checkpoint, and the bytes of memory that it takes with all that it needs.
    pub(crate) fn reader(&self) -> Option<(Arc<Reader>, usize)> {
        match self {
            Self::Memory(_) => None,
            Self::Frames(reader, bytes) => Some((Arc::clone(reader), *bytes)),
        }
    }
}

impl Last {
    fn reference(&self) -> Reference {
        Reference { id: self.id, manifest_blake3: self.manifest_blake3 }
    }
}

impl CheckpointStore {
    /// Creates a store in a folder or below a URL, after probing what the place can do.
    ///
    /// # Errors
    /// [`Error::Store`] if there is one, or if the place cannot hold one; [`Error::Argument`].
    pub fn create(url: &str, storage: &StorageOptions, options: StoreOptions) -> Result<Self> {
        Self::create_at(&place(url, storage)?, options)
    }

    /// Opens a store.
    ///
    /// # Errors
    /// [`Error::Store`] if there is none or if it cannot be read; [`Error::Argument`].
    pub fn open(url: &str, storage: &StorageOptions, options: StoreOptions) -> Result<Self> {
        Self::open_at(&place(url, storage)?, options)
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
        Self::open_or_create_at(&place(url, storage)?, options)
    }

    /// As [`CheckpointStore::create`], at a place of the caller's.
    ///
    /// # Errors
    /// As [`CheckpointStore::create`].
    pub fn create_at(place: &Place, options: StoreOptions) -> Result<Self> {
        Self::start(place, options, |place, requests| async move {
            Store::create(&place, requests).await
        })
    }

    /// As [`CheckpointStore::open`], at a place of the caller's.
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

    /// As [`CheckpointStore::open_or_create`], at a place of the caller's.
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
        let store = bridge.ask(open(place.clone(), options.requests.clone()))?;
        let local = place.as_folder().is_some();
        Ok(Self { opener: Opener { bridge, store, local }, options, last: Mutex::new(None) })
    }

    /// Folder or URL, for messages; holds no secret.
    #[must_use]
    pub fn name(&self) -> &str {
        self.opener.bridge.target()
    }

    /// What the store below says of itself.
    #[must_use]
    pub fn repo(&self) -> &Repo {
        self.opener.store.repo()
    }

    /// The newest state of the log: what is listed, and what it depends on.
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

    /// Keeps the values of what was saved, as far as they fit.
    fn remember(
        &self,
        saved: &Checkpoint,
        snapshot: Snapshot,
        tensors: &[TensorSource<'_>],
    ) -> Option<Last> {
        let values = match self.keep(snapshot, tensors) {
            Ok(values) => values,
            Err(e) => {
                tracing::debug!(error = %e, "the next save reads this one back");
                None
            }
        };
        let manifest_blake3 = saved.about.manifest_blake3;
        let values = values.map(|values| Values::Memory(Arc::new(values)));
        Some(Last { id: saved.id(), manifest_blake3, values })
    }

    fn keep(
        &self,
        snapshot: Snapshot,
        tensors: &[TensorSource<'_>],
    ) -> Result<Option<MemoryParent>> {
        let budget = self.options.parent_memory;
        let snapshot = Arc::new(snapshot);
        let held = |t: &&TensorSource<'_>| snapshot.tensors.contains_key(t.name);
        let raw: usize = tensors.iter().filter(held).map(|t| t.data.len()).sum();
        let mut parent = MemoryParent::new(Arc::clone(&snapshot), budget);
        if raw <= budget {
            for t in tensors.iter().filter(held) {
                parent.hold(t.name, bytes::Bytes::copy_from_slice(t.data))?;
            }
            return Ok(Some(parent));
        }
        // Values rarely become smaller than this; what is tried in vain costs time.
        if raw / 3 * 2 > budget {
            return Ok(None);
        }
        let (threads, simd) = (self.options.threads, self.options.simd);
        let codec = TensorCodec::new(MemoryOptions { preset: Preset::Fast, threads, simd })?;
        let codec = Arc::new(codec);
        for t in tensors.iter().filter(held) {
            if !parent.keep(&codec, t.name, t.data)? {
                return Ok(None);
            }
        }
        Ok(Some(parent))
    }
}

/// A place by URL or path.
fn place(url: &str, storage: &StorageOptions) -> Result<Place> {
    let named = |source| Error::Store { target: url_name(url), source: Box::new(source) };
    Place::open_url(url, storage).map_err(|e| match e {
        s4_store::Error::Argument(what) => Error::Argument(what),
        other => named(other),
    })
}

/// A URL without what may be secret in it.
fn url_name(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or_default().to_owned()
}
