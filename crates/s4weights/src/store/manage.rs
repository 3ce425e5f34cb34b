//! Listing, keeping, deleting and checking.

use s4_store::{
    CheckReport, Checkpoint, CheckpointId, Entry, Holder, Inspector, ProbeReport, Reading,
    RepairReport, Retention, StorageOptions, Store, SweepOptions, SweepReport,
};

use crate::error::{Error, Result};
use crate::io::open_place;
use crate::progress::{Progress, ProgressFn};
use crate::reader::ReadOptions;
use crate::store::bridge::{Asker, Bridge};
use crate::store::open::Opener;
use crate::store::{CheckpointStore, StoreOptions};

/// Options for a check.
#[derive(Clone, Default)]
pub struct CheckOptions {
    /// Read every object, compare its hash, and decode every value. Without this only manifests are
    /// read, and the sizes of objects compared.
    pub read_data: bool,
    /// Only these checkpoints and their ancestors; all if empty.
    pub only: Vec<CheckpointId>,
    /// If data is read: called with the bytes of the checkpoints that were checked, and now and
    /// then to ask whether to go on.
    pub progress: Option<ProgressFn>,
}

impl CheckpointStore {
    /// All listed checkpoints, from the oldest to the newest.
    ///
    /// # Errors
    /// [`Error::Store`] if the log cannot be read.
    pub fn list(&self) -> Result<Vec<Checkpoint>> {
        Ok(self.state()?.list().into_iter().cloned().collect())
    }

    /// The newest checkpoint, if there is any.
    ///
    /// # Errors
    /// [`Error::Store`] if the log cannot be read.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        Ok(self.state()?.latest().cloned())
    }

    /// The newest checkpoint of a step.
    ///
    /// # Errors
    /// [`Error::Store`] if there is none, or the log cannot be read.
    pub fn at_step(&self, step: u64) -> Result<Checkpoint> {
        let what = format!("of step {step}");
        let missing = || self.error(s4_store::Error::NoCheckpoint { what });
        self.state()?.at_step(step).cloned().ok_or_else(missing)
    }

    /// Protects a checkpoint from being retired.
    ///
    /// # Errors
    /// [`Error::Store`] if it is not listed.
    pub fn pin(&self, id: CheckpointId) -> Result<()> {
        let store = self.opener.store.clone();
        self.opener.bridge.ask(async move { store.pin(id).await })
    }

    /// Ends the protection of a checkpoint.
    ///
    /// # Errors
    /// [`Error::Store`] if it is not listed.
    pub fn unpin(&self, id: CheckpointId) -> Result<()> {
        let store = self.opener.store.clone();
        self.opener.bridge.ask(async move { store.unpin(id).await })
    }

    /// Takes checkpoints off the list. Their data stays until a sweep.
    ///
    /// # Errors
    /// [`Error::Store`] with a conflict if one is pinned or needed by another.
    pub fn retire(&self, ids: &[CheckpointId], reason: &str) -> Result<usize> {
        let (store, ids, reason) = (self.opener.store.clone(), ids.to_vec(), reason.to_owned());
        self.opener.bridge.ask(async move { store.retire(&ids, &reason).await })
    }

    /// Lists retired checkpoints, and the ancestors that they need, again, as long as no sweep has
    /// given them up. Returns all that were listed again, a base before its deltas.
    ///
    /// # Errors
    /// [`Error::Store`] with a conflict if one is not retired or a sweep has given it up, with damage if
    /// its data is not all there.
    pub fn unretire(&self, ids: &[CheckpointId]) -> Result<Vec<Checkpoint>> {
        let (store, ids) = (self.opener.store.clone(), ids.to_vec());
        self.opener.bridge.ask(async move { store.unretire(&ids).await })
    }

    /// Repairs the log of a store, or with `apply` false reports what a repair would do. Nothing
    /// else may use the store meanwhile. Of `options`, only those for requests apply.
    ///
    /// # Errors
    /// [`Error::Store`] if the place fails.
    pub fn repair(
        url: &str,
        storage: &StorageOptions,
        options: StoreOptions,
        apply: bool,
    ) -> Result<RepairReport> {
        let place = open_place(url, storage)?;
        let bridge = Bridge::new(place.name())?;
        bridge.ask(async move { Store::repair(&place, options.requests, apply).await })
    }

    /// Retires the checkpoints that a policy does not keep, and returns them.
    ///
    /// # Errors
    /// [`Error::Store`] if checkpoints would be retired although none has the metric by which to
    /// keep the best, or if the log cannot be read or written.
    pub fn apply_retention(&self, policy: &Retention) -> Result<Vec<CheckpointId>> {
        let (store, policy) = (self.opener.store.clone(), policy.clone());
        self.opener.bridge.ask(async move { store.apply_retention(&policy).await })
    }

    /// Deletes the data of checkpoints retired, and of attempts given up, longer ago than the
    /// grace.
    ///
    /// # Errors
    /// [`Error::Store`] if the grace is too short or the log cannot be read.
    pub fn sweep(&self, options: &SweepOptions) -> Result<SweepReport> {
        let (store, options) = (self.opener.store.clone(), options.clone());
        self.opener.bridge.ask(async move { store.sweep(&options).await })
    }

    /// The log from entry `from` on.
    ///
    /// # Errors
    /// [`Error::Store`] if it cannot be read.
    pub fn log(&self, from: u64) -> Result<Vec<Entry>> {
        let store = self.opener.store.clone();
        self.opener.bridge.ask(async move { store.log(from).await })
    }

    /// Replays the log and checks every listed checkpoint.
    ///
    /// # Errors
    /// [`Error::Store`] if the log itself cannot be read, [`Error::Cancelled`]; everything else is in
    /// the report.
    pub fn check(&self, options: &CheckOptions) -> Result<CheckReport> {
        let store = self.opener.store.clone();
        let asker = Asker::new(options.progress.clone());
        let below = s4_store::CheckOptions {
            read_data: options.read_data,
            part: None,
            only: options.only.clone(),
        };
        let all = self.state()?.list().iter().map(|c| c.about.data_len).sum();
        let mut values = Values {
            opener: self.opener.clone(),
            options: self.reading(),
            tell: asker.callback(),
            progress: Progress { done: 0, total: all },
        };
        let read_data = options.read_data;
        let check = async move {
            let inspector: Option<&mut dyn Inspector> =
                if read_data { Some(&mut values) } else { None };
            store.check(&below, inspector).await
        };
        self.opener.bridge.wait_asking(&asker, check)?.map_err(|e| self.error(e))
    }

    /// Finds out whether several writers are safe at a place, which need not hold a store. Of
    /// `options`, only those for requests apply.
    ///
    /// # Errors
    /// [`Error::Store`] if it cannot be written to.
    pub fn probe(
        url: &str,
        storage: &StorageOptions,
        options: StoreOptions,
    ) -> Result<ProbeReport> {
        let place = open_place(url, storage)?;
        let bridge = Bridge::new(place.name())?;
        bridge.ask(async move { place.probe(&options.requests).await })
    }

    /// Probes the place again and, if several writers prove to be safe, lets any number of writers
    /// use a store that so far allows one at a time. Open it again to write to it.
    ///
    /// # Errors
    /// [`Error::Store`] if several writers are not safe, if that could not be found out, or if
    /// another process is writing.
    pub fn allow_many_writers(&self) -> Result<ProbeReport> {
        let store = self.opener.store.clone();
        self.opener.bridge.ask(async move { store.allow_many_writers().await })
    }

    /// Removes the lease of a dead process from a store that allows one writer at a time, and
    /// returns who held it.
    ///
    /// # Errors
    /// [`Error::Store`] if the store allows many writers, or the lease cannot be removed.
    pub fn break_lease(&self) -> Result<Vec<Holder>> {
        let store = self.opener.store.clone();
        self.opener.bridge.ask(async move { store.break_lease().await })
    }
}

/// Decodes every value of a checkpoint.
struct Values {
    opener: Opener,
    options: ReadOptions,
    tell: Option<ProgressFn>,
    progress: Progress,
}

#[async_trait::async_trait]
impl Inspector for Values {
    async fn inspect(
        &mut self,
        _store: &Store,
        chain: &[Checkpoint],
        _reading: &Reading,
    ) -> std::result::Result<(), s4_store::CallbackError> {
        let (opener, options, chain) = (self.opener.clone(), self.options.clone(), chain.to_vec());
        let decode = move || {
            let name = |e| chain.first().map_or(Error::Cancelled, |c| opener.about(c, e));
            let verify = || opener.open(&chain, &options)?.verify().map_err(name);
            match verify() {
                // Bytes may have been damaged in transit.
                Err(e) if e.is_mismatch() => verify(),
                other => other,
            }
        };
        tokio::task::spawn_blocking(decode).await??;
        Ok(())
    }

    fn checked(&mut self, checkpoint: &Checkpoint) {
        self.progress.done += checkpoint.about.data_len;
        if let Some(tell) = &self.tell {
            // The answer is not needed: the thread that waits for the check asks whether to go on.
            tell(self.progress);
        }
    }
}
