//! Paths, URLs and stores: nothing half-written is ever visible.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{Owned, mixed, save_to};
use object_store::ObjectStoreExt;
use s4weights::format::Error as FormatError;
use s4weights::format::limits::MAX_MANIFEST;
use s4weights::store::{CheckpointStore, StoreOptions};
use s4weights::{
    Contents, DType, Error, ReadOptions, Reader, Source, StorageOptions, Target, TensorSource,
    WriteOptions, Writer, adversarial,
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
fn what_no_reader_would_open_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.s4w");
    std::fs::write(&path, b"old").unwrap();
    let writer = Writer::create(path.as_path().into(), WriteOptions::default()).unwrap();
    let metadata = [("k".to_owned(), "x".repeat(MAX_MANIFEST as usize))].into();
    let refused = writer.finish(Contents { metadata, ..Contents::default() }).unwrap_err();
    let limit = matches!(&refused, Error::Format { source: FormatError::Limit { .. }, .. });
    assert!(limit && refused.to_string().contains("less metadata"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(names(dir.path()), ["a.s4w"]);
}

#[test]
fn local_files_appear_whole_and_replace_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.s4w");
    let tensors = mixed();
    std::fs::write(&path, b"old").unwrap();
    let mut writer = Writer::create(path.as_path().into(), WriteOptions::default()).unwrap();
    let t = &tensors[0];
    writer.write(&[TensorSource::new("w", t.dtype, &t.shape, &t.data)]).unwrap();
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

/// The permissions that overwriting in place would leave, as `torch.save` does.
#[test]
fn permissions_are_those_of_any_file() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let plain = dir.path().join("plain");
    std::fs::write(&plain, b"").unwrap();
    let folders = [dir.path().to_owned(), tempfile::tempdir_in("/dev/shm").unwrap().keep()];
    for folder in &folders {
        let path = folder.join("new.s4w");
        save_to(path.as_path().into(), &mixed(), WriteOptions::default()).unwrap();
        assert_eq!(mode(&path), mode(&plain));
        // More than the umask lets a new file have.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        save_to(path.as_path().into(), &mixed(), WriteOptions::default()).unwrap();
        assert_eq!(mode(&path), 0o666);
        check(path.as_path().into(), &mixed());
        std::fs::remove_file(path).unwrap();
    }
    std::fs::remove_dir(&folders[1]).unwrap();
}

#[test]
fn a_link_to_nothing_is_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link, first) =
        (dir.path().join("real.s4w"), dir.path().join("link"), dir.path().join("first"));
    std::os::unix::fs::symlink("real.s4w", &link).unwrap();
    std::os::unix::fs::symlink(&link, &first).unwrap();
    save_to(first.as_path().into(), &mixed(), WriteOptions::default()).unwrap();
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(std::fs::symlink_metadata(&real).unwrap().is_file());
    check(real.as_path().into(), &mixed());
}

#[test]
fn names_may_be_as_long_as_the_file_system_allows() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["x".repeat(250), "\u{20ac}".repeat(83), "y".repeat(255)] {
        let path = dir.path().join(&name);
        save_to(path.as_path().into(), &mixed(), WriteOptions::default()).unwrap();
        check(path.as_path().into(), &mixed());
    }
    let long = dir.path().join("z".repeat(256));
    let error = save_to(long.as_path().into(), &mixed(), WriteOptions::default()).unwrap_err();
    assert_eq!(error.cause(), Some(s4weights::Cause::NameTooLong), "{error}");
    assert_eq!(error.errno(), Some(36));
}

/// URLs and options mean the same for files as for stores.
#[test]
fn urls_and_options_are_those_of_stores() {
    let map = |options: &[(&str, &str)]| -> StorageOptions {
        options.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    };
    let create = |url: &str, options: &[(&str, &str)]| {
        Writer::create(Target::Url(url.to_owned(), map(options)), WriteOptions::default())
    };
    let open = |url: &str, options: &[(&str, &str)]| {
        CheckpointStore::open(url, &map(options), StoreOptions::default())
    };
    for (url, options, part) in [
        ("s3://bucket/a", &[("verify", "hush")][..], "`verify`"),
        ("s3://bucket/a", &[("endpont_url", "hush")], "`endpoint_url`"),
        ("s3://bucket/a", &[("profile", "hush-none"), ("profle", "x")], "`profle`"),
        ("memory://bucket/a", &[("endpont_url", "hush")], "`endpont_url`"),
        ("s3://AKID:hush@bucket/a", &[], "s3://bucket/a"),
        ("s3://AKID:hu/hush@bucket/a", &[], "s3://***"),
        ("s3://bucket/a?X-Amz-Signature=hush", &[], "s3://bucket/a"),
        ("nonsense://AKID:hush@bucket/a", &[], "nonsense://bucket/a"),
    ] {
        let Err(error) = create(url, options) else { panic!("{url}") };
        let Err(of_store) = open(url, options) else { panic!("{url}") };
        let text = format!("{error} {error:?}");
        assert_eq!(text, format!("{of_store} {of_store:?}"));
        assert!(text.contains(part), "{text}");
        assert!(part == "`verify`" || !text.contains("hush"), "{text}");
    }
    let slip = s4weights::check_storage_options(&map(&[("endpont_url", "hush")])).unwrap_err();
    assert!(slip.to_string().contains("`endpoint_url`") && !slip.to_string().contains("hush"));
    s4weights::check_storage_options(&map(&[("verify", "x"), ("account_key", "y")])).unwrap();
    create("s3://bucket/a", &[("key", "k"), ("secret", "s"), ("region_name", "r")]).unwrap();
}

/// Error messages repeat nothing of presigned URLs or of credentials in URLs and endpoints.
#[test]
fn failures_of_requests_show_no_secrets() {
    // Nobody listens there, and nobody is given this port.
    let closed = "127.0.0.1:1";
    let options: StorageOptions = [
        ("endpoint_url", format!("http://{closed}")),
        ("key", "AKIDHUSH".into()),
        ("secret", "hush-secret".into()),
        ("token", "hush-token".into()),
    ]
    .map(|(k, v)| (k.to_owned(), v))
    .into();
    let url = "s3://bucket/a.s4w".to_owned();
    let deadline = Some(std::time::Duration::from_secs(2));
    let write = WriteOptions { deadline, ..WriteOptions::default() };
    let wrote = save_to(Target::Url(url.clone(), options.clone()), &mixed(), write).unwrap_err();
    let read = ReadOptions { deadline, ..ReadOptions::default() };
    let read = Reader::open(Source::Url(url, options), read).err().unwrap();
    for error in [wrote, read] {
        let text = format!("{error} {error:?}");
        assert_eq!(error.cause(), Some(s4weights::Cause::Refused), "{text}");
        assert_eq!(error.errno(), Some(111));
        assert!(text.contains(closed) && text.contains("start the server"), "{text}");
        assert!(!text.contains("hush") && !text.contains("AKIDHUSH"), "{text}");
    }
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
    // The folder is removed while the file is written.
    let gone = dir.path().join("gone");
    std::fs::create_dir(&gone).unwrap();
    let writer =
        Writer::create(gone.join("a.s4w").as_path().into(), WriteOptions::default()).unwrap();
    std::fs::remove_dir_all(&gone).unwrap();
    assert!(matches!(writer.finish(Contents::default()), Err(Error::Io { .. })));
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

/// An embedder's own place: bytes become visible once they are complete.
mod own {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::thread::{ThreadId, current};

    use s4weights::{Error, ReadAt, Result, Sink};

    #[derive(Clone, Default)]
    pub(super) struct Place {
        pub(super) published: Arc<Mutex<Option<Vec<u8>>>>,
        pub(super) dropped: Arc<AtomicUsize>,
    }

    pub(super) struct Writing {
        pub(super) to: Place,
        pub(super) bytes: Vec<u8>,
        /// The most bytes that fit.
        pub(super) room: usize,
        /// The only thread that may write; `None`: any.
        pub(super) only: Option<ThreadId>,
    }

    impl Sink for Writing {
        fn write(&mut self, bytes: &[u8]) -> Result<()> {
            assert!(self.only.is_none_or(|id| id == current().id()));
            if self.bytes.len() + bytes.len() > self.room {
                let source = std::io::ErrorKind::StorageFull.into();
                return Err(Error::Io { target: "slot".into(), action: "write", source });
            }
            self.bytes.extend_from_slice(bytes);
            Ok(())
        }

        fn commit(mut self: Box<Self>) -> Result<()> {
            let bytes = std::mem::take(&mut self.bytes);
            *self.to.published.lock().expect("in a test") = Some(bytes);
            Ok(())
        }

        fn may_move(&self) -> bool {
            self.only.is_none()
        }
    }

    impl Drop for Writing {
        fn drop(&mut self) {
            self.to.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) struct Reading(pub(super) Vec<u8>);

    impl ReadAt for Reading {
        fn len(&self) -> u64 {
            self.0.len() as u64
        }

        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            let at = usize::try_from(offset).expect("in a test");
            let Some(bytes) = self.0.get(at..at + buf.len()) else {
                let source = std::io::ErrorKind::UnexpectedEof.into();
                return Err(Error::Io { target: "slot".into(), action: "read", source });
            };
            buf.copy_from_slice(bytes);
            Ok(())
        }
    }
}

#[test]
fn an_embedder_brings_targets_and_sources_of_its_own() {
    use std::sync::atomic::Ordering;
    let place = own::Place::default();
    let target = |room, only| {
        let writing = own::Writing { to: place.clone(), bytes: vec![], room, only };
        Target::Sink("slot 3".into(), Box::new(writing))
    };
    let noise = adversarial(DType::UInt8, 40 << 20).find(|p| p.0 == "random").unwrap().1;
    let mut tensors = mixed();
    tensors.push(Owned::new("large", DType::UInt8, &[noise.len() as u64], noise));
    let (many, one) = (Some(4), Some(1));
    let expected = common::save(&tensors, WriteOptions::default());
    for (threads, only) in [(many, None), (many, Some(std::thread::current().id())), (one, None)] {
        let options = WriteOptions { threads, ..WriteOptions::default() };
        save_to(target(usize::MAX, only), &tensors, options).unwrap();
        let bytes = place.published.lock().unwrap().take().unwrap();
        assert!(bytes == expected);
        check(Source::ReadAt("slot 3".into(), Box::new(own::Reading(bytes))), &tensors);
    }
    // A file that is given up or does not fit leaves nothing.
    assert_eq!(place.dropped.load(Ordering::Relaxed), 3);
    drop(Writer::create(target(usize::MAX, None), WriteOptions::default()).unwrap());
    let full = save_to(target(1 << 20, None), &tensors, WriteOptions::default()).unwrap_err();
    assert_eq!(full.cause(), Some(s4weights::Cause::DiskFull), "{full}");
    assert_eq!(place.dropped.load(Ordering::Relaxed), 5);
    assert!(place.published.lock().unwrap().is_none());
    // A source's own errors are passed on unchanged; errors without a name get that of the source.
    let cut = Box::new(own::Reading(expected[..expected.len() - 1].to_vec()));
    let error = Reader::open(Source::ReadAt("slot 4".into(), cut), ReadOptions::default());
    assert!(error.err().unwrap().to_string().starts_with("slot 4: "));
}
