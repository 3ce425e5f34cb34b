//! Plans of device tensors: samples of them are fetched, and planned on the threads of the caller.

use std::ops::Range;

use rayon::ThreadPool;
use s4_codec_gpu::GpuError;

use super::CudaEngine;
use super::error::{CudaError, Result};
use crate::engine::{TensorError, TensorValues, each};
use crate::{DeviceMemory, Inputs, ParentSample, Preset, Scratch, TensorPlan, planner};

impl CudaEngine {
    /// The plan that the CPU engine chooses for the same values.
    pub(super) fn plan_tensors<E: From<CudaError> + Send>(
        &self,
        preset: Preset,
        tensors: &[TensorValues<'_>],
        inputs: &dyn Inputs<E>,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<TensorPlan>, E> {
        let mut runs = vec![];
        for (tensor, t) in tensors.iter().enumerate() {
            let memory = device_memory(t)?;
            runs.push(
                sampled(t, memory, inputs.parent(tensor).is_some()).map_err(CudaError::from)?,
            );
        }
        let mut plans = Vec::with_capacity(tensors.len());
        self.fetch::<E>(&runs, |batch| {
            let numbers: Vec<_> = batch.iter().map(|b| b.0).collect();
            let parents = inputs.samples(&numbers)?;
            let mut work: Vec<_> = batch.iter().copied().zip(parents).map(|w| (w, None)).collect();
            each(pool, &mut work, |(((tensor, sample), parent), plan)| {
                let tensor = *tensor;
                let parent = inputs.parent(tensor).map(|(manifest, number)| ParentSample {
                    manifest,
                    tensor: number,
                    values: parent,
                });
                let cpu = &self.host.cpu;
                let planned = cpu.idle.with(|scratch| {
                    self.plan_sample(preset, &tensors[tensor], sample, parent.as_ref(), scratch)
                });
                *plan = Some(planned.map_err(|source| TensorError { tensor, source }));
            });
            for plan in work.into_iter().filter_map(|w| w.1) {
                plans.push(plan.map_err(CudaError::from)?);
            }
            Ok(())
        })?;
        Ok(plans)
    }

    /// The plan of a tensor whose sample, and whose parent's, were fetched.
    fn plan_sample(
        &self,
        preset: Preset,
        t: &TensorValues<'_>,
        sample: &[u8],
        parent: Option<&ParentSample<'_>>,
        scratch: &mut Scratch,
    ) -> s4_format::Result<TensorPlan> {
        let (cpu, dtype) = (&self.host.cpu, t.dtype);
        let bytes = usize::try_from(t.values.bytes()).unwrap_or(usize::MAX);
        let Some(parent) = parent else {
            return cpu.plan_sample(preset, dtype, bytes, sample, scratch);
        };
        // Both samples are consecutive.
        let width = dtype.value_width() as u64;
        let probes = planner::parent_probes(dtype, t.values.bytes() / width);
        let probed = probes.iter().map(|r| (r.end - r.start) * width).sum::<u64>();
        let at = (sample.len() as u64).saturating_sub(probed) as usize;
        let (direct, probes) = sample.split_at(at);
        let plan = |scratch: &mut Scratch| cpu.plan_sample(preset, dtype, bytes, direct, scratch);
        if preset == Preset::Nvcomp {
            return plan(scratch);
        }
        cpu.plan_difference(dtype, bytes, probes.to_vec(), parent, scratch, plan)
    }
}

/// The runs of values that the planner looks at; with those that it compares with the parent's.
fn sampled(
    t: &TensorValues<'_>,
    memory: DeviceMemory,
    has_parent: bool,
) -> Result<Vec<DeviceMemory>, GpuError> {
    let width = t.dtype.value_width() as u64;
    let values = memory.bytes() / width;
    let probes = if has_parent { planner::parent_probes(t.dtype, values) } else { vec![] };
    let part = |run: Range<u64>| memory.part(run.start * width, (run.end - run.start) * width);
    planner::sampled_runs(values).chain(probes).map(part).collect()
}

/// The memory of a device that a tensor is in.
pub(super) fn device_memory(t: &TensorValues<'_>) -> Result<DeviceMemory> {
    let on_host = || GpuError::Argument("values of the host for a CUDA device".into());
    Ok(t.values.memory().ok_or_else(on_host)?)
}
