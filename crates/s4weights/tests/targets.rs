//! Paths, URLs and stores: nothing half-written is ever visible.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{Owned, mixed, save_to};
use object_store::ObjectStoreExt;
use s4weights::{
    DType, Error, ReadOptions, Reader, Source, Target, TensorSource, WriteOptions, Writer,
    adversarial,
};

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .expect("in a test")
        .map(|e| e.expect("in a test").file_name().into_string().expect("in a test"))
        .collect();
    names.sort();
    names
}

fn check(source: Source, tensors: &[Owned]) {
    let reader = Reader::open(source, ReadOptions::default()).expect("in a test");
    for t in tensors {
        assert!(reader.read(&t.name).expect("in a test") == t.data, "{}", t.name);
    }
}

#[test]
fn local_files_appear_whole_and_replace_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.s4w");
    let tensors = mixed();
    std::fs::write(&path, b"old").unwrap();
    let mut writer = Writer::create(path.as_path().into(), WriteOptions::default()).unwrap();
    let t = &tensors[0];
    writer
        .write(&[TensorSource { name: "w", dtype: t.dtype, shape: &t.shape, data: &t.data }])
        .unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    drop(writer);
    assert_eq!(
        (std::fs::read(&path).unwrap(), names(dir.path())),
        (b"old".to_vec(), vec!["a.s4w".to_owned()])
    );
    save_to(path.as_path().into(), &tensors, WriteOptions::default()).unwrap();
    assert_eq!(names(dir.path()), ["a.s4w"]);
    check(path.as_path().into(), &tensors);
    let url = format!("file://{}", path.display());
    check(Source::from(url.as_str()), &tensors);
}

#[test]
fn links_stay_links_and_permissions_stay() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real.s4w"), dir.path().join("link.s4w"));
    std::fs::write(&real, b"old").unwrap();
    std::fs::set_permissions(&real, std::fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    save_to(link.as_path().into(), &mixed(), WriteOptions::default()).unwrap();
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    check(real.as_path().into(), &mixed());
    assert_eq!(std::fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
fn full_vanished_and_forbidden_targets_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let fails = |path: &Path| save_to(path.into(), &mixed(), WriteOptions::default()).unwrap_err();
    let e = fails(&dir.path().join("no/such/folder/a.s4w"));
    assert!(matches!(e, Error::Io { .. }), "{e}");
    assert!(matches!(fails(dir.path()), Error::Io { .. }));
    if Path::new("/dev/full").exists() {
        let e = fails(Path::new("/dev/full"));
        assert!(e.to_string().contains("No space left"), "{e}");
    }
    // The folder is taken away while the file is written.
    let gone = dir.path().join("gone");
    std::fs::create_dir(&gone).unwrap();
    let writer =
        Writer::create(gone.join("a.s4w").as_path().into(), WriteOptions::default()).unwrap();
    std::fs::remove_dir_all(&gone).unwrap();
    assert!(matches!(writer.finish(s4weights::Contents::default()), Err(Error::Io { .. })));
    assert!(names(dir.path()).is_empty());
    let missing = Reader::open(Source::from("/no/such/file.s4w"), ReadOptions::default());
    assert!(matches!(missing, Err(Error::NotFound { .. })));
}

#[test]
fn object_stores_take_small_files_at_once_and_large_ones_in_parts() {
    let store = Arc::new(object_store::memory::InMemory::new());
    let noise = adversarial(DType::UInt8, 70 << 20).find(|p| p.0 == "random").unwrap().1;
    let large = vec![Owned::new("noise", DType::UInt8, &[noise.len() as u64], noise)];
    for tensors in [mixed(), large] {
        let path = object_store::path::Path::from("run/step-1.s4w");
        let target = Target::Object(store.clone(), path.clone());
        save_to(target, &tensors, WriteOptions::default()).unwrap();
        check(Source::Object(store.clone(), path), &tensors);
    }
    // A writer that is dropped leaves no object.
    let path = object_store::path::Path::from("run/dropped.s4w");
    let target = Target::Object(store.clone(), path.clone());
    drop(Writer::create(target, WriteOptions::default()).unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert!(runtime.block_on(store.head(&path)).is_err());
}

#[test]
fn memory_urls_live_as_long_as_the_process() {
    let target = Target::from("memory://bucket/a.s4w");
    save_to(target, &mixed(), WriteOptions::default()).unwrap();
    check(Source::from("memory://bucket/a.s4w"), &mixed());
    let other = Reader::open(Source::from("memory://bucket/b.s4w"), ReadOptions::default());
    assert!(matches!(other, Err(Error::NotFound { .. })));
}
