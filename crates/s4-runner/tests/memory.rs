//! How much of the machine's memory a runner holds when it has nothing to do.

#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::path::Path;

use common::Setup;
use s4weights::{DType, Preset, Target, TensorSource, WriteOptions, Writer};
use uuid::Uuid;

#[test]
fn child() {
    common::be_the_child();
}

/// Values of each tensor.
const VALUES: u64 = 2 << 20;

/// 32 MiB of values, in tensors of 8 MiB.
fn write_large(path: &Path, step: u64) {
    let value = |i: u64| {
        let mixed = (i ^ step << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        (mixed as f32 / 1e8 - 0.08).to_le_bytes()
    };
    let options =
        WriteOptions { preset: Preset::Fast, threads: Some(1), ..WriteOptions::default() };
    let mut writer = Writer::create(Target::from(path), options).unwrap();
    for (tensor, name) in (0..).zip(["a", "b", "c", "d"]) {
        let values: Vec<u8> = (0..VALUES).flat_map(|i| value(tensor * VALUES + i)).collect();
        writer.write(&[TensorSource::new(name, DType::Float32, &[VALUES], &values)]).unwrap();
    }
    writer.finish(Default::default()).unwrap();
}

/// KiB of resident memory that is not backed by a file.
fn own_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn memory_of_large_checkpoints_goes_back_to_the_system() {
    let setup = Setup::default();
    let daemon = setup.start();
    for step in 1..=4 {
        let id = Uuid::new_v4();
        write_large(&setup.offered(id), step);
        assert_eq!(setup.submit(id, step).status, 200);
        assert_eq!(setup.wait(id, "durable")["state"], "durable");
    }
    let after = own_kib(daemon.child.id());
    eprintln!("{after} KiB of its own after four checkpoints of 32 MiB");
    assert!(after < 14 << 10, "{after} KiB stay");
    daemon.stop();
}
