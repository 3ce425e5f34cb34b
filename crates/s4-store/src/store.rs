//! Creating, opening and reading a store.

use std::sync::Arc;

use object_store::PutMode;
use tokio::sync::{Mutex, OnceCell};

use crate::entry::{Entry, Op};
use crate::error::{CommitUnknown, Error, Result};
use crate::id::{CheckpointId, Hash};
use crate::io::Io;
use crate::layout::{Layout, Part};
use crate::local::{Folder, Trust};
use crate::log::Known;
use crate::manifest::{MAX_MANIFEST, Manifest};
use crate::options::{StoreOptions, Writers};
use crate::place::{Connected, Place};
use crate::probe::{ProbeReport, probe};
use crate::reading::Reading;
use crate::repo::{MAX_REPO, Mode, Repo};
use crate::state::{Checkpoint, End, State};

/// An open checkpoint store. Cheap to clone; clones share everything.
#[derive(Debug, Clone)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: String,
    server: String,
    pub(crate) layout: Layout,
    pub(crate) io: Io,
    pub(crate) folder: Option<Folder>,
    pub(crate) repo: Repo,
    pub(crate) options: StoreOptions,
    pub(crate) known: Mutex<Known>,
    /// Set once this process may write here.
    writer: OnceCell<()>,
}

/// What became of a commit whose outcome was unknown.
#[derive(Debug, Clone, PartialEq)]
pub enum Resolution {
    /// It is in the log.
    Committed(Box<Entry>),
    /// It is not, and can never be.
    Lost,
}

impl Store {
    /// Creates a store, after probing what the place can do.
    ///
    /// # Errors
    /// [`Error::StoreExists`]; [`Error::Refused`] where a store would not be safe; failures of the
    /// place.
    pub async fn create(place: &Place, options: StoreOptions) -> Result<Self> {
        let there = place.connect(true)?;
        check_file_system(&there, &options)?;
        let layout = Layout::new(there.prefix.clone());
        let io = make_io(&there, &options);
        match io.head(&layout.repo()).await {
            Ok(_) => return Err(Error::StoreExists { place: place.name().to_owned() }),
            Err(e) if e.is_missing() => {}
            Err(e) => return Err(e),
        }
        let found = probe(io.store(), &layout.scratch(), options.ids.next()).await?;
        let mode = choose_mode(place.name(), &found, &options)?;
        let repo = Repo::new(options.ids.next(), mode, found, place.server());
        let bytes = repo.to_bytes(layout.repo().as_ref())?;
        let put_mode = if mode == Mode::Many { PutMode::Create } else { PutMode::Overwrite };
        let put = io.store().put_opts(&layout.repo(), bytes.into(), put_mode.into()).await;
        // Whatever was answered, what is there counts: our own, or another creator's.
        let there_now = read_repo(&io, &layout).await.map_err(|e| match put {
            Err(source) if e.is_missing() => Error::storage("create", layout.repo(), source),
            _ => e,
        })?;
        if there_now.id != repo.id {
            return Err(Error::StoreExists { place: place.name().to_owned() });
        }
        if let Some(folder) = &there.folder {
            // The answer may have been the failure of just this.
            folder.sync_names(&there.prefix)?;
        }
        Self::assemble(place, there, options, repo).await
    }

    /// Opens a store.
    ///
    /// # Errors
    /// [`Error::NoStore`]; [`Error::Unsupported`] and [`Error::Corrupt`] if its state cannot be read;
    /// failures of the place.
    pub async fn open(place: &Place, options: StoreOptions) -> Result<Self> {
        let there = place.connect(false)?;
        let layout = Layout::new(there.prefix.clone());
        let io = make_io(&there, &options);
        let repo = read_repo(&io, &layout).await.map_err(|e| match e {
            Error::Missing { .. } => Error::NoStore { place: place.name().to_owned() },
            other => other,
        })?;
        Self::assemble(place, there, options, repo).await
    }

    /// Opens a store, or creates it if there is none. Any number of processes may do so at once.
    ///
    /// # Errors
    /// As [`Store::open`] and [`Store::create`].
    pub async fn open_or_create(place: &Place, options: StoreOptions) -> Result<Self> {
        match Self::open(place, options.clone()).await {
            Err(Error::NoStore { .. }) => {}
            other => return other,
        }
        match Self::create(place, options.clone()).await {
            Err(Error::StoreExists { .. }) => Self::open(place, options).await,
            other => other,
        }
    }

    async fn assemble(
        place: &Place,
        there: Connected,
        options: StoreOptions,
        repo: Repo,
    ) -> Result<Self> {
        let io = make_io(&there, &options);
        let inner = Inner {
            name: place.name().to_owned(),
            server: place.server().to_owned(),
            layout: Layout::new(there.prefix),
            io,
            folder: there.folder,
            repo,
            options,
            known: Mutex::default(),
            writer: OnceCell::new(),
        };
        let known = inner.load().await?;
        *inner.known.lock().await = known;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The place's name, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// What `repo.json` says.
    #[must_use]
    pub fn repo(&self) -> &Repo {
        &self.inner.repo
    }

    /// The newest state: what is listed, and what it depends on. One request if nothing changed.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub async fn state(&self) -> Result<Arc<State>> {
        let mut known = self.inner.known.lock().await;
        self.inner.refresh(&mut known).await?;
        Ok(Arc::clone(&known.state))
    }

    /// All listed checkpoints, from the oldest to the newest.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub async fn list(&self) -> Result<Vec<Checkpoint>> {
        Ok(self.state().await?.list().into_iter().cloned().collect())
    }

    /// The newest checkpoint (see [`State::latest`]), if there is any.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub async fn latest(&self) -> Result<Option<Checkpoint>> {
        Ok(self.state().await?.latest().cloned())
    }

    /// A checkpoint's manifest, checked against the log's hash.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if it is not listed; [`Error::Corrupt`] or [`Error::Missing`] if it is
    /// damaged.
    pub async fn read(&self, id: CheckpointId) -> Result<Reading> {
        let state = self.state().await?;
        let checkpoint =
            state.get(id).ok_or_else(|| Error::NoCheckpoint { what: id.to_string() })?;
        self.read_manifest(checkpoint).await
    }

    /// As [`Store::read`], for a checkpoint taken from a state: no look at the log.
    ///
    /// # Errors
    /// [`Error::Corrupt`] or [`Error::Missing`] if it is damaged.
    pub async fn read_manifest(&self, checkpoint: &Checkpoint) -> Result<Reading> {
        let about = &checkpoint.about;
        let key = self.inner.layout.part(about.id, Part::Manifest);
        let max = about.manifest_len.min(MAX_MANIFEST);
        let check = |bytes: &bytes::Bytes| {
            if Hash::of(bytes) == about.manifest_blake3 {
                Manifest::parse(key.as_ref(), about.id, bytes)
            } else {
                Err(Error::corrupt(&key, "its hash is not the one in the log"))
            }
        };
        let manifest = self.inner.io.get_checked(&key, max, check).await?;
        if manifest.objects.len() as u64 != u64::from(about.objects)
            || manifest.data_len() != about.data_len
        {
            return Err(Error::corrupt(key, "it lists other objects than the log says"));
        }
        Ok(Reading::new(Arc::clone(&self.inner), about.id, manifest))
    }

    /// Finds out what became of a commit, and makes sure that it stays so.
    ///
    /// # Errors
    /// If the log cannot be read or written.
    pub async fn resolve(&self, unknown: &CommitUnknown) -> Result<Resolution> {
        Ok(match self.inner.resolve(unknown).await? {
            Some(entry) => Resolution::Committed(Box::new(entry)),
            None => Resolution::Lost,
        })
    }

    /// Takes checkpoints off the list, and with them nothing else: their data stays until a sweep.
    /// Returns how many were listed and now are not.
    ///
    /// # Errors
    /// [`Error::Conflict`] if one is pinned, or needed by one that is not among `ids`.
    pub async fn retire(&self, ids: &[CheckpointId], reason: &str) -> Result<usize> {
        let mut done = 0;
        for batch in self.retire_order(ids).await?.chunks(MAX_IDS) {
            let op = Op::Retire { ids: batch.to_vec(), reason: reason.chars().take(200).collect() };
            self.inner.append(|_| Ok(Some(op.clone()))).await?;
            done += batch.len();
        }
        Ok(done)
    }

    /// Checks that all may go, and puts those that need others before these, so that a large set can
    /// go in several entries.
    async fn retire_order(&self, ids: &[CheckpointId]) -> Result<Vec<CheckpointId>> {
        let state = self.state().await?;
        state.check(&Op::Retire { ids: ids.to_vec(), reason: String::new() })?;
        let mut order = ids.to_vec();
        order.sort_unstable();
        order.dedup();
        let depth = |id: &CheckpointId| state.chain(*id).map_or(0, |chain| chain.len());
        order.sort_by_cached_key(|id| std::cmp::Reverse(depth(id)));
        Ok(order)
    }

    /// Protects a checkpoint from being retired.
    ///
    /// # Errors
    /// [`Error::Conflict`] if it is not listed.
    pub async fn pin(&self, id: CheckpointId) -> Result<()> {
        self.set_pinned(id, true).await
    }

    /// Ends a protection.
    ///
    /// # Errors
    /// [`Error::Conflict`] if it is not listed.
    pub async fn unpin(&self, id: CheckpointId) -> Result<()> {
        self.set_pinned(id, false).await
    }

    async fn set_pinned(&self, id: CheckpointId, pinned: bool) -> Result<()> {
        let build = |state: &State| {
            let op = if pinned { Op::Pin { id } } else { Op::Unpin { id } };
            let done = state.get(id).is_some_and(|c| c.pinned == pinned);
            Ok((!done).then_some(op))
        };
        self.inner.append(build).await.map(drop)
    }

    /// Gives up an attempt that was dropped: it can never be published after this, and its data is
    /// deleted.
    ///
    /// # Errors
    /// [`Error::Conflict`] if it is or was published.
    pub async fn abort(&self, id: CheckpointId) -> Result<()> {
        let build = |state: &State| {
            let done = state.dead(id).is_some_and(|d| d.how == End::Aborted);
            Ok((!done).then(|| Op::Abort { ids: vec![id] }))
        };
        self.inner.append(build).await?;
        self.inner.sync_log()?;
        self.inner.delete_checkpoint(id).await.map(drop)
    }

    /// All entries of the log, from `from` (at least 1) on.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub async fn log(&self, from: u64) -> Result<Vec<Entry>> {
        self.inner.entries(from.max(1)).await
    }
}

/// Ids in one log entry, which bounds its size.
pub(crate) const MAX_IDS: usize = 500;

impl Inner {
    /// Makes sure that this process may write: probes again what was moved to another server, and
    /// says loudly if there must be no other writer.
    pub(crate) async fn ensure_writer(&self) -> Result<()> {
        self.writer.get_or_try_init(|| self.become_writer()).await.map(drop)
    }

    async fn become_writer(&self) -> Result<()> {
        if self.repo.mode == Mode::Single {
            tracing::warn!(store = %self.name, "{SINGLE}");
        } else if self.repo.probed_at != self.server {
            tracing::warn!(
                store = %self.name, was = %self.repo.probed_at, is = %self.server,
                "this store was created elsewhere: probing again"
            );
            let found =
                probe(self.io.store(), &self.layout.scratch(), self.options.ids.next()).await?;
            if !found.many_writers() {
                return Err(Error::Refused(format!(
                    "{} was created for many writers on another server; here conditional writes do \
                     not work ({}): copy it to a server where they do",
                    self.name, found.detail
                )));
            }
        }
        Ok(())
    }

    /// Requests on their way at once.
    pub(crate) fn concurrency(&self) -> usize {
        self.options.concurrency.max(1)
    }

    pub(crate) async fn reached(&self, point: &'static str) {
        if let Some(points) = &self.options.crash_points {
            points.reached(point).await;
        }
    }
}

const SINGLE: &str = "this store allows ONE WRITER AT A TIME: its server cannot create an object only \
                      if it is absent, so a second writer would silently undo the first one's saves";

fn make_io(there: &Connected, options: &StoreOptions) -> Io {
    let store = Arc::clone(&there.store);
    Io::new(store, options.retry.clone(), options.upload_memory, options.bandwidth)
}

async fn read_repo(io: &Io, layout: &Layout) -> Result<Repo> {
    let key = layout.repo();
    io.get_checked(&key, MAX_REPO, |bytes| Repo::parse(key.as_ref(), bytes)).await
}

fn check_file_system(there: &Connected, options: &StoreOptions) -> Result<()> {
    let Some(folder) = &there.folder else { return Ok(()) };
    let path = folder.root().display();
    match folder.trust() {
        Trust::Full => {}
        Trust::Doubtful(kind) => tracing::warn!(
            "{path} is on {kind}: what one machine wrote may reach others late, and a power cut may \
             undo what was acknowledged"
        ),
        Trust::None(kind) if options.allow_network_fs => {
            tracing::warn!("{path} is on {kind}, whose guarantees are too weak for a store");
        }
        Trust::None(kind) => {
            return Err(Error::Refused(format!(
                "{path} is on {kind}, whose guarantees are too weak for a checkpoint store; \
                 `allow_network_fs` uses it all the same"
            )));
        }
    }
    Ok(())
}

fn choose_mode(place: &str, found: &ProbeReport, options: &StoreOptions) -> Result<Mode> {
    if found.many_writers() {
        return Ok(Mode::Many);
    }
    if options.writers == Writers::Many {
        return Err(Error::Refused(format!(
            "{place} cannot create an object only if it is absent, which several writers need: {}",
            found.detail
        )));
    }
    tracing::warn!(place, found = %found.detail, "{SINGLE}");
    Ok(Mode::Single)
}
