//! Watch mode: files and folders that trainers drop into a folder are compressed, made durable and,
//! if wanted, removed. No pickle is executed: another program converts PyTorch's files, and reads
//! only tensors and plain values.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::config::Watch;
use crate::converter::{self, Unconverted};
use crate::dropped::{self, Dropped, Kind};
use crate::queue::{Mode, Submission};
use crate::record::{Origin, State};
use crate::service::{Refusal, Service};
use crate::staging::NotTaken;

/// How often the folder is looked at.
const POLL: Duration = Duration::from_secs(2);
/// The longest pause before something that could not be taken is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How often memory may not suffice for a file, or the program that converts it be killed: it may be too large.
const MOST_KILLED: u32 = 3;
/// The most entries of the folder that are looked at.
const MAX_ENTRIES: usize = 10_000;

/// Turns a `.safetensors` file (first path) into a `.s4w` file (second path), or says why it cannot.
pub type Convert = Arc<dyn Fn(&Path, &Path) -> Result<(), Unconverted> + Send + Sync>;

/// A file or folder that was seen.
struct Seen {
    origin: Origin,
    /// Since when it has been unchanged.
    since: Instant,
    /// It cannot be taken as it is, or cannot be removed.
    rejected: bool,
    /// When it is tried again, and how long the pause was.
    pause: Option<(Instant, Duration)>,
    /// How often converting it was killed, or found no memory.
    killed: u32,
}

/// Watches a folder.
pub(crate) struct Watcher {
    watch: Watch,
    service: Arc<Service>,
    convert: Convert,
    seen: HashMap<PathBuf, Seen>,
}

impl Watcher {
    /// Looks at nothing yet.
    #[must_use]
    pub(crate) fn new(watch: Watch, service: Arc<Service>, convert: Convert) -> Self {
        Self { watch, service, convert, seen: HashMap::new() }
    }

    /// Watches until the service ends.
    pub(crate) fn run(mut self) {
        if let Err(e) = dropped::finish_removals(&self.watch.folder) {
            self.unreadable(&e);
        }
        while !self.service.queue.is_stopped() {
            self.look(Instant::now());
            std::thread::sleep(POLL);
        }
    }

    fn unreadable(&self, e: &std::io::Error) {
        tracing::warn!(folder = %self.watch.folder.display(), error = %e, "cannot read the watched folder");
        self.service.metrics.error("watch");
        self.service.health.watched(Some(e.to_string()));
    }

    /// Looks once. Entries that have been unchanged the longest go first, by the steady clock. The times of files
    /// come from the wall clock, which may have been set, so they only order what was there at the start.
    pub(crate) fn look(&mut self, now: Instant) {
        let found = match self.list() {
            Ok(found) => found,
            Err(e) => return self.unreadable(&e),
        };
        self.seen.retain(|path, _| found.iter().any(|d| d.origin.path == *path));
        let settled = |d: Dropped| self.settled_since(&d.origin, now).map(|since| (since, d));
        let mut due: Vec<_> = found.into_iter().filter_map(settled).collect();
        due.sort_by_key(|(since, _)| *since);
        let records = self.service.queue.list();
        for (_, dropped) in due {
            let of = records.iter().rev().find(|r| r.origin.as_ref() == Some(&dropped.origin));
            match of {
                Some(r) if r.state == State::Durable && self.watch.remove => {
                    self.remove(&dropped.origin);
                }
                // It is taken again, in its old place, unless the drive with its local copy is back.
                Some(r) if r.is_lost() && !self.service.stores.has_local(r.local) => {
                    self.take(&dropped, Some(r.id));
                }
                Some(_) => {}
                None => self.take(&dropped, None),
            }
        }
    }

    fn list(&self) -> std::io::Result<Vec<Dropped>> {
        let mut found = vec![];
        let mut entries = fs::read_dir(&self.watch.folder)?;
        for entry in entries.by_ref().take(MAX_ENTRIES) {
            found.extend(dropped::look(&entry?.path()));
        }
        let more =
            entries.next().map(|_| format!("too many entries: only {MAX_ENTRIES} are checked"));
        self.service.health.watched(more);
        found.sort_by(|a, b| {
            let key = |d: &Dropped| (d.origin.mtime_ns, d.origin.path.clone());
            key(a).cmp(&key(b))
        });
        Ok(found)
    }

    /// Since when an entry has been unchanged, if that is long enough and it is neither rejected nor paused.
    fn settled_since(&mut self, origin: &Origin, now: Instant) -> Option<Instant> {
        let settle = Duration::from_secs(self.watch.settle_seconds);
        let new =
            || Seen { origin: origin.clone(), since: now, rejected: false, pause: None, killed: 0 };
        let seen = self.seen.entry(origin.path.clone()).or_insert_with(new);
        if seen.origin != *origin {
            *seen = new();
        }
        let waits = seen.rejected || seen.pause.is_some_and(|(until, _)| now < until);
        (!waits && now.duration_since(seen.since) >= settle).then_some(seen.since)
    }

    fn remove(&mut self, durable: &Origin) {
        if let Err(e) = dropped::remove(durable) {
            tracing::warn!(path = %durable.path.display(), error = %e, "durable, but could not be removed");
            // Not if it is left because there is something else in it.
            if e.raw_os_error().is_some() {
                self.service.metrics.error("watch");
            }
            self.reject(&durable.path);
        }
    }

    /// Ignores an entry until it changes.
    fn reject(&mut self, path: &Path) {
        if let Some(seen) = self.seen.get_mut(path) {
            seen.rejected = true;
        }
    }

    fn take(&mut self, dropped: &Dropped, replaces: Option<Uuid>) {
        if self.service.queue.mode() == Mode::Draining {
            return;
        }
        let path = &dropped.origin.path;
        match self.submit(dropped, replaces) {
            Ok(step) => tracing::info!(path = %path.display(), step, "accepted"),
            Err(Unconverted::Later(why)) => self.pause(path, &why),
            Err(Unconverted::Killed(why)) => {
                let killed = self.seen.get_mut(path).map_or(0, |seen| {
                    seen.killed += 1;
                    seen.killed
                });
                match killed < MOST_KILLED {
                    true => self.pause(path, &why),
                    false => self.refuse(path, &format!("{why} ({killed} times)")),
                }
            }
            Err(Unconverted::Rejected(why)) => self.refuse(path, &why),
        }
    }

    fn pause(&mut self, path: &Path, why: &str) {
        tracing::warn!(path = %path.display(), error = why, "will be retried");
        if let Some(seen) = self.seen.get_mut(path) {
            let pause = seen.pause.map_or(POLL, |(_, pause)| pause * 2).min(LONGEST_PAUSE);
            seen.pause = Some((Instant::now() + pause, pause));
        }
    }

    fn refuse(&mut self, path: &Path, why: &str) {
        tracing::error!(path = %path.display(), error = why, "rejected until it changes");
        self.service.metrics.error("watch");
        self.reject(path);
    }

    fn submit(&self, dropped: &Dropped, replaces: Option<Uuid>) -> Result<u64, Unconverted> {
        let Dropped { origin, kind } = dropped;
        let rejected = |why: String| Unconverted::Rejected(why);
        if let Kind::Distributed { newer: Some(newer), .. } = kind {
            return Err(rejected(format!(
                "{newer} is newer than .metadata, which is written last: the checkpoint is being overwritten"
            )));
        }
        let name = origin.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let stem = match kind {
            Kind::Distributed { .. } => name.clone(),
            _ => origin.path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        };
        let step = step_of(&stem).ok_or_else(|| rejected("no step in its name".into()))?;
        self.check_room(origin)?;
        let id = Uuid::new_v4();
        let target = self.service.staging.offered(id);
        let discard = |problem| {
            // It may not exist.
            let _ = fs::remove_file(&target);
            problem
        };
        self.convert(kind, &origin.path, &target).map_err(discard)?;
        if dropped::look(&origin.path).is_none_or(|now| now.origin != *origin) {
            return Err(discard(Unconverted::Later("it changed while being read".into())));
        }
        let submission = Submission {
            id,
            step,
            metrics: Default::default(),
            tags: [("source".to_owned(), name)].into(),
            uid: rustix::process::geteuid().as_raw(),
            origin: Some(origin.clone()),
            replaces,
        };
        match self.service.submit(submission) {
            Ok(_) => Ok(step),
            Err(
                e @ (Refusal::Full(_)
                | Refusal::Draining
                | Refusal::Io(_)
                | Refusal::NotTaken(NotTaken::Io(_))),
            ) => Err(discard(Unconverted::Later(e.to_string()))),
            Err(e) => Err(discard(rejected(e.to_string()))),
        }
    }

    /// Checks that the converted file fits: it is not much larger than the original.
    fn check_room(&self, origin: &Origin) -> Result<(), Unconverted> {
        let free = self.service.staging.free().map_err(|e| Unconverted::Later(e.to_string()))?;
        let needed = self.service.config.min_free_bytes.saturating_add(origin.len);
        match free >= needed {
            true => Ok(()),
            false => Err(Unconverted::Later(format!(
                "{free} bytes are free on the runner's drive, {needed} are needed"
            ))),
        }
    }

    fn convert(&self, kind: &Kind, from: &Path, to: &Path) -> Result<(), Unconverted> {
        if *kind == Kind::Safetensors {
            return (self.convert)(from, to);
        }
        let program = self.watch.pt_converter.as_ref().ok_or_else(|| {
            Unconverted::Rejected(
                "PyTorch files need `pt_converter`: set it to the `s4w` of the Python wheel".into(),
            )
        })?;
        let threads = self.service.config.threads;
        converter::run((program, threads), from, to, &|| self.service.queue.is_stopped())
    }
}

/// The step in a name: the number after `step`, else the last number.
fn step_of(stem: &str) -> Option<u64> {
    let lower = stem.to_ascii_lowercase();
    let after = lower.rfind("step").map(|at| lower[at + 4..].trim_start_matches(['-', '_', '=']));
    let leading = |text: &str| {
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().ok()
    };
    let last = lower.split(|c: char| !c.is_ascii_digit()).rev().find(|digits| !digits.is_empty());
    after.and_then(leading).or_else(|| last.and_then(|digits| digits.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::step_of;

    #[test]
    fn names_tell_steps() {
        for (name, step) in [
            ("step_100", Some(100)),
            ("model-step=0042-loss0.3", Some(42)),
            ("checkpoint-500", Some(500)),
            ("run7_12000", Some(12000)),
            ("step", None),
            ("final", None),
            ("step99999999999999999999", None),
        ] {
            assert_eq!(step_of(name), step, "{name}");
        }
    }
}
