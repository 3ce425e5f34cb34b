//! The store against everything that goes wrong.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

mod absent;
mod counting;
mod crash;
mod damage;
mod faults;
mod flips;
mod gc;
mod life;
mod local;
mod network;
mod one_writer;
mod ranks;
mod repair;
mod servers;
mod simulation;
mod single;
mod swept;
mod unretire;
#[cfg(unix)]
mod vanished;
mod writers;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::path::Path;
use s4_store::testing::{FaultStore, quick_options};
use s4_store::{CrashPoints, Place, StoreOptions, SweepOptions};

/// A sweep of everything that is not needed now, as nobody else uses the store.
fn now() -> SweepOptions {
    SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: false }
}

/// A store in memory that fails on command: the fault store and the place.
fn faulty() -> (FaultStore, Place) {
    let faults = FaultStore::with_runtime_clock(Arc::new(InMemory::new()));
    let place = place_of(&faults);
    (faults, place)
}

fn place_of(faults: &FaultStore) -> Place {
    let store: Arc<dyn ObjectStore> = Arc::new(faults.clone());
    Place::objects(store, Path::from("runs/one"))
}

/// Runs a simulation with the seeds from 0 on, each on a clock of its own, and returns what each run did.
/// `S4_SIM_SEEDS` says how many, and `S4_SIM_SEED` names a single one.
fn simulations<T, F: Future<Output = T>>(seeds: u64, simulate: impl Fn(u64) -> F) -> Vec<T> {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let seeds = match number("S4_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("S4_SIM_SEEDS").unwrap_or(seeds),
    };
    let run = |seed| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let run = std::panic::AssertUnwindSafe(|| runtime.block_on(simulate(seed)));
        std::panic::catch_unwind(run)
            .unwrap_or_else(|_| panic!("seed {seed} fails: repeat it with S4_SIM_SEED={seed}"))
    };
    seeds.map(run).collect()
}

/// Runs a future the first time that a point is reached.
struct DoAt<F>(&'static str, Mutex<Option<F>>);

impl<F> std::fmt::Debug for DoAt<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

#[async_trait::async_trait]
impl<F: Future<Output = ()> + Send> CrashPoints for DoAt<F> {
    async fn reached(&self, point: &'static str) {
        if point == self.0 {
            let what = self.1.lock().unwrap().take();
            if let Some(what) = what {
                what.await;
            }
        }
    }
}

/// Options of a store that runs `what` the first time that it reaches a point.
fn doing_at<F: Future<Output = ()> + Send + 'static>(point: &'static str, what: F) -> StoreOptions {
    let points: Arc<dyn CrashPoints> = Arc::new(DoAt(point, Mutex::new(Some(what))));
    StoreOptions { crash_points: Some(points), ..quick_options() }
}
