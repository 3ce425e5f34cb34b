//! Runs every kept input through its target, as libFuzzer would.

#![expect(clippy::unwrap_used, reason = "a test; its helpers are no `#[test]` of their own")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use s4_fuzz_targets::TARGETS;
use s4_fuzz_targets::memory::Counting;

#[global_allocator]
static MEMORY: Counting = Counting;

/// How long one input may take on a slow machine, in a build that is not optimised.
const LONGEST: Duration = Duration::from_secs(20);

fn folder(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(kind)
}

/// The inputs of a target, with their names.
fn inputs(kind: &str, target: &str) -> Vec<(String, Vec<u8>)> {
    let Ok(entries) = std::fs::read_dir(folder(kind).join(target)) else { return vec![] };
    let paths = entries.map(|e| e.unwrap().path());
    let read = |p: PathBuf| (p.display().to_string(), std::fs::read(p).unwrap());
    let mut all: Vec<_> = paths.map(read).collect();
    all.sort();
    all
}

#[test]
fn kept_inputs_do_no_harm() {
    let mut ran = 0;
    for (target, run) in TARGETS {
        let mut all = inputs("seeds", target);
        all.extend(inputs("regressions", target));
        assert!(!all.is_empty(), "target {target} has no inputs");
        for (name, bytes) in all {
            // Printed first, since a panic does not say which input it was.
            println!("{name}");
            let started = Instant::now();
            run(&bytes);
            assert!(started.elapsed() < LONGEST, "{name} took {:?}", started.elapsed());
            ran += 1;
        }
    }
    println!("{ran} inputs");
}

#[test]
fn every_input_belongs_to_a_target() {
    for kind in ["seeds", "regressions"] {
        for entry in std::fs::read_dir(folder(kind)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let known = TARGETS.iter().any(|(target, _)| *target == name);
            assert!(known || name == "README.md", "{kind}/{name}: no target has this name");
        }
    }
}
