//! Checkpoints that several processes store together.

use bytes::Bytes;
use s4weights::format::manifest::{Role, RoleKind, Roles};
use s4weights::store::{
    CheckOptions, CheckpointStore, PartOf, Place, RankPart, SaveOptions, Saved, StoreOptions,
    WhyBase,
};
use s4weights::{Contents, DType, Error, TensorSource};

use crate::run::{memory, open, options};

/// A rank's tensors at a step: a large one, with a counterpart in every step, and small ones.
fn tensors(rank: u32, step: u64) -> Vec<(String, DType, Vec<u64>, Vec<u8>)> {
    let large: Vec<u8> = (0..20_000u64)
        .flat_map(|i| {
            let moved = u64::from(i % 7 == step % 7) * step;
            (0x3c00_0000 + (i * 7919 % 65_536) as u32 * 16 + moved as u32 + rank).to_le_bytes()
        })
        .collect();
    let small = (rank as f32 + step as f32).to_le_bytes().repeat(9);
    vec![
        (format!("w@{rank}"), DType::Float32, vec![100, 200], large),
        (format!("b@{rank}"), DType::Float32, vec![9], small),
    ]
}

fn sources(list: &[(String, DType, Vec<u64>, Vec<u8>)]) -> Vec<TensorSource<'_>> {
    list.iter()
        .map(|(name, dtype, shape, data)| TensorSource::new(name, *dtype, shape, data))
        .collect()
}

/// What rank `rank` does in its own process: its input comes as text, its result goes as bytes.
fn one_rank(place: &Place, of: &str, rank: u32, step: u64) -> Bytes {
    let store = CheckpointStore::open_at(place, options()).unwrap();
    let of: PartOf = serde_json::from_str(of).unwrap();
    let roles = Roles {
        tensors: vec![Role { tensor: 0, parameter: 0, kind: RoleKind::Weight, group: 0 }],
        groups: vec![[("lr".to_owned(), f64::from(rank))].into()],
    };
    let options = SaveOptions { roles: Some(roles), ..SaveOptions::default() };
    let list = tensors(rank, step);
    let part = store.save_part(&of, rank, &sources(&list), &options).unwrap();
    part.to_bytes(&of).unwrap().into()
}

/// Begins a checkpoint of as many deltas as one process may store.
fn begin(store: &CheckpointStore, raw: u64) -> PartOf {
    store.begin_parts(raw, &[1], false).unwrap().remove(0)
}

fn save(store: &CheckpointStore, place: &Place, ranks: u32, step: u64) -> Saved {
    let tensors = [vec![2; ranks as usize], vec![0]].concat();
    let all = store.begin_parts(u64::from(ranks) * 80_000, &tensors, false).unwrap();
    let told: Vec<_> = all.iter().map(|of| serde_json::to_string(of).unwrap()).collect();
    // The last rank has nothing to store.
    let mut parts: Vec<_> =
        (0..ranks).map(|r| Some(one_rank(place, &told[r as usize], r, step))).collect();
    parts.push(None);
    let of = &all[0];
    let part = |p: Option<Bytes>| p.map(|p| RankPart::from_bytes(&p, of).unwrap());
    let parts = parts.into_iter().map(part).collect();
    let contents = Contents { blobs: [("note".into(), vec![7])].into(), ..Contents::default() };
    let options = SaveOptions { contents, ..SaveOptions::default() };
    store.publish_parts(of, step, parts, &options).unwrap()
}

fn expect(store: &CheckpointStore, ranks: u32, step: u64) {
    let loaded = store.load(Some(step)).unwrap();
    let reader = loaded.reader();
    for rank in 0..ranks {
        for (name, dtype, shape, data) in tensors(rank, step) {
            let found = reader.tensors().nth(reader.find(&name).unwrap()).unwrap();
            assert_eq!((found.dtype, found.shape), (dtype, &shape[..]), "{name}");
            assert!(reader.read(&name).unwrap() == data, "{name} of step {step}");
        }
    }
    assert_eq!(reader.tensors().len(), 2 * ranks as usize);
    assert_eq!(reader.blob("note").unwrap(), [7]);
    let roles = reader.manifest().roles.clone().unwrap();
    let rows: Vec<_> = roles.tensors.iter().map(|r| (r.tensor, r.parameter, r.group)).collect();
    let wanted: Vec<_> = (0..ranks).map(|r| (2 * r, r, r)).collect();
    assert_eq!(rows, wanted);
    assert_eq!(roles.groups.len(), ranks as usize);
}

#[test]
fn ranks_save_bases_and_deltas() {
    let place = memory();
    let store = open(&place, options());
    let first = save(&store, &place, 3, 1);
    assert!(matches!(&first.why_base, Some(WhyBase::Begun(_))), "{:?}", first.why_base);
    assert_eq!(first.report.bytes_in, 3 * (80_000 + 36));
    for step in 2..5 {
        let saved = save(&store, &place, 3, step);
        assert_eq!(saved.why_base, None);
        assert!(saved.checkpoint.base.is_some());
        assert!(saved.checkpoint.about.data_len < first.checkpoint.about.data_len);
    }
    // Tensors of other names have no counterpart: a base.
    let of = begin(&store, 160_000);
    let told = serde_json::to_string(&of).unwrap();
    let other = CheckpointStore::open_at(&place, options()).unwrap();
    let list = tensors(9, 5);
    let of_other: PartOf = serde_json::from_str(&told).unwrap();
    let part = other.save_part(&of_other, 0, &sources(&list), &SaveOptions::default()).unwrap();
    let saved = store.publish_parts(&of, 5, vec![Some(part)], &SaveOptions::default()).unwrap();
    assert_eq!(saved.why_base, Some(WhyBase::NothingGained));
    assert_eq!(saved.checkpoint.base, None);

    let reading = CheckpointStore::open_at(&place, options()).unwrap();
    (1..5).for_each(|step| expect(&reading, 3, step));
    let all = CheckOptions { read_data: true, ..CheckOptions::default() };
    let report = reading.check(&all).unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
    assert_eq!(report.checkpoints, 5);
    // A delta of several ranks becomes a base of one.
    let delta = reading.at_step(4).unwrap().id();
    let rebased = reading.rebase(delta, None).unwrap();
    assert!(rebased.base.is_none() && rebased.about.parts.is_empty());
    expect(&reading, 3, 4);
    // And one process may save a delta of what several saved.
    let list: Vec<_> = (0..3).flat_map(|rank| tensors(rank, 6)).collect();
    let next = reading.save(6, &sources(&list), &SaveOptions::default()).unwrap();
    assert_eq!(next.why_base, None);
    assert!(reading.load(Some(6)).unwrap().reader().read("w@2").unwrap() == tensors(2, 6)[0].3);
}

#[test]
fn a_rank_stores_no_more_deltas_than_its_share() {
    let place = memory();
    let store = open(&place, options());
    save(&store, &place, 3, 1);
    let all = store.begin_parts(240_000, &[2, 1], false).unwrap();
    let told = |n: usize| serde_json::to_value(&all[n]).unwrap()["deltas"].clone();
    assert_eq!((told(0), told(1)), (43_333.into(), 21_666.into()));
    // Two tensors have counterparts in the parent, and one of them may be a delta.
    let mut told = serde_json::to_value(&all[0]).unwrap();
    told["deltas"] = 1.into();
    let of: PartOf = serde_json::from_value(told).unwrap();
    let list: Vec<_> = (0..3).map(|rank| tensors(rank, 2).swap_remove(0)).collect();
    let parts = [(&of, 0, &list[..2]), (&all[1], 1, &list[2..])].map(|(of, rank, list)| {
        Some(store.save_part(of, rank, &sources(list), &SaveOptions::default()).unwrap())
    });
    let saved = store.publish_parts(&all[0], 2, parts.into(), &SaveOptions::default()).unwrap();
    assert_eq!(saved.why_base, None);
    let loaded = store.load(Some(2)).unwrap();
    let deltas = loaded.reader().manifest().plans.iter().filter(|p| p.parent().is_some());
    assert_eq!(deltas.count(), 2);
    for (name, _, _, data) in &list {
        assert!(loaded.reader().read(name).unwrap() == *data, "{name}");
    }
}

#[test]
fn more_chunks_than_a_manifest_has_room_for_are_refused_before_any_is_stored() {
    let place = memory();
    let store = open(&place, options());
    // Never touched, and long enough for few tensors to have too many chunks.
    let zeros = vec![0u8; 64 << 20];
    let names: Vec<_> = (0..43_691).map(|i| i.to_string()).collect();
    let shape = [32 << 20];
    let source = |name| TensorSource::new(name, DType::BFloat16, &shape, &zeros);
    let list: Vec<_> = names.iter().map(|n| source(n)).collect();
    let refused = store.save(1, &list, &SaveOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("at most 11184810"), "{refused}");
    let of = begin(&store, 1 << 42);
    let refused = store.save_part(&of, 0, &list, &SaveOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("268435456 bytes"), "{refused}");
}

#[test]
fn parts_that_do_not_fit_are_refused_and_leave_nothing() {
    let place = memory();
    let store = open(&place, options());
    let of = begin(&store, 80_000);
    let told = serde_json::to_string(&of).unwrap();
    let bytes = one_rank(&place, &told, 0, 1);
    let part = RankPart::from_bytes(&bytes, &of).unwrap();
    // Two ranks have a tensor of the same name.
    let twice = vec![Some(part.clone()), Some(part)];
    let refused = store.publish_parts(&of, 1, twice, &SaveOptions::default()).unwrap_err();
    assert!(matches!(&refused, Error::Argument(what) if what.contains("w@0")), "{refused}");
    assert!(store.list().unwrap().is_empty());
    // The attempt was given up: nobody can list it any more.
    let late = vec![Some(RankPart::from_bytes(&bytes, &of).unwrap())];
    assert!(store.publish_parts(&of, 1, late, &SaveOptions::default()).is_err());
    assert!(store.list().unwrap().is_empty());

    // Bytes that are no part, or a part of another checkpoint.
    let other = begin(&store, 80_000);
    let refused = RankPart::from_bytes(&bytes, &other).unwrap_err().to_string();
    assert!(refused.contains("it belongs to checkpoint"), "{refused}");
    for cut in 0..bytes.len() {
        if let Ok(part) = RankPart::from_bytes(&bytes.slice(..cut), &of) {
            let of = begin(&store, 80_000);
            if cut % 97 == 0 {
                let refused =
                    store.publish_parts(&of, 1, vec![Some(part)], &SaveOptions::default());
                assert!(matches!(refused, Err(Error::Format { .. })), "{cut}: {refused:?}");
            }
        }
    }
    // A damaged part is refused, or the damage does no harm.
    let mut looked_at = 0;
    for bit in (32..bytes.len() * 8).step_by(bytes.len() / 8) {
        let of = begin(&store, 80_000);
        let told = serde_json::to_string(&of).unwrap();
        let mut damaged = one_rank(&place, &told, 0, 1).to_vec();
        damaged[bit / 8] ^= 1 << (bit % 8);
        if let Ok(part) = RankPart::from_bytes(&damaged.into(), &of) {
            looked_at += 1;
            let listed = store.publish_parts(&of, 1, vec![Some(part)], &SaveOptions::default());
            // A change of the sizes in its report, which are for people, does no harm.
            assert!(
                listed.is_err() || store.load(Some(1)).is_ok_and(|l| l.reader().verify().is_ok())
            );
            store.list().unwrap().iter().for_each(|c| _ = store.retire(&[c.id()], ""));
        }
    }
    assert!(looked_at > 20, "{looked_at}");
}

#[test]
fn a_rank_does_not_read_back_what_it_stored() {
    let dir = tempfile::tempdir().unwrap();
    let url = dir.path().to_str().unwrap();
    let open = |parent_memory| {
        let options = StoreOptions { parent_memory, ..options() };
        CheckpointStore::open_or_create(url, &Default::default(), options).unwrap()
    };
    let save_with = |store: &CheckpointStore, step: u64| {
        let of = begin(store, 160_000);
        let part = |rank| {
            store.save_part(&of, rank, &sources(&tensors(rank, step)), &SaveOptions::default())
        };
        let parts =
            [part(0), part(1)].into_iter().map(|p| p.map(Some)).collect::<Result<_, _>>()?;
        store.publish_parts(&of, step, parts, &SaveOptions::default())
    };
    let (keeps, reads) = (open(1 << 30), open(0));
    save_with(&keeps, 1).unwrap();
    let data = |id: String| {
        let folder = dir.path().join("ck").join(id);
        let files = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path());
        files.filter(|f| !f.to_string_lossy().contains("manifest")).collect::<Vec<_>>()
    };
    let first = keeps.at_step(1).unwrap();
    let files = data(first.id().to_string());
    assert_eq!(files.len(), 2, "{files:?}");
    // A store that reads the damaged files notices.
    let stored: Vec<_> = files.iter().map(|f| std::fs::read(f).unwrap()).collect();
    for (file, bytes) in files.iter().zip(&stored) {
        std::fs::write(file, vec![0; bytes.len()]).unwrap();
    }
    assert!(save_with(&reads, 2).is_err());
    let saved = save_with(&keeps, 2).unwrap();
    assert_eq!(saved.why_base, None);
    // A delta of a delta needs the values of both.
    let saved = save_with(&keeps, 3).unwrap();
    assert_eq!(saved.why_base, None);
    for (file, bytes) in files.iter().zip(&stored) {
        std::fs::write(file, bytes).unwrap();
    }
    let store = open(0);
    for step in 1..4 {
        for rank in 0..2 {
            for (name, _, _, values) in tensors(rank, step) {
                let reader = store.load(Some(step)).unwrap();
                assert!(reader.reader().read(&name).unwrap() == values, "{name} of {step}");
            }
        }
    }
}
