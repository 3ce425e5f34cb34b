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
mod repair;
mod servers;
mod simulation;
mod single;
mod unretire;
mod writers;

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::path::Path;
use s4_store::Place;
use s4_store::testing::FaultStore;

/// A store in memory, failing on command; the fault store and the place.
fn faulty() -> (FaultStore, Place) {
    let faults = FaultStore::with_runtime_clock(Arc::new(InMemory::new()));
    let place = place_of(&faults);
    (faults, place)
}

fn place_of(faults: &FaultStore) -> Place {
    let store: Arc<dyn ObjectStore> = Arc::new(faults.clone());
    Place::objects(store, Path::from("runs/one"))
}
