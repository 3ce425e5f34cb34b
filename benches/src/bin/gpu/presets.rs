//! Preset `balanced` beside `fast`: matrices in device memory as a base, and as a delta one step later.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rayon::ThreadPoolBuilder;
use s4_codec_gpu::DeviceBuffer;
use s4_engine::cuda::{CudaEngine, CudaError, DeviceMemory, Pinned};
use s4_engine::{
    Engine, Input, InputSize, Inputs, Jobs, NoInputs, Preset, TensorValues, parent_probes,
};
use s4_format::{DType, Digest};

use crate::lab::{Lab, Outcome, median};
use crate::path::{Coded, From, ROUNDS, decode};
use crate::report::Group;
use crate::{MODEL, MOMENTS, Tile};

const PRESETS: [Preset; 2] = [Preset::Fast, Preset::Balanced];

/// A matrix of `testdata`, its rows repeated.
struct Matrix {
    shape: [u64; 2],
    /// The values, not repeated.
    data: Vec<u8>,
    there: DeviceBuffer,
}

/// Weights and moments of a step, in about `bytes` bytes of device memory.
fn matrices(lab: &Lab, folder: &Path, dtype: DType, step: u32, bytes: u64) -> Outcome<Vec<Matrix>> {
    let (file, layers) = match dtype {
        DType::Float32 => ("gpt98m_fp32_s", ["h.5.proj", "wte"]),
        _ => ("gpt34m_bf16_s", ["h.4.fc", "wte"]),
    };
    let path = folder.join(format!("{file}{step}.safetensors"));
    let read = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let file = safetensors::SafeTensors::deserialize(&read)?;
    let mut out = vec![];
    for part in [MODEL, MOMENTS[0], MOMENTS[1]] {
        for layer in layers {
            let tensor = file.tensor(&format!("{part}.{layer}.weight"))?;
            let [rows, cols] = tensor.shape() else { return Err("not a matrix".into()) };
            let data = tensor.data().to_vec();
            let times = (bytes / 6 / data.len() as u64).max(1);
            let there = lab.fill(&data, times * data.len() as u64)?;
            out.push(Matrix { shape: [*rows as u64 * times, *cols as u64], data, there });
        }
    }
    Ok(out)
}

/// The matrices of the step before, in device memory.
struct Parents<'a> {
    lab: &'a Lab,
    dtype: DType,
    matrices: &'a [Matrix],
}

impl Parents<'_> {
    fn memory_of(&self, tensor: usize) -> DeviceMemory {
        self.lab.memory(&self.matrices[tensor].there)
    }

    /// The bytes of a run of values of the repeated matrix.
    fn run(&self, tensor: usize, run: Range<u64>) -> impl Iterator<Item = u8> {
        let (data, width) = (&self.matrices[tensor].data, self.dtype.size() as u64);
        (run.start * width..run.end * width).map(move |i| data[i as usize % data.len()])
    }
}

impl Inputs<CudaError> for Parents<'_> {
    fn parent(&self, tensor: usize) -> Option<(Digest, u32)> {
        Some((Digest([7; 32]), tensor as u32))
    }

    fn samples(&self, tensors: &[usize]) -> Result<Vec<Vec<u8>>, CudaError> {
        let sample = |&tensor: &usize| {
            let probes = parent_probes(self.dtype, self.matrices[tensor].shape.iter().product());
            probes.into_iter().flat_map(|run| self.run(tensor, run)).collect()
        };
        Ok(tensors.iter().map(sample).collect())
    }

    fn memory(&self) -> Vec<DeviceMemory> {
        (0..self.matrices.len()).map(|i| self.memory_of(i)).collect()
    }

    fn size(&self, _: usize, _: u64) -> InputSize {
        InputSize::default()
    }

    fn open(&self, chunks: &[(usize, u64)]) -> Result<Vec<Input<'_>>, CudaError> {
        let one = |&(tensor, chunk): &(usize, u64)| {
            let memory = self.memory_of(tensor);
            let size = (self.dtype.size() as u64) << s4_engine::chunk_log2(self.dtype);
            let len = size.min(memory.bytes() - chunk * size);
            Ok(Input::Device(memory.part(chunk * size, len)?))
        };
        chunks.iter().map(one).collect()
    }
}

/// Both presets, with matrices as a base and as a delta of those of the step before.
pub(crate) fn measure(lab: &Lab, folder: &Path, tile: &Tile, bytes: u64) -> Outcome<Vec<Group>> {
    let dtype = tile.dtype;
    let before = matrices(lab, folder, dtype, 0, bytes)?;
    let after = matrices(lab, folder, dtype, 1, bytes)?;
    let parents = Parents { lab, dtype, matrices: &before };
    let bytes = before.iter().map(|m| m.there.bytes()).sum();
    let mut groups = vec![];
    for (title, matrices, inputs) in [
        ("presets, weights and moments", &before, None),
        ("presets, weights and moments a step later", &after, Some(&parents)),
    ] {
        let mut group = Group::new(title, tile.name, bytes, "device copy");
        let to =
            matrices.iter().map(|m| lab.alloc(m.there.bytes())).collect::<Outcome<Vec<_>>>()?;
        let copy = lab.time(|| copy(lab, matrices, &to))?;
        group.ceilings(copy, copy);
        for preset in PRESETS {
            row(lab, dtype, preset, matrices, inputs, &to, &mut group)?;
        }
        eprintln!("{}", group.text());
        groups.push(group);
    }
    Ok(groups)
}

fn copy(lab: &Lab, from: &[Matrix], to: &[DeviceBuffer]) -> Outcome<()> {
    for (from, to) in from.iter().zip(to) {
        let (from, to, len) = (from.there.address(), to.address(), from.there.bytes());
        // SAFETY: two buffers of `len` bytes, used by this stream alone.
        unsafe { lab.stream.copy_within_device(from, to, len) }?;
    }
    Ok(())
}

fn row(
    lab: &Lab,
    dtype: DType,
    preset: Preset,
    matrices: &[Matrix],
    parents: Option<&Parents<'_>>,
    to: &[DeviceBuffer],
    group: &mut Group,
) -> Outcome<()> {
    let tensors: Vec<_> =
        matrices.iter().map(|m| TensorValues::new(dtype, &m.shape, lab.memory(&m.there))).collect();
    let targets: Vec<_> = to.iter().map(|to| lab.memory(to)).collect();
    let inputs: &dyn Inputs<CudaError> = match parents {
        Some(parents) => parents,
        None => &NoInputs,
    };
    let engine = CudaEngine::new(lab.cuda.clone(), lab.options);
    let pool = ThreadPoolBuilder::new().build()?;
    let (mut planned, mut encoded, mut decoded, mut plans) = (vec![], vec![], vec![], vec![]);
    for _ in 0..=ROUNDS {
        let started = Instant::now();
        plans = engine.plan::<CudaError>(preset, &tensors, inputs, Some(&pool))?;
        planned.push(started.elapsed().as_secs_f64());
        let started = Instant::now();
        engine.encode(&Jobs { inputs, ..Jobs::new(&tensors, &plans) }, |_| Ok(()))?;
        encoded.push(started.elapsed().as_secs_f64());
    }
    let coded = Coded::collect(&engine, &Jobs { inputs, ..Jobs::new(&tensors, &plans) })?;
    let pinned = Arc::new(Pinned::new(&lab.device, coded.bytes.len())?);
    // SAFETY: nothing else uses it.
    unsafe { pinned.slice_mut(0, coded.bytes.len()) }.copy_from_slice(&coded.bytes);
    for _ in 0..=ROUNDS {
        match parents {
            Some(parents) => copy(lab, parents.matrices, to)?,
            None => to
                .iter()
                // SAFETY: the buffers are used by this stream alone.
                .try_for_each(|to| unsafe { lab.stream.fill(to.address(), 0xee, to.bytes()) })?,
        }
        lab.stream.synchronize()?;
        let started = Instant::now();
        decode(&engine, &tensors, &plans, &coded, From::Pinned(&pinned), &targets)?;
        decoded.push(started.elapsed().as_secs_f64());
    }
    for (to, matrix) in to.iter().zip(matrices) {
        if !lab.holds(to, &matrix.data)? {
            return Err(format!("what preset `{}` gives back differs", preset.name()).into());
        }
    }
    let chunks = engine.chunks();
    let plans: Vec<_> = plans.iter().map(|p| p.plan.predictor.to_string()).collect();
    let [planned, encoded, decoded] =
        [planned, encoded, decoded].map(|times| 1e3 * median(times[1..].to_vec()));
    let name = format!(
        "`{}` ({}); {planned:.1} ms to plan; {} chunks by the CPU",
        preset.name(),
        plans.join(", "),
        chunks.host + chunks.refused
    );
    let bytes: u64 = matrices.iter().map(|m| m.there.bytes()).sum();
    let ratio = bytes as f64 / coded.stored as f64;
    group.row(&name, Some(encoded / 1e3), Some(decoded / 1e3), Some(ratio));
    Ok(())
}
