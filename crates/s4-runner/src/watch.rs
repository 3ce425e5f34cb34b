//! Watch mode: files that trainers drop into a folder are compressed, made durable and, if that is wanted,
//! removed. No pickle is executed: `.pt` files are converted by another program, which reads tensors and
//! plain values alone.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::config::Watch;
use crate::queue::{Mode, Submission};
use crate::record::{Origin, State};
use crate::service::{Refusal, Service};

/// How often the folder is looked at.
const POLL: Duration = Duration::from_secs(2);
/// How long converting a file may take.
const LONGEST: Duration = Duration::from_secs(3600);
/// Files that are looked at, at most.
const MOST: usize = 10_000;

/// Turns a `.safetensors` file into a `.s4w` file, or says why it cannot.
pub type Convert = Arc<dyn Fn(&Path, &Path) -> Result<(), String> + Send + Sync>;

/// A file that was seen.
struct Seen {
    origin: Origin,
    since: Instant,
    /// It cannot be taken as it is.
    rejected: bool,
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
        while !self.service.queue.is_stopped() {
            self.look();
            std::thread::sleep(POLL);
        }
    }

    /// Looks once.
    pub(crate) fn look(&mut self) {
        let found = match self.list() {
            Ok(found) => found,
            Err(e) => {
                tracing::warn!(folder = %self.watch.folder.display(), error = %e, "cannot be watched");
                self.service.metrics.error("watch");
                return;
            }
        };
        self.seen.retain(|path, _| found.iter().any(|origin| origin.path == *path));
        for origin in found {
            if !self.is_settled(&origin) {
                continue;
            }
            match self.state_of(&origin) {
                Some(State::Durable) if self.watch.remove => self.remove(&origin),
                Some(_) => {}
                None => self.take(&origin),
            }
        }
    }

    fn list(&self) -> std::io::Result<Vec<Origin>> {
        let mut found = vec![];
        for entry in fs::read_dir(&self.watch.folder)?.take(MOST) {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with('.') || !(is_pickle(&path) || is_safetensors(&path)) {
                continue;
            }
            found.extend(origin(&path));
        }
        found.sort_by(|a, b| (a.mtime_ns, &a.path).cmp(&(b.mtime_ns, &b.path)));
        Ok(found)
    }

    /// Whether a file has been as it is for long enough, by this machine's steady clock.
    fn is_settled(&mut self, origin: &Origin) -> bool {
        let settle = Duration::from_secs(self.watch.settle_seconds);
        let now = Instant::now();
        let new = || Seen { origin: origin.clone(), since: now, rejected: false };
        let seen = self.seen.entry(origin.path.clone()).or_insert_with(new);
        if seen.origin != *origin {
            *seen = new();
        }
        !seen.rejected && now.duration_since(seen.since) >= settle
    }

    fn state_of(&self, origin: &Origin) -> Option<State> {
        let records = self.service.queue.list();
        records.iter().rev().find(|r| r.origin.as_ref() == Some(origin)).map(|r| r.state)
    }

    fn remove(&self, durable: &Origin) {
        // What was written there since is another checkpoint.
        if origin(&durable.path).as_ref() != Some(durable) {
            return;
        }
        if let Err(e) = fs::remove_file(&durable.path) {
            tracing::warn!(path = %durable.path.display(), error = %e, "stays, though it is durable");
        }
    }

    fn take(&mut self, origin: &Origin) {
        if self.service.queue.mode() == Mode::Draining {
            return;
        }
        let path = &origin.path;
        match self.submit(origin) {
            Ok(step) => tracing::info!(path = %path.display(), step, "accepted"),
            // There will be room.
            Err(Problem::Later(why)) => {
                tracing::warn!(path = %path.display(), error = why, "is tried again");
            }
            Err(Problem::Rejected(why)) => {
                tracing::error!(path = %path.display(), error = why, "cannot be taken as it is");
                self.service.metrics.error("watch");
                if let Some(seen) = self.seen.get_mut(path) {
                    seen.rejected = true;
                }
            }
        }
    }

    fn submit(&self, from: &Origin) -> Result<u64, Problem> {
        let stem = from.path.file_stem().unwrap_or_default().to_string_lossy();
        let rejected = |why: &str| Problem::Rejected(why.to_owned());
        let step = step_of(&stem).ok_or_else(|| rejected("its name has no step in it"))?;
        let id = Uuid::new_v4();
        let target = self.service.staging.offered(id);
        let converted = match is_pickle(&from.path) {
            true => self.convert_pickle(&from.path, &target),
            false => (self.convert)(&from.path, &target),
        };
        let discard = |problem| {
            // It may not be there.
            let _ = fs::remove_file(&target);
            problem
        };
        converted.map_err(|why| discard(Problem::Rejected(why)))?;
        if origin(&from.path).as_ref() != Some(from) {
            return Err(discard(Problem::Later("it changed while it was read".into())));
        }
        let name = from.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let submission = Submission {
            id,
            step,
            metrics: Default::default(),
            tags: [("source".to_owned(), name)].into(),
            uid: rustix::process::geteuid().as_raw(),
            origin: Some(from.clone()),
        };
        match self.service.submit(submission) {
            Ok(_) => Ok(step),
            Err(e @ (Refusal::Full(_) | Refusal::Draining | Refusal::Io(_))) => {
                Err(discard(Problem::Later(e.to_string())))
            }
            Err(e) => Err(discard(Problem::Rejected(e.to_string()))),
        }
    }

    fn convert_pickle(&self, from: &Path, to: &Path) -> Result<(), String> {
        let program = self.watch.pt_converter.as_ref();
        let program = program.ok_or("`.pt` files need `pt_converter`: the `s4w` of the wheel")?;
        let mut command = Command::new(program);
        command.arg("compress").arg(from).arg(to).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(Stdio::null()).spawn();
        let mut child = child.map_err(|e| format!("{}: {e}", program.display()))?;
        let end = Instant::now() + LONGEST;
        loop {
            match child.try_wait().map_err(|e| e.to_string())? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("{} ended with {status}", program.display())),
                None if Instant::now() > end || self.service.queue.is_stopped() => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err("converting it took too long".to_owned());
                }
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }
}

enum Problem {
    Later(String),
    Rejected(String),
}

fn is_pickle(path: &Path) -> bool {
    path.extension().is_some_and(|e| ["pt", "pth", "ckpt"].iter().any(|known| e == *known))
}

fn is_safetensors(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "safetensors")
}

/// The file as it is now, if it is one: no link is followed.
fn origin(path: &Path) -> Option<Origin> {
    let about = fs::symlink_metadata(path).ok().filter(|about| about.is_file())?;
    Some(Origin {
        path: path.to_path_buf(),
        len: about.len(),
        mtime_ns: about.mtime().saturating_mul(1_000_000_000).saturating_add(about.mtime_nsec()),
        inode: about.ino(),
    })
}

/// The step that a name tells: the number after `step`, or else the last one.
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
