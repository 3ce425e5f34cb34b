//! Weights that are predicted by an optimizer's step: the one computation in floating-point numbers, which must give the
//! same bits on a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use s4_engine::cuda::testing::Copies;
use s4weights::cuda::CudaEngine;
use s4weights::format::PredictorId;
use s4weights::format::manifest::{Role, RoleKind, Roles};
use s4weights::{
    Contents, DType, ReadOptions, Reader, Simd, Source, Target, TensorSource, WriteOptions, Writer,
};

use super::case::{Memory, differs};
use crate::error::{Failure, Result};

/// Several chunks of fp32, and not a round number.
const VALUES: u32 = (1 << 17) + 1234;

/// Dtypes of a weight and its moments: AdamW has two, SGD has one.
const DTYPES: [&[DType]; 7] = [
    &[DType::Float32, DType::Float32, DType::Float32],
    &[DType::Float32, DType::BFloat16, DType::Float16],
    &[DType::BFloat16, DType::BFloat16, DType::BFloat16],
    &[DType::BFloat16, DType::Float32, DType::Float16],
    &[DType::Float16, DType::Float16, DType::Float32],
    &[DType::Float32, DType::BFloat16],
    &[DType::BFloat16, DType::Float32],
];

/// Numbers that an optimizer hardly ever sees: zeros, subnormal and large ones, infinities, NaNs.
const SPECIAL: [u32; 10] = [
    0,
    0x8000_0000,
    1,
    0x807f_ffff,
    0x0080_0000,
    0x00ff_ffff,
    0x7f7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc1_2345,
];

/// A tensor of a checkpoint.
struct Tensor {
    name: String,
    dtype: DType,
    data: Vec<u8>,
}

/// Compares the files of a step that the processor and a device write, and reads the device's values back. Returns the
/// number of tensors.
pub(super) fn compare(engine: &Arc<CudaEngine>, ordinal: u32, simd: Simd) -> Result<usize> {
    let failed =
        |e: &dyn std::fmt::Display| Failure::Test(format!("device {ordinal}, a step: {e}"));
    let [before, after] = [false, true].map(state);
    let options = || WriteOptions { simd: Some(simd), ..WriteOptions::default() };
    let shape = [u64::from(VALUES)];
    let host = |tensors: &[Tensor], options| {
        let source = |t| on_host(t, &shape);
        save(&tensors.iter().map(source).collect::<Vec<_>>(), options)
    };
    let open = |file: Vec<u8>, parent: Option<&Arc<Reader>>| {
        let reader = Reader::open(Source::Bytes(file.into()), ReadOptions::default())?;
        parent.map_or(Ok(()), |parent| reader.set_parent(Arc::clone(parent)))?;
        Ok::<_, s4weights::Error>(Arc::new(reader))
    };
    let base =
        host(&before, options()).and_then(|file| open(file, None)).map_err(|e| failed(&e))?;
    let against = || WriteOptions { parent: Some(Arc::clone(&base) as _), ..options() };
    let file = host(&after, against()).map_err(|e| failed(&e))?;

    let copies = Copies::new(engine, ordinal).map_err(|e| failed(&e))?;
    let uploads =
        after.iter().map(|t| copies.upload(&t.data)).collect::<std::result::Result<Vec<_>, _>>();
    let uploads = uploads.map_err(|e| failed(&e))?;
    let there: Vec<_> = after
        .iter()
        .zip(&uploads)
        .map(|(t, buffer)| TensorSource {
            values: copies.memory(buffer).into(),
            ..on_host(t, &shape)
        })
        .collect();
    let by_device = WriteOptions { engine: Some(Arc::clone(engine)), ..against() };
    if save(&there, by_device).map_err(|e| failed(&e))? != file {
        return Err(differs("a step", &format!("file written by device {ordinal}")));
    }
    let reader = open(file, Some(&base)).map_err(|e| failed(&e))?;
    let steps = reader.manifest().plans.iter().filter(|p| p.predictor == PredictorId::STEP);
    if steps.count() != DTYPES.len() {
        return Err(Failure::Test(
            "a step: the planner did not predict the expected weights".into(),
        ));
    }
    // Over what is there, which is not what was there before.
    let numbers = after.iter().map(|t| reader.find(&t.name));
    let numbers = numbers.collect::<s4weights::Result<Vec<_>>>().map_err(|e| failed(&e))?;
    for (upload, t) in uploads.iter().zip(&after) {
        copies.overwrite(upload, &vec![0xee; t.data.len()]).map_err(|e| failed(&e))?;
    }
    let requests: Vec<_> =
        numbers.iter().zip(&uploads).map(|(n, buffer)| (*n, copies.memory(buffer))).collect();
    reader.read_into_device(engine, &requests).map_err(|e| failed(&e))?;
    for (t, buffer) in after.iter().zip(&uploads) {
        if copies.download(buffer).map_err(|e| failed(&e))? != t.data {
            return Err(differs(&t.name, "values decoded by the device"));
        }
        if reader.read(&t.name).map_err(|e| failed(&e))? != t.data {
            return Err(Failure::Test(format!("{}: the CPU decodes different values", t.name)));
        }
    }
    Ok(after.len())
}

fn on_host<'a>(t: &'a Tensor, shape: &'a [u64]) -> TensorSource<'a> {
    TensorSource::new(&t.name, t.dtype, shape, &t.data[..])
}

fn save(tensors: &[TensorSource<'_>], options: WriteOptions) -> s4weights::Result<Vec<u8>> {
    let memory = Memory::default();
    let mut writer = Writer::create(Target::Stream(Box::new(memory.clone())), options)?;
    let kinds = [RoleKind::Weight, RoleKind::ExpAvg, RoleKind::ExpAvgSq];
    let kinds = (0..).zip(DTYPES).flat_map(|(parameter, dtypes)| {
        kinds[..dtypes.len()].iter().map(move |kind| (parameter, *kind))
    });
    let roles = (0..).zip(kinds);
    let role = |(tensor, (parameter, kind))| Role { tensor, parameter, kind, group: 0 };
    let groups = vec![BTreeMap::from([("eps".to_owned(), 1e-8)])];
    writer.declare(Roles { tensors: roles.map(role).collect(), groups })?;
    writer.write(tensors)?;
    writer.finish(Contents::default())?;
    Ok(std::mem::take(&mut *memory.0.lock().unwrap_or_else(|e| e.into_inner())))
}

/// Weights and their moments, after a step or before it.
fn state(after: bool) -> Vec<Tensor> {
    let kernels = s4_planes::Kernels::default();
    let mut out = vec![];
    for (number, dtypes) in (0..).zip(DTYPES) {
        let noise = |i: u32, k: u64| {
            let seed = u64::from(i) | (8 * number + k) << 40;
            let x = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 24) as f32
                - 0.5
        };
        let second = |i: u32| 1e-5 * (3.0 * noise(i, 2)).exp();
        let first = |i: u32| 0.01 * noise(i, 1) * (8.0 * noise(i, 3)).exp();
        let weight = |i: u32| {
            let before = 0.1 * noise(i, 0);
            let update = match dtypes.len() {
                3 => 3e-4 * first(i) / second(i).sqrt(),
                _ => 0.03 * first(i),
            };
            if after { before - update } else { before }
        };
        // Here and there something else.
        let special = |i: u32, k: u32| match i % 61 < 3 && i % 3 == k {
            true => Some(f32::from_bits(SPECIAL[(i / 61 + k) as usize % SPECIAL.len()])),
            false => None,
        };
        let of: [(&str, &dyn Fn(u32) -> f32); 3] =
            [("weight", &weight), ("exp_avg", &first), ("exp_avg_sq", &second)];
        for (k, ((kind, of), &dtype)) in (0..).zip(of.into_iter().zip(dtypes)) {
            let value = |i: u32| special(i, k).unwrap_or_else(|| of(i)).to_le_bytes();
            let mut data: Vec<u8> = (0..VALUES).flat_map(value).collect();
            if dtype != DType::Float32 {
                let wide = std::mem::replace(&mut data, vec![0; 2 * VALUES as usize]);
                match dtype {
                    DType::BFloat16 => kernels.to_bf16(&wide, &mut data),
                    _ => kernels.to_fp16(&wide, &mut data),
                }
            }
            out.push(Tensor { name: format!("{number}.{kind} in {dtype}"), dtype, data });
        }
    }
    out
}
