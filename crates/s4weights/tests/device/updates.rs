//! Weights with predictor `step` or contexts `update`, coded with their moments, wherever weights and moments are.

use std::collections::BTreeMap;

use s4weights::format::manifest::{Role, RoleKind, Roles};

use super::copies::{mixed, plans, read_on};
use super::*;

/// Weights and moments after some steps, in fp32 and in bf16: of two weights, moments tell the steps exactly; of the third
/// size and sign. The last one is so small that its sample is all of it.
fn state(steps: u32) -> Vec<Tensor> {
    let mut out = Vec::from(weight("a", DType::Float32, (0, 600), steps, true));
    out.extend(weight("b", DType::BFloat16, (1 << 24, 600), steps, true));
    out.extend(weight("c", DType::BFloat16, (1 << 25, 600), steps, false));
    out.extend(weight("d", DType::Float32, (1 << 26, 20), steps, true));
    out
}

/// A weight of 500 columns and its moments, the first of which is in bf16.
fn weight(
    name: &str,
    dtype: DType,
    (seed, rows): (u32, u32),
    steps: u32,
    exactly: bool,
) -> [Tensor; 3] {
    let noise = |i: u32, k: u32| {
        let x = u64::from(i + seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(k) << 40;
        ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let first = |i: u32, step: u32| 0.01 * noise(i, 10 + step) * (6.0 * noise(i, 1)).exp();
    let second = |i: u32| 1e-5 * (3.0 * noise(i, 2)).exp();
    let weight = |i: u32| {
        let more = |step| if exactly { 1.0 } else { (3.0 * noise(i, 100 + step)).exp() };
        let update = |step| more(step) * 3e-4 * first(i, step) / second(i).sqrt();
        0.1 * noise(i, 3) - (1..=steps).map(update).sum::<f32>()
    };
    let n = 500 * rows;
    let tensor = |name: &str, dtype, of: &dyn Fn(u32) -> f32| {
        let mut data: Vec<u8> = (0..n).flat_map(|i| of(i).to_le_bytes()).collect();
        if dtype == DType::BFloat16 {
            let wide = std::mem::replace(&mut data, vec![0; 2 * n as usize]);
            s4_planes::Kernels::default().to_bf16(&wide, &mut data);
        }
        Tensor { name: name.into(), dtype, shape: vec![rows.into(), 500], data }
    };
    [
        tensor(name, dtype, &weight),
        tensor(&format!("{name}.m"), DType::BFloat16, &|i| first(i, steps)),
        tensor(&format!("{name}.v"), dtype, &second),
    ]
}

fn roles() -> Roles {
    let kinds = [RoleKind::Weight, RoleKind::ExpAvg, RoleKind::ExpAvgSq];
    let row = |i: u32| Role { tensor: i, parameter: i / 3, kind: kinds[i as usize % 3], group: 0 };
    Roles { tensors: (0..12).map(row).collect(), groups: vec![BTreeMap::new()] }
}

fn write(path: &Path, sources: &[TensorSource<'_>], options: WriteOptions) {
    let mut writer = Writer::create(path.into(), options).unwrap();
    writer.declare(roles()).unwrap();
    writer.write(sources).unwrap();
    writer.finish(Default::default()).unwrap();
}

/// How many weights are predicted by a step, and how many have contexts from updates.
fn told(reader: &Reader) -> (usize, usize) {
    let count = |start: &str| plans(reader).iter().filter(|p| p.starts_with(start)).count();
    (count("step sub"), count("parent descent"))
}

#[test]
fn weights_are_told_from_their_moments_wherever_they_are() {
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (tensors, later) = (state(0), state(1));
    write(&path("base"), &mixed(&tensors, &[], 0), WriteOptions::default());
    let base = Arc::new(Reader::open(path("base").as_path().into(), Default::default()).unwrap());
    let against = || WriteOptions { parent: Some(Arc::clone(&base) as _), ..Default::default() };
    write(&path("host"), &mixed(&later, &[], 0), against());
    let reader = Reader::open(path("host").as_path().into(), Default::default()).unwrap();
    reader.set_parent(Arc::clone(&base)).unwrap();
    assert_eq!(told(&reader), (3, 1), "{:?}", plans(&reader));
    let buffers: Vec<_> = later.iter().map(|t| gpu.upload(&t.data)).collect();
    const EVERY: usize = 0b001_001_001_001;
    for places in [0b111 * EVERY, 0b110 * EVERY, EVERY, 0b101_101_010_101] {
        write(&path("there"), &mixed(&later, &buffers, places), gpu.with(against()));
        let same = std::fs::read(path("host")).unwrap() == std::fs::read(path("there")).unwrap();
        assert!(same, "{places:012b}");
    }
    for (t, back) in later.iter().zip(read_on(&gpu, &reader, &later)) {
        assert!(back == t.data, "{}: to the device", t.name);
    }
    // In place.
    let there: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
    let requests: Vec<_> = there.iter().map(memory).enumerate().collect();
    assert_eq!(reader.apply_into_device(&gpu.engine, &requests).unwrap(), [0; 0]);
    for (t, buffer) in later.iter().zip(&there) {
        assert!(gpu.download(buffer) == t.data, "{}: applied", t.name);
    }
    let chunks = gpu.engine.chunks();
    assert!(chunks.device > 0 && chunks.host + chunks.refused == 0, "{chunks:?}");
    // Without their moments, weights are left to the host.
    for wanted in [&[0, 3, 6, 9][..], &[0, 1, 6], &[3, 5, 9]] {
        let there: Vec<_> = wanted.iter().map(|&i| gpu.upload(&tensors[i].data)).collect();
        let requests: Vec<_> = wanted.iter().copied().zip(there.iter().map(memory)).collect();
        let left = reader.apply_into_device(&gpu.engine, &requests).unwrap();
        let weights = wanted.iter().enumerate().filter(|(_, i)| **i % 3 == 0).map(|(k, _)| k);
        assert_eq!(left, weights.collect::<Vec<_>>());
        reader.read_into_device(&gpu.engine, &requests).unwrap();
        for (&i, buffer) in wanted.iter().zip(&there) {
            assert!(gpu.download(buffer) == later[i].data, "{wanted:?}: {}", later[i].name);
        }
    }
}

/// The samples of many tensors and their moments arrive in several batches.
#[test]
fn many_tensors_on_a_device_make_the_file_of_the_host() {
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let states = [0, 1].map(|step| {
        let other = |i: u32| Tensor {
            name: format!("other.{i}"),
            dtype: DType::BFloat16,
            shape: vec![5000],
            data: (0..5000u32).flat_map(|k| [(k * (i + 7) + step) as u8, 0x3c]).collect(),
        };
        state(step).into_iter().chain((0..200).map(other)).collect::<Vec<_>>()
    });
    let [before, later] = &states;
    fn on_host(tensors: &[Tensor]) -> Vec<TensorSource<'_>> {
        tensors.iter().map(Tensor::source).collect()
    }
    write(&path("base"), &on_host(before), WriteOptions::default());
    let base = Arc::new(Reader::open(path("base").as_path().into(), Default::default()).unwrap());
    let against = || WriteOptions { parent: Some(Arc::clone(&base) as _), ..Default::default() };
    write(&path("host"), &on_host(later), against());
    let buffers: Vec<_> = later.iter().map(|t| gpu.upload(&t.data)).collect();
    let mut there = on_host(later);
    for (source, buffer) in there.iter_mut().zip(&buffers) {
        source.values = memory(buffer).into();
    }
    write(&path("there"), &there, gpu.with(against()));
    assert!(std::fs::read(path("host")).unwrap() == std::fs::read(path("there")).unwrap());
    let reader = Reader::open(path("there").as_path().into(), Default::default()).unwrap();
    reader.set_parent(base).unwrap();
    assert_eq!(told(&reader), (3, 1), "{:?}", plans(&reader));
}

/// The weights of every checkpoint of a chain are coded with that checkpoint's moments.
#[test]
fn chains_of_weights_that_are_told_come_back_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut parent: Option<Arc<Reader>> = None;
    for step in 0..4 {
        let tensors = state(step);
        let (host, there) = (dir.path().join(format!("{step}")), dir.path().join("there"));
        let options =
            || WriteOptions { parent: parent.clone().map(|p| p as _), ..WriteOptions::default() };
        write(&host, &mixed(&tensors, &[], 0), options());
        let buffers: Vec<_> = tensors.iter().map(|t| gpu.upload(&t.data)).collect();
        write(&there, &mixed(&tensors, &buffers, usize::MAX), gpu.with(options()));
        assert!(std::fs::read(&host).unwrap() == std::fs::read(&there).unwrap(), "{step}");
        let reader = Reader::open(host.as_path().into(), Default::default()).unwrap();
        if let Some(parent) = parent {
            reader.set_parent(parent).unwrap();
            assert_eq!(told(&reader), (3, 1), "{:?}", plans(&reader));
        }
        for (t, back) in tensors.iter().zip(read_on(&gpu, &reader, &tensors)) {
            assert!(back == t.data, "{}: step {step}", t.name);
            assert!(reader.read(&t.name).unwrap() == t.data, "{}: step {step}, host", t.name);
        }
        parent = Some(Arc::new(reader));
    }
    let chunks = gpu.engine.chunks();
    assert!(chunks.device > 0 && chunks.host + chunks.refused == 0, "{chunks:?}");
}
