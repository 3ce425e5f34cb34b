//! How small real checkpoints become: those of `testdata`, with their true roles. The required
//! ratios are a little below the ones reached, so that a plan that gets worse is noticed here.

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use common::{Memory, Owned};
use s4weights::format::manifest::{Role, RoleKind, Roles};
use s4weights::{
    Contents, DType, Preset, ReadOptions, Reader, Source, Target, WriteOptions, Writer,
};
use safetensors::{Dtype, SafeTensors};

/// The tensors of a checkpoint, and their roles.
struct State {
    tensors: Vec<Owned>,
    roles: Roles,
}

const PREFIXES: [(&str, RoleKind); 3] = [
    ("model.", RoleKind::Weight),
    ("optimizer.exp_avg.", RoleKind::ExpAvg),
    ("optimizer.exp_avg_sq.", RoleKind::ExpAvgSq),
];

fn state(name: &str) -> State {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(name);
    let file = std::fs::read(path.with_extension("safetensors")).unwrap();
    let (mut tensors, mut roles, mut parameters) = (vec![], vec![], vec![]);
    // The file lists them in any order.
    let by_name = SafeTensors::deserialize(&file).unwrap().tensors();
    for (name, tensor) in by_name.into_iter().collect::<BTreeMap<_, _>>() {
        let dtype = match tensor.dtype() {
            Dtype::BF16 => DType::BFloat16,
            Dtype::F32 => DType::Float32,
            other => panic!("{name}: {other:?}"),
        };
        let (prefix, kind) = PREFIXES.into_iter().find(|(p, _)| name.starts_with(p)).unwrap();
        let parameter = name[prefix.len()..].to_owned();
        let known = parameters.iter().position(|p| *p == parameter);
        let number = known.unwrap_or_else(|| {
            parameters.push(parameter);
            parameters.len() - 1
        });
        let (tensor_number, parameter) = (tensors.len() as u32, number as u32);
        roles.push(Role { tensor: tensor_number, parameter, kind, group: 0 });
        let shape: Vec<u64> = tensor.shape().iter().map(|d| *d as u64).collect();
        tensors.push(Owned::new(name, dtype, &shape, tensor.data().to_vec()));
    }
    let groups = vec![BTreeMap::from([("lr".to_owned(), 3e-4)])];
    State { tensors, roles: Roles { tensors: roles, groups } }
}

impl State {
    /// With bf16 weights in addition to the optimizer's masters.
    fn in_mixed_precision(mut self) -> Self {
        let masters = self.roles.tensors.iter_mut().filter(|r| r.kind == RoleKind::Weight);
        let mut copies = vec![];
        for role in masters {
            role.kind = RoleKind::Master;
            let master = &mut self.tensors[role.tensor as usize];
            let round = |x: &[u8; 4]| {
                let x = u32::from_le_bytes(*x);
                (((x + 0x7fff + (x >> 16 & 1)) >> 16) as u16).to_le_bytes()
            };
            let data = master.data.as_chunks().0.iter().flat_map(round).collect();
            let name = master.name.clone();
            master.name = format!("optimizer.{name}");
            copies.push((Owned::new(name, DType::BFloat16, &master.shape, data), role.parameter));
        }
        for (copy, parameter) in copies {
            let (tensor, kind) = (self.tensors.len() as u32, RoleKind::Weight);
            self.roles.tensors.push(Role { tensor, parameter, kind, group: 0 });
            self.tensors.push(copy);
        }
        self
    }

    /// The file that a preset writes, opened, and its length in bytes.
    fn save(&self, preset: Preset, parent: Option<&Arc<Reader>>) -> (Reader, usize) {
        let memory = Memory::default();
        let parent = parent.cloned();
        let options =
            WriteOptions { preset, parent: parent.clone().map(|p| p as _), ..Default::default() };
        let target = Target::Stream(Box::new(memory.clone()));
        let mut writer = Writer::create(target, options).unwrap();
        writer.declare(self.roles.clone()).unwrap();
        writer.write(&self.tensors.iter().map(Owned::source).collect::<Vec<_>>()).unwrap();
        writer.finish(Contents::default()).unwrap();
        let file = std::mem::take(&mut *memory.0.lock().unwrap());
        let bytes = file.len();
        let reader = Reader::open(Source::Bytes(file.into()), ReadOptions::default()).unwrap();
        if let Some(parent) = parent.filter(|_| reader.parent_digest().is_some()) {
            reader.set_parent(parent).unwrap();
        }
        (reader, bytes)
    }

    /// The ratio by a preset: bytes of the values over bytes of the file, which is read back.
    fn ratio(&self, preset: Preset, parent: Option<&Arc<Reader>>) -> f64 {
        let (reader, bytes) = self.save(preset, parent);
        for tensor in &self.tensors {
            assert!(reader.read(&tensor.name).unwrap() == tensor.data, "{}", tensor.name);
        }
        let raw: usize = self.tensors.iter().map(|t| t.data.len()).sum();
        raw as f64 / bytes as f64
    }
}

/// Checks that the ratio by `balanced` is at least `least`, and no worse than by `fast` except for
/// a few bytes of the index.
fn check(what: &str, state: &State, parent: Option<&State>, least: f64) {
    let by = |preset| {
        let parent = parent.map(|p| Arc::new(p.save(preset, None).0));
        state.ratio(preset, parent.as_ref())
    };
    let (fast, balanced) = (by(Preset::Fast), by(Preset::Balanced));
    println!("{what}: {fast:.4} by fast, {balanced:.4} by balanced");
    assert!(balanced >= least, "{what}: {balanced:.4}, asked {least}");
    assert!(balanced >= 0.999 * fast, "{what}: {balanced:.4}, by fast {fast:.4}");
}

#[test]
fn checkpoints_by_themselves() {
    check("bf16", &state("gpt34m_bf16_s0"), None, 1.588);
    check("fp32", &state("gpt98m_fp32_s0"), None, 1.225);
    check("mixed", &state("gpt98m_fp32_s0").in_mixed_precision(), None, 1.426);
}

#[test]
fn checkpoints_a_step_later() {
    check("bf16", &state("gpt34m_bf16_s1"), Some(&state("gpt34m_bf16_s0")), 3.025);
    check("fp32", &state("gpt98m_fp32_s1"), Some(&state("gpt98m_fp32_s0")), 1.960);
    let mixed = |name| state(name).in_mixed_precision();
    check("mixed", &mixed("gpt98m_fp32_s1"), Some(&mixed("gpt98m_fp32_s0")), 2.270);
}

/// One buffer of weights and both moments, as sharding leaves it, and what ten steps might make of
/// it. It has a single plan, although the best for the weights is not the best for the moments.
#[test]
fn a_buffer_of_weights_and_moments() {
    // Repeated until it has enough chunks to be looked at part by part.
    const TIMES: usize = 4;
    let state = state("gpt98m_fp32_s0");
    let of = |prefix: &str| -> Vec<f32> {
        let tensors = state.tensors.iter().filter(|t| t.name.starts_with(prefix));
        let values = tensors.flat_map(|t| t.data.as_chunks::<4>().0.iter());
        values.map(|v| f32::from_le_bytes(*v)).collect::<Vec<_>>().repeat(TIMES)
    };
    let [weights, first, second] = PREFIXES.map(|(prefix, _)| of(prefix));
    let gradients = (0..first.len()).map(|i| 3.0 * first[(i * 7919 + 13) % first.len()]);
    let (mut w, mut m, mut v) = (weights.clone(), first.clone(), second.clone());
    for (i, gradient) in gradients.enumerate() {
        m[i] = 0.35 * m[i] + 0.65 * gradient;
        v[i] = 0.99 * v[i] + 0.01 * gradient * gradient;
        w[i] -= 1e-3 * m[i] / (v[i].sqrt() + 1e-8);
    }
    let joined = |parts: [&[f32]; 3]| {
        let values = parts.concat();
        let shape = [values.len() as u64];
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensors = vec![Owned::new("buffer", DType::Float32, &shape, data)];
        State { tensors, roles: Roles::default() }
    };
    let (before, after) = (joined([&weights, &first, &second]), joined([&w, &m, &v]));
    check("joined", &after, Some(&before), 1.35);
}

/// All but a few weights stay the same, as after a step of reinforcement learning in bf16.
#[test]
fn sparse_changes() {
    let before = state("gpt34m_bf16_s0");
    let mut after = state("gpt34m_bf16_s0");
    let models = after.tensors.iter_mut().filter(|t| t.name.starts_with("model."));
    for (number, tensor) in models.enumerate() {
        for (i, value) in tensor.data.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let noise = ((i + (number << 32) + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44;
            if noise % 1000 < 3 {
                value[0] ^= 1;
            }
        }
    }
    check("sparse", &after, Some(&before), 73.0);
}
