//! Checkpoints that several ranks store together: one attempt, one entry.

use std::time::Duration;

use bytes::Bytes;
use object_store::ObjectStoreExt;
use s4_store::testing::quick_options;
use s4_store::{
    About, CheckOptions, CheckpointId, Conflict, Error, MAX_RANKS, ObjectInfo, Op, Store,
    SweepOptions,
};

use crate::faulty;

/// Rank `rank` stores `count` objects, each of which names its rank.
async fn part(store: &Store, id: CheckpointId, rank: u32, count: u32) -> Vec<ObjectInfo> {
    let mut attempt = store.join(id, rank).await.unwrap();
    assert_eq!(attempt.id(), id);
    // Uploads end in any order.
    for n in (0..count).rev() {
        attempt.put_as(n, "weights", Bytes::from(format!("{rank}.{n}"))).await.unwrap();
    }
    attempt.finish_part().await.unwrap()
}

fn about(step: u64) -> About {
    About { step, raw_len: 100, ..About::default() }
}

#[tokio::test(start_paused = true)]
async fn parts_become_one_checkpoint_that_everything_works_on() {
    let (_, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let id = store.begin().await.unwrap().id();
    // Each rank has a handle of its own, as if in a separate process. The second has nothing to
    // store.
    let mut parts = vec![];
    for (rank, count) in [(0, 3), (1, 0), (2, 5)] {
        let own = Store::open(&place, quick_options()).await.unwrap();
        parts.push(part(&own, id, rank, count).await);
    }
    assert!(store.latest().await.unwrap().is_none(), "parts alone are no checkpoint");
    let attempt = store.gather(id, parts).await.unwrap();
    let listed = attempt.publish(Bytes::from_static(b"index"), about(7)).await.unwrap();
    assert_eq!((listed.id(), listed.about.objects), (id, 8));
    assert_eq!(listed.about.parts.counts(), [3, 0, 5]);

    // A reader that had no part in it.
    let other = Store::open(&place, quick_options()).await.unwrap();
    let reading = other.read(id).await.unwrap();
    assert_eq!(&reading.manifest().blob[..], b"index");
    for (n, name) in
        ["0.0", "0.1", "0.2", "2.0", "2.1", "2.2", "2.3", "2.4"].into_iter().enumerate()
    {
        assert_eq!(reading.object(n as u32).await.unwrap(), name);
    }
    assert!(matches!(reading.object(8).await.unwrap_err(), Error::Argument(_)));
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = other.check(&all, None).await.unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.objects, 8);

    // A sweep leaves what is listed; what is retired can come back, and is deleted in the end.
    let now = SweepOptions { grace: Duration::from_secs(8 * 24 * 3600), ..SweepOptions::default() };
    tokio::time::sleep(Duration::from_secs(30 * 24 * 3600)).await;
    assert!(store.sweep(&now).await.unwrap().deleted.is_empty());
    store.retire(&[id], "").await.unwrap();
    store.unretire(&[id]).await.unwrap();
    assert_eq!(other.read(id).await.unwrap().object(4).await.unwrap(), "2.1");
    store.retire(&[id], "").await.unwrap();
    tokio::time::sleep(Duration::from_secs(30 * 24 * 3600)).await;
    assert_eq!(store.sweep(&now).await.unwrap().deleted.len(), 1);
    assert!(other.read(id).await.is_err());
    // Readers that do not know parts refuse the log by its version.
    let entries = store.log(1).await.unwrap();
    let versions: Vec<_> = entries.iter().map(|e| e.v).collect();
    assert_eq!(
        versions,
        [3, 1, 3, 1, 1],
        "{:?}",
        entries.iter().map(|e| &e.op).collect::<Vec<_>>()
    );
}

#[tokio::test(start_paused = true)]
async fn what_a_dead_rank_leaves_is_swept() {
    let (_, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let id = store.begin().await.unwrap().id();
    part(&store, id, 0, 2).await;
    let mut dying = store.join(id, 1).await.unwrap();
    dying.put("weights", Bytes::from_static(b"1.0")).await.unwrap();
    drop(dying);
    tokio::time::sleep(Duration::from_secs(30 * 24 * 3600)).await;
    let report = store.sweep(&SweepOptions::default()).await.unwrap();
    assert_eq!(report.aborted.len(), 1);
    // The sweep wrote down that it gave up on the attempt, so a late `gather` is refused.
    let late = store.gather(id, vec![part(&store, id, 0, 2).await]).await.unwrap();
    let refused = late.publish(Bytes::new(), about(1)).await.unwrap_err();
    assert!(matches!(refused, Error::Conflict(Conflict::Spent { .. })), "{refused}");
    assert!(store.latest().await.unwrap().is_none());
}

#[tokio::test]
async fn a_part_that_is_not_whole_is_not_listed() {
    let (faults, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let id = store.begin().await.unwrap().id();
    let mut parts = vec![part(&store, id, 0, 2).await, part(&store, id, 1, 2).await];
    // Rank 1 claims that its last object is longer than what it stored.
    parts[1][1].len += 1;
    let attempt = store.gather(id, parts).await.unwrap();
    let refused = attempt.publish(Bytes::new(), about(1)).await.unwrap_err();
    assert!(matches!(refused, Error::Corrupt { .. }), "{refused}");
    assert!(refused.to_string().contains("d-4097"), "{refused}");
    // Rank 2 never stored the object that it claims.
    let made_up = ObjectInfo { len: 3, blake3: s4_store::Digest::of(b"2.0"), kind: String::new() };
    let parts = vec![part(&store, id, 0, 2).await, vec![], vec![made_up]];
    let attempt = store.gather(id, parts).await.unwrap();
    let refused = attempt.publish(Bytes::new(), about(1)).await.unwrap_err();
    assert!(matches!(refused, Error::Missing { .. }), "{refused}");
    assert!(store.latest().await.unwrap().is_none());
    // Whoever coordinates the ranks knows whether these are needed.
    let kept = object_store::path::Path::from(format!("runs/one/ck/{id}/d-0"));
    faults.head(&kept).await.unwrap();
}

#[tokio::test]
async fn ranks_have_limits() {
    let (_, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let id = store.begin().await.unwrap().id();
    let refused = store.join(id, MAX_RANKS).await.unwrap_err();
    assert!(matches!(refused, Error::Limit(_)), "{refused}");
    let mut last = store.join(id, MAX_RANKS - 1).await.unwrap();
    let refused = last.put_as(4096, "", Bytes::new()).await.unwrap_err();
    assert!(matches!(refused, Error::Limit(_)), "{refused}");
    assert!(refused.to_string().contains("4096 objects for one rank"), "{refused}");
    last.put_as(0, "", Bytes::from_static(b"x")).await.unwrap();
    let mut parts = vec![vec![]; MAX_RANKS as usize - 1];
    parts.push(last.finish_part().await.unwrap());
    let listed =
        store.gather(id, parts).await.unwrap().publish(Bytes::new(), about(1)).await.unwrap();
    assert_eq!(store.read(listed.id()).await.unwrap().object(0).await.unwrap(), "x");
    // Nothing can be added to a gathered attempt.
    let another = store.begin().await.unwrap().id();
    let mut gathered = store.gather(another, vec![]).await.unwrap();
    assert!(matches!(gathered.put("", Bytes::new()).await.unwrap_err(), Error::Argument(_)));
    let published = matches!(store.log(1).await.unwrap()[0].op, Op::Publish(_));
    assert!(published);
}

/// Its manifest and objects would be replaced by others.
#[tokio::test(start_paused = true)]
async fn what_was_listed_is_not_stored_once_more() {
    let (_, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let id = store.begin().await.unwrap().id();
    let parts = vec![part(&store, id, 0, 2).await, part(&store, id, 1, 1).await];
    // Until it is listed, it may be staged again.
    let staged = store.gather(id, parts.clone()).await.unwrap();
    staged.stage(Bytes::from_static(b"first try"), about(1)).await.unwrap();
    let attempt = store.gather(id, parts.clone()).await.unwrap();
    attempt.publish(Bytes::from_static(b"index"), about(1)).await.unwrap();
    let other = Store::open(&place, quick_options()).await.unwrap();
    for listed in [true, false] {
        for store in [&store, &other] {
            let refused = [
                store.gather(id, parts.clone()).await.map(drop),
                store.join(id, 1).await.map(drop),
            ];
            for refused in refused {
                let refused = refused.unwrap_err();
                assert!(
                    matches!(refused, Error::Conflict(Conflict::Spent { id: of, .. }) if of == id),
                    "{refused}"
                );
            }
        }
        // One that was retired can be listed again.
        if listed {
            store.retire(&[id], "").await.unwrap();
            other.state().await.unwrap();
        }
    }
    store.unretire(&[id]).await.unwrap();
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    assert!(store.check(&all, None).await.unwrap().is_clean());
    assert_eq!(&store.read(id).await.unwrap().manifest().blob[..], b"index");
}

/// The counts of the ranks in an entry take room from metrics and tags.
#[tokio::test]
async fn metrics_and_tags_have_the_room_that_the_ranks_leave() {
    let (_, place) = faulty();
    let store = Store::create(&place, quick_options()).await.unwrap();
    let about = |bytes| About { tags: [("t".to_owned(), "x".repeat(bytes))].into(), ..about(1) };
    // Two bytes for each rank.
    for (ranks, room) in [(0, 62 << 10), (MAX_RANKS as usize, 46 << 10)] {
        let id = store.begin().await.unwrap().id();
        let gather = || store.gather(id, vec![vec![]; ranks]);
        let refused = gather().await.unwrap().stage(Bytes::new(), about(room)).await.unwrap_err();
        assert!(matches!(refused, Error::Limit(_)), "{refused}");
        let staged = gather().await.unwrap().stage(Bytes::new(), about(room - 100)).await.unwrap();
        let listed = staged.publish().await.unwrap().id();
        // Then it can also be listed again, which takes a larger entry.
        store.retire(&[listed], "").await.unwrap();
        assert_eq!(store.unretire(&[listed]).await.unwrap().len(), 1);
    }
    about(62 << 10).check().unwrap_err();
    about((62 << 10) - 100).check().unwrap();
}
