//! Creating, opening and reading a store.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{Mutex, OnceCell};
use tokio::time::Instant;

use crate::absent::why_absent;
use crate::entry::{Entry, MAX_IDS, Op};
use crate::error::{CommitUnknown, Conflict, Error, LogDamage, Result};
use crate::failure::Failure;
use crate::holder::Holder;
use crate::id::CheckpointId;
use crate::inner::{Inner, read_repo};
use crate::io::Io;
use crate::known::Recent;
use crate::layout::Layout;
use crate::lease::Lease;
use crate::options::{StoreOptions, Writers};
use crate::place::{Connected, Place};
use crate::probe::{ProbeReport, probe, probe_twice};
use crate::reading::Reading;
use crate::repo::{Mode, Repo};
use crate::state::{Checkpoint, End, State};

/// An open checkpoint store. Cheap to clone; clones share everything.
#[derive(Debug, Clone)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

/// The outcome of a commit, once it is known.
#[derive(Debug, Clone, PartialEq)]
pub enum Resolution {
    /// It is in the log.
    Committed(Box<Entry>),
    /// It is not, and can never be.
    Lost,
}

impl Store {
    /// Creates a store, after probing the place.
    ///
    /// # Errors
    /// [`Error::StoreExists`]; [`Error::Refused`] where a store would not be safe;
    /// [`Error::ProbeDisturbed`] where that could not be found out; [`Error::Locked`]; failures of the
    /// place.
    pub async fn create(place: &Place, options: StoreOptions) -> Result<Self> {
        let there = place.connect(true)?;
        if let Some(folder) = &there.folder {
            folder.check_writable(options.allow_network_fs)?;
        }
        let layout = Layout::new(there.prefix.clone());
        let io = make_io(&there, &options);
        match io.head(&layout.repo()).await {
            Ok(_) => return Err(Error::StoreExists { place: place.name().to_owned() }),
            Err(e) if e.is_missing() => {}
            Err(e) => return Err(e),
        }
        // A new store over the remains of another one would mix their logs.
        match why_absent(&io, &layout, place.name()).await {
            Error::NoStore { .. } => {}
            other => return Err(other),
        }
        let (mode, found) = choose_mode(place, &io, &layout, &options).await?;
        let repo = Repo::new(options.ids.next(), mode, found, place.server());
        let lease = lease_for(place, &there, &options, mode);
        if let Some(lease) = &lease {
            lease.take().await?;
        }
        let created = create_repo(&io, &layout, place.name(), &repo).await;
        if let (Err(_), Some(lease)) = (&created, &lease) {
            // The lease would expire, but nobody needs to wait for that.
            let _ = lease.release().await;
        }
        created?;
        if let Some(folder) = &there.folder {
            // The create may have reported failure because this very sync failed.
            folder.sync_names(&there.prefix)?;
        }
        let store = Self::assemble(place, there, options, repo, lease, false).await?;
        // The file system was checked above.
        let _ = store.inner.writable.set(());
        Ok(store)
    }

    /// Opens a store.
    ///
    /// # Errors
    /// [`Error::NoStore`] if the place is known to hold none; [`Error::NoBucket`];
    /// [`Error::LogDamaged`]; [`Error::Unsupported`] and [`Error::Corrupt`] if its state cannot be
    /// read; failures of the place.
    pub async fn open(place: &Place, options: StoreOptions) -> Result<Self> {
        Self::open_as(place, options, false).await
    }

    /// Opens a store to read it, even if its log is damaged: then it lists what can be proved, and
    /// [`Store::log_damage`] says what is wrong. Nothing is ever written.
    ///
    /// # Errors
    /// As [`Store::open`], except [`Error::LogDamaged`].
    pub async fn open_read_only(place: &Place, options: StoreOptions) -> Result<Self> {
        Self::open_as(place, options, true).await
    }

    async fn open_as(place: &Place, options: StoreOptions, read_only: bool) -> Result<Self> {
        let there = place.connect(false)?;
        let layout = Layout::new(there.prefix.clone());
        let io = make_io(&there, &options);
        let repo = match read_repo(&io, &layout).await {
            Err(Error::Missing { .. }) => match why_absent(&io, &layout, place.name()).await {
                Error::StoreExists { .. } => read_repo(&io, &layout).await?,
                other => return Err(other),
            },
            other => other?,
        };
        let lease = lease_for(place, &there, &options, repo.mode);
        Self::assemble(place, there, options, repo, lease, read_only).await
    }

    /// Opens a store, or creates it if there is none. Any number of processes may do so at the same time.
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
            // Whoever holds the lease may have created the store.
            Err(e @ Error::Locked { .. }) => Self::open(place, options).await.map_err(|_| e),
            other => other,
        }
    }

    async fn assemble(
        place: &Place,
        there: Connected,
        options: StoreOptions,
        repo: Repo,
        lease: Option<Arc<Lease>>,
        read_only: bool,
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
            recent: Recent::default(),
            read_only,
            writable: OnceCell::new(),
            writer: OnceCell::new(),
            lease,
        };
        let known = inner.load().await?;
        inner.warn_of(&known.damage);
        *inner.known.lock().await = known;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The place's name, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The content of `repo.json`.
    #[must_use]
    pub fn repo(&self) -> &Repo {
        &self.inner.repo
    }

    /// The newest state: what is listed, and what it depends on. Two requests, in parallel, if nothing changed.
    ///
    /// # Errors
    /// If the log cannot be read; [`Error::Gone`] if the store, or part of the log that this process has read, no
    /// longer exists.
    pub async fn state(&self) -> Result<Arc<State>> {
        let mut known = self.inner.known.lock().await;
        self.inner.refresh_checked(&mut known).await?;
        Ok(Arc::clone(&known.state))
    }

    /// The state as last read; makes no request.
    pub async fn known(&self) -> Arc<State> {
        Arc::clone(&self.inner.known.lock().await.state)
    }

    /// Damage to the log; always empty unless the store was opened read-only.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub async fn log_damage(&self) -> Result<Vec<LogDamage>> {
        let mut known = self.inner.known.lock().await;
        self.inner.refresh(&mut known).await?;
        Ok(known.damage.clone())
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

    /// As [`Store::read`], for a checkpoint of a state that is already known: the log is not read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] or [`Error::Missing`] if it is damaged; [`Error::Gone`] if the store no longer exists.
    pub async fn read_manifest(&self, checkpoint: &Checkpoint) -> Result<Reading> {
        let manifest = self.inner.manifest_of(&checkpoint.about).await?;
        Ok(Reading::new(Arc::clone(&self.inner), checkpoint.id(), manifest))
    }

    /// Finds out whether a commit of unknown outcome is in the log, and makes the answer final.
    ///
    /// # Errors
    /// If the log cannot be read or written.
    pub async fn resolve(&self, unknown: &CommitUnknown) -> Result<Resolution> {
        Ok(match self.inner.resolve(unknown).await? {
            Some(entry) => Resolution::Committed(Box::new(entry)),
            None => Resolution::Lost,
        })
    }

    /// Takes checkpoints off the list, and does nothing else: their data stays until a sweep.
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

    /// Checks that all may be retired, and puts deltas before their parents, so that a large set can be
    /// retired in several entries.
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

    /// Ends the protection that [`Store::pin`] began.
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
            match state.dead(id).map(|d| d.how) {
                Some(End::Aborted) => Ok(None),
                // Its data stays until the grace of a sweep is over.
                Some(end) => Err(Conflict::Spent { id, state: end.word() }.into()),
                None => Ok(Some(Op::Abort { ids: vec![id] })),
            }
        };
        self.inner.append(build).await?;
        self.inner.sync_log()?;
        self.inner.delete_checkpoint(id).await.map(drop)
    }

    /// Probes the place of this store again, whatever was found when it was created. Changes nothing.
    ///
    /// # Errors
    /// As [`Place::probe`].
    pub async fn probe_again(&self) -> Result<ProbeReport> {
        self.inner.probe().await
    }

    /// Probes the place again and, if several writers are safe there, opens a store for one writer
    /// at a time to any number of writers: the only change that is ever made to `repo.json`. This
    /// handle holds the lease meanwhile, and can only read afterwards: open the store again to
    /// write to it.
    ///
    /// Meanwhile no process may write to the store with a version of this library that does not
    /// know leases.
    ///
    /// # Errors
    /// As [`Place::probe`]; [`Error::Refused`] where several writers are not safe; [`Error::Locked`]
    /// while another process writes.
    pub async fn allow_many_writers(&self) -> Result<ProbeReport> {
        let inner = &self.inner;
        let Some(_) = &inner.lease else { return Ok(inner.repo.probe.clone()) };
        inner.ensure_writer().await?;
        let done = inner.allow_many().await;
        let released = self.release().await;
        let found = done?;
        released.map(|()| found)
    }

    /// Ends writing: deletes the lease, if this handle has one; the next write takes it again. If
    /// other writers are active, it checks once more that its own commits are in the log, and
    /// commits again what was lost.
    ///
    /// # Errors
    /// If the lease cannot be removed (it then expires); if the log cannot be read;
    /// [`Error::SaveLost`].
    pub async fn release(&self) -> Result<()> {
        if let Some(lease) = &self.inner.lease {
            // A commit in progress needs the lease, and so does one whose write may still land: it could overwrite
            // the next holder's.
            let open = self.inner.known.lock().await.own.open.is_some();
            // Without the lease, which may be another's by now, this process may not write.
            if open && lease.is_held().await {
                self.inner.append(|_| Ok(None)).await?;
            }
            return lease.release().await;
        }
        // If the lock is held, a commit holds it, and makes this check itself.
        let others = self.inner.known.try_lock().is_ok_and(|known| known.own.others_are_near());
        if others {
            self.inner.append(|_| Ok(None)).await?;
        }
        Ok(())
    }

    /// Removes the leases of other processes and returns their holders. Only for processes that are
    /// known to be dead: one that is alive notices before its next commit, and loses its save.
    ///
    /// # Errors
    /// [`Error::Argument`] for a store that allows many writers, which has none.
    pub async fn break_lease(&self) -> Result<Vec<Holder>> {
        match &self.inner.lease {
            Some(lease) => lease.remove_others().await,
            None => Err(Error::Argument(format!(
                "{} allows many writers and has no lease",
                self.name()
            ))),
        }
    }

    /// All log entries from number `from` (at least 1) on; if the log is damaged, those that can be
    /// read.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub async fn log(&self, from: u64) -> Result<Vec<Entry>> {
        self.inner.entries(from.max(1)).await
    }
}

impl Place {
    /// Finds out whether several writers are safe in this place, whether it holds a store or not. A
    /// folder that is created for the probe is removed again. A long probe reports progress as
    /// `tracing` events.
    ///
    /// # Errors
    /// [`Error::ProbeDisturbed`] if too few trials had clean answers until the deadline of
    /// [`crate::Retry`]; [`Error::Storage`] if nothing can be written here at all.
    pub async fn probe(&self, options: &StoreOptions) -> Result<ProbeReport> {
        let new = self.as_folder().filter(|folder| !folder.exists());
        let there = self.connect(true)?;
        let scratch = Layout::new(there.prefix.clone()).scratch();
        let found = probe(&there.store, &scratch, options, there.folder.is_some()).await;
        if let Some(new) = new {
            // `remove_dir` removes only empty folders.
            let _ = std::fs::remove_dir(new.join(scratch.as_ref()));
            let _ = std::fs::remove_dir(new);
        }
        found
    }
}

/// Maximum bytes of objects in flight to a folder: writing more files in parallel is not faster.
const FOLDER_MEMORY: usize = 256 << 20;

fn make_io(there: &Connected, options: &StoreOptions) -> Io {
    let store = Arc::clone(&there.store);
    let most = if there.folder.is_some() { FOLDER_MEMORY } else { usize::MAX };
    let memory = options.upload_memory.min(most);
    Io::new(store, options.retry.clone(), memory, options.bandwidth)
        .in_folder(there.folder.clone())
        .with_files(options.files.clone())
}

async fn choose_mode(
    place: &Place,
    io: &Io,
    layout: &Layout,
    options: &StoreOptions,
) -> Result<(Mode, ProbeReport)> {
    if options.writers == Writers::Single {
        let found = probe_twice(io.store(), &layout.scratch(), options).await?;
        return Ok((Mode::Single, found));
    }
    let local = place.as_folder().is_some();
    let found = probe(io.store(), &layout.scratch(), options, local).await?;
    if found.many_writers() {
        return Ok((Mode::Many, found));
    }
    let place = place.name();
    Err(Error::Refused(format!(
        "{place}: several writers would lose each other's checkpoints, because the server cannot create an \
         object only if it is absent ({}). To create a store for one writer at a time, use `Writers::Single`, in \
         Python `writers=\"single\"`, or `s4w store init --writers single`",
        found.detail
    )))
}

fn lease_for(
    place: &Place,
    there: &Connected,
    options: &StoreOptions,
    mode: Mode,
) -> Option<Arc<Lease>> {
    let layout = || Layout::new(there.prefix.clone());
    let lease = || Lease::new(make_io(there, options), layout(), place.name(), options.ids.next());
    (mode == Mode::Single).then(lease)
}

/// Creates `repo.json`. Whatever the answer, what counts is the object that is there afterwards:
/// our own, or another creator's.
async fn create_repo(io: &Io, layout: &Layout, place: &str, repo: &Repo) -> Result<()> {
    let key = layout.repo();
    let bytes = Bytes::from(repo.to_bytes(key.as_ref())?);
    let creates = repo.mode == Mode::Many || repo.probe.refuses_second;
    let end = Instant::now() + io.retry().deadline;
    match if creates { None } else { Some(io.head(&key).await) } {
        Some(Ok(_)) => return Err(Error::StoreExists { place: place.to_owned() }),
        Some(Err(e)) if !e.is_missing() => return Err(e),
        _ => {}
    }
    for attempt in 0.. {
        let put = async {
            match creates {
                true => io.create_once(&key, bytes.clone()).await,
                false => io.put_once(&key, bytes.clone()).await,
            }
        };
        let put = tokio::time::timeout_at(end, put).await;
        match read_repo(io, layout).await {
            Ok(there) if there.id == repo.id => return Ok(()),
            Ok(_) => return Err(Error::StoreExists { place: place.to_owned() }),
            Err(e) if e.is_missing() => {}
            Err(e) => return Err(e),
        }
        let pause = io.retry().pause(attempt, repo.id.as_u64_pair().1);
        let late = Instant::now() + pause >= end;
        match put {
            Ok(Err(e)) if late || io.is_permanent(&e) => {
                return Err(Error::storage("create", key, e));
            }
            _ if late => {
                let (limit, last) = (io.retry().deadline, Failure::silent());
                return Err(Error::Deadline {
                    action: "create",
                    key: key.to_string(),
                    limit,
                    last,
                });
            }
            _ => tokio::time::sleep(pause).await,
        }
    }
    Ok(())
}
