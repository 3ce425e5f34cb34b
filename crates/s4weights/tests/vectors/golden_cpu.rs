//! Files and a store that the CPU wrote: `testdata/golden/chain`, `told`, `stepped`, `momentum`, `packed`, `same` and `store`.
//!
//! `S4_WRITE_VECTORS=<folder>` keeps what the tests write, to make these files again for a new
//! version of the format.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use s4weights::format::manifest::{Role, RoleKind, Roles};
use s4weights::format::{Plan, PredictorId};
use s4weights::store::{CheckpointStore, Place, SaveOptions, StoreOptions, SweepOptions};
use s4weights::{Contents, DType, Preset, Reader, Source, TensorSource, WriteOptions, Writer};

use crate::{Owned, repository};

/// Where to keep the vectors, if they are kept.
pub(crate) fn kept() -> Option<PathBuf> {
    std::env::var_os("S4_WRITE_VECTORS").map(PathBuf::from)
}

/// The first `bytes` bytes of a tensor of one of the training runs.
fn slice(run: &str, tensor: &str, bytes: usize) -> Vec<u8> {
    let path = repository("testdata").join(run).with_extension("safetensors");
    let file = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    file.tensor(tensor).unwrap().data()[..bytes].to_vec()
}

/// A checkpoint of a small model at step 0 or 1: large and small tensors, weights and a moment.
fn checkpoint(step: u64) -> Vec<Owned> {
    let (bf16, fp32) = (format!("gpt34m_bf16_s{step}"), format!("gpt98m_fp32_s{step}"));
    let ids = (0..6000u64).flat_map(|i| (i / 3 + step).to_le_bytes()).collect();
    let flags = (0..5000u32).map(|i| u8::from(i % 7 == 0)).collect();
    vec![
        Owned::new(
            "model.wte",
            DType::BFloat16,
            &[90, 100],
            slice(&bf16, "model.wte.weight", 18_000),
        ),
        Owned::new(
            "model.proj",
            DType::Float32,
            &[5000],
            slice(&fp32, "model.h.5.proj.weight", 20_000),
        ),
        Owned::new("model.bias", DType::Float32, &[16], slice(&fp32, "model.h.5.proj.weight", 64)),
        Owned::new("model.ids", DType::Int64, &[6000], ids),
        Owned::new("model.mask", DType::Bool, &[50, 100], flags),
        Owned::new(
            "optimizer.exp_avg_sq",
            DType::Float32,
            &[5000],
            slice(&fp32, "optimizer.exp_avg_sq.h.5.proj.weight", 20_000),
        ),
        Owned::new("optimizer.step", DType::Float32, &[], (step as f32).to_le_bytes().to_vec()),
        Owned::new("none", DType::Float16, &[0, 3], vec![]),
    ]
}

fn contents(step: u64) -> Contents {
    let tree = format!(
        concat!(
            r#"{{"root":{{"dict":[["model",{{"dict":[["wte",{{"tensor":0,"parameter":true,"grad":true}}],"#,
            r#"["row",{{"tensor":0,"shape":[100],"offset":200}}],["tied",{{"same":0}}]]}}],"#,
            r#"["step",{}],["lr",1.0],["betas",{{"tuple":[0.9,0.999]}}],["best",{{"float":"7ff0000000000000"}}]]}}}}"#
        ),
        step
    );
    Contents {
        tree: Some(serde_json::value::RawValue::from_string(tree).unwrap()),
        blobs: BTreeMap::from([("notes".to_owned(), b"any bytes".to_vec())]),
        metadata: BTreeMap::from([("step".to_owned(), step.to_string())]),
    }
}

/// Rows of the matrices of [`state`].
const ROWS: usize = 32;

/// The state of a mixed-precision run at step 0 or 1, and its roles: one matrix with its master and
/// second moment, an embedding's first moment, and a matrix of a bf16-only model.
fn state(step: u64) -> (Vec<Owned>, Roles) {
    let fp32 = format!("gpt98m_fp32_s{step}");
    let cols = 192;
    let of = |name: &str, tensor: &str, rows: usize| {
        // The first columns, of rows of 768.
        let all = slice(&fp32, tensor, 4 * 768 * rows);
        let data = all.chunks(4 * 768).flat_map(|row| &row[..4 * cols]).copied().collect();
        Owned::new(name, DType::Float32, &[rows as u64, cols as u64], data)
    };
    let master = of("optimizer.master", "model.h.5.proj.weight", ROWS);
    let round = |x: &[u8; 4]| {
        let x = u32::from_le_bytes(*x);
        (((x + 0x7fff + (x >> 16 & 1)) >> 16) as u16).to_le_bytes()
    };
    let copy = master.data.as_chunks().0.iter().flat_map(round).collect();
    let model = Owned::new("model.proj", DType::BFloat16, &[ROWS as u64, cols as u64], copy);
    let second = of("optimizer.exp_avg_sq", "optimizer.exp_avg_sq.h.5.proj.weight", ROWS);
    let first = of("optimizer.exp_avg", "optimizer.exp_avg.wte.weight", ROWS + 16);
    let bf16 = format!("gpt34m_bf16_s{step}");
    let fc = slice(&bf16, "model.h.4.fc.weight", 2 * 48 * 512);
    let alone = Owned::new("model.fc", DType::BFloat16, &[48, 512], fc);
    let kinds = [
        (0, 0, RoleKind::Weight),
        (1, 0, RoleKind::Master),
        (2, 0, RoleKind::ExpAvgSq),
        (3, 1, RoleKind::ExpAvg),
        (4, 2, RoleKind::Weight),
    ];
    let role = |(tensor, parameter, kind)| Role { tensor, parameter, kind, group: 0 };
    let groups = vec![BTreeMap::from([("lr".to_owned(), 0.000_329)])];
    let roles = Roles { tensors: kinds.map(role).into(), groups };
    (vec![model, master, second, first, alone], roles)
}

/// Writes `base.s4w` and `delta.s4w` into a folder.
fn write_chain(
    folder: &Path,
    preset: Preset,
    step: impl Fn(u64) -> (Vec<Owned>, Option<Roles>, Contents),
) {
    std::fs::create_dir_all(folder).unwrap();
    let base = folder.join("base.s4w");
    let write = |path: &Path, number, options| {
        let (tensors, roles, contents) = step(number);
        let sources: Vec<TensorSource<'_>> = tensors.iter().map(Owned::source).collect();
        let mut writer = Writer::create(path.into(), options).unwrap();
        if let Some(roles) = roles {
            writer.declare(roles).unwrap();
        }
        writer.write(&sources).unwrap();
        writer.finish(contents).unwrap();
    };
    let options = || WriteOptions { preset, ..WriteOptions::default() };
    write(&base, 0, options());
    let parent = Reader::open(Source::from(base.as_path()), Default::default()).unwrap();
    write(
        &folder.join("delta.s4w"),
        1,
        WriteOptions { parent: Some(Arc::new(parent)), ..options() },
    );
}

/// The length of everything before the manifest.
fn body(file: &[u8]) -> usize {
    s4weights::format::file::Footer::parse(file, file.len() as u64).unwrap().offset as usize
}

/// Compares the written files with the golden ones, except their manifests, which name the program's version.
fn compare(folder: &Path, golden: &str) {
    for name in ["base.s4w", "delta.s4w"] {
        let written = std::fs::read(folder.join(name)).unwrap();
        let golden = std::fs::read(repository(golden).join(name));
        let Ok(golden) = golden else {
            assert!(kept().is_some(), "testdata/golden: {name} is missing");
            continue;
        };
        assert!(written[..body(&written)] == golden[..body(&golden)], "{name} differs");
    }
}

#[test]
fn the_golden_chain_is_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let folder = kept().unwrap_or_else(|| dir.path().to_owned()).join("golden/chain");
    // Planes and XOR only, as every preset wrote when these files were made.
    write_chain(&folder, Preset::Fast, |step| (checkpoint(step), None, contents(step)));
    compare(&folder, "testdata/golden/chain");
}

#[test]
fn the_golden_predictions_are_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let folder = kept().unwrap_or_else(|| dir.path().to_owned()).join("golden/packed/predicted");
    write_chain(&folder, Preset::Small, |step| {
        let (tensors, roles) = state(step);
        (tensors, Some(roles), Contents::default())
    });
    let plans = |name: &str, parent: Option<&str>| -> Vec<String> {
        let open = |name: &str| {
            Reader::open(Source::from(folder.join(name).as_path()), Default::default()).unwrap()
        };
        let reader = open(name);
        parent.iter().for_each(|p| reader.set_parent(Arc::new(open(p))).unwrap());
        reader.inspect(false).unwrap().tensors.into_iter().map(|t| t.plan).collect()
    };
    // Every kind of prediction.
    let base = plans("base.s4w", None);
    assert_eq!(base[0], "cast xor fields");
    assert!(base[2].starts_with("rank1 magnitude"), "{base:?}");
    let delta = plans("delta.s4w", Some("base.s4w"));
    assert_eq!(delta[0], "cast xor fields");
    assert!(delta[1].starts_with("parent sub"), "{delta:?}");
    assert!(delta[4].starts_with("parent sub"), "{delta:?}");
    let manifest = |name: &str| {
        let reader = Reader::open(Source::from(folder.join(name).as_path()), Default::default());
        reader.unwrap().manifest().plans.clone()
    };
    assert!(manifest("delta.s4w").iter().any(|p| !p.contexts.is_none()));
    compare(&folder, "testdata/golden/packed/predicted");
}

/// Compares a golden folder with the files written from a state at step 0 and, as a delta, at step
/// 1. One plan of the delta must satisfy `expected`.
fn golden_delta(
    name: &str,
    state: impl Fn(u64) -> (Vec<Owned>, Roles),
    expected: impl Fn(&Plan) -> bool,
) {
    let dir = tempfile::tempdir().unwrap();
    let folder = kept().unwrap_or_else(|| dir.path().to_owned()).join(name);
    write_chain(&folder, Preset::Small, |step| {
        let (tensors, roles) = state(step);
        (tensors, Some(roles), Contents::default())
    });
    let path = folder.join("delta.s4w");
    let reader = Reader::open(Source::from(path.as_path()), Default::default()).unwrap();
    let plans = &reader.manifest().plans;
    assert!(plans.iter().any(expected), "{plans:?}");
    compare(&folder, &format!("testdata/{name}"));
}

/// A weight and its moments at step 0 or 1, in bf16. At step 0 most weights are one or more updates further back, so
/// that the moments tell how large the change is, but not the change.
fn updated(step: u64) -> (Vec<Owned>, Roles) {
    let (mut tensors, roles) =
        weights("gpt34m_bf16", "h.4.fc.weight", (DType::BFloat16, [40, 512]), step);
    if step == 0 {
        let after = slice("gpt34m_bf16_s1", "model.h.4.fc.weight", 2 * 40 * 512);
        let values = tensors[0].data.as_chunks_mut().0.iter_mut().zip(after.as_chunks().0);
        for (i, (x, after)) in values.enumerate() {
            let [now, after] = [u16::from_le_bytes(*x), u16::from_le_bytes(*after)];
            let more = (i * i / 7 % 4) as u16;
            *x = now.wrapping_sub(more.wrapping_mul(after.wrapping_sub(now))).to_le_bytes();
        }
    }
    (tensors, roles)
}

/// A weight and its moments at step 0 or 1, in fp32.
fn stepped(step: u64) -> (Vec<Owned>, Roles) {
    weights("gpt98m_fp32", "h.5.proj.weight", (DType::Float32, [24, 768]), step)
}

/// The first rows of a weight and its moments at a step of a run.
fn weights(
    run: &str,
    tensor: &str,
    (dtype, shape): (DType, [u64; 2]),
    step: u64,
) -> (Vec<Owned>, Roles) {
    let run = format!("{run}_s{step}");
    let bytes = dtype.value_width() * (shape[0] * shape[1]) as usize;
    let kinds = [RoleKind::Weight, RoleKind::ExpAvg, RoleKind::ExpAvgSq];
    let names = ["model", "optimizer.exp_avg", "optimizer.exp_avg_sq"];
    let tensors = names.map(|name| {
        let data = slice(&run, &format!("{name}.{tensor}"), bytes);
        Owned::new(format!("{name}.fc"), dtype, &shape, data)
    });
    let role = |(tensor, kind)| Role { tensor, parameter: 0, kind, group: 0 };
    let groups = vec![BTreeMap::from([("lr".to_owned(), 0.000_329)])];
    (tensors.into(), Roles { tensors: (0..).zip(kinds).map(role).collect(), groups })
}

/// The moments that a plan uses.
fn moments(plan: &Plan) -> Vec<u32> {
    plan.moments().iter().map(|input| input.tensor).collect()
}

#[test]
fn the_golden_update_is_what_is_written() {
    golden_delta("golden/told", updated, |p| !p.contexts.is_none() && moments(p) == [1, 2]);
}

#[test]
fn the_golden_step_is_what_is_written() {
    let plan = |p: &Plan| p.predictor == PredictorId::STEP && moments(p) == [1, 2];
    golden_delta("golden/stepped", stepped, plan);
}

/// A weight before and after a step of SGD, and its momentum.
fn momentum(step: u64) -> (Vec<Owned>, Roles) {
    let shape = [24, 768];
    let bytes = 4 * 24 * 768;
    let before = slice("gpt98m_fp32_s0", "model.h.5.proj.weight", bytes);
    let wide = slice(&format!("gpt98m_fp32_s{step}"), "optimizer.exp_avg.h.5.proj.weight", bytes);
    let mut first = vec![0; bytes / 2];
    s4_planes::Kernels::default().to_bf16(&wide, &mut first);
    let moments = first.as_chunks().0.iter().map(|x| {
        let bits = u32::from(u16::from_le_bytes(*x)) << 16;
        f32::from_bits(bits) * 3.0 * step as f32
    });
    let weights = before.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x));
    let after = weights.zip(moments).flat_map(|(w, change)| (w - change).to_le_bytes()).collect();
    let tensors = vec![
        Owned::new("model.fc", DType::Float32, &shape, after),
        Owned::new("optimizer.momentum_buffer.fc", DType::BFloat16, &shape, first),
    ];
    let kinds = [RoleKind::Weight, RoleKind::ExpAvg];
    let role = |(tensor, kind)| Role { tensor, parameter: 0, kind, group: 0 };
    let groups = vec![BTreeMap::from([("lr".to_owned(), 3.0)])];
    (tensors, Roles { tensors: (0..).zip(kinds).map(role).collect(), groups })
}

/// A second moment that keeps part of each value from step to step, beyond what rows and columns predict.
fn blended(step: u64) -> (Vec<Owned>, Roles) {
    let cols = 768;
    let all = slice("gpt98m_fp32_s0", "optimizer.exp_avg_sq.h.5.proj.weight", 4 * cols * ROWS);
    let mut values: Vec<f32> = all.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
    for _ in 0..step {
        for row in values.chunks_mut(cols) {
            let before = row.to_vec();
            row.iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = 0.75 * *x + 0.25 * before[(i + 7) % cols]);
        }
    }
    let data = values.into_iter().flat_map(f32::to_le_bytes).collect();
    let name = "optimizer.exp_avg_sq";
    let tensor = Owned::new(name, DType::Float32, &[ROWS as u64, cols as u64], data);
    let role = Role { tensor: 0, parameter: 0, kind: RoleKind::ExpAvgSq, group: 0 };
    (vec![tensor], Roles { tensors: vec![role], groups: vec![BTreeMap::new()] })
}

#[test]
fn the_golden_step_of_sgd_is_what_is_written() {
    let plan = |p: &Plan| p.predictor == PredictorId::STEP && moments(p) == [1];
    golden_delta("golden/momentum", momentum, plan);
}

#[test]
fn the_golden_blend_is_what_is_written() {
    let plan = |p: &Plan| p.predictor == PredictorId::BLEND;
    golden_delta("golden/packed/blended", blended, plan);
}

/// Weights at step 0 or 1 with an average that is still equal to them, one that differs in a few values,
/// and an equal tensor of another shape.
fn copies(step: u64) -> (Vec<Owned>, Roles) {
    let weights = slice(&format!("gpt34m_bf16_s{step}"), "model.h.4.fc.weight", 2 * 10 * 512);
    let mut near = weights.clone();
    for at in [1000, 3001, 9999] {
        near[at] ^= 3;
    }
    let wide = slice(&format!("gpt98m_fp32_s{step}"), "model.h.5.proj.weight", 4 * 4500);
    let (narrow, float) = (DType::BFloat16, DType::Float32);
    let tensors = vec![
        Owned::new("model.fc", narrow, &[10, 512], weights.clone()),
        Owned::new("average.fc", narrow, &[10, 512], weights.clone()),
        Owned::new("average.near", narrow, &[10, 512], near),
        Owned::new("other.fc", narrow, &[5120], weights),
        Owned::new("model.proj", float, &[45, 100], wide.clone()),
        Owned::new("average.proj", float, &[45, 100], wide),
    ];
    (tensors, Roles { tensors: vec![], groups: vec![] })
}

#[test]
fn the_golden_copies_are_what_is_written() {
    let plan = |p: &Plan| p.predictor == PredictorId::SAME;
    golden_delta("golden/same", copies, plan);
}

/// Makes the golden store: four checkpoints, each a delta of the one before. The third is rebased,
/// so that the fourth is a delta of a checkpoint that is gone.
#[test]
fn the_golden_store_can_be_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let folder = kept().unwrap_or_else(|| dir.path().to_owned()).join("golden/store");
    let options = StoreOptions { max_hops: 15, ..StoreOptions::default() };
    let store = CheckpointStore::create_at(&Place::folder(&folder), options).unwrap();
    let mut saved = vec![];
    for (i, step) in [100, 200, 300, 400].into_iter().enumerate() {
        let mut tensors = checkpoint(i as u64 % 2);
        tensors[1].data[4 * i] ^= 1;
        let sources = tensors.iter().map(Owned::source).zip([0, 0, 0, 0, 0, 1, 1, 0]);
        let sources: Vec<_> = sources.map(|(t, group)| t.in_group(group)).collect();
        let options = SaveOptions {
            contents: contents(step),
            metrics: BTreeMap::from([("loss".to_owned(), 4.0 / (i + 1) as f64)]),
            tags: BTreeMap::from([("run".to_owned(), "example".to_owned())]),
            ..SaveOptions::default()
        };
        saved.push(store.save(step, &sources, &options).unwrap().checkpoint);
    }
    assert!(saved[1..].iter().zip(&saved).all(|(c, p)| c.base == Some(p.id())));
    store.pin(saved[3].id()).unwrap();
    store.pin(saved[0].id()).unwrap();
    store.unpin(saved[0].id()).unwrap();
    let replaced = store.rebase(saved[2].id(), None).unwrap();
    store.retire(&[saved[1].id()], "not needed").unwrap();
    // What a dead writer left behind: the sweep gives it up.
    let orphan = folder.join("ck/01900000-0000-7000-8000-000000000000");
    std::fs::create_dir_all(&orphan).unwrap();
    std::fs::write(orphan.join("d-0"), [0; 16]).unwrap();
    let sweep = SweepOptions { grace: Duration::ZERO, exclusive: true, ..SweepOptions::default() };
    store.sweep(&sweep).unwrap();
    assert!(!folder.join("ck").join(saved[2].id().to_string()).join("manifest").exists());
    let state = store.state().unwrap();
    assert_eq!(state.get(saved[3].id()).unwrap().base, Some(replaced.id()));
    assert_eq!(state.list().len(), 3);
    store.load(Some(400)).unwrap().reader().verify().unwrap();
}
