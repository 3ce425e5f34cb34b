//! Saves of one handle, planned from what it remembers, compared with those of handles that remember nothing.

use std::collections::BTreeMap;
use std::path::Path;

use s4weights::format::manifest::{Role, RoleKind, Roles};
use s4weights::store::{CheckpointStore, SaveOptions, StoreOptions};
use s4weights::{DType, Preset, TensorSource};
use safetensors::SafeTensors;

use crate::run::{memory, open, options};

struct Tensor {
    name: String,
    shape: Vec<u64>,
    data: Vec<u8>,
}

const PREFIXES: [(&str, RoleKind); 3] = [
    ("model.", RoleKind::Weight),
    ("optimizer.exp_avg.", RoleKind::ExpAvg),
    ("optimizer.exp_avg_sq.", RoleKind::ExpAvgSq),
];

/// A step of a real training run.
fn tensors(step: usize) -> Vec<Tensor> {
    let name = format!("../../testdata/gpt98m_fp32_s{step}.safetensors");
    let file = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap();
    let list = SafeTensors::deserialize(&file).unwrap().tensors();
    let list: BTreeMap<_, _> = list.into_iter().collect();
    let tensor = |(name, t): (String, safetensors::tensor::TensorView<'_>)| Tensor {
        name,
        shape: t.shape().iter().map(|d| *d as u64).collect(),
        data: t.data().to_vec(),
    };
    list.into_iter().map(tensor).collect()
}

fn roles(tensors: &[Tensor]) -> Roles {
    let parameters: Vec<_> = tensors.iter().filter_map(|t| t.name.strip_prefix("model.")).collect();
    let role = |(tensor, t): (usize, &Tensor)| {
        let (prefix, kind) = PREFIXES.into_iter().find(|(p, _)| t.name.starts_with(p)).unwrap();
        let parameter = parameters.iter().position(|p| *p == &t.name[prefix.len()..]).unwrap();
        Role { tensor: tensor as u32, parameter: parameter as u32, kind, group: 0 }
    };
    let groups = vec![BTreeMap::from([("lr".to_owned(), 3e-4)])];
    Roles { tensors: tensors.iter().enumerate().map(role).collect(), groups }
}

fn save(store: &CheckpointStore, step: u64, tensors: &[Tensor], host_changes: bool) -> u64 {
    let sources: Vec<_> = tensors
        .iter()
        .map(|t| TensorSource::new(&t.name, DType::Float32, &t.shape, &t.data[..]))
        .collect();
    let options =
        SaveOptions { roles: Some(roles(tensors)), host_changes, ..SaveOptions::default() };
    store.save(step, &sources, &options).unwrap().report.bytes_out
}

#[test]
fn a_state_that_stops_changing_takes_nothing_from_the_next_save_on() {
    // Redrawn for each of four saves, then unchanged.
    let drawn = |seed: u64| -> Vec<u8> {
        let mut x = seed;
        let mut next = || {
            x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (x >> 40) as f32 / (1u64 << 24) as f32
        };
        let bell = |_| (0..6).map(|_| next()).sum::<f32>() / 3.0 - 1.0;
        (0..100_000).map(bell).flat_map(f32::to_le_bytes).collect()
    };
    let tensors = |seed: u64| -> Vec<Tensor> {
        let of = |i: u64| Tensor {
            name: format!("model.{i}"),
            shape: vec![100, 1000],
            data: drawn(100 * seed + i),
        };
        (0..8).map(of).collect()
    };
    let place = memory();
    let store = open(&place, StoreOptions { preset: Preset::Balanced, max_hops: 63, ..options() });
    let sizes: Vec<_> =
        (0..5).map(|step| save(&store, step, &tensors(step.min(3)), true)).collect();
    assert!(sizes[3] > 2_000_000, "{sizes:?}");
    assert!(sizes[4] < 100_000, "{sizes:?}");
}

#[test]
fn saves_by_what_is_remembered_are_as_small_and_as_right() {
    let states = [tensors(0), tensors(1)];
    // Parents as values in memory or as frames with remembered samples; in a line of deltas or with
    // the usual hops.
    for (host_changes, max_hops) in [(false, 63), (true, 63), (true, 2)] {
        let options = || StoreOptions { preset: Preset::Balanced, max_hops, ..options() };
        let (one, several) = (memory(), memory());
        let store = open(&one, options());
        let (mut sizes, mut fresh) = (vec![], vec![]);
        for step in 0..10 {
            let state = &states[step as usize % 2];
            sizes.push(save(&store, step, state, host_changes));
            fresh.push(save(&open(&several, options()), step, state, host_changes));
        }
        for (step, (size, fresh)) in sizes.iter().zip(&fresh).enumerate() {
            assert!(size.abs_diff(*fresh) <= fresh / 256, "step {step}: {size}, {fresh} bytes");
        }
        for step in 0..10 {
            let loaded = store.load(Some(step)).unwrap();
            for t in &states[step as usize % 2] {
                assert!(loaded.reader().read(&t.name).unwrap() == t.data, "{} of {step}", t.name);
            }
        }
    }
}

/// A state that is altogether different from the one before, and one of zeros only.
#[test]
fn what_changes_at_once_is_planned_anew() {
    let mut states = vec![tensors(0), tensors(1), tensors(0), tensors(1), tensors(1), tensors(1)];
    for t in &mut states[3] {
        t.data.chunks_exact_mut(4).enumerate().for_each(|(i, value)| {
            let noise = (i as u32).wrapping_mul(2_654_435_761);
            value.copy_from_slice(&noise.to_le_bytes());
        });
    }
    states[4].iter_mut().for_each(|t| t.data.fill(0));
    let options = || StoreOptions { preset: Preset::Balanced, max_hops: 63, ..options() };
    let (one, several) = (memory(), memory());
    let store = open(&one, options());
    for (step, state) in (0..).zip(&states) {
        let size = save(&store, step, state, true);
        let fresh = save(&open(&several, options()), step, state, true);
        assert!(size <= fresh + fresh / 100, "step {step}: {size}, {fresh} bytes");
        let loaded = store.load(Some(step)).unwrap();
        let same = |t: &Tensor| loaded.reader().read(&t.name).unwrap() == t.data;
        assert!(state.iter().all(same), "step {step}");
    }
}
