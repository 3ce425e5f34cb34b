//! The queue: holds every record, wakes those who wait for a change, and decides what is done next.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use s4weights::store::CheckpointId;
use tokio::sync::watch;
use uuid::Uuid;

use crate::clock::Moment;
use crate::journal::Journal;
use crate::record::{Record, State};

/// The first pause after a failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Number of durable records that are kept, so that clients still waiting for one get an answer.
const REMEMBERED: usize = 1000;

/// All submissions. A change that a crash must not undo is in the journal before anybody can see it.
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    /// Held while a record is changed, from reading it until the change is in the journal and in memory. `inner` is
    /// never held while the journal is written: a drive that hangs must not keep the service from answering.
    changing: Mutex<()>,
    journal: Journal,
    work: Condvar,
    changed: watch::Sender<u64>,
}

#[derive(Default)]
struct Inner {
    records: BTreeMap<u64, Record>,
    by_id: HashMap<Uuid, u64>,
    /// When each record was accepted, by this process's steady clock.
    accepted: HashMap<u64, Instant>,
    /// When a record that failed is tried again, and how often it failed.
    pauses: HashMap<u64, (Instant, u32)>,
    mode: Mode,
    stopped: bool,
}

/// Which checkpoint goes first, and whether new ones are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mode {
    /// The oldest checkpoint first.
    #[default]
    Steady,
    /// The machine may vanish: the newest checkpoint first.
    Urgent,
    /// As `Urgent`, and nothing new is accepted.
    Draining,
}

/// A thread's next task.
#[derive(Debug)]
pub(crate) enum Work {
    /// Work on this record.
    Record(Box<Record>),
    /// Nothing now.
    Idle,
    /// End: the service is shutting down.
    Stop,
}

/// A submission.
#[derive(Debug, Clone)]
pub(crate) struct Submission {
    /// Its id, chosen by the submitter.
    pub id: Uuid,
    /// The training step.
    pub step: u64,
    /// Named numbers by which retention can select.
    pub metrics: BTreeMap<String, f64>,
    /// Free text for people and tools.
    pub tags: BTreeMap<String, String>,
    /// Who submits it.
    pub uid: u32,
    /// The file or folder that it came from, in watch mode.
    pub origin: Option<crate::record::Origin>,
    /// The submission that was lost with the local drive, whose place it takes.
    pub replaces: Option<Uuid>,
}

impl Queue {
    /// A queue of the journal's records.
    #[must_use]
    pub(crate) fn new(journal: Journal, records: Vec<Record>, now: &Moment) -> Self {
        let mut inner = Inner::default();
        for mut record in records {
            // A killed process left these states: the work starts again.
            record.state = match record.state {
                State::Compressed => State::Staged,
                State::Uploading => State::Verified,
                state => state,
            };
            let accepted = now.of(record.submitted_at.as_ref(), record.submitted_ms);
            inner.insert(record, accepted);
        }
        let (changed, _) = watch::channel(0);
        let (inner, changing) = (Mutex::new(inner), Mutex::new(()));
        Self { inner, changing, journal, work: Condvar::new(), changed }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits until no other thread changes a record.
    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn tell(&self) {
        self.work.notify_all();
        self.changed.send_modify(|n| *n += 1);
    }

    /// A receiver that is notified of every change.
    #[must_use]
    pub(crate) fn watch(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The record of a submission.
    #[must_use]
    pub(crate) fn get(&self, id: Uuid) -> Option<Record> {
        let inner = self.lock();
        inner.by_id.get(&id).and_then(|seq| inner.records.get(seq)).cloned()
    }

    /// All records, the oldest first.
    #[must_use]
    pub(crate) fn list(&self) -> Vec<Record> {
        self.lock().records.values().cloned().collect()
    }

    /// Bytes that are free on the journal's drive.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn free(&self) -> io::Result<u64> {
        self.journal.free()
    }

    /// Whether the journal can be written.
    #[must_use]
    pub(crate) fn is_writable(&self) -> bool {
        self.journal.is_writable()
    }

    /// Releases the journal's reserved room for `work`, which makes room.
    pub(crate) fn with_reserve<T>(&self, work: impl FnOnce() -> T) -> T {
        self.journal.with_reserve(work)
    }

    /// How long ago a record was accepted.
    #[must_use]
    pub(crate) fn age(&self, seq: u64, now: Instant) -> Option<Duration> {
        self.lock().accepted.get(&seq).map(|at| now.duration_since(*at))
    }

    /// The current mode.
    #[must_use]
    pub(crate) fn mode(&self) -> Mode {
        self.lock().mode
    }

    /// Changes the mode. Draining is never left.
    pub(crate) fn set_mode(&self, mode: Mode) {
        let mut inner = self.lock();
        if inner.mode != Mode::Draining {
            inner.mode = mode;
            // Retry failed records immediately: there may be no later.
            if mode != Mode::Steady {
                inner.pauses.clear();
            }
        }
        drop(inner);
        self.tell();
    }

    /// Tells the threads to end.
    pub(crate) fn stop(&self) {
        self.lock().stopped = true;
        self.tell();
    }

    /// Whether the service is ending.
    #[must_use]
    pub(crate) fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// Accepts a checkpoint whose file is staged. It is in the journal when this returns. `None`: the queue is
    /// draining and nothing was accepted, since the drain does not wait for later submissions.
    ///
    /// # Errors
    /// Any I/O error of the journal. Then nothing was accepted.
    pub(crate) fn accept(
        &self,
        submission: Submission,
        staged_bytes: u64,
    ) -> io::Result<Option<Record>> {
        let _changing = self.change();
        let Submission { id, step, metrics, tags, uid, origin, replaces } = submission;
        let lost = replaces.and_then(|id| self.get(id)).filter(Record::is_lost);
        let next = || self.lock().records.last_key_value().map_or(1, |(last, _)| last + 1);
        let seq = lost.as_ref().map_or_else(next, |lost| lost.seq);
        let now = Moment::now();
        let record =
            Record { seq, staged_bytes, metrics, tags, uid, origin, ..Record::new(id, step, &now) };
        // No two records may have the same place.
        if let Some(lost) = &lost {
            self.journal.remove(lost.id)?;
        }
        let put_back = || {
            if let Some(lost) = &lost {
                let _ = self.journal.put(lost);
            }
        };
        if let Err(e) = self.journal.put(&record) {
            // The record may have been written but not synced, and the trainer will be told that
            // nothing was accepted.
            let _ = self.journal.remove(id);
            put_back();
            return Err(e);
        }
        // Under one lock: whoever sets the mode sees everything that was accepted before.
        let draining = {
            let mut inner = self.lock();
            let draining = inner.mode == Mode::Draining;
            if !draining {
                if let Some(lost) = &lost {
                    inner.remove(lost.seq, lost.id);
                }
                inner.insert(record.clone(), now.steady);
            }
            draining
        };
        if draining {
            self.journal.remove(id)?;
            put_back();
            return Ok(None);
        }
        self.tell();
        Ok(Some(record))
    }

    /// Adds a checkpoint whose record the journal lost, and returns its new `seq`. That is a free
    /// number between `after`, of one submitted earlier, and `before`, of one submitted later; if
    /// there is none, the next new number.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn adopt(
        &self,
        mut record: Record,
        after: u64,
        before: Option<u64>,
    ) -> io::Result<u64> {
        let _changing = self.change();
        let seq = {
            let inner = self.lock();
            let last = inner.records.last_key_value().map_or(0, |(last, _)| *last);
            let left = |before| (after + 1..before).find(|seq| !inner.records.contains_key(seq));
            before.and_then(left).unwrap_or(last + 1)
        };
        record.seq = seq;
        self.journal.put(&record)?;
        self.lock().insert(record, Instant::now());
        self.tell();
        Ok(seq)
    }

    /// Changes a record, in the journal first.
    ///
    /// # Errors
    /// Any I/O error; the record is then unchanged. [`io::ErrorKind::NotFound`] if there is none.
    pub(crate) fn update(&self, id: Uuid, change: impl FnOnce(&mut Record)) -> io::Result<Record> {
        let _changing = self.change();
        let old = self.get(id).ok_or(io::ErrorKind::NotFound)?;
        let mut new = old.clone();
        change(&mut new);
        if new != old {
            self.journal.put_again(&new)?;
        }
        let mut inner = self.lock();
        if new.error.is_none() {
            inner.pauses.remove(&new.seq);
        }
        inner.records.insert(new.seq, new.clone());
        drop(inner);
        self.tell();
        Ok(new)
    }

    /// Changes a record's state in memory only: after a crash the step may be repeated.
    pub(crate) fn show(&self, id: Uuid, state: State) {
        let _changing = self.change();
        let mut inner = self.lock();
        let seq = inner.by_id.get(&id).copied();
        let Some(record) = seq.and_then(|seq| inner.records.get_mut(&seq)) else { return };
        if record.state != state {
            record.state = state;
            drop(inner);
            self.tell();
        }
    }

    /// Records a failure that may pass: the record waits, longer each time.
    pub(crate) fn pause(&self, id: Uuid, state: State, why: &str) {
        let _changing = self.change();
        let mut inner = self.lock();
        let Some(seq) = inner.by_id.get(&id).copied() else { return };
        let tries = inner.pauses.get(&seq).map_or(0, |(_, tries)| *tries);
        let pause = FIRST_PAUSE.saturating_mul(1 << tries.min(16)).min(LONGEST_PAUSE);
        inner.pauses.insert(seq, (Instant::now() + pause, tries + 1));
        if let Some(record) = inner.records.get_mut(&seq) {
            record.state = state;
            record.error = Some(why.to_owned());
        }
        drop(inner);
        self.tell();
    }

    /// The next staged checkpoint; waits for one, but not for long.
    #[must_use]
    pub(crate) fn next_staged(&self) -> Work {
        self.next(|inner| {
            let staged = inner.in_order(|r| r.state == State::Staged, |r| r.local.is_some());
            staged.into_iter().find(|r| inner.is_due(r.seq))
        })
    }

    /// The next checkpoint to be uploaded; waits for one, but not for long. A delta comes after its
    /// ancestors.
    #[must_use]
    pub(crate) fn next_verified(&self) -> Work {
        self.next(Inner::pick_verified)
    }

    /// Whether a checkpoint other than this one should be uploaded now.
    #[must_use]
    pub(crate) fn should_yield(&self, seq: u64) -> bool {
        let inner = self.lock();
        inner.mode != Mode::Steady && inner.pick_verified().is_some_and(|next| next.seq != seq)
    }

    /// Waits, but not for long, until `pick` finds a record.
    fn next(&self, pick: impl Fn(&Inner) -> Option<&Record>) -> Work {
        let end = Instant::now() + IDLE;
        let mut inner = self.lock();
        loop {
            if inner.stopped {
                return Work::Stop;
            }
            if let Some(record) = pick(&inner) {
                return Work::Record(Box::new(record.clone()));
            }
            let now = Instant::now();
            if now >= end {
                return Work::Idle;
            }
            let next = inner.pauses.values().map(|(at, _)| *at).filter(|at| *at > now).min();
            let wait = next.map_or(end, |at| at.min(end)) - now;
            let woken = self.work.wait_timeout(inner, wait);
            inner = woken.unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    /// Forgets a record that has failed; returns whether there was one.
    ///
    /// # Errors
    /// Any I/O error.
    pub(crate) fn forget_failed(&self, id: Uuid) -> io::Result<bool> {
        let _changing = self.change();
        let found = self.get(id).filter(|record| record.state == State::Failed);
        let Some(record) = found else { return Ok(false) };
        self.journal.remove(id)?;
        self.lock().remove(record.seq, id);
        self.tell();
        Ok(true)
    }

    /// Forgets durable records that are no longer needed, except the newest. `needs` says whether
    /// the local store still has the checkpoint, or the watched folder the file.
    pub(crate) fn forget(&self, needs: impl Fn(&Record) -> bool) {
        let _changing = self.change();
        let records = self.list();
        let finals: Vec<_> = records.iter().filter(|r| r.state == State::Durable).collect();
        let most = finals.len().saturating_sub(REMEMBERED);
        // Keeping the newest keeps `seq` growing.
        let gone: Vec<_> =
            finals[..most].iter().filter(|r| !needs(r)).map(|r| (r.seq, r.id)).collect();
        for (seq, id) in gone {
            if self.journal.remove(id).is_ok() {
                self.lock().remove(seq, id);
            }
        }
    }
}

/// How long a thread with nothing to do sleeps.
const IDLE: Duration = Duration::from_secs(5);

impl Inner {
    fn insert(&mut self, record: Record, accepted: Instant) {
        self.by_id.insert(record.id, record.seq);
        self.accepted.insert(record.seq, accepted);
        self.records.insert(record.seq, record);
    }

    fn remove(&mut self, seq: u64, id: Uuid) {
        self.records.remove(&seq);
        self.by_id.remove(&id);
        self.accepted.remove(&seq);
        self.pauses.remove(&seq);
    }

    fn is_due(&self, seq: u64) -> bool {
        self.pauses.get(&seq).is_none_or(|(at, _)| *at <= Instant::now())
    }

    /// The records that are `waiting`, in the order of work: the oldest first or, in a hurry, the newest. In a
    /// hurry, records older than one that is `done` come last, and the oldest of them first: each is listed just
    /// before the next newer checkpoint that is listed already. Newest first, each would get an earlier position than
    /// the one before, perhaps even before checkpoints that are older than it.
    fn in_order(
        &self,
        waiting: impl Fn(&Record) -> bool,
        done: impl Fn(&Record) -> bool,
    ) -> Vec<&Record> {
        let last = self.records.values().rev().find(|r| done(r)).map_or(0, |r| r.seq);
        let waiting = self.records.values().filter(|r| waiting(r));
        let (mut newer, mut older): (Vec<_>, Vec<_>) = waiting.partition(|r| r.seq > last);
        match self.mode {
            Mode::Steady => {
                older.append(&mut newer);
                older
            }
            Mode::Urgent | Mode::Draining => {
                newer.reverse();
                newer.append(&mut older);
                newer
            }
        }
    }

    fn pick_verified(&self) -> Option<&Record> {
        let waiting = |r: &Record| matches!(r.state, State::Verified | State::Uploading);
        let all = self.in_order(waiting, |r| r.remote.is_some());
        let of: HashMap<CheckpointId, &Record> =
            all.iter().filter_map(|r| Some((r.local?, *r))).collect();
        // The first checkpoint of its chain that is not durable yet.
        let lowest = |record: &Record| -> Option<u64> {
            let (mut lowest, mut seen) = (record, BTreeSet::new());
            while let Some(next) = lowest.local_parent.filter(|next| seen.insert(*next)) {
                let Some(record) = of.get(&next) else { break };
                lowest = record;
            }
            Some(lowest.seq)
        };
        let found = all.into_iter().filter_map(lowest).find(|seq| self.is_due(*seq));
        found.and_then(|seq| self.records.get(&seq))
    }
}

/// Shared by all parts of the service.
pub(crate) type SharedQueue = Arc<Queue>;

#[cfg(test)]
mod tests {
    use super::*;

    struct Case {
        queue: Queue,
        ids: Vec<Uuid>,
        dir: tempfile::TempDir,
    }

    fn checkpoint(n: u8) -> CheckpointId {
        format!("00000000-0000-7000-8000-0000000000{n:02}").parse().unwrap()
    }

    fn submission(id: Uuid, step: u64) -> Submission {
        let (metrics, tags) = Default::default();
        Submission { id, step, metrics, tags, uid: 1, origin: None, replaces: None }
    }

    /// Verified checkpoints, given the parent of each.
    fn verified(parents: &[Option<usize>]) -> Case {
        let dir = tempfile::tempdir().unwrap();
        let (journal, records, _) = Journal::open(dir.path()).unwrap();
        let queue = Queue::new(journal, records, &Moment::now());
        let accept = |(n, parent): (usize, &Option<usize>)| {
            let id = Uuid::new_v4();
            queue.accept(submission(id, n as u64), 1).unwrap();
            let done = queue.update(id, |r| {
                r.state = State::Verified;
                r.local = Some(checkpoint(n as u8));
                r.local_parent = parent.map(|p| checkpoint(p as u8));
            });
            done.unwrap();
            id
        };
        let ids = parents.iter().enumerate().map(accept).collect();
        Case { queue, ids, dir }
    }

    impl Case {
        fn next(&self) -> u64 {
            match self.queue.next_verified() {
                Work::Record(record) => record.step,
                other => panic!("{other:?}"),
            }
        }

        fn durable(&self, n: usize) {
            let durable =
                |r: &mut Record| (r.state, r.remote) = (State::Durable, Some(checkpoint(n as u8)));
            self.queue.update(self.ids[n], durable).unwrap();
        }
    }

    #[test]
    fn in_a_hurry_the_newest_goes_first_after_what_it_needs() {
        let case = verified(&[None, Some(0), Some(1), Some(0)]);
        assert_eq!(case.next(), 0);
        case.queue.set_mode(Mode::Urgent);
        assert_eq!(case.next(), 0, "3 is a delta of it");
        case.durable(0);
        assert_eq!(case.next(), 3);
        assert!(case.queue.should_yield(2) && !case.queue.should_yield(4), "of seq 4 is step 3");
        case.durable(3);
        assert_eq!(case.next(), 1, "2 is a delta of it");
        case.durable(1);
        assert_eq!(case.next(), 2);
    }

    #[test]
    fn in_a_hurry_those_older_than_one_that_is_durable_keep_their_order() {
        let case = verified(&[None; 5]);
        case.durable(0);
        case.queue.set_mode(Mode::Urgent);
        let mut order = vec![];
        for _ in 1..5 {
            order.push(case.next());
            case.durable(case.next() as usize);
        }
        assert_eq!(order, [4, 1, 2, 3]);
    }

    #[test]
    fn one_that_fails_waits_with_those_that_need_it_and_holds_up_no_other() {
        let case = verified(&[None, Some(0), None]);
        case.queue.pause(case.ids[0], State::Verified, "no network");
        assert_eq!(case.next(), 2);
        assert_eq!(case.queue.get(case.ids[0]).unwrap().error.as_deref(), Some("no network"));
        // There may be no later.
        case.queue.set_mode(Mode::Draining);
        case.durable(2);
        assert_eq!(case.next(), 0);
        // Draining is never left.
        case.queue.set_mode(Mode::Steady);
        assert_eq!(case.queue.mode(), Mode::Draining);
    }

    #[test]
    fn what_a_killed_process_was_at_is_begun_again() {
        let case = verified(&[None, None]);
        case.queue.update(case.ids[0], |r| r.state = State::Uploading).unwrap();
        case.queue.update(case.ids[1], |r| r.state = State::Compressed).unwrap();
        let Case { queue, dir, .. } = case;
        drop(queue);
        let (journal, records, _) = Journal::open(dir.path()).unwrap();
        let states: Vec<State> =
            Queue::new(journal, records, &Moment::now()).list().iter().map(|r| r.state).collect();
        assert_eq!(states, [State::Verified, State::Staged]);
    }

    #[test]
    fn a_record_is_as_old_after_a_restart_though_the_clock_was_set() {
        let case = verified(&[None]);
        let Case { queue, dir, .. } = case;
        drop(queue);
        let day = 86_400_000;
        for set_by in [-day, 0, day] {
            let (journal, records, _) = Journal::open(dir.path()).unwrap();
            let mut now = Moment::now();
            now.wall_ms += set_by;
            let later = now.steady + Duration::from_secs(5);
            let queue = Queue::new(journal, records, &now);
            let age = queue.age(1, later).unwrap();
            assert!((5..3600).contains(&age.as_secs()), "{set_by}: {age:?}");
        }
    }

    #[test]
    fn what_the_journal_does_not_take_is_not_accepted() {
        let case = verified(&[None]);
        let folder = case.dir.path().join("journal");
        std::fs::remove_dir_all(&folder).unwrap();
        let id = Uuid::new_v4();
        let submission = submission(id, 9);
        assert!(case.queue.accept(submission, 1).is_err());
        assert!(case.queue.get(id).is_none());
        assert!(case.queue.update(case.ids[0], |r| r.state = State::Durable).is_err());
        assert_eq!(case.queue.get(case.ids[0]).unwrap().state, State::Verified);
        assert_eq!(case.queue.list().len(), 1);
    }

    #[test]
    fn a_drive_that_hangs_keeps_nobody_from_reading() {
        let case = verified(&[None]);
        let id = Uuid::new_v4();
        // Opening a pipe to write waits until somebody reads from it.
        let pipe = case.dir.path().join(format!("journal/{id}.tmp"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        std::thread::scope(|scope| {
            let submission = submission(id, 9);
            let accepting = scope.spawn(|| case.queue.accept(submission, 1));
            while case.queue.changing.try_lock().is_ok() {
                std::thread::yield_now();
            }
            let (done, read) = std::sync::mpsc::channel();
            let queue = &case.queue;
            scope.spawn(move || {
                let found = (queue.list().len(), queue.mode(), queue.get(id).is_some());
                done.send(found).unwrap();
            });
            let read = read.recv_timeout(Duration::from_secs(120));
            // A pipe cannot be synced.
            drop(std::fs::File::open(&pipe).unwrap());
            assert!(accepting.join().unwrap().is_err());
            assert_eq!(read.unwrap(), (1, Mode::Steady, false), "it is not in the journal yet");
        });
    }

    #[test]
    fn only_failed_records_are_forgotten_by_name() {
        let case = verified(&[None, None]);
        case.queue.update(case.ids[1], |r| r.state = State::Failed).unwrap();
        assert!(!case.queue.forget_failed(case.ids[0]).unwrap());
        assert!(case.queue.forget_failed(case.ids[1]).unwrap());
        assert!(!case.queue.forget_failed(case.ids[1]).unwrap());
        assert_eq!(case.queue.list().len(), 1);
    }

    #[test]
    fn what_replaces_a_lost_one_takes_its_place() {
        let case = verified(&[None, None]);
        let (lost, id) = (case.ids[0], Uuid::new_v4());
        let again = || Submission { replaces: Some(lost), ..submission(id, 0) };
        let gone = |r: &mut Record| {
            (r.state, r.error) = (State::Failed, Some(crate::record::FILE_GONE.to_owned()));
        };
        case.queue.update(lost, gone).unwrap();
        assert_eq!(case.queue.accept(again(), 1).unwrap().unwrap().seq, 1);
        let ids = |records: Vec<Record>| records.iter().map(|r| r.id).collect::<Vec<_>>();
        assert_eq!(ids(case.queue.list()), [id, case.ids[1]]);
        let kept = |id: Uuid| case.dir.path().join(format!("journal/{id}.json")).exists();
        assert_eq!([lost, id].map(kept), [false, true]);
        // While the queue drains, nothing is lost, nor taken.
        case.queue.update(id, gone).unwrap();
        case.queue.set_mode(Mode::Draining);
        let other = Submission { replaces: Some(id), ..submission(Uuid::new_v4(), 0) };
        assert_eq!(case.queue.accept(other, 1).unwrap(), None);
        assert!(kept(id) && ids(case.queue.list()) == [id, case.ids[1]]);
    }
}
