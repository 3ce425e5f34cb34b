//! Checks a store for damage.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt;

use crate::error::{Conflict, Error, Result};
use crate::id::CheckpointId;
use crate::inner::Inner;
use crate::layout::Part;
use crate::log::Seen;
use crate::reading::Reading;
use crate::rebase::CallbackError;
use crate::repair::RepairReport;
use crate::state::{Checkpoint, State};
use crate::store::Store;
use crate::view;

/// Options for a check.
#[derive(Debug, Clone, Default)]
pub struct CheckOptions {
    /// Read every data object and compare its hash. Without this only manifests are read, and the
    /// sizes of objects compared.
    pub read_data: bool,
    /// Read only this part of the data, `(rest, of)`: the objects whose position in the store
    /// leaves the remainder `rest` when divided by `of`.
    pub part: Option<(u64, u64)>,
    /// Only these checkpoints and what they need; all if empty.
    pub only: Vec<CheckpointId>,
}

/// A caller's own check of a checkpoint whose objects are all known to be intact. Its ancestors may be damaged; the
/// check then tells whether the checkpoint restores anyway.
#[async_trait::async_trait]
pub trait Inspector: Send {
    /// Checks one checkpoint, whose chain is given as in [`State::chain`]; an error is a finding.
    async fn inspect(
        &mut self,
        store: &Store,
        chain: &[Checkpoint],
        reading: &Reading,
    ) -> std::result::Result<(), CallbackError>;

    /// Called when a checkpoint was checked, whatever the result.
    fn checked(&mut self, checkpoint: &Checkpoint) {
        let _ = checkpoint;
    }
}

/// Whether a checkpoint restores, as far as a check can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It does.
    Restores,
    /// It is damaged.
    Damaged,
    /// It is intact but needs this checkpoint, which is damaged. Only an [`Inspector`] can tell whether it needs
    /// the damaged part; without one, this is always the verdict.
    Needs(CheckpointId),
}

/// Something that is wrong.
#[derive(Debug)]
pub struct Finding {
    /// The checkpoint that is damaged, if it is one.
    pub checkpoint: Option<CheckpointId>,
    /// What is wrong, and where.
    pub error: Error,
}

/// The result of a check.
#[derive(Debug, Default)]
pub struct CheckReport {
    /// The damage that was found.
    pub findings: Vec<Finding>,
    /// Checkpoints that are whole but cannot be restored, each with the damaged one that it needs.
    pub unusable: Vec<(CheckpointId, CheckpointId)>,
    /// Each checkpoint that was asked for, once, from the oldest to the newest.
    pub verdicts: Vec<(CheckpointId, Verdict)>,
    /// Entries of the log that have no effect, with the rule that they break. Harmless, but no writer
    /// of this library makes them.
    pub void: Vec<(u64, Conflict)>,
    /// Checkpoints that were checked.
    pub checkpoints: usize,
    /// Objects that were looked up.
    pub objects: u64,
    /// Bytes that were read and hashed.
    pub bytes_read: u64,
    /// If the log is damaged: what a repair would do, and what it would lose.
    pub repair: Option<RepairReport>,
    /// Attempts and retired checkpoints that still have objects, and their bytes.
    pub unlisted: BTreeMap<CheckpointId, u64>,
    /// The checkpoints in `findings`.
    damaged: BTreeSet<CheckpointId>,
    /// Checkpoints that restore although one that they need is damaged.
    unharmed: BTreeSet<CheckpointId>,
}

impl CheckReport {
    /// Whether no problem was found.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty() && self.unusable.is_empty()
    }

    fn is_damaged(&self, id: CheckpointId) -> bool {
        self.damaged.contains(&id)
    }

    /// Derives the verdict on each checkpoint from the findings.
    fn judge(&mut self, state: &State, asked: impl Fn(CheckpointId) -> bool) {
        for checkpoint in state.list() {
            let id = checkpoint.id();
            let chain = state.chain(id).unwrap_or_default();
            let verdict = match chain.iter().map(|c| c.id()).find(|id| self.is_damaged(*id)) {
                None => Verdict::Restores,
                Some(bad) if bad == id => Verdict::Damaged,
                Some(_) if self.unharmed.contains(&id) => Verdict::Restores,
                Some(bad) => Verdict::Needs(bad),
            };
            if let Verdict::Needs(bad) = verdict {
                self.unusable.push((id, bad));
            }
            if asked(id) {
                self.verdicts.push((id, verdict));
            }
        }
    }

    fn found(&mut self, checkpoint: Option<CheckpointId>, error: Error) {
        self.damaged.extend(checkpoint);
        self.findings.push(Finding { checkpoint, error });
    }
}

impl Store {
    /// Replays the whole log and checks every listed checkpoint against it. A damaged log is a
    /// finding; the part of it that can be proved is checked.
    ///
    /// # Errors
    /// [`Error::Gone`] if the store, or part of the log that this process has read, no longer exists;
    /// [`Error::NoCheckpoint`] if one that was asked for is not listed; if the log or a listing cannot be read at
    /// all. Everything else is in the report.
    pub async fn check(
        &self,
        options: &CheckOptions,
        mut inspector: Option<&mut dyn Inspector>,
    ) -> Result<CheckReport> {
        let mut report = CheckReport::default();
        let state = self.checked_log(&mut report).await?;
        if let Some(id) = options.only.iter().find(|id| state.get(**id).is_none()) {
            return Err(Error::NoCheckpoint { what: id.to_string() });
        }
        report.void.clone_from(&state.void);
        let sizes = self.stored_sizes(&state, &mut report).await?;
        let asked = |id| options.only.is_empty() || options.only.contains(&id);
        let mut wanted = BTreeSet::new();
        for checkpoint in state.list().into_iter().filter(|c| asked(c.id())) {
            wanted.extend(state.chain(checkpoint.id())?.iter().map(|c| c.id()));
        }
        for checkpoint in state.list().into_iter().filter(|c| wanted.contains(&c.id())) {
            report.checkpoints += 1;
            let id = checkpoint.id();
            if let Err(error) = self
                .check_one(checkpoint, &state, options, &sizes, &mut report, &mut inspector)
                .await
            {
                report.found(Some(id), error);
            }
            if let Some(inspector) = &mut inspector {
                inspector.checked(checkpoint);
            }
        }
        report.judge(&state, asked);
        Ok(report)
    }

    /// The state that the log alone defines, or what can be proved of it.
    async fn checked_log(&self, report: &mut CheckReport) -> Result<State> {
        let inner = &self.inner;
        match inner.check_known().await {
            // The newest known entry is damaged: the replay finds that, too.
            Err(e) if e.is_log_damage() => {}
            other => other?,
        }
        match inner.replay().await {
            Err(e) if e.is_log_damage() => {}
            other => return other,
        }
        let survey = inner.survey(view::read(inner).await).await?;
        report.repair = Some(inner.repair_report(&survey).await?);
        for damage in survey.damage {
            report.found(None, inner.damaged(damage));
        }
        Ok(survey.state)
    }

    /// Sizes of all objects below `ck/`; counts what belongs to no listed checkpoint.
    async fn stored_sizes(
        &self,
        state: &State,
        report: &mut CheckReport,
    ) -> Result<BTreeMap<(CheckpointId, Part), u64>> {
        let mut sizes = BTreeMap::new();
        for meta in self.inner.io.list(&self.inner.layout.checkpoints(), None).await? {
            if let Some((id, part)) = self.inner.layout.parse_part(&meta.location) {
                sizes.insert((id, part), meta.size);
                if state.get(id).is_none() {
                    *report.unlisted.entry(id).or_default() += meta.size;
                }
            }
        }
        Ok(sizes)
    }

    /// Checks one checkpoint. An error ends its check: what follows could not be trusted.
    async fn check_one(
        &self,
        checkpoint: &Checkpoint,
        state: &State,
        options: &CheckOptions,
        sizes: &BTreeMap<(CheckpointId, Part), u64>,
        report: &mut CheckReport,
        inspector: &mut Option<&mut dyn Inspector>,
    ) -> Result<()> {
        let id = checkpoint.id();
        let reading = self.read_manifest(checkpoint).await?;
        let before = report.findings.len();
        let numbers = reading.manifest().parts.numbers(reading.object_count());
        for (n, info) in numbers.zip(&reading.manifest().objects) {
            report.objects += 1;
            if sizes.get(&(id, Part::Data(n))) != Some(&info.len) {
                self.look_up(&reading, n, info.len, report).await;
            }
        }
        if options.read_data && report.findings.len() == before {
            self.read_objects(&reading, options, report).await;
        }
        let chain: Vec<_> = state.chain(id)?.into_iter().cloned().collect();
        let Some(inspector) = inspector.as_mut().filter(|_| !report.is_damaged(id)) else {
            return Ok(());
        };
        let inspected = inspector.inspect(self, &chain, &reading).await;
        if chain.iter().any(|c| report.is_damaged(c.id())) {
            // A failure is caused by the damaged checkpoint, which already has a finding.
            report.unharmed.extend(inspected.is_ok().then_some(id));
            return Ok(());
        }
        inspected.map_err(Error::Callback)
    }

    /// Looks an object up by name, since the listing that misses it or has another size may be
    /// stale.
    async fn look_up(&self, reading: &Reading, n: u32, len: u64, report: &mut CheckReport) {
        let key = self.inner.layout.part(reading.id(), Part::Data(n));
        let error = match self.inner.io.head(&key).await {
            Ok(meta) if meta.size == len => return,
            Ok(meta) => Error::corrupt(
                key,
                format!("object has {} bytes, but the manifest says {len}", meta.size),
            ),
            Err(e) => e,
        };
        report.found(Some(reading.id()), error);
    }

    async fn read_objects(
        &self,
        reading: &Reading,
        options: &CheckOptions,
        report: &mut CheckReport,
    ) {
        let first = report.objects - reading.manifest().objects.len() as u64;
        let chosen = |n: &u32| {
            let part = options.part.filter(|(_, of)| *of > 0);
            part.is_none_or(|(rest, of)| (first + u64::from(*n)) % of == rest % of)
        };
        let numbers: Vec<_> = (0..reading.object_count()).filter(chosen).collect();
        let read = |n| async move {
            // Objects count against the memory budget that uploads use.
            let len = reading.manifest().objects.get(n as usize).map_or(0, |o| o.len);
            let _permit = self.inner.io.reserve(usize::try_from(len).unwrap_or(usize::MAX)).await?;
            reading.object(n).await.map(|bytes| bytes.len() as u64)
        };
        let mut reads =
            futures::stream::iter(numbers).map(read).buffer_unordered(self.inner.concurrency());
        while let Some(done) = reads.next().await {
            match done {
                Ok(len) => report.bytes_read += len,
                Err(error) => report.found(Some(reading.id()), error),
            }
        }
    }

    /// The checkpoints that can be restored according to `report`, from the oldest to the newest.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub async fn usable(&self, report: &CheckReport) -> Result<Vec<Checkpoint>> {
        let state: Arc<State> = self.state().await?;
        let usable = report.verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Restores);
        Ok(usable.filter_map(|(id, _)| state.get(*id).cloned()).collect())
    }
}

impl Inner {
    /// Checks that this is the store that was opened, and that its log still has all entries that this process has
    /// read. A replay alone would not notice a loss: it takes an emptied folder for a new store, and a log without
    /// its newest entries for an earlier state.
    pub(crate) async fn check_known(&self) -> Result<()> {
        self.same_repo().await?;
        let (head, hash) = {
            let known = self.known.lock().await;
            // What could be proved of a damaged log need not end with an entry of it.
            if !known.damage.is_empty() || known.state.head() == 0 {
                return Ok(());
            }
            (known.state.head(), known.state.head_hash)
        };
        match self.read_slot(head).await.map_err(|e| self.unreadable(head, e))? {
            Seen::Entry(_, found) if found == hash => Ok(()),
            Seen::Entry(..) => Err(Error::Gone {
                place: self.name.clone(),
                what: format!(
                    "log entry {head} has changed since it was read: it was repaired or overwritten; reopen the store"
                ),
                replaced: false,
            }),
            Seen::Empty => Err(self.gone(head)),
        }
    }
}
