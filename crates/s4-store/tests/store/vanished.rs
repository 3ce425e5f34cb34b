//! A check and a sweep notice that a store vanished under an open handle, or lost entries that this handle has
//! read. And a date in the future makes nothing else look old.

use std::path::Path;
use std::time::{Duration, SystemTime};

use s4_store::testing::{quick_options, toy};
use s4_store::{About, CheckOptions, CheckpointId, Error, Place, Store, SweepOptions, Why};

async fn with_three(folder: &Path) -> Store {
    let store = Store::create(&Place::folder(folder), quick_options()).await.unwrap();
    for step in 1..=3 {
        toy::save(&store, step, None, &[7; 20]).await.unwrap();
    }
    store
}

/// Takes something away from the store in a folder.
type Loss = Box<dyn Fn(&Path)>;

fn entry(folder: &Path, n: u64) -> std::path::PathBuf {
    folder.join(format!("log/{n:020}"))
}

fn set_date(path: &Path, to: SystemTime) {
    std::fs::File::options().write(true).open(path).unwrap().set_modified(to).unwrap();
}

#[tokio::test]
async fn a_store_that_is_gone_is_neither_clean_nor_swept() {
    fn remove(folder: &Path, n: u64) {
        std::fs::remove_file(entry(folder, n)).unwrap();
    }
    let all = |folder: &Path| (1..=3).for_each(|n| remove(folder, n));
    let empty = |folder: &Path| {
        std::fs::remove_dir_all(folder).unwrap();
        std::fs::create_dir(folder).unwrap();
    };
    let overwrite =
        |folder: &Path| assert!(std::fs::copy(entry(folder, 2), entry(folder, 3)).is_ok());
    let losses: [(&str, Loss); 5] = [
        ("folder", Box::new(|folder| std::fs::remove_dir_all(folder).unwrap())),
        ("file system", Box::new(empty)),
        ("newest entry", Box::new(|folder| remove(folder, 3))),
        ("log", Box::new(all)),
        ("other entry", Box::new(overwrite)),
    ];
    for (what, lose) in losses {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path().join("store");
        let store = with_three(&folder).await;
        assert!(store.check(&CheckOptions::default(), None).await.unwrap().is_clean());
        lose(&folder);
        for error in [store.list().await.unwrap_err(), store.latest().await.unwrap_err()] {
            let is_damage = matches!(error, Error::LogDamaged { .. }) && what == "other entry";
            assert!(matches!(error, Error::Gone { .. }) || is_damage, "{what}: {error}");
        }
        match store.check(&CheckOptions::default(), None).await {
            Err(Error::Gone { .. }) => {}
            // An entry that is not what its name says is damage, which a check reports.
            Ok(report) => assert!(what == "other entry" && !report.is_clean(), "{what}"),
            Err(e) => panic!("{what}: {e}"),
        }
        for dry_run in [true, false] {
            let options = SweepOptions { dry_run, ..SweepOptions::default() };
            let error = store.sweep(&options).await.unwrap_err();
            let is_damage = matches!(error, Error::LogDamaged { .. }) && what == "other entry";
            assert!(matches!(error, Error::Gone { .. }) || is_damage, "{what}: {error}");
        }
    }
}

#[tokio::test]
async fn an_empty_store_that_is_gone_is_not_called_empty() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("store");
    let store = Store::create(&Place::folder(&folder), quick_options()).await.unwrap();
    assert!(store.latest().await.unwrap().is_none());
    std::fs::remove_dir_all(&folder).unwrap();
    let error = store.latest().await.unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
}

#[tokio::test]
async fn a_log_whose_end_was_replaced_is_read_again() {
    let temp = tempfile::tempdir().unwrap();
    let store = with_three(temp.path()).await;
    // As a backup that was put back: the same store, and another third checkpoint.
    std::fs::rename(entry(temp.path(), 3), temp.path().join("aside")).unwrap();
    let other = Store::open(&Place::folder(temp.path()), quick_options()).await.unwrap();
    let fourth = toy::save(&other, 4, None, &[9; 20]).await.unwrap().id();
    assert_eq!(store.latest().await.unwrap().unwrap().id(), fourth);
}

#[tokio::test]
async fn a_checkpoint_is_not_damaged_if_its_store_is_gone() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("store");
    let store = with_three(&folder).await;
    let newest = store.list().await.unwrap().pop().unwrap();
    std::fs::remove_dir_all(folder.join(format!("ck/{}", newest.id()))).unwrap();
    let error = store.read_manifest(&newest).await.unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
    let error = store.read_manifest(&newest).await.unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
}

#[tokio::test]
async fn another_store_in_its_place_is_not_taken_for_it() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("store");
    let store = with_three(&folder).await;
    std::fs::remove_dir_all(&folder).unwrap();
    let other = with_three(&folder).await;
    let error = store.list().await.unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
    let kept = toy::save(&other, 4, None, &[1; 20]).await.unwrap().id();
    other.retire(&[kept], "").await.unwrap();
    let error = store.check(&CheckOptions::default(), None).await.unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
    let now = SweepOptions { grace: Duration::ZERO, exclusive: true, dry_run: false };
    let error = store.sweep(&now).await.unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
    assert!(folder.join(format!("ck/{kept}")).exists());
}

#[tokio::test]
async fn a_checkpoint_that_is_not_listed_is_not_passed_over() {
    let temp = tempfile::tempdir().unwrap();
    let store = with_three(temp.path()).await;
    let id: CheckpointId = store.list().await.unwrap()[0].id();
    let only = |id| CheckOptions { only: vec![id], ..CheckOptions::default() };
    assert_eq!(store.check(&only(id), None).await.unwrap().checkpoints, 1);
    store.retire(&[id], "").await.unwrap();
    let error = store.check(&only(id), None).await.unwrap_err();
    assert!(matches!(error, Error::NoCheckpoint { .. }), "{error}");
}

/// What is refused when it is staged or published leaves no objects for a sweep after the grace.
#[tokio::test]
async fn a_checkpoint_that_no_entry_can_hold_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let store = with_three(temp.path()).await;
    let metric = |x| About { metrics: [("loss".to_owned(), x)].into(), ..About::default() };
    let tag = |n| About { tags: [("note".to_owned(), "x".repeat(n))].into(), ..About::default() };
    // The last one leaves too little room for all else that an entry holds.
    for about in [metric(f64::NAN), metric(f64::INFINITY), tag(70_000), tag((64 << 10) - 100)] {
        let mut attempt = store.begin().await.unwrap();
        attempt.put("weights", vec![1; 100].into()).await.unwrap();
        let error = attempt.publish(bytes::Bytes::new(), about).await.unwrap_err();
        assert!(matches!(error, Error::Argument(_) | Error::Limit(_)), "{error}");
        assert_eq!(std::fs::read_dir(temp.path().join("ck")).unwrap().count(), 3);
    }
    assert_eq!(store.list().await.unwrap().len(), 3);
}

#[tokio::test]
async fn a_date_in_the_future_makes_nothing_else_old() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path();
    let store = with_three(folder).await;
    let ids: Vec<_> = store.list().await.unwrap().iter().map(|c| c.id()).collect();
    store.retire(&ids[..1], "").await.unwrap();
    // As if the clock had been ahead while this entry and these objects were written, and another attempt.
    let next_month = SystemTime::now() + Duration::from_secs(30 * 86_400);
    set_date(&entry(folder, 4), next_month);
    let object = std::fs::read_dir(folder.join(format!("ck/{}", ids[0]))).unwrap();
    object.for_each(|file| set_date(&file.unwrap().path(), next_month));
    store.retire(&ids[1..2], "").await.unwrap();
    let running = toy::stage(&store, 9, None, &[3; 20]).await.unwrap();
    for dry_run in [true, false] {
        let options = SweepOptions { dry_run, ..SweepOptions::default() };
        let report = store.sweep(&options).await.unwrap();
        assert!(report.deleted.is_empty() && report.aborted.is_empty(), "{report:?}");
        assert_eq!(report.waiting.len(), 3);
        assert!(report.waiting.iter().all(|s| s.why == Why::TooYoung));
    }
    running.publish().await.unwrap();
    assert_eq!(store.unretire(&ids[1..2]).await.unwrap().len(), 1);
}
