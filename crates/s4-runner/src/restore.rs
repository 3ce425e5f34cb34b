//! Restoring from the nearest tier: the staged file, the local store, the store.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use s4weights::copy::{CopyOptions, copy};
use s4weights::store::{CheckpointId, CheckpointStore};
use s4weights::{Error, Preset, ReadOptions, Reader, Source, Target, WriteOptions, Writer};
use tokio::sync::watch;
use uuid::Uuid;

use crate::record::{Record, State};
use crate::restores::{Outcome, Restored};
use crate::service::Service;
use crate::stores::find_any;

/// The checkpoint to restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The newest that can be read.
    Newest,
    /// The newest of a step.
    Step(u64),
    /// A submission, or a checkpoint that the store lists, by its id.
    Submission(Uuid),
}

impl std::fmt::Display for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Newest => f.write_str("any checkpoint"),
            Self::Step(step) => write!(f, "step {step}"),
            Self::Submission(id) => write!(f, "submission {id}"),
        }
    }
}

/// A place that may have the wanted checkpoint.
enum Place {
    Staged(Uuid),
    Local(CheckpointId),
    Store(CheckpointId),
}

impl Place {
    fn tier(&self) -> &'static str {
        match self {
            Self::Staged(_) => "staged",
            Self::Local(_) => "local",
            Self::Store(_) => "store",
        }
    }
}

impl Service {
    /// The restore of this id, which begins now if there is none. `None` if too many run already.
    pub(crate) fn begin_restore(
        self: &Arc<Self>,
        id: Uuid,
        wanted: Wanted,
    ) -> Option<watch::Receiver<Option<Outcome>>> {
        let service = Arc::clone(self);
        self.restores.begin(id, move || service.restore(wanted))
    }

    /// Restores a checkpoint into a new file; every value is checked on the way. If a copy is
    /// damaged, the next tier is tried and then, if the newest is wanted, the checkpoint before it.
    ///
    /// # Errors
    /// The last failure, if nothing could be restored; [`Error::NotFound`] if there is nothing.
    fn restore(&self, wanted: Wanted) -> s4weights::Result<Restored> {
        self.check_room()?;
        let target = format!("{}: {wanted}", self.config.store_name());
        let (mut candidates, mut no_list) = self.candidates(wanted);
        if candidates.is_empty() {
            // If the store does not answer, it may well have the checkpoint, so its error is returned.
            return Err(no_list.unwrap_or(Error::NotFound { target }));
        }
        let (mut skipped, mut again) = (vec![], true);
        loop {
            let mut last = None;
            for (step, place) in candidates {
                let started = Instant::now();
                match self.copy_out(&place) {
                    Ok(path) => {
                        self.metrics.restored(place.tier(), started.elapsed());
                        skipped.extend(no_list.map(|e| format!("listing the store: {e}")));
                        return Ok(Restored { path, step, tier: place.tier(), skipped });
                    }
                    Err(e) => {
                        skipped.push(format!("step {step}, {}: {e}", place.tier()));
                        last = Some(e);
                    }
                }
            }
            match last.or(no_list) {
                // A checkpoint that became durable meanwhile was removed here, and is in the store now.
                Some(Error::NotFound { .. }) if again => again = false,
                // This must not look like a run without checkpoints.
                Some(Error::NotFound { target }) if wanted == Wanted::Newest => {
                    let source = std::io::ErrorKind::NotFound.into();
                    return Err(Error::Io { target, action: "open", source });
                }
                Some(e) => return Err(e),
                None => return Err(Error::NotFound { target }),
            }
            (candidates, no_list) = self.candidates(wanted);
        }
    }

    /// The places that may have the wanted checkpoint, newest first: checkpoints that are not durable yet, and
    /// those that the store lists, of which the local drive may have copies. This runner's own are in the order of
    /// submission, which may differ from the order in which they became durable. Checkpoints that other runners
    /// saved in the store are included; retired ones are not. If the store does not answer, its error is returned
    /// and the journal alone is used.
    fn candidates(&self, wanted: Wanted) -> (Vec<(u64, Place)>, Option<Error>) {
        let fits = |step: u64| wanted == Wanted::Newest || wanted == Wanted::Step(step);
        let mut records = self.queue.list();
        records.reverse();
        records.retain(|r| match wanted {
            Wanted::Submission(id) => r.id == id,
            _ => r.state != State::Failed && fits(r.step),
        });
        let of = |record: &Record| -> Vec<(u64, Place)> {
            self.places(record).into_iter().map(|place| (record.step, place)).collect()
        };
        let listed = match wanted {
            Wanted::Submission(id) if records.is_empty() => {
                return match self.stores.remote().and_then(|store| find_any(&store, id)) {
                    Ok(found) => {
                        (found.iter().map(|c| (c.step(), Place::Store(c.id()))).collect(), None)
                    }
                    Err(e) => (vec![], Some(e)),
                };
            }
            Wanted::Submission(_) => return (records.iter().flat_map(of).collect(), None),
            _ => self.stores.remote().and_then(|store| store.list()),
        };
        let listed = match listed {
            Ok(listed) => listed,
            Err(e) => return (records.iter().flat_map(of).collect(), Some(e)),
        };
        let listed = listed.iter().rev().filter(|c| fits(c.step()));
        let listed: Vec<_> = listed.map(|c| (c.step(), c.id())).collect();
        let places = in_order(&records, &listed).into_iter().flat_map(|found| match found {
            Found::Own(record) => of(record),
            Found::Other(step, id) => vec![(step, Place::Store(id))],
        });
        (places.collect(), None)
    }

    /// Restored files must not fill the drive.
    fn check_room(&self) -> s4weights::Result<()> {
        let target = self.staging.restored().display().to_string();
        let action = "check the free space of";
        let free = self.staging.free();
        let free = free.map_err(|source| Error::Io { target: target.clone(), action, source })?;
        if free > self.config.min_free_bytes {
            return Ok(());
        }
        self.staging.tidy(Instant::now());
        let source = std::io::ErrorKind::StorageFull.into();
        Err(Error::Io { target, action: "restore to", source })
    }

    fn places(&self, record: &Record) -> Vec<Place> {
        let staged = self.staging.has(record.id).then_some(Place::Staged(record.id));
        let local = record.local.filter(|id| self.stores.has_local(Some(*id))).map(Place::Local);
        staged.into_iter().chain(local).chain(record.remote.map(Place::Store)).collect()
    }

    fn copy_out(&self, place: &Place) -> s4weights::Result<PathBuf> {
        let (staged, stored);
        let reader: &Reader = match place {
            Place::Staged(id) => {
                let path = self.staging.staged(*id);
                staged = Reader::open(Source::from(path.as_path()), ReadOptions::default())?;
                &staged
            }
            Place::Local(id) => {
                stored = opened(&*self.stores.local()?, *id)?;
                &stored
            }
            Place::Store(id) => {
                stored = opened(&*self.stores.remote()?, *id)?;
                &stored
            }
        };
        let path = self.staging.restored().join(format!("{}.s4w", Uuid::new_v4()));
        let threads = self.config.threads;
        let write = WriteOptions { preset: Preset::Fast, threads, ..WriteOptions::default() };
        let writer = Writer::create(Target::from(path.as_path()), write)?;
        copy(reader, writer, &CopyOptions::default())?;
        let io = |source| Error::Io {
            target: path.display().to_string(),
            action: "set the mode of",
            source,
        };
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).map_err(io)?;
        Ok(path)
    }
}

/// A checkpoint of this runner, or another one that the store lists.
#[derive(Debug, PartialEq)]
enum Found<'a> {
    Own(&'a Record),
    Other(u64, CheckpointId),
}

/// This runner's checkpoints in the order of `records`, without those that the store should list but does not,
/// merged with all others that are `listed`, in the store's order. All are newest first. One that became durable
/// late takes the place of one that did so early.
fn in_order<'a>(records: &'a [Record], listed: &[(u64, CheckpointId)]) -> Vec<Found<'a>> {
    let is_pending = |r: &Record| r.state != State::Durable;
    let is_of = |r: &Record, id| !is_pending(r) && r.remote == Some(id);
    let counts = |r: &&Record| is_pending(r) || listed.iter().any(|(_, id)| is_of(r, *id));
    let (mut own, mut out) = (records.iter().filter(counts).peekable(), vec![]);
    for &(step, id) in listed {
        while let Some(record) = own.next_if(|r| is_pending(r)) {
            out.push(Found::Own(record));
        }
        match records.iter().any(|r| is_of(r, id)) {
            true => out.extend(own.next().map(Found::Own)),
            false => out.push(Found::Other(step, id)),
        }
    }
    out.extend(own.map(Found::Own));
    out
}

fn opened(store: &CheckpointStore, id: CheckpointId) -> s4weights::Result<Arc<Reader>> {
    Ok(Arc::clone(store.load_id(id, None)?.reader()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_checkpoints_keep_their_order_whenever_they_became_durable() {
        let ids: Vec<CheckpointId> =
            (0..9).map(|_| Uuid::new_v4().to_string().parse().unwrap()).collect();
        // Newest first; those that are durable, and that the store should list under this id.
        let records = |states: &[Option<usize>]| -> Vec<Record> {
            let of = |(i, remote): (usize, &Option<usize>)| Record {
                seq: (9 - i) as u64,
                state: if remote.is_some() { State::Durable } else { State::Uploading },
                remote: remote.map(|n| ids[n]),
                ..Record::new(Uuid::new_v4(), 0, &crate::clock::Moment::now())
            };
            states.iter().enumerate().map(of).collect()
        };
        let check = |states: &[Option<usize>], listed: &[usize], expected: &str| {
            let (records, listed) = (records(states), listed.iter().map(|n| (0, ids[*n])));
            let found = in_order(&records, &listed.collect::<Vec<_>>());
            let name = |found: &Found<'_>| match found {
                Found::Own(r) => r.seq.to_string(),
                Found::Other(..) => "-".to_owned(),
            };
            assert_eq!(found.iter().map(name).collect::<String>(), expected, "{states:?}");
        };
        check(&[None, None, Some(0)], &[0], "987");
        // The newest was uploaded first.
        check(&[Some(0), None, None], &[0], "987");
        check(&[Some(0), None, Some(1), None], &[0, 1], "9876");
        // Others' checkpoints keep their places; a retired one is not there.
        check(&[None, Some(0), Some(1), Some(2)], &[5, 0, 6, 2], "9-8-6");
        check(&[Some(1), Some(0)], &[0, 5, 1], "9-8");
        check(&[None], &[5], "9-");
        check(&[], &[5, 6], "--");
    }
}
