//! Values that change while they are saved: every checkpoint restores, including deltas of a kept
//! parent, and no save fails because of the changes.

use std::sync::atomic::{AtomicBool, Ordering};

use s4weights::store::{CheckOptions, SaveOptions, StoreOptions};

use crate::run::{memory, open, options};

#[path = "../common/racing.rs"]
mod values;

use values::{Racing, churn, tensors};

#[test]
fn a_run_that_goes_on_while_it_is_saved_restores_at_every_step() {
    let tensors = tensors();
    let sources: Vec<_> = tensors.iter().map(Racing::source).collect();
    // Parents kept as values, kept compressed, or read back.
    for parent_memory in [1 << 30, 9 << 20, 0] {
        let store = open(&memory(), StoreOptions { parent_memory, max_chain: 8, ..options() });
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            struct Stop<'a>(&'a AtomicBool);
            impl Drop for Stop<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
            s.spawn(|| churn(&tensors, &stop));
            let _stop = Stop(&stop);
            for step in 0..12 {
                let saved = store.save(step, &sources, &SaveOptions::default()).unwrap();
                let why = saved.why_base.map(|why| why.to_string()).unwrap_or_default();
                // Changed values of the parent are read back; they are no reason for a base.
                assert!(!why.contains("cannot be used"), "{why}");
            }
        });
        for step in 0..12 {
            let loaded = store.load(Some(step)).unwrap();
            for t in &tensors {
                let read = loaded.reader().read(t.name).unwrap();
                assert!(t.had(&read), "{step}, {}: a value that never was", t.name);
            }
        }
        let report = store.check(&CheckOptions { read_data: true, ..CheckOptions::default() });
        assert!(report.unwrap().is_clean());
    }
}
