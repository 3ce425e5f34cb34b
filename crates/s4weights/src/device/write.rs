//! Writing tensors that lie in device memory.

use std::collections::HashMap;

use rayon::ThreadPool;
use s4_engine::TensorPlan;
use s4_engine::cuda::{CudaEngine, DeviceFrame, DeviceTensor, Planners};

use super::Failure;
use super::parents::Parents;
use crate::error::{At, Result};
use crate::options::{Meter, thread_count};
use crate::parallel::pool;
use crate::pipeline::{ChunkOf, Coded};
use crate::write::{Registered, TensorSource};
use crate::writer::Writer;

impl Writer {
    /// Packs small tensors, in their order.
    pub(crate) fn pack_small(&mut self, small: &[Registered<'_>], meter: &mut Meter) -> Result<()> {
        let Some(engine) = self.options.engine.clone() else { return self.pack_host(small, meter) };
        let there = |(i, t): (usize, &Registered<'_>)| Some((i, vec![t.source.values.memory()?]));
        let (numbers, items): (Vec<_>, Vec<_>) = small.iter().enumerate().filter_map(there).unzip();
        let target = self.name.clone();
        let mut packed = 0;
        let done = engine.fetch::<Failure>(&items, |batch| {
            for &(i, bytes) in batch {
                // Between two that are fetched there are none but the host's.
                self.pack_host(&small[packed..numbers[i]], meter)?;
                let t = &small[numbers[i]];
                self.pack(t.number, bytes, t.source.group)?;
                meter.add(bytes.len() as u64)?;
                packed = numbers[i] + 1;
            }
            Ok(())
        });
        done.map_err(|e| e.named(&target, |i| Some(small[*numbers.get(i)?].source.name)))?;
        self.pack_host(&small[packed..], meter)
    }

    pub(crate) fn write_device(
        &mut self,
        large: &[Registered<'_>],
        meter: &mut Meter,
    ) -> Result<()> {
        let Some(engine) = self.options.engine.clone() else { return Ok(()) };
        let tensors: Vec<_> = large.iter().filter_map(|t| on_device(&t.source)).collect();
        let target = self.name.clone();
        let named = |e: Failure| e.named(&target, |i| Some(large.get(i)?.source.name));
        let numbers: Vec<_> = (large.iter())
            .map(|t| self.parent_of(t.source.name, t.source.dtype, t.source.shape))
            .collect();
        let parent = self.options.parent.clone();
        let pool = pool(thread_count(self.options.threads))?;
        let mut parents =
            parent.as_deref().map(|p| Parents::new(p, pool.as_ref(), &tensors, &numbers));
        let plans = self.plan_device(&engine, &tensors, parents.as_ref(), pool.as_ref());
        let plans = plans.map_err(named)?;
        if let Some(parents) = &mut parents {
            parents.find(&plans)?;
        }
        let mut coded: Vec<(Vec<_>, bool)> = large.iter().map(|_| (vec![], false)).collect();
        self.out.write_behind(thread_count(self.options.threads))?;
        let sink = |frame: DeviceFrame<'_>| {
            let of = ChunkOf {
                dtype: tensors[frame.tensor].dtype,
                bytes: tensors[frame.tensor].memory.bytes(),
                group: large[frame.tensor].source.group,
                plan: &plans[frame.tensor],
                chunk: frame.chunk,
            };
            let record = self.put_chunk(&of, &frame.encoded, frame.bytes, meter)?;
            let (records, shared) = &mut coded[frame.tensor];
            records.push(record);
            *shared |= frame.encoded.shared;
            Ok(())
        };
        let done = match &parents {
            Some(parents) => engine.encode_from::<Failure>(&tensors, &plans, parents, sink),
            None => engine.encode::<Failure>(&tensors, &plans, sink),
        };
        // What the sink says comes before what came of it.
        self.out.write_here()?;
        done.map_err(named)?;
        for ((t, plan), (records, shared)) in large.iter().zip(plans).zip(coded) {
            self.close_tensor(t.number, Coded { plan, records, shared })?;
        }
        Ok(())
    }

    /// Plans tensors on threads, from samples that are fetched in batches.
    fn plan_device(
        &self,
        engine: &CudaEngine,
        tensors: &[DeviceTensor<'_>],
        parents: Option<&Parents<'_>>,
        pool: Option<&ThreadPool>,
    ) -> Result<Vec<TensorPlan>, Failure> {
        let planners = Planners::default();
        let (preset, target) = (self.options.preset, self.name.as_str());
        let mut plans = Vec::with_capacity(tensors.len());
        let differences = parents.map_or(vec![], Parents::candidates);
        engine.samples_from::<Failure>(tensors, &differences, |batch| {
            let numbers: Vec<_> = batch.iter().map(|b| b.0).collect();
            let before = match parents {
                Some(parents) => parents.samples(&numbers)?,
                None => vec![vec![]; batch.len()],
            };
            let before: HashMap<_, _> = numbers.into_iter().zip(before).collect();
            plans.extend(planners.run(pool, batch, |i, sample, scratch| {
                let plan = match parents {
                    Some(parents) => {
                        let before = before.get(&i).map_or(&[][..], Vec::as_slice);
                        parents.plan(engine, preset, i, (sample, before), scratch)
                    }
                    None => {
                        let (dtype, bytes) = (tensors[i].dtype, tensors[i].memory.bytes());
                        engine.plan_sample(preset, dtype, bytes, sample, scratch)
                    }
                };
                plan.at(target)
            })?);
            Ok(())
        })?;
        Ok(plans)
    }
}

fn on_device<'a>(source: &TensorSource<'a>) -> Option<DeviceTensor<'a>> {
    let memory = source.values.memory()?;
    Some(DeviceTensor { dtype: source.dtype, shape: source.shape, memory })
}
