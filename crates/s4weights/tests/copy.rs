//! Copies of whole checkpoints hold everything, and a comparison finds whatever is missing.

mod common;

use std::sync::Arc;

use common::{Memory, Owned, mixed, open};
use s4weights::copy::{CopyOptions, Difference, compare, copy};
use s4weights::format::manifest::{Role, RoleKind, Roles};
use s4weights::{Contents, Reader, Result, Target, WriteOptions, Writer};

/// Everything that a checkpoint can hold besides tensors.
fn contents() -> Contents {
    let tree = r#"{"root":{"dict":[["w",{"tensor":0}]]}}"#;
    Contents {
        tree: Some(serde_json::value::RawValue::from_string(tree.into()).expect("in a test")),
        blobs: [("extra".to_owned(), vec![1, 2, 3]), ("none".to_owned(), vec![])].into(),
        metadata: [("k".to_owned(), "v".to_owned())].into(),
    }
}

fn roles() -> Roles {
    let role = |tensor, kind| Role { tensor, parameter: 0, kind, group: 0 };
    Roles {
        tensors: vec![role(0, RoleKind::Weight), role(2, RoleKind::ExpAvgSq)],
        // Numbers with all their digits.
        groups: vec![(1..100).map(|i| (i.to_string(), 1e-3 / f64::from(i))).collect()],
    }
}

fn file(memory: &Memory) -> Reader {
    open(std::mem::take(&mut *memory.0.lock().expect("in a test"))).expect("in a test")
}

/// A checkpoint's contents and roles.
type Described = (Contents, Option<Roles>);

fn everything() -> Described {
    (contents(), Some(roles()))
}

fn saved_with(tensors: &[Owned], described: Described, options: WriteOptions) -> Result<Reader> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options)?;
    let (contents, roles) = described;
    if let Some(roles) = roles {
        writer.declare(roles)?;
    }
    writer.write(&tensors.iter().map(Owned::source).collect::<Vec<_>>())?;
    writer.finish(contents)?;
    Ok(file(&memory))
}

fn saved(tensors: &[Owned], described: Described) -> Reader {
    saved_with(tensors, described, WriteOptions::default()).expect("in a test")
}

#[test]
fn a_copy_holds_everything() {
    let original = saved(&mixed(), everything());
    for (batch, hash) in [(1 << 30, false), (1, true), (400_000, true)] {
        let memory = Memory::default();
        let target = Target::Stream(Box::new(memory.clone()));
        let writer = Writer::create(target, WriteOptions::default()).unwrap();
        let groups: Vec<u8> = (0..mixed().len()).map(|n| n as u8 % 3).collect();
        let options = CopyOptions { batch, groups: &groups, hash };
        let copied = copy(&original, writer, &options).unwrap();
        assert_eq!(copied.written.report.tensors, mixed().len() as u64);
        assert_eq!(copied.digests.as_ref().map(Vec::len), hash.then_some(mixed().len()));
        let found = file(&memory);
        assert_eq!(compare(&original, copied.digests.as_deref(), &found).unwrap(), None);
        assert_eq!(compare(&original, None, &found).unwrap(), None);
        for t in mixed() {
            assert!(found.read(&t.name).unwrap() == t.data, "{}", t.name);
        }
        assert_eq!(found.manifest().roles, Some(roles()));
    }
}

#[test]
fn groups_are_for_all_tensors_or_for_none() {
    let original = saved(&mixed(), everything());
    let target = Target::Stream(Box::new(Memory::default()));
    let writer = Writer::create(target, WriteOptions::default()).unwrap();
    let options = CopyOptions { groups: &[0, 1], ..CopyOptions::default() };
    assert!(matches!(copy(&original, writer, &options), Err(s4weights::Error::Argument(_))));
}

#[test]
fn whatever_differs_is_found() {
    let original = saved(&mixed(), everything());
    let changed = |change: fn(&mut Described)| {
        let mut other = everything();
        change(&mut other);
        compare(&original, None, &saved(&mixed(), other)).unwrap()
    };
    assert_eq!(changed(|_| {}), None);
    let tree = changed(|(c, _)| c.tree = None);
    assert_eq!(tree, Some(Difference::Tree));
    assert_eq!(changed(|(c, _)| c.metadata.clear()), Some(Difference::Metadata));
    assert_eq!(changed(|(_, roles)| *roles = None), Some(Difference::Roles));
    let role = changed(|(_, roles)| {
        if let Some(roles) = roles {
            roles.tensors[1].kind = RoleKind::ExpAvg;
        }
    });
    assert_eq!(role, Some(Difference::Roles));
    let more = changed(|(c, _)| drop(c.blobs.insert("more".into(), vec![])));
    assert_eq!(more, Some(Difference::Blobs));
    let blob = changed(|(c, _)| drop(c.blobs.insert("extra".into(), vec![1, 2, 4])));
    assert_eq!(blob, Some(Difference::Blob("extra".into())));

    let digests: Vec<_> = mixed().iter().map(|t| s4weights::format::Digest::of(&t.data)).collect();
    for (n, t) in mixed().iter().enumerate().filter(|(_, t)| !t.data.is_empty()) {
        let mut other = mixed();
        other[n].data[t.data.len() / 2] ^= 1;
        let other = saved(&other, everything());
        for digests in [None, Some(digests.as_slice())] {
            let found = compare(&original, digests, &other).unwrap();
            assert_eq!(found, Some(Difference::Values(t.name.clone())));
        }
    }
    let mut order = mixed();
    order.swap(0, 1);
    let other = saved(&order, everything());
    assert_eq!(compare(&original, None, &other).unwrap(), Some(Difference::Tensors));
    let fewer = compare(&original, Some(&digests[1..]), &saved(&mixed(), everything())).unwrap();
    assert_eq!(fewer, Some(Difference::Values("w".into())));
}

/// A delta has the same values, but needs the other file.
#[test]
fn a_copy_stands_alone() {
    let original = Arc::new(saved(&mixed(), everything()));
    let against =
        WriteOptions { parent: Some(Arc::clone(&original) as _), ..WriteOptions::default() };
    let delta = saved_with(&mixed(), everything(), against).unwrap();
    assert!(delta.manifest().parent.is_some());
    assert_eq!(compare(&original, None, &delta).unwrap(), Some(Difference::Parent));
}
