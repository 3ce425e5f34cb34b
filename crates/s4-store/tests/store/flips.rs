//! One bit of each byte of a small store, flipped: a typed error, or no difference.

use std::sync::Arc;

use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use s4_store::testing::{quick_options, toy};
use s4_store::{CheckOptions, Error, Place, Store, StoreOptions};

/// Everything that a reader sees: each checkpoint with its content.
async fn read_all(place: &Place, options: &StoreOptions) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let store = Store::open(place, options.clone()).await?;
    let state = store.state().await?;
    let mut seen = Vec::new();
    for checkpoint in state.list() {
        let chain = toy::chain(&state, checkpoint)?;
        let about = format!("{checkpoint:?}");
        seen.push((about, toy::restore(&store, &chain).await?));
    }
    Ok(seen)
}

#[tokio::test(start_paused = true)]
async fn every_byte_of_a_small_store_with_a_view() {
    let (flips, harmless) = flip_everything(true).await;
    // The view is a hint, and hides damage of the log's older entries from readers.
    assert!(harmless > 1000 && harmless < flips - 500, "{harmless} of {flips}");
}

#[tokio::test(start_paused = true)]
async fn every_byte_of_a_small_store_without_a_view() {
    let (flips, harmless) = flip_everything(false).await;
    assert!(flips > 2000);
    assert_eq!(harmless, 0);
}

/// Flips a bit of each byte of each object; returns how many flips there were, and how many of them
/// no reader noticed.
async fn flip_everything(view: bool) -> (u32, u32) {
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let place = Place::objects(Arc::clone(&objects), Path::from("s"));
    let options = quick_options();
    let store = Store::create(&place, options.clone()).await.unwrap();
    let base = toy::save(&store, 1, None, &[7; 30]).await.unwrap();
    toy::save(&store, 2, Some((base.reference(), &[7; 30])), &[9; 30]).await.unwrap();
    store.pin(base.id()).await.unwrap();
    // A sweep leaves a view, which is read first from here on.
    if view {
        store.sweep(&s4_store::SweepOptions::default()).await.unwrap();
    }
    let good = read_all(&place, &options).await.unwrap();
    assert_eq!(good.len(), 2);

    let keys: Vec<_> = objects.list(None).map_ok(|m| m.location).try_collect().await.unwrap();
    let expected = usize::from(view) + 1 + 3 + 2 * 3;
    assert_eq!(keys.len(), expected, "view, repo, log, two checkpoints of 2 + 1 objects");
    let (mut flips, mut harmless) = (0, 0);
    for key in keys {
        let bytes = objects.get(&key).await.unwrap().bytes().await.unwrap();
        for i in 0..bytes.len() {
            let mut bad = bytes.to_vec();
            bad[i] ^= 1 << (i % 8);
            objects.put(&key, bad.into()).await.unwrap();
            flips += 1;
            match read_all(&place, &options).await {
                Ok(read) => {
                    assert_eq!(read, good, "{key}, byte {i}");
                    harmless += 1;
                }
                Err(
                    Error::Corrupt { .. } | Error::Unsupported { .. } | Error::LogDamaged { .. },
                ) => {}
                Err(other) => panic!("{key}, byte {i}: {other:?}"),
            }
            // A check sees every flip, unless it is in the view, which is a hint.
            let is_view = key.as_ref().ends_with("logck");
            let clean = match Store::open(&place, options.clone()).await {
                Ok(store) => {
                    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
                    store.check(&all, None).await.is_ok_and(|r| r.is_clean())
                }
                Err(_) => false,
            };
            assert_eq!(clean, is_view, "{key}, byte {i}");
        }
        objects.put(&key, bytes.into()).await.unwrap();
    }
    assert_eq!(read_all(&place, &options).await.unwrap(), good);
    (flips, harmless)
}
