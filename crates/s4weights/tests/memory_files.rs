//! Files on memory file systems, which several threads write: they come out whole and in order, and
//! a full file system is an error.

#![expect(clippy::unwrap_used, reason = "tests, and what they share")]
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::Command;

use s4weights::{DType, Error, ReadOptions, Reader, Result, TensorSource, WriteOptions, Writer};

/// The folder of a small memory file system, for the program that is run on it.
const SMALL: &str = "S4_SMALL_MEMORY_FILES";

/// Bytes that no codec makes smaller.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let step = |_| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 33) as u32
    };
    (0..len / 4).map(step).flat_map(u32::to_le_bytes).collect()
}

fn save(path: &Path, threads: usize, data: &[u8]) -> Result<()> {
    let options = WriteOptions { threads: Some(threads), ..Default::default() };
    let mut writer = Writer::create(path.into(), options)?;
    let shape = [(data.len() / 4) as u64];
    // Something small first, so that no chunk starts at a page boundary.
    let first = noise(4000);
    writer.write(&[TensorSource::new("a", DType::Float32, &[1000], &first)])?;
    writer.write(&[TensorSource::new("w", DType::Float32, &shape, data)])?;
    writer.finish(Default::default()).map(drop)
}

/// A folder in memory, if this machine has one.
fn in_memory() -> Option<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").inspect_err(|e| println!("skipped: /dev/shm: {e}")).ok()
}

#[test]
fn files_are_the_same_however_many_threads_write() {
    let Some(dir) = in_memory() else { return };
    // More than two of the pieces that are written at once.
    let data = noise(80 << 20);
    let paths: Vec<PathBuf> = [1, 4, 7].iter().map(|n| dir.path().join(n.to_string())).collect();
    for (path, threads) in paths.iter().zip([1, 4, 7]) {
        save(path, threads, &data).unwrap();
        let reader = Reader::open(path.as_path().into(), ReadOptions::default()).unwrap();
        reader.verify().unwrap();
        assert!(reader.read("w").unwrap() == data);
    }
    let first = std::fs::read(&paths[0]).unwrap();
    assert!(paths.iter().all(|p| std::fs::read(p).unwrap() == first));
}

/// If somebody truncates a file that is mapped, touching the mapping kills the process.
#[test]
fn nobody_can_cut_a_file_that_is_being_written() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let Some(dir) = in_memory() else { return };
    let (data, path) = (noise(48 << 20), dir.path().join("a.s4w"));
    let (done, found) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for entry in std::fs::read_dir(dir.path()).unwrap().flatten() {
                    let file = std::fs::File::options().write(true).open(entry.path());
                    // Leaves published files alone, and the name that a file has for an instant before.
                    if entry.file_name() != "a.s4w"
                        && let Ok(file) = file
                        && file.metadata().is_ok_and(|m| m.len() < data.len() as u64 / 2)
                    {
                        found.store(true, Ordering::Relaxed);
                        file.set_len(0).unwrap();
                    }
                }
            }
        });
        for threads in [2, 7, 7, 7] {
            save(&path, threads, &data).unwrap();
            let reader = Reader::open(path.as_path().into(), ReadOptions::default()).unwrap();
            reader.verify().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(!found.into_inner(), "a file that was not complete had a name");
}

/// The test itself, on a file system of 48 MiB.
fn in_a_small_one(dir: &Path) {
    let data = noise(80 << 20);
    for threads in [1, 4, 7] {
        let path = dir.join("full.s4w");
        let full = save(&path, threads, &data).unwrap_err();
        let is_full = |e: &Error| match e {
            Error::Io { source, .. } => source.kind() == std::io::ErrorKind::StorageFull,
            _ => false,
        };
        assert!(is_full(&full), "{threads}: {full}");
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0, "something is left");
        // Afterwards there is room again.
        save(&path, threads, &data[..8 << 20]).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_full_file_system_is_an_error_and_leaves_nothing() {
    if let Some(dir) = std::env::var_os(SMALL) {
        return in_a_small_one(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--map-root-user", "sh", "-c"]);
    let mount = "mount -t tmpfs -o size=47m none \"$0\" || exit 77; exec \"$@\"";
    unshare.arg(mount).arg(dir.path()).arg(std::env::current_exe().unwrap());
    unshare.args(["--exact", "a_full_file_system_is_an_error_and_leaves_nothing", "--nocapture"]);
    let done = match unshare.env(SMALL, dir.path()).output() {
        Ok(done) => done,
        Err(e) => return println!("skipped: unshare: {e}"),
    };
    let said = [&done.stdout[..], &done.stderr].map(String::from_utf8_lossy).concat();
    if !said.contains("running 1 test") {
        return println!("skipped: no file system may be mounted here: {said}");
    }
    assert!(done.status.success(), "{:?}: {said}", done.status);
}
