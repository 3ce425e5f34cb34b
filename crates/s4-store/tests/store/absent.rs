//! A place that holds no store, one that cannot be seen, and one that lost a part of its store.

use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::{Fault, OpKind, quick_options, toy};
use s4_store::{Error, Place, Store};

use crate::faulty;

#[tokio::test(start_paused = true)]
async fn only_what_a_listing_shows_to_be_empty_holds_no_store() {
    let (faults, place) = faulty();
    let empty = Store::open(&place, quick_options()).await.unwrap_err();
    assert!(matches!(empty, Error::NoStore { .. }), "{empty}");
    // The key is not there, and the listing is refused.
    faults.set_plan(|op| (op.kind == OpKind::List).then_some(Fault::Denied));
    let blind = Store::open(&place, quick_options()).await.unwrap_err();
    assert!(matches!(blind, Error::Storage { .. }), "{blind}");
    faults.heal();
    let store = Store::create(&place, quick_options()).await.unwrap();
    toy::save(&store, 1, None, b"abc").await.unwrap();
    faults.delete(&Path::from("runs/one/repo.json")).await.unwrap();
    for opened in [
        Store::open(&place, quick_options()).await,
        Store::open_read_only(&place, quick_options()).await,
        Store::create(&place, quick_options()).await,
        Store::open_or_create(&place, quick_options()).await,
    ] {
        let error = opened.unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { key, .. } if key.ends_with("repo.json")),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_folder_that_cannot_be_opened_is_no_empty_one() {
    let temp = tempfile::tempdir().unwrap();
    let open = async |path: &std::path::Path| {
        Store::open(&Place::folder(path), quick_options()).await.unwrap_err()
    };
    assert!(matches!(open(&temp.path().join("a/b")).await, Error::NoStore { .. }));
    let file = temp.path().join("file");
    std::fs::write(&file, b"").unwrap();
    for path in [file.clone(), file.join("below")] {
        let error = open(&path).await;
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }
    #[cfg(unix)]
    {
        let link = temp.path().join("link");
        std::os::unix::fs::symlink(temp.path().join("not-mounted"), &link).unwrap();
        assert!(matches!(open(&link).await, Error::Io { .. }));
    }
}

/// Data that is shorter than it should be, or gone, is damage: not a failure of the network.
#[tokio::test(start_paused = true)]
async fn truncated_empty_and_missing_objects_are_damage() {
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let temp = tempfile::tempdir().unwrap();
    let folder: Arc<dyn ObjectStore> =
        Arc::new(object_store::local::LocalFileSystem::new_with_prefix(temp.path()).unwrap());
    for (place, raw, prefix) in [
        (Place::objects(Arc::clone(&objects), Path::from("s")), objects, "s/"),
        (Place::folder(temp.path()), folder, ""),
    ] {
        let store = Store::create(&place, quick_options()).await.unwrap();
        let saved = toy::save(&store, 1, None, &[7; 16]).await.unwrap();
        let reading = store.read(saved.id()).await.unwrap();
        let key = Path::from(format!("{prefix}ck/{}/d-0", saved.id()));
        for left in [15, 9, 8, 1, 0] {
            raw.put(&key, vec![7u8; left].into()).await.unwrap();
            for range in [0..16, 8..16] {
                let error = reading.range(0, range).await.unwrap_err();
                assert!(matches!(error, Error::Corrupt { .. }), "{left}: {error}");
            }
            let error = reading.object(0).await.unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{left}: {error}");
        }
        raw.delete(&key).await.unwrap();
        assert!(reading.range(0, 8..16).await.unwrap_err().is_missing());
        let manifest = Path::from(format!("{prefix}ck/{}/manifest", saved.id()));
        raw.put(&manifest, "".into()).await.unwrap();
        let error = store.read(saved.id()).await.unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}
