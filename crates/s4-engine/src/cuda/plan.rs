//! Plans of many tensors, made in parallel.

use std::sync::{Mutex, MutexGuard};

use rayon::ThreadPool;
use rayon::prelude::*;

use super::error::{CudaError, Of, Result};
use super::{CudaEngine, DeviceTensor};
use crate::{Preset, Scratch, TensorPlan};

/// Plans the samples that [`CudaEngine::samples`] fetches on the threads of a pool.
#[derive(Debug, Default)]
pub struct Planners {
    /// Scratch of as many threads as planned at once.
    idle: Mutex<Vec<Scratch>>,
}

impl Planners {
    /// Calls `plan` with the number and the sample of each tensor of a batch, and with scratch. The
    /// plans are in the batch's order. Without a pool this thread plans.
    ///
    /// # Errors
    /// Those of `plan`.
    pub fn run<E: Send>(
        &self,
        pool: Option<&ThreadPool>,
        batch: &[(usize, &[u8])],
        plan: impl Fn(usize, &[u8], &mut Scratch) -> Result<TensorPlan, E> + Sync,
    ) -> Result<Vec<TensorPlan>, E> {
        let one = |&(tensor, sample): &(usize, &[u8])| {
            let mut scratch = self.lock().pop().unwrap_or_default();
            let planned = plan(tensor, sample, &mut scratch);
            self.lock().push(scratch);
            planned
        };
        match pool {
            Some(pool) if batch.len() > 1 => pool.install(|| batch.par_iter().map(one).collect()),
            _ => batch.iter().map(one).collect(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.idle.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl CudaEngine {
    /// Chooses a plan for each tensor, on the threads of a pool if there is one: the plan that the CPU
    /// engine chooses for the same values.
    ///
    /// # Errors
    /// `Gpu`; errors of a codec.
    pub fn plan(
        &self,
        preset: Preset,
        tensors: &[DeviceTensor<'_>],
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<TensorPlan>> {
        let planners = Planners::default();
        let mut plans = Vec::with_capacity(tensors.len());
        self.samples::<CudaError>(tensors, |batch| {
            plans.extend(planners.run(pool, batch, |tensor, sample, scratch| {
                let DeviceTensor { dtype, memory, .. } = tensors[tensor];
                self.plan_sample(preset, dtype, memory.bytes(), sample, scratch).of(tensor)
            })?);
            Ok(())
        })?;
        Ok(plans)
    }
}
