//! Local folders: durability, leftovers, and `object_store`'s own conformance suite.

use std::sync::Arc;
use std::time::Duration;

use object_store::integration;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use s4_store::testing::{FaultStore, conformance, quick_options, toy};
use s4_store::{Error, Place, Store, StoreOptions, SweepOptions, Why, Writers};

use crate::now;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_folder_conforms() {
    let temp = tempfile::tempdir().unwrap();
    let store = LocalFileSystem::new_with_prefix(temp.path()).unwrap().with_fsync(true);
    conformance(Arc::new(store), Path::from("x")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_conforms() {
    conformance(Arc::new(InMemory::new()), Path::from("x")).await.unwrap();
    conformance(Arc::new(FaultStore::new(Arc::new(InMemory::new()))), Path::from("x"))
        .await
        .unwrap();
}

#[tokio::test]
async fn the_fault_store_is_an_object_store() {
    let store = FaultStore::new(Arc::new(InMemory::new()));
    integration::put_get_delete_list(&store).await;
    integration::get_opts(&store).await;
    integration::put_opts(&store, true).await;
    integration::list_uses_directories_correctly(&store).await;
    integration::list_with_delimiter(&store).await;
    integration::list_with_offset_exclusivity(&store).await;
    integration::rename_and_copy(&store).await;
    integration::copy_if_not_exists(&store).await;
    integration::stream_get(&store).await;
}

#[tokio::test]
async fn object_stores_own_suite_on_a_synced_folder() {
    let temp = tempfile::tempdir().unwrap();
    let store = LocalFileSystem::new_with_prefix(temp.path()).unwrap().with_fsync(true);
    integration::put_get_delete_list(&store).await;
    integration::get_opts(&store).await;
    integration::put_opts(&store, false).await;
    integration::list_uses_directories_correctly(&store).await;
    integration::list_with_delimiter(&store).await;
    integration::list_with_offset_exclusivity(&store).await;
}

#[tokio::test]
async fn a_folder_is_made_by_the_first_save_and_not_by_looking() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("runs/new");
    let place = Place::folder(&path);
    let missing = Store::open(&place, quick_options()).await;
    assert!(matches!(missing, Err(Error::NoStore { .. })));
    assert!(!path.exists());
    std::fs::create_dir_all(&path).unwrap();
    assert!(matches!(Store::open(&place, quick_options()).await, Err(Error::NoStore { .. })));
    let store = Store::open_or_create(&place, quick_options()).await.unwrap();
    toy::save(&store, 1, None, b"abc").await.unwrap();
    let again = Store::open(&place, quick_options()).await.unwrap();
    let state = again.state().await.unwrap();
    let chain = toy::chain(&state, state.latest().unwrap()).unwrap();
    assert_eq!(toy::restore(&again, &chain).await.unwrap(), b"abc");
    assert!(path.join("repo.json").is_file() && path.join("log").is_dir());
}

#[tokio::test]
async fn leftovers_of_killed_writers_are_swept() {
    let temp = tempfile::tempdir().unwrap();
    let place = Place::folder(temp.path());
    let store = Store::create(&place, quick_options()).await.unwrap();
    let saved = toy::save(&store, 1, None, b"abc").await.unwrap();
    let retired = toy::save(&store, 2, None, b"abc").await.unwrap();
    store.retire(&[retired.id()], "").await.unwrap();
    let log = temp.path().join("log/00000000000000000009#1");
    let data = temp.path().join(format!("ck/{}/d-7#23", saved.id()));
    for path in [&log, &data] {
        std::fs::write(path, b"half").unwrap();
    }
    // As if the clock had been set back since this file was written.
    let tomorrow = std::time::SystemTime::now() + Duration::from_secs(86_400);
    std::fs::File::options().write(true).open(&data).unwrap().set_modified(tomorrow).unwrap();
    let gentle = store.sweep(&SweepOptions::default()).await.unwrap();
    assert!(gentle.deleted.is_empty() && log.exists());
    let mut now = SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: true };
    let planned = store.sweep(&now).await.unwrap();
    assert!(log.exists() && planned.deleted.len() == 3, "{planned:?}");
    now.dry_run = false;
    let swept = store.sweep(&now).await.unwrap();
    assert_eq!(swept.deleted, planned.deleted, "a dry run says what would be done");
    assert_eq!(swept.deleted.iter().filter(|s| s.why == Why::Leftover).count(), 2);
    assert!(!log.exists() && !data.exists());
    assert!(!temp.path().join(format!("ck/{}", retired.id())).exists(), "its folder goes, too");
    let state = store.state().await.unwrap();
    let chain = toy::chain(&state, state.get(saved.id()).unwrap()).unwrap();
    assert_eq!(toy::restore(&store, &chain).await.unwrap(), b"abc");
    assert!(temp.path().join("tmp").read_dir().is_ok_and(|mut d| d.next().is_none()));
}

#[cfg(unix)]
#[tokio::test]
async fn what_no_retry_can_help_ends_at_once() {
    let temp = tempfile::tempdir().unwrap();
    let place = Place::folder(temp.path());
    let store = Store::create(&place, StoreOptions::default()).await.unwrap();
    toy::save(&store, 1, None, b"abc").await.unwrap();
    // A file where the folder of checkpoints should be: no retry can help.
    std::fs::rename(temp.path().join("ck"), temp.path().join("gone")).unwrap();
    std::fs::write(temp.path().join("ck"), b"").unwrap();
    // After retries it would say that time is up.
    let error = toy::save(&store, 2, None, b"abc").await.unwrap_err();
    assert!(matches!(error, Error::Storage { .. }), "{error:?}");
    assert_eq!(store.list().await.unwrap().len(), 1);
}

/// A folder with 5,000 checkpoints is opened and listed in less than a second.
#[tokio::test]
async fn listing_a_large_folder_is_quick() {
    use futures::TryStreamExt;
    use object_store::{ObjectStore, ObjectStoreExt};
    const MANY: u64 = 5_000;
    // Made in memory, where nothing is synced, and then copied.
    let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let place = Place::objects(Arc::clone(&memory), Path::default());
    let store = Store::create(&place, quick_options()).await.unwrap();
    for step in 0..MANY {
        let about = s4_store::About { step, ..s4_store::About::default() };
        store.begin().await.unwrap().publish(bytes::Bytes::new(), about).await.unwrap();
    }
    let temp = tempfile::tempdir().unwrap();
    let metas: Vec<_> = memory.list(None).try_collect().await.unwrap();
    for meta in metas {
        let path = temp.path().join(meta.location.as_ref());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let bytes = memory.get(&meta.location).await.unwrap().bytes().await.unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    // In one of some tries: a busy machine delays any of them.
    let mut took = vec![];
    for _ in 0..20 {
        let start = std::time::Instant::now();
        let folder = Store::open(&Place::folder(temp.path()), quick_options()).await.unwrap();
        let listed = folder.list().await.unwrap();
        took.push(start.elapsed());
        assert_eq!(listed.len() as u64, MANY);
        if start.elapsed() < Duration::from_secs(1) {
            break;
        }
    }
    println!("{MANY} checkpoints in a folder opened and listed in {took:?}");
    assert!(took.last().is_some_and(|last| *last < Duration::from_secs(1)), "{took:?}");
}

/// A sweep that was killed after the last object, and a writer that was killed before its first one,
/// leave an empty folder.
#[tokio::test]
async fn empty_folders_do_not_stay() {
    let temp = tempfile::tempdir().unwrap();
    let place = Place::folder(temp.path());
    let store = Store::create(&place, quick_options()).await.unwrap();
    toy::save(&store, 1, None, &[1; 20]).await.unwrap();
    let gone = toy::save(&store, 2, None, &[2; 20]).await.unwrap().id();
    store.retire(&[gone], "").await.unwrap();
    let ck = temp.path().join("ck");
    let never = ck.join("01890000-0000-7000-8000-000000000000");
    let swept = ck.join(gone.to_string());
    std::fs::remove_dir_all(&swept).unwrap();
    [&never, &swept].into_iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
    let dry = SweepOptions { dry_run: true, ..now() };
    store.sweep(&dry).await.unwrap();
    assert!(swept.exists() && never.exists());
    // A writer may just have made the one that nobody knows.
    store.sweep(&SweepOptions::default()).await.unwrap();
    assert!(!swept.exists() && never.exists());
    store.sweep(&now()).await.unwrap();
    assert_eq!(std::fs::read_dir(&ck).unwrap().count(), 1, "that of step 1");
}

/// An entry that is a link to what is not there (a file system that is not mounted, say) is not the end of
/// the log: nothing is written in its place.
#[cfg(unix)]
#[tokio::test]
async fn an_entry_that_is_a_dangling_link_is_damage() {
    for writers in [Writers::Many, Writers::Single] {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::folder(temp.path());
        let options = || StoreOptions { writers, ..quick_options() };
        let store = Store::create(&place, options()).await.unwrap();
        toy::save(&store, 1, None, &[1; 20]).await.unwrap();
        toy::save(&store, 2, None, &[2; 20]).await.unwrap();
        let entry = temp.path().join("log/00000000000000000002");
        let elsewhere = temp.path().join("elsewhere");
        std::fs::rename(&entry, &elsewhere).unwrap();
        std::os::unix::fs::symlink(temp.path().join("nowhere"), &entry).unwrap();
        let told = |e: Error| {
            let said = e.to_string();
            assert!(e.is_log_damage(), "{said}");
            assert!(said.contains("entry 2") && said.contains("dangling link"), "{said}");
        };
        told(toy::save(&store, 3, None, &[3; 20]).await.unwrap_err());
        // Gives the lease back.
        let _ = store.release().await;
        told(Store::open(&place, options()).await.unwrap_err());
        assert!(entry.is_symlink(), "it was overwritten");
        let reading = Store::open_read_only(&place, options()).await.unwrap();
        assert_eq!(reading.list().await.unwrap().len(), 1);
        assert_eq!(reading.log_damage().await.unwrap().len(), 1);
        let planned = Store::repair(&place, options(), false).await.unwrap();
        assert!(planned.damage.len() == 1 && planned.losses.len() == 1, "{planned:?}");
        assert!(entry.is_symlink(), "a dry run changed something");
        // Once the file system is mounted again, everything is there.
        std::fs::rename(&elsewhere, temp.path().join("nowhere")).unwrap();
        let store = Store::open(&place, options()).await.unwrap();
        assert_eq!(store.list().await.unwrap().len(), 2);
        drop(store);
        std::fs::remove_file(temp.path().join("nowhere")).unwrap();
        let done = Store::repair(&place, options(), true).await.unwrap();
        assert_eq!(done.fenced, [2], "{done:?}");
        let store = Store::open(&place, options()).await.unwrap();
        toy::save(&store, 3, None, &[3; 20]).await.unwrap();
        assert_eq!(store.list().await.unwrap().len(), 2);
    }
}
