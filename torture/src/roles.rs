//! The processes under attack: a writer and a sweeper of a shared store, and a trainer that has its store to
//! itself. Each records the store's answers in its own journal.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use s4_store::testing::Random;
use s4weights::Error;
use s4weights::store::Checkpoint;

use crate::Outcome;
use crate::api::{self, Store, Target};
use crate::journal::{Event, Evidence, Journal};
use crate::values;

/// How long a sweep waits before it gives up a silent attempt or deletes retired data. An attack
/// that pauses a writer pauses it for longer.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// Checkpoints that retention keeps.
const KEEP: u64 = 40;

/// What a process is told.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: Target,
    /// The seed of all values, shared by the processes of a run
    #[arg(long)]
    pub(crate) seed: u64,
    /// Tells this process from all others of its run, also from those that it replaces
    #[arg(long)]
    pub(crate) number: u64,
    /// Folder of the journals; a file `stop` in it ends all processes
    #[arg(long)]
    pub(crate) folder: PathBuf,
    /// Ends after this many seconds, whatever happens
    #[arg(long)]
    pub(crate) seconds: u64,
}

/// The exit code of a process.
pub(crate) fn end(outcome: Outcome<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// A process at work.
struct Role<'a> {
    args: &'a Args,
    journal: Journal,
    random: Random,
    end: Instant,
    parent: u32,
}

impl<'a> Role<'a> {
    fn new(args: &'a Args, name: &str) -> Outcome<Self> {
        let path = args.folder.join(format!("{name}-{:04}.journal", args.number));
        Ok(Self {
            args,
            journal: Journal::open(&path)?,
            random: Random::new(args.seed ^ (args.number << 20)),
            end: Instant::now() + Duration::from_secs(args.seconds),
            parent: parent(),
        })
    }

    /// Whether to continue: not after the stop file appeared, time is up, or the parent ended.
    fn goes_on(&self) -> bool {
        let stop = self.args.folder.join("stop");
        Instant::now() < self.end && !stop.exists() && parent() == self.parent
    }

    fn note(&self, event: &Event) -> Outcome<()> {
        Ok(self.journal.note(event)?)
    }

    /// Records how a call ended. A failure breaks no promise.
    fn tell<T>(&self, what: &str, outcome: Result<T, Error>, then: Event) -> Outcome<Option<T>> {
        match outcome {
            Ok(value) => self.note(&then).map(|()| Some(value)),
            Err(e) => self.note(&Event::Failed(format!("{what}: {e}"))).map(|()| None),
        }
    }

    /// Opens or creates the store, retrying until that succeeds or the process must end.
    fn open(&self) -> Outcome<Option<Store>> {
        while self.goes_on() {
            match Store::open_or_create(&self.args.target) {
                Ok(store) => {
                    let mode = if store.is_for_many() { "many" } else { "single" };
                    self.note(&Event::Opened(mode.into()))?;
                    return Ok(Some(store));
                }
                Err(e) => self.note(&Event::Failed(format!("open: {e}")))?,
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(None)
    }

    fn save(&self, store: &Store, step: u64) -> Outcome<()> {
        let tensors = values::at(self.args.seed, step);
        match store.save(step, &tensors) {
            Ok(saved) => self.note(&Event::Saved(saved.id().to_string(), step)),
            Err(e) => self.note(&Event::Failed(format!("save of {step}: {e}"))),
        }
    }

    /// Loads a checkpoint. Wrong values are a broken promise; a failure may be the network's, or the
    /// sweeper was faster.
    fn load(&self, store: &Store, checkpoint: &Checkpoint) -> Outcome<bool> {
        let id = checkpoint.id();
        let found = match store.load(id) {
            Ok(found) => found,
            Err(e) => {
                self.note(&Event::Failed(format!("load of {id}: {e}")))?;
                return Ok(false);
            }
        };
        match api::difference(self.args.seed, checkpoint.step(), &found) {
            None => self.note(&Event::Loaded(id.to_string()))?,
            Some(how) => {
                let step = checkpoint.step();
                self.note(&Event::Wrong(format!("{id} of step {step}: {how}")))?;
            }
        }
        Ok(true)
    }
}

#[cfg(unix)]
fn parent() -> u32 {
    std::os::unix::process::parent_id()
}

#[cfg(not(unix))]
fn parent() -> u32 {
    0
}

/// One of several writers: saves, and now and then loads what anybody saved.
pub(crate) fn writer(args: &Args) -> Outcome<()> {
    let mut role = Role::new(args, "writer")?;
    let mut step = args.number * 100_000;
    while role.goes_on() {
        let Some(store) = role.open()? else { return Ok(()) };
        // Open a fresh handle now and then.
        for _ in 0..30 {
            if !role.goes_on() {
                return Ok(());
            }
            if role.random.below(10) < 8 {
                step += 1;
                role.save(&store, step)?;
            } else {
                load_any(&mut role, &store)?;
            }
        }
    }
    Ok(())
}

fn load_any(role: &mut Role<'_>, store: &Store) -> Outcome<()> {
    match store.list() {
        Ok(list) if list.is_empty() => Ok(()),
        Ok(list) => {
            // A recent one: old ones are about to be retired.
            let back = role.random.below(list.len().min(20) as u64) as usize;
            role.load(store, &list[list.len() - 1 - back]).map(drop)
        }
        Err(e) => role.note(&Event::Failed(format!("list: {e}"))),
    }
}

/// Retires, rebases, sweeps and checks, while others write.
pub(crate) fn sweeper(args: &Args) -> Outcome<()> {
    let mut role = Role::new(args, "sweeper")?;
    while role.goes_on() {
        let Some(store) = role.open()? else { return Ok(()) };
        for _ in 0..20 {
            if !role.goes_on() {
                return Ok(());
            }
            tidy(&mut role, &store)?;
            std::thread::sleep(Duration::from_millis(role.random.below(600)));
        }
    }
    Ok(())
}

fn tidy(role: &mut Role<'_>, store: &Store) -> Outcome<()> {
    match role.random.below(10) {
        0..3 => role.tell("sweep", store.sweep(GRACE), Event::Kept).map(drop),
        3..5 => {
            role.note(&Event::Retention(KEEP))?;
            role.tell("retention", store.retain(KEEP), Event::Retired).map(drop)
        }
        5 => role.tell("check", store.check(false), Event::Kept).map(drop),
        n => match store.list() {
            Ok(list) if n < 8 => rebase_one(role, store, &list),
            Ok(list) => retire_one(role, store, &list),
            Err(e) => role.note(&Event::Failed(format!("list: {e}"))),
        },
    }
}

fn rebase_one(role: &mut Role<'_>, store: &Store, list: &[Checkpoint]) -> Outcome<()> {
    let deltas: Vec<_> = list.iter().filter(|c| c.base.is_some()).collect();
    if deltas.is_empty() {
        return Ok(());
    }
    let id = deltas[role.random.below(deltas.len() as u64) as usize].id();
    role.note(&Event::Rebasing(id.to_string()))?;
    role.tell("rebase", store.rebase(id), Event::Rebased).map(drop)
}

/// Retires one of the older checkpoints that no other needs.
fn retire_one(role: &mut Role<'_>, store: &Store, list: &[Checkpoint]) -> Outcome<()> {
    let needed = |c: &Checkpoint| list.iter().any(|other| other.base == Some(c.id()));
    let old = list.len().saturating_sub(8);
    let free: Vec<_> = list[..old].iter().filter(|c| !needed(c)).collect();
    if free.is_empty() {
        return Ok(());
    }
    let id = free[role.random.below(free.len() as u64) as usize].id();
    role.note(&Event::Retiring(vec![id.to_string()]))?;
    role.tell("retire", store.retire(&[id]), Event::Retired).map(drop)
}

/// A training run that is the only user of its store: resumes from the newest checkpoint and saves
/// until it is killed. Even numbers save from this thread, odd ones from a background thread while
/// the next state is computed.
pub(crate) fn trainer(args: &Args) -> Outcome<()> {
    let mut role = Role::new(args, "trainer")?;
    let Some(store) = role.open()? else { return Ok(()) };
    let Some(mut step) = resume(&role, &store)? else { return Ok(()) };
    if role.random.one_in(3) {
        role.note(&Event::Retention(KEEP))?;
        role.tell("retention", store.retain(KEEP), Event::Retired)?;
        // No other process uses this store, so leftovers of a killed one may be deleted immediately.
        role.tell("sweep", store.sweep(Duration::ZERO), Event::Kept)?;
    }
    if args.number.is_multiple_of(2) {
        while role.goes_on() {
            step += 1;
            role.save(&store, step)?;
        }
        return Ok(());
    }
    std::thread::scope(|s| {
        let mut saving: Option<std::thread::ScopedJoinHandle<'_, Outcome<()>>> = None;
        while role.goes_on() {
            step += 1;
            // Compute the state while the previous one is saved.
            drop(values::at(args.seed, step));
            if let Some(saving) = saving.take() {
                saving.join().map_err(|_| "the thread that saves panicked")??;
            }
            let (role, store) = (&role, &store);
            saving = Some(s.spawn(move || role.save(store, step)));
        }
        Ok(())
    })
}

/// Loads the newest checkpoint and compares it. Its step must be the last that was acknowledged, or
/// a later one. Returns the step to go on from; `None` if the store cannot be read.
fn resume(role: &Role<'_>, store: &Store) -> Outcome<Option<u64>> {
    let acknowledged = Evidence::read(&role.args.folder)?.saved().map(|(_, step)| step).max();
    let latest = match store.latest() {
        Ok(latest) => latest,
        Err(e) => {
            role.note(&Event::Failed(format!("latest: {e}")))?;
            return Ok(None);
        }
    };
    let step = latest.as_ref().map(Checkpoint::step);
    if step < acknowledged {
        let what = format!("step {acknowledged:?} was acknowledged, the newest is {step:?}");
        role.note(&Event::Wrong(what))?;
    }
    match latest {
        Some(latest) if !role.load(store, &latest)? => Ok(None),
        _ => Ok(Some(step.max(acknowledged).unwrap_or(0))),
    }
}
